// All charts: which there are, which are seen, and the data of those.

import { Chart } from "./chart.js";
import { lineStyle } from "./colours.js";
import { element } from "./element.js";
import { panelsOf } from "./panels.js";
import { state } from "./state.js";

const AHEAD = "300px"; // below what is seen
const AT_ONCE = 3; // charts whose data is asked for together, after the first one

/** Keeps the charts of `{runs}`, the chosen ones, in `place`. */
export class Charts {
  #charts = new Map(); // by the panel's id
  #seen = new Set();
  #stale = new Set();
  #loading = new Map(); // chart -> AbortController
  #runs = [];
  #shape = "";
  #drawn = false; // the first chart, which gets the server for itself

  constructor(place, api, { pointed, announce }) {
    this.place = place;
    this.api = api;
    this.actions = {
      zoomed: (zoom) => this.zoom(zoom),
      pointed,
      announce,
      csv: (run, members) => api.csv(run, members, state),
    };
    this.watcher = new IntersectionObserver((entries) => this.#watched(entries), { rootMargin: AHEAD });
  }

  /** Shows these runs; `changed` names those with other data than before, or is null for all. */
  show(runs, changed = null) {
    this.#runs = runs;
    this.#build();
    for (const chart of this.#charts.values()) {
      if (!changed || this.#partsOf(chart).some(({ run }) => changed.has(run.id))) this.#stale.add(chart);
    }
    this.#load();
  }

  /** Other colours, axes or marks of the same data. */
  redraw() {
    for (const chart of this.#charts.values()) {
      chart.range = this.range;
      chart.redraw();
    }
  }

  /** Shows `[from, to]` as far as runs reach, or all. */
  zoom(part) {
    state.set({ zoom: part && this.#inside(part) });
  }

  /** The panels that there are. */
  get ids() {
    return [...this.#charts.keys()];
  }

  /** What all plots show: the chosen part, or everything. */
  get range() {
    const ends = this.#runs.map((run) => run.extent?.[state.x]).filter(Boolean);
    if (state.zoom) return state.zoom;
    if (!ends.length) return [0, 1];
    return [Math.min(...ends.map(([from]) => from)), Math.max(...ends.map(([, to]) => to))];
  }

  /** The chart that has the focus, or is under the pointer. */
  get current() {
    const figure = document.activeElement?.closest?.(".chart") ?? this.place.querySelector(".chart:hover");
    return [...this.#charts.values()].find((chart) => chart.element === figure) ?? null;
  }

  #inside([from, to]) {
    const all = this.#runs.map((run) => run.extent?.[state.x]).filter(Boolean);
    const [first, last] = [Math.min(...all.map(([a]) => a)), Math.max(...all.map(([, b]) => b))];
    const zoom = [Math.max(from, first), Math.min(to, last)];
    return zoom[1] > zoom[0] && (zoom[0] > first || zoom[1] < last) ? zoom : null;
  }

  #build() {
    const panels = panelsOf(this.#runs.flatMap((run) => run.series ?? []));
    const wanted = panels.filter(({ heading, section }) =>
      `${section} ${heading}`.toLowerCase().includes(state.find.trim().toLowerCase()),
    );
    const shape = JSON.stringify(wanted);
    if (shape === this.#shape) return;
    this.#shape = shape;
    const before = this.#charts;
    this.#charts = new Map();
    for (const panel of wanted) {
      const old = before.get(panel.id);
      const same = old && JSON.stringify(old.panel) === JSON.stringify(panel);
      const chart = same ? old : new Chart(panel, this.actions);
      if (!same) this.#stale.add(chart);
      this.#charts.set(panel.id, chart);
    }
    for (const chart of before.values()) {
      if (this.#charts.get(chart.panel.id) !== chart) this.#forget(chart);
    }
    this.#arrange(wanted);
    for (const chart of this.#charts.values()) this.watcher.observe(chart.element);
  }

  #arrange(panels) {
    const sections = Map.groupBy
      ? Map.groupBy(panels, ({ section }) => section)
      : panels.reduce((map, one) => map.set(one.section, [...(map.get(one.section) ?? []), one]), new Map());
    this.place.replaceChildren(
      ...[...sections].map(([section, members]) =>
        element(
          "section",
          { class: "section", "aria-label": section },
          element("h2", {}, section),
          element("div", { class: "grid" }, members.map(({ id }) => this.#charts.get(id).element)),
        ),
      ),
    );
  }

  #forget(chart) {
    this.watcher.unobserve(chart.element);
    this.#loading.get(chart)?.abort();
    for (const set of [this.#loading, this.#seen, this.#stale]) set.delete(chart);
  }

  #watched(entries) {
    const byElement = new Map([...this.#charts.values()].map((chart) => [chart.element, chart]));
    for (const { target, isIntersecting } of entries) {
      const chart = byElement.get(target);
      if (chart) this.#seen[isIntersecting ? "add" : "delete"](chart);
    }
    this.#load();
  }

  #partsOf({ panel }) {
    return this.#runs
      .map((run) => ({
        run,
        members: panel.members.filter(({ kind, name }) => run.series?.some((s) => s.kind === kind && s.name === name)),
      }))
      .filter(({ members }) => members.length);
  }

  /** Asks for the data of charts that are seen and have older data, a few at once, from the top. */
  #load() {
    for (const chart of this.#charts.values()) {
      if (this.#loading.size >= (this.#drawn ? AT_ONCE : 1)) return;
      if (!this.#stale.has(chart) || !this.#seen.has(chart) || this.#loading.has(chart)) continue;
      this.#stale.delete(chart);
      this.#fetch(chart);
    }
  }

  async #fetch(chart) {
    const stopping = new AbortController();
    this.#loading.set(chart, stopping);
    const asked = {
      x: state.x,
      zoom: state.zoom,
      smooth: chart.panel.noisy ? state.smooth : 0,
      points: Math.round(chart.place.clientWidth) || 600,
    };
    try {
      const parts = await Promise.all(
        this.#partsOf(chart).map(async ({ run, members }) => {
          const data = await this.api.series(run, members, asked, stopping.signal);
          return { run, number: run.number, data };
        }),
      );
      const same = asked.x === state.x && String(asked.zoom) === String(state.zoom);
      if (same) chart.draw(parts, this.#marks(parts), this.range);
      else this.#stale.add(chart);
    } catch (error) {
      if (error.name !== "AbortError") chart.fail(error.message);
    } finally {
      this.#drawn = true;
      this.#loading.delete(chart);
      this.#load();
    }
  }

  #marks(parts) {
    const one = parts.length === 1;
    const all = parts.flatMap(({ run }) =>
      (run.events ?? []).map((event) => ({
        ...event,
        x: event[state.x],
        run: one ? null : run,
        colour: one ? null : lineStyle(run.number).colour,
      })),
    );
    return all.filter(({ x }) => Number.isFinite(x)).sort((a, b) => a.x - b.x);
  }
}
