"""Commands about a committed set: what is in it, whether it is whole, and what killed runs have left beside it. No Spark."""
