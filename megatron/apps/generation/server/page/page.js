// The page: what is written goes to the server, what comes back is shown.

import { ServerError, address, health, models, stream } from "./api.js";
import { byId, element } from "./element.js";
import { ChunkReader, PATHS, curlCommand, requestBody, streamed } from "./requests.js";
import { Settings } from "./settings.js";
import { forgetAll, load, loadKey, save, saveKey } from "./storage.js";
import { TokenCard, fillLegend } from "./tokens.js";
import { TurnView, copyWith } from "./turns.js";

const WELCOME = {
  chat: ["Ask the model something", "It answers in turns, by the chat template of its tokenizer."],
  completion: ["Begin a text", "The model continues it, token by token."],
};
const PLACEHOLDERS = { chat: "Write a message", completion: "Write the beginning of a text" };
const HEALTH_SECONDS = 5;
const STATES = { loading: "Loading the model", draining: "About to end" };

const log = byId("log");
const draft = byId("draft");
const send = byId("send");
const model = byId("model");

const texts = { chat: [], completion: [], ...load("texts", {}) };
let mode = load("mode", "chat") === "completion" ? "completion" : "chat";
let views = [];
let running = null; // AbortController of the request under way

const settings = new Settings(byId("fields"), showProbabilities);
const card = new TokenCard(log);

// Conversation

function turns() {
  return texts[mode];
}

/** Keeps the texts, without their tokens if they are too many for the browser. */
function keep() {
  if (save("texts", texts)) return;
  const plain = ({ tokens, promptTokens, ...turn }) => turn;
  save("texts", { chat: texts.chat.map(plain), completion: texts.completion.map(plain) });
}

function draw() {
  const { probabilities } = settings.values;
  card.hide();
  views = turns().map((turn) => new TurnView(turn, probabilities));
  byId("turns").replaceChildren(...views.map((view) => view.element));
  [byId("welcome-title").textContent, byId("welcome-text").textContent] = WELCOME[mode];
  drawEnds();
  scrollDown(true);
}

/** Actions of each turn: those that change the conversation rest while an answer comes. */
function drawEnds() {
  byId("welcome").hidden = turns().length > 0;
  views.forEach((view, index) => view.showEnd(running ? [] : actions(index)));
}

function actions(index) {
  const turn = turns()[index];
  const last = index === turns().length - 1;
  const copy = turn.text && ["Copy", (button) => copyWith(button, (turn.prompt ?? "") + turn.text)];
  const rewrite = ["Edit", () => edit(index)];
  const found = {
    user: [copy, rewrite],
    assistant: [copy, last && ["Try again", () => answerAgain(index)]],
    completion: [
      copy,
      ["Edit", () => setDraft(turn.prompt)],
      ["Again", () => complete(turn.prompt)],
      turn.text && ["Continue", () => complete(turn.prompt + turn.text)],
    ],
  }[turn.role];
  return found.filter(Boolean);
}

function add(turn) {
  turns().push(turn);
  const view = new TurnView(turn, settings.values.probabilities);
  views.push(view);
  byId("turns").append(view.element);
  return view;
}

function edit(index) {
  setDraft(turns()[index].text);
  turns().length = index;
  keep();
  draw();
}

function answerAgain(index) {
  turns().length = index;
  draw();
  answer();
}

function showProbabilities() {
  const { probabilities } = settings.values;
  byId("legend").hidden = !probabilities;
  card.hide();
  for (const view of views) view.coloured = probabilities;
}

/** What is asked: messages whose answer failed are left out, except the last. */
function messages() {
  const all = texts.chat.filter((turn, index) => {
    const failed = (one) =>
      one?.role === "assistant" && !one.text && (one.error || one.finish === "stopped");
    return !failed(turn) && !failed(texts.chat[index + 1]);
  });
  return all.map(({ role, text }) => ({ role, content: text }));
}

// Requests

function body(asked) {
  const named = model.value ? { model: model.value } : {};
  return requestBody(mode, settings.values, settings.request(), { ...named, ...asked });
}

function answer() {
  return generate({ role: "assistant", text: "" }, { messages: messages() });
}

function complete(prompt) {
  return generate({ role: "completion", prompt, text: "" }, { prompt });
}

