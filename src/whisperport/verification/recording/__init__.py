"""Open a bundle, and record the inputs of its programs while it transcribes."""

from whisperport.verification.recording.bundle_session import BundleSession

__all__ = ["BundleSession"]
