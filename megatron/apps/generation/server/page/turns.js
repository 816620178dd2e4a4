// One turn on the page: a message, an answer, or a prompt with its continuation.

import { copyText, element } from "./element.js";
import { tokenElement } from "./tokens.js";

const NAMES = { user: "You", assistant: "Model", completion: "Completion" };
const ENDS = { length: "ended at max tokens", stopped: "stopped" };

/**
 * A turn is `{role, text, prompt?, tokens?, promptTokens?, stats?, finish?, error?}`; `role` is
 * "user", "assistant" or "completion".
 */
export class TurnView {
  #turn;
  #actions;
  #body = element("div", { class: "text", dir: "auto" });
  #foot = element("footer", { class: "foot" });
  #error = element("p", { class: "error", role: "alert", hidden: true });
  #text = document.createTextNode("");
  #coloured;

  /** `actions` are `[label, function]`, or none while the turn grows. */
  constructor(turn, coloured) {
    this.#turn = turn;
    this.#coloured = coloured;
    this.element = element(
      "article",
      { class: `turn ${turn.role}`, "aria-label": NAMES[turn.role] },
      element("h3", {}, NAMES[turn.role]),
      this.#body,
      this.#error,
      this.#foot,
    );
    this.#fill();
    this.showEnd([]);
  }

  #fill() {
    const { role, prompt, promptTokens, tokens, text } = this.#turn;
    this.#body.replaceChildren();
    if (role === "completion" && !(this.#coloured && promptTokens?.length)) {
      this.#body.append(element("span", { class: "prompt" }, prompt));
    }
    if (this.#coloured && (tokens?.length || promptTokens?.length)) {
      this.#addTokens(promptTokens ?? [], true);
      this.#addTokens(tokens ?? [], false);
    } else {
      this.#text = document.createTextNode(text);
      this.#body.append(this.#text);
    }
  }

  #addTokens(tokens, inPrompt) {
    this.#body.append(...tokens.map((token) => tokenElement(token, inPrompt)));
    if (!this.#body.querySelector(".token[tabindex='0']")) {
      this.#body.querySelector(".token")?.setAttribute("tabindex", "0");
    }
  }

  /** Shows what has come: a result of `ChunkReader.read`, which is in the turn already. */
  add({ text, tokens, promptTokens }) {
    const marked = tokens.length + promptTokens.length > 0;
    if (!this.#coloured || (!marked && this.#text.isConnected)) this.#text.appendData(text);
    else if (promptTokens.length) this.#fill();
    else if (marked) this.#addTokens(tokens, false);
  }

  set coloured(coloured) {
    this.#coloured = coloured;
    this.#fill();
  }

  set growing(growing) {
    this.element.classList.toggle("growing", growing);
    this.element.setAttribute("aria-busy", String(growing));
  }

  /** Numbers and actions under the text, and the error if there is one. */
  showEnd(actions) {
    const { stats, finish, error, role } = this.#turn;
    this.#error.hidden = !error;
    this.#error.textContent = error ?? "";
    this.#actions = actions.map(([label, act]) => {
      const button = element("button", { class: "quiet", type: "button" }, label);
      button.addEventListener("click", () => act(button));
      return button;
    });
    const words = role === "user" ? "" : [statsText(stats), ENDS[finish]].filter(Boolean).join(" · ");
    this.#foot.replaceChildren(element("span", { class: "stats" }, words), ...this.#actions);
  }

  /** Numbers while the text grows. */
  showStats(stats) {
    this.#foot.querySelector(".stats").textContent = statsText(stats);
  }
}

/** "12 tokens · 34.5 tokens/s · first after 0.12 s" of `{tokens, rate?, first?}`. */
function statsText(stats) {
  if (!stats) return "";
  const { tokens, prompt, rate, first } = stats;
  return [
    prompt && `${prompt} + ${tokens} tokens`,
    !prompt && `${tokens} ${tokens === 1 ? "token" : "tokens"}`,
    rate && `${rate.toFixed(rate < 100 ? 1 : 0)} tokens/s`,
    first && `first after ${first.toFixed(2)} s`,
  ]
    .filter(Boolean)
    .join(" · ");
}

/** Copies a text and says so on the button that asked for it. */
export async function copyWith(button, text) {
  const label = button.textContent;
  button.textContent = (await copyText(text)) ? "Copied" : "Not allowed";
  setTimeout(() => {
    button.textContent = label;
  }, 1500);
}
