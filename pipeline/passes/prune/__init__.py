"""Structured pruning: whole channels, heads and hidden units leave the torch module before it is exported."""
