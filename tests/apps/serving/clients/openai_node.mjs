// Use a server through OpenAI's Node package: node openai_node.mjs URL AUDIO LONG TEXT prints "ok", or fails.
import assert from "node:assert";
import fs from "node:fs";
import { createRequire } from "node:module";

const load = createRequire(`${process.env.NODE_FOLDER ?? process.cwd()}/`);
const OpenAI = load("openai");
const [url, audio, long, text] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const create = (more, file = audio) =>
  client.audio.transcriptions.create({ model: "whisper-1", file: fs.createReadStream(file), ...more });

assert.equal((await create({})).text, text);
assert.equal(await create({ response_format: "text" }), `${text}\n`);
assert.match(await create({ response_format: "srt" }), /^1\n00:00:00,000 --> /);
assert.match(await create({ response_format: "vtt" }), /^WEBVTT\n/);
const verbose = await create({
  response_format: "verbose_json",
  timestamp_granularities: ["word", "segment"],
});
assert.equal(verbose.language, "english");
assert.equal(verbose.words.map((one) => one.word).join(" "), text);
assert.ok(verbose.segments.length > 0);
assert.equal((await create({ chunking_strategy: { type: "server_vad" } })).text, text);

const whole = (await create({}, long)).text;
let joined = "";
let done;
for await (const event of await create({ stream: true }, long)) {
  if (event.type === "transcript.text.delta") joined += event.delta;
  else done = event;
}
assert.equal(done.type, "transcript.text.done");
assert.equal(joined, done.text);
assert.equal(done.text, whole);

await assert.rejects(create({ temperature: 2 }), (error) => {
  assert.ok(error instanceof OpenAI.BadRequestError);
  assert.equal(error.param, "temperature");
  return true;
});
await assert.rejects(create({ model: "large" }), OpenAI.NotFoundError);
const models = [];
for await (const model of client.models.list()) models.push(model.id);
assert.ok(models.includes("whisper-1"));
console.log("ok");
