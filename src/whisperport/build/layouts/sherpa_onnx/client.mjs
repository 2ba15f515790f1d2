// Run sherpa-onnx in Node: the counterpart of `run_client.py`, which describes the job and the result.
//
//     node client.mjs JOB.json FOLDER_OF_NODE_MODULES

import { existsSync, readdirSync, readFileSync, renameSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";

const [jobPath, packages] = process.argv.slice(2);
const job = JSON.parse(readFileSync(jobPath));
const sherpa = createRequire(packages + "/")("sherpa-onnx-node");

function seconds(start) {
  return (performance.now() - start) / 1000;
}

function peakMib() {
  const status = "/proc/self/status";
  if (!existsSync(status)) return process.resourceUsage().maxRSS / 1024; // another system than Linux
  return Number(readFileSync(status, "utf8").match(/VmHWM:\s*(\d+)/)[1]) / 1024;
}

let start = performance.now();
const names = readdirSync(job.model).sort();
const ends = [/encoder.*\.onnx$/, /decoder.*\.onnx$/, /tokens\.txt$/]; // the app's own models: tiny-encoder.int8.onnx
const [encoder, decoder, tokens] = ends.map((end) => join(job.model, names.find((name) => end.test(name))));
const whisper = { encoder, decoder, language: job.language, task: "transcribe" };
const recognizer = new sherpa.OfflineRecognizer({ modelConfig: { whisper, tokens, numThreads: 1 } });
const result = { versions: { "sherpa-onnx-node": sherpa.version }, load_s: seconds(start), clips: [], seconds: [] };
for (const clip of job.clips) {
  const wave = sherpa.readWave(clip);
  start = performance.now();
  const stream = recognizer.createStream();
  stream.acceptWaveform(wave);
  recognizer.decode(stream);
  result.clips.push({ text: recognizer.getResult(stream).text });
  result.seconds.push(seconds(start));
}
result.peak_mib = peakMib();
writeFileSync(job.result + ".part", JSON.stringify(result));
renameSync(job.result + ".part", job.result);
