// What can be set about an answer: the fields of the form, their values, and their share of a
// request.

import { byId, element } from "./element.js";
import { load, save } from "./storage.js";

/**
 * One entry per field. `name` is its name in a request, or ours if `sent` is false; `neutral` is
 * the value that changes nothing, which is not sent.
 */
const FIELDS = [
  { name: "probabilities", label: "Show token probabilities", kind: "switch", value: false, sent: false },
  { name: "alternatives", label: "Alternatives", kind: "number", min: 0, max: 20, step: 1, value: 5,
    sent: false, probabilities: true },
  { name: "echo", label: "For the prompt too", kind: "switch", value: false, sent: false,
    only: "completion", probabilities: true },
  { name: "system", label: "System message", kind: "lines", value: "", sent: false, only: "chat" },
  { name: "max_tokens", label: "Max tokens", kind: "number", min: 0, step: 1, value: 256 },
  { name: "temperature", label: "Temperature", kind: "slider", min: 0, max: 2, step: 0.05, value: 1,
    hint: "0 always takes the most probable token" },
  { name: "top_p", label: "Top-p", kind: "slider", min: 0, max: 1, step: 0.01, value: 1 },
  { name: "top_k", label: "Top-k", kind: "number", min: 0, step: 1, value: 0,
    hint: "0 for all" },
  { name: "min_p", label: "Min-p", kind: "slider", min: 0, max: 1, step: 0.01, value: 0, neutral: 0 },
  { name: "repetition_penalty", label: "Repetition penalty", kind: "slider", min: 1, max: 2,
    step: 0.01, value: 1, neutral: 1 },
  { name: "seed", label: "Seed", kind: "number", min: 0, step: 1, value: "",
    hint: "empty for another each time" },
  { name: "stop", label: "Stop at", kind: "lines", value: "",
    hint: "one text a line; \\n is a new line, \\t a tab" },
  { name: "format", label: "Output", kind: "choice", value: "text", sent: false, choices: [
    ["text", "Any text"],
    ["json", "Any JSON object"],
    ["schema", "JSON of a schema"],
    ["regex", "Text of a regular expression"],
  ] },
  { name: "schema", label: "JSON schema", kind: "lines", sent: false, format: "schema", code: true,
    value: '{\n  "type": "object",\n  "properties": {\n    "name": {"type": "string"}\n  },\n  "required": ["name"]\n}' },
  { name: "regex", label: "Regular expression", kind: "text", value: "[A-Z][a-z]+", sent: false,
    format: "regex", code: true },
];

/** Names that errors of the server use for a field that has another name here. */
const ALIASES = {
  max_completion_tokens: "max_tokens",
  logprobs: "alternatives",
  top_logprobs: "alternatives",
  structured_outputs: "regex",
  response_format: "schema",
};

export class Settings {
  #values;
  #mode = "chat";
  #changed;

