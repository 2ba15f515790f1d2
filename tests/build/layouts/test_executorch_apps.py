"""The .pte files of ExecuTorch's apps: their methods compute what the model computes.

ExecuTorch's runtime runs them. react-native-executorch runs in phones only, and ExecuTorch's runner is C++.
"""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whisperport import judge
from whisperport.build.layouts import layout_of
from whisperport.build.layouts.convert import Converted, ConvertOptions, convert
from whisperport.build.layouts.layout import DecodingProfile
from whisperport.build.layouts.reading import Files
from whisperport.build.layouts.reference import reference_of
from whisperport.errors import LoweringError, MissingPackageError
from whisperport.verification.clips import Clip, shipped_audio, shipped_clips

pytest.importorskip("torch")
pytest.importorskip("executorch")
import torch
from tests.build.layouts.test_in_apps import random_checkpoint
from tests.extent import EVERYTHING, core_or_all
from tests.micro import whisper_dims
from torch import Tensor, nn

from whisperport.build.layouts.executorch_runner import client as runner_client
from whisperport.build.layouts.executorch_runner import folder as runner
from whisperport.build.layouts.executorch_runner import rules as runner_rules
from whisperport.build.layouts.react_native_executorch.folder import (
    DECODE,
    ENCODE,
    POSITIONS,
    SCHEMA,
    languages,
    model_schema,
    unsupported,
    write,
)
from whisperport.build.layouts.react_native_executorch.rules import READER, RULES
from whisperport.model.network.whisper import build_model
from whisperport.model.trace.program import trace
from whisperport.speech.audio import log_mel
from whisperport.speech.text.vocabulary import openai_generation
from whisperport.targets.cpu.xnnpack.lowering import lower_to_pte, read_delegation
from whisperport.targets.cpu.xnnpack.runtime import load_program, start_runtime
from whisperport.verification.tolerances import LOWERED

APP = "react-native-executorch"
SIZES = replace(whisper_dims(64, 2, 1), n_text_layer=2, n_vocab=51864)  # English-only
LONGEST = 480_000
TOKENS = (50257, 50362, 11, 1002, 50256, 3)
W8_DB = 25  # the least signal beside the noise of 8 bits: 30 dB was seen
# Tables are read, and the cache is written, by ExecuTorch's own kernels.
OUTSIDE = {"embedding", "unsqueeze_copy", "index_put", "copy_", "_to_dim_order_copy"}


@pytest.fixture(scope="module")
def checkpoint() -> Any:
    return random_checkpoint(SIZES)


