"""The command line: verbs, and what happens when one of them fails."""

import sys

import click

import whisperport
from whisperport.cli.console import print_error, stderr
from whisperport.cli.demo import demo
from whisperport.cli.doctor import doctor
from whisperport.cli.export import export
from whisperport.cli.targets import targets
from whisperport.cli.transcribe import transcribe
from whisperport.cli.verify import verify
from whisperport.errors import WhisperportError


class _InOrder(click.Group):
    """Lists the verbs in the order in which one needs them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=_InOrder, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(whisperport.__version__, prog_name="whisperport")
def cli() -> None:
    """Take any Whisper checkpoint to an accelerator, and prove that it still transcribes.

    \b
    Example:
      $ whisperport demo
    """


for verb in (export, verify, transcribe, targets, doctor, demo):
    cli.add_command(verb)


def main() -> None:
    """Exit 0: done, and equal where something was compared; 1: failed or not equal; 2: wrong usage."""
    try:
        cli(standalone_mode=False)
    except WhisperportError as error:
        print_error(error)
        sys.exit(1)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        stderr.print("interrupted: nothing was left half-written")
        sys.exit(1)
