"""Run ONNX graphs in ONNX Runtime."""
