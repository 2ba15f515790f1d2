"""Convert a model to the format of one peer, in the peers' environment.

    python convert.py FORMAT FOLDER [--forced-tokens N]

The folder holds the model as `models.py` wrote it: `huggingface/` and `openai.pt`. Formats:

    ctranslate2                 by CTranslate2's converter, float32
    openvino-fp32 openvino-int8 by optimum-intel; int8 weights
    ggml-f16 ggml-f32           written here, in the layout that whisper.cpp reads
    sherpa-onnx                 traced here, with the inputs and outputs that sherpa-onnx expects

Nothing is downloaded. The result appears in `FOLDER/FORMAT` only when it is complete.
"""

import argparse
import base64
import shutil
import struct
import subprocess
import sys
from pathlib import Path

FLOAT32, FLOAT16 = 0, 1  # ggml's numbers of tensor types
N_FFT = 400
LAST_TEXT_TOKEN = 50256


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("format", choices=FORMATS)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--forced-tokens", type=int, help="for sherpa-onnx: decode at most N tokens per window"
    )
    chosen = parser.parse_args()
    made = chosen.folder / f"{chosen.format}.part"
    shutil.rmtree(made, ignore_errors=True)
    FORMATS[chosen.format](chosen.folder, made, chosen)
    made.rename(chosen.folder / chosen.format)


def ctranslate2(folder, made, chosen):
    from ctranslate2.converters import TransformersConverter

    source = str(folder / "huggingface")
    TransformersConverter(
        source, copy_files=["tokenizer.json", "preprocessor_config.json"]
    ).convert(str(made), quantization="float32")


def openvino(folder, made, chosen):
    weights = chosen.format.removeprefix("openvino-")
    command = [Path(sys.executable).with_name("optimum-cli"), "export", "openvino"]
    command += ["--model", folder / "huggingface", "--weight-format", weights]
    command += ["--task", "automatic-speech-recognition-with-past", made]
    subprocess.run(command, check=True)


def ggml(folder, made, chosen):
    """Write whisper.cpp's file: sizes, mel filters, the vocabulary's bytes, and the tensors."""
    import numpy as np
    import torch
    import whisper.audio

    checkpoint = torch.load(folder / "openai.pt", weights_only=True)
    dims, tensors = checkpoint["dims"], checkpoint["model_state_dict"]
    kind = FLOAT16 if chosen.format == "ggml-f16" else FLOAT32
    sizes = ("n_vocab", "n_audio_ctx", "n_audio_state", "n_audio_head", "n_audio_layer")
    sizes += ("n_text_ctx", "n_text_state", "n_text_head", "n_text_layer", "n_mels")
    filters = whisper.audio.mel_filters("cpu", dims["n_mels"]).numpy()
    tokens = text_tokens()
    made.mkdir()
    with (made / "model.bin").open("wb") as file:
        file.write(struct.pack("<i", 0x67676D6C))
        file.write(struct.pack("<11i", *(dims[name] for name in sizes), kind))
        file.write(struct.pack("<2i", *filters.shape) + filters.astype("<f4").tobytes())
        file.write(struct.pack("<i", len(tokens)))
        for token in tokens:
            file.write(struct.pack("<i", len(token)) + token)
        for name, tensor in tensors.items():
            array = tensor.float().numpy()
            if name in ("encoder.conv1.bias", "encoder.conv2.bias"):
                array = array[:, np.newaxis]  # added to every frame
            full = array.ndim < 2 or array.shape[-1] == 1 or "positional_embedding" in name
            as_kind = FLOAT32 if full else kind
            label = name.encode()
            file.write(struct.pack("<3i", array.ndim, len(label), as_kind))
            file.write(struct.pack(f"<{array.ndim}i", *reversed(array.shape)) + label)
            file.write(array.astype("<f2" if as_kind == FLOAT16 else "<f4").tobytes())


def text_tokens():
    """Return the bytes of Whisper's multilingual text tokens, in the order of their ids."""
    import whisper

    path = Path(whisper.__file__).parent / "assets" / "multilingual.tiktoken"
    pairs = (line.split() for line in path.read_text().splitlines())
    ranked = {int(rank): base64.b64decode(token) for token, rank in pairs}
    return [ranked[rank] for rank in range(len(ranked))]


def sherpa_onnx(folder, made, chosen):
    """Trace an encoder that returns cross-attention K and V, and a decoder that updates its cache."""
    import onnx
    import torch
    import whisper
    from sherpa_programs import DecoderWithCache, EncoderWithCrossKV, metadata

    model = whisper.load_model(str(folder / "openai.pt"), device="cpu").eval()
    dims = model.dims
    n_positions = 2 * chosen.forced_tokens if chosen.forced_tokens else dims.n_text_ctx
    made.mkdir()
    mel = torch.randn(1, dims.n_mels, 3000)
    encoder = EncoderWithCrossKV(model)
    with torch.inference_mode():
        cross = encoder(mel)
    cross_names = ["n_layer_cross_k", "n_layer_cross_v"]
    trace(encoder, (mel,), made / "encoder.onnx", ["mel"], cross_names, {"mel": {2: "frames"}})
    cache = [torch.zeros(dims.n_text_layer, 1, n_positions, dims.n_text_state) for _ in range(2)]
    inputs = (torch.tensor([[50258, 50259, 50359]]), *cache, *cross, torch.tensor([1]))
    in_names = ["tokens", "in_n_layer_self_k_cache", "in_n_layer_self_v_cache"]
    out_names = ["logits", "out_n_layer_self_k_cache", "out_n_layer_self_v_cache"]
    dynamic = {"tokens": {1: "n_tokens"}, **{name: {2: "positions"} for name in cross_names}}
    decoder = DecoderWithCache(model)
    path = made / "decoder.onnx"
    trace(decoder, inputs, path, [*in_names, *cross_names, "offset"], out_names, dynamic)
    described = onnx.load(made / "encoder.onnx")
    onnx.helper.set_model_props(described, metadata(dims, n_positions))
    onnx.save(described, made / "encoder.onnx")
    n_listed = dims.n_vocab if chosen.forced_tokens else LAST_TEXT_TOKEN + 1
    (made / "tokens.txt").write_text("".join(token_lines(n_listed)))


def trace(module, inputs, path, input_names, output_names, dynamic_axes):
    import torch

    with torch.inference_mode():
        torch.onnx.export(
            module,
            inputs,
            path,
            input_names=input_names,
            output_names=output_names,
            dynamic_axes=dynamic_axes,
            opset_version=17,
            dynamo=False,
        )


def token_lines(n_listed):
    """List tokens in base64 with their ids. A token that is not listed is not in sherpa-onnx's result."""
    tokens = text_tokens()
    tokens += [f"<|{number}|>".encode() for number in range(len(tokens), n_listed)]
    for number, token in enumerate(tokens[:n_listed]):
        yield f"{base64.b64encode(token).decode()} {number}\n"


FORMATS = {
    "ctranslate2": ctranslate2,
    "openvino-fp32": openvino,
    "openvino-int8": openvino,
    "ggml-f16": ggml,
    "ggml-f32": ggml,
    "sherpa-onnx": sherpa_onnx,
}

if __name__ == "__main__":
    main()
