"""The rules of `whisperport check`: each has a code, a page and a check. Targets' specs hold the limits."""

from whisperport.model.inspection.rules import decoding as _decoding
from whisperport.model.inspection.rules import files as _files
from whisperport.model.inspection.rules import operators as _operators
from whisperport.model.inspection.rules import tensors as _tensors
from whisperport.model.inspection.rules.rule import RULES, Finding, Rule

__all__ = ["RULES", "Finding", "Rule"]

assert all((_decoding, _files, _operators, _tensors))  # imported to be registered
