"""Train on committed shards with worker, server and evaluator processes. Imports torch, never Spark."""
