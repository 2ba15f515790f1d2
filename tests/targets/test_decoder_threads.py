"""The run options of the CPU threads of the decoder's programs."""

import pytest

from whisperport.bundle import Bundle
from whisperport.errors import UsageError
from whisperport.targets import RunOptions, get_target
from whisperport.transcription import default_bundle


@pytest.fixture(scope="module")
def entries():
    names = ("encoder", "cross_kv", "step")
    return [e for e in Bundle.open(default_bundle()).manifest.programs if e.spec.name in names]


def settings_of(entries, threads=None, **options):
    named = {f"onnxruntime.{name.replace('_', '-')}": text for name, text in options.items()}
    run = RunOptions(threads=threads, options=named)
    runners = get_target("onnxruntime").load(default_bundle(), entries, run)
    return {name: runner._session.get_session_options() for name, runner in runners.items()}


def threads_of(entries, threads=None, **options):
    found = settings_of(entries, threads, **options)
    return {name: settings.intra_op_num_threads for name, settings in found.items()}


def spins(entries, **options):
    key = "session.intra_op.allow_spinning"
    found = settings_of(entries, 1, **options)
    return {name: settings.get_session_config_entry(key) for name, settings in found.items()}


def test_the_decoder_has_its_own_number_of_threads(entries):
    assert threads_of(entries, 2, decoder_threads="1") == {"encoder": 2, "cross_kv": 1, "step": 1}
    assert threads_of(entries, None, decoder_threads="1")["encoder"] == 0  # the runtime chooses
    assert threads_of(entries, 2) == {"encoder": 2, "cross_kv": 2, "step": 2}


@pytest.mark.parametrize("value", ["0", "-1", "many", "100000"])
def test_a_number_of_threads_out_of_range_is_rejected(entries, value):
    with pytest.raises(UsageError, match=r"onnxruntime\.decoder-threads"):
        threads_of(entries, decoder_threads=value)


def test_threads_wait_actively_on_request_and_never_those_of_the_encoder(entries):
    assert spins(entries) == {"encoder": "0", "cross_kv": "0", "step": "0"}
    assert spins(entries, spin="on") == {"encoder": "0", "cross_kv": "1", "step": "1"}
