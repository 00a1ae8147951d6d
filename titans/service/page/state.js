// The neural memory of exactly one scope: its figures, and what it expects of a text.

import { call } from "./api.js";
import { $, after, complain, count, level, levels, make, meter, sentence } from "./dom.js";
import { openById } from "./details.js";
import { covered, sameScope, scope } from "./scope.js";

const WAIT = 200; // milliseconds without a key before a text is asked about
let exact = [];
let running = new AbortController();

const chosen = () => exact[$("exact").selectedIndex] ?? scope();
const names = ({ user_id, agent_id, run_id }) => ({ user_id, agent_id, run_id });
const title = ({ user_id, agent_id, run_id, records }) =>
  `${user_id} · ${agent_id ?? "no agent"} · ${run_id ?? "no run"} (${records.toLocaleString("en")})`;

export async function refresh() {
  const before = chosen();
  exact = covered();
  $("exact").replaceChildren(...exact.map((each) => make("option", {}, title(each))));
  if (!exact.length) $("exact").append(make("option", {}, "nothing was told here yet"));
  $("exact").selectedIndex = Math.max(0, exact.findIndex((each) => sameScope(each, before)));
  await Promise.all([describe(), assess()]);
}

async function describe() {
  try {
    const state = await call("GET", "state", { query: names(chosen()) });
    const figures = [
      ["Texts", state.texts.toLocaleString("en")],
      ["In the open chunk", `${state.open} of ${state.chunk_size}`],
      ["Step θ", state.theta],
      ["Momentum η", state.eta],
      ["Forgetting α", state.alpha],
    ];
    $("figures").replaceChildren(...figures.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
    const most = Math.max(1e-9, ...state.layers.flatMap((layer) => [layer.norm, layer.learned, layer.momentum]));
    const bar = (name, kind, value) => meter(name, kind, value.toFixed(3), value / most);
    $("layers").replaceChildren(...state.layers.map((layer, index) => make("li", {},
      make("h3", {}, `Layer ${index + 1}`, make("span", { class: "soft" }, ` ${layer.shape.join(" × ")}`)),
      bar("Weights", "meaning", layer.norm),
      bar("Learned from the texts", "words", layer.learned),
      bar("Momentum", "neural", layer.momentum))));
    complain(null);
  } catch (error) {
    complain(error);
  }
}

async function assess() {
  running.abort();
  running = new AbortController();
  const text = $("statement").value.trim();
  if (!text) return $("surprise").replaceChildren();
  const whose = chosen();
  try {
    const parts = await call("POST", "surprise", { body: { text, ...names(whose) }, signal: running.signal });
    const index = level(parts.loss);
    const row = (name, kind, value, most, words) => make("div", { class: "part" }, meter(name, kind, value.toFixed(2), value / most), make("p", { class: "soft small" }, words));
    $("surprise").replaceChildren(
      make("p", { class: "verdict" }, make("i", { class: `dot level-${index}`, "aria-hidden": "true" }), sentence(levels[index].name)),
      row("Loss", `level-${index}`, parts.loss, 1, "What the memory does not predict. It falls with every repetition."),
      row("Drift", "meaning", parts.drift, 1, "High where the topic changes: the distance from the last two texts."),
      row("Novelty", "words", parts.novelty, 1, "High for what was never talked about: the distance from the nearest text."),
      row("Contradiction", "neural", parts.contradiction, 1, "How sure it is that a statement has another value now."),
      parts.contradicts
        ? make("button", { type: "button", class: "link", onclick: () => openById(parts.contradicts, whose.user_id) }, "The memory that it contradicts")
        : "");
  } catch (error) {
    complain(error);
  }
}

export function start() {
  $("exact").addEventListener("change", () => Promise.all([describe(), assess()]));
  $("statement").addEventListener("input", after(WAIT, assess));
}

export const focus = () => $("exact").focus();
