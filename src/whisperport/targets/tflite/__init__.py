"""TFLite files as targets write and run them: lowering, quantization, and the runner of LiteRT."""
