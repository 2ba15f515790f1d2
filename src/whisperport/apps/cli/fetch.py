"""`whisperport fetch`"""

import click

from whisperport.apps.cli.console import print_json, print_lines, print_next, print_note, stages
from whisperport.apps.cli.shared_options import as_json
from whisperport.apps.cli.verb import Verb
from whisperport.build.fetch import fetch as run_fetch
from whisperport.system.progress import Counted, reporting


@click.command(cls=Verb, short_help="Download the weights of a Whisper model by name.")
@click.argument("name", metavar="NAME")
@as_json
def fetch(name: str, as_json: bool) -> None:
    """Find the weights of a Whisper model, and download them if they are not on this machine.

    NAME is a name such as tiny.en, base or turbo. OpenAI's file is accepted only if it has its published
    SHA-256. It is stored in openai-whisper's cache, ~/.cache/whisper or XDG_CACHE_HOME/whisper, and both
    packages use it. A download that was interrupted is continued.

    \b
    Examples:
      $ whisperport fetch tiny.en
      $ whisperport fetch turbo
    """
    with stages() as shown:
        is_told = False

        def progress(stage: str) -> None:
            nonlocal is_told
            if isinstance(stage, Counted) and not is_told:
                is_told = True
                print_note(stage)
            shown(stage)

        with reporting(progress):
            path = run_fetch(name)
    if as_json:
        print_json({"name": name, "path": str(path)})
    else:
        print_lines(str(path))
    print_next("export", name, "--target", "onnxruntime", "--out", f"build/{name}")
