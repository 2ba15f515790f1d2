"""Do what react-native-executorch does, with ExecuTorch's runtime and its tokenizer; see `run_client.py`.

The app runs in phones only. This is its loop once more, in Python: the method `transcribeWorklet` of
react-native-executorch 0.10.2 (npm), src/extensions/speech/tasks/whisperSpeechToText.ts.
"""

import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

MAX_SEQ_LEN = 128  # tokens of a text with its prompt
MIN_CHUNK_SIZE = 201  # samples
BUFFER_SIZE = 29 * 16_000  # samples that are decoded at a time


def versions() -> dict[str, str]:
    return {name: version(name) for name in ("executorch", "pytorch_tokenizers")}


def load(job: dict[str, Any]) -> Callable[[Any], dict[str, Any]]:
    import torch
    from executorch.extension.pybindings import portable_lib
    from executorch.runtime import Runtime
    from pytorch_tokenizers import CppHFTokenizer

    folder = Path(job["model"])
    portable_lib._unsafe_reset_threadpool(1)
    program = Runtime.get().load_program(folder / "model.pte")
    encode, decode = (program.load_method(name) for name in ("encode", "decode"))
    tokenizer: Any = CppHFTokenizer()
    tokenizer.load(str(folder / "tokenizer.json"))
    schema = json.loads(program.load_method("get_model_schema").execute([])[0])
    _check(schema, tokenizer.vocab_size())

    def id_of(token: str) -> int:
        (token_id,) = tokenizer.encode(token, 0, 0)
        return int(token_id)

    end = id_of("<|endoftext|>")
    names = [f"<|{job['language']}|>", "<|transcribe|>"]
    if json.loads((folder / "languages.json").read_text(encoding="utf-8")) == ["en"]:
        names = []
    prompt = [id_of(token) for token in ("<|startoftranscript|>", *names, "<|notimestamps|>")]

    def run(token: int, position: int, audio: Any) -> int:
        logits = decode.execute([torch.tensor([[token]]), torch.tensor([position]), audio])[0]
        return int(logits.argmax())

    def transcribe(samples: Any) -> dict[str, Any]:
        text, tokens = "", []
        for offset in range(0, len(samples), BUFFER_SIZE):
            chunk = samples[offset : offset + BUFFER_SIZE]
            if len(chunk) < MIN_CHUNK_SIZE:
                break
            # Copied, as the app does: here, the methods of a program share their memory.
            audio = encode.execute([torch.from_numpy(chunk.copy())])[0].clone()
            following = end
            for position, token in enumerate(prompt):
                following = run(token, position, audio)
            generated: list[int] = []
            while len(generated) < MAX_SEQ_LEN - len(prompt) and following != end:
                generated.append(following)
                following = run(following, len(prompt) + len(generated) - 1, audio)
            text += tokenizer.decode_batch(generated, True) if generated else ""
            tokens += generated
        return {"text": text.strip(), "tokens": tokens}

    return transcribe


def _check(schema: dict[str, Any], n_tokens: int) -> None:
    """Reject what the app rejects when it loads a model: `validateSpec`, and the room for logits."""
    (waveform,), (packed,) = schema["encode"]["inputs"], schema["encode"]["outputs"]
    token, position, audio = schema["decode"]["inputs"]
    (logits,) = schema["decode"]["outputs"]
    (length,) = waveform["shape"]
    if length["kind"] == "constant":
        raise SystemExit("SCHEMA_MISMATCH: the waveform of encode has one length only")
    if packed != audio or [_sizes(token), _sizes(position)] != [[1, 1], [1]]:
        raise SystemExit("SCHEMA_MISMATCH: decode does not take what encode returns")
    if _sizes(logits) != [1, 1, n_tokens]:
        raise SystemExit(f"logits {_sizes(logits)}; the tokenizer has {n_tokens} tokens")


def _sizes(tensor: dict[str, Any]) -> list[int]:
    return [size["value"] for size in tensor["shape"]]
