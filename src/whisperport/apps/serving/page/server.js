/** What this page asks of the server. URLs are relative, so that a proxy may put the server below a path. */

const KEY = "whisperport-key";

/** The API key: it is kept in this tab only. */
export const key = {
  get value() { return sessionStorage.getItem(KEY) ?? ""; },
  set value(value) { sessionStorage.setItem(KEY, value); },
};

/** An answer that is not a transcript. `retryS`: seconds after which another try may succeed. */
export class ServerError extends Error {
  constructor(message, status = 0, retryS = 0) {
    super(message);
    Object.assign(this, { status, retryS });
  }
}

/** The model's name, its languages, and what the server accepts. */
export async function describe() {
  const answer = await fetch("static/server.json");
  if (!answer.ok) throw new ServerError("The server does not answer. Load this page again.");
  return answer.json();
}

/** Whether the server accepts the key. */
export async function keyOpens() {
  return (await fetch("v1/models", { headers: authorization() })).ok;
}

/**
 * A WebSocket for captions; a browser sends the key as a subprotocol.
 *
 * @param {{session_id?: string, after?: string}} resume a session, and the last event that was received of it
 */
export function realtime(resume) {
  const url = new URL("v1/realtime", document.baseURI);
  url.search = new URLSearchParams({ intent: "transcription", ...resume });
  url.protocol = url.protocol.replace("http", "ws");
  return new WebSocket(url, ["realtime", ...(key.value ? [`openai-insecure-api-key.${key.value}`] : [])]);
}

/**
 * Transcribe a file. An XMLHttpRequest, because `fetch` does not report the progress of an upload.
 *
 * @param {File} file
 * @param {{task: string, language: string, prompt: string, phrases: string[]}} asked
 * @param {{uploaded: (part: number) => void, delta: (event: object) => void}} report
 * @returns {{result: Promise<object>, cancel: () => void}} the verbose_json document
 */
export function transcribe(file, asked, report) {
  const request = new XMLHttpRequest();
  const result = new Promise((resolve, reject) => {
    const read = events();
    const receive = () => {
      if (request.status !== 200) return;
      for (const event of read(request.responseText)) {
        if (event.error) reject(new ServerError(event.error.message));
        else if (event.type === "transcript.text.delta") report.delta(event);
        else if (event.type === "transcript.text.done") resolve(document_of(event));
      }
    };
    request.upload.onprogress = ({ loaded, total }) => report.uploaded(loaded / total);
    request.onprogress = receive;
    request.onload = () => {
      receive();
      reject(request.status === 200 ? new ServerError("The server ended before the transcript did.") : error(request));
    };
    request.onerror = () => reject(new ServerError("The connection to the server was lost."));
    request.onabort = () => reject(new ServerError("Cancelled"));
  });
  request.open("POST", `v1/audio/${asked.task}`);
  for (const [name, value] of Object.entries(authorization())) request.setRequestHeader(name, value);
  request.send(form(file, asked));
  return { result, cancel: () => request.abort() };
}

function form(file, { language, prompt, phrases }) {
  const data = new FormData();
  const fields = { model: "whisper-1", response_format: "verbose_json", stream: "true", language, prompt };
  for (const [name, value] of Object.entries(fields)) if (value) data.append(name, value);
  for (const phrase of phrases) data.append("keywords[]", phrase);
  for (const one of ["word", "segment"]) data.append("timestamp_granularities[]", one);
  data.append("file", file, "audio");  // its name is nobody's business
  return data;
}

function authorization() {
  return key.value ? { authorization: `Bearer ${key.value}` } : {};
}

function document_of({ type, ...document }) {
  return document;
}

/** Returns a reader of the server-sent events in a text that grows: the new ones at each call. */
function events() {
  let at = 0;
  return (text) => {
    const found = [];
    for (let end; (end = text.indexOf("\n\n", at)) >= 0; at = end + 2) {
      const event = text.slice(at, end);
      if (event.startsWith("data: ")) found.push(JSON.parse(event.slice(6)));  // others are comments
    }
    return found;
  };
}

function error(request) {
  let message = `The server answered with status ${request.status}.`;
  try {
    message = JSON.parse(request.responseText).error.message;
  } catch { /* a proxy's page */ }
  return new ServerError(message, request.status, Number(request.getResponseHeader("retry-after")));
}
