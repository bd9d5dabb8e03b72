"""What all reports share: pages, the look of figures, text tables."""
