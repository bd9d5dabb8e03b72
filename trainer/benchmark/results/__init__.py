"""The results of a benchmark: summaries of records, findings, a cost model for many nodes, and the report."""
