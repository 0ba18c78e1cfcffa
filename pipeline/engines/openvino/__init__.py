"""Run graphs on OpenVINO."""
