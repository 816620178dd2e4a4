// The list of runs, and the table of what they have reached.

import { lineStyle, swatch } from "./colours.js";
import { element } from "./element.js";
import { grouped, plain, write } from "./format.js";
import { state } from "./state.js";

const STATES = { loading: "reading", live: "running", ended: "", error: "not readable" };

/** The entries of the list: a switch, a colour, how far the run is, and what is wrong with its file. */
export function runList(runs) {
  return runs.map((run) => {
    const shown = !state.off.has(run.id);
    return element(
      "li",
      { class: "run", "data-state": run.state, "data-run": run.id },
      element(
        "label",
        { title: run.path },
        element("input", { type: "checkbox", checked: shown, onchange: () => state.toggle("off", run.id, shown) }),
        swatch(lineStyle(run.number)),
        element("span", { class: "name", dir: "auto" }, run.name),
      ),
      element("p", { class: "far" }, progressOf(run)),
      run.state === "loading" &&
        element("progress", { max: "1", value: String(run.progress ?? 0), "aria-label": `Reading ${run.name}` }),
      run.error && element("p", { class: "trouble" }, run.error),
      run.broken > 0 && !run.error &&
        element("p", { class: "trouble", title: "They are passed over; the rest of the file is shown." },
          `${grouped(run.broken)} broken line${run.broken === 1 ? "" : "s"} passed over`),
    );
  });
}

function progressOf({ state: now, progress, last, planned }) {
  if (now === "loading") return `${STATES.loading} · ${Math.floor(100 * (progress ?? 0))} %`;
  const step = last?.iteration;
  const far = step === undefined ? "" : planned ? `${grouped(step)} / ${grouped(planned)}` : `step ${grouped(step)}`;
  return [far, STATES[now]].filter(Boolean).join(" · ");
}

/** Columns of the table: heading, unit and value of a run; the last says what phones leave out of several. */
const MINOR = true;
const COLUMNS = [
  ["Loss", "number", ({ totals }) => totals.loss],
  ["Validation", "number", ({ totals }) => totals.validation_loss],
  ["Tokens", "count", ({ last }) => last?.tokens, MINOR],
  ["Tokens/s", "rate", ({ totals }) => totals.tokens_per_second, MINOR],
  ["MFU", "share", ({ totals }) => totals.mfu, MINOR],
  ["Time", "seconds", ({ last }) => last?.seconds, MINOR],
  ["Time left", "seconds", ({ totals }) => totals.seconds_left],
  ["Energy", "joules", ({ totals }) => totals.energy_joules, MINOR],
  ["CO₂", "grams", ({ totals }) => totals.co2_grams, MINOR],
  ["Cost", "money", ({ totals }) => totals.cost, MINOR],
  ["To finish", "money", ({ totals }) => totals.cost_left, MINOR],
];

/** The table of runs and what they have reached; columns that no run has are left out. */
export function overview(runs) {
  const known = (value) => value !== null && value !== undefined;
  const columns = COLUMNS.filter(([, , value]) => runs.some((run) => known(value(run))));
  if (!columns.length) return [];
  const rows = runs.map((run) => {
    const cells = columns.map(([heading, unit, value, minor]) => {
      const text = known(value(run)) ? write(unit, value(run)) : plain(undefined);
      return element("td", { class: minor && "minor", "data-heading": heading }, text);
    });
    return element("tr", {}, element("th", { scope: "row", dir: "auto" }, swatch(lineStyle(run.number)), run.name), ...cells);
  });
  const head = columns.map(([heading]) => element("th", { scope: "col" }, heading));
  return [
    element(
      "table",
      { class: "totals" },
      element("caption", { class: "unseen" }, "What the runs have reached"),
      element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "Run"), ...head)),
      element("tbody", {}, rows),
    ),
  ];
}
