"""The names of clustering engines and clusterings, and which engine has which.

They stand apart from the engines, so that a command line is checked without loading spark.ml."""

from typing import Literal

EngineName = Literal["block", "spark-ml", "scikit-learn"]
ClusteringName = Literal["kmeans", "gaussian-mixture", "dbscan"]
CLUSTERINGS: dict[EngineName, tuple[ClusteringName, ...]] = {
    "block": ("kmeans",),
    "spark-ml": ("kmeans", "gaussian-mixture"),
    "scikit-learn": ("kmeans", "gaussian-mixture", "dbscan"),
}
