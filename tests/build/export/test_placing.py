"""Before an export: the target and mask of each program, and whether memory and disk space are enough."""

import shutil
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from whisperport.build.export.export_options import ExportOptions
from whisperport.build.export.masking import choose_masks, needed_mask
from whisperport.build.export.placing import Placed, PlacementRequest, place, place_programs
from whisperport.errors import UsageError, WhisperportError
from whisperport.model.network.score_spread import score_spread
from whisperport.model.network.whisper import Whisper
from whisperport.program.bundle import Bundle
from whisperport.program.masks import BOUNDED_MASK, MASKED
from whisperport.program.placement import Placement
from whisperport.program.spec import ProgramSpec, TensorSpec
from whisperport.runtime import DecodeOptions, Decoder, Engine, decode_window, load_engine
from whisperport.targets import RunOptions, get_target, preflight
from whisperport.targets.preflight import (
    Estimate,
    available_memory,
    check_fits,
    estimate_export,
    weight_bytes,
)
from whisperport.verification.reference import Reference, ReferenceClip, reference_mel

from ...embedded import default_bundle
from ...micro import DIMS, GENERATION, whisper_dims

# Which target, precision and options each program gets.

NAMES = ("encoder", "cross_kv", "prefill_4", "step", "align")
CPU, CHIP = "onnxruntime", "hailo8l"


def placed(target: str = CHIP, **asked: object) -> Placed:
    return place(PlacementRequest(target=target, **asked), NAMES)  # type: ignore[arg-type]


def test_every_program_goes_to_the_target() -> None:
    found = placed(CPU)

    assert found.placements == {name: Placement(CPU, "fp32", {}) for name in NAMES}
    assert list(found.targets) == [CPU]


def test_programs_that_a_target_does_not_run_go_to_its_fallback_target() -> None:
    found = placed()

    assert found.placements["encoder"] == Placement(CHIP, "w8a8", {})
    assert {found.placements[name].target for name in NAMES[1:]} == {CPU}


def test_a_program_placed_by_name_goes_there() -> None:
    found = placed(programs={"align": "xnnpack", "encoder": CPU})

    assert [found.placements[name].target for name in ("encoder", "align", "step")] == [
        CPU,
        "xnnpack",
        CPU,
    ]
    assert CHIP not in found.targets


def test_options_configure_each_target_by_name_the_fallback_target_included() -> None:
    found = placed(options={f"{CHIP}.sequence-length": "24", f"{CPU}.opset": "14"})

    assert found.placements["encoder"].options == {"sequence-length": "24"}
    assert found.placements["step"].options == {"opset": "14"}
    assert found.target_of("step").options.opset == 14  # type: ignore[attr-defined]
    assert found.target_of("encoder").options.sequence_length == 24  # type: ignore[attr-defined]


def test_a_precision_holds_for_the_target_and_not_for_its_fallback_target() -> None:
    found = placed(precision="w8a8")

    assert found.placements["encoder"].precision == "w8a8"
    assert found.placements["step"].precision == "fp32"


def test_a_precision_can_be_given_for_one_program() -> None:
    found = placed(CPU, precisions={"step": "fp32"})

    assert found.placements["step"].precision == "fp32"


def lengths(target: str, seconds: tuple[float, ...], **asked: Any) -> Placed:
    return place_programs(target, ExportOptions(windows=seconds, batch=1, **asked))


def test_programs_of_each_length_are_placed_as_the_longest_ones() -> None:
    placement = {"cross_kv": "xnnpack", "step": CPU}

    found = lengths("litert", (10, 30, 5), placement=placement, precisions={"encoder": "w8"})

    assert found.lengths == (250, 500)
    for length in found.lengths:
        assert found.placements[f"encoder_{length}"] == Placement("litert", "w8", {})
        assert found.placements[f"cross_kv_{length}"] == Placement("xnnpack", "fp32", {})
    assert lengths("litert", ()).lengths == ()


def test_a_target_that_reads_audio_of_any_length_gets_no_programs_of_each() -> None:
    mixed = lengths(CPU, (5,), placement={"encoder": "litert"})

    assert "encoder_250" in mixed.placements
    assert "cross_kv_250" not in mixed.placements
    with pytest.raises(UsageError, match="`--windows` is not needed for the target `onnxruntime`"):
        lengths(CPU, (5,))


