"""The target `openvino`: OpenVINO on the CPU, or on another of its devices."""
