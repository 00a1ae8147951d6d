// The memories of a scope, newest first, page by page; shape and colour say how surprising each was.

import { call, requestName } from "./api.js";
import { $, clock, complain, count, day, draw, level, levels, make, quoted, say, sentence, surpriseMark } from "./dom.js";
import { item, labels, textOf } from "./details.js";
import { scope } from "./scope.js";

const AT_A_TIME = 100;
const MOST = 1000; // that the server gives at a time
const ROW = 68; // pixels of a memory of one line
const DRAWN = 240; // marks of the overview, the newest that were loaded
const HEAD = 0.1; // height of a mark, where its surprise is; the stem below it is faint
let running = new AbortController();
let next = null;
let loaded = [];

// After a change as many as before are shown, so that the place in the list is not lost.
export async function refresh(again = false) {
  running.abort();
  running = new AbortController();
  next = null;
  await load(running.signal, true, again ? Math.min(MOST, Math.max(AT_A_TIME, loaded.length)) : AT_A_TIME);
}

async function load(signal, anew = false, limit = AT_A_TIME) {
  $("older").disabled = true;
  try {
    const page = await call("GET", "memories", { query: { ...scope(), limit, cursor: next }, signal });
    if (anew) {
      $("days").replaceChildren();
      loaded = [];
    }
    complain(null);
    next = page.next;
    append(page.results);
    loaded.push(...page.results);
    overview();
    $("older").hidden = next === null;
    if (!loaded.length) $("days").append(make("p", { class: "empty" }, "There are no memories of this scope yet."));
    say(anew ? `${count(loaded.length, "memory", "memories")} shown.` : `${count(page.results.length, "older memory", "older memories")} shown.`);
  } catch (error) {
    complain(error);
  } finally {
    if (!signal.aborted) $("older").disabled = false;
  }
}

// A list for each page and day, which the browser leaves undrawn while it is out of sight.
function append(memories) {
  let list = null;
  let name = $("days").lastElementChild?.querySelector("h2")?.textContent;
  for (const memory of memories) {
    const today = day(memory.created_at);
    if (today !== name) $("days").append(make("section", { class: "day" }, make("h2", {}, today)));
    if (today !== name || !list) {
      name = today;
      list = make("ol", { class: "line", "aria-label": name });
      $("days").lastElementChild.append(list);
    }
    list.append(item(memory, { class: `memory level-${level(memory.surprise)}` },
      make("i", { class: `dot level-${level(memory.surprise)}`, "aria-hidden": "true" }),
      make("div", { class: "body" },
        textOf(memory),
        make("p", { class: "meta" }, clock(memory.created_at), surpriseMark(memory.surprise), labels(memory),
          memory.replaces && make("span", {}, "a newer version")))));
    list.style.containIntrinsicHeight = `auto ${ROW * list.childElementCount}px`;
  }
}

function overview() {
  const drawn = loaded.slice(0, DRAWN).reverse();
  const figure = $("overview");
  figure.hidden = drawn.length < 2;
  const svg = figure.querySelector("svg");
  const width = Math.max(drawn.length, 60);
  const values = drawn.map((memory) => memory.surprise);
  const least = Math.floor(10 * Math.min(...values)) / 10;
  const most = Math.max(least + 0.1, Math.ceil(10 * Math.max(...values) - 0.05) / 10);
  svg.setAttribute("viewBox", `0 0 ${width} 1`);
  svg.replaceChildren(...drawn.map((memory, index) => {
    const y = (1 - HEAD) * (most - memory.surprise) / (most - least);
    const x = width - drawn.length + index;
    const mark = draw("g", { class: `level-${level(memory.surprise)}` });
    const title = draw("title", {});
    title.textContent = `${memory.surprise.toFixed(2)} ${quoted(memory.memory)}`;
    mark.append(title, draw("rect", { x: x + 0.1, y, width: 0.8, height: 1 - y, class: "stem" }), draw("rect", { x: x + 0.1, y, width: 0.8, height: HEAD }));
    mark.addEventListener("click", () => reveal(memory.id));
    return mark;
  }));
  figure.querySelector("figcaption").textContent =
    `Surprise of the newest ${count(drawn.length, "memory", "memories")}, from ${least.toFixed(1)} to ${most.toFixed(1)}, the latest on the right`;
}

function reveal(id) {
  const button = $("days").querySelector(`[data-id="${CSS.escape(id)}"] .open`);
  button?.scrollIntoView({ block: "center" });
  button?.focus({ preventScroll: true });
}

async function add(event) {
  event.preventDefault();
  const field = $("new-text");
  try {
    const { results } = await call("POST", "memories", {
      body: { text: field.value, ...scope() }, headers: { "Idempotency-Key": requestName() },
    });
    field.value = "";
    document.dispatchEvent(new CustomEvent("memories-changed"));
    say(results[0].event === "REPEAT" ? "This was known already." : sentence(`remembered; its surprise was ${results[0].surprise.toFixed(2)}`));
  } catch (error) {
    complain(error);
  }
}

export function start() {
  $("legend").append(make("span", {}, "Surprise:"), ...levels.map(({ name, range }, index) => make("span", {},
    make("i", { class: `dot level-${index}`, "aria-hidden": "true" }), `${name} `, make("small", {}, range))));
  $("add").addEventListener("submit", add);
  $("older").addEventListener("click", () => load(running.signal));
  new IntersectionObserver((seen) => {
    if (seen.some((each) => each.isIntersecting) && next !== null && !$("older").disabled) load(running.signal);
  }, { rootMargin: "600px" }).observe($("older"));
}

export const focus = () => $("new-text").focus();
