"""Render ``report.html``, a page that needs nothing but a browser."""
