"""What apps run on NPUs: graphs, what a vendor's compiler makes of them, and the app's loop."""

import ctypes
import importlib.util
import json
import shutil
import struct
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from whisperport import judge
from whisperport.apps.cli.convert import convert as convert_verb
from whisperport.build.compile.lowered_file import READERS
from whisperport.build.layouts import app_with_chip, layout_of, qualcomm_ai_hub, recognized
from whisperport.build.layouts import convert as converting
from whisperport.build.layouts import npu as compiling
from whisperport.build.layouts.convert import ConvertOptions, convert
from whisperport.build.layouts.layout import Compilation, Layout, apps
from whisperport.build.layouts.onnx_graph.file import open_session, run_session
from whisperport.build.layouts.qualcomm_ai_hub import client as hub_client
from whisperport.build.layouts.reading import Files
from whisperport.build.layouts.reference import known_logits, reference_of, spectrogram
from whisperport.build.layouts.sherpa_onnx import npu, npu_client, npu_graphs, qnn, rknn
from whisperport.errors import (
    AudioError,
    BundleError,
    LoweringError,
    MissingPackageError,
    UsageError,
)
from whisperport.program.spec import ProgramSpec, TensorSpec
from whisperport.speech.audio import HOP_LENGTH
from whisperport.speech.audio.pcm import write_wav
from whisperport.speech.text.vocabulary import openai_generation
from whisperport.targets.vendors.qualcomm.context import context_binary
from whisperport.targets.vendors.rockchip.compiler import KEPT, MISCOMPILING_RULE, CompileOptions
from whisperport.verification.clips import shipped_audio, shipped_clips

from ...embedded import unpacked
from ...targets.vendors.rockchip.rknn_bytes import description, rknn_bytes

pytest.importorskip("torch")
pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
import onnx
import onnxruntime as ort
from tests.build.layouts.test_converting import CLIENT
from tests.build.layouts.test_written_graphs import random_checkpoint

from whisperport.model.checkpoint import load_checkpoint

TENSOR_BYTES = 144
# Of 8-bit weights and 16-bit values: 34.6 and 43.7 dB were seen, and 29.5 with a mask of -30000.
LEAST_DB = {"encoder.onnx": 30, "decoder.onnx": 38}
CHIPS = {"sherpa-onnx-qnn": "sm8650", "sherpa-onnx-rknn": "rk3588"}


@pytest.fixture(scope="module")
def checkpoint() -> Any:
    return load_checkpoint("default")


def on_cpu(path: Path, _chip: str) -> Callable[..., Any]:
    """A function that runs a graph as the vendor's simulator runs what was compiled of it."""
    session = ort.InferenceSession(str(path))
    names = [value.name for value in session.get_inputs()]
    return lambda arrays: session.run(None, dict(zip(names, arrays, strict=True)))


