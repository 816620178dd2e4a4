// Runs that belong together: those that were configured alike and differ in their seed.

const SEED_OF_NAME = /[-_. ]+s(?:eed)?[-_=. ]?\d+$/i;
const SEED = /(^|[._])seed$/i;
/** Values that differ between any two runs, or say nothing of how a run trains. */
const PLACE = /(^|[._])(save|load|file|files|dir|folder|path|paths|name|id|host|port|project|tags|seed)$/i;
const MOST_POINTS = 2000;

export const isPlace = (name) => PLACE.test(name);

/** The configuration that the runs of a group share, as text. */
function keyOf({ name, configuration }) {
  const values = Object.entries(configuration ?? {}).filter(([key]) => !isPlace(key));
  if (!values.length) return name.replace(SEED_OF_NAME, "");
  return JSON.stringify(values.sort(([a], [b]) => (a < b ? -1 : 1)));
}

/** `[{id, name, runs}]`, in the order of the runs; each of one run alone where `on` is false. */
export function groupsOf(runs, on) {
  const groups = new Map();
  for (const run of runs) {
    const key = on ? keyOf(run) : run.id;
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(run);
  }
  return [...groups.values()].map((members) => {
    const [first] = members;
    if (members.length === 1) return { id: first.id, name: first.name, runs: members };
    const name = first.name.replace(SEED_OF_NAME, "") || first.name;
    return { id: members.map(({ id }) => id).join("+"), name: `${name} (${members.length} runs)`, runs: members };
  });
}

/** The seeds of runs, where their configurations name them. */
export const seedOf = ({ configuration }) =>
  Object.entries(configuration ?? {}).find(([name]) => SEED.test(name))?.[1] ?? null;

/** The value of a curve `{x, y}` at each of `places`; null outside of it. */
function valuesAt({ x, y }, places) {
  let at = 0;
  return places.map((place) => {
    if (!x.length || place < x[0] || place > x.at(-1)) return null;
    while (at < x.length - 2 && x[at + 1] < place) at += 1;
    const next = Math.min(at + 1, x.length - 1);
    const share = x[next] > x[at] ? (place - x[at]) / (x[next] - x[at]) : 0;
    return y[at] + share * (y[next] - y[at]);
  });
}

/** The mean of curves with the least and greatest value at each position: `{x, y, low, high}`. */
export function meanOf(curves) {
  const known = curves.map(({ x, y }) => {
    const kept = x.flatMap((at, index) => (y[index] === null ? [] : [[at, y[index]]]));
    return { x: kept.map(([at]) => at), y: kept.map(([, value]) => value) };
  });
  const all = [...new Set(known.flatMap(({ x }) => x))].sort((a, b) => a - b);
  const every = Math.ceil(all.length / MOST_POINTS);
  const x = all.filter((_, index) => index % every === 0 || index === all.length - 1);
  const columns = known.map((curve) => valuesAt(curve, x));
  const rows = x.map((_, index) => columns.map((column) => column[index]).filter((value) => value !== null));
  const each = (computed) => rows.map((row) => (row.length ? computed(row) : null));
  return {
    x,
    y: each((row) => row.reduce((sum, value) => sum + value, 0) / row.length),
    low: each((row) => Math.min(...row)),
    high: each((row) => Math.max(...row)),
  };
}
