"""Bundles for Hailo: placement of programs, emulation before they are compiled, and rejected input."""

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whisperport.build.export.export import export
from whisperport.build.export.export_options import ExportOptions
from whisperport.errors import BundleError, LoweringError, UsageError
from whisperport.program.bundle import Bundle
from whisperport.program.program_kind import UNCACHED_DECODER
from whisperport.program.window import WindowOptions
from whisperport.runtime import DecodeOptions, compression_ratio, load_engine
from whisperport.runtime.engine import uncached_decoder
from whisperport.targets import RunOptions, Target, get_target
from whisperport.targets.vendors.hailo.target import LowerOptions
from whisperport.transcription import TranscribeOptions, Transcriber
from whisperport.verification import Report, TextErrors, text_errors
from whisperport.verification.bundle_check import verify
from whisperport.verification.clips import clips_of, shipped_audio, shipped_clips
from whisperport.verification.reference import Reference

from ....embedded import default_bundle
from ....extent import core_or_all
from ....micro import whisper_dims

CLIPS = core_or_all({"clips": shipped_clips(1)}, {})
EMULATED = RunOptions(threads=1, options={"hailo8.emulate": "on"})
SMALL = whisper_dims(768, 12)


@pytest.fixture(scope="module")
def hybrid(exported: Callable[..., Bundle]) -> Bundle:
    """Export the embedded model as `whisperport export default --target hailo8 --uncached-decoder` does.

    `make test` verifies it with one clip: the decoder without a cache computes all tokens for each.
    """
    return exported("hailo8", "default", uncached_decoder=True, **CLIPS)


def test_the_encoder_goes_to_the_chip_and_the_cached_decoder_to_the_cpu(hybrid: Bundle) -> None:
    manifest = hybrid.manifest
    on_chip = {e.spec.name for e in manifest.programs if e.target == "hailo8"}

    assert on_chip == {"encoder", UNCACHED_DECODER}
    assert {e.target for e in manifest.programs if e.spec.name not in on_chip} == {"onnxruntime"}
    assert {manifest.status(name) for name in on_chip} == {"checked against vendor documentation"}
    assert manifest.status("step") == "run here"
    assert manifest.program("encoder").spec.inputs[0].shape == (1, 80, 1, 1000)


def test_the_window_is_the_one_known_to_compile_and_the_decoder_hears_it_padded(
    hybrid: Bundle,
) -> None:
    window = hybrid.manifest.window

    assert window is not None
    assert (window.positions, window.context_positions, window.padding) == (500, 1500, "silence")


def test_it_is_verified_and_says_that_onnx_stood_in(hybrid: Bundle) -> None:
    report = Report.from_json(hybrid.manifest.verification)

    assert hybrid.manifest.verified
    assert report.subject.endswith(", hailo8.emulate=on")
    assert {"encoder", "step", UNCACHED_DECODER} <= {check.program for check in report.checks}


def test_it_verifies_again_emulated(hybrid: Bundle) -> None:
    assert verify(hybrid.folder, run=EMULATED)


