"""Take any Whisper checkpoint to an accelerator, and prove that it still transcribes."""
