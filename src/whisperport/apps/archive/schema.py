"""The columns of the output and their types, as a schema of Arrow."""

from typing import TYPE_CHECKING

from whisperport.errors import needs

if TYPE_CHECKING:
    import pyarrow

VERSION = b"2"  # of the schema, in its metadata


def schema() -> "pyarrow.Schema":
    """Return the schema of a part.

    Raises:
        MissingPackageError: pyarrow is not installed.
    """
    with needs("cannot write Parquet: pyarrow is not installed", extra="archive"):
        import pyarrow as pa
    text, number, texts = pa.string(), pa.float64(), pa.list_(pa.string())
    word = pa.struct({"word": text, "start": number, "end": number, "probability": number})
    times = {"start": number, "end": number}
    scores = ("avg_logprob", "no_speech_prob", "temperature", "compression_ratio")
    segment = pa.struct(
        times
        | {"text": text, "tokens": pa.list_(pa.int32())}
        | dict.fromkeys(scores, number)
        | {"seek": pa.int64(), "words": pa.list_(word), "logprobs": pa.list_(number)}
    )
    error = pa.struct({"code": text, "what": text, "why": text, "hint": text})
    columns = {
        "id": text,
        "path": text,
        "size": pa.int64(),
        "modified_ns": pa.int64(),
        "duration": number,
        "text": text,
        "segments": pa.list_(segment),
        "language": text,
        "language_probability": number,
        "avg_logprob": number,
        "confidence": number,
        "marks": texts,
        "warnings": texts,
        "seconds": number,
        "error": error,
        "audio_sha256": text,
        "transcribed_at": pa.timestamp("ms", "UTC"),
        "model": text,
        "bundle_sha256": text,
        "options_sha256": text,
        "versions": pa.map_(text, text),
    }
    return pa.schema(list(columns.items()), metadata={"whisperport.apps.archive": VERSION})