@pytest.fixture(scope="module")
def converted(checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Converted:
    """The folder, whose text of one clip is nonsense: its weights are random."""
    folder = tmp_path_factory.mktemp("converted")
    (folder / "clips").mkdir()
    shutil.copy(shipped_audio()[0].path, folder / "clips")
    options = ConvertOptions(verify_with=folder / "clips", allow_unverified=True)
    return convert(checkpoint, APP, folder / "fp32", options)


@pytest.fixture(scope="module", params=core_or_all(["fp32"], ["fp32", "w8"]))
def written(
    request: pytest.FixtureRequest, checkpoint: Any, converted: Converted, tmp_path_factory: Any
) -> Path:
    if request.param == "fp32":
        return converted.path
    folder: Path = tmp_path_factory.mktemp("written") / "w8"
    folder.mkdir()
    write(checkpoint, "w8", folder)
    return folder


class Loaded:
    """The methods of a written file, called as the app calls them."""

    def __init__(self, folder: Path) -> None:
        self._program = load_program(start_runtime(1), folder / "model.pte")
        self._methods = {n: self._program.load_method(n) for n in self._program.method_names}
        self.schema = json.loads(self._methods[SCHEMA].execute([])[0])

    def encode(self, samples: Any) -> Tensor:
        output: Tensor = self._methods[ENCODE].execute([torch.from_numpy(samples)])[0].clone()
        return output

    def logits(self, audio: Tensor) -> Any:
        """Logits (S, V) after each of `TOKENS`."""
        rows = [
            self._methods[DECODE].execute([torch.tensor([[token]]), torch.tensor([i]), audio])[0]
            for i, token in enumerate(TOKENS)
        ]
        return torch.cat([row.clone() for row in rows], dim=1)[0].numpy()


def noise(n: int) -> Any:
    return (np.random.default_rng(n).normal(size=n) * 0.1).astype(np.float32)


def expected(checkpoint: Any, samples: Any) -> tuple[Any, Any]:
    """The keys and values (1, T, 2·L·d) of the audio, and the logits, in eager torch."""
    model, dims = build_model(checkpoint), checkpoint.dims
    mel = log_mel(samples, dims.n_mels, n_frames=dims.n_frames)
    cross_kv = model.cross_kv(model.encode(torch.from_numpy(mel)[None]))
    rows = [rows.reshape(-1) for side in zip(*cross_kv, strict=True) for rows in side]
    packed = torch.cat(rows).reshape(1, dims.n_audio_ctx, -1)
    return packed.numpy(), model.logits(torch.tensor(TOKENS), cross_kv).numpy()


def test_both_methods_compute_what_the_model_computes(written: Path, checkpoint: Any) -> None:
    # given waveforms from the shortest to the longest, one after the other: the cache is not emptied
    loaded = Loaded(written)
    for n in (201, LONGEST, 16_001):
        # when the app encodes one, and decodes tokens one by one from the first position on
        samples = noise(n)
        audio = loaded.encode(samples)
        logits = loaded.logits(audio)
        # then everything is the model's, up to rounding
        packed, right = expected(checkpoint, samples)
        if written.name == "fp32":
            limit = LOWERED["float32"].max_relative
            assert np.abs(audio.numpy() - packed).max() <= limit * np.abs(packed).max()
            assert np.abs(logits - right).max() <= limit * np.abs(right).max()
        else:
            assert 20 * np.log10(np.linalg.norm(right) / np.linalg.norm(logits - right)) >= W8_DB
            assert (logits != right).any()


def test_nothing_large_runs_outside_of_xnnpack(written: Path) -> None:
    delegation = read_delegation((written / "model.pte").read_bytes())[DECODE]
    names = {name.partition("::")[2].partition(".")[0] for name in delegation.undelegated}
    assert names <= OUTSIDE
    if written.name == "fp32":
        assert delegation.subgraphs == 1


def test_weights_of_8_bits_take_a_third_of_the_space(
    checkpoint: Any, tmp_path_factory: Any, written: Path
) -> None:
    n_bytes = 4 * sum(w.numel() for w in checkpoint.weights.values())
    table = checkpoint.weights["decoder.token_embedding.weight"].numel()
    size = (written / "model.pte").stat().st_size
    fourier = 4 * 402 * 400  # of the spectrogram
    # float32, and the table of embeddings once more in float16; or 8 bits, and positions in float32
    most = n_bytes + 2 * table if written.name == "fp32" else n_bytes / 3 + 2 * table
    assert size <= most + fourier + 200_000


def test_the_app_is_told_the_sizes_of_its_tensors(written: Path, checkpoint: Any) -> None:
    # given what the file says of its methods
    loaded = Loaded(written)
    assert loaded.schema == model_schema(checkpoint.dims)
    # then it is what they take, and the waveform has any length up to the window
    (length,) = loaded.schema[ENCODE]["inputs"][0]["shape"]
    assert length == {"kind": "range", "range": {"min": 201, "max": LONGEST, "step": 1}}
    for name in (ENCODE, DECODE):
        info = loaded._methods[name].metadata
        shapes = [list(info.input_tensor_meta(i).sizes()) for i in range(info.num_inputs())]
        stated = [
            [size.get("value", LONGEST) for size in t["shape"]]
            for t in loaded.schema[name]["inputs"]
        ]
        assert stated == shapes
    # and the tokenizer has a token for each logit
    stored = json.loads((written / "tokenizer.json").read_text(encoding="utf-8"))
    ids = {*stored["model"]["vocab"].values(), *(t["id"] for t in stored["added_tokens"])}
    assert ids == set(range(checkpoint.dims.n_vocab))


def test_no_rule_is_broken_by_a_written_folder(written: Path, checkpoint: Any) -> None:
    files = Files(written, checkpoint)
    assert READER.recognize(files)
    assert READER.precisions(files) == [written.name]
    assert [problem for rule in RULES for problem in rule.problems(files)] == []


def test_a_converted_checkpoint_is_verified_and_judged(
    converted: Converted, checkpoint: Any
) -> None:
    # the app's loop returns the checkpoint's tokens, up to its own limit
    assert converted
    (clip,) = converted.record.clips
    assert len(clip.expected.tokens) == POSITIONS - 2
    # and a judgement, which runs the app once more, finds no rule that is broken
    if EVERYTHING:
        assert judge(converted.path, checkpoint, app=APP).problems == ()


def test_a_short_window_and_a_short_context_are_rejected(tmp_path: Path, checkpoint: Any) -> None:
    short = random_checkpoint(replace(SIZES, n_audio_ctx=100))
    with pytest.raises(LoweringError, match="its window is 2 s; the app encodes up to 29 s in one"):
        convert(short, APP, tmp_path / "out", ConvertOptions(allow_unverified=True))
    short = replace(checkpoint, dims=replace(checkpoint.dims, n_text_ctx=64))
    assert "its decoder has 64 positions; the app decodes up to 128" in unsupported(short, "fp32")


def test_without_executorch_nothing_is_done(
    tmp_path: Path, checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "executorch.exir", None)
    for precision in ("fp32", "w8"):
        with pytest.raises(MissingPackageError, match="ExecuTorch is not installed"):
            write(checkpoint, precision, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_one_language_of_a_multilingual_model_is_listed_twice(checkpoint: Any) -> None:
    # English alone would tell the app that the prompt has no language
    all_of_them = openai_generation(51865)
    one = replace(all_of_them, languages={"en": 50259})
    assert languages(checkpoint) == ["en"]
    assert languages(replace(checkpoint, generation=one)) == ["en", "en"]
    assert languages(replace(checkpoint, generation=all_of_them))[:2] == ["en", "zh"]


def test_a_long_clip_is_decoded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    # given two clips as one, and an app that decodes as many samples at a time as the first has
    checkpoint = pytest.importorskip("whisperport.model.checkpoint").load_checkpoint("default")
    first, second = shipped_clips(2)
    profile = DecodingProfile(padding="audio", timestamps=False, windows=False)
    pieces = replace(profile, piece_s=len(first.samples) / 16_000)
    joined = Clip(
        "both.wav", "", np.concatenate([first.samples, second.samples[: len(first.samples)]])
    )
    # when the checkpoint decodes as the app does
    (both,) = reference_of(checkpoint, pieces, [joined])
    a, b = reference_of(checkpoint, profile, [first, second])
    # then the result is that of each piece
    assert both.tokens == a.tokens + b.tokens
    assert both.text == a.text + b.text
    assert both.segments[-1].start_s >= len(first.samples) / 16_000


class Waveform(nn.Module):
    def forward(self, samples: Tensor) -> Tensor:
        return samples.reshape(1, 10, -1) * 2


class Projecting(nn.Module):
    """A decoder that projects the audio again for each token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.key, self.head = nn.Linear(width, width), nn.Linear(width, 50)

    def forward(self, token: Tensor, position: Tensor, audio: Tensor) -> Tensor:
        keys = self.key(audio).softmax(-1)
        return self.head(keys[:, :1]) + token.float()[:, :, None] + position.float().sum()


def others(folder: Path, *, width: int = 8, token: Any = None, schema: str | None = None) -> Files:
    """A folder with a model of another exporter, and a tokenizer of 60 tokens."""
    token = torch.zeros(1, 1, dtype=torch.int64) if token is None else token
    inputs = (token, torch.zeros(1, dtype=torch.int64), torch.zeros(1, 10, width))
    programs = {
        ENCODE: trace(ENCODE, Waveform(), (torch.zeros(80),)),
        DECODE: trace(DECODE, Projecting(width), inputs),
    }
    lower_to_pte(programs, folder / "whisper.pte", None if schema is None else {SCHEMA: schema})
    tokens = {str(i): i for i in range(60)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}}))
    return Files(folder)


def broken(files: Files) -> dict[str, str]:
    """Rule -> what it says."""
    problems = [problem for rule in RULES for problem in rule.problems(files)]
    return {problem.code: problem.reason for problem in problems}


def test_what_the_app_refuses_or_does_slowly_is_named(tmp_path: Path) -> None:
    # given a file of one fixed length of audio, whose decoder projects all positions for each token
    files = others(tmp_path)
    # then each is named
    assert READER.recognize(files)
    assert broken(files) == {
        "WP782": f"there is no method {SCHEMA}",
        "WP783": "60 tokens; whisper.pte returns 50 logits",
        "WP784": "1 linear layers of decode read all 10 positions",
    }


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ("no JSON", f"{SCHEMA} returns no JSON with the inputs of encode"),
        ("[" * 10**5, f"{SCHEMA} returns no JSON with the inputs of encode"),
        (
            '{"encode": {"inputs": [{"shape": [{"kind": "constant", "value": 80}]}]}}',
            f"{SCHEMA} states a waveform of constant length",
        ),
    ],
)
def test_a_wrong_schema_is_named(schema: str, reason: str, tmp_path: Path) -> None:
    assert broken(others(tmp_path, schema=schema))["WP782"] == reason


def test_other_inputs_are_named(tmp_path: Path) -> None:
    # given tokens of another type, and features of another width than those that encode returns
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    reason = broken(others(tmp_path / "a", token=torch.zeros(1, 1)))["WP781"]
    assert "decode: its inputs are float32 of 2 axes, int64 of 1 axes" in reason
    reason = broken(others(tmp_path / "b", width=16))["WP781"]
    assert reason == "decode reads [1, 1], [1], [1, 10, 16]; the app gives [1, 1], [1], [1, 10, 8]"


def test_the_layout_is_found_by_its_methods(tmp_path: Path) -> None:
    lower_to_pte({"forward": trace("forward", Waveform(), (torch.zeros(80),))}, tmp_path / "a.pte")
    assert not READER.recognize(Files(tmp_path))
    assert layout_of(APP).reader is READER


def multilingual() -> Any:
    """A checkpoint that ExecuTorch's own runner can run: its texts begin with 50258."""
    return random_checkpoint(replace(SIZES, n_text_layer=1, n_vocab=51865))


@pytest.fixture(scope="module")
def for_runner(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Converted]:
    """A checkpoint and its folder for ExecuTorch's own runner, verified with one clip."""
    folder, checkpoint = tmp_path_factory.mktemp("runner"), multilingual()
    (folder / "clips").mkdir()
    shutil.copy(shipped_audio()[0].path, folder / "clips")
    options = ConvertOptions(verify_with=folder / "clips", allow_unverified=True)
    return checkpoint, convert(checkpoint, "executorch-runner", folder / "out", options)


def test_the_runners_methods_compute_what_the_model_computes(
    for_runner: tuple[Any, Converted],
) -> None:
    # given features of the app's preprocessor, and what `encoder` returns for them
    checkpoint, converted = for_runner
    program = load_program(start_runtime(1), converted.path / runner.MODEL)
    methods = {name: program.load_method(name) for name in program.method_names}
    for n in (LONGEST, 16_001):
        samples, dims = noise(n), checkpoint.dims
        mel = torch.from_numpy(log_mel(samples, dims.n_mels, n_frames=dims.n_frames))[None]
        audio = methods[runner.ENCODE].execute([mel])[0].clone()
        # when tokens are given one by one, in the order of inputs that the app has
        rows = [
            methods[runner.DECODE]
            .execute([torch.tensor([[t]]), audio, torch.tensor([i])])[0]
            .clone()
            for i, t in enumerate(TOKENS)
        ]
        # then everything is the model's, up to rounding
        packed, right = expected(checkpoint, samples)
        logits, limit = torch.cat(rows, dim=1)[0].numpy(), LOWERED["float32"].max_relative
        assert np.abs(audio.numpy() - packed).max() <= limit * np.abs(packed).max()
        assert np.abs(logits - right).max() <= limit * np.abs(right).max()
    assert methods[runner.END].execute([]) == [checkpoint.generation.end_of_text]


def test_a_checkpoint_for_the_runner_is_verified_and_breaks_no_rule(
    for_runner: tuple[Any, Converted],
) -> None:
    # given a random checkpoint, whose text of one clip is nonsense
    checkpoint, converted = for_runner
    # then the app's loop returns the checkpoint's tokens after the start token alone, up to its own limit
    assert converted
    (clip,) = converted.record.clips
    assert len(clip.expected.tokens) == runner.MOST_TOKENS
    # and no rule is broken
    files = Files(converted.path, checkpoint)
    assert runner_rules.READER.recognize(files)
    assert not READER.recognize(files)
    assert [problem for rule in runner_rules.RULES for problem in rule.problems(files)] == []


def test_what_the_runner_cannot_run_is_rejected(checkpoint: Any) -> None:
    # its start token is fixed, and so are its window and the number of tokens
    reason = "its text begins with the id 50257; the app begins each text with 50258"
    assert runner.unsupported(checkpoint, "fp32") == reason
    right = multilingual()
    short = replace(right, dims=replace(right.dims, n_audio_ctx=100))
    assert runner.unsupported(short, "fp32") == "its window is 2 s; the app gives 30 s"
    short = replace(right, dims=replace(right.dims, n_text_ctx=64))
    assert "its decoder has 64 positions; the app decodes 128" in runner.unsupported(short, "fp32")
    assert runner.unsupported(right, "fp32") == ""
    # and the app's loop, which runs without whisperport, has the same numbers
    assert (runner_client.START, runner_client.MAX_NEW_TOKENS) == (runner.START, runner.MOST_TOKENS)


class ForRunner(Projecting):
    def forward(self, token: Tensor, audio: Tensor, position: Tensor) -> Tensor:
        return super().forward(token, position, audio)


class Doubled(nn.Module):
    def forward(self, mel: Tensor) -> Tensor:
        return mel * 2


@pytest.mark.parametrize(
    ("plant", "code", "reason"),
    [
        ("int32 token", "WP786", "text_decoder: its inputs are int32 of 2 axes, float32 of 3 axes"),
        (
            "flat features",
            "WP786",
            "encoder: its inputs are float32 of 2 axes; not float32 of 3 axes",
        ),
        (
            "two positions",
            "WP786",
            "text_decoder reads [1, 1], [1, 10, 8], [2]; the app gives [1, 1], [1, 10, 8], [1]",
        ),
        (
            "no end",
            "WP787",
            "there is no method get_eos_ids, and no eos_token in tokenizer_config.json",
        ),
    ],
)
def test_what_the_runner_cannot_load_is_named(
    plant: str, code: str, reason: str, tmp_path: Path
) -> None:
    # given the methods of another exporter, whose decoder projects all positions for each token
    token = torch.zeros(1, 1, dtype=torch.int32 if plant == "int32 token" else torch.int64)
    position = torch.zeros(2 if plant == "two positions" else 1, dtype=torch.int64)
    mel = torch.zeros(10, 8) if plant == "flat features" else torch.zeros(1, 10, 8)
    inputs = (token, torch.zeros(1, 10, 8), position)
    programs = {
        runner.ENCODE: trace(runner.ENCODE, Doubled(), (mel,)),
        runner.DECODE: trace(runner.DECODE, ForRunner(8), inputs),
    }
    # when the file or its tokenizer has one fault
    lower_to_pte(programs, tmp_path / "model.pte", {} if plant == "no end" else {runner.END: 1})
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {}}}))
    files = Files(tmp_path)
    problems = [p for rule in runner_rules.RULES for p in rule.problems(files)]
    # then it is named, and beside it only what is slow
    assert {p.code for p in problems} <= {code, "WP784", "WP783"}
    assert reason in next(p.reason for p in problems if p.code == code)
    # and a tokenizer that states the end of a text is enough
    if plant == "no end":
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
        files = Files(tmp_path)
        assert code not in {p.code for rule in runner_rules.RULES for p in rule.problems(files)}


def test_features_of_bfloat16_are_right_for_the_runner(tmp_path: Path) -> None:
    # given methods that read and return bfloat16, to which the app converts its features
    half = torch.bfloat16
    inputs = (
        torch.zeros(1, 1, dtype=torch.int64),
        torch.zeros(1, 10, 8, dtype=half),
        torch.zeros(1, dtype=torch.int64),
    )
    mel = torch.zeros(1, 10, 8, dtype=half)
    programs = {
        runner.ENCODE: trace(runner.ENCODE, Doubled(), (mel,)),
        runner.DECODE: trace(runner.DECODE, ForRunner(8).to(half), inputs),
    }
    lower_to_pte(programs, tmp_path / "model.pte", {runner.END: 1})
    # then no method is called wrong
    assert [*runner_rules.signatures.problems(Files(tmp_path))] == []
