"""Inputs of every program, recorded while the embedded model transcribes the shipped audio files."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from whisperport.build.calibration.spectrograms import _opened
from whisperport.errors import AudioError
from whisperport.program.bundle import Bundle
from whisperport.program.runner import Runner
from whisperport.runtime import DecodeOptions, Decoder, decode_window, load_engine
from whisperport.speech.audio import load_audio, log_mel
from whisperport.targets import RunOptions
from whisperport.verification.clips import shipped_audio
from whisperport.verification.recording import BundleSession
from whisperport.verification.recording.inputs import CALLS

from ...embedded import default_bundle

ONE = RunOptions(threads=1)


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return Bundle.open(default_bundle())


@pytest.fixture(scope="module")
def mels(bundle) -> list[np.ndarray]:
    """Three windows of speech."""
    spoken = [one for one in shipped_audio() if one.text][:3]
    dims = bundle.manifest.dims
    return [log_mel(load_audio(one.path), dims.n_mels, n_frames=dims.n_frames) for one in spoken]


@pytest.fixture(scope="module")
def recorded(bundle, mels) -> dict[str, list[dict[str, np.ndarray]]]:
    """Program -> its samples, each a dict of the program's inputs by name."""
    session = BundleSession(bundle, ONE)

    def samples(name: str) -> Iterator[dict[str, np.ndarray]]:
        spec = bundle.manifest.program(name).spec
        names = [tensor.name for tensor in spec.inputs]
        for sample in session.inputs(spec, mels):
            yield dict(zip(names, sample, strict=True))

    return {entry.spec.name: list(samples(entry.spec.name)) for entry in bundle.manifest.programs}


def test_every_program_is_recorded_in_its_own_shapes(bundle, recorded):
    counts = {name: len(samples) for name, samples in recorded.items()}
    assert counts == {
        "encoder": 3,
        "cross_kv": 3,
        "prefill_4": 3,
        "prefill_64": 2,  # of the windows that have a text before them
        "step": 3 * CALLS,
        "align": 3,
        "step_8": 3 * CALLS,
    }
    for name, samples in recorded.items():
        for tensor in bundle.manifest.program(name).spec.inputs:
            for sample in samples:
                found = sample[tensor.name]
                assert (found.shape, str(found.dtype)) == (tensor.shape, tensor.dtype)


def test_a_step_is_recorded_with_the_cache_that_it_had(bundle, recorded, mels):
    decoder = Decoder(load_engine(bundle, ONE))
    for index, sample in enumerate(recorded["step"]):
        rows = decoder.cache.rows
        seen = sample["mask"][0, 0, :rows] == 0
        length = int(seen.sum())
        assert length > 0
        assert seen[:length].all()
        filled = np.abs(sample["self_k_0"]).sum(axis=(0, 1)) > 0
        assert filled[:length].all()  # what the step sees was computed
        if index % CALLS == 0:
            decoder.start_window(decoder.engine.encode(mels[index // CALLS]))
            audio = dict(decoder._cross_kv)
        assert all(np.array_equal(sample[name], array) for name, array in audio.items())
    lengths = [int((sample["mask"][0, 0] == 0).sum()) for sample in recorded["step"]]
    assert len(set(lengths[:CALLS])) == CALLS  # different steps of one window
    assert lengths[:CALLS] == sorted(lengths[:CALLS])


class _Everything(Runner):
    """Copies the inputs of every call."""

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner.spec)
        self.runner, self.calls = runner, []

    def _run(self, inputs):
        self.calls.append([array.copy() for array in inputs])
        names = [tensor.name for tensor in self.spec.inputs]
        return list(self.runner.run(dict(zip(names, inputs, strict=True))).values())


def test_a_sample_is_one_of_the_calls_of_its_window_and_no_later_state(bundle, recorded, mels):
    """The engine reuses its cache and its mask for the next token."""
    wrapped = {}

    def wrap_runner(runner: Runner) -> Runner:
        return wrapped.setdefault(runner.spec.name, _Everything(runner))

    engine = load_engine(bundle, ONE, wrap_runner)
    decode_window(Decoder(engine), engine.encode(mels[0]), DecodeOptions())

    for sample in recorded["step"][:CALLS]:
        arrays = list(sample.values())
        assert any(
            all(np.array_equal(a, b) for a, b in zip(arrays, call, strict=True))
            for call in wrapped["step"].calls
        )


def test_a_prompt_is_the_text_of_the_window_before(bundle, recorded):
    """The first embedding is that of the token that starts a previous text, at position 0."""
    token = bundle.manifest.generation.start_of_previous
    expected = bundle.embedding()[token].astype(np.float32) + bundle.positions()[0]
    for sample in recorded["prefill_64"]:
        assert np.allclose(sample["x"][0, 0], expected)
        assert np.abs(sample["x"][0, 5]).sum() > 0


def test_the_same_audio_gives_the_same_samples(bundle, recorded, mels):
    spec = bundle.manifest.program("step").spec
    again = list(BundleSession(bundle, ONE).inputs(spec, mels[:1]))
    first = [list(sample.values()) for sample in recorded["step"][:CALLS]]
    for one, other in zip(again, first, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    "header",
    [
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), ",  # TokenError or SyntaxError
        b"{'descr': '<f4', 'fortran_order': False, 'shape': ("
        + b"9" * 40
        + b",), }",  # OverflowError
    ],
)
def test_a_damaged_calibration_array_is_an_error(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "mels.npy"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)

    with pytest.raises(AudioError, match="cannot read the calibration array"):
        _opened(path)