/** Asks for an answer, which grows in a turn of its own. */
async function generate(turn, asked) {
  if (running) return;
  card.hide();
  let request;
  try {
    request = streamed(body(asked));
  } catch (error) {
    turn.error = error.message; // a setting that cannot be sent; the form marks it
  }
  const view = add(turn);
  if (request) {
    running = new AbortController();
    view.growing = true;
    showRunning();
    await receive(request, turn, view);
    view.growing = false;
    running = null;
    showRunning();
    showHealth();
  }
  keep();
  drawEnds();
  scrollDown();
  if (turn.unauthorized) askKey(turn.error, () => answerWithKey(turn));
}

async function receive(request, turn, view) {
  const reader = new ChunkReader(request.echo ? request.prompt : "");
  const clock = new Clock();
  try {
    for await (const chunk of stream(PATHS[mode], request, running.signal)) {
      const part = reader.read(chunk);
      turn.text += part.text;
      if (part.tokens.length) (turn.tokens ??= []).push(...part.tokens);
      if (part.promptTokens.length) (turn.promptTokens ??= []).push(...part.promptTokens);
      turn.finish = part.finish ?? turn.finish;
      turn.stats = clock.count(part);
      view.add(part);
      view.showStats(turn.stats);
      scrollDown();
    }
    say(turn.text || "The answer is empty.");
  } catch (error) {
    if (error.name === "AbortError") {
      turn.finish = "stopped";
      say("Stopped.");
      return;
    }
    turn.error = error.message;
    turn.finish = null;
    Object.defineProperty(turn, "unauthorized", { value: error.status === 401 }); // not kept
    if (error instanceof ServerError) settings.showError(error.param, error.message);
  }
}

function answerWithKey(turn) {
  const index = turns().indexOf(turn);
  if (index < 0) return;
  turns().splice(index, 1);
  draw();
  if (turn.role === "completion") complete(turn.prompt);
  else answer();
}

/** Counts tokens and time of an answer. */
class Clock {
  #start = performance.now();
  #first = null;
  #tokens = 0;

