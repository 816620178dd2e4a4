// The list of runs.

import { lineStyle, swatch } from "./colours.js";
import { element } from "./element.js";
import { grouped } from "./format.js";
import { state } from "./state.js";

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
      element("p", { class: "far" }, progressOf(run), " ", element("span", { class: "state" }, run.words)),
      run.state === "loading" &&
        element("progress", { max: "1", value: String(run.progress ?? 0), "aria-label": `Reading ${run.name}` }),
      run.error && element("p", { class: "trouble" }, run.error),
      run.broken > 0 && !run.error &&
        element("p", { class: "trouble", title: "They are passed over; the rest of the file is shown." },
          `${grouped(run.broken)} broken line${run.broken === 1 ? "" : "s"} passed over`),
      (run.left_out ?? []).map((words) => element("p", { class: "trouble" }, words)),
    );
  });
}

function progressOf({ state: now, progress, last, planned }) {
  if (now === "loading") return `${Math.floor(100 * (progress ?? 0))} %`;
  const step = last?.iteration;
  return step === undefined ? "" : planned ? `${grouped(step)} / ${grouped(planned)}` : `step ${grouped(step)}`;
}
