"""`compile` of a lowered program in a file: what it reads, what it writes, and what it rejects.

The compiler is that of the dummy vendor, whose simulator rounds inputs and outputs to 8 bits.
"""

import hashlib
import json
import shutil
import wave
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from whisperport import targets
from whisperport.build.compile.compile import CompileOptions, compile
from whisperport.build.compile.compile_file import _worst, lowered_run
from whisperport.build.compile.compiled import Compiled
from whisperport.build.compile.lowered_file import read_lowered
from whisperport.errors import (
    AudioError,
    BundleError,
    MissingPackageError,
    ProgramError,
    UsageError,
    VerificationError,
    WhisperportError,
)
from whisperport.program.host_part import HostPart, Lookup
from whisperport.program.json_records import to_json
from whisperport.program.placement import Placement
from whisperport.program.spec import ProgramSpec, TensorSpec
from whisperport.speech.audio import load_audio, log_mel
from whisperport.system.progress import reporting
from whisperport.targets import get_target, preflight
from whisperport.verification import GATES
from whisperport.verification.clips import shipped_audio

from ...dummy_vendor.listed import HERE, WITH_DUMMY, interpreter
from ...wav import write_wav

# A third-party decoder of a few weights as an ONNX file, and samples of its inputs.

WIDTH, TOKENS, POSITIONS, PIECES = 8, 4, 6, 2


def onnx_file(
    path: Path, nodes: list[Any], inputs: dict[str, Any], outputs: dict[str, Any], **weights: Any
) -> Path:
    def values(named: dict[str, Any]) -> list[Any]:
        return [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in named.items()]

    random = np.random.default_rng(0)
    stored = [
        numpy_helper.from_array(random.standard_normal(shape).astype(np.float32), name)
        for name, shape in weights.items()
    ]
    graph = helper.make_graph(nodes, path.stem, values(inputs), values(outputs), stored)
    opset = helper.make_opsetid("", 17)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=9), path)
    return path


