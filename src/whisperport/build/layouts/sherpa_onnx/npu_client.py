"""Do what sherpa-onnx does on a device, in the simulator of the chip's vendor; see `run_client.py`.

The app runs on devices only. This is its loop once more, in Python: k2-fsa/sherpa-onnx@634265c,
csrc/qnn/offline-whisper-model-qnn.cc (`Run`), csrc/math.cc (`NormalizeWhisperFeatures`), and
scripts/whisper/rknn/test_on_rk3588_board.py.
"""

import atexit
import base64
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

PROVIDER = "QNNExecutionProvider"
MULTILINGUAL, ENGLISH = (50258, 50259, 50359, 50363), (50257, 50362)  # prompts
LAST_LANGUAGE = 50358  # the first id after those of languages
TOKENS_PER_S, FRAMES_PER_S = 6, 100
MOST_OFFSETS = 100  # of the script for Rockchip's boards
TAIL = 50  # empty frames of it, after audio that is too long
KEPT = (".model", ".data", ".cfg")  # what Rockchip's compiler kept of a quantized graph
Run = Callable[[Sequence[Any]], list[Any]]


def versions() -> dict[str, str]:
    names = ("onnxruntime-qnn", "rknn-toolkit2", "kaldi-native-fbank")
    installed = {}
    for name in names:
        try:
            installed[name] = version(name)
        except ImportError:  # `PackageNotFoundError`: the other vendor's
            continue
    return installed


