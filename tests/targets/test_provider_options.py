"""The run options of the target `onnxruntime` that place programs on an execution provider."""

import numpy as np
import pytest

from whisperport.errors import LoweringError, UsageError
from whisperport.program.bundle import Bundle
from whisperport.runtime import load_engine
from whisperport.targets import RunOptions, get_target
from whisperport.targets.onnx.runner import CPU

from ..embedded import default_bundle

AZURE = "AzureExecutionProvider"  # ONNX Runtime's wheel has it


@pytest.fixture(scope="module")
def entries():
    bundle = Bundle.open(default_bundle())
    return [e for e in bundle.manifest.programs if e.spec.name in ("cross_kv", "step")]


def load(entries, **options):
    named = {f"onnxruntime.{name.replace('_', '-')}": text for name, text in options.items()}
    run = RunOptions(threads=1, options=named)
    return get_target("onnxruntime").load(default_bundle(), entries, run)


def providers(runner):
    return runner._session.get_providers()


def test_only_the_named_programs_run_on_the_provider(entries):
    runners = load(entries, provider=AZURE, provider_programs="cross_kv")

    # then: ONNX Runtime adds the CPU to every other provider
    assert providers(runners["cross_kv"]) == [AZURE, CPU]
    assert providers(runners["step"]) == [CPU]
    plain = load(entries)["cross_kv"]
    features = np.random.default_rng(0).standard_normal(entries[0].spec.inputs[0].shape)
    inputs = {entries[0].spec.inputs[0].name: features.astype(np.float32)}
    found, expected = runners["cross_kv"].run(inputs), plain.run(inputs)
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_the_encoder_may_be_named_where_it_is_not_loaded():
    """A command line stays the same if the features come from a device."""
    run = RunOptions(threads=1, options={"onnxruntime.provider-programs": "encoder"})

    engine = load_engine(Bundle.open(default_bundle()), run, encoder=False)

    with pytest.raises(UsageError, match="`encoder` is not loaded"):
        engine.encode(np.zeros((engine.dims.n_mels, engine.dims.n_frames), np.float32))


def test_a_provider_that_declines_all_nodes_is_a_warning(entries, caplog):
    load(entries[:1], provider=AZURE)
    load(entries[:1])

    (record,) = caplog.records
    assert f"`{AZURE}` declined all nodes of onnxruntime/cross_kv.onnx" in record.getMessage()


def test_options_are_passed_to_the_provider(entries, monkeypatch):
    import onnxruntime

    passed = []
    session = onnxruntime.InferenceSession

    def recording(*arguments, providers, **named):
        passed.append(providers)
        return session(*arguments, providers=[providers[0][0]], **named)

    monkeypatch.setattr(onnxruntime, "InferenceSession", recording)

    load(entries, provider=AZURE, provider_programs="step", provider_options="A=1; B=--x=2 --y;")

    assert passed == [[(CPU, {})], [(AZURE, {"A": "1", "B": "--x=2 --y"})]]


def test_an_error_of_the_provider_is_not_hidden_by_the_cpu(entries, monkeypatch):
    import onnxruntime

    def raises(*arguments, providers, **named):
        assert named["enable_fallback"] == 0
        raise RuntimeError("unordered_map::at")

    monkeypatch.setattr(onnxruntime, "InferenceSession", raises)

    with pytest.raises(LoweringError, match=f"`{AZURE}` cannot load") as caught:
        load(entries, provider=AZURE)
    assert "--each-program" in caught.value.hint


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"provider_options": "A"}, "cannot contain `A`"),
        ({"provider_options": "=1"}, "cannot contain `=1`"),
        ({"provider_options": "A=1;A=2"}, "cannot contain `A=2`"),
        ({"provider_programs": "encodr"}, "names `encodr`"),
        ({"provider_programs": "step,"}, "names ``"),
    ],
)
def test_wrong_options_are_refused(entries, options, message):
    with pytest.raises(UsageError, match=message):
        load(entries, provider=AZURE, **options)
