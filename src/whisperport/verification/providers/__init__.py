"""Verify each program of a bundle on an execution provider of ONNX Runtime.

Each session is created in a child process with limits, so that a crash is a result and not the end. All
outputs are compared with those of ONNX Runtime's CPU provider for the same real inputs.
"""

from whisperport.verification.providers.each_program import verify_each_program
from whisperport.verification.providers.provider_report import ProviderReport, Trial

__all__ = ["ProviderReport", "Trial", "verify_each_program"]