def decoder_file(path: Path) -> Path:
    """Write a decoder: embedded tokens and features in, the vocabulary's logits out in pieces."""
    pieces = {f"logits_{i}": (1, TOKENS, 5) for i in range(PIECES)}
    nodes = [
        helper.make_node("Transpose", ["features"], ["turned"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["embedded", "turned"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["weights"], axis=-1),
        helper.make_node("MatMul", ["weights", "features"], ["attended"]),
        *(
            helper.make_node("MatMul", ["attended", f"table_{i}"], [name])
            for i, name in enumerate(pieces)
        ),
    ]
    inputs = {"embedded": (1, TOKENS, WIDTH), "features": (1, POSITIONS, WIDTH)}
    return onnx_file(
        path, nodes, inputs, pieces, **{f"table_{i}": (WIDTH, 5) for i in range(PIECES)}
    )


def decoder_inputs(seed: int) -> dict[str, np.ndarray]:
    """Return random inputs of the decoder."""
    random = np.random.default_rng(seed)
    shapes = {"embedded": (1, TOKENS, WIDTH), "features": (1, POSITIONS, WIDTH)}
    return {n: random.standard_normal(s).astype(np.float32) for n, s in shapes.items()}


def write_calls(folder: Path) -> Path:
    """Write three samples of the decoder's inputs: two folders of arrays, and an .npz file."""
    for name in ("a", "b"):
        (folder / name).mkdir(parents=True)
        for tensor, array in decoder_inputs(ord(name)).items():
            np.save(folder / name / f"{tensor}.npy", array)
    np.savez(folder / "c.npz", **decoder_inputs(ord("c")))
    return folder


# `compile` of a lowered program in a file: what it reads, what it writes, and what it rejects.
#
# The compiler is that of the dummy vendor, whose simulator rounds inputs and outputs to 8 bits.

FRAMES = 200  # 2 s
MADE = {"decoder.dmy", "decoder.onnx", "decoder.json", "compiled.json"}
LOGS = {"quantize.log", "assemble.log", "simulate.log"}


@pytest.fixture(autouse=True)
def listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "TARGETS", WITH_DUMMY)


@pytest.fixture
def decoder(tmp_path: Path) -> Path:
    return decoder_file(tmp_path / "decoder.onnx")


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    """A third-party encoder of 80 mel bins."""
    nodes = [helper.make_node("Conv", ["mel", "w"], ["features"], strides=[2], pads=[1, 1])]
    outputs = {"features": (1, WIDTH, FRAMES // 2)}
    return onnx_file(
        tmp_path / "encoder.onnx", nodes, {"mel": (1, 80, FRAMES)}, outputs, w=(WIDTH, 80, 3)
    )


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    return write_calls(tmp_path / "calls")


@pytest.fixture
def compiled(tmp_path: Path) -> Callable[..., Compiled]:
    """Return `compiled(file, inputs, **options)`, which compiles for the dummy with its SDK."""

    def run(file: Path, inputs: Path | None, samples: int = 2, **more: Any) -> Compiled:
        given = {
            "target": "dummy1",
            "options": {"dummy1.samples": str(samples)} if samples else {},
            "toolchains": {"dummy": str(interpreter(tmp_path))},
            **more,
        }
        return compile(file, CompileOptions(inputs=inputs, threads=1, **given))

    return run


def test_a_decoder_is_compiled_simulated_and_compared_and_the_file_stays(
    compiled, decoder, calls, tmp_path
):
    before = decoder.read_bytes()

    made = compiled(decoder, calls)

    out = tmp_path / "decoder-dummy1"
    assert made.folder == out
    assert made.bundle is None
    found = {path.name for path in out.iterdir()}
    assert found == (MADE | LOGS)
    assert decoder.read_bytes() == before == (out / "decoder.onnx").read_bytes()
    (program,) = made.programs
    assert (program.samples, program.ran, program.compiler) == (2, "simulated", "2.1")
    assert [check.what.split(",")[0] for check in program.emulation] == ["logits_0", "logits_1"]
    assert all("worst of 3" in check.what for check in program.emulation)
    assert all(20 < check.value["sqnr_db"] < 100 for check in program.emulation)
    assert {check.rule for check in program.emulation} == {GATES["w8a8"].rule}
    written = json.loads((out / "compiled.json").read_text())
    assert written["status"] == "simulated here"
    assert written["inputs"] == ["a", "b", "c.npz"]
    assert written["made_from"] == {"decoder.onnx": hashlib.sha256(before).hexdigest()}
    kinds = {one["kind"]: one for one in written["program"]["evidence"]}
    assert set(kinds) == {"compiled", "simulated"}
    sha256 = hashlib.sha256((out / "decoder.dmy").read_bytes()).hexdigest()
    assert kinds["simulated"]["files"]["decoder.dmy"] == sha256
    assert len(kinds["simulated"]["checks"]) == 2


def test_an_existing_folder_is_not_replaced_and_finished_stages_are_kept(
    compiled, decoder, calls, tmp_path
):
    compiled(decoder, calls)
    (tmp_path / "decoder-dummy1" / "note.txt").write_text("mine")

    with pytest.raises(WhisperportError, match="exists already"):
        compiled(decoder, calls)

    assert (tmp_path / "decoder-dummy1" / "note.txt").read_text() == "mine"
    stages: list[str] = []
    options = CompileOptions(
        inputs=calls,
        target="dummy1",
        out=tmp_path / "again",
        work=tmp_path / "decoder-dummy1.compile",
        options={"dummy1.samples": "2"},
        toolchains={"dummy": str(interpreter(tmp_path))},
    )
    with reporting(stages.append):
        compile(decoder, options)
    assert "dummy1: all stages are already finished" in stages


def test_an_encoder_takes_a_clip_as_a_sample(compiled, encoder, tmp_path):
    for name, clip in zip("ab", shipped_audio(), strict=False):  # 3 s: only the first 2 s are used
        write_wav(tmp_path / "clips" / f"{name}.wav", load_audio(clip.path)[:48_000])

    (program,) = compiled(encoder, tmp_path / "clips").programs

    assert all(check.passed for check in program.emulation)
    folder = tmp_path / "encoder-dummy1.compile" / "dummy1" / "encoder"
    with wave.open(str(tmp_path / "clips" / "a.wav")) as file:
        samples = np.frombuffer(file.readframes(32_000), "<i2").astype(np.float32) / 32768
    calibration = np.load(folder / "mel.npy")
    assert len(calibration) == 2
    expected = log_mel(samples, 80, n_frames=FRAMES).ravel()
    np.testing.assert_allclose(calibration[0].ravel(), expected, atol=2e-3)  # float16 on disk


def test_without_the_sdk_the_work_folder_is_made_and_nothing_else(
    compiled, decoder, calls, tmp_path
):
    with pytest.raises(MissingPackageError, match="not compiled yet") as missing:
        compiled(decoder, calls, toolchains={})

    work = tmp_path / "decoder-dummy1.compile" / "dummy1"
    assert str(work) in missing.value.hint
    assert (work / "compile.py").is_file()
    assert np.load(work / "decoder" / "features.npy").shape == (2, 1, POSITIONS * WIDTH)
    assert not (tmp_path / "decoder-dummy1").exists()


@pytest.mark.parametrize("wrong", ["-one", "one[..., :-1]"])
def test_a_wrong_result_is_not_written_unless_asked_and_gives_no_status(
    compiled, decoder, calls, tmp_path, wrong
):
    other = tmp_path / "other"
    other.mkdir()
    sdk = (HERE / "sdk" / "dummy_sdk.py").read_text()
    (other / "dummy_sdk.py").write_text(sdk.replace("[_in_8_bits(one) for", f"[{wrong} for"))
    path = interpreter(other)
    path.write_text(path.read_text().replace('PYTHONPATH="', f'PYTHONPATH="{other}:'))
    toolchains = {"dummy": str(path)}

    with pytest.raises(VerificationError, match="were not written") as rejected:
        compiled(decoder, calls, toolchains=toolchains)
    assert "logits_0, simulated" in rejected.value.why
    assert "--precision" in rejected.value.hint
    assert not (tmp_path / "decoder-dummy1").exists()

    compiled(decoder, calls, toolchains=toolchains, allow_unverified=True)

    written = json.loads((tmp_path / "decoder-dummy1" / "compiled.json").read_text())
    assert written["status"] == "compiled here"


def test_one_bad_sample_among_good_ones_is_found_and_named():
    expected = np.random.default_rng(0).standard_normal((3, 1, 40)).astype(np.float32)
    actual = expected.copy()
    actual[1] *= 0.5  # alone 6 dB; all samples together would have 11 dB

    what, worst = _worst("logits", ["a", "b", "c"], actual, expected, GATES["w8a8"])

    assert what == "worst of 3: b"
    assert not worst
    assert worst.sqnr_db == pytest.approx(6.0, abs=0.1)


def test_token_ids_are_looked_up_as_the_host_does(compiled, tmp_path):
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"])]
    shape = (1, WIDTH, TOKENS, 1)
    file = onnx_file(
        tmp_path / "decoder.onnx", nodes, {"x": shape}, {"y": shape}, w=(WIDTH, WIDTH, 1, 1)
    )
    table = np.random.default_rng(0).standard_normal((9, WIDTH)).astype(np.float32)
    tokens = TensorSpec("tokens", (1, TOKENS), "int64")
    host = HostPart((Lookup(tokens, TensorSpec("x", shape), table, None),))
    for name, content in host.files("decoder").items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "calls").mkdir()
    np.savez(tmp_path / "calls" / "1.npz", tokens=np.array([[0, 8, 3, 1]]))

    compiled(file, tmp_path / "calls", samples=1)

    folder = tmp_path / "decoder-dummy1.compile" / "dummy1" / "decoder"
    made = np.load(folder / "simulator_x.npy").reshape(shape)
    np.testing.assert_array_equal(made[0, :, 1, 0], table[8])
    copied = tmp_path / "decoder-dummy1" / "decoder.tokens.table.npy"
    np.testing.assert_array_equal(np.load(copied), table)


def test_weights_in_another_file_belong_to_the_program(decoder, tmp_path):
    model = onnx.load(decoder)
    external = {"save_as_external_data": True, "location": "decoder.w", "size_threshold": 0}
    onnx.save(model, decoder, **external)
    (tmp_path / "decoder.txt").write_text("the user's")

    entry = read_lowered(decoder, Placement("dummy1"))

    assert entry.files == ("decoder.onnx", "decoder.w")
    assert [tensor.name for tensor in entry.spec.outputs] == ["logits_0", "logits_1"]


@pytest.mark.parametrize("trust", [False, True])
def test_the_memory_limit_of_a_program_counts_its_weights_in_other_files(
    decoder, tmp_path, monkeypatch, trust
):
    external = {"save_as_external_data": True, "location": "decoder.w", "size_threshold": 0}
    onnx.save(onnx.load(decoder), decoder, **external)
    size = decoder.stat().st_size + (tmp_path / "decoder.w").stat().st_size
    limits: list[int] = []
    monkeypatch.setattr(
        preflight, "memory_within", lambda limit: limits.append(limit) or nullcontext()
    )
    entry = read_lowered(decoder, Placement("dummy1"))
    options = CompileOptions(target="dummy1", trust=trust, threads=1)

    run = lowered_run(decoder, entry, get_target("dummy1"), options)
    outputs = run(list(decoder_inputs(0).values()))

    assert [output.shape for output in outputs] == [(1, TOKENS, 5)] * 2
    limit = preflight.LIMIT_BASE_BYTES + preflight.LIMIT_FACTOR * size
    assert limits == ([] if trust else [limit])


def test_the_description_of_modules_states_one_program(tmp_path):
    tensor = to_json(TensorSpec("x", (1, 4)))
    program = {"inputs": [tensor], "outputs": [tensor], "kind": "graph"}
    path = tmp_path / "fp32.json"
    path.write_text(json.dumps({"programs": {"decoder": program}}))

    entry = read_lowered(path, Placement("dummy1"))

    assert (entry.spec.name, entry.files) == ("decoder", ("fp32.json", "fp32.safetensors"))
    path.write_text(json.dumps({"programs": {"decoder": program, "encoder": program}}))
    with pytest.raises(ProgramError, match="has 2 programs"):
        read_lowered(path, Placement("dummy1"))
    path.write_text("[]")
    with pytest.raises(ProgramError, match="not the description"):
        read_lowered(path, Placement("dummy1"))


def test_a_decoder_of_any_name_is_quantized_by_the_vendors_recipe_for_decoders():
    compiler = targets.get_target("hailo8l").compiler
    x, features = TensorSpec("x", (1, 384, 32, 1)), TensorSpec("features", (1, 500, 384))

    def samples(name: str, *inputs: TensorSpec) -> int:
        spec = ProgramSpec(name, inputs, (features,))
        return compiler.calibration(
            spec, SimpleNamespace(n_audio_state=384), compiler.options()
        ).samples

    assert samples("tiny", x, features) == samples("uncached_decoder", x, features)
    assert samples("tiny", x) == samples("encoder", x) != samples("tiny", x, features)


def _dynamic(decoder: Path) -> None:
    model = onnx.load(decoder)
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "n"
    onnx.save(model, decoder)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"target": ""}, UsageError, "`--target` is missing"),
        ({"target": "dummy9"}, UsageError, "there is no target"),
        ({"target": "onnxruntime", "samples": 0}, UsageError, "has no compiler"),
        ({"target": "ethos-u85", "samples": 0}, UsageError, "it reads .pt2 files"),
        ({"precision": "w4"}, UsageError, "precisions of `dummy1`: w8a8"),
        ({"inputs": None}, UsageError, "embedded float32[1, 4, 8]"),
        ({"samples": 4}, AudioError, "has 3 samples, and 4 are needed"),
        ({"calibration": Path("x")}, UsageError, "`--calibration` cannot be used here"),
    ],
)
def test_wrong_options_are_rejected_before_anything_is_written(
    compiled, decoder, calls, tmp_path, options, error, says
):
    with pytest.raises(error) as rejected:
        compiled(decoder, **{"inputs": calls, **options})

    assert says in str(rejected.value)
    assert not (tmp_path / "decoder-dummy1").exists()


