// Run transformers.js on audio files: the counterpart of `run_client.py`, which describes the job and the result.
//
//     node client.mjs JOB.json FOLDER_OF_NODE_MODULES

import { readFileSync, renameSync, symlinkSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { dirname, join, resolve } from "node:path";
import { recognizeInBrowser } from "./browser.mjs";
import { recognize } from "./recognizer.mjs";

// The caller shows the last line.
process.on("uncaughtException", (error) => {
  console.error(error.message);
  process.exit(1);
});

// At the end of standard input, the process that asks has ended.
process.stdin.on("end", () => process.exit(1)).resume().unref();

function recognizeInNode(job, folder, packages) {
  const transformers = createRequire(packages + "/")("@huggingface/transformers");
  transformers.env.allowRemoteModels = false;
  // A path is no name of a model: some characters are refused in it.
  transformers.env.localModelPath = folder;
  symlinkSync(job.model, join(folder, "model"), "junction");
  const threads = { session_options: { intraOpNumThreads: 1, interOpNumThreads: 1 } };
  return recognize(transformers, job, (path) => readFileSync(resolve(folder, path)), threads);
}

function peakMib() {
  try {
    return Number(readFileSync("/proc/self/status", "utf8").match(/VmHWM:\s*(\d+)/)[1]) / 1024;
  } catch {
    return process.resourceUsage().maxRSS / 1024; // another system than Linux
  }
}

const [jobPath, packages] = process.argv.slice(2);
const job = JSON.parse(readFileSync(jobPath));
const run = job.device === "browser" ? recognizeInBrowser : recognizeInNode;
const result = await run(job, dirname(jobPath), packages);
result.peak_mib = peakMib();
writeFileSync(job.result + ".part", JSON.stringify(result));
renameSync(job.result + ".part", job.result);
