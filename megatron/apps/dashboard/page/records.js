// How runs were started: what their records say of command, code, machines and data.

import { lineStyle, swatch } from "./colours.js";
import { copyText, element } from "./element.js";
import { duration, plain, write } from "./format.js";

const VERSIONS = ["python", "torch", "deepspeed"];

/** A word of a command as a shell reads it. */
const quoted = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`);

/** A card for each run that has a record of its last start. */
export function recordCards(runs) {
  return runs.filter(({ record }) => record).map(card);
}

function card(run) {
  const { record } = run;
  const entries = [
    ["Start", startOf(record)],
    ["Command", command(record.launcher ?? record.command ?? [])],
    ["Code", codeOf(record.git)],
    ["Versions", VERSIONS.filter((name) => record.versions?.[name]).map((name) => `${name} ${record.versions[name]}`).join(", ")],
    ["Machines", machinesOf(record)],
    ["Data", mixOf(record.data)],
  ].filter(([, value]) => value);
  return element(
    "article",
    { class: "record" },
    element("h3", { dir: "auto" }, swatch(lineStyle(run.number)), run.name),
    element("dl", {}, entries.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)])),
  );
}

function startOf({ start, began, ended, end }) {
  const [from, to] = [Date.parse(began), Date.parse(ended)];
  if (!Number.isFinite(from)) return null;
  const day = new Date(from).toISOString().slice(0, 16).replace("T", " ");
  const took = Number.isFinite(to) && `ended after ${duration((to - from) / 1000)}${end ? ` (${end})` : ""}`;
  return [`number ${start}, ${day} UTC`, took].filter(Boolean).join(", ");
}

function command(words) {
  if (!words.length) return null;
  const text = words.map((word) => quoted(String(word))).join(" ");
  const copy = element("button", { class: "quiet", type: "button" }, "Copy");
  copy.addEventListener("click", async () => {
    copy.textContent = (await copyText(text)) ? "Copied" : "Not allowed";
  });
  return [element("pre", {}, text), copy];
}

function codeOf(git) {
  if (!git?.commit) return null;
  const changed = git.changed ? ", with changes" : "";
  return `${git.commit.slice(0, 12)}${git.branch ? ` on ${git.branch}` : ""}${changed}`;
}

function machinesOf({ hosts, world_size: size }) {
  if (!hosts?.length) return null;
  const devices = [...new Set(hosts.flatMap((host) => host.devices ?? []))];
  const named = hosts.map(({ host, ranks }) => (ranks?.length > 1 ? `${host} (ranks ${ranks[0]} to ${ranks.at(-1)})` : host));
  return [`${size} process${size === 1 ? "" : "es"} on ${named.join(", ")}`, devices.join(", ")].filter(Boolean).join("; ");
}

/** The data sets with their shares of the training data. */
function mixOf(data) {
  const train = (data ?? []).filter(({ part }) => !part || part === "train");
  const sum = train.reduce((total, { weight }) => total + (weight ?? 0), 0);
  if (!train.length) return null;
  return element(
    "ul",
    { class: "mix" },
    train.map(({ path, weight }) => {
      const share = sum ? (weight ?? 0) / sum : 1 / train.length;
      const filled = element("span", { class: "filled" });
      filled.style.width = `${100 * share}%`;
      return element(
        "li",
        {},
        element("span", { dir: "auto", title: path }, String(path).split("/").at(-1)),
        element("span", { class: "track", "aria-hidden": "true" }, filled),
        element("span", { class: "share" }, Number.isFinite(share) ? write("share", share) : plain(undefined)),
      );
    }),
  );
}