@pytest.mark.parametrize("option", ["inputs", "out", "precision", "target"])
def test_options_of_a_file_are_not_for_a_bundle(tmp_path, option):
    with pytest.raises(UsageError, match=f"`--{option}` cannot be used here"):
        compile(tmp_path, CompileOptions(**{option: "dummy1"}))


def _empty(calls: Path) -> None:
    shutil.rmtree(calls)
    calls.mkdir()


def _of_another_shape(calls: Path) -> None:
    np.save(calls / "a" / "features.npy", np.zeros((1, 3, WIDTH), np.float32))


def _damaged(calls: Path) -> None:
    (calls / "a" / "features.npy").write_bytes(b"\x93NUMPY")


def _audio(calls: Path) -> None:
    write_wav(calls / "0.wav", np.zeros(32_000))


def _incomplete(calls: Path) -> None:
    (calls / "a" / "features.npy").unlink()


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (_empty, "there are no inputs in"),
        (_of_another_shape, "a: the array for input `features` has the wrong shape"),
        (_damaged, "a: cannot read features.npy"),
        (_audio, "0.wav: it is neither an .npz nor an .npy file"),
        (_incomplete, "expected embedded, features; got embedded"),
    ],
)
def test_inputs_that_do_not_fit_are_rejected_by_name(
    compiled, decoder, calls, tmp_path, spoil, says
):
    spoil(calls)

    with pytest.raises(ProgramError) as rejected:
        compiled(decoder, calls)

    assert says in str(rejected.value)
    assert {path.name for path in tmp_path.iterdir()} <= {
        "calls",
        "decoder.onnx",
        "dummy-python",
    }


