// The page of the runs: what the server knows is fetched, and shown as the state says.
//
// A run is `{id, name, path, number, state, words, left_out, progress, error, broken, planned, version, last, extent,
// series, events, totals, configuration}`; what follows `version` comes with its summary.

import * as api from "./api.js";
import { Charts } from "./charts.js";
import { lineStyle, onTheme } from "./colours.js";
import { ConfigurationView } from "./configuration.js";
import { byId, element } from "./element.js";
import { eventsView } from "./events.js";
import { CLOCKS, position } from "./format.js";
import { listenToKeys } from "./keys.js";
import { matches } from "./filter.js";
import { groupsOf } from "./groups.js";
import { runList } from "./runs.js";
import { SMOOTHINGS, TABS, state } from "./state.js";
import { columnChoice, ordered, overview } from "./table.js";
import { TextsView } from "./texts.js";

const HEALTH = { up: "Connected", down: "The server does not answer", saved: "Saved page" };
const RELOADED = new Set(["x", "smooth", "zoom", "off", "find", "runs", "group"]); // whose change needs other data

let runs = [];
let listed = false; // whether the server has said which there are
const known = new Map(); // id -> version of the summary that is shown
const hiddenKinds = new Set();
const drawn = new Map(); // tab -> what it shows, as text

const announce = (words) => {
  byId("announcer").textContent = words;
};
const charts = new Charts(byId("charts"), api, {
  pointed: (x, events) => {
    byId("position").hidden = x === null;
    byId("position").textContent = x === null ? "" : [position(state.x, x), events].filter(Boolean).join(" · ");
  },
  announce,
});
const texts = new TextsView(byId("texts"));
const configuration = new ConfigurationView(byId("configuration"));

const chosen = () => runs.filter((run) => run.series && !state.off.has(run.id) && matches(run, state.runs));

// Data

/** Takes the list of runs, and fetches what is new of each. */
async function take(list) {
  const before = new Map(runs.map((run) => [run.id, run]));
  listed = true;
  runs = list.map((run, number) => ({ ...before.get(run.id), ...run, number }));
  drawRuns();
  const changed = new Set();
  await Promise.all(
    runs.map(async (run) => {
      if (run.state === "loading" || run.state === "error" || known.get(run.id) === run.version) return;
      const { version } = run;
      try {
        const found = await api.summary(run);
        const current = runs.find(({ id }) => id === run.id);
        if (!current) return;
        Object.assign(current, found);
        known.set(run.id, version);
        changed.add(run.id);
      } catch (error) {
        complain(error.message);
      }
    }),
  );
  if (changed.size) drawRuns(); // whose order and numbers their summaries say
  if (changed.size || !charts.ids.length) draw(changed);
}

function complain(words) {
  byId("trouble").textContent = words;
  byId("trouble").hidden = !words;
}

// Drawing

/** Whether a tab does not show this already: what is drawn again loses the text that is selected. */
function differs(tab, shown, content) {
  const text = JSON.stringify([shown.map(({ id, name, number }) => [id, name, lineStyle(number)]), content]);
  if (drawn.get(tab) === text) return false;
  drawn.set(tab, text);
  return true;
}

function drawRuns() {
  const focused = document.activeElement?.closest?.("[data-run]")?.dataset.run;
  // A group has one colour.
  groupsOf(runs, state.group).forEach((group, number) => group.runs.forEach((run) => Object.assign(run, { number })));
  const fitting = runs.filter((run) => matches(run, state.runs));
  const sorted = state.sort ? ordered(groupsOf(fitting.filter(({ totals }) => totals), false)).flatMap((group) => group.runs) : fitting;
  byId("runs").replaceChildren(...runList([...sorted, ...fitting.filter((run) => !sorted.includes(run))]));
  byId("run-tools").hidden = runs.length < 2;
  byId("no-runs").hidden = !listed || !runs.length || fitting.length > 0;
  drawHealth();
  if (focused) byId("runs").querySelector(`[data-run="${CSS.escape(focused)}"] input`)?.focus();
  const name = runs.length === 1 ? runs[0].name : `${runs.length} runs`;
  byId("heading").textContent = name;
  document.title = runs.length ? name : "Runs";
}

let health = "unknown";

/** Says "Live" while a run writes, and else only that the server is there. */
function drawHealth() {
  const live = runs.filter((run) => run.state === "live").length;
  byId("health").dataset.state = health;
  if (health === "up" && live) byId("health").textContent = runs.length > 1 ? `Live: ${live} of ${runs.length}` : "Live";
  else byId("health").textContent = HEALTH[health] ?? "Connecting";
  byId("health").dataset.live = String(live > 0);
}

function drawOverview(shown) {
  const focused = document.activeElement?.dataset?.key;
  byId("overview").replaceChildren(...overview(groupsOf(shown, state.group)));
  if (focused) byId("overview").querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
  byId("columns").hidden = !shown.some(({ configuration }) => Object.keys(configuration ?? {}).length);
  if (byId("columns").open) byId("column-choice").replaceChildren(...columnChoice(shown));
}

