"""From rows to one Parquet file a worker and chunk, and to the manifest's entries."""