def test_silence_is_rejected_unless_forced(compiled, encoder, tmp_path):
    write_wav(tmp_path / "clips" / "a.wav", np.zeros(32_000))

    with pytest.raises(AudioError, match="silent") as rejected:
        compiled(encoder, tmp_path / "clips", samples=1)

    assert "a.wav" in rejected.value.what
    assert compiled(encoder, tmp_path / "clips", samples=1, force=True, allow_unverified=True)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (_dynamic, "`embedded` has no static shape"),
        (lambda file: file.write_bytes(b"hello"), "decoder.onnx"),
        (lambda file: file.unlink(), "missing"),
    ],
)
def test_a_file_that_cannot_be_compiled_is_rejected(compiled, decoder, calls, spoil, says):
    spoil(decoder)

    with pytest.raises((ProgramError, BundleError)) as rejected:
        compiled(decoder, calls)

    assert says in str(rejected.value)


# `compile` of third-party files by vendors' own compilers and simulators. Nothing is faked.
#
# Without a vendor's SDK, its cases are skipped; WHISPERPORT_TOOLCHAIN_NAME names its interpreter.


# Target and precision -> lowest SQNR of an output in dB, below the one that was measured.
LOWEST_DB = {
    ("rk3588", "fp16"): 50.0,
    ("rk3588", "w8a8"): 20.0,
    ("sm8650", "fp16"): 50.0,
    ("sm8650", "w8a16"): 30.0,
    ("ethos-u85", "w8a16"): 27.0,
}


