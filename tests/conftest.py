"""Fixtures: tiny Whisper checkpoints with random weights, made with transformers and openai-whisper.

Width 64, 2 heads, 2 + 2 layers, 100 encoder positions (2 s), vocabulary 51865 unless overridden.
All weights are random, including biases and norms, so that a missing or exchanged bias changes the outputs.
"""

import contextlib
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from .without_torch import IS_ABSENT

if IS_ABSENT:
    from .without_torch import (  # noqa: F401
        pytest_configure,
        pytest_ignore_collect,
        pytest_make_collect_report,
        pytest_runtest_makereport,
        pytest_runtest_setup,
        pytest_terminal_summary,
    )
else:
    import torch

Make = Callable[..., Any]

# The default profile tests the same cases in every run, without deadlines, so that results do not depend
# on chance or on a loaded machine. Search for new cases with `pytest --hypothesis-profile=new`.
hypothesis.settings.register_profile("same", derandomize=True, deadline=None)
hypothesis.settings.register_profile("new", deadline=None)
hypothesis.settings.load_profile("same")

# A shell starts a job in the background with SIGINT ignored, and all its children inherit that. The tests
# of Ctrl-C mean a program that was started in the foreground.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Exempt all that is loaded when the tests were found from garbage collection.

    These are 800,000 objects of libraries and tests. Lowering collects garbage after each program, so tests
    of it take 13 % less CPU time (measured). Another 5 % are of the small collections that Python makes by
    itself, and of what jax does in each; they are made more rarely.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000)
        gc.enable()


class _Imported:
    """Exempts also the libraries that tests import later: as many objects again.

    Without it, an export of the micro model takes 0.7 s of CPU time instead of 0.2 s when many tests ran
    before it (measured).
    """

    def __init__(self) -> None:
        self._n_modules = len(sys.modules)

    def pytest_runtest_setup(self) -> None:
        if len(sys.modules) > self._n_modules + 100:
            gc.collect()  # what is garbage now would never be freed
            gc.freeze()
            self._n_modules = len(sys.modules)


def pytest_collection_finish(session: pytest.Session) -> None:
    session.config.pluginmanager.register(_Imported())


