// Whose memories are shown: the three fields, and the names that the store has.

import { call } from "./api.js";
import { $, complain, count, make } from "./dom.js";

const KEPT = "titans-scope";
const LISTS = { user_id: "users", agent_id: "agents", run_id: "runs" };
const MOST = 500; // names that a field offers
let scopes = [];

const field = (name) => $("scope").elements[name];

export function scope() {
  const names = Object.keys(LISTS).map((name) => [name, field(name).value.trim()]);
  return Object.fromEntries(names.filter(([, value]) => value));
}

export const sameScope = (one, other) => Object.keys(LISTS).every((name) => (one[name] ?? "") === (other[name] ?? ""));

const covers = (wide, other, names) => names.every((name) => !wide[name] || wide[name] === other[name]);

export const covered = () => scopes.filter((each) => covers(scope(), each, Object.keys(LISTS)));

export async function refreshScopes() {
  const stats = await call("GET", "stats");
  scopes = stats.by_scope;
  const users = new Set(scopes.map((each) => each.user_id));
  if (!field("user_id").value && users.size && !users.has("default")) [field("user_id").value] = users;
  show();
}

function show() {
  const chosen = scope();
  const names = Object.keys(LISTS);
  names.forEach((name, index) => {
    const known = scopes.filter((each) => covers(chosen, each, names.slice(0, index))).map((each) => each[name]);
    const options = [...new Set(known)].filter((value) => value !== null).sort().slice(0, MOST);
    $(LISTS[name]).replaceChildren(...options.map((value) => make("option", { value })));
  });
  const user = chosen.user_id ?? "default";
  const own = scopes.filter((each) => covers({ ...chosen, user_id: user }, each, names));
  $("count").textContent = count(own.reduce((sum, each) => sum + each.records, 0), "memory", "memories");
}

export function start(changed) {
  const kept = JSON.parse(sessionStorage.getItem(KEPT) ?? "{}");
  for (const name of Object.keys(LISTS)) field(name).value = kept[name] ?? "";
  $("scope").addEventListener("submit", (event) => event.preventDefault());
  $("scope").addEventListener("change", () => {
    sessionStorage.setItem(KEPT, JSON.stringify(scope()));
    complain(null);
    show();
    changed();
  });
}
