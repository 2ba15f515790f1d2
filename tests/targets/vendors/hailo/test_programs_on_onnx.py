"""The files for Hailo's compiler are valid ONNX, within its limits, and equal to torch. No chip is used."""

import pickle
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from whisperport.build.check import check
from whisperport.build.fix import Fixed, fix
from whisperport.build.lower import Lowered, lower
from whisperport.errors import ProgramError, WhisperportError
from whisperport.model.checkpoint import load_checkpoint
from whisperport.model.inspection.read_onnx import read_onnx
from whisperport.model.inspection.rejections import check_graph
from whisperport.model.network.whisper import Whisper, build_model
from whisperport.model.trace.program import Program, as_program
from whisperport.model.trace.pt2 import read_pt2
from whisperport.model.trace.variants import whisper_programs
from whisperport.model.trace.whisper import Parts
from whisperport.program.bundle import ProgramEntry
from whisperport.program.dims import Dims
from whisperport.program.host_part import HostPart
from whisperport.program.runner import Array, Runner
from whisperport.program.spec import TensorSpec
from whisperport.program.window import WindowOptions
from whisperport.targets import RunOptions, get_target
from whisperport.targets.target_options import parse_options
from whisperport.targets.vendors.hailo.target import Hailo
from whisperport.verification import LOWERED, compare, compare_output
from whisperport.verification.equality import eager_arrays

from ....extent import EVERYTHING, core_or_all
from ....micro import whisper_dims
from ....third_party_decoder import POSITIONS, TOKENS, VOCABULARY, WIDTH, third_party_decoder

# The files for Hailo's compiler are valid ONNX, within its limits, and equal to torch. No chip is used.

PROMPT = (50258, 50259, 50359, 50363, 11, 4711, 220, 51864)


def sizes(width: int, layers: int, positions: int) -> Dims:
    """Return the sizes of tiny and base with this number of encoder positions."""
    return replace(whisper_dims(width, layers), n_audio_ctx=positions)


def random_model(dims: Dims) -> Whisper:
    """Make a model with random weights of gain about 1, also in biases and norms, so none is missed."""
    generator = torch.Generator().manual_seed(0)
    model = Whisper(dims).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            parameter.copy_(noise / parameter[0].numel() ** 0.5)
        else:
            parameter.copy_(0.1 * noise + float("ln" in name and name.endswith("weight")))
    return model


@dataclass(frozen=True)
class LoweredProgram:
    """Return the two programs of a model in the form for the compiler."""

    model: Whisper
    target: Hailo
    entries: dict[str, ProgramEntry]
    folder: Path
    runners: dict[str, Runner]

    def file(self, program: str) -> Path:
        return self.folder / self.entries[program].files[0]


def lowered(model: Whisper, name: str, options: dict[str, str], folder: Path) -> LoweredProgram:
    target = get_target(name)
    target = target.configured(parse_options(target.lower_options, options, name))
    assert isinstance(target, Hailo)
    parts = Parts(model, [], target.uncached_form(model.dims))
    programs = list(
        whisper_programs(parts, ("encoder", "uncached_decoder"), target.spec.lowering.variants)
    )
    entries = target.lower(programs, folder)
    run = RunOptions(threads=1, options={f"{name}.emulate": "on"})
    runners = target.load(folder, entries, run)
    return LoweredProgram(model, target, {e.spec.name: e for e in entries}, folder, runners)


CASES: dict[str, Any] = {
    "tiny at 10 s": ("hailo8l", {}, lambda: random_model(sizes(384, core_or_all(1, 4), 500))),
    "base at 5 s": (
        "hailo8",
        {"encoder-opset": "13", "decoder-opset": "17", "positions": "graph"},
        lambda: random_model(sizes(512, core_or_all(1, 6), 250)),
    ),
    "the embedded model": ("hailo10h", {"sequence-length": "64"}, lambda: embedded_or_random()),
}


def embedded_or_random() -> Whisper:
    """The embedded model with windows of 10 s; in `make test`, one layer of its width."""
    if not EVERYTHING:
        return random_model(sizes(128, 1, 500))
    checkpoint = load_checkpoint("default")
    return build_model(checkpoint, WindowOptions(seconds=10.0).of(checkpoint.dims))


