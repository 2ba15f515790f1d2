"""The command line: one file per verb, each thin."""

from whisperport.cli.main import main

__all__ = ["main"]
