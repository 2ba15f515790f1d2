"""Probe an execution provider of ONNX Runtime with every program of a bundle.

Each session is created in a child process with limits, so that a crash is a result and not the end. All
outputs are compared with those of ONNX Runtime's CPU provider for the same real inputs.
"""

from whisperport.probing.bundle_probe import ProbeOptions, probe
from whisperport.probing.report import Attempt, Choice, NodeCount, Probed

__all__ = ["Attempt", "Choice", "NodeCount", "ProbeOptions", "Probed", "probe"]
