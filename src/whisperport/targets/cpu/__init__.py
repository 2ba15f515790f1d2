"""Targets that run on any CPU: ONNX Runtime, ExecuTorch, LiteRT and others."""
