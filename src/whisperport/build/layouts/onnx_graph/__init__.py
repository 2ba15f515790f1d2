"""Whisper as ONNX graphs of dynamic lengths, written node by node from a checkpoint's weights."""
