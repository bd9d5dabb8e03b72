"""The contract of a shard set: its manifest, columns and commit. No Spark, no torch."""
