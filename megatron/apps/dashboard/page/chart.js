// One chart: a plot with its title, its legend with the values under the pointer, and its buttons.

import { isDark, lineStyle, seriesDash, swatch } from "./colours.js";
import { element } from "./element.js";
import { download, fileName, picture } from "./exports.js";
import { position, write } from "./format.js";
import { eventText } from "./marks.js";
import { Plot } from "./plot.js";
import { state } from "./state.js";

const NEAR_MARK = 6; // pixels
const MOST_EVENTS = 3;

/** The index of the value of a rising list that is next to `x`. */
function nearest(list, x) {
  let [low, high] = [0, list.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (list[middle] <= x) low = middle;
    else high = middle;
  }
  return x - list[low] <= list[high] - x ? low : high;
}

/**
 * Draws a panel of panels.js. `zoomed` is that of `Plot`;
 * `pointed` gets the position of the pointer, or null, and words about the events there; `csv` gives the address of
 * the table of what is seen, for a run.
 */
export class Chart {
  static #pointed = null; // the chart that speaks for all
  static #touched = false; // by a finger, whose position stays when it is lifted

  #lines = [];
  #marks = [];
  #values = []; // [element, line], the legend's

  constructor(panel, { zoomed, pointed, announce, csv }) {
    this.panel = panel;
    this.announce = announce;
    this.csv = csv;
    this.place = element("div", {
      class: "plot",
      tabindex: "0",
      role: "application",
      "aria-roledescription": "chart",
      "aria-label": panel.heading,
    });
    this.legend = element("ul", { class: "values" });
    this.note = element("p", { class: "note", hidden: true });
    this.log = this.#button("log", "Logarithmic axis (L)", () => state.toggle("log", panel.id));
    this.element = element(
      "figure",
      { class: "chart", "aria-busy": "true", "aria-label": panel.heading },
      element(
        "figcaption",
        {},
        element("h3", {}, panel.heading),
        this.log,
        this.#button("PNG", "Save as a picture", () => this.savePicture()),
        this.#button("CSV", "Save what is seen as a table", () => this.saveTable()),
      ),
      this.place,
      this.note,
      this.legend,
    );
    this.plot = new Plot(this.place, {
      zoomed,
      drawn: () => this.place.setAttribute("aria-label", this.#summary()),
      pointed: (x) => {
        if (x === null && Chart.#touched) return;
        this.#readout(x);
        if (Chart.#pointed === this) pointed(x, this.#eventsAt(x));
      },
    });
    this.place.addEventListener("keydown", (event) => this.#walk(event));
    this.place.addEventListener("blur", () => {
      this.plot.leave();
      pointed(null, "");
    });
    for (const kind of ["pointerenter", "pointerdown", "focusin"]) {
      // In the capturing phase, which is before the plot's own.
      this.element.addEventListener(kind, (event) => this.#speak(event), true);
    }
    this.element.addEventListener("pointerleave", (event) => {
      if (event.pointerType === "mouse" && !Chart.#touched) pointed(null, "");
    });
  }

  /**
   * Draws the lines of runs: `[{run, number, several, data}]`, where `data` gives `{x, y, smooth?}` of a
   * member; `marks` are events with their position.
   */
  draw(parts, marks, range) {
    const { members } = this.panel;
    const alone = parts.length === 1;
    this.#lines = parts.flatMap(({ run, number, data }) =>
      members.flatMap((member, place) => {
        const points = data(member);
        if (!points?.y.some(Number.isFinite)) return [];
        const style = lineStyle(alone ? place + number : number);
        const dash = alone ? style.dash : seriesDash(place);
        const name = members.length > 1 ? member.label : "";
        const label = alone && !points.low ? member.label : [run.name, name].filter(Boolean).join(" · ");
        const key = `${run.id} ${member.kind} ${member.name}`;
        return [{ key, label, colour: style.colour, dash, run, member, dots: this.panel.unit === "rank", ...points }];
      }),
    );
    this.#marks = marks;
    this.range = range;
    this.element.setAttribute("aria-busy", "false");
    this.#empty(this.#lines.length ? "" : "No values here.");
    this.#drawLegend();
    this.redraw();
  }

  /** The same data, after a change of colours or axes. */
  redraw() {
    const { log, logX, cut, x: clock, marks } = state;
    const on = log.has(this.panel.id);
    this.log.setAttribute("aria-pressed", String(on));
    if (!this.#lines.length) return;
    this.plot.show({
      lines: this.#lines,
      marks: marks ? this.#marks : [],
      range: this.range,
      clock,
      unit: this.panel.unit,
      log: on,
      logX,
      cut,
      dark: isDark(),
    });
  }

  /** Says why there is nothing to see. */
  fail(words) {
    this.element.setAttribute("aria-busy", "false");
    if (!this.#lines.length) this.#empty(words);
  }

  async savePicture() {
    if (!this.plot.canvas) return;
    const legend = this.#lines.map(({ colour, label }) => ({ colour, text: label }));
    download(`${fileName(this.panel.heading)}.png`, await picture(this.plot.canvas, this.panel.heading, legend));
  }

  saveTable() {
    for (const run of new Set(this.#lines.map((line) => line.run))) {
      const members = this.#lines.filter((line) => line.run === run).map((line) => line.member);
      for (const each of run.members ?? [run]) {
        element("a", { href: this.csv(each, members), download: `${fileName(each.name, this.panel.heading)}.csv` }).click();
      }
    }
  }

  #speak({ pointerType }) {
    Chart.#pointed = this;
    if (pointerType) Chart.#touched = pointerType === "touch";
  }

  #button(text, name, act) {
    return element("button", { class: "quiet", type: "button", title: name, "aria-label": `${name}: ${this.panel.heading}`, onclick: act }, text);
  }

  #empty(words) {
    this.note.textContent = words;
    this.note.hidden = !words;
    this.place.hidden = Boolean(words);
  }

  #drawLegend() {
    this.#values = this.#lines.map((line) => [element("output", {}), line]);
    const entries = this.#values.map(([value, line]) =>
      element("li", {}, swatch(line), element("span", { class: "label", dir: "auto" }, line.label), value),
    );
    this.legend.replaceChildren(...entries);
    this.#readout(null);
  }

  /** Writes the values at a position, or the last ones. */
  #readout(x) {
    for (const [place, line] of this.#values) {
      const last = line.x.length - 1;
      const outside = x !== null && (x < line.x[0] || x > line.x[last]);
      const index = x === null ? last : nearest(line.x, x);
      const raw = write(this.panel.unit, line.y[index]);
      const { smooth } = line;
      const mean = smooth && write(this.panel.unit, smooth.y[x === null ? smooth.x.length - 1 : nearest(smooth.x, x)]);
      const edges = line.low && `${raw} (${write(this.panel.unit, line.low[index])} to ${write(this.panel.unit, line.high[index])})`;
      place.textContent = outside ? "" : smooth ? `mean ${mean} · measured ${raw}` : edges || raw;
    }
  }

  /** Words of the events at a position. */
  #eventsAt(x) {
    if (x === null || !state.marks) return "";
    const near = this.#marks.filter((mark) => this.plot.distance(mark.x, x) <= NEAR_MARK);
    return [...new Set(near.map(eventText))].slice(0, MOST_EVENTS).join(" · ");
  }

  #summary() {
    const ends = this.#lines.map(({ label, y }) => `${label} ${write(this.panel.unit, y.at(-1))}`);
    const [low, high] = this.plot.heights.map((value) => write(this.panel.unit, value));
    const words = `${this.panel.heading}, from ${low} to ${high}. Last values: ${ends.join(", ")}.`;
    return `${words} Arrow keys read values.`;
  }

  /** Arrow keys go from value to value, which are read aloud. */
  #walk(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -Infinity, End: Infinity }[event.key];
    const first = this.#lines[0];
    if (!steps || !first || event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    const { x } = first;
    const at = this.at === undefined ? (steps > 0 ? -1 : x.length) : nearest(x, this.at);
    this.at = x[Math.max(0, Math.min(x.length - 1, at + steps))];
    this.plot.point(this.at);
    const words = this.#values.map(([place, { label }]) => `${label} ${place.textContent}`);
    this.announce(`${position(state.x, this.at)}: ${words.join(", ")}`);
  }
}
