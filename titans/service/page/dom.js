// Elements, numbers and times; every text becomes a text node, never markup.

const LONGEST = 600; // characters of a text in a list
const LEVELS = [
  { name: "expected", below: 0.5 },
  { name: "familiar", below: 0.8 },
  { name: "new", below: 0.95 },
  { name: "surprising", below: Infinity },
];

export const $ = (id) => document.getElementById(id);

export function make(name, props = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "class") element.className = value;
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function draw(name, props) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(props)) element.setAttribute(key, value);
  return element;
}

// Never between the halves of a character.
export const cut = (text, most = LONGEST) => (text.length > most ? `${text.slice(0, most).replace(/[\ud800-\udbff]$/, "")}…` : text);
export const count = (number, one, many = `${one}s`) => `${number.toLocaleString("en")} ${number === 1 ? one : many}`;
export const quoted = (text) => `“${cut(text.replace(/\s+/g, " "), 60)}”`;

const CLOCK = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit" });
const DAY = new Intl.DateTimeFormat(undefined, { weekday: "long", day: "numeric", month: "long", year: "numeric" });
const BOTH = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });
export const day = (iso) => DAY.format(new Date(iso));

export function time(iso, format = BOTH) {
  return make("time", { datetime: iso, title: iso }, format.format(new Date(iso)));
}
export const clock = (iso) => time(iso, CLOCK);

export const levels = LEVELS.map(({ name, below }, index) => ({
  name, range: below < Infinity ? `below ${below.toFixed(2)}` : `${LEVELS[index - 1].below.toFixed(2)} and more`,
}));
export const level = (surprise) => LEVELS.findIndex((each) => surprise < each.below);

// Shape, word and number say what the colour says.
export function surpriseMark(surprise) {
  const index = level(surprise);
  return make("span", { class: "surprise", title: "How surprising it was when it was written" },
    make("i", { class: `dot level-${index}`, "aria-hidden": "true" }),
    make("span", { class: "unseen" }, "surprise "), `${surprise.toFixed(2)} ${LEVELS[index].name}`);
}

export function meter(name, kind, value, share, note = "") {
  const fill = make("i", { class: `fill ${kind}` });
  fill.style.width = `${100 * Math.min(1, Math.max(0, share))}%`;
  return make("div", { class: "meter" },
    make("span", { class: "meter-name" }, name),
    make("span", { class: "track", "aria-hidden": "true" }, fill),
    make("span", { class: "meter-value" }, value, note && make("small", {}, ` ${note}`)));
}

export function say(sentence) {
  $("said").textContent = sentence;
}

export function complain(error) {
  const trouble = $("trouble");
  if (!error) return trouble.replaceChildren();
  if (error.name === "AbortError") return;
  trouble.replaceChildren(make("p", {}, sentence(error.message)),
    make("button", { type: "button", "aria-label": "Dismiss", onclick: () => trouble.replaceChildren() }, "✕"));
}

export const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");

export function confirm(title, text, quote, action) {
  const dialog = $("confirm");
  $("confirm-title").textContent = title;
  $("confirm-text").textContent = text;
  $("confirm-quote").textContent = cut(quote);
  $("confirm-yes").textContent = action;
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}

export function after(milliseconds, action) {
  let waiting;
  return () => {
    clearTimeout(waiting);
    waiting = setTimeout(action, milliseconds);
  };
}
