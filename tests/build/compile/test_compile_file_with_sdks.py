"""`compile` of third-party files by vendors' own compilers and simulators. Nothing is faked.

Without a vendor's SDK, its cases are skipped; WHISPERPORT_TOOLCHAIN_NAME names its interpreter.
"""

import json
from pathlib import Path

import pytest
import torch

from whisperport.build.compile.compile import CompileOptions, compile
from whisperport.targets import get_target

from .third_party_onnx import POSITIONS, TOKENS, WIDTH, decoder_file, write_calls

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
