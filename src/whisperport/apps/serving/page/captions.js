/** Captions of the microphone: its samples go to the server, and words come back while they are spoken. */

import { realtime } from "./server.js";

const RATE = 24_000;  // samples per second, of OpenAI's API
const MAX_UNSENT = 600;  // pieces of 100 ms
const MAX_WAITING = 2 ** 22;  // bytes in the socket: as much
const TRIES = 10;  // to connect again, one per second
const LAST_S = 20;  // for the last words after the microphone was stopped
const TRANSCRIPTION = "conversation.item.input_audio_transcription";
const TENTATIVE = "item.input_audio_transcription.tentative";  // words that may still change

/** One session, from `start` to `stop`. A connection that breaks is made again, and nothing that was sent is lost. */
export class Captions {
  #box;
  #report;
  #lines = new Map();  // item -> its paragraph
  #stream = null;
  #context = null;
  #socket = null;
  #resume = {};       // the session and its last event, for another connection
  #unsent = [];       // events, while there is no connection
  #tries = 0;
  #isStopping = false;
  #isStopped = false;  // the server knows that there is no more audio

  /**
   * @param {HTMLElement} box where the captions appear
   * @param {{level: (peak: number) => void, ended: (problem: string) => void}} report
   *   `level`: of the microphone, 0 to 1; `ended`: once, with a sentence, or an empty one if all is well
   */
  constructor(box, report) {
    [this.#box, this.#report] = [box, report];
  }

  /** Begin. Rejects with a sentence if the microphone or the server cannot be used. */
  async start({ language, prompt, phrases: keywords }) {
    const asked = { ...(language && { language }), ...(prompt && { prompt }), ...(keywords.length && { keywords }) };
    const transcription = { model: "whisper-1", ...asked };
    const format = { type: "audio/pcm", rate: RATE };
    const input = { format, transcription, turn_detection: { type: "server_vad" } };
    try {
      this.#stream = await navigator.mediaDevices.getUserMedia({ audio: { channelCount: 1 } });
      this.#context = new AudioContext({ sampleRate: RATE });
      await this.#context.audioWorklet.addModule("static/microphone.js");
      const microphone = new AudioWorkletNode(this.#context, "microphone", { numberOfOutputs: 0 });
      microphone.port.onmessage = ({ data }) => this.#send(data);
      this.#tell({
        type: "session.update", session: { type: "transcription", audio: { input }, include: [TENTATIVE] },
      });
      await this.#connect();
      this.#context.createMediaStreamSource(this.#stream).connect(microphone);
    } catch (error) {
      this.#close();
      throw new Error(sentence(error));
    }
  }

  /** End, after the last words. */
  stop() {
    this.#isStopping = true;
    this.#release();
    this.#tell({ type: "input_audio_buffer.commit" });
    setTimeout(() => this.#end(""), LAST_S * 1000);
  }

  #connect() {
    const socket = this.#socket = realtime(this.#resume);
    socket.onmessage = ({ data }) => this.#receive(JSON.parse(data));
    return new Promise((resolve, reject) => {
      socket.onopen = () => {
        this.#tries = 0;
        for (const event of this.#unsent.splice(0)) this.#tell(event);
        resolve();
      };
      socket.onclose = () => {
        reject(new Error("The server does not accept the connection."));
        this.#again();
      };
    });
  }

  /** Connect again, if there was a connection. */
  #again() {
    if (!this.#resume.session_id) return;
    this.#tries += 1;
    if (this.#tries > TRIES) this.#end("The connection to the server was lost.");
    else setTimeout(() => this.#socket && this.#connect().catch(() => {}), 1000);
  }

  #send(buffer) {
    if (this.#isStopping) return;
    const samples = new Int16Array(buffer);
    this.#report.level(samples.reduce((peak, sample) => Math.max(peak, Math.abs(sample)), 0) / 32768);
    this.#tell({ type: "input_audio_buffer.append", audio: btoa(String.fromCharCode(...new Uint8Array(buffer))) });
    if (this.#unsent.length > MAX_UNSENT || this.#socket?.bufferedAmount > MAX_WAITING) {
      this.#end("The connection is too slow for audio.");
    }
  }

  #tell(event) {
    if (this.#socket?.readyState === WebSocket.OPEN) this.#socket.send(JSON.stringify(event));
    else this.#unsent.push(event);
  }

  #receive(event) {
    const { type } = event;
    if (type === "session.created") this.#resume.session_id = event.session.id;
    else if (type === `${TRANSCRIPTION}.delta`) this.#line(event).add(event.delta);
    else if (type === `${TRANSCRIPTION}.tentative`) this.#line(event).guess(event.text);
    else if (type === `${TRANSCRIPTION}.completed`) this.#line(event).complete(event.transcript);
    else if (type === `${TRANSCRIPTION}.failed`) this.#line(event).complete();
    else if (type === "input_audio_buffer.committed") this.#line(event);
    else if (type === "error" && !this.#isStopping) this.#end(event.error.message);
    if (type !== `${TRANSCRIPTION}.tentative`) this.#resume.after = event.event_id;
    if (this.#isStopping && (type === "input_audio_buffer.committed" || type === "error")) this.#isStopped = true;
    if (this.#isStopped && [...this.#lines.values()].every((line) => line.isComplete)) this.#end("");
  }

  #line({ item_id: id }) {
    if (!this.#lines.has(id)) this.#lines.set(id, new Line(this.#box));
    return this.#lines.get(id);
  }

  #end(problem) {
    if (!this.#socket) return;
    this.#close();
    for (const line of this.#lines.values()) line.complete();
    this.#report.ended(problem);
  }

  #close() {
    this.#release();
    if (!this.#socket) return;
    this.#socket.onclose = this.#socket.onmessage = null;
    this.#socket.close(1000);
    this.#socket = null;
  }

  #release() {
    for (const track of this.#stream?.getTracks() ?? []) track.stop();
    if (this.#context && this.#context.state !== "closed") this.#context.close();
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

  add(delta) {
    this.#text.data += delta;
  }

  guess(text) {
    this.#tentative.textContent = text;
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
