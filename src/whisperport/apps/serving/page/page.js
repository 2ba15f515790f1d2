/** The page: connects the files, the transcript and the captions with what can be operated. */

import { Captions } from "./captions.js";
import { FORMS, copy, edited, save } from "./formats.js";
import { Queue } from "./queue.js";
import { describe, key, keyOpens } from "./server.js";
import { TranscriptView } from "./transcript.js";

const byId = (id) => document.getElementById(id);
const player = byId("player");
const view = new TranscriptView(byId("transcript"), player, edit);
const queue = new Queue(byId("queue"), byId("item"), { selected: show, added, changed });

const asked = () => ({
  task: byId("task").value, language: byId("language").value, prompt: byId("prompt").value.trim(),
  phrases: byId("phrases").value.split(/[,\n]/).map((phrase) => phrase.trim()).filter(Boolean),
});
let captions = null;  // the session that runs, or ends
const announce = (text) => { byId("status").textContent = text; };

// Files

function add(files) {
  queue.add(files, asked());
}

byId("choose").addEventListener("change", ({ target }) => {
  add(target.files);
  target.value = "";  // the same file can be chosen again
});

for (const name of ["dragenter", "dragover", "dragleave", "drop"]) {
  addEventListener(name, (event) => {
    event.preventDefault();  // otherwise the browser would open the file in place of this page
    byId("drop").classList.toggle("over", name === "dragover");
    if (name === "drop") add(event.dataTransfer.files);
  });
}

byId("queue").addEventListener("click", ({ target }) => {
  const { top } = byId("result").getBoundingClientRect();
  if (target.closest(".open") && (top < 0 || top > innerHeight / 2)) byId("result").scrollIntoView();  // a phone
});

addEventListener("beforeunload", (event) => {
  if (queue.isBusy) event.preventDefault();  // the browser asks
});

// The selected file

function pane(id) {
  for (const one of ["nothing", "file", "captions"]) byId(one).hidden = one !== id;
  byId("show-captions").hidden = id === "captions" || !(captions || byId("spoken").firstChild);
}

function show(job) {
  player.pause();
  URL.revokeObjectURL(player.src);
  view.clear();
  pane(job ? "file" : "nothing");
  if (!job) return;
  byId("name").textContent = job.name;
  player.hidden = false;
  player.src = URL.createObjectURL(job.file);
  if (job.document) showDocument(job);
  else for (const text of job.text) view.append(text);
  result(job);
}

/** Show a transcript, and where the text is that is searched for. */
async function showDocument(job) {
  await view.show(job.document);
  if (job === queue.selected) search();
}

function search() {
  const count = view.search(byId("search").value);
  byId("matches").textContent = byId("search").value.trim() ? `${count ? 1 : 0} of ${count}` : "";
}

byId("search").addEventListener("input", search);
byId("search").addEventListener("keydown", (event) => {
  if (event.key !== "Enter") return;
  const place = view.next(event.shiftKey ? -1 : 1);
  if (place) byId("matches").textContent = byId("matches").textContent.replace(/^\d+/, place);
});

byId("edit").addEventListener("click", ({ target }) => {
  view.isEditing = !view.isEditing;
  target.ariaPressed = String(view.isEditing);
  announce(view.isEditing ? "Select a word to edit it." : "A word is played when you select it.");
});

function edit(index, text) {
  const job = queue.selected;
  job.document = edited(job.document, index, text);
  if (!text) view.replace(job.document, index);  // the words after it have other numbers
  announce("The word is changed.");
}

byId("copy").addEventListener("click", async ({ target }) => {
  const isCopied = await copy(FORMS.txt[1](queue.selected.document));
  target.textContent = isCopied ? "Copied" : "Not copied";
  announce(isCopied ? "The transcript is copied." : "The browser does not allow copying.");
  setTimeout(() => { target.textContent = "Copy"; }, 2000);
});

player.addEventListener("error", () => {
  player.hidden = true;
  if (queue.selected) result(queue.selected);
});

function added(job, text) {
  if (job === queue.selected) view.append(text);
}

