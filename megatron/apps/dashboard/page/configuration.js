// The configuration of the runs side by side, and where they differ.

import { element } from "./element.js";
import { lineStyle, swatch } from "./colours.js";
import { isPlace } from "./groups.js";
import { recordCards } from "./records.js";

const ABSENT = "–";
const text = (value) => (value === undefined ? ABSENT : typeof value === "string" ? value : JSON.stringify(value));

/** Rows `[name, [text of each run], whether they differ]`, by name, those of places last. */
export function compared(runs) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.configuration ?? {})))]
    .sort((a, b) => isPlace(a) - isPlace(b) || (a < b ? -1 : 1));
  return names.map((name) => {
    const values = runs.map((run) => text(run.configuration?.[name]));
    return [name, values, new Set(values).size > 1];
  });
}

/** A table of all values of runs, with a search, and with differences alone where there are several. */
export class ConfigurationView {
  #runs = [];

  constructor(place) {
    const draw = () => this.#draw();
    this.find = element("input", { type: "search", placeholder: "Find a value", "aria-label": "Find a value", oninput: draw });
    this.differences = element("input", { type: "checkbox", checked: true, onchange: draw });
    this.only = element("label", {}, this.differences, " Differences only");
    this.table = element("div", { class: "wide", tabindex: "0", role: "group", "aria-label": "Table of the configuration" });
    this.tools = element("p", { class: "moment" }, this.find, this.only);
    this.records = element("div", { class: "records" });
    place.replaceChildren(this.tools, this.table, this.records);
  }

  show(runs) {
    this.#runs = runs;
    this.only.hidden = runs.length < 2;
    this.records.replaceChildren(...recordCards(runs));
    this.#draw();
  }

  #draw() {
    const runs = this.#runs;
    const word = this.find.value.trim().toLowerCase();
    const onlyDifferent = runs.length > 1 && this.differences.checked;
    const known = runs.some((run) => Object.keys(run.configuration ?? {}).length);
    const rows = compared(runs)
      .filter(([, , differ]) => differ || !onlyDifferent)
      .filter(([name, values]) => `${name} ${values.join(" ")}`.toLowerCase().includes(word));
    this.tools.hidden = !known;
    if (!rows.length) {
      const why = !known
        ? "These runs have no record of their configuration next to their metrics."
        : word ? "Nothing is called so." : "The configurations are the same.";
      this.table.replaceChildren(element("p", { class: "note" }, why));
      return;
    }
    const head = runs.map((run) =>
      element("th", { scope: "col", dir: "auto" }, swatch(lineStyle(run.number)), run.name),
    );
    this.table.replaceChildren(
      element(
        "table",
        { class: "configuration" },
        element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "Value"), head)),
        element("tbody", {}, rows.map(([name, values, differ]) =>
          element("tr", { class: differ && runs.length > 1 ? "differs" : null },
            element("th", { scope: "row" }, name),
            values.map((value) => element("td", { dir: "auto" }, value))))),
      ),
    );
  }
}