  count({ text, tokens, usage }) {
    const now = performance.now();
    this.#tokens += tokens.length || (text ? 1 : 0);
    if (this.#first === null && this.#tokens) this.#first = now;
    if (usage) this.#tokens = usage.completion_tokens;
    const seconds = (now - this.#first) / 1000;
    return {
      tokens: this.#tokens,
      prompt: usage?.prompt_tokens,
      rate: this.#tokens > 1 && seconds > 0.01 ? (this.#tokens - 1) / seconds : null,
      first: this.#first && (this.#first - this.#start) / 1000,
    };
  }
}

function stop() {
  running?.abort();
}

function showRunning() {
  const busy = running !== null;
  send.textContent = busy ? "Stop" : "Send";
  send.classList.toggle("stop", busy);
  for (const button of [byId("new"), ...document.querySelectorAll("[name=mode]")]) button.disabled = busy;
  drawEnds();
  if (busy) say("The model answers.");
}

/** Has a screen reader say something; the log itself is silent, as it grows by single tokens. */
function say(text) {
  byId("announcer").textContent = text;
}

let noticeTimer = 0;

function notice(text) {
  byId("notice").textContent = text;
  clearTimeout(noticeTimer);
  noticeTimer = setTimeout(() => {
    byId("notice").textContent = "";
  }, 3000);
}

// The text field

function setDraft(text) {
  draft.value = text;
  fitDraft();
  draft.focus();
  draft.setSelectionRange(text.length, text.length);
}

/** As high as its text, within the limits of the style sheet. */
function fitDraft() {
  draft.style.height = "auto";
  draft.style.height = `${draft.scrollHeight + 2}px`;
  save(`draft.${mode}`, draft.value);
}

function submit() {
  if (running) return stop();
  const text = draft.value;
  if (mode === "completion") return complete(text);
  if (!text.trim()) return draft.focus();
  setDraft("");
  add({ role: "user", text });
  scrollDown(true);
  return answer();
}

let atEnd = true;
let lastTop = 0;

/** Shows the end, unless somebody has scrolled up to read. */
function scrollDown(always = false) {
  if (always) atEnd = true;
  if (atEnd) log.scrollTop = log.scrollHeight;
}

function noteScroll() {
  if (log.scrollHeight - log.scrollTop - log.clientHeight < 40) atEnd = true;
  else if (log.scrollTop < lastTop) atEnd = false; // text that grows does not scroll up
  lastTop = log.scrollTop;
}

// The server

async function showHealth() {
  const shown = byId("health");
  let state = "down";
  let words = "No answer";
  try {
    const { status, running: now, waiting, ok } = await health();
    words = ok ? "Ready" : (STATES[status] ?? status);
    state = ok ? "up" : status in STATES ? "waiting" : "down";
    if (ok && now) words = waiting ? `${now} running, ${waiting} waiting` : `${now} running`;
    if (ok && model.disabled) await showModels();
    shown.removeAttribute("title");
  } catch (error) {
    shown.title = error.message;
  }
  if (shown.textContent !== words) shown.textContent = words; // it is read aloud at each change
  shown.dataset.state = state;
}

async function watchHealth() {
  for (;;) {
    if (!document.hidden) await showHealth();
    await new Promise((resolve) => setTimeout(resolve, 1000 * HEALTH_SECONDS));
  }
}

let askedForKey = false;

async function showModels() {
  try {
    const found = await models();
    model.replaceChildren(...found.map(({ id }) => element("option", { value: id }, id)));
    model.disabled = false;
    model.classList.toggle("single", found.length === 1);
    document.title = `${model.value} · Megatron`;
    const longest = found[0]?.max_model_len;
    if (longest) settings.fit(longest);
    model.title = longest ? `${model.value}: up to ${longest} tokens, prompt and text together` : model.value;
  } catch (error) {
    model.replaceChildren(element("option", { value: "" }, error.status === 401 ? "Locked" : "No model"));
    if (error.status === 401 && !askedForKey) {
      askedForKey = true; // once; after that, when something is sent
      askKey(error.message, () => {});
    }
  }
}

/** Asks for the API key; `then` runs with it. */
function askKey(message, then) {
  const dialog = byId("key-dialog");
  byId("key-words").textContent = message;
  byId("key").value = "";
  dialog.returnValue = "";
  dialog.showModal();
  dialog.addEventListener(
    "close",
    async () => {
      if (dialog.returnValue !== "use") return;
      saveKey(byId("key").value.trim());
      byId("key").value = "";
      await showModels();
      then();
    },
    { once: true },
  );
}

// Settings on a narrow screen

const narrow = matchMedia("(max-width: 60rem)");

function openSettings(open) {
  const covering = open && narrow.matches;
  document.body.classList.toggle("settings-open", open);
  byId("open-settings").setAttribute("aria-expanded", String(open));
  for (const part of [document.querySelector("main"), document.querySelector("header")]) part.inert = covering;
  if (covering) byId("close-settings").focus();
}

function setMode(next) {
  mode = next;
  save("mode", mode);
  document.querySelector(`[name=mode][value=${mode}]`).checked = true;
  settings.mode = mode;
  draft.placeholder = PLACEHOLDERS[mode];
  byId("draft-label").textContent = mode === "chat" ? "Message" : "Prompt";
  draft.value = load(`draft.${mode}`, "");
  fitDraft();
  draw();
}

// Listeners

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
draft.addEventListener("input", fitDraft);
draft.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!running) submit();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || byId("key-dialog").open) return;
  card.hide();
  if (running) stop();
  else if (document.body.classList.contains("settings-open") && narrow.matches) {
    openSettings(false);
    byId("open-settings").focus();
  }
});
log.addEventListener("scroll", noteScroll, { passive: true });
for (const radio of document.querySelectorAll("[name=mode]")) {
  radio.addEventListener("change", () => setMode(radio.value));
}
byId("new").addEventListener("click", () => {
  turns().length = 0;
  keep();
  draw();
  draft.focus();
});
byId("curl").addEventListener("click", async (event) => {
  const asked = mode === "chat"
    ? { messages: [...messages(), ...(draft.value.trim() ? [{ role: "user", content: draft.value }] : [])] }
    : { prompt: draft.value };
  try {
    await copyWith(event.target, curlCommand(address(PATHS[mode]), body(asked), loadKey() !== null));
  } catch (error) {
    notice(error.message);
  }
});
byId("open-settings").addEventListener("click", () => {
  openSettings(!document.body.classList.contains("settings-open"));
});
byId("close-settings").addEventListener("click", () => {
  openSettings(false);
  byId("open-settings").focus();
});
narrow.addEventListener("change", () => openSettings(false));
byId("defaults").addEventListener("click", () => settings.reset());
byId("forget").addEventListener("click", () => {
  stop();
  forgetAll();
  texts.chat = [];
  texts.completion = [];
  saveKey(null);
  settings.reset();
  forgetAll(); // what the reset has kept
  document.dispatchEvent(new Event("forgotten"));
  draft.value = "";
  draw();
  notice("Forgotten.");
});

fillLegend(byId("legend"));
setMode(mode);
showProbabilities();
watchHealth();
if (matchMedia("(pointer: fine)").matches) draft.focus(); // elsewhere it opens a keyboard