@pytest.mark.parametrize("seconds", [0.5, 31.0, 5.001, float("nan")])
def test_a_length_that_no_window_can_have_is_refused(seconds: float) -> None:
    with pytest.raises(UsageError, match="a window cannot be"):
        lengths("xnnpack", (seconds,))


@pytest.mark.parametrize(
    ("asked", "words", "hint"),
    [
        ({"target": "toaster"}, "no target `toaster`", CPU),
        ({"programs": {"step": "toaster"}}, "no target `toaster`", CPU),
        ({"programs": {"stepp": CPU}}, "no program `stepp`", "programs are encoder, cross_kv"),
        ({"precision": "int4"}, "cannot run `encoder` in the precision `int4`", f"`{CHIP}`: w8a8"),
        ({"precisions": {"step": "bf16"}}, "cannot run `step` in the precision", f"`{CPU}`: fp32"),
        ({"precisions": {"stepp": "fp32"}}, "no program `stepp`", "programs are encoder"),
        ({"options": {"opset": "13"}}, "no option `opset` for this command", f"{CPU}.opset"),
        ({"options": {f"{CPU}.opsett": "13"}}, "no option `opsett`", f"{CPU}.opset"),
        ({"options": {f"{CPU}.opset": "12"}}, f"`{CPU}.opset` cannot be `12`", "13 to 20"),
        (
            {"options": {"xnnpack.opset": "13"}},
            "no option `xnnpack.opset` for this command",
            f"{CHIP}.sequence-length",
        ),
    ],
)
def test_what_is_unknown_or_out_of_range_is_rejected_with_what_is_valid(
    asked: dict[str, object], words: str, hint: str
) -> None:
    with pytest.raises(UsageError) as rejected:
        placed(**{"target": CHIP, **asked})  # type: ignore[arg-type]

    assert words in rejected.value.what
    assert hint in rejected.value.hint


def test_a_program_on_request_is_placed_only_if_it_is_named() -> None:
    def programs(**asked: object) -> list[str]:
        request = PlacementRequest(target=CPU, **asked)  # type: ignore[arg-type]
        return list(place(request, NAMES, ["projection"]).placements)

    assert programs() == list(NAMES)
    assert programs(programs={"projection": "xnnpack"}) == [*NAMES, "projection"]
    assert programs(precisions={"projection": "fp32"}) == [*NAMES, "projection"]
    with pytest.raises(UsageError) as caught:
        programs(programs={"projektion": "xnnpack"})
    assert "align, projection" in caught.value.hint


# Estimates of memory and disk space before long operations; the values of the machine are injected.

GB = 10**9
TINY, BASE, SMALL = whisper_dims(384, 4), whisper_dims(512, 6), whisper_dims(768, 12)


def test_weights_are_counted_as_torch_counts_them(micro):
    weights = {p.data_ptr(): p for p in micro.parameters()}

    assert weight_bytes(DIMS) == 4 * sum(p.numel() for p in weights.values())


@pytest.mark.parametrize(
    ("size", "target", "measured_gb"),
    [
        (TINY, "onnxruntime", 1.09),
        (BASE, "onnxruntime", 1.35),
        (SMALL, "onnxruntime", 2.53),
        (TINY, "xnnpack", 1.27),
        (BASE, "xnnpack", 1.69),
        (SMALL, "xnnpack", 3.61),
    ],
)
def test_the_estimate_is_near_what_was_measured(size, target, measured_gb):
    assert estimate_export(size, [target]).memory_bytes / GB == pytest.approx(measured_gb, rel=0.15)


def test_the_costliest_of_several_targets_counts():
    both = estimate_export(TINY, ["onnxruntime", "xnnpack"])

    assert both == estimate_export(TINY, ["xnnpack"])
    assert estimate_export(TINY, ["unheard of"]).memory_bytes >= both.memory_bytes


def machine(root: Path, available_kb: int = 8_000_000, **files: str) -> None:
    """A file system that says so; `sys__fs` stands for `sys/fs`."""
    contents = {"proc/meminfo": f"MemTotal: 99 kB\nMemAvailable:   {available_kb} kB\n"}
    contents |= {name.replace("__", "/"): text for name, text in files.items()}
    for name, text in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "ROOT", tmp_path)
    return tmp_path


