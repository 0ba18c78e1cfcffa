"""Make engines, measure them, choose one and load it. The public API is that of ``enginesmith`` itself."""
