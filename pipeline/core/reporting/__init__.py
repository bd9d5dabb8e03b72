"""The parts that all reports share: pages, the style of figures, text tables."""
