"""`whisperport serve`"""

import json
import logging
from pathlib import Path
from typing import Any

import click

from whisperport.apps.cli.console import print_note
from whisperport.apps.cli.fields import field_options, field_values
from whisperport.apps.cli.given import InputPath
from whisperport.apps.cli.model_option import chosen_bundle, model_options
from whisperport.apps.cli.shared_options import (
    RUN_OPTIONS,
    run_option,
    run_options_of,
    short_windows,
    threads,
    trust,
)
from whisperport.apps.cli.verb import Verb, option
from whisperport.apps.serving import serve as run_serve
from whisperport.apps.serving.keys import VARIABLE, Keys
from whisperport.apps.serving.serve_options import ServeOptions
from whisperport.system.progress import reporting

LISTEN = ("host", "port", "model_id", "aliases", "adapters", "certfile", "keyfile")
ACCESS = ("allow_open", "allowed_hosts", "allowed_origins")
WYOMING = ("wyoming", "wyoming_name", "wyoming_language", "wyoming_vad")
LIMITS = ("max_queue_seconds", "max_requests", "max_body_mib", "max_audio_seconds", "idle_seconds")
SESSIONS = ("max_sessions", "resume_seconds")


class _Log(logging.Handler):
    """Prints one line per request on stderr."""

    def __init__(self, *, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def emit(self, record: logging.LogRecord) -> None:
        fields = getattr(record, "request", None)
        text = json.dumps(fields) if self._as_json and fields else self.format(record)
        print_note(text, important=record.levelno > logging.INFO)


@click.command(
    cls=Verb,
    short_help="Serve OpenAI's transcription API with a bundle.",
    target_options=RUN_OPTIONS,
)
@model_options
@field_options(ServeOptions, *LISTEN, group="Server")
@option(
    "--api-key-file",
    group="Access",
    type=InputPath(dir_okay=False),
    metavar="FILE",
    show_default=f"${VARIABLE}_FILE, or the key in ${VARIABLE}, or no key",
    help="File with the API keys that clients must send, one per line",
)
@option(
    "--json",
    "as_json",
    group="Output",
    is_flag=True,
    help="Print one JSON object per request in place of a line",
)
@field_options(ServeOptions, *ACCESS, group="Access")
@field_options(ServeOptions, *WYOMING, group="Home Assistant")
@field_options(ServeOptions, *SESSIONS, group="Realtime sessions")
@field_options(ServeOptions, *LIMITS, "drain_seconds", "batch", group="Limits")
@threads
@run_option
@short_windows
@trust
def serve(
    bundle: Path | None,
    model: str | None,
    api_key_file: Path | None,
    threads: int | None,
    run_options: tuple[str, ...],
    short_windows: bool | None,
    trust: bool,
    as_json: bool,
    **chosen: Any,
) -> None:
    """Serve OpenAI's transcription API with a bundle, until Ctrl-C or SIGTERM.

    Programs that use OpenAI's client libraries need only another base URL: http://ADDRESS:PORT/v1. Windows
    of all requests are decoded together, and a long file does not delay a short one. The first signal lets
    running requests finish, and the second ends the server immediately. It prints one line per request on
    stderr, which never has a transcript.

    \b
    Examples:
      $ whisperport serve --model tiny.en
      $ whisperport serve --bundle build/base --model-id whisper-1 --port 9000
      $ whisperport serve --model base --host 0.0.0.0 --api-key-file keys.txt
    """
    options = ServeOptions(keys=Keys.load(api_key_file), **field_values(ServeOptions, chosen))
    run = run_options_of(threads, run_options, trust=trust, short_windows=short_windows)
    log = logging.getLogger("whisperport.apps.serving")
    log.handlers, log.propagate = [_Log(as_json=as_json)], False
    log.setLevel(logging.INFO)
    opened = chosen_bundle(bundle, model)
    with reporting(print_note):
        run_serve(opened, options, run)