@pytest.fixture(autouse=True)
def process_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The command line takes over signals and what our modules log; other tests have them back."""
    monkeypatch.setattr(logging.getLogger("whisperport"), "handlers", [])
    monkeypatch.setattr(logging, "lastResort", logging.lastResort)
    taken = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in taken}
    yield
    for number, handler in before.items():
        if handler is not None:  # None: one that is not of Python
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _same_draws() -> None:
    """Give the modules of a test the same random weights, whichever tests ran before it."""
    if not IS_ABSENT:  # torch.manual_seed also keeps a traceback: 1 ms per test
        torch.default_generator.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _operators_searched_once() -> Iterator[None]:
    """Let torch search its registered operators again only where there can be new ones.

    Each decomposition of a graph searches all of them once per namespace, 40 times where ExecuTorch is
    loaded, and registers 12,000 kernels, for each of which it evaluates the annotations of `py_impl`.
    Without that, a decomposition takes a third of the CPU time (measured), and computes the same.
    """
    if IS_ABSENT:
        yield
        return
    from torch._C import DispatchKey
    from torch._ops import OperatorBase
    from torch.export import decomp_utils, exported_program

    search, register = exported_program._collect_all_valid_cia_ops, OperatorBase.py_impl
    searched = dict[tuple[int, ...], set[OperatorBase]]()

    def search_if_new() -> set[OperatorBase]:
        library = torch.library
        now = (len(sys.modules), len(library._defs), len(library._impls))
        if now not in searched:
            searched[now] = search()
        return searched[now]

    def register_without_annotations(operator: OperatorBase, key: Any) -> Callable[..., Any]:
        kernels = operator.py_kernels
        if not isinstance(key, DispatchKey) or key == DispatchKey.Python or key in kernels:
            return register(operator, key)

        def keep(function: Callable[..., Any]) -> Callable[..., Any]:
            kernels[key] = function
            operator._dispatch_cache.clear()
            return function

        return keep

    with pytest.MonkeyPatch.context() as patch:
        for module in (exported_program, decomp_utils):
            patch.setattr(module, "_collect_all_valid_cia_ops", search_if_new)
        patch.setattr(OperatorBase, "py_impl", register_without_annotations)
        yield


# Weights; the micro model has 12,000, and the smallest of the others 3 million.
SMALL_MODEL = 100_000


@pytest.fixture(scope="session", autouse=True)
def _small_models_traced_once() -> Iterator[None]:
    """Trace each program of a small model once, and convert it to ONNX once.

    Many tests lower programs of the micro model, whose weights and modules do not change.
    """
    if IS_ABSENT:
        yield
        return
    import onnx_ir as ir

    from whisperport.model.trace import onnx
    from whisperport.model.trace.program import Program, Untraced

    trace, convert = Untraced.traced, onnx._convert
    traced, converted = dict[Any, tuple[Untraced, Program]](), dict[int, Any]()

    def trace_if_new(untraced: Untraced) -> Program:
        key = _all_that_is_traced(untraced)
        if key is None:
            return trace(untraced)
        if key not in traced:  # with the module, so that no other has its tensors' ids
            traced[key] = untraced, trace(untraced)
        return traced[key][1]

    def convert_if_new(program: Program) -> Any:
        if not any(program is known for _, known in traced.values()):
            return convert(program)
        if id(program) not in converted:
            converted[id(program)] = ir.to_proto(convert(program))
        return ir.from_proto(converted[id(program)])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Untraced, "traced", trace_if_new)
        patch.setattr(onnx, "_convert", convert_if_new)
        yield


def _all_that_is_traced(untraced: Any) -> Any:
    """What the trace of a small module depends on; None: the module is not small, or unknown."""
    module, ignored = untraced.module, vars(torch.nn.Module()).keys()
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    own = [
        (
            name,
            type(part),
            type(part).forward,
            repr({k: v for k, v in vars(part).items() if k not in ignored}),
        )
        for name, part in module.named_modules()
    ]
    if sum(tensor.numel() for tensor in tensors.values()) > SMALL_MODEL or "tensor(" in repr(own):
        return None
    ids = tuple((name, id(tensor), tensor._version) for name, tensor in tensors.items())
    leaves, structure = torch.utils._pytree.tree_flatten(untraced.inputs)
    shapes = tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves)
    return untraced.name, tuple(untraced.outputs), tuple(own), ids, shapes, str(structure)


@pytest.fixture(scope="session", autouse=True)
def _tokenizers_read_once() -> Iterator[None]:
    """Read each large tokenizer once: bundles and checkpoints of the tests have the same few.

    A tokenizer is not changed after it is read. Small ones are those of tests of reading, and are read.
    """
    from whisperport.speech.text.tokenizer import Tokenizer

    read, known = Tokenizer.from_json, dict[tuple[Any, ...], Tokenizer]()

    def read_if_new(text: str | bytes, generation: Any, **how: Any) -> Tokenizer:
        if len(text) < 10**5:
            return read(text, generation, **how)
        key = (text, repr(generation), how.get("check_merges", True))
        if key not in known:
            known[key] = read(text, generation, **how)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tokenizer, "from_json", read_if_new)
        yield


@pytest.fixture(scope="session", autouse=True)
def _freed_memory_kept() -> Iterator[None]:
    """Keep what an export or a conversion frees: the next test takes it again.

    To return it is 2.7 % of the CPU time of all tests (measured).
    """
    if IS_ABSENT:
        yield
        return
    from whisperport.build.export import drafting
    from whisperport.build.layouts import convert

    with pytest.MonkeyPatch.context() as patch:
        for module in (drafting, convert):
            patch.setattr(module, "return_freed_memory", gc.collect)
        yield


@pytest.fixture(scope="session", autouse=True)
def _state_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Record the origin of bundles, and keep exported models, in a temporary folder, not in the user's.

    All workers share this folder, as they share the bundles. No bundle needs a second trial run.
    `make test-apps` finds the apps that are installed in the user's.
    """
    from .shared_exports import run_folder

    if os.environ.get("WHISPERPORT_TEST_APPS") == "1":
        from whisperport.build.export.bundle_cache import cache_folder

        apps = run_folder(tmp_path_factory) / "cache" / cache_folder().name / "apps"
        apps.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):  # another worker was first
            apps.symlink_to(cache_folder() / "apps")

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(run_folder(tmp_path_factory) / "state"))
        patch.setenv("XDG_CACHE_HOME", str(run_folder(tmp_path_factory) / "cache"))
        patch.delenv("WHISPERPORT_BUNDLE", raising=False)
        yield


