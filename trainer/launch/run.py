"""One host's part of a run, from its folder to its result."""

from __future__ import annotations

import secrets
from contextlib import nullcontext, suppress
from pathlib import Path

from pipeline.errors import DataError, JobError, UsageError
from trainer.config import Config, Facts
from trainer.launch.ends import conclude, interruptible, log_start
from trainer.launch.processes import Child, context
from trainer.launch.supervisor import LEADER, Interrupted, Supervisor
from trainer.options import Options
from trainer.plan import describe
from trainer.run_files import LOGS
from trainer.runlog.result import Result
from trainer.runlog.run_folder import locked
from trainer.transport.addresses import check_addresses, local_addresses
from trainer.transport.messages import unpack_json
from trainer.transport.sockets import Secret


def run(config: Config, options: Options) -> Result | None:
    """Train as far as the run has to go. Raises UsageError, DataError and JobError."""
    leads = options.has(LEADER)
    with locked(Path(config.run.output)) if leads else nullcontext():
        facts = _prepare(config, write=leads)
        if options.addresses:
            check_addresses(options.addresses, config.processes.servers)
        addresses = options.addresses or local_addresses(secrets.token_hex(8), config.processes.servers)
        supervisor = Supervisor(config, facts, options, addresses, _secret(options))
        if not (options.quiet or options.silent):
            print(describe(supervisor.plan), flush=True)
        cause = "failed"
        with interruptible(supervisor):
            try:
                if leads:
                    log_start(config, supervisor.plan)
                supervisor.run()
                cause = "finished"
            except Interrupted:
                cause = "interrupted"
                raise
            finally:
                supervisor.close()
                with nullcontext() if cause == "finished" else suppress(OSError):  # the error on its way says more
                    result = conclude(config, options, supervisor.control.status, cause) if leads else None
    return result


def _prepare(config: Config, *, write: bool) -> Facts:
    """What the shards and the model say, found out in a process of its own."""
    log = Path(config.run.output) / LOGS / "prepare.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("")  # what an earlier start said is not this one's cause
    mine, theirs = context().Pipe(duplex=False)
    child = Child("prepare", log, "trainer.launch.prepare", config, write, theirs)
    theirs.close()
    try:
        return Facts(**unpack_json(mine.recv_bytes()))
    except EOFError:
        child.process.join()
        errors = {error.exit_code: error for error in (UsageError, DataError)}
        raise errors.get(child.exit_code() or 1, JobError)(child.cause()) from None
    finally:
        child.kill()


def _secret(options: Options) -> Secret:
    if not options.token_file:
        return Secret(secrets.token_hex(32))
    token = options.token_file.read_text().strip()
    if len(token) < 16:
        raise UsageError(
            f"--token-file {options.token_file} holds {len(token)} characters; write at least 16 random ones"
        )
    return Secret(token)
