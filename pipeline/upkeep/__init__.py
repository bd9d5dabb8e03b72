"""Commands for a committed set: its contents, its integrity, and the leftovers of killed runs. No Spark."""
