// Tokens with their probabilities: a tint and an underline each, and a card with the alternatives
// for the one under the pointer or with the focus.

import { byId, element } from "./element.js";

/** Least probability of each level; the last has the rest. Styles are in style.css. */
const LEVELS = [0.8, 0.5, 0.2, 0.05, 0];

const levelOf = (logprob) => {
  const level = LEVELS.findIndex((least) => Math.exp(logprob) >= least);
  return level < 0 ? LEVELS.length - 1 : level;
};

/** A probability in percent, with the digits that say something. */
export function percent(logprob) {
  const value = 100 * Math.exp(logprob);
  if (value >= 99.95 || value === 0) return `${value.toFixed(0)} %`;
  if (value >= 0.095) return `${value.toFixed(1)} %`;
  return `${value.toPrecision(1).replace(/e-0?/, "e−")} %`;
}

/** A token with its blanks visible. */
export function visible(text) {
  if (text === "") return "(no text)";
  return text
    .replaceAll("\r", "␍")
    .replaceAll("\n", "↵")
    .replaceAll("\t", "⇥")
    .replace(/^ +| +$/g, (blanks) => "␣".repeat(blanks.length));
}

/** The same to be read aloud. */
function spoken(text) {
  if (/^ +$/.test(text)) return "space";
  if (/^\s+$/.test(text)) return "new line";
  return text.trim() || "no text";
}

/** Fills the legend of the levels. */
export function fillLegend(list) {
  const names = LEVELS.map((least, level) => {
    return least ? `≥ ${100 * least} %` : `< ${100 * LEVELS[level - 1]} %`;
  });
  list.replaceChildren(
    ...names.map((name, level) =>
      element("li", {}, element("span", { class: `token level-${level}` }, "token"), ` ${name}`),
    ),
  );
}

const shownTokens = new WeakMap();

/** The element of one token. All of a text are one stop of the tab key; arrows go through them. */
export function tokenElement(token, inPrompt = false) {
  const { text, bytes, logprob } = token;
  const scored = logprob !== null && logprob !== undefined;
  const level = scored ? `level-${levelOf(logprob)}` : "unscored";
  const made = element(
    "span",
    {
      class: `token ${level}${inPrompt ? " in-prompt" : ""}${text.includes("\n") ? " newline" : ""}`,
      role: "button",
      tabindex: "-1",
      "aria-label": `${spoken(text || bytes || "")}, ${scored ? percent(logprob) : "not scored"}`,
      "aria-describedby": "card",
    },
    bytes ? element("small", {}, bytes) : text,
  );
  shownTokens.set(made, token);
  return made;
}

/** The card with a token's alternatives, which follows pointer and focus within `log`. */
export class TokenCard {
  #card = byId("card");
  #token = null;
  #hiding = 0;

  constructor(log) {
    const at = (event) => event.target.closest?.(".token");
    const show = (event) => at(event) && this.#show(at(event));
    log.addEventListener("pointerover", show);
    log.addEventListener("focusin", show);
    log.addEventListener("click", (event) => at(event)?.focus());
    log.addEventListener("pointerout", () => this.#hideSoon());
    log.addEventListener("focusout", () => this.#hideSoon());
    log.addEventListener("scroll", () => this.#follow(log), { passive: true });
    log.addEventListener("keydown", (event) => this.#move(event));
    // The pointer may go onto the card, for instance to select a text.
    this.#card.addEventListener("pointerenter", () => clearTimeout(this.#hiding));
    this.#card.addEventListener("pointerleave", () => this.#hideSoon());
  }

  hide() {
    clearTimeout(this.#hiding);
    this.#card.hidden = true;
    this.#token?.classList.remove("shown");
    this.#token = null;
  }

  #hideSoon() {
    clearTimeout(this.#hiding);
    this.#hiding = setTimeout(() => {
      const focused = document.activeElement;
      if (focused?.matches(".token")) this.#show(focused);
      else this.hide();
    }, 120);
  }

  #show(made) {
    clearTimeout(this.#hiding);
    if (made === this.#token || !shownTokens.has(made)) return;
    this.hide();
    this.#token = made;
    made.classList.add("shown");
    this.#card.replaceChildren(...cardContent(shownTokens.get(made)));
    this.#card.hidden = false;
    this.#place();
  }

  /** Stays at its token while the text scrolls, and goes when the token has gone. */
  #follow(log) {
    if (!this.#token) return;
    const { top, bottom } = this.#token.getBoundingClientRect();
    const window = log.getBoundingClientRect();
    if (this.#token.isConnected && bottom > window.top && top < window.bottom) this.#place();
    else this.hide();
  }

  /** Below the token, or above where there is no room, within the window. */
  #place() {
    const near = this.#token.getClientRects()[0] ?? this.#token.getBoundingClientRect();
    const { offsetWidth: width, offsetHeight: height } = this.#card;
    const gap = 6;
    const below = near.bottom + gap;
    const top = below + height < innerHeight ? below : near.top - gap - height;
    const left = Math.min(near.left, innerWidth - width - gap);
    this.#card.style.left = `${Math.max(gap, left)}px`;
    this.#card.style.top = `${Math.max(gap, top)}px`;
  }

  #move(event) {
    const from = event.target.closest?.(".token");
    if (!from || event.altKey || event.ctrlKey || event.metaKey) return;
    const all = [...from.closest(".text").querySelectorAll(".token")];
    const index = all.indexOf(from);
    const to = { ArrowRight: index + 1, ArrowLeft: index - 1, Home: 0, End: all.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    if (!all[to]) return;
    all.forEach((token) => token.setAttribute("tabindex", "-1"));
    all[to].setAttribute("tabindex", "0");
    all[to].focus();
  }
}

function cardContent({ text, bytes, logprob, top }) {
  const own = bytes ?? text;
  const title = element("p", { class: "card-title" }, element("code", {}, visible(own)));
  if (logprob === null || logprob === undefined) {
    return [title, element("p", { class: "hint" }, "The first token of a text has no probability.")];
  }
  title.append(element("strong", {}, percent(logprob)));
  const listed = top.some(([other]) => other === own);
  const rows = listed ? top : [...top, [own, logprob]];
  return [
    title,
    element("p", { class: "hint" }, `log-probability ${logprob.toFixed(3).replace("-", "−")}`),
    rows.length > 1 &&
      element("ol", { class: "alternatives" }, rows.map(([other, score]) => row(other, score, other === own))),
    bytes && element("p", { class: "hint" }, "A part of a character, as bytes."),
  ].filter(Boolean);
}

function row(text, logprob, chosen) {
  const bar = element("span", { class: "bar-of" });
  bar.style.width = `${100 * Math.exp(logprob)}%`;
  return element(
    "li",
    { class: chosen ? "chosen" : null },
    element("code", {}, visible(text)),
    element("span", { class: "track", "aria-hidden": "true" }, bar),
    element("span", { class: "share" }, percent(logprob)),
    chosen && element("span", { class: "unseen" }, " (taken)"),
  );
}
