"""`/v1/audio/transcriptions`: fields, formats, events and errors of OpenAI's API."""

import json
import math
import wave
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whisperport.runtime import DecodeOptions
from whisperport.speech.audio import load_audio
from whisperport.speech.text import LANGUAGES, write_srt, write_vtt
from whisperport.targets import RunOptions
from whisperport.transcription import TranscribeOptions, Transcriber, Transcript
from whisperport.verification.clips import shipped_audio

from ...micro import adapter_tensors, write_adapter
from ...wav import write_wav

URL = "/v1/audio/transcriptions"
ENGLISH = "/v1/audio/translations"
CLIP = shipped_audio()[0].path
LONG = shipped_audio()[17].path  # three commands


def post(client: Any, data: dict[str, Any] | None = None, **given: Any) -> Any:
    url, file = given.pop("url", URL), given.pop("file", CLIP.read_bytes())
    fields = {"model": "whisper-1"} | (data or {}) | given
    return client.post(url, data=fields, files={"file": ("upload", file)} if file else {"x": b""})


def server_vad(threshold: str) -> str:
    """An object of a form, as JSON, with a threshold of any kind."""
    return f'{{"type": "server_vad", "threshold": {threshold}}}'


def events(text: str) -> list[dict[str, Any]]:
    """The data of server-sent events, without comments."""
    blocks = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    assert all(block.startswith("data: ") for block in blocks)
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


@pytest.fixture(scope="module")
def expected(transcriber: Transcriber) -> Transcript:
    return transcriber.transcribe(CLIP)


def test_json_has_the_text_and_the_duration(client: Any, expected: Transcript) -> None:
    answer = post(client)

    assert answer.status_code == 200
    usage = {"type": "duration", "seconds": math.ceil(expected.duration_s)}
    assert answer.json() == {"text": expected.text, "usage": usage}
    assert answer.headers["x-request-id"].startswith("req_")
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    ("form", "kind", "written"),
    [
        ("text", "text/plain; charset=utf-8", lambda t: f"{t.text}\n"),
        ("srt", "application/x-subrip; charset=utf-8", lambda t: write_srt(t.segments)),
        ("vtt", "text/vtt; charset=utf-8", lambda t: write_vtt(t.segments)),
    ],
)
def test_texts_and_subtitles_are_those_of_the_writers(
    client: Any, expected: Transcript, form: str, kind: str, written: Callable[[Transcript], str]
) -> None:
    answer = post(client, response_format=form)

    assert answer.text == written(expected)
    assert answer.headers["content-type"] == kind


def test_verbose_json_has_segments_with_all_members(client: Any, expected: Transcript) -> None:
    found = post(client, response_format="verbose_json").json()

    assert (found["task"], found["language"], found["text"]) == (
        "transcribe",
        "english",
        expected.text,
    )
    assert found["duration"] == expected.duration_s
    assert "words" not in found
    for number, (segment, other) in enumerate(
        zip(found["segments"], expected.segments, strict=True)
    ):
        assert segment == {
            "id": number,
            "seek": other.seek,
            "start": other.start,
            "end": other.end,
            "text": other.text,
            "tokens": list(other.tokens),
            "temperature": 0.0,
            "avg_logprob": other.avg_logprob,
            "compression_ratio": other.compression_ratio,
            "no_speech_prob": other.no_speech_prob,
            "truncated": False,
        }


def test_words_are_listed_beside_segments_or_alone(client: Any, transcriber: Transcriber) -> None:
    expected = transcriber.transcribe(CLIP, word_timestamps=True)
    name, how = "timestamp_granularities[]", {"response_format": "verbose_json"}

    alone = post(client, {name: ["word"]}, **how).json()
    both = post(client, {name: ["word", "segment"]}, **how).json()

    words = [word for segment in expected.segments for word in segment.words or ()]
    assert [(w["word"], w["start"], w["end"]) for w in alone["words"]] == [
        (word.word.strip(), word.start, word.end) for word in words
    ]
    assert "segments" not in alone
    assert both["words"] == alone["words"]
    assert len(both["segments"]) == len(expected.segments)


@pytest.mark.parametrize("name", ["include", "include[]"])
def test_log_probabilities_are_those_of_the_text_tokens(
    client: Any, transcriber: Transcriber, expected: Transcript, name: str
) -> None:
    found = post(client, {name: "logprobs"}).json()["logprobs"]

    end = transcriber.engine.generation.end_of_text
    tokens = [t for segment in expected.segments for t in segment.tokens if t < end]
    assert [bytes(one["bytes"]) for one in found] == [
        transcriber.tokenizer.bytes_at(t) for t in tokens
    ]
    assert b"".join(bytes(one["bytes"]) for one in found).decode().strip() == expected.text
    assert all(-1 < one["logprob"] <= 0 for one in found)


