// Run transformers.js on audio files: the counterpart of `run_client.py`, which describes the job and the result.
//
//     node client.mjs JOB.json FOLDER_OF_NODE_MODULES

import { readFileSync, renameSync, symlinkSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { dirname, join } from "node:path";

// The caller shows the last line.
process.on("uncaughtException", (error) => {
  console.error(error.message);
  process.exit(1);
});

const [jobPath, packages] = process.argv.slice(2);
const { pipeline, env } = createRequire(packages + "/")("@huggingface/transformers");
const job = JSON.parse(readFileSync(jobPath));
const generation = JSON.parse(readFileSync(join(job.model, "generation_config.json")));

function samplesOf(path) {
  const file = readFileSync(path);
  const start = file.indexOf("data") + 8;
  const samples = new Float32Array((file.length - start) >> 1);
  for (let i = 0; i < samples.length; i++) samples[i] = file.readInt16LE(start + 2 * i) / 32768;
  return samples;
}

function seconds(start) {
  return (performance.now() - start) / 1000;
}

// The tokens after the prompt and before the end of text.
function textTokens(sequence) {
  const tokens = sequence.slice(sequence.indexOf(generation.no_timestamps_token_id) + 1);
  const end = tokens.indexOf(generation.eos_token_id);
  return end < 0 ? tokens : tokens.slice(0, end);
}

function peakMib() {
  try {
    return Number(readFileSync("/proc/self/status", "utf8").match(/VmHWM:\s*(\d+)/)[1]) / 1024;
  } catch {
    return process.resourceUsage().maxRSS / 1024; // another system than Linux
  }
}

env.allowRemoteModels = false;
// A path is no name of a model: some characters are refused in it.
env.localModelPath = dirname(jobPath);
symlinkSync(job.model, join(env.localModelPath, "model"), "junction");
let start = performance.now();
// Without a dtype: config.json names that of the files.
const transcribe = await pipeline("automatic-speech-recognition", "model", {
  session_options: { intraOpNumThreads: 1, interOpNumThreads: 1 },
});
const result = { versions: { "@huggingface/transformers": env.version }, load_s: seconds(start), clips: [], seconds: [] };

// The pipeline returns no ids: they are taken where it decodes them.
let sequence;
const decode = transcribe.tokenizer._decode_asr.bind(transcribe.tokenizer);
transcribe.tokenizer._decode_asr = (chunks, options) => {
  sequence = chunks[0].tokens.map(Number);
  return decode(chunks, options);
};

const options = generation.is_multilingual ? { language: job.language, task: "transcribe" } : {};
for (const path of job.clips) {
  const samples = samplesOf(path);
  start = performance.now();
  const { text } = await transcribe(samples, options);
  result.seconds.push(seconds(start));
  const clip = { text, tokens: textTokens(sequence) };
  if (job.words) {
    const { chunks } = await transcribe(samples, { ...options, return_timestamps: "word" });
    clip.words = chunks.map((word) => [...word.timestamp, word.text]);
  }
  result.clips.push(clip);
}
result.peak_mib = peakMib();
writeFileSync(job.result + ".part", JSON.stringify(result));
renameSync(job.result + ".part", job.result);
