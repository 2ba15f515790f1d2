"""Time one token on XNNPACK: in the file of react-native-executorch, and in a bundle.

    python -m benchmarks.apps.steps [--sizes tiny base] [--rounds 30]

- `packed`, `projecting`: the method `decode` of the app's file, whose audio is keys and values; and the
  same decoder with the encoder's features, which it projects for each token, as other exports do.
- `in place`, `copied`: the program `step` of a bundle, which reads its inputs where the caller has them;
  and with memory for them in the file, into which each run copies them, as ExecuTorch does by default.

Random weights, one thread, the methods in turn. Writes `results/apps.json`.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from whisperport.build.layouts.react_native_executorch import folder as app
from whisperport.model.network.decoder import CrossKV, Decode
from whisperport.model.network.whisper import Whisper, build_model
from whisperport.model.network.with_state import DecodeToken, Table
from whisperport.model.rewrites import run_rewrites
from whisperport.model.trace.program import Program, trace
from whisperport.targets import get_target
from whisperport.targets.cpu.xnnpack import lowering
from whisperport.targets.cpu.xnnpack.runtime import load_program, start_runtime
from whisperport.verification import versions

from ..models import random_checkpoint
from ..record import compact, record

POSITIONS = app.POSITIONS


class ProjectingStep(nn.Module):
    """As `with_state.Step`, with the encoder's features (1, T, d) for the keys and values."""

    def __init__(self, model: Whisper) -> None:
        super().__init__()
        self.dims, self.decode = model.dims, Decode(model.decoder)
        self.cross_kv = CrossKV(model.decoder)

    def forward(self, x: Tensor, mask: Tensor, keys: Tensor, values: Tensor, audio: Tensor) -> Any:
        n_layer, n_head = self.dims.n_text_layer, self.dims.n_text_head
        layers = [slice(i * n_head, (i + 1) * n_head) for i in range(n_layer)]
        rows = self.cross_kv(audio)
        cached = [keys[layer] for layer in layers], [values[layer] for layer in layers]
        logits, *new = self.decode(x, mask, *cached, list(rows[:n_layer]), list(rows[n_layer:]))
        return logits[None], torch.cat(new[:n_layer]), torch.cat(new[n_layer:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", default=["tiny", "base"])
    parser.add_argument("--rounds", type=int, default=30)
    chosen = parser.parse_args()
    rows = [measured(size, chosen.rounds) for size in chosen.sizes]
    record("apps", "steps", {"versions": versions(["torch", "executorch"]), "rows": rows})
    print(compact({"rows": rows}))


def measured(size: str, rounds: int) -> dict[str, Any]:
    """Return the median milliseconds of a token in each form."""
    checkpoint = random_checkpoint(size)
    model, dims = build_model(checkpoint), checkpoint.dims
    token, position = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    width = 2 * dims.n_text_layer * dims.n_text_state
    packed, features = (torch.randn(1, dims.n_audio_ctx, n) for n in (width, dims.n_text_state))
    step = bundle_step(model)
    inputs = [torch.randn(tuple(tensor.shape)) for tensor in step.spec.inputs]
    with tempfile.TemporaryDirectory() as name:
        out = Path(name)
        app.write(checkpoint, "fp32", out)
        lowering.lower_to_pte({"decode": projecting(model)}, out / "projecting.pte")
        lowering.lower_to_pte({"step": step}, out / "in place.pte")
        with patch.object(lowering, "_inputs_of_the_caller", lambda: None):
            lowering.lower_to_pte({"step": step}, out / "copied.pte")
        runtime = start_runtime(1)
        forms = {
            "packed": (out / "model.pte", "decode", [token, position, packed]),
            "projecting": (out / "projecting.pte", "decode", [token, position, features]),
            "in place": (out / "in place.pte", "step", inputs),
            "copied": (out / "copied.pte", "step", inputs),
        }
        programs = {form: load_program(runtime, path) for form, (path, _, _) in forms.items()}
        runs = {
            form: (programs[form].load_method(m), given) for form, (_, m, given) in forms.items()
        }
        times: dict[str, list[float]] = {form: [] for form in forms}
        for _ in range(rounds + 1):
            for form, (method, given) in runs.items():
                start = time.perf_counter()
                method.execute(given)
                times[form].append(time.perf_counter() - start)
    medians = {form: 1000 * median(seconds[1:]) for form, seconds in times.items()}
    return {
        "size": size,
        "ms": medians,
        "packed / projecting": medians["packed"] / medians["projecting"],
        "in place / copied": medians["in place"] / medians["copied"],
    }


def projecting(model: Whisper) -> Program:
    """Return the method `decode` that projects the audio for each token, with the rewrites of ours."""
    dims = model.dims
    rows, width = dims.n_text_layer * dims.n_text_head, dims.n_text_state // dims.n_text_head
    token, position = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    audio = torch.zeros(1, dims.n_audio_ctx, dims.n_text_state)
    x, mask = torch.zeros(1, 1, dims.n_text_state), torch.zeros(1, 1, POSITIONS + 1)
    caches = torch.zeros(rows, width, POSITIONS), torch.zeros(rows, POSITIONS, width)
    step = app._rewritten("decode", ProjectingStep(model), (x, mask, *caches, audio), "fp32")
    table = Table(model.decoder.token_embedding.weight.detach().half())
    method = DecodeToken(model, step, table, POSITIONS)
    return app._program("decode", method, (token, position, audio))


def bundle_step(model: Whisper) -> Program:
    """Return the program `step` of a bundle, with the rewrites of the target `xnnpack`."""
    dims = model.dims
    n_head, n = dims.n_text_head, dims.n_text_ctx
    width, n_audio = dims.n_text_state // n_head, dims.n_audio_ctx
    shapes = [
        (n_head, width, n),
        (n_head, n, width),
        (n_head, width, n_audio),
        (n_head, n_audio, width),
    ]
    caches: Sequence[list[Tensor]] = [
        [torch.zeros(shape) for _ in range(dims.n_text_layer)] for shape in shapes
    ]
    x, mask = torch.zeros(1, 1, dims.n_text_state), torch.zeros(1, 1, n + 1)
    program = trace("step", Decode(model.decoder), (x, mask, *caches))
    rewritten, _ = run_rewrites(program, get_target("xnnpack").spec.lowering.rewrites)
    return rewritten


if __name__ == "__main__":
    main()
