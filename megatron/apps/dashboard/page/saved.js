// The answers of a server in a page that was saved as one file: what was known of the runs then. It
// has the names of api.js, which it replaces there.

import { byId } from "./element.js";

const content = byId("saved") ? JSON.parse(byId("saved").textContent) : [];
const known = new Map(content.map((run) => [run.listing.id, run]));
const idOf = ({ series }, { kind, name }) => series.find((one) => one.kind === kind && one.name === name)?.id;

export const runs = async () => content.map(({ listing }) => listing);
export const summary = async (run) => known.get(run.id).summary;
export const texts = async (run) => known.get(run.id).texts;
export const file = null;

/** Positions on another axis, between those that are known. */
function moved(clocks, clock, steps) {
  if (clock === "iteration") return steps;
  const [from, to] = [clocks.iteration, clocks[clock]];
  let at = 0;
  return steps.map((step) => {
    while (at < from.length - 2 && from[at + 1] < step) at += 1;
    const share = from.length > 1 ? (step - from[at]) / (from[at + 1] - from[at]) : 0;
    return to.length > 1 ? to[at] + share * (to[at + 1] - to[at]) : (to[0] ?? null);
  });
}

function part({ x, y }, zoom) {
  if (!zoom) return { x, y };
  const after = (value, list) => list.findIndex((each) => each >= value);
  const first = Math.max(0, after(zoom[0], x) - 1);
  const last = after(zoom[1], x);
  return { x: x.slice(first, last < 0 ? undefined : last + 1), y: y.slice(first, last < 0 ? undefined : last + 1) };
}

function curveOf(run, member, { x, zoom, smooth }) {
  const { curves, clocks } = known.get(run.id);
  const curve = curves[idOf(run, member)];
  if (!curve) return null;
  const drawn = ({ x: steps, y }) => part({ x: moved(clocks, x, steps), y }, zoom);
  const mean = smooth ? curve.smooth?.[String(smooth)] : null;
  return { ...drawn(curve), ...(mean && { smooth: drawn(mean) }) };
}

export async function series(run, members, asked) {
  const curves = new Map(members.map((member) => [idOf(run, member), curveOf(run, member, asked)]));
  return (member) => curves.get(idOf(run, member)) ?? null;
}

/** A table of the points that the file has. */
export function csv(run, members, state) {
  const rows = new Map();
  members.forEach((member, place) => {
    const { x, y } = curveOf(run, member, { ...state, smooth: 0 });
    x.forEach((at, index) => rows.set(at, rows.get(at) ?? []) && (rows.get(at)[place] = y[index]));
  });
  const cell = (text) => (/^[\w. -]*$/.test(text) && !/^[-]/.test(text) ? text : `"'${text.replaceAll('"', '""')}"`);
  const head = [state.x, ...members.map(({ kind, name }) => cell(kind === "train" ? name : `${kind} ${name}`))];
  const lines = [...rows].sort(([a], [b]) => a - b).map(([at, values]) => [at, ...members.map((_, place) => values[place] ?? "")]);
  return `data:text/csv;charset=utf-8,${encodeURIComponent([head, ...lines].map((line) => `${line.join(",")}\n`).join(""))}`;
}

export function follow(changed, state) {
  state("saved", "");
  changed(content.map(({ listing }) => listing));
}
