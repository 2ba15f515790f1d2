"""The target `litert`: LiteRT (TensorFlow Lite) with XNNPACK on the CPU."""
