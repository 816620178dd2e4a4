// What keys do, and the list of it.

import { byId, element } from "./element.js";
import { CLOCKS } from "./format.js";
import { SMOOTHINGS, TABS, state } from "./state.js";

const PART = 0.25; // of what is seen, for a step to the side

/** Keys with their words. Each gets the charts and the runs. */
const KEYS = [
  [["x"], "Next horizontal axis", () => state.set({ x: after(Object.keys(CLOCKS), state.x), zoom: null })],
  [["l"], "Logarithmic axis of the chart under the pointer, or of all", ({ charts }) => toggleLog(charts)],
  [["s"], "More smoothing", () => smoother(1)],
  [["S"], "Less smoothing", () => smoother(-1)],
  [["+", "="], "Closer", ({ charts }) => look(charts, 0.5)],
  [["-"], "Further away", ({ charts }) => look(charts, 2)],
  [["<", ","], "To the left", ({ charts }) => look(charts, 1, -PART)],
  [[">", "."], "To the right", ({ charts }) => look(charts, 1, PART)],
  [["Escape", "a"], "Show all", () => state.set({ zoom: null })],
  [["o"], "Cut spikes off, so that the rest fills the chart", () => state.set({ cut: !state.cut })],
  [["m"], "Show or hide events", () => state.set({ marks: !state.marks })],
  [["p"], "Picture of the chart under the pointer", ({ charts }) => charts.current?.savePicture()],
  [["c"], "Its table as CSV", ({ charts }) => charts.current?.saveTable()],
  [["t"], "Next part of the page", () => state.set({ tab: after(TABS, state.tab) })],
  [["d"], "Light or dark", () => byId("theme").click()],
  [["/"], "Find a chart", () => byId("find").focus()],
  [["f"], "Filter the runs", () => byId("filter").focus()],
  [["g"], "Group runs that differ in their seed only", () => state.set({ group: !state.group })],
  [["?"], "This list", () => byId("help").showModal()],
];
const DIGITS = "Show or hide the first, second, … run";
const ARROWS = "Read the values of the chart with the focus";
const NAMES = { Escape: "Esc" };

const after = (list, one) => list[(list.indexOf(one) + 1) % list.length];

function smoother(step) {
  const at = SMOOTHINGS.indexOf(state.smooth) + step;
  state.set({ smooth: SMOOTHINGS[Math.max(0, Math.min(SMOOTHINGS.length - 1, at))] });
}

function toggleLog(charts) {
  if (charts.current) return state.toggle("log", charts.current.panel.id);
  const every = charts.ids;
  return state.set({ log: new Set(every.every((id) => state.log.has(id)) ? [] : every) });
}

/** Shows `scale` times as much, moved by a part of it. */
function look(charts, scale, move = 0) {
  const [from, to] = charts.range;
  const [middle, half] = [(from + to) / 2 + move * (to - from), (scale * (to - from)) / 2];
  charts.zoom([middle - half, middle + half]);
}

/** Listens to keys, and fills their list. `page` is `{charts, runs}`; `runs()` are all. */
export function listenToKeys(page) {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || byId("help").open) return;
    const typing = event.target.matches?.("input:not([type=checkbox], [type=radio], [type=range]), select, textarea");
    if (typing) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    const found = KEYS.find(([keys]) => keys.includes(event.key));
    const run = /^[1-9]$/.test(event.key) && page.runs()[event.key - 1];
    if (!found && !run) return;
    event.preventDefault();
    if (run) state.toggle("off", run.id);
    else found[2](page);
  });
  const entries = [...KEYS.map(([keys, words]) => [keys.slice(0, 1), words]), [["1", "9"], DIGITS], [["←", "→"], ARROWS]];
  byId("keys").replaceChildren(
    ...entries.flatMap(([keys, words]) => [
      element("dt", {}, keys.map((key) => element("kbd", {}, NAMES[key] ?? key))),
      element("dd", {}, words),
    ]),
  );
  byId("open-help").addEventListener("click", () => byId("help").showModal());
}
