"""ONNX files as targets write and run them: lowering, quantization, and the runner of ONNX Runtime.

On the CPU, graphs are changed when they are loaded: `weights` does it, with `attention`, `blocks`,
`any_tokens`, `audio_length`, `rounded_audio` and `graph`. Each tells why the file cannot have this form.
"""
