/** Transcripts as segments with words, and as the text of files. */

const SPACES = /[\t\n\v\f\r\x85\u2028\u2029]/g;
const NO_SPEECH = [{ start: 0, end: 0.001, text: "" }];  // players do not accept an empty file
const UNSAFE = /[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]/g;  // of terminals, and of the direction of text

/**
 * The segments of a verbose_json document, with the words of each.
 * The document lists all words without spaces, so that each is searched for in the text of its segment.
 * A segment whose text differs from its words is one word.
 */
export function segmentsOf(document) {
  const words = document.words ?? [];
  let next = 0;
  return document.segments.filter(({ text }) => text.trim()).map((segment) => {
    const found = [];
    let at = 0;
    for (; next < words.length; next += 1) {
      const rest = segment.text.slice(at);
      const space = rest.length - rest.trimStart().length;
      if (!rest.trim() || !rest.startsWith(words[next].word, space)) break;
      found.push({ ...words[next], before: found.length ? rest.slice(0, space) : "", source: next });
      at += space + words[next].word.length;
    }
    if (!segment.text.slice(at).trim()) return { ...segment, words: found };
    while (next < words.length && words[next].start < segment.end) next += 1;
    const { start, end, text } = segment;
    return { ...segment, words: [{ word: text.trim(), start, end, probability: 1, before: "" }] };
  });
}

/**
 * The document with other text in place of a word; without the word, if there is no text.
 *
 * @param {object} document
 * @param {number} index of the word, among those of all segments of `segmentsOf`
 * @param {string} text
 */
export function edited(document, index, text) {
  const kept = document.segments.filter((segment) => segment.text.trim());
  const found = segmentsOf(document);
  const at = found.findIndex(({ words }) => index < words.length || (index -= words.length) < 0);
  const { words } = found[at];
  const word = { ...words[index], word: text.trim().replace(/\s+/g, " "), probability: 1 };
  const changed = words.with(index, word).filter((one) => one.word);
  const space = kept[at].text.match(/^\s*/)[0];
  const whole = space + changed.map((one, n) => (n ? one.before : "") + one.word).join("");
  const segments = document.segments.map((one) => (one === kept[at] ? { ...one, text: whole } : one));
  const { before, source, ...plain } = word;
  const list = source === undefined ? document.words : document.words.with(source, plain).filter((one) => one.word);
  return { ...document, segments, words: list, text: segments.map((one) => one.text).join("").trim() };
}

/**
 * Where a text is in words, which may be several: [first word, last word] of each place.
 *
 * @param {{word: string, before: string}[]} words
 * @param {string} text in any case
 */
export function places(words, text) {
  const wanted = text.trim().toLowerCase().replace(/\s+/g, " ");
  if (!wanted) return [];
  let all = "";
  const ends = words.map(({ before, word }) => (all += before.replace(/\s+/g, " ") + word.toLowerCase()).length);
  const found = [];
  let word = 0;
  for (let at = all.indexOf(wanted); at >= 0; at = all.indexOf(wanted, at + wanted.length)) {
    while (ends[word] <= at) word += 1;
    const first = word;
    while (ends[word] < at + wanted.length) word += 1;
    found.push([first, word]);
  }
  return found;
}

/** A duration as people read it: 4:05, 1:04:05. */
export function clock(seconds) {
  const [hours, minutes, rest] = parts(Math.floor(seconds));
  return hours ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
}

/** By the ending of a file: its type, and how it is written from a document. */
export const FORMS = {
  txt: ["text/plain", (document) => segmentsOf(document).map((one) => `${line(one.text)}\n`).join("")],
  srt: ["application/x-subrip", (document) =>
    (subtitles(document).length ? subtitles(document) : NO_SPEECH).map(({ start, end, text }, index) =>
      `${index + 1}\n${stamp(start, ",", true)} --> ${stamp(end, ",", true)}\n${text}\n\n`).join("")],
  vtt: ["text/vtt", (document) => "WEBVTT\n\n" +
    subtitles(document).map(({ start, end, text }) =>
      `${stamp(start, ".")} --> ${stamp(end, ".")}\n${text}\n\n`).join("")],
  json: ["application/json", (document) => JSON.stringify(document, null, 1)],
};

/** Let the browser save a text as a file. */
export function save(text, name, type) {
  const link = Object.assign(window.document.createElement("a"), { download: name });
  link.href = URL.createObjectURL(new Blob([text], { type: `${type};charset=utf-8` }));
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

/** Copy a text; return whether the browser allowed it. Without TLS, it has only the older way. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch { /* undefined, or not allowed */ }
  const box = Object.assign(window.document.createElement("textarea"), { value: text, className: "unseen" });
  window.document.body.append(box);
  box.select();
  const isCopied = window.document.execCommand("copy");
  box.remove();
  return isCopied;
}

/** One subtitle per segment, from its first word to its last. */
function subtitles(document) {
  return segmentsOf(document).map(({ text, words }) =>
    ({ start: words[0].start, end: words.at(-1).end, text: line(text).replace(/-{2,}>/g, "->") }));
}

function line(text) {
  const escaped = (unsafe) => {
    const code = unsafe.charCodeAt(0);
    return code < 256 ? `\\x${code.toString(16).padStart(2, "0")}` : `\\u${code.toString(16)}`;
  };
  return text.trim().replace(SPACES, " ").replace(UNSAFE, escaped);
}

function stamp(seconds, mark, alwaysHours = false) {
  const milliseconds = Math.round(seconds * 1000);
  const [hours, minutes, rest] = parts(Math.floor(milliseconds / 1000));
  const short = `${two(minutes)}:${two(rest)}${mark}${String(milliseconds % 1000).padStart(3, "0")}`;
  return hours || alwaysHours ? `${two(hours)}:${short}` : short;
}

function parts(seconds) {
  return [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60, seconds % 60];
}

function two(number) {
  return String(number).padStart(2, "0");
}
