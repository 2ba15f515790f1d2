/** The files that were chosen: some are transcribed together, the others wait. */

import { clock } from "./formats.js";
import { transcribe } from "./server.js";

const TOGETHER = 2;
const WORDS = { waiting: "Waiting", done: "Done", failed: "Failed", cancelled: "Cancelled" };

/**
 * A file and what became of it.
 * `state`: waiting, running, done, failed or cancelled. `text`: the pieces until now. `document`: the transcript.
 */
class Job {
  state = "waiting";
  note = "";        // what the state is in detail, or why it failed
  part = null;      // of the audio that is done, 0 to 1; null: unknown
  durationS = 0;    // 0: unknown
  text = [];
  document = null;
  cancel = () => {};

  constructor(file, asked) {
    Object.assign(this, { file, asked, name: file.name });
  }

  get about() {
    const note = this.state === "failed" ? "" : this.note;
    return [WORDS[this.state], note].filter(Boolean).join(" · ");
  }

  get isOpen() { return this.state === "waiting" || this.state === "running"; }
}

/**
 * @param {HTMLElement} list where the files are listed
 * @param {HTMLTemplateElement} template of one of them
 * @param {{selected: (job) => void, added: (job, text) => void, changed: (job, isNewState) => void}} report
 *   `selected`: a file, or null; `added`: text of a file; `changed`: what is known of a file
 */
export class Queue {
  maxBytes = Infinity;
  selected = null;
  #list;
  #template;
  #report;
  #jobs = new Map();  // job -> its element
  #isPaused = true;

  constructor(list, template, report) {
    [this.#list, this.#template, this.#report] = [list, template, report];
  }

  /** While it is paused, no file is sent. */
  set isPaused(paused) {
    this.#isPaused = paused;
    this.#next();
  }

  get isBusy() { return [...this.#jobs.keys()].some((job) => job.isOpen); }

  add(files, asked) {
    for (const file of files) {
      const job = new Job(file, asked);
      const item = this.#template.content.cloneNode(true).firstElementChild;
      item.querySelector(".title").textContent = job.name;
      item.querySelector(".open").onclick = () => this.select(job);
      item.querySelector(".close").onclick = () => (job.isOpen ? this.#cancel(job) : this.#remove(job));
      this.#jobs.set(job, item);
      this.#list.append(item);
      this.#set(job, {});
      if (!this.selected) this.select(job);
    }
    this.#next();
  }

  /** Show a file; null: none. */
  select(job) {
    this.#button(this.selected)?.removeAttribute("aria-current");
    this.selected = job;
    this.#button(job)?.setAttribute("aria-current", "true");
    this.#report.selected(job);
  }

  retry(job, asked) {
    Object.assign(job, { asked, text: [] });
    this.#set(job, { state: "waiting", note: "", part: null });
    this.#next();
  }

  #button(job) { return this.#jobs.get(job)?.querySelector(".open"); }

  #next() {
    const jobs = [...this.#jobs.keys()];
    let free = TOGETHER - jobs.filter(({ state }) => state === "running").length;
    for (const job of jobs) {
      if (job.state === "waiting" && !this.#isPaused && free-- > 0) this.#run(job);
    }
  }

  async #run(job) {
    this.#set(job, { state: "running", note: "Sending" });
    try {
      if (job.file.size > this.maxBytes) throw new Error(tooLarge(job.file.size, this.maxBytes));
      probe(job);
      const document = await this.#send(job);
      this.#set(job, { state: "done", note: clock(document.duration), document, part: 1 });
    } catch (error) {
      if (job.state === "running") this.#set(job, { state: "failed", note: error.message });
    }
    this.#next();
  }

  /** Send a file; again, when a server that is full says so. */
  async #send(job) {
    for (;;) {
      const { result, cancel } = transcribe(job.file, job.asked, {
        uploaded: (part) => this.#set(job, part < 1 ? { note: `Sending, ${percent(part)}` } : { note: "Transcribing" }),
        delta: (event) => this.#add(job, event),
      });
      job.cancel = cancel;
      try {
        return await result;
      } catch (error) {
        if (error.status !== 429 || !error.retryS) throw error;
        this.#set(job, { note: `The server is full. Next try in ${error.retryS} s` });
        await new Promise((resolve) => {
          job.cancel = resolve;
          setTimeout(resolve, error.retryS * 1000);
        });
        if (job.state !== "running") throw error;
      }
    }
  }

  #add(job, { delta, end }) {
    job.text.push(delta);
    this.#report.added(job, delta);
    const [done, all] = [clock(end), job.durationS && clock(job.durationS)];
    this.#set(job, { note: all ? `${done} of ${all}` : `${done} transcribed`, part: all && end / job.durationS });
  }

  #cancel(job) {
    const { cancel } = job;
    this.#set(job, { state: "cancelled", note: "" });
    cancel();
    this.#next();
  }

  #remove(job) {
    const item = this.#jobs.get(job);
    const other = (item.nextElementSibling ?? item.previousElementSibling)?.querySelector(".open");
    item.remove();
    this.#jobs.delete(job);
    if (this.selected === job) this.select(null);
    (other ?? window.document.getElementById("choose")).focus();
  }

  #set(job, change) {
    Object.assign(job, change);
    const item = this.#jobs.get(job);
    const progress = item.querySelector("progress");
    item.className = job.state;
    item.querySelector(".state").textContent = job.about;
    item.querySelector(".close").ariaLabel = `${job.isOpen ? "Cancel" : "Remove"} ${job.name}`;
    progress.hidden = job.state !== "running";
    progress.ariaLabel = `Progress of ${job.name}`;
    if (job.part) progress.value = job.part;
    else progress.removeAttribute("value");
    this.#report.changed(job, "state" in change);
  }
}

/** Ask the browser for the duration of a file; formats that it cannot play have none. */
function probe(job) {
  const audio = new Audio();
  const end = () => URL.revokeObjectURL(audio.src);
  audio.preload = "metadata";
  audio.onerror = end;
  audio.onloadedmetadata = () => {
    if (Number.isFinite(audio.duration)) job.durationS = audio.duration;
    end();
  };
  audio.src = URL.createObjectURL(job.file);
}

function tooLarge(size, limit) {
  return `The file has ${mib(size)} MiB; this server accepts ${mib(limit)} MiB.`;
}

function mib(bytes) {
  return Math.ceil(bytes / 2 ** 20);
}

function percent(part) {
  return `${Math.round(part * 100)} %`;
}
