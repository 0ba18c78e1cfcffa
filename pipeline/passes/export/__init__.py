"""Export torch modules to ONNX."""
