/** Transcripts as segments with words, and as the text of files. */

const SPACES = /[\t\n\v\f\r\x85\u2028\u2029]/g;
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
      found.push({ ...words[next], before: found.length ? rest.slice(0, space) : "" });
      at += space + words[next].word.length;
    }
    if (!segment.text.slice(at).trim()) return { ...segment, words: found };
    while (next < words.length && words[next].start < segment.end) next += 1;
    const { start, end, text } = segment;
    return { ...segment, words: [{ word: text.trim(), start, end, probability: 1, before: "" }] };
  });
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
    subtitles(document).map(({ start, end, text }, index) =>
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