def test_a_machine_that_says_nothing_is_taken_to_suffice(root, tmp_path):
    assert available_memory() is None
    check_fits(Estimate(memory_bytes=1e15, disk_bytes=0, seconds=0), tmp_path / "out")


def test_without_groups_the_machine_decides(root):
    machine(root)

    assert available_memory() == 8_000_000 * 1024


def test_the_tightest_group_above_us_decides(root):
    # given: a container of 2 GB inside a slice of 1 GB, of which 0.2 GB are pages of files
    group = "sys__fs__cgroup__slice__box"
    machine(root, proc__self__cgroup="0::/slice/box\n")
    for folder, limit, used in (
        (group, "2000000000", "10"),
        (group[:-5], "1000000000", "700000000"),
    ):
        path = root / folder.replace("__", "/")
        path.mkdir(parents=True, exist_ok=True)
        (path / "memory.max").write_text(limit)
        (path / "memory.current").write_text(used)
        (path / "memory.stat").write_text(
            "anon 5\ninactive_file 200000000\n" if used != "10" else ""
        )

    assert available_memory() == 500_000_000


def test_a_group_without_a_limit_does_not_count(root):
    machine(root, proc__self__cgroup="0::/\n")
    (root / "sys/fs/cgroup").mkdir(parents=True)
    (root / "sys/fs/cgroup/memory.max").write_text("max\n")
    (root / "sys/fs/cgroup/memory.current").write_text("5\n")

    assert available_memory() == 8_000_000 * 1024


def test_groups_of_version_1(root):
    machine(root, proc__self__cgroup="5:cpu:/x\n4:memory,hugetlb:/box\n")
    folder = root / "sys/fs/cgroup/memory/box"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text("3000000000")
    (folder / "memory.usage_in_bytes").write_text("1000000000")
    (folder / "memory.stat").write_text("total_inactive_file 250000000\n")

    assert available_memory() == 2_250_000_000


def test_too_little_memory_is_rejected_with_both_figures(root, tmp_path):
    machine(root, available_kb=1_000_000)

    with pytest.raises(WhisperportError, match="too little memory") as rejected:
        check_fits(estimate_export(BASE, ["xnnpack"]), tmp_path / "out")

    assert "1 GB are free" in rejected.value.why
    assert "estimated need, from measured exports: about 1.7 GB of memory" in rejected.value.why
    assert "--no-preflight" in rejected.value.hint


def test_too_small_a_disk_is_rejected_though_the_folder_is_not_made_yet(
    root, tmp_path, monkeypatch
):
    asked = []

    def usage(folder):
        asked.append(folder)
        return shutil._ntuple_diskusage(10**9, 10**9, 10**6)

    monkeypatch.setattr(shutil, "disk_usage", usage)

    with pytest.raises(WhisperportError, match="too little space on the disk") as rejected:
        check_fits(estimate_export(TINY, ["onnxruntime"]), tmp_path / "not" / "yet" / "there")

    # The disk may be that of the user's cache, where a verb without `--no-preflight` exports a model.
    assert str(tmp_path / "not" / "yet") in rejected.value.hint
    assert "`export` and `lower` skip this check" in rejected.value.hint

    assert asked == [tmp_path]


@pytest.mark.parametrize("preflight_on", [True, False])
def test_an_export_asks_first_unless_told_not_to(
    fake_targets, micro_checkpoint, quick_tracing, root, tmp_path, preflight_on
):
    from whisperport.build.export.export import export
    from whisperport.build.export.export_options import ExportOptions

    from ...conftest import noise_clips

    machine(root, available_kb=1000)
    out = tmp_path / "bundle"
    options = ExportOptions(clips=noise_clips()[:1], preflight=preflight_on, allow_unverified=True)

    if preflight_on:
        with pytest.raises(WhisperportError, match="too little memory"):
            export(micro_checkpoint, "fake", out, options)
        assert not out.exists()
    else:
        export(micro_checkpoint, "fake", out, options)
        assert (out / "manifest.json").exists()


# The mask of each exported program follows from its target, its precision and the model's scores.

