"""Exact PCA and integer k-means as spark.ml estimators, and their pure parts."""
