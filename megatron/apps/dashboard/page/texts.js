// What models wrote while they were trained: the answers of runs to a prompt, one moment at a time.

import { lineStyle, swatch } from "./colours.js";
import { element } from "./element.js";
import { grouped } from "./format.js";

/** Texts are `{run, iteration, prompt, answer, reference, ended}`. Shows those of the step that the
 * slider is at, or of the last one before it, by prompt. */
export class TextsView {
  #texts = [];
  #steps = [];

  constructor(place) {
    this.place = place;
    this.slider = element("input", { type: "range", min: "0", step: "1", "aria-label": "Step of the texts", oninput: () => this.#draw() });
    this.words = element("output", {});
    this.list = element("div", { class: "texts" });
  }

  show(texts) {
    const at = this.#steps[this.slider.value];
    const last = at === undefined || at === this.#steps.at(-1);
    this.#texts = texts;
    this.#steps = [...new Set(texts.map(({ iteration }) => iteration))].sort((a, b) => a - b);
    if (!texts.length) {
      const words = "No texts: a run with --sample-interval writes some while it trains.";
      this.place.replaceChildren(element("p", { class: "note" }, words));
      return;
    }
    this.slider.max = String(this.#steps.length - 1);
    const index = last ? -1 : this.#steps.findLastIndex((step) => step <= at);
    this.slider.value = String(index < 0 ? this.#steps.length - 1 : index);
    this.place.replaceChildren(element("p", { class: "moment" }, element("label", {}, "Written at "), this.words, this.slider), this.list);
    this.#draw();
  }

  #draw() {
    const step = this.#steps[this.slider.value];
    this.words.textContent = `step ${grouped(step)}`;
    const newest = new Map(); // by prompt and run
    for (const text of this.#texts) {
      if (text.iteration > step) continue;
      const key = JSON.stringify([text.prompt, text.run.id]);
      if (!(newest.get(key)?.iteration > text.iteration)) newest.set(key, text);
    }
    const prompts = new Map();
    for (const text of newest.values()) {
      prompts.set(text.prompt, [...(prompts.get(text.prompt) ?? []), text]);
    }
    this.list.replaceChildren(...[...prompts].map(([prompt, answers]) => card(prompt, answers)));
  }
}

function card(prompt, answers) {
  const reference = answers.find((text) => text.reference)?.reference;
  return element(
    "article",
    { class: "text" },
    element("h3", { dir: "auto" }, prompt),
    element(
      "dl",
      {},
      answers.flatMap(({ run, iteration, answer, ended }) => [
        element("dt", { dir: "auto" }, swatch(lineStyle(run.number)), `${run.name}, step ${grouped(iteration)}`),
        element("dd", { dir: "auto" }, answer || "(nothing)", ended === false && element("small", {}, " (not ended)")),
      ]),
      reference && element("dt", {}, "In the data"),
      reference && element("dd", { class: "reference", dir: "auto" }, reference),
    ),
  );
}
