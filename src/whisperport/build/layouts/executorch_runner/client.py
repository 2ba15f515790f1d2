"""Do what ExecuTorch's runner of speech models does, with its runtime and tokenizer; see `run_client.py`.

The app is written in C++. This is its loop once more, in Python: `Seq2SeqRunner::transcribe` of
pytorch/executorch@cff6f4dd, extension/asr/runner/seq2seq_runner.cpp, with the settings of
examples/models/whisper/main.cpp. The preprocessor is ExecuTorch's own.
"""

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

START, MAX_NEW_TOKENS = 50258, 128


def versions() -> dict[str, str]:
    return {name: version(name) for name in ("executorch", "pytorch_tokenizers")}


def load(job: dict[str, Any]) -> Callable[[Any], dict[str, Any]]:
    import torch
    from executorch.extension.audio.mel_spectrogram import WhisperAudioProcessor
    from executorch.extension.pybindings import portable_lib
    from executorch.runtime import Runtime
    from pytorch_tokenizers import CppHFTokenizer

    folder = Path(job["model"])
    portable_lib._unsafe_reset_threadpool(1)
    program = Runtime.get().load_program(folder / "model.pte")
    encode, decode = (program.load_method(name) for name in ("encoder", "text_decoder"))
    tokenizer: Any = CppHFTokenizer()
    tokenizer.load(str(folder))  # with tokenizer_config.json, as the app does
    ends = {tokenizer.eos_tok()}
    if "get_eos_ids" in program.method_names:
        ends = set(program.load_method("get_eos_ids").execute([]))
    n_mels = encode.metadata.input_tensor_meta(0).sizes()[1]
    preprocessor = WhisperAudioProcessor(feature_size=n_mels, max_audio_len=300, stack_output=True)

    def transcribe(samples: Any) -> dict[str, Any]:
        with torch.no_grad():
            features = preprocessor(torch.from_numpy(samples.copy()))
        # Copied: here, the methods of a program share their memory.
        (audio,) = (output.clone() for output in encode.execute([features.contiguous()]))
        tokens = [START]
        while len(tokens) <= MAX_NEW_TOKENS:
            position = torch.tensor([len(tokens) - 1])
            (logits,) = decode.execute([torch.tensor([tokens[-1:]]), audio, position])
            tokens.append(int(logits.argmax()))
            if tokens[-1] in ends:
                break
        emitted = tokens[1:-1] if tokens[-1] in ends else tokens[1:]
        return {"text": tokenizer.decode_batch(emitted, True).strip(), "tokens": emitted}

    return transcribe
