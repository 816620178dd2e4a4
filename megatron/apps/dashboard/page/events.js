// The events of the runs as a table, the newest first.

import { lineStyle, swatch } from "./colours.js";
import { element } from "./element.js";
import { grouped, title, write } from "./format.js";
import { kindOf } from "./marks.js";

const MOST = 500;
const UNITS = [[/seconds/, "seconds"], [/bytes/, "bytes"], [/tokens|samples|iteration|steps|number|rank/, "count"]];
const unitOf = (name) => UNITS.find(([pattern]) => pattern.test(name))?.[1] ?? "number";

/** A table of the events of runs, with a choice of kinds. `chosen` is the set of kinds left out. */
export function eventsView(runs, without, changed) {
  const all = runs.flatMap((run) => (run.events ?? []).map((event) => ({ ...event, run })));
  const count = runs.reduce((sum, run) => sum + (run.event_count ?? 0), 0);
  if (!all.length) return [element("p", { class: "note" }, "No events yet.")];
  const kinds = [...new Set(all.map(({ kind }) => kind))].sort();
  const shown = all.filter(({ kind }) => !without.has(kind)).sort((a, b) => b.iteration - a.iteration);
  const several = runs.length > 1;
  return [
    element(
      "fieldset",
      { class: "kinds" },
      element("legend", { class: "unseen" }, "Kinds of events"),
      kinds.map((kind) =>
        element(
          "label",
          {},
          element("input", { type: "checkbox", checked: !without.has(kind), onchange: () => changed(kind) }),
          ` ${kindOf(kind).name} (${grouped(all.filter((event) => event.kind === kind).length)})`,
        ),
      ),
    ),
    element(
      "div",
      { class: "wide", tabindex: "0", role: "group", "aria-label": "Table of events" },
      element(
        "table",
        {},
        element("thead", {}, element("tr", {}, ["Step", "Event", several && "Run", "Values"].filter(Boolean).map((name) => element("th", { scope: "col", class: name === "Step" ? "number" : null }, name)))),
        element("tbody", {}, shown.slice(0, MOST).map((event) => row(event, several))),
      ),
    ),
    (shown.length > MOST || count > all.length) &&
      element("p", { class: "hint" }, `The last ${grouped(Math.min(MOST, shown.length))} of ${grouped(Math.max(count, shown.length))}.`),
  ].filter(Boolean);
}

function row({ kind, iteration, values, run }, several) {
  const words = Object.entries(values ?? {})
    .filter(([, value]) => value !== null)
    .map(([name, value]) => `${title(name)}: ${typeof value === "number" ? write(unitOf(name), value) : value}`);
  return element(
    "tr",
    {},
    element("td", { class: "number" }, grouped(iteration)),
    element("td", {}, kindOf(kind).name),
    several && element("td", { dir: "auto" }, swatch(lineStyle(run.number)), run.name),
    element("td", {}, words.join(" · ")),
  );
}
