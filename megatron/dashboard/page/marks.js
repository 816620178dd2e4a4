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
const LETTER_ROOM = 14; // pixels between letters
const LINE_ROOM = 3;

export const kindOf = (kind) => KINDS[kind] ?? { ...OTHER, name: title(kind) };

/** Draws marks `{kind, x}`, in the order of x, on the canvas of a plot. */
export function drawMarks(plot, marks) {
  const { ctx } = plot;
  const ratio = devicePixelRatio || 1;
  const { left, top, width, height } = plot.bbox;
  const free = new Map(); // pixels from which on there is room, by kind
  ctx.save();
  ctx.lineWidth = ratio;
  ctx.font = `bold ${10 * ratio}px system-ui, "DejaVu Sans", sans-serif`;
  ctx.textAlign = "center";
  ctx.textBaseline = "top";
  for (const { kind, x } of marks) {
    const at = Math.round(plot.valToPos(x, "x", true));
    if (at < left || at > left + width) continue;
    const { letter, colour, whole } = kindOf(kind);
    const room = free.get(kind) ?? { line: -Infinity, letter: -Infinity };
    if (at < room.line) continue;
    const [line, text] = [at + LINE_ROOM * ratio, at + LETTER_ROOM * ratio];
    free.set(kind, { line, letter: at < room.letter ? room.letter : text });
    ctx.strokeStyle = ctx.fillStyle = themeColour(colour);
    ctx.beginPath();
    ctx.setLineDash(whole ? [3 * ratio, 3 * ratio] : []);
    ctx.moveTo(at, whole ? top + 12 * ratio : top + height - 7 * ratio);
    ctx.lineTo(at, top + height);
    ctx.stroke();
    if (letter && at >= room.letter) ctx.fillText(letter, at, top);
  }
  ctx.restore();
}

/** An event in words: its values by name. */
export function eventText({ kind, values }) {
  const said = Object.entries(values ?? {})
    .filter(([, value]) => value !== null)
    .map(([name, value]) => `${name.replaceAll("_", " ")} ${typeof value === "number" ? plain(value, 5) : value}`);
  return [kindOf(kind).name, ...said].join(" · ");
}
