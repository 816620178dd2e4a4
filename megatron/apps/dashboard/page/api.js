// The server of the page: what it is asked, what it answers, and the words of its refusals.

const RETRY_MS = 3000;

/** What the server refused or failed at. */
export class ServerError extends Error {}

/** Addresses are relative to the page, which may be shown by a proxy under a path. */
const address = (path, query = {}) => {
  const url = new URL(path, document.baseURI);
  for (const [name, given] of Object.entries(query)) {
    for (const value of [given].flat()) {
      if (value !== null && value !== undefined) url.searchParams.append(name, value);
    }
  }
  return url.href;
};

async function ask(path, query, signal) {
  let response;
  try {
    response = await fetch(address(path, query), { signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server does not answer.");
  }
  if (response.ok) return response.json();
  const text = await response.text();
  let words = text;
  try {
    words = JSON.parse(text).error ?? text;
  } catch {
    // plain words
  }
  throw new ServerError(String(words).slice(0, 500) || `The server answered with status ${response.status}.`);
}

const part = ({ x, zoom }) => ({ x, from: zoom?.[0], to: zoom?.[1] });
/** The server's names of members, which are its own for each run. */
const namesOf = (run, members) =>
  members.flatMap((one) => run.series.find(({ kind, name }) => kind === one.kind && name === one.name)?.id ?? []);

/** The address of the page with these runs as one file; null in such a file. */
export const file = address("api/export");

/** All runs, as `page.js` describes them. */
export const runs = () => ask("api/runs");

/** What else is known of a run. */
export const summary = (run) => ask(`api/runs/${encodeURIComponent(run.id)}`);

/** What the model wrote: `[{iteration, prompt, answer, reference, ended}]`. */
export const texts = (run) => ask(`api/runs/${encodeURIComponent(run.id)}/texts`);

/**
 * The points of members `{kind, name}`, about `points` of each, with every spike: a function of a
 * member that gives `{x, y, smooth?}`.
 */
export async function series(run, members, { x, zoom, smooth, points }, signal) {
  const query = { id: namesOf(run, members), points, smooth: smooth || null, ...part({ x, zoom }) };
  const answer = await ask(`api/runs/${encodeURIComponent(run.id)}/series`, query, signal);
  return (member) => answer[namesOf(run, [member])[0]] ?? null;
}

/** Where the table of all points of members that are seen is found. */
export const csv = (run, members, state) =>
  address(`api/runs/${encodeURIComponent(run.id)}/csv`, { id: namesOf(run, members), ...part(state) });

/**
 * Calls `changed` with every list of runs that differs from the last; `state` gets "up", or "down" and
 * the words of a refusal if there is one.
 */
export function follow(changed, state) {
  const source = new EventSource(address("api/updates"));
  source.addEventListener("message", (event) => changed(JSON.parse(event.data)));
  source.addEventListener("open", () => state("up", ""));
  source.addEventListener("error", async () => {
    state("down", "");
    if (source.readyState !== EventSource.CLOSED) return; // else the browser tries again by itself
    setTimeout(() => follow(changed, state), RETRY_MS);
    await runs().catch((error) => state("down", error.message));
  });
}
