// A memory on its own: what is known of it, its versions, and how to change or erase it.

import { call } from "./api.js";
import { $, clock, complain, confirm, count, cut, day, make, quoted, say, sentence, surpriseMark, time } from "./dom.js";

const EVENTS = { ADD: "Told", REPEAT: "Told again", UPDATE: "Changed", DELETE: "Erased", EVICT: "Evicted" };

const path = (memory) => `memories/${encodeURIComponent(memory.id)}`;
const owner = (memory) => ({ user_id: memory.user_id });
const changed = (text) => {
  say(text);
  document.dispatchEvent(new CustomEvent("memories-changed"));
};

export const textOf = (memory, props = {}) => make("p", { class: "text", dir: "auto", ...props }, cut(memory.memory));

// A memory in a list; a click anywhere opens it unless text is being selected.
export function item(memory, more = {}, ...parts) {
  const open = () => showDetails(memory);
  const button = make("button", { type: "button", class: "open", "aria-label": `Details of ${quoted(memory.memory)}`, onclick: open }, "Details");
  const clicked = (event) => {
    if (!event.target.closest("button, a") && !String(getSelection())) open();
  };
  return make("li", { class: "memory", "data-id": memory.id, onclick: clicked, ...more }, ...parts, button);
}

export const labels = (memory) => make("span", { class: "labels" },
  memory.role && make("span", {}, memory.role),
  memory.agent_id && make("span", {}, `agent ${memory.agent_id}`),
  memory.run_id && make("span", {}, `run ${memory.run_id}`),
  memory.version > 1 && make("span", {}, `version ${memory.version}`),
  memory.repeats > 0 && make("span", {}, `told ${memory.repeats + 1} times`));

export async function showDetails(memory) {
  const dialog = $("details");
  dialog.dataset.id = memory.id;
  $("details-title").textContent = "Memory";
  $("details-body").replaceChildren(...body(memory));
  if (!dialog.open) dialog.showModal();
  dialog.scrollTop = 0;
  try {
    const { results } = await call("GET", `${path(memory)}/history`, { query: owner(memory) });
    $("details-body").querySelector(".versions")?.replaceChildren(...results.map((event) => version(event, memory)));
  } catch (error) {
    $("details-body").querySelector(".versions")?.replaceChildren(make("li", {}, sentence(error.message)));
  }
}

export async function openById(id, user, known = {}) {
  try {
    await showDetails({ ...(await call("GET", `memories/${encodeURIComponent(id)}`, { query: { user_id: user } })), ...known });
  } catch (error) {
    say(sentence(error.message));
    complain(error);
  }
}

const link = (text, action) => make("button", { type: "button", class: "link", onclick: action }, text);

function body(memory) {
  const facts = [
    ["Told", time(memory.created_at)],
    memory.updated_at !== memory.created_at && ["Last changed", time(memory.updated_at)],
    ["Surprise", surpriseMark(memory.surprise)],
    ["Scope", `user ${memory.user_id}${memory.agent_id ? `, agent ${memory.agent_id}` : ""}${memory.run_id ? `, run ${memory.run_id}` : ""}`],
    memory.role && ["Said by", memory.role],
    ["Found", count(memory.uses, "time")],
    memory.repeats > 0 && ["Told again", count(memory.repeats, "time")],
    Object.keys(memory.metadata).length > 0 && ["Metadata", make("code", {}, cut(JSON.stringify(memory.metadata)))],
    memory.replaces && ["Replaces", link("the older version", () => openById(memory.replaces, memory.user_id, { replaced_by: memory.id }))],
    memory.replaced_by && ["Replaced by", link("a newer version", () => openById(memory.replaced_by, memory.user_id))],
    ["Id", make("code", {}, memory.id)],
  ].filter(Boolean);
  return [
    make("p", { class: "text full", dir: "auto", tabindex: "0", role: "group", "aria-label": "Text" }, memory.memory),
    make("div", { class: "row" },
      make("button", { type: "button", onclick: () => edit(memory) }, "Edit"),
      make("button", { type: "button", class: "danger quiet", onclick: () => erase(memory) }, "Erase")),
    make("dl", { class: "facts" }, ...facts.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)])),
    make("h3", {}, "Versions"),
    make("ol", { class: "versions" }, make("li", { class: "soft" }, "Loading…")),
  ];
}

function version(event, memory) {
  const older = event.id !== memory.id;
  return make("li", {},
    make("p", { class: "version-head" },
      make("strong", {}, EVENTS[event.event] ?? event.event), ` version ${event.version} · ${day(event.at)}, `, clock(event.at),
      older && " · ", older && link("older memory", () => openById(event.id, memory.user_id, { replaced_by: memory.id }))),
    event.memory === null
      ? make("p", { class: "soft" }, "The text was erased.")
      : make("p", { class: "text", dir: "auto" }, cut(event.memory)));
}

function edit(memory) {
  const text = make("textarea", { rows: "5", dir: "auto", required: true, "aria-label": "New text" });
  text.value = memory.memory;
  const keep = make("input", { type: "checkbox" });
  const problem = make("p", { class: "problem", role: "alert" });
  const save = async (event) => {
    event.preventDefault();
    if (text.value === memory.memory) return showDetails(memory);
    const lost = keep.checked
      ? "The old text stays in the history. A search finds only the new one."
      : "The old text is erased for good. There is no undo.";
    if (!(await confirm("Replace this text?", lost, text.value, "Replace"))) return text.focus();
    try {
      const made = await call("PUT", path(memory), { query: owner(memory), body: { text: text.value, keep_old: keep.checked } });
      changed("The text was replaced.");
      await showDetails(made);
    } catch (error) {
      problem.textContent = sentence(error.message);
    }
  };
  $("details-title").textContent = "Edit the memory";
  $("details-body").replaceChildren(make("form", { class: "edit", onsubmit: save },
    text,
    make("label", { class: "check" }, keep, " Keep the old text in the history"),
    problem,
    make("div", { class: "row end" },
      make("button", { type: "button", onclick: () => showDetails(memory) }, "Cancel"),
      make("button", { class: "primary" }, "Save…"))));
  text.focus();
}

async function erase(memory) {
  const warning = "Its text is erased for good, also from the history. There is no undo.";
  if (!(await confirm("Erase this memory?", warning, memory.memory, "Erase for good"))) return;
  try {
    await call("DELETE", path(memory), { query: owner(memory) });
    $("details").close();
    changed("The memory was erased.");
  } catch (error) {
    $("details-body").prepend(make("p", { class: "problem", role: "alert" }, sentence(error.message)));
  }
}
