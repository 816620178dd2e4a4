// The table of runs: what they have reached, and the values of their configurations that differ.

import { lineStyle, swatch } from "./colours.js";
import { compared } from "./configuration.js";
import { element } from "./element.js";
import { plain, write } from "./format.js";
import { isPlace } from "./groups.js";
import { state } from "./state.js";

/** Columns: heading, what it is, unit and value of a run; the last says what phones leave out of several. */
const MINOR = true;
const COLUMNS = [
  ["Reward", "Mean of the last rows of a run that learns from rewards", "number", ({ totals }) => totals.reward],
  ["Training loss", "Mean of the last rows: a twentieth of them, at most 100", "number", ({ totals }) => totals.loss],
  ["Best validation", "The least loss of the first validation set", "number", ({ totals }) => totals.validation_loss],
  ["Test loss", "The last one", "number", ({ totals }) => totals.test_loss],
  ["Tokens", "Read so far", "count", ({ last }) => last?.tokens, MINOR],
  ["Tokens/s", "Of all devices, over the last steps", "rate", ({ totals }) => totals.tokens_per_second, MINOR],
  ["MFU", "FLOP utilization of the devices, over the last rows", "share", ({ totals }) => totals.mfu, MINOR],
  ["Memory", "Peak of what a device has allocated", "bytes", ({ totals }) => totals.memory_bytes, MINOR],
  ["Power", "Of all devices, over the last rows", "watts", ({ totals }) => totals.power_watts, MINOR],
  ["Time", "That training took", "seconds", ({ last }) => last?.seconds, MINOR],
  ["Time left", "As the run computes it", "seconds", ({ totals }) => totals.seconds_left],
  ["Energy", "Used so far", "joules", ({ totals }) => totals.energy_joules, MINOR],
  ["CO₂", "Of that energy", "grams", ({ totals }) => totals.co2_grams, MINOR],
  ["Cost", "So far", "money", ({ totals }) => totals.cost, MINOR],
  ["To finish", "Further cost", "money", ({ totals }) => totals.cost_left, MINOR],
];
const MOST_AUTOMATIC = 5; // values of configurations that have a column unasked

const known = (value) => value !== null && value !== undefined;
const short = (name) => name.split(".").at(-1);

/** Names of the values of configurations that differ between runs, those of places and seeds last. */
function differing(runs) {
  const names = runs.length < 2 ? [] : compared(runs).filter(([, , differ]) => differ).map(([name]) => name);
  return [...names.filter((name) => !isPlace(name)), ...names.filter(isPlace)];
}

/** The names that have a column: chosen ones, or those that differ. */
function shownNames(runs) {
  if (state.columns) return [...state.columns];
  return differing(runs).filter((name) => !isPlace(name)).slice(0, MOST_AUTOMATIC);
}

function columnsOf(runs) {
  const reached = COLUMNS.filter(([, , , value]) => runs.some((run) => known(value(run))))
    .map(([heading, words, unit, value, minor]) => ({ key: heading, heading, words, unit, value, minor }));
  const configured = shownNames(runs).map((name) => ({
    key: name, heading: short(name), words: name, unit: null, value: ({ configuration }) => configuration?.[name],
  }));
  const losses = reached.filter(({ unit }) => unit === "number");
  return [...losses, ...configured, ...reached.filter((column) => !losses.includes(column))];
}

function compare(a, b) {
  if (!known(a) || !known(b)) return known(a) ? -1 : known(b) ? 1 : 0;
  return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
}

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

/** The value of a group: that of its run, the mean of numbers, or what all have in common. */
function valueOf({ runs }, { value }) {
  const values = runs.map(value).filter(known);
  if (values.length && values.every(Number.isFinite)) return mean(values);
  return new Set(values.map(String)).size === 1 ? values[0] : undefined;
}

function cellOf(group, column) {
  const value = valueOf(group, column);
  if (!known(value)) return plain(undefined);
  if (column.unit === null) return typeof value === "number" ? plain(value) : typeof value === "string" ? value : JSON.stringify(value);
  const values = group.runs.map(column.value).filter(known);
  const spread = values.length > 1 && column.unit === "number"
    ? ` ± ${plain(Math.sqrt(mean(values.map((each) => (each - value) ** 2)) * (values.length / (values.length - 1))), 2)}` : "";
  return write(column.unit, value) + spread;
}

/** Groups in the order that a heading was chosen for. */
export function ordered(groups) {
  const [, descending, key] = /^(-?)(.*)$/.exec(state.sort);
  const column = columnsOf(groups.flatMap(({ runs }) => runs)).find((one) => one.key === key);
  if (key !== "Run" && !column) return groups;
  const value = column ? (group) => valueOf(group, column) : ({ name }) => name;
  const sign = descending ? -1 : 1;
  return [...groups].sort((a, b) => (known(value(a)) && known(value(b)) ? sign : 1) * compare(value(a), value(b)));
}

function heading(key, text, words) {
  const now = state.sort === key ? "ascending" : state.sort === `-${key}` ? "descending" : null;
  const next = { ascending: `-${key}`, descending: "" }[now] ?? key;
  const arrow = { ascending: " ↑", descending: " ↓" }[now] ?? "";
  return element(
    "th",
    { scope: "col", "aria-sort": now, title: words },
    element("button", { class: "sort", type: "button", "data-key": key, onclick: () => state.set({ sort: next }) }, text + arrow),
  );
}

/** The table of groups and what they have reached; columns that no run has are left out. */
export function overview(groups) {
  const columns = columnsOf(groups.flatMap(({ runs }) => runs));
  if (!columns.length) return [];
  const rows = ordered(groups).map((group) => {
    const cells = columns.map((column) =>
      element("td", { class: column.minor && "minor", "data-heading": column.heading, dir: column.unit === null ? "auto" : null }, cellOf(group, column)));
    return element("tr", {}, element("th", { scope: "row", dir: "auto", title: group.name }, swatch(lineStyle(group.runs[0].number)), group.name), ...cells);
  });
  return [
    element(
      "table",
      { class: "totals" },
      element("caption", { class: "unseen" }, "What the runs have reached"),
      element("thead", {}, element("tr", {}, heading("Run", "Run"), columns.map(({ key, heading: text, words }) => heading(key, text, words)))),
      element("tbody", {}, rows),
    ),
  ];
}

/** The choice of the values of configurations that have a column: the names that differ, then all others. */
export function columnChoice(runs) {
  const all = compared(runs).map(([name]) => name);
  const first = differing(runs);
  const chosen = new Set(shownNames(runs));
  const names = [...new Set([...chosen, ...first, ...all])];
  return names.map((name) =>
    element(
      "label",
      { title: name },
      element("input", {
        type: "checkbox", checked: chosen.has(name),
        onchange: () => state.set({ columns: new Set(chosen.has(name) ? [...chosen].filter((one) => one !== name) : [...chosen, name]) }),
      }),
      ` ${name}`,
    ));
}
