"""Few bits: where Q/DQ pairs go, on which grids, and how weights are rounded."""
