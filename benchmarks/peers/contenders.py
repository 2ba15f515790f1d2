"""What is compared: name, engine, mode, and the format that its model is converted to."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from whisperport.apps.bench.transcribing import default_audio
from whisperport.speech.audio import SAMPLE_RATE, load_audio
from whisperport.verification.clips import shipped_audio

from ..speed.chunks import GAPS, made

# What is compared: name, engine, mode, and the format that its model is converted to.

OURS = "whisperport"
FORCED, COMMAND = "forced", "command"  # kinds of cases: random weights
AUDIO, LONG, FILES = "audio", "long", "files"  # and the embedded model
START = "start-up"
COARSE = "+coarse"  # after a target: with `coarse_projection`
ENCODER = "+openvino-encoder"  # after that: encoder and cross_kv on OpenVINO
IN_BF16 = "-bf16"  # after that: these two in bfloat16
ALL_BF16 = "+bf16"  # after a target: all programs in bfloat16
IN_W8 = "+w8"  # after a target: all programs with weights of 8 bits
AUTO = "auto"  # the mix that `--target auto` chooses on this machine


@dataclass(frozen=True, slots=True)
class Contender:
    """One way of transcribing."""

    name: str
    engine: str  # class in engines.py
    mode: str = ""
    format: str = ""  # of `convert.py`; "": one that `models.py` writes
    kinds: tuple[str, ...] = (
        FORCED,
        COMMAND,
        AUDIO,
        LONG,
        FILES,
        START,
    )  # kinds of cases that it is measured on
    why_not: str = ""  # why it is not measured on the other kinds

    @property
    def is_ours(self) -> bool:
        return self.engine == "Whisperport"

    @property
    def target(self) -> str:
        """The target of one of ours with what is added to it, also the name of its bundle."""
        return self.mode.split()[0]


NOT_FOR_ONE = "for one window, the same as without"
CONTENDERS = (
    Contender(OURS, "Whisperport", "onnxruntime"),
    Contender("whisperport --no-batch", "Whisperport", "onnxruntime single", kinds=(FILES,)),
    Contender("whisperport, 2 workers", "Whisperport", "onnxruntime workers", kinds=(FILES,)),
    Contender(
        "whisperport, 8-bit, 2 workers",
        "Whisperport",
        f"onnxruntime{COARSE} workers",
        kinds=(FILES,),
    ),
    Contender("whisperport --vad", "Whisperport", "onnxruntime vad", kinds=(AUDIO, LONG)),
    Contender("whisperport --vad --pack", "Whisperport", "onnxruntime vad pack", kinds=(LONG,)),
    Contender(
        "whisperport --vad --no-batch",
        "Whisperport",
        "onnxruntime vad single",
        kinds=(LONG,),
    ),
    Contender(
        "whisperport --vad, 2 workers",
        "Whisperport",
        "onnxruntime vad workers",
        kinds=(LONG,),
    ),
    Contender("whisperport, 8-bit logits", "Whisperport", f"onnxruntime{COARSE}"),
    Contender("whisperport, 8-bit logits, spin", "Whisperport", f"onnxruntime{COARSE} spin"),
    Contender(
        "whisperport, mixed, spin",
        "Whisperport",
        f"onnxruntime{COARSE}{ENCODER} spin",
    ),
    Contender(
        "whisperport, bf16 encoder, spin",
        "Whisperport",
        f"onnxruntime{COARSE}{ENCODER}{IN_BF16} spin",
    ),
    Contender(
        "whisperport, bf16 encoder",
        "Whisperport",
        f"onnxruntime{COARSE}{ENCODER}{IN_BF16}",
    ),
    Contender(
        "whisperport, 8-bit logits --vad",
        "Whisperport",
        f"onnxruntime{COARSE} vad",
        kinds=(LONG,),
    ),
    Contender(
        "whisperport, 8-bit --vad --pack",
        "Whisperport",
        f"onnxruntime{COARSE} vad pack",
        kinds=(LONG,),
    ),
    Contender(
        "whisperport, 8-bit --pack, text",
        "Whisperport",
        f"onnxruntime{COARSE} vad pack text",
        kinds=(LONG,),
    ),
    Contender(
        "whisperport, bf16 --vad --pack",
        "Whisperport",
        f"onnxruntime{COARSE}{ENCODER}{IN_BF16} vad pack",
        kinds=(LONG,),
    ),
    Contender("whisperport, auto", "Whisperport", AUTO),
    Contender("whisperport, auto --vad", "Whisperport", f"{AUTO} vad", kinds=(LONG,)),
    Contender(
        "whisperport, auto --vad --pack",
        "Whisperport",
        f"{AUTO} vad pack",
        kinds=(LONG,),
    ),
    Contender("whisperport, w8", "Whisperport", f"onnxruntime{IN_W8}"),
    Contender(
        "whisperport, bf16 encoder, w8",
        "Whisperport",
        f"onnxruntime{ENCODER}{IN_BF16}{IN_W8}",
    ),
    Contender("whisperport, short", "Whisperport", "onnxruntime short", kinds=(COMMAND,)),
    Contender(
        "whisperport, w8, short", "Whisperport", f"onnxruntime{IN_W8} short", kinds=(COMMAND,)
    ),
    Contender("whisperport, auto, short", "Whisperport", f"{AUTO} short", kinds=(COMMAND,)),
    Contender("whisperport, openvino", "Whisperport", "openvino"),
    Contender("whisperport, openvino bf16", "Whisperport", f"openvino{ALL_BF16}"),
    Contender("whisperport, openvino --vad", "Whisperport", "openvino vad", kinds=(LONG,)),
    Contender("faster-whisper fp32", "FasterWhisper", "float32", "ctranslate2"),
    Contender("faster-whisper int8", "FasterWhisper", "int8", "ctranslate2"),
    Contender(
        "faster-whisper fp32 batched",
        "FasterWhisper",
        "float32 batched",
        "ctranslate2",
        kinds=(AUDIO, LONG, FILES),
        why_not=NOT_FOR_ONE,
    ),
    Contender(
        "faster-whisper int8 batched",
        "FasterWhisper",
        "int8 batched",
        "ctranslate2",
        kinds=(AUDIO, LONG, FILES),
        why_not=NOT_FOR_ONE,
    ),
    Contender("openvino-genai fp32", "OpenvinoGenai", "fp32", "openvino-fp32"),
    Contender("openvino-genai, defaults", "OpenvinoGenai", "fp32 own", "openvino-fp32"),
    Contender("openvino-genai int8", "OpenvinoGenai", "int8", "openvino-int8"),
    Contender("openvino-genai int8, defaults", "OpenvinoGenai", "int8 own", "openvino-int8"),
    Contender("faster-whisper bf16", "FasterWhisper", "bfloat16", "ctranslate2"),
    Contender("whisper.cpp f16", "WhisperCpp", "f16", "ggml-f16"),
    Contender(
        "sherpa-onnx fp32",
        "SherpaOnnx",
        "",
        "sherpa-onnx",
        kinds=(FORCED, COMMAND, AUDIO, FILES, START),
        why_not="reads the first 30 s only",
    ),
    Contender("openai-whisper fp32", "OpenaiWhisper"),
    Contender("transformers fp32", "Transformers"),
)


# The audio that is transcribed, with its text; made from the shipped audio files.

WINDOW_S = 30
LONGEST_FILE_S = 12.0
COMMAND_S = 3.0
COMMANDS = {2: 10, 3: 12, 4: 15, 9: 30}  # seconds -> tokens of so much speech
PAUSES = GAPS["pauses of 0.3 to 2 s"]


@dataclass(frozen=True, slots=True)
class Case:
    """Audio to transcribe."""

    name: str
    kind: str  # see `contenders`
    audio: Path  # a file of one or several arrays
    audio_s: float
    texts: tuple[str, ...] = ()  # the correct text of each array; empty: not compared
    tokens: int | None = None  # tokens that are decoded whatever the model finds


def forced(folder: Path, tokens: int) -> list[Case]:
    """Short speech and one window, whose number of tokens is fixed, for random weights."""
    audio, _ = made(WINDOW_S, PAUSES)
    cases = [(f"{s} s", COMMAND, s, count) for s, count in COMMANDS.items()]
    cases += [("one window", FORCED, WINDOW_S, tokens)]
    return [
        _case(f"{name}, {count} tokens", kind, folder, [audio[: s * SAMPLE_RATE]], (), count)
        for name, kind, s, count in cases
    ]


def transcribed(folder: Path, minutes: float, n_files: int) -> list[Case]:
    """The cases of the embedded model, from short to long: a process keeps memory of earlier ones."""
    window, text = made(WINDOW_S - 5, PAUSES)  # the last sentence ends before 30 s
    assert window.size < WINDOW_S * SAMPLE_RATE
    long = next(file for file in shipped_audio() if file.path == default_audio())
    clips = [f for f in shipped_audio() if f.text and f.seconds <= LONGEST_FILE_S]
    chosen = [clips[number % len(clips)] for number in range(n_files)]
    files = [load_audio(file.path) for file in chosen]
    texts = tuple(file.text for file in chosen)
    talk, spoken = made(60 * minutes, PAUSES)
    command = min(clips, key=lambda clip: abs(clip.seconds - COMMAND_S))
    return [
        _case("a command of 3 s", AUDIO, folder, [load_audio(command.path)], (command.text,)),
        _case("one window", AUDIO, folder, [window], (text,)),
        _case(f"{long.seconds:.0f} s", LONG, folder, [load_audio(long.path)], (long.text,)),
        _case(f"{n_files} short files", FILES, folder, files, texts),
        _case(f"{minutes:g} minutes", LONG, folder, [talk], (spoken,)),
    ]


def _case(
    name: str,
    kind: str,
    folder: Path,
    audios: list[np.ndarray],
    texts: tuple[str, ...],
    tokens: int | None = None,
) -> Case:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name.replace(' ', '-').replace(',', '')}.npz"
    np.savez(path, *audios)
    seconds = sum(audio.size for audio in audios) / SAMPLE_RATE
    return Case(name, kind, path, seconds, texts, tokens)
