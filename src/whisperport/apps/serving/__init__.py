"""A server of OpenAI's transcription API: one scheduler, and the protocols that feed it."""
