"""The imports of all roles, loaded once in the fork server, whose children share the memory.

The garbage collector finds nothing while modules load, but takes a quarter of the time, so it is disabled meanwhile.
The loaded objects are then frozen: a collection would write to their pages, and each process would get its own copy."""

import gc
from contextlib import suppress

gc.disable()

with suppress(Exception):  # a role repeats the failed import, and its log has the error
    import pyarrow.compute  # noqa: F401 (loaded by the first cast of a column otherwise, in each worker)

    import trainer.evaluation.process
    import trainer.server.process
    import trainer.server.rounds
    import trainer.server.stages
    import trainer.worker.clients.all_reduce
    import trainer.worker.clients.neighbours
    import trainer.worker.process  # noqa: F401

gc.freeze()
gc.enable()