def test_the_mean_of_the_log_probabilities_is_that_of_the_window(expected: Transcript) -> None:
    """The end of the text counts in the mean, and is no token of a segment."""
    window = expected.segments[0]
    tokens = [p for s in expected.segments if s.seek == window.seek for p in s.logprobs]

    assert sum(tokens) / (len(tokens) + 1) >= window.avg_logprob - 1e-9
    assert sum(tokens) / (len(tokens) + 1) == pytest.approx(window.avg_logprob, abs=0.01)
    assert all(len(s.tokens) == len(s.logprobs) for s in expected.segments)


def test_deltas_of_a_stream_are_appended_and_join_to_the_text(client: Any) -> None:
    whole = post(client, file=LONG.read_bytes()).json()["text"]

    answer = post(client, {"include[]": "logprobs"}, file=LONG.read_bytes(), stream="true")

    found = events(answer.text)
    *deltas, done = found
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert {event["type"] for event in deltas} == {"transcript.text.delta"}
    assert done["type"] == "transcript.text.done"
    assert "".join(event["delta"] for event in deltas) == done["text"] == whole
    assert [p for event in deltas for p in event["logprobs"]] == done["logprobs"]
    usage = done["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


@pytest.mark.parametrize(
    "strategy",
    [
        {"chunking_strategy": "auto"},
        {"chunking_strategy[type]": "server_vad", "chunking_strategy[threshold]": "0.4"},
        {"chunking_strategy": '{"type": "server_vad", "silence_duration_ms": 500}'},
    ],
)
def test_speech_can_be_found_by_the_voice_activity_detector(
    client: Any, strategy: dict[str, str], expected: Transcript
) -> None:
    whole = post(client, strategy)
    *deltas, done = events(post(client, strategy, stream="true").text)

    assert whole.json()["text"] == expected.text
    assert "".join(event["delta"] for event in deltas) == done["text"] == expected.text


def test_fields_that_are_not_known_are_named(client: Any) -> None:
    answer = post(client, {"seed": "1", "patience": "1", "bad, name": "1", "x" * 65: "1"})

    assert answer.status_code == 200
    assert answer.headers["x-whisperport-ignored-fields"] == "seed, patience"


@pytest.mark.parametrize("fields", [{"keywords[]": ["five", "Anna"]}, {"hotwords": "five, Anna"}])
def test_keywords_and_hotwords_are_phrases_and_a_prompt_is_the_prompt(
    fields: Any, client: Any, transcriber: Transcriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    phrases = import_module("whisperport.runtime.decoding.phrases")
    monkeypatch.setattr(phrases, "DEFAULT_BONUS", 12.0)
    answer = post(client, {**fields, "prompt": "A code."})

    expected = transcriber.transcribe(CLIP, phrases=["five", "Anna"], initial_prompt="A code.")
    assert answer.json()["text"] == expected.text
    assert "five" in expected.text
    assert "five" not in transcriber.transcribe(CLIP).text


def test_only_sentences_of_the_field_grammar_are_written(client: Any) -> None:
    fields = {"response_format": "verbose_json", "grammar": 'root ::= "The code is " [a-z, ]+ "."'}
    inside = post(client, fields).json()
    outside = post(client, {**fields, "grammar": 'root ::= "Yes."'}).json()

    assert inside["text"].startswith("The code is")
    assert inside["segments"][0]["match"] == {"matched": True, "score": 0.0}
    assert outside["text"] == outside["segments"][0]["text"] == ""
    assert outside["segments"][0]["match"]["matched"] is False


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"response_format": "xml"}, "response_format", "invalid_value"),
        ({"response_format": "diarized_json"}, "response_format", "unsupported_value"),
        ({"temperature": "2"}, "temperature", "invalid_value"),
        ({"temperature": "nan"}, "temperature", "invalid_value"),
        ({"temperature": ["0", "1"]}, "temperature", "invalid_value"),
        ({"language": "klingon"}, "language", "unsupported_value"),
        ({"language": "de"}, "language", "unsupported_value"),
        ({"languages[]": ["en", "de"]}, "languages", "unsupported_value"),
        ({"stream": "maybe"}, "stream", "invalid_value"),
        ({"stream": "true", "response_format": "srt"}, "stream", "invalid_value"),
        ({"include[]": "text"}, "include", "invalid_value"),
        ({"include[]": "logprobs", "response_format": "text"}, "include", "invalid_value"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities", "invalid_value"),
        ({"timestamp_granularities": "[1]"}, "timestamp_granularities", "invalid_value"),
        ({"known_speaker_names[]": "Ann"}, "known_speaker_names", "unsupported_value"),
        ({"chunking_strategy": "none"}, "chunking_strategy", "invalid_value"),
        ({"chunking_strategy": "{"}, "chunking_strategy", "invalid_value"),
        ({"chunking_strategy[type]": "x"}, "chunking_strategy", "invalid_value"),
        ({"temperature": "9" * 400}, "temperature", "invalid_value"),
        ({"temperature": "-0.1"}, "temperature", "invalid_value"),
        ({"chunking_strategy": server_vad("9" * 400)}, "chunking_strategy", "invalid_value"),
        ({"chunking_strategy": server_vad("9" * 310)}, "chunking_strategy", "invalid_value"),
        ({"chunking_strategy": server_vad("9" * 5000)}, "chunking_strategy", "invalid_value"),
        ({"chunking_strategy": server_vad("true")}, "chunking_strategy", "invalid_value"),
        ({"chunking_strategy": server_vad("NaN")}, "chunking_strategy", "invalid_value"),
        ({"chunking_strategy": server_vad("1e999")}, "chunking_strategy", "invalid_value"),
        ({"chunking_strategy": server_vad("[0.5]")}, "chunking_strategy", "invalid_value"),
        ({"keywords": '["\\ud800"]'}, "keywords", "invalid_value"),
        ({"keywords": "[" + '"a",' * 15_000 + '"a"]'}, "keywords", "invalid_value"),
        ({"keywords": "x" * 201}, "keywords", "invalid_value"),
        ({"hotwords": "Anna, ..."}, "hotwords", "invalid_value"),
        ({"keywords": "AC/DC"}, None, "unsupported_value"),
        ({"grammar": 'root ::= "a" root'}, "grammar", "invalid_value"),
        ({"grammar": 'root ::= "a_b"'}, None, "unsupported_value"),
        ({"grammar": 'root ::= "a"', "temperature": "0.5"}, "temperature", "invalid_value"),
        ({"languages": '["\\udfff"]'}, "languages", "invalid_value"),
        ({"language": "\x00" * 60_000}, "language", "unsupported_value"),
    ],
)
def test_a_wrong_field_is_named(client: Any, fields: dict[str, Any], param: str, code: str) -> None:
    answer = post(client, fields)

    error = answer.json()["error"]
    assert answer.status_code == 400
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"], error["code"]) == (
        "invalid_request_error",
        param,
        code,
    )


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (b"", "`file` is required"),
        (b"text, not audio", "Unrecognized file format. Supported formats: "),
        (CLIP.read_bytes()[:44], "Unrecognized file format"),
    ],
)
def test_a_file_that_is_no_audio_is_rejected(client: Any, file: bytes, said: str) -> None:
    error = post(client, file=file).json()["error"]

    assert error["message"].startswith(said)
    assert error["param"] == "file"


