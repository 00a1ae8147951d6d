"use strict";
(() => {
const data = JSON.parse(document.getElementById("data").textContent);
const { tokens, layers, stations } = data;
const PER_PAGE = 4000;  // tokens on the screen at a time
const BINS = 150;       // points of a line at most, each the mean of the tokens around it
const ALL = -1;         // instead of a layer: their mean
const ORANGE = [[255, 252, 247], [253, 208, 162], [240, 118, 74]];
const BLUE = [[249, 251, 254], [182, 212, 240], [92, 153, 214]];
const VIOLET = [[252, 250, 254], [214, 200, 236], [158, 128, 205]];
const gate = name => layer => layer.gates[name] ? layer.gates[name].mean : null;
const MEASURES = [
  { name: "surprise, ‖∇ℓ‖", of: l => l.gradient_norm, ramp: ORANGE, meaning: "Surprise: the norm of the gradient that the token asks the memory to follow, before it is written." },
  { name: "memory's loss, ℓ", of: l => l.loss, ramp: ORANGE, meaning: "The memory's loss: how far what it recalls for the token's key is from the token's value." },
  { name: "prediction, −log p", of: () => data.prediction, ramp: VIOLET, shared: true, meaning: "How unexpected the token was to the whole model, in nats." },
  { name: "step, θ", of: gate("theta"), range: "theta", ramp: BLUE, meaning: "The step θ with which the token is written." },
  { name: "forgetting, α", of: gate("alpha"), range: "alpha", ramp: BLUE, meaning: "The share α of the memory that the token makes it forget." },
  { name: "momentum, η", of: gate("eta"), range: "eta", ramp: BLUE, meaning: "The share η of past surprise that is carried on." },
];
const NORMS = [
  { name: "memory, ‖M‖", of: l => l.weights, at: stations },
  { name: "moved from its start, ‖M − M₀‖", of: l => l.moved, at: stations },
  { name: "momentum, ‖S‖", of: l => l.momentum, at: stations },
];
const get = id => document.getElementById(id);
const state = { layer: ALL, measure: 0, page: 0, token: null };

function make(tag, attributes = {}, text) {
  const svg = ["svg", "path", "line", "text", "rect", "circle"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}
function number(x) {
  if (x === null || x === undefined) return "–";
  const size = Math.abs(x);
  if (size && (size < 0.001 || size >= 100000)) return x.toExponential(2);
  return size >= 100 ? x.toFixed(1) : size >= 1 ? x.toFixed(2) : x.toFixed(4);
}
const mean = list => { const real = list.filter(x => x !== null); return real.length ? real.reduce((a, b) => a + b, 0) / real.length : null; };
const hue = index => `hsl(${layers.length > 1 ? 215 - 195 * index / (layers.length - 1) : 215} 62% 46%)`;
const onScreen = index => Math.floor(index / PER_PAGE);

const means = new Map();  // a mean over layers is worked out once
function values(measure, layer) {
  if (measure.shared) return measure.of();
  if (layer !== ALL) return measure.of(layers[layer]);
  if (!means.has(measure)) {
    const all = layers.map(measure.of).filter(Boolean);
    means.set(measure, all.length ? all[0].map((_, i) => mean(all.map(list => list[i]))) : null);
  }
  return means.get(measure);
}

// ---- the text

function scale(list) {
  const sorted = list.filter(x => x !== null).sort((a, b) => a - b);
  const at = share => sorted[Math.round(share * (sorted.length - 1))];
  return sorted.length ? [at(0.02), at(0.98)] : [0, 0];
}
function colour(ramp, share) {
  const place = Math.min(1, Math.max(0, share)) * 2, i = Math.min(1, Math.floor(place)), t = place - i;
  return `rgb(${ramp[i].map((from, c) => Math.round(from + t * (ramp[i + 1][c] - from))).join(" ")})`;
}
function showTokens() {
  const box = get("tokens"), from = state.page * PER_PAGE, to = Math.min(tokens.length, from + PER_PAGE);
  const nodes = [];
  const whole = tokens.some(([text]) => text.length > 2 && !/[\n\t\\]/.test(text));
  for (let i = from; i < to; i++) {
    const node = make("span", { "data-i": i }, tokens[i][0]);
    if (whole) node.className = "whole";
    nodes.push(node);
  }
  box.replaceChildren(...nodes);
  get("pager").hidden = tokens.length <= PER_PAGE;
  get("range").textContent = `tokens ${from + 1} to ${to} of ${tokens.length}`;
  get("earlier").disabled = from === 0;
  get("later").disabled = to === tokens.length;
}
function paint() {
  const measure = MEASURES[state.measure], list = values(measure, state.layer);
  const [low, high] = list ? scale(list) : [0, 0];
  for (const node of get("tokens").children) {
    const value = list ? list[node.dataset.i] : null;
    node.style.background = value === null ? "" : colour(measure.ramp, high > low ? (value - low) / (high - low) : 0.5);
  }
  get("low").textContent = list ? number(low) : "";
  get("high").textContent = list ? number(high) : `${measure.name}: this memory has none`;
  get("bar").style.background = `linear-gradient(90deg, ${[0, .25, .5, .75, 1].map(t => colour(measure.ramp, t)).join(", ")})`;
  get("meaning").textContent = measure.meaning;
}
function fillTip(index) {
  const [text, id, name] = tokens[index], tip = get("tip"), list = make("dl");
  for (const measure of MEASURES) {
    const all = values(measure, state.layer);
    if (!all) continue;
    let range = "";
    if (measure.shared && all[index] !== null) range = `p = ${(100 * Math.exp(-all[index])).toPrecision(2)}%`;
    if (measure.range && state.layer !== ALL) {
      const { low, high } = layers[state.layer].gates[measure.range];
      if (low[index] !== high[index]) range = `${number(low[index])} to ${number(high[index])}`;
    }
    list.append(make("dt", {}, measure.name), make("dd", {}, number(all[index])), make("dd", { class: "range" }, range));
  }
  const where = state.layer === ALL ? (layers.length > 1 ? "mean of the layers" : "") : `layer ${state.layer + 1}`;
  const head = `${text.trim() ? text.replace(/\n$/, "") : "␣".repeat(text.length)}${name ? `  ${name}` : ""}`;
  tip.replaceChildren(make("div", { class: "what" }, head),
    make("div", { style: "color:var(--soft)" }, [`token ${index + 1}`, `id ${id}`, where].filter(Boolean).join(", ")), list);
}
function choose(index, scroll) {
  if (index !== null && onScreen(index) !== state.page) { state.page = onScreen(index); showTokens(); paint(); }
  const box = get("tokens"), tip = get("tip");
  box.querySelector(".chosen")?.classList.remove("chosen");
  state.token = index;
  moveCursors();
  tip.hidden = index === null;
  if (index === null) return;
  const node = box.children[index - state.page * PER_PAGE];
  node.classList.add("chosen");
  if (scroll) {
    const inside = node.getBoundingClientRect(), frame = box.getBoundingClientRect();
    if (inside.top < frame.top || inside.bottom > frame.bottom) box.scrollTop += inside.top - frame.top - frame.height / 2;
  }
  fillTip(index);
  const at = node.getClientRects()[0], size = tip.getBoundingClientRect();
  const below = at.bottom + 8 + size.height < innerHeight;
  tip.style.left = `${Math.max(6, Math.min(innerWidth - size.width - 6, at.left - 20))}px`;
  tip.style.top = `${Math.max(6, below ? at.bottom + 8 : at.top - size.height - 8)}px`;
}

// ---- the lines

const W = 360, H = 150, PAD = { left: 50, right: 8, top: 8, bottom: 20 };
const cursors = [];
function binned(list, at) {
  const count = Math.min(BINS, list.length), points = [];
  for (let bin = 0; bin < count; bin++) {
    const from = Math.round(bin * list.length / count), to = Math.round((bin + 1) * list.length / count);
    const value = mean(list.slice(from, to));
    if (value !== null) points.push([at ? at[to - 1] : (from + to + 1) / 2, value]);
  }
  return points;
}
function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [[1.5, 1], [3.5, 2], [7.5, 5], [11, 10]].find(([limit]) => rough / power < limit)[1];
  const list = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k++) list.push(k * step);
  return [list, Math.max(0, -Math.floor(Math.log10(step) + 1e-9))];
}
const minimum = list => list.reduce((a, b) => Math.min(a, b)), maximum = list => list.reduce((a, b) => Math.max(a, b));
function chart(measure) {
  const figure = make("figure"), caption = make("figcaption"), now = make("span");
  caption.append(make("b", {}, measure.name), now);
  figure.append(caption);
  const sources = measure.shared ? [measure.of()] : layers.map(measure.of);
  const lines = sources.map(list => list && binned(list, measure.at));
  const range = measure.range && state.layer !== ALL ? layers[state.layer].gates[measure.range] : null;
  const band = range && [binned(range.low), binned(range.high)];
  const shown = [...lines, ...(band || [])].filter(line => line && line.length).flat();
  if (!shown.length) {
    figure.append(make("div", { class: "empty" }, "this memory has none"));
    return figure;
  }
  let low = minimum(shown.map(p => p[1])), high = maximum(shown.map(p => p[1]));
  const least = Math.max(1e-6, 0.02 * Math.abs(high));
  if (high - low < least) { const middle = (high + low) / 2; low = Math.max(low < 0 ? -Infinity : 0, middle - least / 2); high = low + least; }
  const x = i => PAD.left + (W - PAD.left - PAD.right) * (tokens.length > 1 ? (i - 1) / (tokens.length - 1) : 0.5);
  const y = v => PAD.top + (H - PAD.top - PAD.bottom) * (high - v) / (high - low);
  const svg = make("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `${measure.name} along the text` });
  const [marks, digits] = ticks(low, high, 4);
  for (const mark of marks) {
    svg.append(make("line", { x1: PAD.left, x2: W - PAD.right, y1: y(mark), y2: y(mark), stroke: "#eceff2" }));
    const label = digits > 5 ? mark.toExponential(1) : mark.toFixed(digits);
    svg.append(make("text", { x: PAD.left - 5, y: y(mark) + 4, "text-anchor": "end" }, label));
  }
  for (const mark of ticks(1, Math.max(2, tokens.length), 4)[0]) {
    if (mark >= 1 && mark % 1 === 0 && mark <= tokens.length) svg.append(make("text", { x: Math.min(x(mark), W - 3.5 * String(mark).length), y: H - 4, "text-anchor": "middle" }, mark));
  }
  const path = points => "M" + points.map(([i, v]) => `${x(i).toFixed(1)} ${y(v).toFixed(1)}`).join("L");
  if (band) {
    const fill = path([...band[1], ...band[0].slice().reverse()]) + "z";
    svg.append(make("path", { d: fill, fill: hue(state.layer), opacity: 0.18 }));
  }
  const order = lines.map((_, i) => i).sort((a, b) => (a === state.layer) - (b === state.layer));
  for (const i of order) {
    if (!lines[i] || !lines[i].length) continue;
    const strong = measure.shared || i === state.layer, alone = state.layer === ALL;
    const stroke = measure.shared ? "#7c5bb5" : hue(i);
    if (lines[i].length === 1) { svg.append(make("circle", { cx: x(lines[i][0][0]), cy: y(lines[i][0][1]), r: 3, fill: stroke })); continue; }
    svg.append(make("path", { d: path(lines[i]), fill: "none", stroke, "stroke-linejoin": "round",
      "stroke-width": strong && !alone ? 2 : 1.3, opacity: strong ? 1 : alone ? 0.85 : 0.25 }));
  }
  const cursor = make("line", { y1: PAD.top, y2: H - PAD.bottom, stroke: "#1f2328", "stroke-dasharray": "3 2", visibility: "hidden" });
  svg.append(cursor);
  const found = event => {
    const frame = svg.getBoundingClientRect(), place = (event.clientX - frame.left) / frame.width * W;
    const share = (place - PAD.left) / (W - PAD.left - PAD.right);
    return Math.round(Math.min(1, Math.max(0, share)) * (tokens.length - 1));
  };
  svg.addEventListener("click", event => { choose(found(event), true); get("tip").hidden = true; });
  svg.addEventListener("pointermove", event => { state.token = found(event); moveCursors(); });
  cursors.push(index => {
    cursor.setAttribute("visibility", index === null ? "hidden" : "visible");
    now.textContent = "";
    if (index === null) return;
    cursor.setAttribute("x1", x(index + 1)); cursor.setAttribute("x2", x(index + 1));
    const list = values(measure, state.layer);
    if (!list) return;
    const place = measure.at ? measure.at.findIndex(end => end > index) : index;
    now.textContent = number(list[place]);
  });
  figure.append(svg);
  return figure;
}
function moveCursors() { for (const move of cursors) move(state.token); }
function drawCharts() {
  const size = Math.round(tokens.length / BINS);
  get("binning").textContent = size > 1 ? `The axis counts tokens; a point is the mean of about ${size}.` : "The axis counts tokens.";
  cursors.length = 0;
  get("charts").replaceChildren(...[...MEASURES, ...NORMS].map(chart));
  moveCursors();
}

// ---- the table, and the controls

function drawTable() {
  const head = make("tr"), rows = [head];
  head.append(make("th", {}, "layer"));
  const columns = [...MEASURES.filter(m => !m.shared), ...NORMS];
  for (const column of columns) head.append(make("th", {}, column.name.split(", ").pop()));
  layers.forEach((layer, i) => {
    const row = make("tr", i === state.layer ? { class: "chosen" } : {});
    row.append(make("td", {}, i + 1));
    for (const column of columns) {
      const list = column.of(layer);
      row.append(make("td", {}, list ? number(column.at ? list[list.length - 1] : mean(list)) : "–"));
    }
    rows.push(row);
  });
  get("table").replaceChildren(...rows);
}
function drawLayers() {
  const buttons = (layers.length > 1 ? [ALL] : []).concat(layers.map((_, i) => i)).map(i => {
    const button = make("button", { "aria-pressed": i === state.layer, "data-layer": i });
    if (i !== ALL) button.append(make("i", { style: `background:${hue(i)}` }));
    button.append(i === ALL ? "all" : String(i + 1));
    button.addEventListener("click", () => { state.layer = i; update(); get("layers").querySelector(`[data-layer="${i}"]`).focus(); });
    return button;
  });
  get("layers").replaceChildren(...buttons);
}
function update() { drawLayers(); paint(); drawCharts(); drawTable(); if (!get("tip").hidden) fillTip(state.token); }
function turn(by) { state.page += by; state.token = null; get("tip").hidden = true; showTokens(); paint(); moveCursors(); get("tokens").scrollTop = 0; }

MEASURES.forEach((measure, i) => get("measure").append(make("option", { value: i }, measure.name)));
get("measure").addEventListener("change", event => { state.measure = Number(event.target.value); paint(); });
get("earlier").addEventListener("click", () => turn(-1));
get("later").addEventListener("click", () => turn(1));
const box = get("tokens");
for (const kind of ["pointerover", "click"]) {
  box.addEventListener(kind, event => { const i = event.target.dataset.i; if (i !== undefined) choose(Number(i)); });
}
box.addEventListener("pointerleave", event => { if (event.pointerType === "mouse") get("tip").hidden = true; });
box.addEventListener("keydown", event => {
  const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (event.key === "Escape") choose(null);
  if (!by) return;
  event.preventDefault();
  const next = state.token === null ? state.page * PER_PAGE : state.token + by;
  if (next >= 0 && next < tokens.length) choose(next, true);
});
addEventListener("scroll", () => { get("tip").hidden = true; }, { passive: true });
if (layers.length === 1) state.layer = 0;
showTokens();
update();
document.body.dataset.ready = "true";
})();
