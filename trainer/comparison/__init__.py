"""Runs side by side: their measurements, a table and a figure. Used for real runs and for runs in virtual time."""
