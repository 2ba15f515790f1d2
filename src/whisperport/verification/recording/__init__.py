"""Open a bundle, and record the inputs of its programs while it transcribes."""

from whisperport.verification.recording.session import BundleSession

__all__ = ["BundleSession"]
