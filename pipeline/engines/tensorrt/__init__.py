"""What ``engines/tensorrt.py`` is made of: one concern of building and running TensorRT engines in each file."""
