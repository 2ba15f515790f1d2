"""Run options are printed with the result, and kept in the suggested next command."""

PROVIDER = "onnxruntime.provider=CPUExecutionProvider"


def test_a_verdict_says_how_the_programs_were_run(run, bundle):
    ran = run("verify", bundle, "--run-option", PROVIDER)

    assert ran.out.splitlines()[-1] == f"{bundle}: verified ({PROVIDER})"
    assert ran.lines[-1].endswith(f"--bundle {bundle} --run-option {PROVIDER}")


def test_the_next_transcription_is_run_the_same_way(run, bundle, wav):
    ran = run("transcribe", wav, "--bundle", bundle, "--run-option", PROVIDER, "--language", "en")

    assert ran.lines[-1] == (
        f"next: whisperport transcribe {wav} --bundle {bundle} --run-option {PROVIDER} --output-format srt"
    )
