"""A server of OpenAI's transcription API: one scheduler, and the protocols that feed it.

What needs the packages of the server is imported when it is called.
"""

import os
from typing import TYPE_CHECKING

from whisperport.errors import needs

if TYPE_CHECKING:
    from whisperport.apps.serving.serve_options import ServeOptions
    from whisperport.program.bundle import Bundle
    from whisperport.targets import RunOptions
    from whisperport.transcription import Transcriber


def serve(
    bundle: "Bundle | str | os.PathLike[str] | Transcriber | None" = None,
    options: "ServeOptions | None" = None,
    run: "RunOptions | None" = None,
) -> None:
    """Serve OpenAI's transcription API until SIGTERM or Ctrl-C, which let running requests finish.

    Call it in the main thread. The stage "listening on URL" begins when requests are accepted. The logger
    "whisperport.apps.serving" has one line for each request.

    Args:
        bundle: a bundle, the name of a model, or a loaded transcriber: see `Transcriber`.
        options: address, limits and keys; None: defaults.
        run: CPU threads, trust and the targets' run options; None: defaults.

    Raises:
        BundleError, CheckpointError: the bundle cannot be loaded.
        MissingPackageError: the extra `serve`, or a target's runtime, is not installed.
        UsageError: the address or the certificate cannot be used.
    """
    with needs("the server's packages are not installed", extra="serve"):
        from whisperport.apps.serving.serve_options import ServeOptions
        from whisperport.apps.serving.server import run_server
    run_server(bundle, options or ServeOptions(), run)
