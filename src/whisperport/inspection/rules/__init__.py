"""The rules: each a code that stays, a page, and a check. The limits are in the targets' specs."""

from whisperport.inspection.rules import files as _files
from whisperport.inspection.rules import forms as _forms
from whisperport.inspection.rules import operators as _operators
from whisperport.inspection.rules import shapes as _shapes
from whisperport.inspection.rules.base import RULES, Finding, Rule

__all__ = ["RULES", "Finding", "Rule"]

assert all((_files, _forms, _operators, _shapes))  # imported to be registered