@pytest.fixture(scope="session")
def random_hf_whisper() -> Make:
    """`random_hf_whisper(seed=0, **config)`: a transformers WhisperForConditionalGeneration."""
    from transformers import GenerationConfig, WhisperConfig, WhisperForConditionalGeneration

    from whisperport.speech.text.vocabulary import openai_generation

    def make(*, seed: int = 0, **overrides: Any) -> Any:
        sizes: dict[str, Any] = {
            "d_model": 64,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 256,
            "decoder_ffn_dim": 256,
            "num_mel_bins": 80,
            "max_source_positions": 100,
            "max_target_positions": 448,
            "vocab_size": 51865,
            **overrides,
        }
        known = openai_generation(sizes["vocab_size"])
        ids = {
            "decoder_start_token_id": known.start_of_transcript,
            "bos_token_id": known.end_of_text,
            "eos_token_id": known.end_of_text,
            "pad_token_id": known.end_of_text,
            "begin_suppress_tokens": list(known.suppressed_at_start),
        }
        with torch.random.fork_rng(devices=[]):
            model = WhisperForConditionalGeneration(WhisperConfig(**ids, **sizes)).eval()
            _randomize(model, seed)
        model.generation_config = GenerationConfig(
            **ids,
            suppress_tokens=list(known.suppressed),
            no_timestamps_token_id=known.no_timestamps,
            prev_sot_token_id=known.start_of_previous,
            is_multilingual=known.is_multilingual,
            lang_to_id={f"<|{code}|>": i for code, i in known.languages.items()},
            task_to_id=dict(known.tasks),
            alignment_heads=[[sizes["decoder_layers"] - 1, 0], [sizes["decoder_layers"] - 1, 1]],
        )
        return model

    return make


@pytest.fixture(scope="session")
def random_openai_whisper() -> Make:
    """`random_openai_whisper(seed=0, **dims)`: an openai-whisper Whisper of the same size."""
    from whisper.model import ModelDimensions, Whisper

    def make(*, seed: int = 0, **overrides: Any) -> Any:
        dims = {
            "n_mels": 80,
            "n_audio_ctx": 100,
            "n_audio_state": 64,
            "n_audio_head": 2,
            "n_audio_layer": 2,
            "n_vocab": 51865,
            "n_text_ctx": 448,
            "n_text_state": 64,
            "n_text_head": 2,
            "n_text_layer": 2,
            **overrides,
        }
        with torch.random.fork_rng(devices=[]):
            model = Whisper(ModelDimensions(**dims)).eval()
            _randomize(model, seed)
        return model

    return make


