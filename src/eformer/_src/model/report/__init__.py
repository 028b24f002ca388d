"""Two models compared, as text, as a page and as JSON."""
