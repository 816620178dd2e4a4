// All charts: which there are, which are seen, and the data of those.

import { Chart } from "./chart.js";
import { lineStyle } from "./colours.js";
import { element } from "./element.js";
import { groupsOf, meanOf } from "./groups.js";
import { panelsOf } from "./panels.js";
import { state } from "./state.js";

const AHEAD = "300px"; // below what is seen
const AT_ONCE = 3; // charts whose data is asked for together, after the first one

/**
 * What a chart shows: its data is "stale", "loading", "fresh" or "failed". It becomes stale also while
 * a request is under way, whose answer is drawn all the same.
 */
class Slot {
  data = "stale";
  visible = false;
  request = null; // an AbortController
  answered = false; // at least once

  constructor(chart) {
    this.chart = chart;
  }
}

/** The parts of runs as those of their groups: the means of members, with what is least and greatest. */
function grouped(parts) {
  const byId = new Map(parts.map((part) => [part.run.id, part]));
  return groupsOf(parts.map(({ run }) => run), true).map(({ id, name, runs }) => {
    const members = runs.map((run) => byId.get(run.id));
    if (members.length === 1) return members[0];
    const run = { id, name, members: runs };
    const data = (member) => {
      const curves = members.map((part) => part.data(member)).filter(Boolean);
      return curves.length ? meanOf(curves.map((curve) => curve.smooth ?? curve)) : null;
    };
    return { run, number: members[0].number, data };
  });
}

/** Keeps the charts of `{runs}`, the chosen ones, in `place`. */
export class Charts {
  #slots = new Map(); // by the panel's id
  #runs = [];
  #shape = "";

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
    for (const slot of this.#slots.values()) {
      if (!changed || this.#partsOf(slot.chart).some(({ run }) => changed.has(run.id))) slot.data = "stale";
    }
    this.#load();
  }

  /** Asks again for what the server did not answer. */
  retry() {
    for (const slot of this.#slots.values()) {
      if (slot.data === "failed") slot.data = "stale";
    }
    this.#load();
  }

  /** Other colours, axes or marks of the same data. */
  redraw() {
    for (const { chart } of this.#slots.values()) {
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
    return [...this.#slots.keys()];
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
    return [...this.#slots.values()].find(({ chart }) => chart.element === figure)?.chart ?? null;
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
    const before = this.#slots;
    this.#slots = new Map();
    for (const panel of wanted) {
      const old = before.get(panel.id);
      const same = old && JSON.stringify(old.chart.panel) === JSON.stringify(panel);
      this.#slots.set(panel.id, same ? old : new Slot(new Chart(panel, this.actions)));
    }
    for (const slot of before.values()) {
      if (this.#slots.get(slot.chart.panel.id) !== slot) this.#forget(slot);
    }
    this.#arrange(wanted);
    for (const { chart } of this.#slots.values()) this.watcher.observe(chart.element);
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
          element("div", { class: "grid" }, members.map(({ id }) => this.#slots.get(id).chart.element)),
        ),
      ),
    );
  }

  #forget({ chart, request }) {
    this.watcher.unobserve(chart.element);
    request?.abort();
  }

  #watched(entries) {
    const byElement = new Map([...this.#slots.values()].map((slot) => [slot.chart.element, slot]));
    for (const { target, isIntersecting } of entries) {
      const slot = byElement.get(target);
      if (slot) slot.visible = isIntersecting;
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

  /**
   * Asks for the data of charts that are seen and have older data, a few at once, from the top. The
   * first one gets the server for itself.
   */
  #load() {
    const slots = [...this.#slots.values()];
    const most = slots.some(({ answered }) => answered) ? AT_ONCE : 1;
    let loading = slots.filter(({ request }) => request).length;
    for (const slot of slots) {
      if (loading >= most) return;
      if (slot.data !== "stale" || !slot.visible || slot.request) continue;
      loading += 1;
      this.#fetch(slot);
    }
  }

  async #fetch(slot) {
    const { chart } = slot;
    slot.data = "loading";
    slot.request = new AbortController();
    const { signal } = slot.request;
    const asked = {
      x: state.x,
      zoom: state.zoom,
      smooth: chart.panel.noisy ? state.smooth : 0,
      points: Math.round(chart.place.clientWidth) || 600,
    };
    let data = "stale";
    try {
      const parts = await Promise.all(
        this.#partsOf(chart).map(async ({ run, members }) => ({
          run,
          number: run.number,
          data: await this.api.series(run, members, asked, signal),
        })),
      );
      if (asked.x === state.x && String(asked.zoom) === String(state.zoom)) {
        const drawn = state.group ? grouped(parts) : parts;
        chart.draw(drawn, drawn.some(({ run }) => run.members) ? [] : this.#marks(parts), this.range);
        data = "fresh";
      }
    } catch (error) {
      if (signal.aborted) return;
      chart.fail(error.message);
      data = "failed";
    } finally {
      slot.answered = true;
      slot.request = null;
      if (slot.data === "loading") slot.data = data;
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