TOKENS = (50, 51, 53, 57, 1, 2, 3, 4, 20, 30)
DECODING = ("cross_kv", "prefill_4", "step", "align")


def clip(model: Whisper, seed: int) -> ReferenceClip:
    """A reference clip of random features, with features or without."""
    features = np.random.default_rng(seed).standard_normal((DIMS.n_audio_ctx, DIMS.n_audio_state))
    none = np.empty((0, DIMS.n_vocab), np.float32)
    return ReferenceClip(
        "noise", "", np.zeros(0, np.int16), TOKENS[:4], TOKENS[4:], features.astype(np.float32), none, none
    )  # fmt: skip


@pytest.fixture(scope="module")
def loud(micro: Whisper) -> Whisper:
    """The micro model with self-attention scores 60 times as large."""
    model = deepcopy(micro)
    for block in model.decoder.blocks:
        block.attn.query.weight.mul_(60)
        block.attn.query.bias.mul_(60)
    return model


def engine_of(model: Whisper, eager_runners: Callable[..., Any], mask: float) -> Engine:
    tables = [
        t.numpy()
        for t in (model.decoder.token_embedding.weight, model.decoder.positional_embedding)
    ]
    runners = eager_runners(model, (4, 7), ((0, 1),))
    return Engine(DIMS, GENERATION, runners, *tables, masks=dict.fromkeys(runners, mask))


def logits(decoder: Decoder, features: np.ndarray) -> np.ndarray:
    """The logits of a prompt and of steps, after another text has left its rows in the cache."""
    decoder.start_window(features)
    decoder.prefill([*range(60, 70), *range(20)][: DIMS.n_text_ctx])
    decoder.start_window(features)
    rows = [*decoder.prefill(TOKENS[:7], second_index=2)]
    return np.stack([*rows, *(decoder.step(token) for token in TOKENS[7:])])


@pytest.mark.parametrize("scale", [1.0, 60.0])
def test_the_needed_mask_gives_the_logits_of_an_infinite_one(
    micro: Whisper, loud: Whisper, eager_runners: Callable[..., Any], scale: float
) -> None:
    model = micro if scale == 1 else loud
    reference = Reference((clip(model, 0), clip(model, 1)), 10)

    mask = needed_mask(model, reference)

    features = reference.clips[0].features
    expected = logits(Decoder(engine_of(model, eager_runners, MASKED)), features)
    found = logits(Decoder(engine_of(model, eager_runners, mask)), features)
    np.testing.assert_allclose(found, expected, atol=2e-5)
    assert (mask > BOUNDED_MASK) == (scale == 1)
    if scale > 1:  # here -64 is wrong, so the comparison above can fail
        weak = logits(Decoder(engine_of(model, eager_runners, BOUNDED_MASK)), features)
        assert np.abs(weak - expected).max() > 1e-2


def test_outliers_that_keep_the_function_keep_the_needed_mask(micro: Whisper) -> None:
    # given: three channels of the residual stream's norm 100 times as large, the weights after it smaller
    model = deepcopy(micro)
    for block in model.decoder.blocks:
        for norm, readers in (
            (block.attn_ln, (block.attn.query, block.attn.key, block.attn.value)),
            (block.mlp_ln, (block.mlp[0],)),
        ):
            norm.weight[:3] *= 100
            norm.bias[:3] *= 100
            for reader in readers:
                reader.weight[:, :3] /= 100
    reference = Reference((clip(model, 0),), 10)

    spreads = [
        score_spread(m.decoder, [(m.cross_kv(torch.from_numpy(reference.clips[0].features)[None]), TOKENS)])
        for m in (micro, model)
    ]  # fmt: skip
    assert spreads[1] == pytest.approx(spreads[0], rel=1e-4)
    assert needed_mask(model, reference) == needed_mask(micro, reference)


