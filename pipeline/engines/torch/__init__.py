"""Run modules in PyTorch: eager and compiled."""
