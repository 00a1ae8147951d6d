// The frame of the page: views, key, theme and shortcuts.

import { keep, key } from "./api.js";
import * as chat from "./chat.js";
import { $, complain, sentence } from "./dom.js";
import * as scope from "./scope.js";
import * as search from "./search.js";
import * as state from "./state.js";
import * as timeline from "./timeline.js";

const VIEWS = { search, timeline, chat, state };
const NAMES = Object.keys(VIEWS);
let shown = "search";

function select(name) {
  shown = name;
  for (const each of NAMES) {
    const selected = each === name;
    $(each).hidden = !selected;
    $(`tab-${each}`).setAttribute("aria-selected", selected);
    $(`tab-${each}`).tabIndex = selected ? 0 : -1;
  }
  history.replaceState(null, "", `#${name}`);
}

function show(name) {
  select(name);
  complain(null);
  VIEWS[name].refresh();
}

async function refresh(again = false) {
  try {
    await scope.refreshScopes();
  } catch (error) {
    return complain(error);
  }
  await VIEWS[shown].refresh(again);
  if (again) restoreFocus();
}

// What had the focus may have been drawn anew, or erased.
function restoreFocus() {
  if (document.activeElement !== document.body || document.querySelector("dialog[open]")) return;
  const { id } = $("details").dataset;
  const place = id && $(shown).querySelector(`[data-id="${CSS.escape(id)}"] .open`);
  (place || $("main")).focus({ preventScroll: true });
}

function askForKey(problem) {
  $("key-text").textContent = problem ? sentence(problem.message) : key() ? "A key is in use." : "No key is in use.";
  $("key-field").value = "";
  $("key-forget").hidden = !key();
  if (!$("key").open) $("key").showModal();
  $("key-field").focus();
}

function useKey(value) {
  keep(value);
  $("key-open").textContent = key() ? "Key ✓" : "Key";
  $("key").close();
  complain(null);
  refresh();
}

function setTheme(value) {
  if (value) document.documentElement.dataset.theme = value;
  else delete document.documentElement.dataset.theme;
  $("theme").value = value;
}

function tabKeys(event) {
  const place = NAMES.indexOf(shown);
  const to = { ArrowRight: place + 1, ArrowLeft: place - 1, Home: 0, End: -1 }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  const name = NAMES.at(to % NAMES.length);
  show(name);
  $(`tab-${name}`).focus();
}

// Arrows go from memory to memory; above the first is the search field.
function listKeys(event) {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (!step || !event.target.matches(".open")) return;
  event.preventDefault();
  const all = [...event.target.closest("[role=tabpanel]").querySelectorAll(".open")];
  const next = all[all.indexOf(event.target) + step];
  if (next) next.focus();
  else if (step < 0) VIEWS[shown].focus();
}

function shortcuts(event) {
  if (event.key === "Escape" && shown === "chat") chat.stop();
  const typing = event.target.matches("input:not([type=checkbox], [type=range]), textarea, select");
  if (typing || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]") || !$("use-shortcuts").checked) return;
  const view = event.key === "/" ? "search" : NAMES[Number(event.key) - 1];
  if (view) {
    show(view);
    VIEWS[view].focus();
  } else if (event.key === "?") $("shortcuts").showModal();
  else if (event.key === "u") $("scope").elements.user_id.focus();
  else return;
  event.preventDefault();
}

function start() {
  setTheme(localStorage.getItem("titans-theme") ?? "");
  $("theme").addEventListener("change", () => {
    localStorage.setItem("titans-theme", $("theme").value);
    setTheme($("theme").value);
  });
  $("use-shortcuts").checked = localStorage.getItem("titans-shortcuts") !== "off";
  $("use-shortcuts").addEventListener("change", () => localStorage.setItem("titans-shortcuts", $("use-shortcuts").checked ? "on" : "off"));
  for (const name of NAMES) $(`tab-${name}`).addEventListener("click", () => show(name));
  document.querySelector("[role=tablist]").addEventListener("keydown", tabKeys);
  document.addEventListener("keydown", listKeys);
  document.addEventListener("keydown", shortcuts);
  for (const button of document.querySelectorAll("dialog .close")) {
    button.addEventListener("click", () => button.closest("dialog").close());
  }
  $("shortcuts-open").addEventListener("click", () => $("shortcuts").showModal());
  $("key-open").addEventListener("click", () => askForKey());
  $("key-open").textContent = key() ? "Key ✓" : "Key";
  $("key-forget").addEventListener("click", () => useKey(""));
  $("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    useKey($("key-field").value.trim());
  });
  document.addEventListener("key-wanted", (event) => askForKey(event.detail));
  document.addEventListener("memories-changed", () => refresh(true));
  $("details").addEventListener("close", restoreFocus);
  scope.start(() => {
    chat.forget();
    VIEWS[shown].refresh();
  });
  for (const view of Object.values(VIEWS)) view.start();
  const wanted = location.hash.slice(1);
  select(NAMES.includes(wanted) ? wanted : "search");
  refresh();
}

start();
