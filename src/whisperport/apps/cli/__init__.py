"""The command line: one file per verb, each thin."""

from whisperport.apps.cli.main import main

__all__ = ["main"]
