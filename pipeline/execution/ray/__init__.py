"""Run steps on the nodes of a Ray cluster."""
