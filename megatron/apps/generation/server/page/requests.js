// Requests in OpenAI's form, and what the chunks of their streamed answers add.

export const PATHS = { chat: "v1/chat/completions", completion: "v1/completions" };

/**
 * The body of a request without what makes it a stream.
 *
 * @param {"chat" | "completion"} mode
 * @param {object} values values of the settings
 * @param {object} fields what the settings give a request
 * @param {{model, prompt?, messages?}} asked
 */
export function requestBody(mode, values, fields, asked) {
  const body = { ...asked, ...fields };
  if (mode === "chat" && values.system.trim()) {
    body.messages = [{ role: "system", content: values.system }, ...asked.messages];
  }
  if (!values.probabilities) return body;
  const count = Number(values.alternatives);
  if (mode === "chat") return { ...body, logprobs: true, top_logprobs: count };
  return { ...body, logprobs: count, ...(values.echo && { echo: true }) };
}

/** The same as a stream that ends with its usage. What an echo has to say comes at once. */
export const streamed = (body) =>
  body.echo ? body : { ...body, stream: true, stream_options: { include_usage: true } };

/** What a shell is given for the same request. The key stays out of it. */
export function curlCommand(url, body, withKey) {
  const quoted = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  return [
    `curl ${url}`,
    "-H 'Content-Type: application/json'",
    ...(withKey ? ['-H "Authorization: Bearer $API_KEY"'] : []),
    `-d '${quoted}'`,
  ].join(" \\\n  ");
}

/**
 * Reads the chunks of a stream, or an answer that came at once. A token is `{text, logprob, top}`: `logprob` is null for the first token of a
 * prompt, `top` has `[text, logprob]` of the most probable tokens, best first. A token that is
 * only part of a character has no text but the numbers of its bytes, in `bytes`.
 */
export class ChunkReader {
  #decoder = new TextDecoder();
  #echo;

  /** `echo` is the prompt that the answer begins with, or "". */
  constructor(echo) {
    this.#echo = echo.length;
  }

  /** `{text, tokens, promptTokens, finish, usage}` of a chunk. */
  read(chunk) {
    const choice = chunk.choices?.[0] ?? {};
    const tokens = choice.logprobs ? [...this.#tokens(choice.logprobs)] : [];
    const offsets = choice.logprobs?.text_offset ?? [];
    const echoed = offsets.filter((offset) => offset < this.#echo).length;
    return {
      text: (choice.delta?.content ?? choice.text ?? "").slice(this.#echo),
      promptTokens: tokens.slice(0, echoed),
      tokens: tokens.slice(echoed),
      finish: choice.finish_reason ?? null,
      usage: chunk.usage ?? null,
    };
  }

  *#tokens(logprobs) {
    if (logprobs.content) {
      for (const { token, logprob, bytes, top_logprobs } of logprobs.content) {
        const top = (top_logprobs ?? []).map((one) => [readable(one.token, one.bytes), one.logprob]);
        yield { ...this.#text(token, bytes), logprob, top };
      }
      return;
    }
    for (const [index, token] of (logprobs.tokens ?? []).entries()) {
      const top = Object.entries(logprobs.top_logprobs?.[index] ?? {});
      yield {
        ...this.#text(token, bytesOf(token)),
        logprob: logprobs.token_logprobs[index],
        top: top.map(([text, logprob]) => [readable(text, bytesOf(text)), logprob]),
      };
    }
  }

  /** The text that a token completes, or its bytes. */
  #text(token, bytes) {
    if (!bytes) return { text: token };
    const text = this.#decoder.decode(new Uint8Array(bytes), { stream: true });
    return text || !bytes.length ? { text } : { text: "", bytes: hexadecimal(bytes) };
  }
}

/** Bytes of a token of /v1/completions that is no text: "bytes:\xf0\x9f". */
function bytesOf(token) {
  if (!/^bytes:(\\x[0-9a-f]{2})+$/.test(token)) return null;
  return token.match(/[0-9a-f]{2}(?=\\|$)/g).map((two) => parseInt(two, 16));
}

const hexadecimal = (bytes) => bytes.map((byte) => byte.toString(16).padStart(2, "0")).join(" ");

/** Text of an alternative, which stands alone. */
function readable(token, bytes) {
  if (!bytes) return token;
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(new Uint8Array(bytes));
  } catch {
    return hexadecimal(bytes);
  }
}
