"""The daemon that a local Spark forks its Python workers from: pyspark's own, with the tasks' libraries imported.

A worker of pyspark's daemon imports them itself, which takes two seconds, and scans all their objects for garbage after
every task, which takes a tenth of a second."""

import gc

import pandas
import pyarrow.parquet
import pyspark.worker
from pyspark.daemon import manager

__all__ = ["pandas", "pyarrow", "pyspark"]

if __name__ == "__main__":
    gc.freeze()
    manager()
