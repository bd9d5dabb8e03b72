"""Embeddings of images by an auto-encoder, as a table of (id, embedding) for --embedding of the sharding jobs.

Uses the pipeline's readers of inputs, which need no Spark. The package itself loads no torch."""