# The first one repeats, with other sizes, what the others have.
@pytest.fixture(scope="module", params=core_or_all([*CASES][1:], [*CASES]))
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> LoweredProgram:
    name, options, model = CASES[request.param]
    return lowered(model(), name, options, tmp_path_factory.mktemp("hailo"))


def test_the_encoder_takes_an_image_of_one_row_and_agrees_with_torch(case: LoweredProgram) -> None:
    dims, runner = case.model.dims, case.runners["encoder"]
    mel = np.random.default_rng(0).standard_normal((1, 80, 1, dims.n_frames)).astype(np.float32)

    features = runner.run({"mel": mel})["features"]

    expected = case.model.encode(torch.from_numpy(mel[:, :, 0])).numpy()
    assert runner.spec.inputs == (TensorSpec("mel", (1, 80, 1, dims.n_frames)),)
    assert features.shape == (1, dims.n_audio_ctx, dims.n_audio_state)
    assert compare("features", features, expected, LOWERED["float32"])


def test_the_uncached_decoder_gives_four_pieces_of_the_vocabulary_and_agrees_with_torch(
    case: LoweredProgram,
) -> None:
    dims, form = case.model.dims, case.target.uncached_form(case.model.dims)
    random = np.random.default_rng(0)
    features = random.standard_normal((1, dims.n_audio_ctx, dims.n_audio_state)).astype(np.float32)
    rows = case.model.decoder.token_embedding.weight.numpy()[list(PROMPT)]
    if form.positions == "host":
        rows = rows + case.model.decoder.positional_embedding.numpy()[: len(PROMPT)]
    image = random.standard_normal((1, dims.n_text_state, form.sequence_length)).astype(np.float32)
    image[0, :, : len(PROMPT)] = rows.T
    inputs = {"features": features, "embeddings": image.reshape(1, -1, *form.layout)}

    pieces = case.runners["uncached_decoder"].run(inputs)

    joined = np.concatenate(list(pieces.values()), axis=2)
    cross_kv = case.model.cross_kv(torch.from_numpy(features), padded=False)
    expected = case.model.logits(torch.tensor(PROMPT), cross_kv).numpy()
    assert {name: piece.shape for name, piece in pieces.items()} == {
        **{f"logits_{i}": (1, form.sequence_length, 12966) for i in range(3)},
        "logits_3": (1, form.sequence_length, 12967),
    }
    assert joined.shape == (1, form.sequence_length, 51865)
    assert compare("logits", joined[0, : len(PROMPT)], expected, LOWERED["float32"])


@pytest.mark.parametrize("program", ["encoder", "uncached_decoder"])
def test_check_refuses_nothing_and_warns_of_repeated_work_only(
    case: LoweredProgram, program: str
) -> None:
    graph = read_onnx(case.file(program))

    options = case.target.options
    written = options.encoder_opset if program == "encoder" else options.decoder_opset
    assert graph.opset == written
    findings = check_graph(graph, case.target.spec).findings
    # A decoder without KV cache projects the encoder's output in every run.
    expected = {("WP601", "warning")} if program == "uncached_decoder" else set()
    assert {(group.rule, group.kind) for group in findings} == expected


@pytest.mark.parametrize("program", ["encoder", "uncached_decoder"])
def test_the_file_is_valid_whole_and_static(case: LoweredProgram, program: str) -> None:
    path = case.file(program)

    onnx.checker.check_model(str(path), full_check=True)

    graph = onnx.load(str(path), load_external_data=False).graph
    spec = case.entries[program].spec
    values = (*graph.input, *graph.output, *graph.value_info)
    kinds = {t.data_type for t in graph.initializer if len(t.dims) > 1}
    assert kinds == {onnx.TensorProto.FLOAT}
    assert all(t.data_location != onnx.TensorProto.EXTERNAL for t in graph.initializer)
    assert all(d.HasField("dim_value") for v in values for d in v.type.tensor_type.shape.dim)
    assert [i.name for i in graph.input] == [t.name for t in spec.inputs]
    assert [o.name for o in graph.output] == [t.name for t in spec.outputs]
    reshapes = [node for node in graph.node if node.op_type == "Reshape"]
    assert not [a for node in reshapes for a in node.attribute if a.name == "allowzero" and a.i]


