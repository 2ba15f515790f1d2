// Run transformers.js in a page of a browser, to which a server on this machine gives the page and all files.

import { execFileSync, spawn } from "node:child_process";
import { randomUUID } from "node:crypto";
import { once } from "node:events";
import { readFileSync } from "node:fs";
import { createServer } from "node:http";
import { dirname, extname, join } from "node:path";
import { json } from "node:stream/consumers";
import { fileURLToPath } from "node:url";

const CODE = dirname(fileURLToPath(import.meta.url));
const TYPES = { ".js": "text/javascript", ".mjs": "text/javascript", ".wasm": "application/wasm" };
const PAGE = `<script type="module">
  const readFile = async (path) => new Uint8Array(await (await fetch(path)).arrayBuffer());
  let result;
  try {
    const { recognize } = await import("./code/recognizer.mjs");
    const transformers = await import("./packages/@huggingface/transformers/dist/transformers.min.js");
    const { env } = transformers;
    const folder = new URL(".", location).pathname;
    Object.assign(env, { allowLocalModels: true, allowRemoteModels: false, useBrowserCache: false, localModelPath: folder });
    Object.assign(env.backends.onnx.wasm, { numThreads: 1, wasmPaths: folder + "packages/onnxruntime-web/dist/" });
    result = await recognize(transformers, await (await fetch("job")).json(), readFile, { device: "wasm" });
  } catch (error) {
    result = { error: error.message ?? String(error) };
  }
  await fetch("result", { method: "POST", body: JSON.stringify(result) });
</script>`;

// Return the result of a job. The environment variable WHISPERPORT_BROWSER names the browser.
export async function recognizeInBrowser(job, folder, packages) {
  const browser = process.env.WHISPERPORT_BROWSER;
  const folders = { code: CODE, packages: join(packages, "node_modules"), model: job.model };
  const clips = job.clips.map((_, i) => `clip/${i}`);

  function contents(kind, name) {
    if (!kind) return [PAGE, "text/html"];
    if (kind === "job") return [JSON.stringify({ ...job, clips }), "application/json"];
    return [readFileSync(kind === "clip" ? job.clips[name] : join(folders[kind], name)), TYPES[extname(name)] ?? ""];
  }

  const secret = randomUUID(); // other programs on this machine could ask, too
  const server = createServer();
  let child;
  const result = await new Promise((resolve, reject) => {
    server.on("request", async (request, response) => {
      try {
        const [, key, kind, ...names] = new URL(request.url, "http://localhost").pathname.split("/").map(decodeURIComponent);
        if (key !== secret) throw new Error("not asked by the page");
        if (request.method === "POST") resolve(await json(request));
        const [body, type] = kind === "result" ? ["", "text/plain"] : contents(kind, names.join("/"));
        response.setHeader("content-type", type).end(body);
      } catch {
        response.writeHead(404).end();
      }
    });
    server.listen(0, "127.0.0.1", () => {
      const options = ["--headless=new", "--disable-gpu", "--no-first-run", `--user-data-dir=${join(folder, "profile")}`];
      if (process.getuid?.() === 0) options.push("--no-sandbox"); // of root, the browser starts in no other way
      options.push("--remote-debugging-pipe"); // it ends when this process does
      const page = `http://127.0.0.1:${server.address().port}/${secret}/`;
      child = spawn(browser, [...options, page], { stdio: ["ignore", "ignore", "ignore", "pipe", "pipe"] });
      child.on("error", reject);
      child.on("exit", (code) => reject(new Error(`${browser} ended with ${code}`)));
    });
  });
  child.kill();
  await once(child, "exit"); // then nothing writes to its profile
  server.close();
  if (result.error) throw new Error(result.error);
  const version = execFileSync(browser, ["--version"], { encoding: "utf8", stdio: ["ignore", "pipe", "ignore"] });
  result.versions.browser = version.match(/.*?\d[\d.]*/)?.[0] ?? version.trim();
  return result;
}
