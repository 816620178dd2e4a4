// What the page shows, kept in the address: a reload, a bookmark and a link show the same.

import { CLOCKS } from "./format.js";

export const TABS = ["charts", "events", "texts", "configuration"];
/** A page that was saved as one file has fewer curves. */
export const SMOOTHINGS = document.getElementById("saved") ? [0, 0.9, 0.99] : [0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999];

const number = (text) => (text === null || text === "" || !Number.isFinite(+text) ? null : +text);
const list = (text) => (text ? text.split(",").map(decoded) : []);

/** An address that somebody wrote may have a "%" of its own. */
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function read() {
  const given = new URLSearchParams(location.hash.slice(1));
  const [from, to] = [number(given.get("from")), number(given.get("to"))];
  return {
    tab: TABS.includes(given.get("tab")) ? given.get("tab") : "charts",
    x: Object.hasOwn(CLOCKS, given.get("x") ?? "") ? given.get("x") : "iteration",
    smooth: SMOOTHINGS.includes(number(given.get("smooth"))) ? number(given.get("smooth")) : 0.9,
    zoom: from !== null && to !== null && from < to ? [from, to] : null,
    logX: given.get("logx") === "1",
    cut: given.get("cut") === "1",
    log: new Set(list(given.get("log"))),
    off: new Set(list(given.get("off"))),
    marks: given.get("marks") !== "0",
    find: given.get("find") ?? "",
    runs: given.get("runs") ?? "",
    sort: given.get("sort") ?? "",
    group: given.get("group") === "1",
    columns: given.has("columns") ? new Set(list(given.get("columns"))) : null,
  };
}

/** The one state of the page. `set` changes parts of it, and tells those who asked to know. */
class State {
  #told = [];

  constructor() {
    Object.assign(this, read());
    addEventListener("hashchange", () => this.set(read()));
  }

  onChange(told) {
    this.#told.push(told);
  }

  set(changes) {
    const names = Object.keys(changes).filter((name) => !same(this[name], changes[name]));
    if (!names.length) return;
    Object.assign(this, changes);
    history.replaceState(null, "", this.#address());
    for (const told of this.#told) told(new Set(names));
  }

  /** Puts `member` into the set `name`, or takes it out. */
  toggle(name, member, on = !this[name].has(member)) {
    const changed = new Set(this[name]);
    if (on) changed.add(member);
    else changed.delete(member);
    this.set({ [name]: changed });
  }

  #address() {
    const kept = {
      tab: this.tab === "charts" ? "" : this.tab,
      x: this.x === "iteration" ? "" : this.x,
      smooth: this.smooth === 0.9 ? "" : String(this.smooth),
      from: this.zoom ? String(this.zoom[0]) : "",
      to: this.zoom ? String(this.zoom[1]) : "",
      logx: this.logX ? "1" : "",
      cut: this.cut ? "1" : "",
      log: [...this.log].map(encodeURIComponent).join(","),
      off: [...this.off].map(encodeURIComponent).join(","),
      marks: this.marks ? "" : "0",
      find: this.find,
      runs: this.runs,
      sort: this.sort,
      group: this.group ? "1" : "",
    };
    const words = new URLSearchParams(Object.entries(kept).filter(([, value]) => value));
    if (this.columns) words.set("columns", [...this.columns].map(encodeURIComponent).join(","));
    return `${location.pathname}${location.search}#${words}`;
  }
}

function same(a, b) {
  if (a instanceof Set && b instanceof Set) return a.size === b.size && [...a].every((one) => b.has(one));
  if (Array.isArray(a) && Array.isArray(b)) return a.every((one, index) => one === b[index]);
  return a === b;
}

export const state = new State();
