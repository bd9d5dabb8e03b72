"""The daemon that the tests' Spark forks its Python workers from: pyspark's own, with everything imported that tasks need.

A worker of the stock daemon imports the libraries anew, for two seconds, and looks through all their objects for garbage
after every task, for a tenth of one. Jobs that are started by themselves, on clusters too, have the stock daemon."""

import gc

import pandas
import pyarrow.parquet
import pyspark.worker
from pyspark.daemon import manager

import pipeline.runs.compare
import pipeline.runs.reshard
import pipeline.runs.shard

__all__ = ["pandas", "pipeline", "pyarrow", "pyspark"]

if __name__ == "__main__":
    gc.freeze()
    manager()
