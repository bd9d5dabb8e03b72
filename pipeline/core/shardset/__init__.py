"""What a shard set is: its manifest, its columns, its commit. No Spark, no torch."""
