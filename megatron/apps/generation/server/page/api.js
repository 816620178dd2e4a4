// The server: questions, answers, events of a stream, and its own words where it refuses.

import { loadKey } from "./storage.js";

/** What the server refused or failed at. `status` is 0 if it did not answer at all. */
export class ServerError extends Error {
  constructor(message, status, param = null) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

/** Addresses are relative to the page, which may lie behind a proxy under a path. */
export const address = (path) => new URL(path, document.baseURI).href;

async function ask(path, options = {}) {
  const key = loadKey();
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  let response;
  try {
    response = await fetch(address(path), { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(`The server does not answer (${error.message}).`, 0);
  }
  return response;
}

/** The words of an error in OpenAI's form, in FastAPI's, or of a proxy. */
function words(body, status) {
  const error = body?.error ?? body;
  const message = error?.message ?? error?.detail ?? (typeof error === "string" ? error : null);
  const text = typeof message === "object" ? JSON.stringify(message) : message;
  return new ServerError(text || `The server answered with status ${status}.`, status, error?.param);
}

async function refusal(response) {
  const text = await response.text();
  let body = text.slice(0, 2000);
  try {
    body = JSON.parse(text);
  } catch {
    if (body.trimStart().startsWith("<")) body = null; // a page of a proxy
  }
  return words(body, response.status);
}

/** Models as `[{id, max_model_len?}]`. */
export async function models() {
  const response = await ask("v1/models");
  if (!response.ok) throw await refusal(response);
  return (await response.json()).data;
}

/** State of the server: `{status, running?, waiting?}`, whatever its HTTP status. */
export async function health() {
  const response = await ask("health");
  try {
    const body = await response.json();
    return { ...body, ok: response.ok };
  } catch {
    return { status: response.ok ? "ok" : `status ${response.status}`, ok: response.ok };
  }
}

/**
 * The chunks of a streamed answer, parsed, until `[DONE]`; of any other answer all of it. Leaving
 * the loop ends the request.
 */
export async function* stream(path, body, signal) {
  const response = await ask(path, {
    method: "POST",
    headers: { "Content-Type": "application/json", Accept: "text/event-stream, application/json" },
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw await refusal(response);
  let complete = false;
  try {
    if (!body.stream) {
      yield await response.json();
      return;
    }
    for await (const data of events(response.body)) {
      if (data === "[DONE]") {
        complete = true;
        return;
      }
      const chunk = JSON.parse(data);
      if (chunk.error) throw words(chunk, response.status);
      yield chunk;
    }
  } catch (error) {
    if (error instanceof ServerError || error.name === "AbortError") throw error;
    throw new ServerError(`The connection broke (${error.message}).`, 0);
  }
  if (!complete) throw new ServerError("The connection ended before the answer did.", 0);
}

/** The data of each server-sent event of a body. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
        else if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