@pytest.fixture(scope="session")
def tiny_checkpoint_folder(
    random_hf_whisper: Make, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A Hugging Face folder with a tokenizer.json; made once per session, do not write to it."""
    from whisperport.speech.text.vocabulary import openai_tokenizer

    folder = tmp_path_factory.mktemp("tiny") / "checkpoint"
    random_hf_whisper().save_pretrained(folder)
    (folder / "tokenizer.json").write_text(openai_tokenizer(51865).to_str(), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def tiny_openai_pt(random_openai_whisper: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `.pt` file; made once per session, do not write to it."""
    path = tmp_path_factory.mktemp("tiny") / "tiny.pt"
    model = random_openai_whisper()
    torch.save({"dims": vars(model.dims), "model_state_dict": model.state_dict()}, path)
    return path


@pytest.fixture(scope="session")
def tiny_checkpoint(tiny_checkpoint_folder: Path) -> Any:
    """The folder, loaded as a whisperport Checkpoint."""
    from whisperport.model.checkpoint import load_checkpoint

    return load_checkpoint(tiny_checkpoint_folder)


@pytest.fixture(scope="session")
def one_layer_pt(random_openai_whisper: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `.pt` file of one encoder and one decoder layer; made once per session, do not write to it."""
    path = tmp_path_factory.mktemp("one-layer") / "one-layer.pt"
    model = random_openai_whisper(n_audio_layer=1, n_text_layer=1)
    torch.save({"dims": vars(model.dims), "model_state_dict": model.state_dict()}, path)
    return path


@pytest.fixture(scope="session")
def one_layer_checkpoint(one_layer_pt: Path) -> Any:
    """One encoder and one decoder layer: an export takes half of the time of `tiny_checkpoint`."""
    from whisperport.model.checkpoint import load_checkpoint

    return load_checkpoint(one_layer_pt)


def _randomize(model: "torch.nn.Module", seed: int) -> None:
    """Set matrices with a gain of about 1, so that activations neither vanish nor explode in two layers."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "encoder.embed_positions" in name:
                continue  # sinusoids in every Whisper
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise / parameter[0].numel() ** 0.5)
            elif "norm" in name or "_ln" in name or ".ln" in name:
                parameter.copy_(0.1 * noise + float(name.endswith("weight")))
            else:
                parameter.copy_(0.1 * noise)


@pytest.fixture(scope="session")
def exported(
    request: pytest.FixtureRequest, tiny_checkpoint: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Any]]:
    """`exported("onnxruntime")`: a verified bundle of the tiny checkpoint, with windows of 2 s.

    `exported("xnnpack", "one layer", ...)`: a bundle of `one_layer_checkpoint`; "default" is the embedded
    model. Further arguments are those of `ExportOptions`. Each bundle is made once per test run, and shared
    by all workers: do not write to it. `exported.checkpoint("xnnpack")` is the checkpoint of
    `exported("xnnpack")`: in `make test`, of one layer for all targets but `onnxruntime`.
    """
    from whisperport.model.checkpoint import load_checkpoint
    from whisperport.targets import TARGETS
    from whisperport.verification.clips import shipped_clips

    from .extent import core_or_all
    from .shared_exports import SharedExports, run_folder

    names = {target.spec.name for target in TARGETS}
    exports = SharedExports(
        run_folder(tmp_path_factory) / "exported",
        {
            "tiny": lambda: tiny_checkpoint,
            "one layer": lambda: request.getfixturevalue("one_layer_checkpoint"),
            "default": lambda: load_checkpoint("default"),
            "micro": lambda: request.getfixturevalue("micro_checkpoint"),
        },
        {
            "tiny": {"clips": noise_clips()},
            "one layer": {"clips": noise_clips()},
            "default": core_or_all({"clips": shipped_clips(3)}, {}),
            "micro": {"clips": micro_clips()},
        },
        core_or_all(dict.fromkeys(names - {"onnxruntime"}, "one layer"), {}),
    )
    yield exports
    assert exports.changed() == [], "tests wrote to bundles that other tests use"


def noise_clips() -> tuple[Any, ...]:
    """Two clips for models with random weights: 1 s and 2 s of noise."""
    import numpy as np

    from whisperport.verification.clips import Clip

    random = np.random.default_rng(0)
    first, second = (0.1 * random.standard_normal(n) for n in (16_000, 32_000))
    return (
        Clip("hiss", "so they say", first.astype(np.float32)),
        Clip("longer hiss", "", second.astype(np.float32)),
    )


def micro_clips() -> tuple[Any, ...]:
    """Three clips for the micro model, each as long as its window."""
    import numpy as np

    from whisperport.verification.clips import Clip

    random = np.random.default_rng(0)
    return tuple(
        Clip(f"clip {i}", "so they say", (0.1 * random.standard_normal(3200)).astype(np.float32))
        for i in range(3)
    )


