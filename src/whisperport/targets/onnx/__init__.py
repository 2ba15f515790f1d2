"""ONNX files as targets write and run them: lowering, weights, and the runner of ONNX Runtime."""