def test_a_wrong_decoder_without_a_cache_is_found(
    hybrid: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def swapped(pieces: Any, row: int) -> Any:
        return np.concatenate([piece[0, row] for piece in [*pieces[1:2], *pieces[:1], *pieces[2:]]])

    monkeypatch.setattr(uncached_decoder, "_row", swapped)

    report = verify(hybrid.folder, run=EMULATED)

    assert not report
    assert {check.program for check in report.checks if not check.passed} == {UNCACHED_DECODER}


def test_the_decoder_without_a_cache_has_a_reference_that_hears_no_padding(hybrid: Bundle) -> None:
    clips = Reference.from_arrays(hybrid.reference()).clips

    for clip in clips[:2]:
        assert clip.uncached_logits.shape == clip.logits.shape
        assert not np.allclose(clip.uncached_logits, clip.logits, atol=0.1)


def test_without_a_hef_and_without_the_option_it_says_how_to_compile(hybrid: Bundle) -> None:
    with pytest.raises(BundleError, match="`encoder` is not compiled for `hailo8` yet") as refused:
        load_engine(hybrid, RunOptions(threads=1))

    assert "whisperport compile" in refused.value.hint
    assert "hailo8.emulate=on" in refused.value.hint


def test_the_hybrid_understands_as_much_as_30_s_windows_and_never_loops(hybrid: Bundle) -> None:
    """The word error rates differ by at most one percentage point on all shipped audio files.

    `make test` has every second one, with noise, no speech and the long one among them.
    """
    files = core_or_all(shipped_audio()[::2], shipped_audio())
    options = TranscribeOptions(decode=DecodeOptions(language="en"), run=RunOptions(threads=1))
    chip = Transcriber(hybrid, EMULATED)
    whole = Transcriber(default_bundle(), RunOptions(threads=1, short_windows=False))
    hybrid_errors, cpu_errors = TextErrors(), TextErrors()
    for clip in clips_of(files):
        heard = chip.transcribe(clip.samples, replace(options, run=EMULATED))
        hybrid_errors += text_errors(heard.text, clip.text)
        cpu_errors += text_errors(whole.transcribe(clip.samples, options).text, clip.text)

        assert not heard.truncated, clip.name
        assert re.search(r"\b((?:\S+ ){3}\S+)( \1){2}", heard.text) is None, clip.name
        assert all(compression_ratio(s.text) <= 2.4 for s in heard.segments), clip.name
    assert hybrid_errors.length > core_or_all(200, 300)
    assert hybrid_errors.rate <= cpu_errors.rate + 0.01


# Errors before any work -----------------------------------------------------------------


@pytest.fixture
def write(micro_checkpoint: Any, tmp_path: Path) -> Callable[..., Bundle]:
    def write(target: str = "hailo8", checkpoint: Any = micro_checkpoint, **how: Any) -> Bundle:
        return export(checkpoint, target, tmp_path / "out", ExportOptions(clips=(), **how))

    return write


@pytest.mark.parametrize("target", ["hailo8", "hailo8l", "hailo10h"])
def test_too_large_a_checkpoint_is_refused_with_an_estimate(
    write: Any, micro_checkpoint: Any, tmp_path: Path, target: str
) -> None:
    with pytest.raises(LoweringError, match=f"too large for `{target}`") as refused:
        write(target, replace(micro_checkpoint, dims=SMALL))

    assert "87.0 million weights" in refused.value.why
    assert re.search(r"about \d\d contexts and \d\.\d hours", refused.value.why)
    assert "--no-preflight" in refused.value.hint
    assert list(tmp_path.iterdir()) == []


def test_base_is_not_too_large_at_any_window() -> None:
    base = replace(SMALL, n_audio_state=512, n_text_state=512, n_audio_head=8, n_text_head=8)
    base = replace(base, n_audio_layer=6, n_audio_ffn=2048)

    for name in ("hailo8", "hailo8l", "hailo10h"):
        target: Target = get_target(name)
        assert target.too_large(base) == ""
        assert target.too_large(replace(base, n_audio_layer=7)) != ""
    assert get_target("onnxruntime").too_large(SMALL) == ""


@pytest.mark.parametrize(
    ("target", "seconds", "warned"),
    [("hailo8", 10.0, False), ("hailo8", 20.0, True), ("onnxruntime", 20.0, False)],
)
def test_a_window_that_is_not_known_to_compile_is_warned_of(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    micro_checkpoint: Any,
    write: Any,
    target: str,
    seconds: float,
    warned: bool,
) -> None:
    class EnoughError(Exception):
        """The window was chosen."""

    def stop(*_: Any) -> None:
        raise EnoughError

    from whisperport.model.network import whisper

    monkeypatch.setattr(whisper, "build_model", stop)
    whole = replace(micro_checkpoint, dims=replace(micro_checkpoint.dims, n_audio_ctx=1500))
    with caplog.at_level(logging.WARNING), pytest.raises(EnoughError):
        write(target, whole, window=WindowOptions(seconds=seconds))

    assert any("not known to compile" in record.message for record in caplog.records) == warned


def test_a_decoder_without_a_cache_is_for_those_who_cannot_cache(write: Any) -> None:
    with pytest.raises(UsageError, match="`onnxruntime` does not run a decoder without KV cache"):
        write("onnxruntime", uncached_decoder=True)


def test_a_program_beyond_the_limits_is_not_lowered(
    micro_programs: tuple[Any, ...], tmp_path: Path
) -> None:
    step = next(program for program in micro_programs if program.name == "step")

    with pytest.raises(
        LoweringError, match="`hailo8` does not support the program `step`"
    ) as refused:
        get_target("hailo8").lower([step], tmp_path)

    assert "rejected nodes)" in refused.value.why
    assert "onnxruntime" in refused.value.hint
    assert list(tmp_path.iterdir()) == []


def test_more_rows_than_the_decoder_has_positions_are_refused(micro_checkpoint: Any) -> None:
    with pytest.raises(UsageError, match=r"`hailo8\.sequence-length` cannot be `25`"):
        get_target("hailo8").configured(LowerOptions(sequence_length=25)).uncached_form(
            micro_checkpoint.dims
        )
