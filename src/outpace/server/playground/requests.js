"use strict";

let key = "";

/** Send a request; throws a Fault for errors of the server or the connection. */
async function ask(path, options = {}) {
  const headers = { "Content-Type": "application/json" };
  if (key) headers.Authorization = `Bearer ${key}`;
  let reply;
  try {
    reply = await fetch(path, { headers, cache: "no-store", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Fault("The server cannot be reached. It may have stopped, or the network is down.");
  }
  if (!reply.ok) throw await refusal(reply);
  return reply;
}

/** Convert an error response to a Fault. */
async function refusal(reply) {
  const { status } = reply;
  const error = await reply.json().then((body) => body?.error, () => null);
  const reason = typeof error?.message === "string" ? error.message : reply.statusText || "no reason given";
  const wait = reply.headers.get("Retry-After");
  const later = wait === null ? "" : /^\d+$/.test(wait) ? ` Try again in ${plural(+wait, "second")}.` : ` Try again after ${wait}.`;
  const what = {
    401: "The server requires an API key", 404: "Not found", 413: "Too large",
    429: "The server is busy", 503: "The server accepts no requests now",
  }[status] ?? (status < 500 ? "" : `The server failed (${status})`);
  return new Fault(`${what ? `${what}: ` : ""}${reason}${/[.!?]$/.test(reason) ? "" : "."}${later}`, { param: error?.param ?? null, status });
}

/** Data of server-sent events, independent of how the bytes are chunked. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      // A trailing carriage return may be the first half of a line end.
      const lines = (rest + value).split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        if (line !== "" || !data.length) continue;
        yield data.join("\n");
        data = [];
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // irrelevant after the last read
  }
}

/** Chunks of a streamed answer up to `[DONE]`; throws a Fault for errors and early ends. */
async function* answer(path, request, signal) {
  const reply = await ask(path, { method: "POST", body: JSON.stringify(request), signal });
  try {
    for await (const data of events(reply.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Fault(`The server aborted the answer: ${chunk.error.message}`, chunk.error);
      yield chunk;
    }
  } catch (error) {
    if (error instanceof SyntaxError) throw new Fault("The server sent an event that is not JSON.");
    if (error instanceof TypeError) throw new Fault("The connection broke before the answer was complete.");
    throw error;
  }
  throw new Fault("The connection ended before the answer was complete.");
}
