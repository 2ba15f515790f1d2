"""Options of a server."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from whisperport.apps.serving.keys import Keys
from whisperport.apps.serving.origins import is_local
from whisperport.errors import UsageError
from whisperport.system.option import Option, check_ranges

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """How a server listens, what it accepts, and how it ends.

    Attributes:
        keys: that open it; without any, everyone who reaches it may use it.

    Raises:
        UsageError: a value is out of its range; a public address has no key; or one of `certfile` and
            `keyfile` is missing.
    """

    keys: Keys = field(default_factory=Keys, repr=False)
    host: Annotated[
        str,
        Option(
            "Address to listen on. A public one, such as 0.0.0.0, requires an API key",
            metavar="ADDRESS",
        ),
    ] = "127.0.0.1"
    port: Annotated[int, Option("Port to listen on; 0: any free one", 0, 65535)] = 8000
    model_id: Annotated[
        str,
        Option(
            "Name of the model that clients are shown",
            metavar="NAME",
            default="the name of the checkpoint",
        ),
    ] = ""
    aliases: Annotated[
        tuple[str, ...],
        Option(
            "Further name by which clients may ask for the model, such as gpt-4o-transcribe. Repeat the "
            "option for several",
            flag="--alias",
            metavar="NAME",
            repeat=True,
            default="whisper-1",
        ),
    ] = ()
    adapters: Annotated[
        Mapping[str, str],
        Option(
            "Serve an adapter of PEFT beside its base, as the model BASE:NAME, from the folder DIR; may be "
            "repeated. The bundle must be one of `export --adapters-as-inputs`",
            flag="--adapter",
            metavar="NAME=DIR",
            default="none",
        ),
    ] = field(default_factory=dict)
    allow_open: Annotated[
        bool,
        Option("Listen on a public address without an API key: everyone there may use the server"),
    ] = False
    allowed_hosts: Annotated[
        tuple[str, ...],
        Option(
            "Further name of this server that clients may use, such as the one behind a proxy. Repeat the "
            "option for several",
            flag="--allowed-host",
            metavar="NAME",
            repeat=True,
            default="localhost, the name of this machine, and addresses",
        ),
    ] = ()
    allowed_origins: Annotated[
        tuple[str, ...],
        Option(
            "Exact origin of a web page that may use this server, such as https://captions.example. Repeat "
            "the option for several",
            flag="--allowed-origin",
            metavar="ORIGIN",
            repeat=True,
            default="only the server's own page",
        ),
    ] = ()
    max_queue_seconds: Annotated[
        float,
        Option(
            "Reject a request with status 429 if the work before it would take longer; estimated from the "
            "measured speed",
            0,
            1e6,
            metavar="SECONDS",
        ),
    ] = 600.0
    max_requests: Annotated[
        int, Option("Maximum number of concurrent requests, uploads included", 1, 10_000)
    ] = 128
    max_body_mib: Annotated[int, Option("Maximum size of a request in MiB", 1, 100_000)] = 100
    max_audio_seconds: Annotated[
        float, Option("Maximum duration of an audio file", 1, 1e6, metavar="SECONDS")
    ] = 6 * 3600.0
    idle_seconds: Annotated[
        float,
        Option(
            "Close a connection whose client sends nothing of an unfinished request for this long",
            0.1,
            3600,
            metavar="SECONDS",
        ),
    ] = 30.0
    drain_seconds: Annotated[
        float,
        Option(
            "After SIGTERM, let running requests finish for at most this long",
            0,
            86400,
            metavar="SECONDS",
        ),
    ] = 30.0
    batch: Annotated[
        bool,
        Option(
            "Decode windows of several requests together if the bundle has a program step_B. Texts and "
            "times do not depend on it; log-probabilities differ by up to 1e-4"
        ),
    ] = True
    max_sessions: Annotated[int, Option("Maximum number of realtime sessions", 1, 1000)] = 16
    resume_seconds: Annotated[
        float,
        Option(
            "Keep a realtime session for this long after its connection broke: its client can resume it",
            0,
            86400,
            metavar="SECONDS",
        ),
    ] = 60.0
    wyoming: Annotated[
        str,
        Option(
            "Serve Home Assistant's Wyoming protocol too, at a URI such as tcp://0.0.0.0:10300. It has no "
            "keys: everyone who reaches the address may use it",
            metavar="URI",
            default="not served",
        ),
    ] = ""
    wyoming_name: Annotated[
        str,
        Option(
            "Name by which Home Assistant finds this server in the local network",
            metavar="NAME",
            default="whisperport- and the name of this machine",
        ),
    ] = ""
    wyoming_language: Annotated[
        str,
        Option(
            "Language of voice commands for which Wyoming's client names none",
            metavar="LANGUAGE",
            default="detected",
        ),
    ] = ""
    wyoming_vad: Annotated[
        bool,
        Option(
            "Detect the end of a voice command here, and send its transcript without waiting for the client"
        ),
    ] = False
    certfile: Annotated[
        Path | None,
        Option(
            "TLS certificate chain, as a PEM file", metavar="FILE", default="no TLS", exists=True
        ),
    ] = None
    keyfile: Annotated[
        Path | None,
        Option(
            "Private key of the TLS certificate, as a PEM file",
            metavar="FILE",
            default="none",
            exists=True,
        ),
    ] = None

    def __post_init__(self) -> None:
        check_ranges(self)
        if not is_local(self.host) and not self.keys and not self.allow_open:
            raise UsageError(
                f"a server on {self.host} without an API key is open to everyone who reaches it",
                why="the address is not one of this machine only",
                hint="give --api-key-file FILE or set WHISPERPORT_API_KEY; --allow-open serves everyone",
            )
        if (self.certfile is None) != (self.keyfile is None):
            raise UsageError(
                "`certfile` and `keyfile` belong together",
                why="one of them is missing",
                hint="give both, or neither",
            )
        if "*" in self.allowed_origins:
            raise UsageError(
                "`*` is not an origin",
                why="every web page could use the server",
                hint="give exact origins, such as https://captions.example",
            )

    @property
    def max_body_bytes(self) -> int:
        """Maximum size of a request in bytes."""
        return self.max_body_mib * MIB
