"""Use a server through OpenAI's Python package, and read its subtitles and metrics back.

python openai_python.py URL AUDIO LONG TEXT: prints "ok", or fails. TEXT is what AUDIO must give.
"""

import sys
from pathlib import Path
from urllib.request import urlopen

import openai
import pysubs2
import srt
import webvtt
from prometheus_client.parser import text_string_to_metric_families

url, audio, long, text = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
create = client.audio.transcriptions.create


def asked(**given):
    with audio.open("rb") as file:
        return create(model="whisper-1", file=file, **given)


def error_of(call):
    try:
        return AssertionError(f"no error: {call()}")
    except openai.APIError as error:
        return error


# Every format, and every granularity of verbose_json.
assert asked().text == text
assert asked(temperature=0).text == text
assert asked().usage.type == "duration"
assert asked(response_format="text") == f"{text}\n"
assert create(model="whisper-1", file=audio.read_bytes()).text == text
verbose = asked(response_format="verbose_json")
assert (verbose.text, verbose.language, verbose.words) == (text, "english", None)
assert verbose.segments[0].id == 0
assert verbose.segments[0].tokens
for wanted in (["word"], ["segment"], ["word", "segment"]):
    found = asked(response_format="verbose_json", timestamp_granularities=wanted)
    assert (found.words is not None) == ("word" in wanted)
    assert (found.segments is not None) == ("segment" in wanted)
assert (
    "".join(
        f" {word.word}"
        for word in asked(response_format="verbose_json", timestamp_granularities=["word"]).words
    ).strip()
    == text
)
assert asked(response_format="verbose_json") == verbose

# Subtitles, read by three libraries.
as_srt, as_vtt = asked(response_format="srt"), asked(response_format="vtt")
lines = [one.content for one in srt.parse(as_srt)]
assert " ".join(lines) == text
assert [caption.text for caption in webvtt.from_string(as_vtt)] == lines
for subtitles in (as_srt, as_vtt):
    assert [event.text for event in pysubs2.SSAFile.from_string(subtitles)] == lines

# Log-probabilities, chunks, fields of other servers.
with_logprobs = asked(include=["logprobs"])
assert "".join(one.token for one in with_logprobs.logprobs).strip() == text
assert asked(chunking_strategy="auto").text == text
assert asked(chunking_strategy={"type": "server_vad", "threshold": 0.4}).text == text
raw = client.audio.transcriptions.with_raw_response.create(
    model="whisper-1", file=audio, extra_body={"seed": 1}
)
assert raw.headers["x-whisperport-ignored-fields"] == "seed"
assert raw.parse()._request_id.startswith("req_")

# A stream.
whole = create(model="whisper-1", file=long).text
for more in ({}, {"include": ["logprobs"]}, {"chunking_strategy": "auto"}):
    *deltas, done = create(model="whisper-1", file=long, stream=True, **more)
    assert all(event.type == "transcript.text.delta" for event in deltas)
    assert done.type == "transcript.text.done"
    assert "".join(event.delta for event in deltas) == done.text
    assert done.text == whole or "chunking_strategy" in more
    assert done.usage.total_tokens > 0

# Errors, with their classes.
for given, kind, code, param in (
    ({"model": "large"}, openai.NotFoundError, "model_not_found", "model"),
    ({"file": b""}, openai.BadRequestError, "invalid_value", "file"),
    ({"file": b"no audio"}, openai.BadRequestError, "invalid_value", "file"),
    ({"temperature": 2}, openai.BadRequestError, "invalid_value", "temperature"),
    (
        {"response_format": "diarized_json"},
        openai.BadRequestError,
        "unsupported_value",
        "response_format",
    ),
):
    error = error_of(lambda given=given: create(**{"model": "whisper-1", "file": audio} | given))
    assert isinstance(error, kind), error
    assert (error.code, error.param) == (code, param), error
error = error_of(lambda: client.audio.translations.create(model="whisper-1", file=audio))
assert "translate" in error.message

# Models, and metrics.
ids = [model.id for model in client.models.list()]
assert "whisper-1" in ids
assert client.models.retrieve(ids[0]).owned_by == "whisperport"
with urlopen(f"{url}/metrics") as answer:
    families = list(text_string_to_metric_families(answer.read().decode()))
assert {"whisperport_requests", "whisperport_e2e_seconds"} <= {family.name for family in families}
print("ok")