def test_an_error_before_the_first_text_has_a_status_in_a_stream_too(client: Any) -> None:
    assert post(client, file=b"text, not audio", stream="true").status_code == 400


def test_a_model_that_is_not_served_is_not_found(client: Any) -> None:
    answer = post(client, model="large")

    error = answer.json()["error"]
    assert answer.status_code == 404
    assert error["code"] == "model_not_found"
    assert "served: default, whisper-1." in error["message"]
    assert "--alias" in error["message"]


def test_without_a_name_of_a_model_it_is_the_one_that_is_served(client: Any) -> None:
    whole = post(client).json()

    empty = post(client, model="")
    missing = client.post(URL, files={"file": ("upload", CLIP.read_bytes())})

    assert empty.json() == missing.json() == whole


def test_an_alias_is_a_name_of_the_model(serving: Callable[..., Any]) -> None:
    client = serving(aliases=("gpt-4o-transcribe", "a/b"))

    models = client.get("/v1/models").json()["data"]

    assert [(one["id"], one["root"]) for one in models] == [
        ("default", "default"),
        ("whisper-1", "default"),
        ("gpt-4o-transcribe", "default"),
        ("a/b", "default"),
    ]
    assert post(client, model="gpt-4o-transcribe").status_code == 200


def test_each_adapter_is_a_model_beside_its_base(
    serving: Callable[..., Any], exported: Callable[..., Any], tmp_path: Path
) -> None:
    bundle = exported("onnxruntime", "micro", adapters_as_inputs="4", batch=4)
    base = Transcriber(bundle, RunOptions(threads=1))
    folders = {
        name: write_adapter(tmp_path / name, adapter_tensors(i)) for i, name in enumerate("ab")
    }
    client = serving(of=base, model_id="micro", adapters={n: str(f) for n, f in folders.items()})
    own = {"micro": base, **{f"micro:{name}": base.adapted(f) for name, f in folders.items()}}
    options: dict[str, Any] = {"language": "en", "temperature": 0.0}
    with wave.open(str(tmp_path / "clip.wav"), "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        noise = np.random.default_rng(3).normal(0, 3000, 3200)
        file.writeframes(noise.astype(np.int16).tobytes())
    clip = (tmp_path / "clip.wav").read_bytes()
    texts = {
        name: each.transcribe(tmp_path / "clip.wav", **options).text for name, each in own.items()
    }

    answers = [post(client, model=name, file=clip, language="en").json() for name in own]
    asked = [*own] * 4  # at the same time
    service, greedy = client.service, TranscribeOptions(decode=DecodeOptions(language="en"))
    futures = [
        service.scheduler.transcribe(
            tmp_path / "clip.wav", greedy, transcriber=service.transcribers[name]
        )
        for name in asked
    ]

    assert len({*texts.values()}) == 3
    assert [answer["text"] for answer in answers] == [text.strip() for text in texts.values()]
    assert [future.result(60).text for future in futures] == [texts[name] for name in asked]
    listed = [model["id"] for model in client.get("/v1/models").json()["data"]]
    assert {*own, "whisper-1"} <= {*listed}
    assert post(client, model="micro:c", file=clip).status_code == 404


@pytest.mark.parametrize("language", ["auto", "AUTO "])
def test_the_language_auto_is_detected(client: Any, language: str) -> None:
    assert post(client, language=language).json() == post(client).json()


def test_a_form_in_a_charset_that_is_slow_to_decode_is_rejected(client: Any) -> None:
    kind = "multipart/form-data; boundary=b; charset="

    for charset, status in (("punycode", 400), ("idna", 400), ("utf-16", 400), ("UTF-8", 400)):
        error = client.post(URL, content=b"--b--", headers={"content-type": kind + charset})

        assert error.status_code == status
        assert ("charset" in error.json()["error"]["message"]) == (charset != "UTF-8")


def test_a_model_of_one_language_does_not_translate(client: Any) -> None:
    error = post(client, url="/v1/audio/translations").json()["error"]

    assert "cannot translate" in error["message"]
    assert error["param"] == "model"


def test_audio_that_is_too_long_is_too_large(serving: Callable[..., Any]) -> None:
    client = serving(max_audio_seconds=2)

    answer = post(client)

    assert answer.status_code == 413
    assert "longer than 2 s" in answer.json()["error"]["message"]


def test_a_full_queue_says_when_to_try_again(serving: Callable[..., Any]) -> None:
    client = serving(max_requests=1)
    with client.service.request():
        answer = post(client)

    assert answer.status_code == 429
    assert answer.json()["error"]["code"] == "queue_full"
    assert int(answer.headers["retry-after"]) >= 1


def test_a_server_that_ends_accepts_nothing(client: Any) -> None:
    client.service.scheduler.close(0)

    for answer in (post(client), client.get("/ready")):
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "shutting_down"
        assert int(answer.headers["retry-after"]) >= 1


def test_an_unexpected_error_is_not_explained_and_not_repeated(
    client: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("a secret path")

    monkeypatch.setattr(client.service.scheduler, "transcribe", broken)

    answer = post(client)

    assert answer.status_code == 500
    assert answer.headers["x-should-retry"] == "false"
    assert answer.json()["error"]["code"] == "internal"
    assert "secret" not in answer.text
    assert "secret" in caplog.text


@pytest.mark.parametrize(
    ("url", "language", "decode"),
    [
        (URL, "", DecodeOptions()),
        (URL, "de", DecodeOptions(language="de")),
        (ENGLISH, "", DecodeOptions(task="translate")),
    ],
)
def test_language_and_task_are_those_of_the_transcriber(
    serving: Callable[..., Any],
    exported: Callable[..., Any],
    tmp_path: Path,
    url: str,
    language: str,
    decode: DecodeOptions,
) -> None:
    # given a multilingual model, which detects languages and translates
    bundle = exported("onnxruntime", "micro", batch=2)
    transcriber = Transcriber(bundle, RunOptions(threads=1))
    clip = write_wav(tmp_path / "three windows.wav", load_audio(shipped_audio()[0].path)[:8000])
    expected = transcriber.transcribe(clip, TranscribeOptions(decode=decode))
    fields = {"response_format": "verbose_json"} | ({"language": language} if language else {})

    found = post(serving(of=transcriber), fields, url=url, file=clip.read_bytes()).json()

    assert found["text"] == expected.text != ""
    assert [one["tokens"] for one in found["segments"]] == [
        list(one.tokens) for one in expected.segments
    ]
    shown = "en" if decode.task == "translate" else expected.language
    assert (found["task"], found["language"]) == (decode.task, LANGUAGES[shown])
