/** Captions of the microphone: its samples go to the server, and words come back while they are spoken. */

import { realtime } from "./server.js";

const RATE = 24_000;  // samples per second, of OpenAI's API
const LAST_S = 10;    // for the last words after the microphone was stopped
const MAX_WAITING = 2 ** 21;  // bytes that were not sent: more than half a minute of audio
const TRANSCRIPTION = "conversation.item.input_audio_transcription";

/** One session, from `start` to `stop`. */
export class Captions {
  #box;
  #report;
  #lines = new Map();  // item -> its paragraph
  #socket = null;
  #stream = null;
  #context = null;
  #isStopping = false;

  /**
   * @param {HTMLElement} box where the captions appear
   * @param {{level: (peak: number) => void, ended: (problem: string) => void}} report
   *   `level`: of the microphone, 0 to 1; `ended`: once, with a sentence, or an empty one if all is well
   */
  constructor(box, report) {
    [this.#box, this.#report] = [box, report];
  }

  /** Begin. Rejects with a sentence if the microphone or the server cannot be used. */
  async start({ language, prompt }) {
    try {
      this.#stream = await navigator.mediaDevices.getUserMedia({ audio: { channelCount: 1 } });
      this.#context = new AudioContext({ sampleRate: RATE });
      await this.#context.audioWorklet.addModule("static/microphone.js");
      await this.#connect(language, prompt);
      const microphone = new AudioWorkletNode(this.#context, "microphone", { numberOfOutputs: 0 });
      microphone.port.onmessage = ({ data }) => this.#send(data);
      this.#context.createMediaStreamSource(this.#stream).connect(microphone);
    } catch (error) {
      this.#release();
      throw new Error(sentence(error));
    }
  }

  /** End, after the last words. */
  stop() {
    if (this.#isStopping) return;
    this.#isStopping = true;
    this.#release();
    this.#tell({ type: "input_audio_buffer.commit" });
    setTimeout(() => this.#socket.close(), LAST_S * 1000);
  }

  #connect(language, prompt) {
    const transcription = { model: "whisper-1", ...(language && { language }), ...(prompt && { prompt }) };
    const input = {
      format: { type: "audio/pcm", rate: RATE }, transcription, turn_detection: { type: "server_vad" },
    };
    this.#socket = realtime();
    this.#socket.onmessage = ({ data }) => this.#receive(JSON.parse(data));
    return new Promise((resolve, reject) => {
      this.#socket.onopen = () => {
        this.#tell({ type: "session.update", session: { type: "transcription", audio: { input } } });
        resolve();
      };
      this.#socket.onclose = () => {
        reject(new Error("The server does not accept the connection."));
        this.#end(this.#isStopping ? "" : "The connection to the server was lost.");
      };
    });
  }

  #send(buffer) {
    if (this.#isStopping) return;
    const samples = new Int16Array(buffer);
    this.#report.level(samples.reduce((peak, sample) => Math.max(peak, Math.abs(sample)), 0) / 32768);
    this.#tell({ type: "input_audio_buffer.append", audio: btoa(String.fromCharCode(...new Uint8Array(buffer))) });
    if (this.#socket.bufferedAmount > MAX_WAITING) this.#end("The connection is too slow for audio.");
  }

  #tell(event) {
    if (this.#socket.readyState === WebSocket.OPEN) this.#socket.send(JSON.stringify(event));
  }

  #receive(event) {
    if (event.type === `${TRANSCRIPTION}.delta`) this.#line(event).add(event);
    else if (event.type === `${TRANSCRIPTION}.completed`) this.#line(event).complete(event.transcript);
    else if (event.type === `${TRANSCRIPTION}.failed`) this.#line(event).complete("");
    else if (event.type === "error" && !this.#isStopping) this.#end(event.error.message);
    if (this.#isStopping && [...this.#lines.values()].every((line) => line.isComplete)) this.#socket.close();
  }

  #line({ item_id: id }) {
    if (!this.#lines.has(id)) this.#lines.set(id, new Line(this.#box));
    return this.#lines.get(id);
  }

  #end(problem) {
    this.#release();
    this.#socket.onclose = null;
    this.#socket.close();
    for (const line of this.#lines.values()) line.complete();
    this.#report.ended(problem);
  }

  #release() {
    for (const track of this.#stream?.getTracks() ?? []) track.stop();
    if (this.#context?.state !== "closed") this.#context?.close();
  }
}

/** One item: words that stay, and words that may still change. */
class Line {
  isComplete = false;
  #paragraph = document.createElement("p");
  #tentative = document.createElement("span");
  #text = document.createTextNode("");

  constructor(box) {
    this.#tentative.className = "tentative";
    this.#tentative.ariaHidden = "true";  // a screen reader reads only the words that stay
    this.#paragraph.dir = "auto";
    this.#paragraph.append(this.#text, this.#tentative);
    box.append(this.#paragraph);
  }

  add({ delta, x_whisperport: more }) {
    this.#text.data += delta;
    this.#tentative.textContent = more?.tentative ?? "";
    this.#paragraph.scrollIntoView({ block: "nearest" });
  }

  complete(transcript = this.#text.data) {
    this.isComplete = true;
    if (this.#text.data !== transcript) this.#text.data = transcript;
    this.#tentative.remove();
    if (!transcript.trim()) this.#paragraph.remove();
  }
}

function sentence(error) {
  const known = {
    NotAllowedError: "The browser does not allow this page to use the microphone.",
    NotFoundError: "No microphone was found.",
    NotReadableError: "The microphone is in use by another program.",
    NotSupportedError: "This browser cannot convert the microphone's audio to 24 kHz.",
  };
  return known[error.name] ?? error.message;
}