def test_the_spread_is_that_of_the_scores_written_out(micro: Whisper) -> None:
    block = micro.decoder.blocks[0]
    features = torch.randn(1, 10, 16, generator=torch.Generator().manual_seed(0))
    other = (9, 8, 7)

    # when: one text whose only layer is the first
    first = deepcopy(micro.decoder)
    first.blocks = first.blocks[:1]
    cross_kv = micro.cross_kv(features)[:1]
    found = score_spread(first, [(cross_kv, TOKENS), (cross_kv, other)])

    def rows(tokens: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        embedding = micro.decoder.token_embedding.weight[list(tokens)]
        x = embedding + micro.decoder.positional_embedding[: len(tokens)]
        normed = block.attn_ln(torch.cat([x, torch.zeros(1, 16)]))
        q, k = block.attn.query(normed), block.attn.key(normed)
        return q[: len(tokens)].reshape(-1, 2, 8), k.reshape(-1, 2, 8)

    texts = [rows(TOKENS), rows(other)]
    expected = 0.0
    for q, own in texts:
        for i in range(len(q)):
            for head in range(2):
                score = [float(q[i, head] @ k) / 8**0.5 for k in own[: i + 1, head]]
                hidden = [
                    float(q[i, head] @ k) / 8**0.5 for _, keys in texts for k in keys[:, head]
                ]
                expected = max(expected, max([0.0, *hidden]) - max(score))
    assert found == pytest.approx(expected, rel=1e-4)
    assert score_spread(first, []) == 0


def with_masks(**precisions: str) -> Placed:
    """Placements of the decode programs on a target with masks of its own."""
    target = deepcopy(get_target("onnxruntime"))
    target.spec = replace(
        target.spec, lowering=replace(target.spec.lowering, masks={"w8a8": -40.0})
    )
    return Placed(
        {name: Placement("onnxruntime", precisions.get(name, "fp32")) for name in DECODING},
        {"onnxruntime": target},
    )


def specs() -> list[ProgramSpec]:
    mask = (TensorSpec("mask", (1, 1, 25)),)
    return [ProgramSpec(name, () if name == "cross_kv" else mask, ()) for name in DECODING]


def test_each_program_gets_the_mask_of_its_precision(micro: Whisper) -> None:
    where = with_masks(prefill_4="w8a8", step="fp16", cross_kv="w8a8")

    masks = choose_masks(specs(), where, micro, Reference((clip(micro, 0),), 10))

    assert masks == {"cross_kv": MASKED, "prefill_4": -40.0, "step": -64.0, "align": MASKED}


def test_a_model_with_larger_scores_gets_a_lower_mask_and_a_warning(
    loud: Whisper, caplog: pytest.LogCaptureFixture
) -> None:
    reference = Reference((clip(loud, 0),), 10)

    masks = choose_masks(specs(), with_masks(step="fp16"), loud, reference)

    needed = needed_mask(loud, reference)
    assert MASKED < needed < BOUNDED_MASK
    assert masks == {"cross_kv": MASKED, "prefill_4": MASKED, "step": needed, "align": MASKED}
    assert f"a mask of {needed:g}" in caplog.text


def test_no_scores_are_measured_if_every_program_is_in_float32() -> None:
    model: Any = None  # would fail if it were used

    assert set(choose_masks(specs(), with_masks(), model, Reference((), 0)).values()) == {MASKED}


def test_the_embedded_model_decodes_the_same_logits_with_the_bounded_mask() -> None:
    """Measured: the logits are bit-identical from -32 on, and -24 changes them by 8e-5."""
    bundle, run = (
        Bundle.open(default_bundle(), check_hashes=False),
        RunOptions(threads=1, trust=True),
    )
    reference = Reference.from_arrays(bundle.reference())
    manifest = bundle.manifest
    bounded = replace(
        manifest,
        programs=tuple(
            replace(e, placement=replace(e.placement, mask=BOUNDED_MASK))
            if any(t.name == "mask" for t in e.spec.inputs)
            else e
            for e in manifest.programs
        ),
    )
    decoders = [Decoder(load_engine(b, run)) for b in (bundle, replace(bundle, manifest=bounded))]
    options = DecodeOptions(language="en", prompt=tuple(range(400, 520)))

    for one in reference.clips[:2]:
        features = decoders[0].engine.encode(reference_mel(manifest.dims, one))
        found = [decode_window(decoder, features, options) for decoder in decoders]
        last = [decoder.step(found[0].tokens[-1]) for decoder in decoders]

        assert len(found[0].tokens) > 5
        assert found[1].tokens == found[0].tokens
        np.testing.assert_array_equal(last[1], last[0])
