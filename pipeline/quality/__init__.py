"""How far the shards of a committed set are from the whole: figures, words, the report."""