@pytest.fixture(scope="session")
def micro() -> Any:
    """Two decoder layers, width 16, 24 positions, 70 tokens; random weights with gain about 1."""
    from whisperport.model.network.whisper import Whisper

    from .micro import DIMS

    generator = torch.Generator().manual_seed(0)
    model = Whisper(DIMS).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            parameter.copy_(noise / parameter[0].numel() ** 0.5)
        else:
            parameter.copy_(0.1 * noise + float("ln" in name and name.endswith("weight")))
    model.decoder.token_embedding.weight.mul_(4)  # logits that spread by 4
    return model


@pytest.fixture(scope="session")
def eager_runners() -> Make:
    """`eager_runners(model, prefill_rows=(4,), heads_wanted=((0, 0),), ...)`: runners that call torch.

    Returns program name -> runner, for every program of a model. The runners call the modules that would
    be lowered, so no time is spent on lowering.
    """
    import numpy as np

    from whisperport.model.network.decoder import Align, BatchDecode, CrossKV, Decode, Prefill
    from whisperport.program.runner import Binding, Runner
    from whisperport.program.spec import ProgramSpec, TensorSpec

    from .fake_target import OverwritingBinding

    class EagerRunner(Runner):
        def __init__(self, module: Any, spec: ProgramSpec, n_single: int, n_layers: int) -> None:
            super().__init__(spec)
            self._module, self._n_single, self._n_layers = module.eval(), n_single, n_layers

        def _run(self, inputs: Any) -> Any:
            tensors = [torch.from_numpy(np.ascontiguousarray(array)) for array in inputs]
            single, layered = tensors[: self._n_single], tensors[self._n_single :]
            n = self._n_layers
            lists = [layered[i : i + n] for i in range(0, len(layered), n)]
            with torch.no_grad():
                outputs = self._module(*single, *lists)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            return [output.numpy().copy() for output in outputs]

        def binding(self) -> Binding:
            return OverwritingBinding(self)

    def make(
        model: Any,
        prefill_rows: tuple[int, ...] = (4,),
        heads_wanted: tuple[tuple[int, int], ...] = ((0, 0),),
        align_rows: int = 64,
        batches: tuple[int, ...] = (),
    ) -> dict[str, Runner]:
        dims, n_layers = model.dims, model.dims.n_text_layer
        heads, width = dims.n_text_head, dims.text_head_width
        n, t, d = dims.n_text_ctx, dims.n_audio_ctx, dims.n_text_state

        def layers(batch: int = 1, **shapes: tuple[int, ...]) -> tuple[TensorSpec, ...]:
            return tuple(
                TensorSpec(f"{name}_{i}", (batch * shape[0], *shape[1:]))
                for name, shape in shapes.items()
                for i in range(n_layers)
            )

        audio = layers(cross_k=(heads, width, t), cross_v=(heads, t, width))
        caches = layers(self_k=(heads, width, n), self_v=(heads, n, width)) + audio
        features = TensorSpec("features", (1, t, d))
        mel = TensorSpec("mel", (1, dims.n_mels, dims.n_frames))
        found = {
            "encoder": (model.encoder, 1, (mel,), (features,)),
            "cross_kv": (CrossKV(model.decoder), 1, (features,), audio),
        }

        def decoded(rows: int, *, pick: bool = False) -> tuple[tuple[TensorSpec, ...], Any]:
            single = [TensorSpec("x", (1, rows, d)), TensorSpec("mask", (1, rows, n + rows))]
            single += [TensorSpec("pick", (1, 2, rows))] if pick else []
            return tuple(single), layers(new_k=(heads, width, rows), new_v=(heads, rows, width))

        for name, rows in [("step", 1), *((f"prefill_{rows}", rows) for rows in prefill_rows)]:
            single, new = decoded(rows, pick=name != "step")
            logits = (TensorSpec("logits", (1 if name == "step" else 2, dims.n_vocab)),)
            module = (Decode if name == "step" else Prefill)(model.decoder)
            found[name] = (module, len(single), single + caches, logits + new)
        for b in batches:
            single = (TensorSpec("x", (b, 1, d)), TensorSpec("mask", (b, 1, n + 1)))
            own = layers(b, self_k=(heads, width, n), self_v=(heads, n, width))
            own += layers(b, cross_k=(heads, width, t), cross_v=(heads, t, width))
            new = layers(b, new_k=(heads, width, 1), new_v=(heads, 1, width))
            logits = (TensorSpec("logits", (b, dims.n_vocab)),)
            found[f"step_{b}"] = (BatchDecode(model.decoder), 2, single + own, logits + new)
        single, new = decoded(align_rows)
        scores = TensorSpec("scores", (len(heads_wanted), align_rows, t))
        outputs = (TensorSpec("rows", (1, align_rows, d)), scores, *new)
        align = Align(model.decoder, sorted(heads_wanted))
        found["align"] = (align, len(single), single + caches, outputs)
        return {
            name: EagerRunner(module, ProgramSpec(name, inputs, outputs), n_single, n_layers)
            for name, (module, n_single, inputs, outputs) in found.items()
        }

    return make


