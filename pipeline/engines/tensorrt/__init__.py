"""Build and run TensorRT engines."""
