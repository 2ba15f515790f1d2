"""The run options of the CPU threads of the decoder's programs."""

import pytest

from whisperport.program.bundle import Bundle
from whisperport.system.cores import usable_cores
from whisperport.targets import RunOptions, get_target
from whisperport.targets.onnx import runner as onnx_runner

from ...embedded import default_bundle


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
    """Name of a program -> how long its threads wait actively, in microseconds; "": until there is work."""
    found = {}
    for name, settings in settings_of(entries, 1, **options).items():
        allowed = settings.get_session_config_entry("session.intra_op.allow_spinning") == "1"
        try:
            spun = settings.get_session_config_entry("session.intra_op.spin_duration_us")
        except RuntimeError:  # not set
            spun = ""
        found[name] = spun if allowed else "0"
    return found


def test_the_decoder_has_its_own_number_of_threads(entries):
    assert threads_of(entries, 2, decoder_threads="1") == {"encoder": 2, "cross_kv": 1, "step": 1}
    assert threads_of(entries, None, decoder_threads="1")["encoder"] == usable_cores()
    assert threads_of(entries, 2) == {"encoder": 2, "cross_kv": 2, "step": 2}


def test_threads_wait_actively_for_long_on_request_and_never_those_of_the_encoder(entries):
    assert spins(entries) == {"encoder": "20", "cross_kv": "20", "step": "20"}
    assert spins(entries, spin="on") == {"encoder": "20", "cross_kv": "", "step": ""}


def test_threads_of_older_versions_never_wait_actively(entries, monkeypatch):
    """They would do so until there is work: the number of microseconds is unknown to them."""
    monkeypatch.setattr(onnx_runner, "BRIEF_SPIN_SINCE", (99, 0))

    assert spins(entries) == {"encoder": "0", "cross_kv": "0", "step": "0"}