@pytest.fixture(scope="session")
def micro_checkpoint(micro: Any) -> Any:
    """The micro model as a checkpoint, with a tokenizer of single letters."""
    from whisperport.model.checkpoint.checkpoint import Checkpoint, Source

    from .micro import DIMS, GENERATION, tokenizer_json

    return Checkpoint(
        dims=DIMS,
        generation=GENERATION,
        weights=dict(micro.state_dict()),
        tokenizer_json=tokenizer_json(),
        source=Source(kind="openai", name="micro", sha256={}),
    )


@pytest.fixture
def fake_targets(
    micro: Any, micro_checkpoint: Any, eager_runners: Make, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """Register `fake` and `other`, targets that compile nothing, for the micro checkpoint."""
    from whisperport import targets
    from whisperport.model.trace.variants import BATCHES, PREFILLS
    from whisperport.verification.alignment_heads import with_alignment_heads

    from .fake_target import fake

    heads = with_alignment_heads(micro_checkpoint.generation, micro_checkpoint.dims).alignment_heads
    runners = eager_runners(micro, PREFILLS, heads, batches=BATCHES[:1])
    known = {name: fake(name, runners) for name in ("fake", "other")}

    monkeypatch.setattr(targets, "TARGETS", (*targets.TARGETS, *known.values()))
    return known


@pytest.fixture(scope="session")
def micro_programs(micro_checkpoint: Any, micro: Any) -> tuple[Any, ...]:
    """The micro checkpoint's programs."""
    from whisperport.model.trace.variants import whisper_programs
    from whisperport.model.trace.whisper import Parts
    from whisperport.verification.alignment_heads import with_alignment_heads

    generation = with_alignment_heads(micro_checkpoint.generation, micro_checkpoint.dims)
    return tuple(whisper_programs(Parts(micro, generation.alignment_heads)))


@pytest.fixture
def micro_bundle(
    exported: Callable[..., Any], fake_targets: dict[str, Any], quick_tracing: None
) -> Any:
    """The micro model on `fake`, with windows of 0.2 s, verified with `micro_clips`.

    It is made once per test run: do not write to it.
    """
    return exported("fake", "micro")


@pytest.fixture(scope="session")
def micro_batch_step(micro: Any) -> Any:
    """The micro model's step of two texts, traced once."""
    from whisperport.model.trace.variants import BATCHES
    from whisperport.model.trace.whisper import Parts, batch_step

    return batch_step(Parts(micro, []), BATCHES[0]).traced()


@pytest.fixture
def quick_tracing(
    micro_programs: tuple[Any, ...], micro_batch_step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let exports of the micro checkpoint use programs that are traced already."""
    from whisperport.model.trace import variants

    known = {program.name: program for program in (*micro_programs, micro_batch_step)}
    monkeypatch.setattr(
        variants, "whisper_programs", lambda _, names, *__: (known[name] for name in names)
    )
