"""The part of the pipeline that the trainer uses too: storage, the shard set contract, reports, command lines. No Spark."""
