// Events on plots. What changes a run is a line over the whole height, with a letter at its top; what
// belongs to its course is a tick at the bottom.

import { themeColour } from "./colours.js";
import { plain, title } from "./format.js";

/** Letter, colour (a name of base.css) and whether it crosses the plot, of each kind of event. */
export const KINDS = {
  resume: { letter: "R", colour: "accent", whole: true, name: "Resume" },
  spike: { letter: "!", colour: "bad", whole: true, name: "Spike" },
  rollback: { letter: "B", colour: "bad", whole: true, name: "Rollback" },
  restart: { letter: "N", colour: "waiting", whole: true, name: "Restart" },
  straggler: { letter: "S", colour: "waiting", whole: true, name: "Slow rank" },
  save: { letter: "", colour: "good", whole: false, name: "Checkpoint" },
  memory_save: { letter: "", colour: "faint", whole: false, name: "Checkpoint in memory" },
};
const OTHER = { letter: "?", colour: "waiting", whole: true };
const LETTER_ROOM = 12; // pixels between letters
const LINE_ROOM = 3;

export const kindOf = (kind) => KINDS[kind] ?? { ...OTHER, name: title(kind) };

/** Draws marks `{kind, x, colour?}`, in the order of x, on the canvas of a plot; `colour` is a run's. */
export function drawMarks(plot, marks) {
  const { ctx } = plot;
  const ratio = devicePixelRatio || 1;
  const { left, top, width, height } = plot.bbox;
  const lines = new Map(); // pixels from which on there is room for a line, by kind
  let letters = -Infinity; // and for a letter
  ctx.save();
  ctx.lineWidth = ratio;
  ctx.font = `bold ${10 * ratio}px system-ui, "DejaVu Sans", sans-serif`;
  ctx.textAlign = "center";
  ctx.textBaseline = "top";
  for (const { kind, x, colour: own } of marks) {
    const at = Math.round(plot.valToPos(x, "x", true));
    if (at < left || at > left + width) continue;
    const { letter, colour, whole } = kindOf(kind);
    if (at < (lines.get(kind) ?? -Infinity)) continue;
    lines.set(kind, at + LINE_ROOM * ratio);
    ctx.strokeStyle = ctx.fillStyle = own ?? themeColour(colour);
    ctx.beginPath();
    ctx.setLineDash(whole ? [3 * ratio, 3 * ratio] : []);
    ctx.moveTo(at, whole ? top + 12 * ratio : top + height - 7 * ratio);
    ctx.lineTo(at, top + height);
    ctx.stroke();
    if (!letter || at < letters) continue;
    letters = at + LETTER_ROOM * ratio;
    ctx.fillText(letter, at, top);
  }
  ctx.restore();
}

/** An event in words, with its values where it is more than a part of a run's course. */
export function eventText({ kind, values, run }) {
  const { name, whole } = kindOf(kind);
  const said = Object.entries((whole && values) || {})
    .filter(([, value]) => value !== null)
    .map(([word, value]) => `${word.replaceAll("_", " ")} ${typeof value === "number" ? plain(value) : value}`);
  return [run ? `${name} of ${run.name}` : name, ...said].join(", ");
}