/** Draws the part of the page that is chosen; charts again where runs in `changed` have other data. */
function draw(changed = null) {
  const shown = chosen();
  for (const tab of TABS) byId(tab).hidden = tab !== state.tab;
  byId("chart-tools").hidden = state.tab !== "charts";
  byId("overview").hidden = state.tab !== "charts";
  byId("table-tools").hidden = state.tab !== "charts";
  if (state.tab === "charts") drawOverview(shown);
  if (state.tab === "charts") {
    charts.show(shown, changed);
    if (!charts.ids.length) byId("charts").replaceChildren(element("p", { class: "note" }, emptyWords(shown)));
  }
  if (state.tab === "events") drawEvents();
  if (state.tab === "texts") drawTexts();
  if (state.tab === "configuration") drawConfiguration();
}

function emptyWords(shown) {
  if (!listed) return "";
  if (shown.length) return state.find ? `No chart is called “${state.find}”.` : "No values yet.";
  if (!runs.length) return "No runs here.";
  if (runs.every((run) => run.state === "error")) return "None of the files can be read.";
  if (runs.some((run) => run.state === "loading")) return "Reading the runs for the first time. An index is kept, and the next time is quick.";
  return "No run is chosen.";
}

function drawConfiguration() {
  const shown = chosen();
  const content = shown.map((run) => [run.configuration, run.record]);
  if (differs("configuration", shown, content)) configuration.show(shown);
}

function drawEvents() {
  const shown = chosen();
  if (!differs("events", shown, [shown.map((run) => run.events), [...hiddenKinds]])) return;
  byId("events").replaceChildren(
    ...eventsView(shown, hiddenKinds, (kind) => {
      if (!hiddenKinds.delete(kind)) hiddenKinds.add(kind);
      drawEvents();
    }),
  );
}

async function drawTexts() {
  const shown = chosen();
  try {
    const found = await Promise.all(shown.map(api.texts));
    if (state.tab !== "texts" || !differs("texts", shown, found)) return;
    texts.show(found.flatMap((own, place) => own.map((text) => ({ ...text, run: shown[place] }))));
  } catch (error) {
    complain(error.message);
  }
}

// Controls

function showControls() {
  byId("x").value = state.x;
  byId("smooth").value = String(SMOOTHINGS.indexOf(state.smooth));
  byId("smooth-value").textContent = state.smooth ? String(state.smooth) : "none";
  byId("logx").checked = state.logX;
  byId("cut").checked = state.cut;
  byId("marks").checked = state.marks;
  byId("all").hidden = !state.zoom;
  for (const name of ["find", "filter"]) {
    if (byId(name) !== document.activeElement) byId(name).value = name === "find" ? state.find : state.runs;
  }
  byId("group").checked = state.group;
  for (const choice of document.querySelectorAll("[name=tab]")) choice.checked = choice.value === state.tab;
}

function prepareControls() {
  byId("x").replaceChildren(...Object.entries(CLOCKS).map(([value, { name }]) => element("option", { value }, name.toLowerCase())));
  byId("smooth").max = String(SMOOTHINGS.length - 1);
  byId("x").addEventListener("change", () => state.set({ x: byId("x").value, zoom: null }));
  byId("smooth").addEventListener("input", () => state.set({ smooth: SMOOTHINGS[byId("smooth").value] }));
  byId("logx").addEventListener("change", () => state.set({ logX: byId("logx").checked }));
  byId("cut").addEventListener("change", () => state.set({ cut: byId("cut").checked }));
  byId("marks").addEventListener("change", () => state.set({ marks: byId("marks").checked }));
  byId("find").addEventListener("input", () => state.set({ find: byId("find").value }));
  byId("filter").addEventListener("input", () => state.set({ runs: byId("filter").value }));
  byId("group").addEventListener("change", () => state.set({ group: byId("group").checked }));
  byId("columns").addEventListener("toggle", () => drawOverview(chosen()));
  byId("save").hidden = !api.file;
  if (api.file) byId("save").href = api.file;
  byId("all").addEventListener("click", () => state.set({ zoom: null }));
  byId("tabs").addEventListener("change", (event) => state.set({ tab: event.target.value }));
  byId("skip").addEventListener("click", (event) => {
    event.preventDefault(); // the address has the state
    byId("main").focus();
  });
}

state.onChange((names) => {
  showControls();
  if (["off", "runs", "group", "sort"].some((name) => names.has(name))) drawRuns();
  if (names.has("sort") || names.has("columns")) {
    drawOverview(chosen());
    if (names.size === 1) return;
  }
  if (names.has("zoom")) charts.redraw();
  if (names.has("tab") || [...names].some((name) => RELOADED.has(name))) {
    draw(names.size === 1 && (names.has("tab") || names.has("find")) ? new Set() : null);
  } else {
    charts.redraw();
  }
});
onTheme(() => {
  drawRuns();
  draw(new Set(runs.map(({ id }) => id)));
});

prepareControls();
showControls();
listenToKeys({ charts, runs: () => runs });
draw();
api.follow(take, (now, words) => {
  health = now;
  drawHealth();
  complain(words);
  if (now !== "up") return;
  charts.retry();
  if (state.tab === "texts") drawTexts();
});