def load(job: dict[str, Any]) -> Callable[[Any], dict[str, Any]]:
    folder = Path(job["model"])
    chip = job["device"]
    is_rockchip = chip.startswith("rk")
    open_graph = _rockchip if is_rockchip else _qualcomm
    encode, decode = (open_graph(folder / f"{name}.onnx", chip) for name in ("encoder", "decoder"))
    shapes = _shapes(folder / "decoder.onnx")
    (tokens_file,) = folder.glob("*tokens.txt")
    texts = _texts(tokens_file)
    prompt = list(MULTILINGUAL if len(texts) == MULTILINGUAL[0] - 1 else ENGLISH)
    is_named = job["language"] == "en" or len(prompt) < len(MULTILINGUAL)
    if is_rockchip and not is_named:
        raise SystemExit("the app's script for these boards has the prompt of English")
    mel_shape = _shapes(folder / "encoder.onnx")[0]

    def transcribe(samples: Any) -> dict[str, Any]:
        mel = _features(samples, min(mel_shape[1:]))
        n_frames, window = len(mel), max(mel_shape[1:])
        most = min(n_frames * TOKENS_PER_S // FRAMES_PER_S, shapes[-1][0] // 2)
        if is_rockchip:
            most = MOST_OFFSETS
            if n_frames > window:
                mel = mel[: window - TAIL]
        mel = np.pad(mel[:window], ((0, max(0, window - len(mel))), (0, 0)))
        audio = encode([(mel.T if is_rockchip else mel)[None]])
        if not is_rockchip:
            audio = [rows.transpose(0, 2, 1) for rows in audio]
        tokens = _decoded(decode, shapes, audio, prompt if is_named else [], most, is_rockchip)
        text = b"".join(texts.get(token, b"") for token in tokens)
        return {"text": text.decode("utf-8", "replace"), "tokens": tokens}

    return transcribe


def _decoded(
    decode: Run,
    shapes: Any,
    audio: Sequence[Any],
    prompt: Sequence[int],
    most: int,
    positions_first: bool,
) -> list[int]:
    """Return the tokens with the highest logits, until the end of the text, or `most` with the prompt.

    Without a prompt, it is that of a multilingual model, with the language that the logits name.
    """
    caches = [np.zeros(shape, np.float32) for shape in shapes[1 : 1 + len(audio)]]
    mask = np.ones(shapes[-1], np.int32)
    tokens: list[int] = []
    offset = 0

    def run(token: int) -> Any:
        nonlocal offset
        places = np.array([offset], np.int32), mask
        logits, *rows = decode([np.array([[token]], np.int32), *caches, *audio, *places])
        for cache, row in zip(caches, rows):  # noqa: B905  # Python 3.9 has no `strict`
            if positions_first:
                cache[0, offset] = row.reshape(-1)
            else:
                cache[0, :, offset] += row.reshape(-1)
        mask[offset] = 0
        offset += 1
        return logits.reshape(-1)

    if not prompt:
        start, first, *others = MULTILINGUAL
        language = int(run(start)[first:LAST_LANGUAGE].argmax()) + first
        mask[:], offset, prompt = 1, 0, (start, language, *others)
        for cache in caches:
            cache[:] = 0
    for token in prompt:
        following = int(run(token).argmax())
    while offset < most and following != prompt[0] - 1:
        tokens.append(following)
        following = int(run(following).argmax())
    return tokens


def _features(samples: Any, n_mels: int) -> Any:
    """Return the normalized spectrogram (frames, n_mels) of the app."""
    import kaldi_native_fbank as knf

    options = knf.WhisperFeatureOptions()
    options.dim = n_mels
    filters = knf.OnlineWhisperFbank(options)
    filters.accept_waveform(16_000, samples)
    filters.input_finished()
    frames = [filters.get_frame(i) for i in range(filters.num_frames_ready)]
    logs = np.log10(np.maximum(np.stack(frames), 1e-10))
    return ((np.maximum(logs, logs.max() - 8) + 4) / 4).astype(np.float32)


def _texts(path: Path) -> dict[int, bytes]:
    lines = (line.rpartition(" ") for line in path.read_text(encoding="ascii").splitlines())
    return {int(token): base64.b64decode(text) for text, _, token in lines}


def _shapes(path: Path) -> list[tuple[int, ...]]:
    """Return the shapes of a graph's inputs."""
    import onnx

    graph = onnx.load(str(path), load_external_data=False).graph
    return [tuple(d.dim_value for d in value.type.tensor_type.shape.dim) for value in graph.input]


def _qualcomm(path: Path, _chip: str) -> Run:
    """Load the context binary beside a graph, and return a function that runs it."""
    import onnx
    import onnxruntime
    import onnxruntime_qnn

    if PROVIDER not in {device.ep_name for device in onnxruntime.get_ep_devices()}:
        library = onnxruntime_qnn.get_library_path()
        onnxruntime.register_execution_provider_library(PROVIDER, library)
    devices = [device for device in onnxruntime.get_ep_devices() if device.ep_name == PROVIDER]
    graph = onnx.load(str(path), load_external_data=False).graph
    names = [[value.name for value in side] for side in (graph.input, graph.output)]
    node = onnx.helper.make_node("EPContext", names[0], names[1], domain="com.microsoft")
    attributes = {
        "embed_mode": 1,
        "ep_cache_context": path.with_suffix(".bin").read_bytes(),
        "main_context": 1,
        "source": PROVIDER,
    }
    for name, value in attributes.items():
        node.attribute.append(onnx.helper.make_attribute(name, value))
    body = onnx.helper.make_graph([node], "context", graph.input, graph.output)
    opset = onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("com.microsoft", 1)
    model = onnx.helper.make_model(body, opset_imports=opset, ir_version=8)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    options.add_provider_for_devices(
        devices[:1], {"backend_path": onnxruntime_qnn.get_qnn_htp_path()}
    )
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, enable_fallback=0)
    return lambda arrays: list(session.run(names[1], dict(zip(names[0], arrays))))  # noqa: B905


def _rockchip(path: Path, chip: str) -> Run:
    """Build a graph as its file beside it was built, and return a function that runs it.

    The simulator does not load files. What the compiler kept of a quantized graph has its ranges.
    """
    from rknn.api import RKNN

    os.environ.setdefault("TQDM_DISABLE", "1")
    here = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, here, ignore_errors=True)
    os.chdir(here)  # the compiler writes files there
    built = RKNN(verbose=False)
    built.config(
        target_platform=chip,
        optimization_level=3,
        disable_rules=["convert_exmatmul_to_mul"],
        quantized_dtype="w8a8",
    )
    kept = [path.with_suffix(suffix) for suffix in KEPT]
    if kept[0].is_file():
        codes = [built.hybrid_quantization_step2(*map(str, kept))]
    else:
        codes = [built.load_onnx(model=str(path)), built.build(do_quantization=False)]
    if any(codes) or built.init_runtime():
        raise SystemExit(f"rknn-toolkit2 could not build {path.name}: {codes}")

    def run(arrays: Sequence[Any]) -> list[Any]:
        return list(built.inference(inputs=list(arrays), data_format=["nchw"] * len(arrays)))

    return run