function changed(job, isNewState) {
  const words = { running: "is being transcribed", done: "is done", failed: "failed", cancelled: "was cancelled" };
  if (isNewState && words[job.state]) announce(`${job.name} ${words[job.state]}.`);
  if (job !== queue.selected) return;
  result(job);
  if (isNewState && job.document) showDocument(job);
}

/** Show what is known of a file now. */
function result(job) {
  const isDone = job.state === "done";
  byId("downloads").hidden = byId("keys").hidden = !isDone;
  byId("tools").hidden = !isDone || !job.document.segments.length;
  byId("again").hidden = job.isOpen || isDone;
  byId("no-player").hidden = !(isDone && player.hidden);
  byId("summary").textContent = isDone ? summary(job.document) : job.state === "failed" ? job.note : job.about;
  byId("summary").classList.toggle("wrong", job.state === "failed");
}

function summary({ language, task, words, segments }) {
  const name = language[0].toUpperCase() + language.slice(1);
  if (!segments.length) return "No speech was found.";
  return `${task === "translate" ? "Translated to English" : name} · ${words.length.toLocaleString()} words`;
}

byId("again").addEventListener("click", () => {
  view.clear();
  queue.retry(queue.selected, asked());
});

byId("downloads").addEventListener("click", ({ target }) => {
  const form = target.dataset.form;
  if (!form) return;
  const [type, write] = FORMS[form];
  const { name, document } = queue.selected;
  save(write(document), `${name.replace(/\.[^.]*$/, "")}.${form}`, type);
});

// Captions

const listen = byId("listen");

function showCaptions() {
  queue.select(null);
  pane("captions");
}

byId("show-captions").addEventListener("click", showCaptions);

function listening(isOn) {
  listen.ariaPressed = String(isOn);
  listen.textContent = isOn ? "Stop the microphone" : "Start the microphone";
  byId("level").hidden = !isOn;
}

function ended(problem) {
  captions = null;
  listening(false);
  listen.disabled = false;
  note(problem || "The microphone is off.", Boolean(problem));
}

function note(text, isWrong = false) {
  byId("listen-note").textContent = text;
  byId("listen-note").classList.toggle("wrong", isWrong);
  announce(text);
}

listen.addEventListener("click", async () => {
  if (captions) {
    listening(false);
    listen.disabled = true;  // until the last words are there
    captions.stop();
    return;
  }
  captions = new Captions(byId("spoken"), { level: (peak) => { byId("level").value = Math.sqrt(peak); }, ended });
  listen.disabled = true;  // while the browser asks
  showCaptions();
  try {
    await captions.start(asked());
    listen.disabled = false;
    listening(true);
    note("Words appear while you speak. Grey words may still change.");
  } catch (error) {
    ended(error.message);
  }
});

byId("clear-captions").addEventListener("click", () => byId("spoken").replaceChildren());
byId("save-captions").addEventListener("click", () => {
  const lines = [...byId("spoken").children].map((line) => `${line.firstChild.data.trim()}\n`);
  save(lines.join(""), "captions.txt", "text/plain");
});

// The server

async function begin() {
  const server = await describe();
  byId("model").textContent = `Model: ${server.model}`;
  queue.maxBytes = server.max_body_bytes;
  const names = Object.entries(server.languages).sort(([, one], [, other]) => one.localeCompare(other));
  for (const [code, name] of names) byId("language").append(new Option(name[0].toUpperCase() + name.slice(1), code));
  byId("language-field").hidden = names.length < 2;
  byId("task-field").hidden = !server.translates;
  if (!navigator.mediaDevices) {
    listen.disabled = true;
    note("The microphone is not available: browsers allow it on https:// pages and on localhost only.");
  }
  await open(server.needs_key);
}

async function open(needsKey) {
  const isOpen = !needsKey || (key.value !== "" && await keyOpens());
  byId("key").hidden = isOpen;
  queue.isPaused = !isOpen;
  return isOpen;
}

byId("key").addEventListener("submit", async (event) => {
  event.preventDefault();
  key.value = byId("key-value").value.trim();
  if (await open(true)) announce("The key is accepted.");
  else byId("key-note").textContent = "The server does not accept this key.";
});

begin().catch(({ message }) => {
  byId("model").textContent = message;
  byId("model").className = "wrong";
});