def features(samples: Any, n_mels: int) -> Any:
    """Whisper's own, with which the tokens are the checkpoint's."""
    mel = spectrogram(samples, n_mels, 3000, "mel")
    return mel[:, : len(samples) // HOP_LENGTH].T


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Loads the app's loop for a folder, with the graphs on the CPU and Whisper's features."""
    path = Path(npu_client.__file__)
    spec = importlib.util.spec_from_file_location("client", path)
    assert spec is not None
    assert spec.loader is not None
    client = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(client)
    for name, value in (("_qualcomm", on_cpu), ("_rockchip", on_cpu), ("_features", features)):
        monkeypatch.setattr(client, name, value)
    return lambda folder, app, language="en": client.load(
        {"model": str(folder), "device": CHIPS[app], "language": language}
    )


@pytest.mark.parametrize("app", CHIPS)
def test_the_apps_loop_emits_the_tokens_of_the_checkpoint(
    app: str, checkpoint: Any, loop: Callable[..., Any], tmp_path: Path
) -> None:
    # given graphs, and clips, of which one is too short for its tokens
    layout = layout_of(app)
    layout.write(checkpoint, "fp16", tmp_path)
    first, second = shipped_clips(2)
    short = replace(first, samples=first.samples[:16_000])
    clips = (first, second, short)
    # when the app's loop decodes them
    transcribe = loop(tmp_path, app)
    results = [transcribe(clip.samples) for clip in clips]
    # then its tokens are those of the checkpoint under the app's profile
    expected = reference_of(checkpoint, layout.apps[app].profile_of(checkpoint), clips)
    assert [tuple(result["tokens"]) for result in results] == [e.tokens for e in expected]
    assert [result["text"].strip() for result in results] == [e.text.strip() for e in expected]
    assert len(results[0]["tokens"]) > 10
    if app == "sherpa-onnx-qnn":  # 6 tokens a second, with four of the prompt
        assert len(results[2]["tokens"]) == 2


def test_without_english_the_app_takes_the_language_of_the_logits(
    checkpoint: Any, loop: Callable[..., Any], tmp_path: Path
) -> None:
    (clip,) = shipped_clips(1)
    layout_of("sherpa-onnx-qnn").write(checkpoint, "fp16", tmp_path)
    english = loop(tmp_path, "sherpa-onnx-qnn")(clip.samples)

    assert loop(tmp_path, "sherpa-onnx-qnn", "de")(clip.samples) == english
    (tmp_path / "tokens.txt").rename(tmp_path / "tiny-tokens.txt")
    with pytest.raises(SystemExit, match="the prompt of English"):
        loop(tmp_path, "sherpa-onnx-rknn", "de")


def test_the_simulator_gets_what_the_compiler_got() -> None:
    source = Path(npu_client.__file__).read_text()

    assert f'disable_rules=["{MISCOMPILING_RULE}"]' in source
    assert CompileOptions().rules == (MISCOMPILING_RULE,)
    assert f"optimization_level={CompileOptions().optimization}," in source
    assert npu_client.KEPT == KEPT


@pytest.mark.parametrize("is_quantized", [False, True])
def test_the_simulator_starts_from_what_the_compiler_kept(
    is_quantized: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Sdk:
        """The calls of rknn-toolkit2 2.5.0 that the loop makes."""

        def __init__(self, verbose: bool) -> None:
            self.calls: dict[str, Any] = {}

        def __getattr__(self, name: str) -> Callable[..., Any]:
            def called(*given: Any, **named: Any) -> Any:
                self.calls[name] = (*given, *named.values())
                return [self.calls] if name == "inference" else 0

            return called

    package, api = ModuleType("rknn"), ModuleType("rknn.api")
    vars(api)["RKNN"] = Sdk
    monkeypatch.setitem(sys.modules, "rknn", package)
    monkeypatch.setitem(sys.modules, "rknn.api", api)
    monkeypatch.chdir(tmp_path)
    files = [str(tmp_path / f"encoder{suffix}") for suffix in KEPT]
    if is_quantized:
        for file in files:
            Path(file).touch()

    (calls,) = npu_client._rockchip(tmp_path / "encoder.onnx", "rk3588")([])

    assert calls["config"] == ("rk3588", 3, [MISCOMPILING_RULE], "w8a8")
    assert calls.get("hybrid_quantization_step2") == (tuple(files) if is_quantized else None)
    assert calls.get("build") == (None if is_quantized else (False,))


def test_only_a_boards_encoder_is_quantized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a compiler that writes files for a board
    asked = {}

    def compile_nothing(graph: Path, options: Any) -> Any:
        samples = sorted(options.inputs.glob("*/*.npy")) if options.inputs else []
        asked[graph.stem] = options.precision, options.options["rk3588.keep"], len(samples)
        options.out.mkdir(parents=True)
        kept = KEPT if options.precision == "w8a8" else ()
        for suffix in (".rknn", *kept):
            (options.out / f"{graph.stem}{suffix}").write_text(f"{graph.stem}{suffix}")
        program = SimpleNamespace(file=f"{graph.stem}.rknn")
        return SimpleNamespace(folder=options.out, programs=[program])

    monkeypatch.setattr(compiling, "compile_file", compile_nothing)
    # when a folder is compiled in 8 bits
    rknn._compile(job_of("sherpa-onnx-rknn", "rk3588", "w8a8", tmp_path))
    # then only its encoder is, with samples of its input, and what the simulator needs is beside it
    assert asked == {
        "encoder": ("w8a8", "on", compiling.SAMPLES),
        "decoder": ("fp16", "on", 0),
    }
    written = {
        path.name: path.read_text()
        for path in tmp_path.iterdir()
        if path.suffix in (*KEPT, ".rknn")
    }
    assert written == {
        "tiny-encoder.rknn": "encoder.rknn",
        "tiny-decoder.rknn": "decoder.rknn",
        **{f"encoder{suffix}": f"encoder{suffix}" for suffix in KEPT},
    }


@pytest.fixture(scope="module")
def compiled(checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for a phone, compiled with the vendor's package."""
    pytest.importorskip("onnxruntime_qnn", exc_type=ImportError)
    out = tmp_path_factory.mktemp("phone") / "sm8650"
    options = ConvertOptions(chip="sm8650", allow_unverified=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(converting, "is_installed", lambda _app: False)
        converted = convert(checkpoint, "sherpa-onnx-qnn", out, options)
    assert converted.record.chip == "sm8650"
    assert [check.passed for check in converted.record.without_app] == [True]
    return out


def test_a_compiled_folder_has_what_the_app_loads(
    compiled: Path, checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {path.name for path in compiled.iterdir()}
    assert names >= {"encoder.bin", "decoder.bin", "tokens.txt", "encoder.onnx", "decoder.onnx"}
    # the app takes the ids of special tokens from the start of a name
    assert b"tiny_mel" in (compiled / "encoder.bin").read_bytes()
    assert b"tiny_this_self_v_2" in (compiled / "decoder.bin").read_bytes()

    # and is judged rightly, without the app, which runs the files of one chip only
    monkeypatch.setenv("WHISPERPORT_APP_SHERPA_ONNX_QNN", sys.executable)
    judgement = judge(compiled, checkpoint)
    assert judgement
    assert list(judgement.layout.apps) == ["sherpa-onnx-qnn"]
    assert "for one chip" in judgement.runs[-1].reason


def described(path: Path) -> list[tuple[str, str]]:
    """Names and types of the inputs and outputs of a context binary, as the vendor's library states them.

    The app reads a file by the same call. The offsets are those of onnxruntime-qnn 2.7.0, found by trying.
    """
    import onnxruntime_qnn

    library = ctypes.CDLL(
        str(Path(onnxruntime_qnn.get_library_path()).with_name("libQnnSystem.so"))
    )
    providers, count = ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_uint32()
    assert (
        library.QnnSystemInterface_getProviders(ctypes.byref(providers), ctypes.byref(count)) == 0
    )
    create, read = struct.unpack_from("<QQ", ctypes.string_at(providers[0], 48), 32)
    pointer, handle, info = ctypes.c_void_p, ctypes.c_void_p(), ctypes.c_void_p()
    assert ctypes.CFUNCTYPE(ctypes.c_uint64, pointer)(create)(ctypes.addressof(handle)) == 0
    content, size = path.read_bytes(), ctypes.c_uint64()
    call = ctypes.CFUNCTYPE(ctypes.c_uint64, pointer, pointer, ctypes.c_uint64, pointer, pointer)
    places = ctypes.addressof(info), ctypes.addressof(size)
    buffer = ctypes.create_string_buffer(content, len(content))
    assert call(read)(handle, ctypes.addressof(buffer), len(content), *places) == 0

    def number(address: int, kind: Any = ctypes.c_uint64) -> int:
        return int(kind.from_address(address).value)

    assert info.value is not None
    assert number(info.value, ctypes.c_uint32) == 3  # version of the structure
    graph = number(info.value + 8 + 96) + 8
    types = {0x232: "float32", 0x032: "int32"}
    tensors = []
    for side in (16, 32):
        n, first = number(graph + side - 8, ctypes.c_uint32), number(graph + side)
        for tensor in range(first, first + n * TENSOR_BYTES, TENSOR_BYTES):
            name = ctypes.string_at(number(tensor + 16)).decode()
            tensors.append((name, types[number(tensor + 32, ctypes.c_uint32)]))
    return tensors


def test_the_vendors_library_states_the_tensors_that_the_app_asks_for(compiled: Path) -> None:
    layers = [f"{side}_{layer}" for layer in range(3) for side in "kv"]
    caches = [f"tiny_{kind}_{name}" for kind in ("self", "cross") for name in layers]
    integers = {"tiny_tokens", "tiny_offset", "tiny_mask"}

    assert described(compiled / "encoder.bin") == [
        ("tiny_mel", "float32"),
        *((f"cross_{name}", "float32") for name in layers),
    ]
    names = ["tiny_tokens", *caches, "tiny_offset", "tiny_mask", "tiny_logits"]
    names += [f"tiny_this_self_{name}" for name in layers]
    assert described(compiled / "decoder.bin") == [
        (name, "int32" if name in integers else "float32") for name in names
    ]


def broken(folder: Path, layout: Layout = qnn.LAYOUT) -> list[tuple[str, str]]:
    (rule,) = layout.rules
    return [(problem.file, problem.reason) for problem in rule.problems(Files(folder))]


def test_a_file_that_is_not_of_its_graph_is_named(compiled: Path, tmp_path: Path) -> None:
    exchanged = shutil.copytree(compiled, tmp_path / "exchanged")
    shutil.copy(compiled / "encoder.bin", exchanged / "decoder.bin")
    lacking = shutil.copytree(compiled, tmp_path / "lacking")
    (lacking / "decoder.bin").unlink()

    assert broken(compiled) == []
    assert broken(exchanged) == [
        ("decoder.bin", "it does not name 'tiny_tokens', which the app asks for")
    ]
    assert broken(lacking) == [("decoder.bin", "the file is missing")]
    (lacking / "decoder.bin").touch()
    assert broken(lacking) == [("decoder.bin", "it is empty")]


def test_a_board_is_given_files_of_its_size(checkpoint: Any, tmp_path: Path) -> None:
    # given the graphs, and files that state the same inputs and outputs, but for one axis
    rknn.LAYOUT.write(checkpoint, "fp16", tmp_path)
    for name in ("encoder", "decoder"):
        spec, _ = READERS[".onnx"](tmp_path / f"{name}.onnx")
        if name == "decoder":
            tokens, cache, *others = spec.inputs
            spec = replace(spec, inputs=(tokens, replace(cache, shape=(1, 447, 128)), *others))
        (tmp_path / f"huge-{name}.rknn").write_bytes(rknn_bytes(description(spec)))

    first, *further = broken(tmp_path, rknn.LAYOUT)

    assert first == ("huge-encoder.rknn", "the app knows no size 'huge'")
    assert [file for file, _ in further] == ["huge-decoder.rknn", "huge-decoder.rknn"]
    assert "[1, 447, 128]" in further[1][1]


def published(folder: Path, size: str = "tiny.en") -> tuple[ProgramSpec, ProgramSpec]:
    """Write files for a board as the app's authors publish them: without graphs, their names with a size.

    Source: k2-fsa/sherpa-onnx@7ac6654, scripts/whisper/rknn/tiny-en-onnx-info.md.
    """
    layers = [f"{side}_{layer}" for layer in range(4) for side in "kv"]
    cross = [(f"cross_{name}", (1, 1500, 384)) for name in layers]
    caches = [(f"self_{name}", (1, 448, 384)) for name in layers]
    rows = [(f"this_self_{name}", (1, 1, 384)) for name in layers]
    inputs = [("tokens", (1, 1)), *caches, *cross, ("offset", (1,)), ("mask", (448,))]

    def tensors(pairs: Any, prefix: str = "tiny.en-") -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(f"{prefix}{name}", shape) for name, shape in pairs)

    encoder = ProgramSpec("encoder", tensors([("mel", (1, 80, 3000))]), tensors(cross, ""))
    logits = ("logits", (1, 1, 51864))
    decoder = ProgramSpec("decoder", tensors(inputs), tensors([logits, *rows]))
    for spec in (encoder, decoder):
        (folder / f"{size}-{spec.name}.rknn").write_bytes(rknn_bytes(description(spec)))
    (folder / f"{size}-tokens.txt").write_text("IQ== 0\n")
    return encoder, decoder


def test_published_files_for_a_board_are_judged_by_names_order_and_sizes(
    checkpoint: Any, tmp_path: Path
) -> None:
    encoder, decoder = published(tmp_path)

    judgement = judge(tmp_path)
    assert judgement
    assert list(judgement.layout.apps) == ["sherpa-onnx-rknn"]
    assert judgement.precision == "fp16"

    # in 8 bits, also if only one of them is
    path = tmp_path / "tiny.en-decoder.rknn"
    for spec, type in ((decoder, "int8"), (decoder, ""), (encoder, "int8")):
        content = rknn_bytes(description(spec, type=type))
        (tmp_path / f"tiny.en-{spec.name}.rknn").write_bytes(content)
        precision = "w8a8" if type else "fp16"
        assert (judge(tmp_path).precision, bool(judge(tmp_path))) == (precision, True)

    # with another checkpoint, whose sizes are expected
    judgement = judge(tmp_path, checkpoint)
    assert not judgement
    assert judgement.identity is None
    assert [p.file for p in judgement.problems] == ["tiny.en-encoder.rknn", "tiny.en-decoder.rknn"]
    assert "[1, 1500, 128]" in judgement.problems[0].reason

    # with two inputs in another order
    first, key, value, *others = decoder.inputs
    exchanged = replace(decoder, inputs=(first, value, key, *others))
    path.write_bytes(rknn_bytes(description(exchanged)))
    ((file, reason),) = broken(tmp_path, rknn.LAYOUT)
    assert file == path.name
    assert "'tiny.en-self_v_0'" in reason
    assert "'tiny.en-self_k_0'" in reason

    # with a part of the inputs only, and damaged
    path.write_bytes(rknn_bytes(description(replace(decoder, inputs=decoder.inputs[:1]))))
    problems = broken(tmp_path, rknn.LAYOUT)
    assert len(problems) == 2
    assert all("not those that the app expects" in reason for _, reason in problems)
    path.write_bytes(b"RKNN")
    assert "does not begin as a compiled file" in broken(tmp_path, rknn.LAYOUT)[-1][1]


def test_published_files_of_a_size_that_the_app_does_not_know_are_named(tmp_path: Path) -> None:
    published(tmp_path, "large-v3")

    assert broken(tmp_path, rknn.LAYOUT) == [
        (f"large-v3-{name}.rknn", "the app knows no size 'large-v3'")
        for name in ("encoder", "decoder")
    ]


def test_files_for_a_phone_are_judged_without_their_graphs(
    compiled: Path, checkpoint: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "phone"
    folder.mkdir()
    for name in ("encoder.bin", "decoder.bin", "tokens.txt"):
        shutil.copy(compiled / name, folder)

    judgement = judge(folder, checkpoint)
    assert judgement
    assert list(judgement.layout.apps) == ["sherpa-onnx-qnn"]
    assert judgement.identity is None

    shutil.copy(folder / "decoder.bin", folder / "encoder.bin")
    assert broken(folder) == [
        ("encoder.bin", "it does not name 'tiny_mel', which the app asks for")
    ]
    (folder / "decoder.bin").write_bytes(b"something else")
    with pytest.raises(UsageError, match="has the files of no app"):
        judge(folder)


def test_a_checkpoint_with_other_ids_is_rejected(checkpoint: Any) -> None:
    later, english = openai_generation(51_866), openai_generation(51_864)

    assert npu.unsupported(checkpoint, "fp16") == ""
    assert npu.unsupported(replace(checkpoint, generation=english), "fp16") == ""
    why = npu.unsupported(replace(checkpoint, generation=later), "fp16")
    assert why.startswith("the id of <|notimestamps|> is 50364; the app has 50363")
    assert npu.size_of(replace(checkpoint, generation=english)) == "tiny.en"


@pytest.mark.parametrize(
    ("app", "chip", "what"),
    [
        ("sherpa-onnx-qnn", "", "sherpa-onnx-qnn needs a chip"),
        ("sherpa-onnx-qnn", "rk3588", "sherpa-onnx-qnn has no chip `rk3588`"),
        ("faster-whisper", "sm8650", "faster-whisper has no chip `sm8650`"),
    ],
)
def test_a_chip_that_the_app_does_not_have_is_rejected(
    app: str, chip: str, what: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as error:
        convert("default", app, tmp_path / "out", ConvertOptions(chip=chip))

    assert error.value.what == what
    assert "--chips" in error.value.hint


def test_a_context_binary_is_read_from_a_compiled_file_only(tmp_path: Path) -> None:
    path = tmp_path / "step.qnn"
    path.write_bytes(b"no protobuf")

    with pytest.raises(BundleError):
        context_binary(path)


@pytest.fixture
def compilations(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> list[tuple[str, ...]]:
    """The chips of compilations that were done, by no compiler, for an app that answers rightly."""
    done: list[tuple[str, ...]] = []

    def compile_nothing(job: Compilation) -> None:
        done.append(job.app.devices)
        for name in ("encoder", "decoder"):
            content = (job.folder / f"{name}.onnx").read_bytes()
            (job.folder / f"{name}.bin").write_bytes(content)

    app = qnn.LAYOUT.apps["sherpa-onnx-qnn"]
    (tmp_path / "clips").mkdir()
    shutil.copy(shipped_audio()[0].path, tmp_path / "clips")
    expected = reference_of(checkpoint, app.profile_of(checkpoint), shipped_clips(1))
    logits = known_logits(checkpoint, app.profile_of(checkpoint), shipped_clips(1), expected)
    answers = [{"text": emitted.text, "tokens": emitted.tokens} for emitted in expected]
    (tmp_path / "client.py").write_text(CLIENT)
    (tmp_path / "answers.json").write_text(json.dumps(answers))
    changed = replace(app, compile=compile_nothing, module="json", script=tmp_path / "client.py")
    monkeypatch.setattr(qnn, "LAYOUT", replace(qnn.LAYOUT, apps=apps(changed)))
    monkeypatch.setattr(converting, "reference_of", lambda *_: expected)
    monkeypatch.setattr(converting, "known_logits", lambda *_: logits)
    monkeypatch.setattr(converting, "with_heads", lambda opened: opened)
    verb = import_module("whisperport.apps.cli.convert")
    monkeypatch.setattr(verb, "run_watched", lambda function, *given, **_: function(*given))
    return done


def test_chips_that_are_verified_are_kept(
    compilations: list[tuple[str, ...]], tmp_path: Path
) -> None:
    # given one of two chips that is done
    (tmp_path / "model").mkdir()
    options = [
        str(unpacked(tmp_path / "model")),
        "--for",
        "sherpa-onnx-qnn",
        "--out",
        str(tmp_path / "phones"),
        "--json",
    ]
    options += ["--verify-with", str(tmp_path / "clips")]
    run = partial(CliRunner().invoke, convert_verb)
    assert run([*options, "--chips", "sm8550"]).exit_code == 0
    assert compilations == [("sm8550",)]
    # when both are asked for
    result = run([*options, "--chips", "sm8550,sm8650"])
    # then the other is compiled, and both are in the report
    assert compilations == [("sm8550",), ("sm8650",)]
    report = json.loads(result.stdout)
    assert [(entry["chip"], Path(entry["path"]).name) for entry in report] == [
        ("sm8550", "sm8550"),
        ("sm8650", "sm8650"),
    ]
    # and one that was verified with other audio is verified again
    other = tmp_path / "clips" / shipped_audio()[0].path.name
    write_wav(str(other), np.zeros(16_000, np.int16))
    run([*options, "--chips", "sm8650"])
    assert compilations[2:] == [("sm8650",)]
    shutil.copy(shipped_audio()[0].path, tmp_path / "clips")
    # and one with other calibration audio is compiled again, with the same it is not
    in_8_bits = [*options, "--precision", "w8a16", "--chips", "sm8750"]
    calibrated = [*in_8_bits, "--calibration", str(tmp_path / "speech")]
    (tmp_path / "speech").mkdir()
    for content in (b"one", b"one", b"two"):
        (tmp_path / "speech/one.wav").write_bytes(content)
        assert run(calibrated).exit_code == 0
    assert run(in_8_bits).exit_code == 0
    assert compilations[3:] == [("sm8750",)] * 3
    # and one that has changed since is written again
    (tmp_path / "phones/sm8550/tokens.txt").write_text("x 0\n")
    assert run([*options, "--chips", "sm8550"]).exit_code == 0
    assert compilations[6:] == [("sm8550",)]
    # and one of another tokenizer
    (tokenizer,) = (tmp_path / "model").glob("tokenizer.json")
    tokenizer.write_bytes(tokenizer.read_bytes() + b"\n")
    assert run([*options, "--chips", "sm8550"]).exit_code == 0
    assert compilations[7:] == [("sm8550",)]


def test_a_decoder_of_another_size_is_named_for_boards(checkpoint: Any) -> None:
    (warning,) = layout_of("sherpa-onnx-rknn").warnings(checkpoint)

    assert "this decoder has 3 layers, width 128 and 448 positions" in warning
    dims = replace(checkpoint.dims, n_text_layer=4, n_text_state=384, n_audio_state=384)
    assert not list(layout_of("sherpa-onnx-rknn").warnings(replace(checkpoint, dims=dims)))


def test_large_v3_is_rejected_before_it_is_written(checkpoint: Any, tmp_path: Path) -> None:
    later = replace(checkpoint, generation=openai_generation(51_866))

    options = ConvertOptions(chip="rk3588", allow_unverified=True)
    with pytest.raises(LoweringError) as error:
        convert(later, "sherpa-onnx-rknn", tmp_path / "out", options)

    assert "as OpenAI's models before large-v3" in error.value.why
    assert not (tmp_path / "out").exists()


def test_the_name_of_an_app_stands_for_those_on_npus() -> None:
    assert app_with_chip("sherpa-onnx", "rk3588") == "sherpa-onnx-rknn"
    assert app_with_chip("sherpa-onnx", "sm8650") == "sherpa-onnx-qnn"
    assert app_with_chip("sherpa-onnx-qnn", "rk3588") == "sherpa-onnx-qnn"
    assert app_with_chip("sherpa-onnx", "") == "sherpa-onnx"


@pytest.mark.parametrize(
    ("chip", "chosen", "what", "hint"),
    [
        ("qcm6490", {"precision": "fp16"}, "has no fp16 on qcm6490", "choose one of w8a16"),
        ("sm8450", {"precision": "w8a16"}, "has no w8a16 on sm8450", "choose one of fp16"),
        ("sm8650", {"precision": "w8"}, "has no precision `w8`", "choose one of fp16, w8a16"),
        ("rk3588", {"precision": "w8a16"}, "has no precision `w8a16`", "choose one of fp16, w8a8"),
        ("sm8650", {"calibration": Path()}, "cannot be used here", "omit `--calibration`"),
    ],
)
def test_a_precision_that_the_chip_does_not_have_is_rejected(
    chip: str, chosen: dict[str, Any], what: str, hint: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as error:
        convert("default", "sherpa-onnx", tmp_path / "out", ConvertOptions(chip=chip, **chosen))

    assert what in error.value.what
    assert error.value.hint == hint


def test_all_chips_are_checked_before_the_first_is_compiled(
    compilations: list[tuple[str, ...]], tmp_path: Path
) -> None:
    options = ["default", "--for", "sherpa-onnx", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(convert_verb, [*options, "--chips", "sm8650,rk3588,rk1"])

    assert isinstance(result.exception, UsageError)
    assert result.exception.what == "sherpa-onnx has no chip `rk1`"
    assert compilations == []


def job_of(app: str, chip: str, precision: str, folder: Path) -> Compilation:
    """The graphs of a checkpoint in miniature, to be compiled for a chip."""
    checkpoint = random_checkpoint(n_mels=80, n_audio_ctx=100)
    layout_of(app).write(checkpoint, precision, folder)
    return Compilation(
        app=layout_of(app).apps[app].on(chip),
        checkpoint=checkpoint,
        precision=precision,
        language="en",
        folder=folder,
        calibration=None,
    )


def test_eight_bits_are_calibrated_and_compiled(tmp_path: Path) -> None:
    # given graphs for a chip without floating point, whose token embedding is multiplied by as well
    pytest.importorskip("onnxruntime_qnn", exc_type=ImportError)
    job = job_of("sherpa-onnx-qnn", "qcm6490", "w8a16", tmp_path)
    # when they are compiled
    assert job.app.compile is not None
    job.app.compile(job)
    # then what the app loads has the inputs and outputs of the graphs, in float32
    names = {name for name, _ in described(tmp_path / "decoder.bin")}
    assert {"tiny_tokens", "tiny_mask", "tiny_logits", "tiny_this_self_v_1"} <= names
    assert {kind for _, kind in described(tmp_path / "encoder.bin")} == {"float32"}
    # and the simulator computes most of the signal, also where much of the cache is empty
    client = importlib.import_module(npu_client.__name__)
    mel = np.random.default_rng(0).normal(size=(80, 200)).astype(np.float32)
    loop, (encoder, decoder) = (
        npu_graphs.LOOP,
        map(open_session, map(tmp_path.joinpath, compiling.GRAPHS)),
    )
    fed = loop.inputs(encoder, mel)
    decoding = loop.begin(decoder, run_session(encoder, fed))
    for token in (50, 51, 53, 57):
        decoding.logits(decoding.inputs(token))
    for graph, inputs in (("encoder.onnx", fed), ("decoder.onnx", decoding.inputs(7))):
        arrays = [*inputs.values()]
        found = client._qualcomm(tmp_path / graph, "qcm6490")(arrays)
        expected = on_cpu(tmp_path / graph, "")(arrays)
        for actual, exact in zip(found, expected, strict=True):
            noise = np.linalg.norm(actual - exact)
            assert LEAST_DB[graph] < 20 * np.log10(np.linalg.norm(exact) / noise) < 80


def test_without_the_compiler_the_app_is_to_be_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: Any) -> None:
        raise MissingPackageError("not compiled yet", hint="copy a folder")

    monkeypatch.setattr(compiling, "compile_file", missing)
    with pytest.raises(MissingPackageError) as error:
        rknn._compile(job_of("sherpa-onnx-rknn", "rk3588", "fp16", tmp_path))

    assert error.value.hint == "whisperport apps --install sherpa-onnx-rknn"


def test_the_log_of_a_compiler_that_failed_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def fail(_graph: Path, options: Any) -> None:
        options.work.mkdir(parents=True)
        log = options.work / "compile.log"
        log.write_text("what the vendor printed")
        raise LoweringError("it failed", hint=f"the complete log is in {log}")

    monkeypatch.setattr(compiling, "compile_file", fail)
    (tmp_path / "graphs").mkdir()
    with pytest.raises(LoweringError) as error:
        rknn._compile(job_of("sherpa-onnx-rknn", "rk3588", "fp16", tmp_path / "graphs"))

    named = Path(error.value.hint.rpartition(" ")[2])
    assert named.read_text() == "what the vendor printed"
    assert [path.name for path in tmp_path.iterdir() if path != named] == ["graphs"]


def test_ai_hubs_decoder_is_compiled_in_eight_bits(tmp_path: Path) -> None:
    """Its cache is read by the attention, and returned: the provider's optimizer mixed up their types."""
    pytest.importorskip("onnxruntime_qnn", exc_type=ImportError)
    job = job_of("qualcomm-ai-hub", "sm8650", "w8a16", tmp_path)

    assert job.app.compile is not None
    job.app.compile(job)

    assert broken(tmp_path, qualcomm_ai_hub.LAYOUT) == []


def test_too_little_audio_does_not_calibrate(tmp_path: Path) -> None:
    job = job_of("sherpa-onnx-qnn", "sm8650", "w8a16", tmp_path)
    (tmp_path / "audio").mkdir()
    write_wav(str(tmp_path / "audio/silence.wav"), np.zeros(16_000, np.int16))

    with pytest.raises(AudioError) as error:
        qnn._compile(replace(job, calibration=tmp_path / "audio"))

    assert "too little audio to calibrate sherpa-onnx-qnn in w8a16" in error.value.what
    assert f"{compiling.SAMPLES} windows" in error.value.why
    assert "0 can be used" in error.value.why
    assert "silent" in error.value.why


def test_the_decoder_is_calibrated_at_one_token_after_the_other() -> None:
    class Text:
        """A text of three tokens after a prompt of two."""

        offset = 0

        def inputs(self, token: int) -> dict[str, Any]:
            return {"token": token, "offset": self.offset}

        def logits(self, _inputs: dict[str, Any]) -> Any:
            self.offset += 1
            following = {2: 7, 3: 8, 4: 9, 5: 0}.get(self.offset, 3)
            return np.eye(10)[[following]]

    given = [compiling._token_inputs(Text(), i, [5, 6], 0)["token"] for i in range(7)]

    assert given == [5, 6, 7, 8, 9, 9, 9]


class OnCpu:
    """A session of what the simulator gets, on the CPU: the graph beside the folder of a compiled file."""

    def __init__(self, folder: Path) -> None:
        name = folder.name.removeprefix("HfWhisper").lower()
        self.run = ort.InferenceSession(str(folder.with_name(f"{name}.onnx"))).run


def test_ai_hubs_loop_emits_the_tokens_of_the_checkpoint(
    checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    layout = layout_of("qualcomm-ai-hub")
    layout.write(checkpoint, "fp16", tmp_path)
    monkeypatch.setattr(hub_client, "_session", OnCpu)
    clips = shipped_clips(2)
    # when the app's loop decodes clips, with transformers' own features
    transcribe = hub_client.load({"model": str(tmp_path)})
    results = [transcribe(clip.samples) for clip in clips]
    # then its tokens are those of the checkpoint without a prompt
    expected = reference_of(
        checkpoint, layout.apps["qualcomm-ai-hub"].profile_of(checkpoint), clips
    )
    assert [tuple(result["tokens"]) for result in results] == [e.tokens for e in expected]
    assert [result["text"] for result in results] == [e.text.strip() for e in expected]


@pytest.fixture(scope="module")
def of_ai_hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its files, compiled for a laptop with the vendor's package."""
    pytest.importorskip("onnxruntime_qnn", exc_type=ImportError)
    folder = tmp_path_factory.mktemp("laptop")
    job = job_of("qualcomm-ai-hub", "sc8380xp", "fp16", folder)
    assert job.app.compile is not None
    job.app.compile(job)
    return folder


def test_ai_hubs_files_are_compiled_and_judged(of_ai_hub: Path, tmp_path: Path) -> None:
    shutil.copytree(of_ai_hub, tmp_path, dirs_exist_ok=True)
    layout = layout_of("qualcomm-ai-hub")
    # then each file has the signature of its graph
    assert recognized(Files(tmp_path)) is layout
    assert broken(tmp_path, layout) == []
    # and one of the other graph is named
    encoder, decoder = (tmp_path / f"HfWhisper{name}/model.onnx" for name in ("Encoder", "Decoder"))
    shutil.copy(encoder, decoder)
    ((file, reason),) = broken(tmp_path, layout)
    assert file == "HfWhisperDecoder/model.onnx"
    assert "input_features" in reason


def test_ai_hubs_files_are_judged_without_their_graphs(of_ai_hub: Path, tmp_path: Path) -> None:
    shutil.copytree(of_ai_hub, tmp_path, dirs_exist_ok=True)
    for graph in compiling.GRAPHS:
        (tmp_path / graph).unlink()
    judgement, layout = judge(tmp_path), layout_of("qualcomm-ai-hub")
    assert judgement
    assert judgement.layout is layout

    # also with the context binary in a file of its own
    encoder, decoder = (tmp_path / f"HfWhisper{name}/model.onnx" for name in ("Encoder", "Decoder"))
    model = onnx.load(encoder)
    attributes = {attribute.name: attribute for attribute in model.graph.node[0].attribute}
    attributes["embed_mode"].i = 0
    (tmp_path / "model.bin").touch()
    for name, reason in (("model.bin", ""), ("../model.bin", "not in its folder")):
        encoder.with_name("model.bin").write_bytes(b"binary")
        attributes["ep_cache_context"].s = name.encode()
        onnx.save(model, encoder)
        assert [reason in why for _, why in broken(tmp_path, layout)] == [True] * bool(reason)

    # and one that is another's is named
    shutil.copy(decoder, encoder)
    assert len(broken(tmp_path, layout)) == 2


def test_a_decoder_of_fewer_positions_is_rejected(checkpoint: Any) -> None:
    layout = layout_of("qualcomm-ai-hub")
    short = replace(checkpoint, dims=replace(checkpoint.dims, n_text_ctx=100))

    assert layout.unsupported(checkpoint, "fp16") == ""
    assert layout.unsupported(short, "fp16").startswith("its decoder has 100 positions")
