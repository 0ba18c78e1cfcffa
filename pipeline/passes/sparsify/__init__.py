"""Weights set to zero in a graph, 2:4 or unstructured by magnitude; and whether they stay so."""
