/** A transcript whose words follow the playback, and start it where they are selected. */

import { clock, places, segmentsOf } from "./formats.js";

const SEGMENTS_PER_BLOCK = 40;
const DOUBT = 0.6;  // a word of a lower probability is shaded
const GREAT_DOUBT = 0.3;

/**
 * Shows transcripts in an element. All text of a transcript becomes text nodes: it cannot be markup.
 *
 * @param {HTMLElement} box
 * @param {HTMLAudioElement} player
 * @param {(index: number, text: string) => void} edited called with the number of a word, and what the reader wrote in its place
 */
export class TranscriptView {
  #box;
  #player;
  #words = [];     // {start, segment, word, before}, in order of time
  #spans = [];     // the element of each
  #segments = [];  // index of the first word of each
  #current = -1;
  #frame = 0;
  #shown = 0;      // counts transcripts, so that an older one stops being built
  #edited;
  #found = [];     // the places of the text that is searched for
  #place = -1;     // the one that is shown
  isEditing = false;  // whether a click on a word edits it

  constructor(box, player, edited) {
    this.#box = box;
    this.#player = player;
    this.#edited = edited;
    box.addEventListener("click", (event) => this.#click(event));
    box.addEventListener("keydown", (event) => this.#press(event));
    player.addEventListener("seeked", () => this.#follow());
    player.addEventListener("play", () => this.#follow());
  }

  clear() {
    this.#shown += 1;
    this.#box.replaceChildren();
    this.#words = [];
    this.#spans = [];
    this.#segments = [];
    this.#current = -1;
    this.#found = [];
    this.#place = -1;
  }

  /** Mark the places of a text, and go to the first; return their number. */
  search(text) {
    for (const span of this.#box.querySelectorAll(".found")) span.classList.remove("found", "here");
    this.#found = places(this.#words, text);
    for (const place of this.#found) for (const span of this.#spansOf(place)) span.classList.add("found");
    this.#place = -1;
    this.next(1);
    return this.#found.length;
  }

  /** Go to another place of the text that is searched for; return its number, from 1 on. */
  next(step) {
    if (!this.#found.length) return 0;
    for (const span of this.#spansOf(this.#found[this.#place] ?? [0, -1])) span.classList.remove("here");
    this.#place = (this.#place + step + this.#found.length) % this.#found.length;
    const spans = this.#spansOf(this.#found[this.#place]);
    for (const span of spans) span.classList.add("here");
    spans[0].scrollIntoView({ block: "center" });
    return this.#place + 1;
  }

  #spansOf([first, last]) { return this.#spans.slice(first, last + 1); }

  /** Add text that has no times yet. */
  append(text) {
    const part = element("p");
    part.textContent = text.trim();
    this.#box.append(part);
  }

  /** Show a verbose_json document, block by block, so that the page reacts meanwhile. */
  async show(document) {
    this.clear();
    const shown = this.#shown;
    const segments = segmentsOf(document);
    for (let first = 0; first < segments.length; first += SEGMENTS_PER_BLOCK) {
      const block = element("div", "block");
      for (let index = first; index < Math.min(first + SEGMENTS_PER_BLOCK, segments.length); index += 1) {
        const { seek, truncated } = segments[index];
        const isLast = segments[index + 1]?.seek !== seek;  // of its window
        block.append(this.#segment(segments[index], truncated && isLast));
      }
      this.#box.append(block);
      await new Promise(requestAnimationFrame);
      if (shown !== this.#shown) return;
    }
    this.#follow();
  }

  #write(index, text) {
    const span = this.#spans[index];
    span.textContent = this.#words[index].word = text;
    span.classList.remove("doubt", "great-doubt");
    span.removeAttribute("title");
    this.#edited(index, text);
  }

  /** Show a document without one of its words, where the reader is. */
  async replace(document, index) {
    const { scrollY } = window;
    const before = this.#box.style.minHeight;
    this.#box.style.minHeight = `${this.#box.offsetHeight}px`;  // the page does not jump
    await this.show(document);
    this.#box.style.minHeight = before;
    scrollTo(0, scrollY);
    this.#mark(Math.min(index, this.#words.length - 1));
  }

  #segment({ start, words }, isTruncated) {
    const row = element("div", "segment");
    const time = element("button");
    const text = element("p");
    time.tabIndex = -1;  // the keys of the transcript do the same
    time.textContent = clock(start);
    time.dataset.word = this.#words.length;
    text.dir = "auto";
    this.#segments.push(this.#words.length);
    for (const [index, word] of words.entries()) text.append(word.before, this.#word(word, index ? "" : " "));
    row.append(time, text);
    if (isTruncated) {
      const note = element("p", "truncated note");
      note.textContent = "Text may be missing here: the model reached its limit.";
      row.append(note);
    }
    return row;
  }

  #word({ word, start, probability, before }, between) {
    const span = element("span", "word");
    span.textContent = word;
    span.dataset.word = this.#words.length;
    if (probability < DOUBT) {
      span.classList.add("doubt");
      span.classList.toggle("great-doubt", probability < GREAT_DOUBT);
      span.title = `Probability ${Math.round(probability * 100)} %`;
    }
    this.#words.push({ start, segment: this.#segments.length - 1, word, before: before || between });
    this.#spans.push(span);
    return span;
  }

  #click({ target }) {
    const index = target.dataset.word;
    if (index === undefined || !getSelection().isCollapsed) return;  // text was selected to copy it
    if (this.isEditing && target.matches(".word")) return this.#edit(Number(index));
    this.#seek(Number(index));
    this.#player.play();
  }

  /** Let the reader write another text in place of a word: Enter keeps it, Escape does not. */
  #edit(index) {
    const [span, { word }] = [this.#spans[index], this.#words[index]];
    const input = element("input", "word");
    Object.assign(input, { value: word, ariaLabel: `Instead of ${word}`, size: Math.max(word.length, 3), spellcheck: true });
    const end = (isKept, hadFocus) => {
      input.onblur = null;
      input.replaceWith(span);
      const text = input.value.trim().replace(/\s+/g, " ");
      if (isKept && text !== word) this.#write(index, text);
      if (hadFocus) this.#box.focus({ preventScroll: true });
    };
    input.onblur = () => end(true, false);
    input.onkeydown = (event) => {
      event.stopPropagation();
      if (event.key === "Enter" || event.key === "Escape") end(event.key === "Enter", true);
    };
    span.replaceWith(input);
    input.select();
  }

  #press(event) {
    if (event.altKey || event.ctrlKey || event.metaKey || !this.#words.length) return;
    const word = Math.max(this.#current, 0);
    const { segment } = this.#words[word];
    const moves = {
      ArrowLeft: word - 1,
      ArrowRight: this.#current + 1,
      ArrowUp: this.#segments[segment - 1],
      ArrowDown: this.#segments[segment + 1],
      Home: 0,
      End: this.#segments.at(-1),
    };
    if (event.key === "Enter" && this.#current >= 0) this.#edit(this.#current);
    else if (event.key === " ") this.#player.paused ? this.#player.play() : this.#player.pause();
    else if (!(event.key in moves)) return;
    else if (moves[event.key] in this.#words) this.#seek(moves[event.key]);
    event.preventDefault();
  }

  #seek(index) {
    this.#player.currentTime = this.#words[index].start;
    this.#mark(index);
  }

  /** Mark the word that is played, now and while the playback goes on. */
  #follow() {
    cancelAnimationFrame(this.#frame);
    const { currentTime, paused } = this.#player;
    // A player rounds the time that it was set to, and several words may begin at the same time.
    const isSought = Math.abs(this.#words[this.#current]?.start - currentTime) < 0.01;
    if (!isSought && (currentTime || !paused)) this.#mark(this.#indexAt(currentTime));
    if (!paused) this.#frame = requestAnimationFrame(() => this.#follow());
  }

  #indexAt(time) {
    let low = 0;
    let high = this.#words.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.#words[middle].start <= time) low = middle + 1;
      else high = middle;
    }
    return low - 1;
  }

  #mark(index) {
    if (index === this.#current) return;
    const [before, now] = [this.#spans[this.#current], this.#spans[index]];
    this.#current = index;
    before?.removeAttribute("aria-current");
    if (!now) return;
    now.setAttribute("aria-current", "true");
    if (!before || !isFarAway(before)) now.scrollIntoView({ block: "nearest" });
  }
}

/** Whether a reader scrolled away from an element. */
function isFarAway(element) {
  const { top, bottom } = element.getBoundingClientRect();
  return bottom < 0 || top > innerHeight;
}

function element(name, className = "") {
  return Object.assign(document.createElement(name), { className });
}
