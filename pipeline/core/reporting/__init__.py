"""The common parts of all reports: pages, the style of figures, text tables."""
