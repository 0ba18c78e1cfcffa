"""Load and describe models: sources, sample inputs, torch modules, ONNX files."""