class Decoder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = torch.nn.ModuleList(torch.nn.Linear(WIDTH, 5) for _ in range(2))

    def forward(self, embedded: torch.Tensor, features: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weights = torch.matmul(embedded, features.transpose(1, 2)).softmax(-1)
        return tuple(table(torch.matmul(weights, features)) for table in self.tables)


def _file(target: str, folder: Path) -> Path:
    if get_target(target).spec.lowering.lowered_suffix == ".onnx":
        return decoder_file(folder / "decoder.onnx")
    torch.manual_seed(0)
    inputs = torch.zeros(1, TOKENS, WIDTH), torch.zeros(1, POSITIONS, WIDTH)
    path = folder / "decoder.pt2"
    torch.export.save(torch.export.export(Decoder().eval(), inputs, strict=False), path)
    return path


@pytest.mark.parametrize(("target", "precision"), LOWEST_DB)
def test_a_third_party_decoder_is_compiled_run_and_compared(target, precision, tmp_path):
    compiler = get_target(target).compiler
    if compiler is None or compiler.installed({}) is None:
        pytest.skip(f"the compiler of {target} is not installed")
    inputs = write_calls(tmp_path / "calls")
    options = CompileOptions(target=target, precision=precision, inputs=inputs, force=True)

    (program,) = compile(_file(target, tmp_path), options).programs

    assert len(program.emulation) == 2
    found = min(check.value["sqnr_db"] for check in program.emulation)
    assert found >= LOWEST_DB[target, precision]
    assert program.samples == (0 if precision == "fp16" else 3)
    written = json.loads((tmp_path / f"decoder-{target}" / "compiled.json").read_text())
    assert written["status"] == (
        "simulated here" if program.ran == "simulated" else "compiled here"
    )
