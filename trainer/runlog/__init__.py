"""A run's folder and log: written while it trains, read back when it has ended."""
