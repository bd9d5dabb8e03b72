"""The quality of a committed set: the distance of its shards from the whole set as figures, words and a report."""
