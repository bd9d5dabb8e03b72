"""Vectors of images by an auto-encoder, as a table of (id, embedding) for --embedding of the sharding jobs.

It stands above the pipeline's reading of inputs, which needs no Spark. Loads no torch by itself."""
