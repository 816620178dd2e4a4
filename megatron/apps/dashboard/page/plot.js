// One plot: lines over a horizontal axis that all plots share, drawn by uPlot.

import { themeColour } from "./colours.js";
import { CLOCKS, write } from "./format.js";
import { drawMarks } from "./marks.js";
import { followTouch } from "./touch.js";

const FONT = '11px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';
const SYNCHRONIZED = "runs";
const FEW_POINTS = 60;
const LEAST_DRAG = 6; // pixels; less is a click
const PALE = 0.3;

/** The values of a line as uPlot takes them: null is a gap. */
const drawable = (values, log) => values.map((value) => (value === null || (log && value <= 0) ? null : value));

const OUTLIERS = 0.01; // the share at either end that is left out where spikes are cut off

/** The least and greatest values that are seen but the outliers. */
function usual(plot) {
  const [from, to] = plot.series[0].idxs;
  const values = plot.data.slice(1).flatMap((ys) => Array.from(ys.slice(from, to + 1)).filter(Number.isFinite));
  values.sort((a, b) => a - b);
  const out = Math.floor(OUTLIERS * values.length);
  return values.length ? [values[out], values[values.length - 1 - out]] : [null, null];
}

const rangeOf = (log, cut) => (plot, first, last) => {
  const [least, most] = cut ? usual(plot) : [first, last];
  if (least === null || most === null) return [log ? 0.1 : 0, 1];
  if (log) return least === most ? [least / 2, most * 2] : [least * 0.94, most * 1.06];
  const margin = 0.06 * (most - least) || 0.05 * Math.abs(most) || 1;
  return [least >= 0 && least < margin ? 0 : least - margin, most + margin];
};

/** Of a logarithmic axis: every value over less than two decades, else 1, 2 and 5 or the powers. */
function logTicks(plot, values, axis) {
  const { min, max } = plot.scales[plot.axes[axis].scale];
  const decades = Math.log10(max / min);
  const shown = decades < 0.9 ? null : decades < 2.5 ? [1, 2, 5] : [1];
  const mantissa = (value) => Math.round(value / 10 ** Math.floor(Math.log10(value) + 1e-9));
  return values.map((value) => (value > 0 && (!shown || shown.includes(mantissa(value))) ? value : null));
}

/**
 * uPlot with what this page needs of it. A line is `{key, name, colour, dash, x, y, smooth?, low?, high?,
 * dots?}`: smooth is a `{x, y}`, low and high are the edges of a band, dots leave the line out; x rises. `zoomed` gets `[from, to]`, or null where all is to be seen;
 * `pointed` a position, or null where the pointer has left; `drawn` is called after each drawing.
 */
export class Plot {
  #plot = null;
  #shape = "";
  #content = null;

