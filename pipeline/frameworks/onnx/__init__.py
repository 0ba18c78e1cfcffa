"""Read, edit, evaluate and count ONNX graphs."""
