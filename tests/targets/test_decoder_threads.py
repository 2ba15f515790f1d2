"""The run option that gives the decoder's programs other CPU threads than the encoder."""

import pytest

from whisperport.bundle import Bundle
from whisperport.errors import UsageError
from whisperport.targets import RunOptions, get_target
from whisperport.transcription import default_bundle


@pytest.fixture(scope="module")
def entries():
    names = ("encoder", "cross_kv", "step")
    return [e for e in Bundle.open(default_bundle()).manifest.programs if e.spec.name in names]


def threads_of(entries, threads=None, **options):
    named = {f"onnxruntime.{name.replace('_', '-')}": text for name, text in options.items()}
    run = RunOptions(threads=threads, options=named)
    runners = get_target("onnxruntime").load(default_bundle(), entries, run)
    return {
        name: runner._session.get_session_options().intra_op_num_threads
        for name, runner in runners.items()
    }


def test_the_decoder_has_its_own_number_of_threads(entries):
    assert threads_of(entries, 2, decoder_threads="1") == {"encoder": 2, "cross_kv": 1, "step": 1}
    assert threads_of(entries, None, decoder_threads="1")["encoder"] == 0  # the runtime chooses
    assert threads_of(entries, 2) == {"encoder": 2, "cross_kv": 2, "step": 2}


@pytest.mark.parametrize("value", ["0", "-1", "many", "100000"])
def test_a_number_of_threads_out_of_range_is_rejected(entries, value):
    with pytest.raises(UsageError, match=r"onnxruntime\.decoder-threads"):
        threads_of(entries, decoder_threads=value)
