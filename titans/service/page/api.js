// Calls of the server: the key goes into a header, a problem becomes one sentence.

const KEY = "titans-key";

export class Problem extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

export const key = () => sessionStorage.getItem(KEY) ?? "";

export function keep(value) {
  if (value) sessionStorage.setItem(KEY, value);
  else sessionStorage.removeItem(KEY);
}

export async function send(method, path, { query = {}, body, headers = {}, signal } = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const url = given.length ? `${path}?${new URLSearchParams(given)}` : path;
  const all = { ...headers };
  if (body !== undefined) all["Content-Type"] = "application/json";
  if (key()) all.Authorization = `Bearer ${asHeader(key())}`;
  let response;
  try {
    response = await fetch(url, {
      method, headers: all, signal, body: body === undefined ? undefined : JSON.stringify(body), cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, "the server cannot be reached");
  }
  if (response.ok) return response;
  const problem = await read(response);
  if (problem.status === 401) document.dispatchEvent(new CustomEvent("key-wanted", { detail: problem }));
  throw problem;
}

export const call = async (...asked) => (await send(...asked)).json();

async function read(response) {
  const plain = `the server answers with ${response.status}`;
  try {
    const said = await response.json();
    return new Problem(response.status, said.detail ?? said.error?.message ?? plain);
  } catch {
    return new Problem(response.status, plain);
  }
}

// Headers carry bytes: UTF-8, each as one character.
export const asHeader = (text) => String.fromCharCode(...new TextEncoder().encode(text));

export const requestName = () => Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");

export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    const lines = (rest + (value ?? "")).split(/\r?\n/);
    rest = done ? "" : lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
    if (done) return;
  }
}