def test_the_encoder_begins_with_a_convolution_of_rank_4_and_shapes_nothing_before(
    case: LoweredProgram,
) -> None:
    graph = read_onnx(case.file("encoder"))
    convolutions = [node for node in graph.nodes if node.op == "conv"]

    assert graph.nodes[0] is convolutions[0]
    between = graph.nodes[: graph.nodes.index(convolutions[1])]
    assert not {node.op for node in between} & {"reshape", "transpose", "unsqueeze", "squeeze"}
    assert [node.inputs[1].shape[2:] for node in convolutions if node.inputs[1]] == [(1, 3)] * 2


def test_a_model_script_lies_beside_each(case: LoweredProgram) -> None:
    for name, entry in case.entries.items():
        assert entry.files == tuple(
            f"{case.target.spec.name}/{name}{suffix}" for suffix in (".onnx", ".alls")
        )
        script = (case.folder / entry.files[1]).read_text()
        assert "performance_param(" in script


# A third-party [1, 32] decoder for a chip without embedding lookup: `check`, `fix` and `lower`.

TARGET = "hailo8l"


# A graph that is not cut at a reshape yet has cases of its own in rewrites/test_host_rewrites.py.
FORMS = {"reshape": True} | core_or_all({}, {"no reshape": False})


@pytest.fixture(scope="module", params=FORMS.values(), ids=FORMS)
def decoder(request: pytest.FixtureRequest) -> Program:
    return as_program("decoder", third_party_decoder(reshape=request.param), ["logits"])


@pytest.fixture(scope="module")
def fixed(decoder: Program) -> Fixed:
    return fix(decoder, TARGET)


@pytest.fixture(scope="module")
def inputs() -> dict[str, Array]:
    random = np.random.default_rng(3)
    return {
        "tokens": random.integers(0, VOCABULARY, (1, TOKENS)),
        "features": random.standard_normal((1, POSITIONS, WIDTH)).astype(np.float32),
    }


@pytest.fixture(scope="module")
def logits(decoder: Program, inputs: dict[str, Array]) -> Array:
    return eager_arrays(decoder, [torch.from_numpy(array) for array in inputs.values()])["logits"]


def test_the_check_names_the_lookup_the_integers_and_the_wide_product(decoder: Program) -> None:
    checked = check(decoder, TARGET)

    (program,) = checked.programs
    assert not checked
    assert {(kind.rule, kind.operator, kind.rewrite) for kind in program.rejected} == {
        ("WP101", "embedding", "lookup-on-host"),
        ("WP202", "", ""),
    }
    (warning,) = program.of("warning")
    assert (warning.rule, warning.rewrite) == ("WP207", "split-vocab-projection")


def test_the_fixed_program_is_cut_where_published_ones_are(fixed: Fixed) -> None:
    assert fixed
    assert [(t.name, t.shape, t.dtype) for t in fixed.program.spec.inputs] == [
        ("embeddings", (1, WIDTH, TOKENS, 1), "float32"),
        ("features", (1, POSITIONS, WIDTH), "float32"),
    ]
    assert [(t.name, t.shape[-1]) for t in fixed.program.spec.outputs] == [
        *((f"logits_{piece}", 12_966) for piece in range(3)),
        ("logits_3", 12_967),
    ]
    operators = {str(n.target) for n in fixed.program.exported.graph.nodes if n.op != "placeholder"}
    assert not any("embedding" in name or "cat" in name for name in operators)


def test_nothing_that_the_check_finds_remains(fixed: Fixed) -> None:
    assert check(fixed.program, TARGET).programs[0].findings == ()
    assert (fixed.remaining, fixed.lookups, fixed.unseen) == ((), (), ())


def test_every_step_was_verified_through_the_host(fixed: Fixed) -> None:
    changed = [step for step in fixed.steps if step.outcome.changed]

    assert {"split-vocab-projection", "lookup-on-host", "join-on-host"} <= {
        step.outcome.rewrite for step in changed
    }
    for step in changed:
        assert step.kept
        assert {one.comparison.output for one in step.equality.compared} == {"logits"}


