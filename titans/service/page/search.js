// Search as you type, with the parts of each score.

import { call } from "./api.js";
import { $, after, complain, count, make, meter, say, surpriseMark, time } from "./dom.js";
import { item, labels, textOf } from "./details.js";
import { scope } from "./scope.js";

const WAIT = 120; // milliseconds without a key before a search
let running = new AbortController();

const threshold = () => ($("threshold").valueAsNumber < 0 ? null : $("threshold").valueAsNumber);

export async function refresh() {
  running.abort();
  running = new AbortController();
  const query = $("query").value.trim();
  if (!query) return show(null);
  const { signal } = running;
  $("results").setAttribute("aria-busy", "true");
  try {
    const found = await call("POST", "search", { body: { query, ...scope(), limit: 20, threshold: threshold() }, signal });
    complain(null);
    show(found);
  } catch (error) {
    complain(error);
  } finally {
    if (!signal.aborted) $("results").removeAttribute("aria-busy");
  }
}

function show(found) {
  const results = found?.results ?? [];
  const best = Math.max(...results.map((each) => each.parts.bm25 ?? 0), 1e-9);
  $("results").replaceChildren(...results.map((each) => result(each, best)));
  $("explain").hidden = !results.length;
  const notes = found ? [count(results.length, "result")] : ["Results appear while you type."];
  if (found?.below) notes.push(`${found.below.toLocaleString("en")} fell below the cosine of ${threshold().toFixed(2)}`);
  if (found?.ignored.length) notes.push(`too common to look up: ${found.ignored.join(", ")}`);
  $("search-notes").textContent = notes.join(" · ");
  if (found) say(notes.join(". "));
}

function result(memory, best) {
  const { cosine, bm25, neural, cosine_rank, bm25_rank, neural_rank } = memory.parts;
  const rank = (place) => (place === null ? "" : `#${place}`);
  const value = (number, digits) => (number === null ? "–" : number.toFixed(digits));
  return item(memory, {},
    make("div", { class: "body" },
      textOf(memory),
      make("p", { class: "meta" }, surpriseMark(memory.surprise), time(memory.created_at), labels(memory),
        memory.replaced_by && make("span", { class: "outdated" }, "a newer version exists"))),
    make("div", { class: "parts", role: "group", "aria-label": `Score ${memory.score.toFixed(2)}` },
      make("p", { class: "score" }, make("span", {}, "Score"), make("strong", {}, memory.score.toFixed(2))),
      meter("Meaning", "meaning", value(cosine, 2), cosine, rank(cosine_rank)),
      meter("Words", "words", value(bm25, 1), (bm25 ?? 0) / best, rank(bm25_rank)),
      meter("Memory", "neural", value(neural, 2), neural ?? 0, rank(neural_rank))));
}

export function start() {
  const soon = after(WAIT, refresh);
  $("query").addEventListener("input", soon);
  $("query").addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      event.preventDefault();
      $("query").value = "";
      refresh();
    }
    if (event.key === "ArrowDown") {
      event.preventDefault();
      $("results").querySelector(".open")?.focus();
    }
  });
  $("query").form.addEventListener("submit", (event) => {
    event.preventDefault();
    refresh();
  });
  $("threshold").addEventListener("input", () => {
    const least = threshold();
    $("threshold-value").textContent = least === null ? "any" : least.toFixed(2);
    $("threshold").setAttribute("aria-valuetext", least === null ? "any" : least.toFixed(2));
    soon();
  });
  show(null);
}

export const focus = () => $("query").focus();
