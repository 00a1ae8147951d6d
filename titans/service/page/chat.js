// A chat through the server: which memories an answer was given, and how surprising each message was.

import { asHeader, call, events, send } from "./api.js";
import { $, complain, count, make, quoted, say, sentence, surpriseMark } from "./dom.js";
import { openById } from "./details.js";
import { scope } from "./scope.js";

const SHOWN = 5; // memories of an answer that are listed without being asked for
const HEADERS = { user_id: "X-Memory-User", agent_id: "X-Memory-Agent", run_id: "X-Memory-Session" };
let messages = [];
let running = null;
let asked = false; // for the models

export async function refresh() {
  if (asked) return;
  asked = true;
  try {
    const { data } = await call("GET", "v1/models");
    $("model").replaceChildren(...data.map(({ id }) => make("option", { value: id }, id)));
  } catch (error) {
    asked = false;
    complain(error);
  }
}

export function forget() {
  stop();
  messages = [];
  $("talk").replaceChildren(make("p", { class: "empty" }, "What you write is answered with the memories that fit it, which are listed below each answer."));
}

export const stop = () => running?.abort();

function show(role, text) {
  const content = make("p", { class: "text", dir: "auto" }, text);
  const notes = make("div", { class: "meta" });
  $("talk").querySelector(".empty")?.remove();
  const who = role === "user" ? "You" : "Answer";
  const line = make("article", { class: `said ${role}`, "aria-label": who }, make("strong", { class: "who" }, who), content, notes);
  $("talk").append(line);
  line.scrollIntoView({ block: "end" });
  return { content, notes, line };
}

async function answer(text) {
  const mine = show("user", text);
  const theirs = show("assistant", "");
  theirs.line.setAttribute("aria-busy", "true");
  messages.push({ role: "user", content: text });
  running = new AbortController();
  busy(true);
  const whose = scope();
  const headers = { "X-Memory": $("remember").checked ? "on" : "read-only" };
  for (const [name, value] of Object.entries(whose)) headers[HEADERS[name]] = asHeader(value);
  let said = "";
  try {
    const response = await send("POST", "v1/chat/completions", {
      headers, signal: running.signal,
      body: { model: $("model").value || "default", messages, stream: true },
    });
    explain(response.headers, whose, mine, theirs);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message ?? "the answer broke off");
      said += event.choices?.[0]?.delta?.content ?? "";
      theirs.content.textContent = said;
      keepInView();
    }
    say(`Answer: ${said}`);
  } catch (error) {
    const why = error.name === "AbortError" ? "stopped" : error.message;
    theirs.notes.prepend(make("span", { class: "problem" }, sentence(why)));
    say(sentence(why));
  } finally {
    if (said) messages.push({ role: "assistant", content: said });
    else messages.pop();
    theirs.line.removeAttribute("aria-busy");
    running = null;
    busy(false);
    if ($("remember").checked) document.dispatchEvent(new CustomEvent("memories-changed"));
  }
}

function explain(headers, whose, mine, theirs) {
  const surprise = headers.get("X-Memory-Surprise");
  if (surprise !== null) mine.notes.append(make("span", { "aria-hidden": "true" }, "Surprise"), surpriseMark(Number(surprise)));
  else if (!$("remember").checked) mine.notes.append(make("span", {}, "not remembered"));
  const status = headers.get("X-Memory-Status") ?? "";
  if (status.startsWith("failed")) theirs.notes.append(make("span", { class: "problem" }, sentence(`the memory ${status}`)));
  const ids = (headers.get("X-Memory-Ids") ?? "").split(",").filter(Boolean).map(decodeURIComponent);
  const list = make("ul", { class: "used" });
  theirs.notes.append(ids.length
    ? make("details", { open: ids.length <= SHOWN }, make("summary", {}, `${count(ids.length, "memory", "memories")} used`), list)
    : make("span", {}, "no memories used"));
  ids.forEach(async (id) => {
    const line = make("li", {});
    list.append(line);
    try {
      const memory = await call("GET", `memories/${encodeURIComponent(id)}`, { query: { user_id: whose.user_id } });
      line.append(make("button", { type: "button", class: "link", dir: "auto", onclick: () => openById(id, memory.user_id) }, quoted(memory.memory)));
    } catch (error) {
      line.append(sentence(error.message));
    }
  });
}

function keepInView() {
  const left = document.documentElement.scrollHeight - scrollY - innerHeight;
  if (left < 200) scrollTo(0, document.documentElement.scrollHeight);
}

function busy(is) {
  $("send").disabled = is;
  $("stop").hidden = !is;
}

export function start() {
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = $("message").value.trim();
    if (!text || running) return;
    $("message").value = "";
    complain(null);
    answer(text);
  });
  $("message").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      $("composer").requestSubmit();
    }
  });
  $("stop").addEventListener("click", stop);
  $("fresh").addEventListener("click", () => {
    forget();
    $("message").focus();
  });
  forget();
}

export const focus = () => $("message").focus();
