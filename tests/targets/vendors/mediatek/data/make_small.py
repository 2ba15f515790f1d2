"""Make small.tflite and small_int8.tflite: two linear layers, two inputs, two outputs, random weights.

.venv/bin/python tests/targets/vendors/mediatek/data/make_small.py
"""

from pathlib import Path

import litert_torch
import numpy as np
import torch
from ai_edge_quantizer import quantizer, recipe

HERE = Path(__file__).parent


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 4), torch.nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.first(x)) + self.second(y)
        return hidden, torch.softmax(hidden, -1)


def main() -> None:
    torch.manual_seed(0)
    model = litert_torch.convert(Small().eval(), (torch.randn(3, 8), torch.randn(3, 6)))
    model.export(str(HERE / "small.tflite"))
    quantized = quantizer.Quantizer(str(HERE / "small.tflite"))
    quantized.load_quantization_recipe(recipe.static_wi8_ai8())
    random = np.random.default_rng(0)
    shapes = {"args_0": (3, 8), "args_1": (3, 6)}
    samples = [
        {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
        for _ in range(4)
    ]
    calibrated = quantized.calibrate({"serving_default": samples})
    result = quantized.quantize(calibrated)
    result.export_model(str(HERE / "small_int8.tflite"), overwrite=True)


if __name__ == "__main__":
    main()
