"""OpenAI's realtime transcription sessions: live captions over a WebSocket."""
