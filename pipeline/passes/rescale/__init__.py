"""Factors moved between layers, so that a float graph answers the same and quantizes better."""
