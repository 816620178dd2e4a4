// Pictures and tables to keep: a PNG with title and legend, a CSV of what is seen.

import { element } from "./element.js";
import { themeColour } from "./colours.js";

const LINE = 18; // pixels of a line of text
const MARGIN = 14;

/** Has the browser keep a file. */
export function download(name, blob) {
  const address = URL.createObjectURL(blob);
  element("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

/** A name of a file without what file systems refuse. */
export const fileName = (...words) =>
  `${words.join(" ").toLowerCase().replace(/[^\p{L}\p{N}._-]+/gu, "-").replace(/^[-.]+|[-.]+$/g, "").slice(0, 100) || "chart"}`;

/** The canvas of a plot with its title above and `[{colour, text}]` below. */
export function picture(canvas, heading, legend) {
  const ratio = devicePixelRatio || 1;
  const made = element("canvas");
  const ctx = made.getContext("2d");
  const width = canvas.width + 2 * MARGIN * ratio;
  const font = (weight, size) => `${weight} ${size * ratio}px system-ui, "DejaVu Sans", sans-serif`;
  ctx.font = font("normal", 12);
  const rows = wrapped(ctx, legend, width - 2 * MARGIN * ratio, ratio);
  made.width = width;
  made.height = canvas.height + (2 * MARGIN + LINE * (rows.length + 1.4)) * ratio;
  ctx.fillStyle = themeColour("raised");
  ctx.fillRect(0, 0, made.width, made.height);
  ctx.textBaseline = "top";
  ctx.fillStyle = themeColour("text");
  ctx.font = font("bold", 14);
  ctx.fillText(heading, MARGIN * ratio, MARGIN * ratio);
  const top = (MARGIN + 1.4 * LINE) * ratio;
  ctx.drawImage(canvas, MARGIN * ratio, top);
  ctx.font = font("normal", 12);
  rows.forEach((row, number) => {
    const y = top + canvas.height + (number * LINE + 4) * ratio;
    for (const { colour, text, at } of row) {
      ctx.fillStyle = colour;
      ctx.fillRect(MARGIN * ratio + at, y + 5 * ratio, 14 * ratio, 3 * ratio);
      ctx.fillStyle = themeColour("text");
      ctx.fillText(text, (MARGIN + 19) * ratio + at, y);
    }
  });
  return new Promise((resolve) => made.toBlob(resolve, "image/png"));
}

function wrapped(ctx, legend, width, ratio) {
  const rows = [[]];
  let at = 0;
  for (const entry of legend) {
    const needed = ctx.measureText(entry.text).width + 36 * ratio;
    if (at && at + needed > width) {
      rows.push([]);
      at = 0;
    }
    rows.at(-1).push({ ...entry, at });
    at += needed;
  }
  return rows;
}
