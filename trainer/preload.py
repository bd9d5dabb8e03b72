"""What every role needs, imported once: processes are forked from one that has it, and share its memory."""

import gc

import trainer.evaluator
import trainer.server
import trainer.worker  # noqa: F401

gc.collect()
gc.freeze()  # or the collector would write to every page, and each process would own a copy
