"""Numbers that no option takes: a usage error each, from Python as from the command line."""

from collections.abc import Callable
from typing import Any

import pytest

from whisperport.apps.bench.transcribing import BenchOptions
from whisperport.apps.cli.watchdog import run_watched
from whisperport.errors import UsageError
from whisperport.program.profiling import ProfileOptions
from whisperport.runtime import DecodeOptions, Thresholds
from whisperport.speech.audio import VadOptions
from whisperport.targets import RunOptions
from whisperport.targets.vendors.hailo.model_script import ScriptOptions
from whisperport.transcription import TranscribeOptions
from whisperport.transcription.live.live_options import LiveOptions

# Numbers that no option takes: a usage error each, from Python as from the command line.

NUMBERS = [float("nan"), float("inf"), float("-inf"), 1e308, 2**63, -(2**63), -1e-9]
OPTIONS: list[tuple[Callable[..., Any], list[str]]] = [
    (RunOptions, ["threads"]),
    (ProfileOptions, ["threads", "repeat"]),
    (BenchOptions, ["repeat"]),
    (VadOptions, ["threshold", "min_speech_s", "min_silence_s", "pad_s", "max_silence_s"]),
    (LiveOptions, ["step_s", "pause_s"]),
    (Thresholds, ["compression_ratio_threshold", "no_speech_threshold"]),
    (TranscribeOptions, ["workers", "hallucination_silence_threshold"]),
    (ScriptOptions, ["optimization_level", "compression_level", "epochs"]),
    (
        DecodeOptions,
        [
            *("temperature", "max_tokens", "best_of", "beam_size", "patience", "length_penalty"),
            *("max_initial_timestamp", "repetition_penalty", "no_repeat_ngram_size"),
        ],
    ),
]


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize(
    ("options", "name"), [(options, name) for options, names in OPTIONS for name in names]
)
def test_an_option_of_python_takes_no_impossible_number(options, name, number):
    with pytest.raises(UsageError, match=f"`{name}` is"):
        options(**{name: number})


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("clip", [lambda n: (n,), lambda n: (0, n), lambda n: (0, 1, n)])
def test_a_clip_has_no_impossible_time(clip, number):
    with pytest.raises(UsageError, match="`clip_timestamps` are"):
        TranscribeOptions(clip_timestamps=clip(number))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1e308, -1])
def test_a_job_is_not_watched_for_an_impossible_time(number, tmp_path):
    with pytest.raises(UsageError, match="`stall_s` is"):
        run_watched(print, out=tmp_path / "out", stall_s=number)


TRANSCRIBE = ["transcribe", "no-such-file.wav"]
LOWER = ["lower", "no-such-file.pt2", "--target", "onnxruntime", "--out", "out.onnx"]
ON_THE_COMMAND_LINE = [
    *[
        [*TRANSCRIBE, option, number]
        for option in (
            *("--threads", "--temperature", "--beam-size", "--best-of", "--patience"),
            *("--length-penalty", "--max-tokens", "--max-initial-timestamp", "--workers"),
            *("--no-repeat-ngram-size", "--repetition-penalty", "--compression-ratio-threshold"),
            *(
                "--logprob-threshold",
                "--no-speech-threshold",
                "--max-line-width",
                "--max-line-count",
            ),
            "--max-words-per-line",
        )
        for number in ("nan", "inf", "-inf", "1e308", str(-(2**63)))
    ],
    *[
        [*TRANSCRIBE, "--clip-timestamps", clips]
        for clips in ("1e308,inf", "nan,1", "0,nan", "inf,inf", "-1,1", "0,inf", "1e308")
    ],
    *[[*TRANSCRIBE, option, str(2**63)] for option in ("--threads", "--beam-size")],
    *[[*LOWER, "--stall-after", number] for number in ("inf", "1e308", "0", "-1")],
    *[["bench", "--repeat", str(2**63)], ["inspect", ".", "--repeat", str(2**63)]],
    ["compile", ".", "--stall-after", "inf"],
]


@pytest.mark.parametrize("arguments", ON_THE_COMMAND_LINE, ids=" ".join)
def test_the_command_line_takes_no_impossible_number(run, arguments):
    ran = run(*arguments)

    assert ran.code in (1, 2)
    assert ran.out == ""
    errors = [line for line in ran.lines if line.startswith("error: ")]
    assert len(errors) == 1
    assert "unexpected error" not in errors[0]
    assert "no-such-file" not in errors[0]  # the number came first


# Run options are printed with the result, and kept in the suggested next command.

PROVIDER = "onnxruntime.provider=CPUExecutionProvider"


def test_a_verdict_says_how_the_programs_were_run(run, bundle):
    ran = run("verify", bundle, "--run-option", PROVIDER)

    assert ran.out.splitlines()[-1] == f"{bundle}: verified ({PROVIDER})"
    assert ran.lines[-1].endswith(f"--bundle {bundle} --run-option {PROVIDER}")


def test_the_next_transcription_is_run_the_same_way(run, bundle, wav):
    ran = run("transcribe", wav, "--bundle", bundle, "--run-option", PROVIDER, "--language", "en")

    assert ran.lines[-1] == (
        f"next: whisperport transcribe {wav} --bundle {bundle} --run-option {PROVIDER} --output-format srt"
    )
