// What transformers.js returns for audio files, in Node and in a browser alike.

// Return the result that `run_client.py` describes.
//
// transformers: the package, which finds the layout under the name "model".
// readFile: returns the bytes of a clip, or of a file in "model/".
// options: of the pipeline.
export async function recognize({ pipeline, env }, job, readFile, options) {
  const generation = JSON.parse(new TextDecoder().decode(await readFile("model/generation_config.json")));
  let start = performance.now();
  // Without a dtype: config.json names that of the files.
  const transcribe = await pipeline("automatic-speech-recognition", "model", options);
  const result = { versions: { "@huggingface/transformers": env.version }, load_s: seconds(start), clips: [], seconds: [] };

  // The pipeline returns no ids: they are taken where it decodes them.
  let sequence;
  const decode = transcribe.tokenizer._decode_asr.bind(transcribe.tokenizer);
  transcribe.tokenizer._decode_asr = (chunks, settings) => {
    sequence = chunks[0].tokens.map(Number);
    return decode(chunks, settings);
  };

  const prompt = generation.is_multilingual ? { language: job.language, task: "transcribe" } : {};
  for (const clip of job.clips) {
    const samples = samplesOf(await readFile(clip));
    start = performance.now();
    const { text } = await transcribe(samples, prompt);
    result.seconds.push(seconds(start));
    result.clips.push({ text, tokens: textTokens(sequence, generation) });
    if (job.words) {
      const { chunks } = await transcribe(samples, { ...prompt, return_timestamps: "word" });
      result.clips.at(-1).words = chunks.map((word) => [...word.timestamp, word.text]);
    }
  }
  return result;
}

// The samples of a WAV file of 16 bits.
function samplesOf(file) {
  const start = new TextDecoder("latin1").decode(file.subarray(0, 200)).indexOf("data") + 8;
  const view = new DataView(file.buffer, file.byteOffset + start, file.length - start);
  const samples = new Float32Array(view.byteLength >> 1);
  for (let i = 0; i < samples.length; i++) samples[i] = view.getInt16(2 * i, true) / 32768;
  return samples;
}

function seconds(start) {
  return (performance.now() - start) / 1000;
}

// The tokens after the prompt and before the end of text.
function textTokens(sequence, generation) {
  const tokens = sequence.slice(sequence.indexOf(generation.no_timestamps_token_id) + 1);
  const end = tokens.indexOf(generation.eos_token_id);
  return end < 0 ? tokens : tokens.slice(0, end);
}
