"""What every role needs, imported once: processes are forked from one that has it, and share its memory.

The garbage collector finds nothing while modules load, but takes a quarter of the time; what is loaded stays, and is
hidden from it before the first fork, or it would write to every page and each process would own a copy."""

import gc
from contextlib import suppress

gc.disable()

with suppress(Exception):  # a role imports again what failed, and its log says why
    import trainer.evaluation.process
    import trainer.server.process
    import trainer.worker.process  # noqa: F401

gc.freeze()
gc.enable()
