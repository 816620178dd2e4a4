// Colours of runs, after Okabe and Ito: told apart without red and green, each with a contrast of
// 3 to its ground. From the ninth run on they repeat with dashes.

import { element } from "./element.js";

const LIGHT = ["#0072b2", "#c4500a", "#007f5c", "#a33f8a", "#8a6100", "#45495a", "#3d7fd6", "#b3261e"];
const DARK = ["#56b4e9", "#ff9354", "#2fc795", "#e79bcb", "#e6b82e", "#d5d8e3", "#93a9ff", "#ff9d94"];
const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3]];

export function isDark() {
  const { theme } = document.documentElement.dataset;
  return theme === "dark" || (theme !== "light" && matchMedia("(prefers-color-scheme: dark)").matches);
}

/** Colour and dashes of the run or series with this number. */
export function lineStyle(number) {
  const colours = isDark() ? DARK : LIGHT;
  return {
    colour: colours[number % colours.length],
    dash: DASHES[Math.floor(number / colours.length) % DASHES.length],
  };
}

/** A piece of a line in its style, next to its name. */
export function swatch({ colour, dash }) {
  const made = element("span", { class: dash.length ? "swatch dashed" : "swatch", "aria-hidden": "true" });
  made.style.setProperty("--colour", colour);
  return made;
}

/** Dashes of the series with this number where colours say which run it is. */
export const seriesDash = (number) => DASHES[number % DASHES.length];

const known = new Map();

/** The colour that a name of base.css has at present. */
export function themeColour(name) {
  const key = `${name} ${isDark()}`;
  if (!known.has(key)) {
    const probe = document.body.appendChild(element("i", { class: "unseen" }));
    probe.style.color = `var(--${name})`;
    known.set(key, getComputedStyle(probe).color);
    probe.remove();
  }
  return known.get(key);
}

/** Calls `changed` when light becomes dark or dark light. */
export function onTheme(changed) {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
  new MutationObserver(changed).observe(document.documentElement, { attributeFilter: ["data-theme"] });
}
