"""Tests without Spark, clusters or training processes."""