  /** `changed` is called after each change of a value. */
  constructor(form, changed) {
    this.#changed = changed;
    this.#values = { ...defaults(), ...known(load("settings", {})) };
    form.append(...FIELDS.map((field) => this.#row(field)));
    form.addEventListener("submit", (event) => event.preventDefault());
    this.#show();
  }

  get values() {
    return this.#values;
  }

  /** Shows the fields of a mode, "chat" or "completion". */
  set mode(mode) {
    this.#mode = mode;
    this.#show();
  }

  /** Leaves half of a model's `positions` to the prompt, unless somebody has chosen otherwise. */
  fit(positions) {
    const most = Math.floor(positions / 2);
    if (this.#values.max_tokens !== defaults().max_tokens || this.#values.max_tokens <= most) return;
    this.#values.max_tokens = most;
    this.#write(FIELDS.find((field) => field.name === "max_tokens"));
  }

  reset() {
    this.#values = defaults();
    for (const field of FIELDS) this.#write(field);
    this.#keep();
  }

  /** Fields of a request, those that change nothing left out. Throws an Error that says what is
   * wrong with a field, which is marked. */
  request() {
    this.clearErrors();
    const body = {};
    for (const field of FIELDS) {
      if (!this.#applies(field)) continue;
      const value = this.#values[field.name];
      const control = byId(field.name);
      if (!control.checkValidity()) this.#fail(field.name, `${field.label}: ${control.validationMessage}`);
      if (field.sent === false || value === "" || value === field.neutral) continue;
      body[field.name] = field.name === "stop" ? stops(value) : value;
    }
    return { ...body, ...this.#constraint() };
  }

  #constraint() {
    const { format, schema, regex } = this.#values;
    if (format === "json") return { response_format: { type: "json_object" } };
    if (format === "regex") return { structured_outputs: { regex } };
    if (format !== "schema") return {};
    let parsed;
    try {
      parsed = JSON.parse(schema);
    } catch (error) {
      this.#fail("schema", `JSON schema: ${error.message}`);
    }
    const json_schema = { name: "answer", schema: parsed };
    return { response_format: { type: "json_schema", json_schema } };
  }

  /** Marks the field that an error of the server names, if there is one. */
  showError(param, message) {
    const name = String(param ?? "").split(/[.[]/)[0];
    let found = ALIASES[name] ?? name;
    if (found === "schema" && this.#values.format === "regex") found = "regex";
    const field = FIELDS.find((one) => one.name === found);
    if (!field || !this.#applies(field)) return;
    byId(field.name).setAttribute("aria-invalid", "true");
    const words = byId(`${field.name}-error`);
    words.textContent = message;
    words.hidden = false;
  }

  clearErrors() {
    for (const { name } of FIELDS) this.#clear(name);
  }

  #fail(name, message) {
    this.showError(name, message);
    throw new Error(message);
  }

  #clear(name) {
    byId(name).removeAttribute("aria-invalid");
    byId(`${name}-error`).hidden = true;
  }

  #applies(field) {
    return (
      (field.only ?? this.#mode) === this.#mode &&
      (!field.format || field.format === this.#values.format) &&
      (!field.probabilities || this.#values.probabilities)
    );
  }

  #show() {
    for (const field of FIELDS) byId(`${field.name}-row`).hidden = !this.#applies(field);
  }

  #keep() {
    save("settings", this.#values);
    this.#show();
    this.#changed();
  }

  #row(field) {
    const { name, label, kind, hint } = field;
    const control = this.#control(field);
    const described = [hint && `${name}-hint`, `${name}-error`].filter(Boolean).join(" ");
    control.setAttribute("aria-describedby", described);
    const slider = kind === "slider" && this.#slider(field, control);
    const title = element("label", { for: name }, label);
    const row = element(
      "div",
      { class: `field ${kind}`, id: `${name}-row` },
      kind === "switch" ? [control, title] : [title, control],
      slider,
      hint && element("p", { class: "hint", id: `${name}-hint` }, hint),
      element("p", { class: "field-error", id: `${name}-error`, hidden: true }),
    );
    return row;
  }

  #control(field) {
    const { name, kind, min, max, step, choices, code } = field;
    const shared = { id: name, name, class: code && "code", spellcheck: code && "false" };
    const control = {
      lines: () => element("textarea", { ...shared, rows: name === "schema" ? 7 : 2 }),
      text: () => element("input", { ...shared, type: "text", autocomplete: "off" }),
      switch: () => element("input", { ...shared, type: "checkbox" }),
      choice: () =>
        element("select", shared, choices.map(([value, words]) => element("option", { value }, words))),
      number: () => element("input", { ...shared, type: "number", min, max, step, inputmode: "numeric" }),
      slider: () =>
        element("input", { ...shared, type: "number", min, max, step: "any", inputmode: "decimal" }),
    }[kind]();
    this.#write(field, control);
    control.addEventListener("input", () => {
      this.#values[name] = read(kind, control);
      this.#clear(name);
      this.#keep();
    });
    return control;
  }

  /** For the mouse: the keyboard has the number next to it. */
  #slider({ min, max, step, name }, control) {
    const slider = element("input", {
      type: "range", min, max, step, tabindex: "-1", "aria-hidden": "true", id: `${name}-slider`,
    });
    slider.value = control.value;
    slider.addEventListener("input", () => {
      control.value = slider.value;
      control.dispatchEvent(new Event("input"));
    });
    control.addEventListener("input", () => {
      slider.value = control.value;
    });
    return slider;
  }

  #write({ name, kind }, control = byId(name)) {
    const value = this.#values[name];
    if (kind === "switch") control.checked = value;
    else control.value = value;
    const slider = byId(`${name}-slider`);
    if (slider) slider.value = value;
  }
}

const defaults = () => Object.fromEntries(FIELDS.map(({ name, value }) => [name, value]));

/** Of stored values those that this page still has. */
function known(stored) {
  return Object.fromEntries(FIELDS.map(({ name }) => [name, stored[name]]).filter(([, v]) => v != null));
}

function read(kind, control) {
  if (kind === "switch") return control.checked;
  if (kind === "number" || kind === "slider") return control.value === "" ? "" : Number(control.value);
  return control.value;
}

function stops(text) {
  const special = { n: "\n", t: "\t", "\\": "\\" };
  return text
    .split("\n")
    .filter((line) => line !== "")
    .map((line) => line.replace(/\\([nt\\])/g, (_, letter) => special[letter]));
}