  constructor(place, { zoomed, pointed, drawn }) {
    this.place = place;
    this.drawn = drawn;
    this.zoomed = zoomed;
    this.pointed = pointed;
    new ResizeObserver(() => this.#resize()).observe(place);
  }

  /** Draws `{lines, marks, range, clock, unit, log, logX, cut, dark}`; the same ones without flicker. */
  show(content) {
    this.#content = content;
    const { lines, clock, unit, log, logX, cut, dark } = content;
    const styles = lines.map(({ key, colour, dash, smooth, low, dots, x }) => [key, colour, dash, !!smooth, !!low, dots, x.length < FEW_POINTS]);
    const shape = JSON.stringify([clock, unit, log, logX, cut, dark, styles]);
    const data = this.#data();
    if (this.#plot && shape === this.#shape) {
      this.#plot.batch(() => {
        this.#plot.setData(data, false);
        this.#plot.setScale("x", { min: content.range[0], max: content.range[1] });
      });
      return;
    }
    this.#plot?.destroy();
    this.#shape = shape;
    this.#plot = new uPlot(this.#options(), data, this.place);
    this.#listen();
  }

  /** Puts the pointer's line at a position, here and in the other plots. */
  point(x) {
    if (!this.#plot) return;
    const left = this.#plot.valToPos(x, "x");
    this.#plot.setCursor({ left, top: this.#plot.over.clientHeight / 2 }, true, true);
  }

  leave() {
    this.#plot?.setCursor({ left: -10, top: -10 }, true, true);
  }

  /** The canvas with axes and lines. */
  get canvas() {
    return this.#plot?.ctx.canvas ?? null;
  }

  /** The ends of the vertical axis. */
  get heights() {
    const { min, max } = this.#plot.scales.y;
    return [min, max];
  }

  /** Pixels of the page between two positions. */
  distance(a, b) {
    return Math.abs(this.#plot.valToPos(a, "x") - this.#plot.valToPos(b, "x"));
  }

  #data() {
    const { lines, log, logX } = this.#content;
    const start = ({ x }) => (logX ? x.findIndex((value) => value > 0) : 0);
    const tables = lines.flatMap((line) =>
      [line, line.smooth, ...bandOf(line)].filter(Boolean).map((points) => {
        const from = Math.max(0, start(points));
        return [points.x.slice(from), drawable(points.y.slice(from), log)];
      }),
    );
    if (!tables.length) return [[]];
    return tables.length === 1 ? tables[0] : uPlot.join(tables);
  }

  #options() {
    const { lines, clock, unit, log, logX, cut } = this.#content;
    const [text, grid] = [themeColour("faint"), themeColour("line")];
    const axis = { stroke: text, font: FONT, grid: { stroke: grid, width: 1 }, ticks: { show: false } };
    const words = (name) => (plot, values) => values.map((value) => (value === null ? "" : write(name, value)));
    return {
      ...this.#size(),
      legend: { show: false },
      padding: [10, 12, 0, 0],
      scales: {
        x: { time: false, distr: logX ? 3 : 1, range: () => this.#range() },
        y: { distr: log ? 3 : 1, range: rangeOf(log, cut) },
      },
      axes: [
        { ...axis, space: 70, size: 28, values: words(CLOCKS[clock].unit), ...(logX && { filter: logTicks }) },
        { ...axis, space: 34, size: axisWidth, values: words(unit), ...(log && { filter: logTicks }) },
      ],
      series: [{}, ...lines.flatMap(seriesOf)],
      bands: bandsOf(lines),
      cursor: {
        drag: { x: true, y: false, setScale: false },
        sync: { key: SYNCHRONIZED, scales: ["x", null], filters: { pub: (type) => /move|leave/.test(type) } },
        points: { size: 6 },
        y: false,
      },
      hooks: {
        draw: [(plot) => drawMarks(plot, this.#content.marks), () => this.drawn()],
        setCursor: [(plot) => this.#pointed(plot)],
        setSelect: [(plot) => this.#selected(plot)],
      },
    };
  }

  #range() {
    const [from, to] = this.#content.range;
    const first = this.#content.logX && from <= 0 ? Math.min(1, to / 10) : from;
    return [first, to > first ? to : first + 1];
  }

  #pointed(plot) {
    const { left } = plot.cursor;
    this.pointed(left === null || left === undefined || left < 0 ? null : plot.posToVal(left, "x"));
  }

  #selected(plot) {
    const { left, width } = plot.select;
    if (width >= LEAST_DRAG) this.zoomed([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  }

  #listen() {
    const { over } = this.#plot;
    over.addEventListener("dblclick", () => this.zoomed(null));
    followTouch(over, {
      moved: (left) => this.#plot.setCursor({ left, top: over.clientHeight / 2 }, true, true),
      pinched: (from, to) => this.zoomed([this.#plot.posToVal(from, "x"), this.#plot.posToVal(to, "x")]),
    });
  }

  #size() {
    return { width: Math.max(200, this.place.clientWidth), height: Math.max(120, this.place.clientHeight) };
  }

  #resize() {
    const { width, height } = this.#size();
    if (this.place.clientWidth && this.#plot && (this.#plot.width !== width || this.#plot.height !== height)) {
      this.#plot.setSize({ width, height });
    }
  }
}

/** Room for the longest text of the vertical axis. */
function axisWidth(plot, values) {
  const longest = Math.max(4, ...(values ?? []).map((text) => String(text).length));
  return Math.ceil(12 + 6.4 * longest);
}

/** The two edges of a line of a group, as lines. */
const bandOf = ({ x, low, high }) => (low ? [{ x, y: high }, { x, y: low }] : []);

/** Fills between the edges, by their places among the series. */
function bandsOf(lines) {
  let place = 1;
  return lines.flatMap((line) => {
    const [first, count] = [place, seriesOf(line).length];
    place += count;
    return line.low ? [{ series: [first + 1, first + 2], fill: `${line.colour}33` }] : [];
  });
}

/** A line as measured, pale where a smoothed one is drawn over it. */
function seriesOf({ colour, dash, smooth, low, dots, x }) {
  if (dots) return [{ stroke: colour, width: 0, paths: () => null, points: { show: true, size: 3, fill: colour, width: 0 } }];
  const few = x.length < FEW_POINTS;
  const points = { show: few, size: 5, fill: colour };
  const whole = { stroke: colour, dash, width: 1.75, points: { show: false } };
  if (low) return [whole, ...[0, 0].map((width) => ({ width, points: { show: false } }))];
  if (!smooth) return [{ ...whole, width: few ? 1.75 : 1.25, points }];
  return [{ ...whole, dash: [], width: 1, alpha: PALE, points }, whole];
}
