"""Spark MLlib beside the parameter server: the comparison of chapter 2 of the thesis, repeated on one machine.

experiment: what is compared, and its flags; configurations: what every run computes. problems: the data, generated or
read; rows, arithmetic: losses and optima in numpy. systems/: one file a system. preparation, run, records: data is
stored, every system runs every configuration, every run is recorded. results/: summaries, findings, a cost model of many
nodes, the report. command: the command line."""
