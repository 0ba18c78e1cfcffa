"""``report.html``: a run as one page that needs nothing but a browser."""