def test_what_is_written_computes_the_logits_with_what_lies_beside_it(
    fixed: Fixed, inputs: dict[str, Array], logits: Array, tmp_path: Path
) -> None:
    out = fixed.write(tmp_path / "fixed.pt2")

    again, host = read_pt2(out), HostPart.read(tmp_path / "fixed.host.json")
    given = host.inputs(inputs)
    made = eager_arrays(again, [torch.from_numpy(given[t.name]) for t in again.spec.inputs])
    pieces = dict(zip(host.joins[0].pieces, made.values(), strict=True))
    assert compare_output("logits", host.outputs(pieces)["logits"], logits, LOWERED["float32"])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "fixed.host.json",
        "fixed.pt2",
        "fixed.tokens.positions.npy",
        "fixed.tokens.table.npy",
    ]


def test_the_files_of_a_lowered_program_are_not_replaced_by_those_of_a_fixed_one(
    fixed: Fixed, tmp_path: Path
) -> None:
    # given: the user replaces an older fixed program, beside a lowered one of the same stem
    out, described = tmp_path / "decoder.pt2", tmp_path / "decoder.host.json"
    for path in (out, described, tmp_path / "decoder.onnx"):
        path.write_text("older")

    # when, then
    with pytest.raises(WhisperportError, match=r"decoder\.onnx may belong to it"):
        fixed.write(out, overwrite=True)
    assert (out.read_text(), described.read_text()) == ("older", "older")
    (tmp_path / "decoder.onnx").unlink()
    fixed.write(out, overwrite=True)
    assert HostPart.read(described)


@pytest.fixture(scope="module")
def lowered_decoder(decoder: Program, tmp_path_factory: pytest.TempPathFactory) -> Lowered:
    return lower(decoder, TARGET, tmp_path_factory.mktemp("lowered_decoder") / "decoder.onnx")


def test_what_is_lowered_is_an_onnx_file_of_opset_13_and_a_script_for_a_decoder(
    lowered_decoder: Lowered,
) -> None:
    model = onnx.load(lowered_decoder.files[0])
    assert lowered_decoder.equal
    assert [file.name for file in lowered_decoder.files] == [
        "decoder.onnx",
        "decoder.alls",
        "decoder.host.json",
        "decoder.tokens.table.npy",
        "decoder.tokens.positions.npy",
    ]
    assert [o.version for o in model.opset_import] == [13]
    assert not {"Gather", "Concat"} & {node.op_type for node in model.graph.node}
    assert "resources_param" in lowered_decoder.files[1].read_text()  # in scripts for decoders only


def test_the_tables_stay_in_the_files_because_the_result_passes_between_processes(
    lowered_decoder: Lowered,
) -> None:
    """Whisper's table has 80 MB; a message of more than 64 MB ended `lower` with "the exporter crashed"."""
    (table,) = (path for path in lowered_decoder.files if path.name.endswith(".table.npy"))

    message = pickle.dumps(lowered_decoder)

    assert len(message) < table.stat().st_size / 10


def test_the_onnx_file_computes_the_logits_with_what_lies_beside_it(
    lowered_decoder: Lowered, inputs: dict[str, Array], logits: Array
) -> None:
    host = HostPart.read(lowered_decoder.files[2])
    session = onnxruntime.InferenceSession(
        lowered_decoder.files[0], providers=["CPUExecutionProvider"]
    )
    names = [output.name for output in session.get_outputs()]

    made = dict(zip(names, session.run(None, host.inputs(inputs)), strict=True))

    assert compare_output("logits", host.outputs(made)["logits"], logits, LOWERED["float32"])


def test_a_token_outside_of_the_table_is_an_error(fixed: Fixed) -> None:
    (lookup,) = fixed.host.lookups

    with pytest.raises(ProgramError, match="an id that the embedding table does not have"):
        lookup.embed(np.full((1, TOKENS), VOCABULARY))
    with pytest.raises(ProgramError, match="`tokens` does not fit"):
        lookup.embed(np.zeros((1, TOKENS + 1), np.int64))
