"""What every role needs, imported once: processes are forked from one that has it, and share its memory.

The garbage collector finds nothing while modules load, but takes a quarter of the time; what is loaded stays, and is
hidden from it before the first fork, or it would write to every page and each process would own a copy."""

import gc

gc.disable()

import trainer.evaluation.process  # noqa: E402
import trainer.server.process  # noqa: E402
import trainer.worker.process  # noqa: E402, F401

gc.freeze()
gc.enable()
