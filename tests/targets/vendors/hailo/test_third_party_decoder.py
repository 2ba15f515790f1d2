"""A third-party [1, 32] decoder for a chip without embedding lookup: `check`, `fix` and `lower`."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from whisperport.build.check import check
from whisperport.build.fix import Fixed, fix
from whisperport.build.lower import Lowered, lower
from whisperport.errors import ProgramError
from whisperport.model.trace.program import Program, as_program
from whisperport.model.trace.pt2 import read_pt2
from whisperport.program.host_part import HostPart
from whisperport.program.runner import Array
from whisperport.verification import LOWERED, compare_output
from whisperport.verification.equality import eager_arrays

from ....extent import core_or_all
from ....third_party_decoder import POSITIONS, TOKENS, VOCABULARY, WIDTH, third_party_decoder

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


@pytest.fixture(scope="module")
def lowered(decoder: Program, tmp_path_factory: pytest.TempPathFactory) -> Lowered:
    return lower(decoder, TARGET, tmp_path_factory.mktemp("lowered") / "decoder.onnx")


def test_what_is_lowered_is_an_onnx_file_of_opset_13_and_a_script_for_a_decoder(
    lowered: Lowered,
) -> None:
    model = onnx.load(lowered.files[0])
    assert lowered.equal
    assert [file.name for file in lowered.files] == [
        "decoder.onnx",
        "decoder.alls",
        "decoder.host.json",
        "decoder.tokens.table.npy",
        "decoder.tokens.positions.npy",
    ]
    assert [o.version for o in model.opset_import] == [13]
    assert not {"Gather", "Concat"} & {node.op_type for node in model.graph.node}
    assert "resources_param" in lowered.files[1].read_text()  # in scripts for decoders only


def test_the_onnx_file_computes_the_logits_with_what_lies_beside_it(
    lowered: Lowered, inputs: dict[str, Array], logits: Array
) -> None:
    host = HostPart.read(lowered.files[2])
    session = onnxruntime.InferenceSession(lowered.files[0], providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    made = dict(zip(names, session.run(None, host.inputs(inputs)), strict=True))

    assert compare_output("logits", host.outputs(made)["logits"], logits, LOWERED["float32"])


def test_a_token_outside_of_the_table_is_an_error(fixed: Fixed) -> None:
    (lookup,) = fixed.host.lookups

    with pytest.raises(ProgramError, match="an id that the embedding table does not have"):
        lookup.embed(np.full((1, TOKENS), VOCABULARY))
    with pytest.raises(ProgramError, match="`tokens` does not fit"):
        lookup.embed(np.zeros((1, TOKENS + 1), np.int64))
