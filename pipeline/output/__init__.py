"""The conversion of rows to one Parquet file per worker and chunk, and to the manifest's entries."""
