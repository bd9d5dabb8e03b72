"""The part of one host in a run, from the preparation of the folder to the result."""

from __future__ import annotations

import os
import secrets
import shlex
import socket
import stat
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from pipeline.core import console
from pipeline.core.errors import DataError, JobError, UsageError, error_class
from trainer.config import Config, RunFacts
from trainer.context import RunContext
from trainer.home.folders import Folders
from trainer.home.place import Place
from trainer.home.segments import SupersededError
from trainer.home.work import WorkFolder
from trainer.launch.child import UNKNOWN, Child
from trainer.launch.fork_server import FORK_SERVER, ProcessKilledError
from trainer.launch.fork_server import context as start_method
from trainer.launch.overseer import Terminal
from trainer.launch.restarts import Restarts, pause_s
from trainer.launch.role_processes import POLL_S
from trainer.launch.supervisor import LEADER, Supervisor
from trainer.launch.workers_request import Requests
from trainer.leader.next_stage import find_continuation
from trainer.lifecycle.ends import conclude, log_end, log_start, one_line
from trainer.lifecycle.interruption import RunInterruptedError, interruptible
from trainer.lifecycle.row_storage import host_reads, row_storage
from trainer.options import Options, Role
from trainer.plan import describe, plan
from trainer.report.metrics import RunMetrics
from trainer.run_files import LOGS, PREPARE_LOG
from trainer.runlog.result import Result
from trainer.transport.addresses import local_addresses
from trainer.transport.bodies.json_object import unpack_json
from trainer.transport.sockets import IN_CLEAR, Secret


def run(
    context: RunContext,
    roles: Sequence[Role],
    options: Options,
    secret: Secret,
    work: WorkFolder,
    requests: Requests,
    metrics: RunMetrics | None = None,
) -> Result | None:
    """Train on this host until the run is over, and return the result on server 0's host, else None.

    On server 0's host the caller has prepared the home and holds its lock.
    Raises UsageError, DataError, JobError, and OSError if the home cannot be reached.

    Args:
        context: the run.
        roles: roles of this host.
        options: how this host takes part; its addresses are valid.
        secret: the token of the run.
        work: this host's work folder.
        requests: may stop the run, which continues with other workers then.
        metrics: of this process, with --metrics-port.
    """
    config = context.config
    leads = LEADER in roles
    home = work.folders.home if leads else None
    facts = prepare(
        context,
        work.folders,
        computes=options.computes,
        home=home,
        write=leads,
        log_name=preparation_log(work.folders, leads=leads),
    )
    servers = config.processes.servers
    # The random name keeps the addresses of several runs on this host apart.
    addresses = options.addresses or local_addresses(secrets.token_hex(8), servers)
    overseer = Terminal(quiet=options.quiet or options.silent, is_to_change=requests.is_waiting)
    reads = host_reads(config, facts, context.shards, roles)
    with row_storage(config, context.shards, reads, work, leads=leads, say=overseer.message) as storage:
        supervisor = Supervisor(
            config, facts, options, addresses, secret, work, roles, overseer=overseer, metrics=metrics
        )
        if not (options.quiet or options.silent):
            # Hosts with nothing but workers may not reach the checkpoints.
            start = find_continuation(config, facts, work.folders.checkpoints) if leads else None
            planned = plan(config, facts, workers_here=len(supervisor.workers), continuation=start)
            print(describe(planned, storage), flush=True)
        if config.processes.encryption == "off" and not options.silent:
            console.say("sharding.training", IN_CLEAR, level="warning")
        with interruptible(supervisor):
            return supervise(supervisor)


def supervise(supervisor: Supervisor) -> Result | None:
    """Run a host's part, and close the supervisor. Returns the result on server 0's host, else None.

    On that host also log the start and the end, and write result.json and the report. Raises as ``run``, and
    SupersededError, after which the run and its log continue elsewhere."""
    leads = LEADER in supervisor.roles
    cause = "failed"
    changes = False
    result = None
    failure = None
    try:
        if leads:
            log_start(supervisor.config, supervisor.plan, supervisor.folders)
        supervisor.run()
        cause = "finished"
    except SupersededError:
        leads = False
        raise
    except RunInterruptedError as error:
        cause = "interrupted"
        changes = error.changes
        raise
    except Exception as error:
        failure = error
        raise
    finally:
        supervisor.close(cause if failure is None else f"{cause}: {one_line(failure)}")
        if supervisor.metrics:
            supervisor.metrics.end(cause)
        with nullcontext() if cause == "finished" else suppress(OSError):  # keep the first error
            status = supervisor.control.status
            if leads and changes:
                log_end(supervisor.work, status, cause)  # the next start would delete the result
            elif leads:
                result = conclude(supervisor.work, supervisor.options, status, cause, failure)
    return result


def check(context: RunContext, options: Options) -> RunFacts:
    """Return the facts of a run without changing its folder.

    Raises UsageError, DataError or JobError if this host cannot compute the run."""
    home = context.home
    with TemporaryDirectory(prefix="trainer-") as scratch:
        work = home if isinstance(home, Path) else Path(scratch)
        # A run that is to be deleted need not fit.
        saved_home = None if options.overwrite else home
        return prepare(context, Folders(home, work), computes=options.computes, home=saved_home, write=False)


def preparation_log(folders: Folders, *, leads: bool) -> str:
    """Return the name of the log of a host's preparation.

    Hosts of a folder that they share prepare at the same time, as only the leading one holds its lock."""
    is_shared = folders.is_local and not leads
    return f"prepare-{socket.gethostname()}-{os.getpid()}.log" if is_shared else PREPARE_LOG


def prepare(
    context: RunContext,
    folders: Folders,
    *,
    computes: bool,
    home: Place | None,
    write: bool,
    log_name: str = PREPARE_LOG,
) -> RunFacts:
    """Return the facts of a run, determined in a separate process.

    If that process is killed or hangs, it is restarted as often and after the same pauses as a role.

    Args:
        context: the run.
        folders: the run's folders on this host.
        computes: whether workers or the evaluator run here.
        home: the run's folder, whose newest checkpoint must fit; None to leave it alone.
        write: whether to write a first checkpoint there if there is none.
        log_name: name of the log of the process; a log of another name than PREPARE_LOG is deleted if it is empty.
    Raises:
        UsageError, DataError: the run cannot be trained; no log is left.
        JobError: the process failed, or too often.
    """
    log = folders.work / LOGS / log_name
    restarts = Restarts()
    limit = context.config.processes.max_restarts
    while True:
        try:
            facts = _prepared(context, log, home, write=write, computes=computes)
        except ProcessKilledError as error:
            failures = restarts.failed("prepare", 0)
            if failures > limit:
                where = folders.home_place(log)
                raise JobError(f"prepare failed {failures} times in a row, last: {error}; see {where}") from None
            time.sleep(pause_s(failures))
        except (UsageError, DataError):
            log.unlink(missing_ok=True)
            with suppress(OSError):  # not empty: it has other processes' logs
                log.parent.rmdir()
            raise
        else:
            FORK_SERVER.losses.clear()  # counted above; the supervisor counts later ones
            # The leading host may have deleted it, as it clears the folder for --overwrite.
            with suppress(FileNotFoundError):
                if log_name != PREPARE_LOG and not log.stat().st_size:
                    log.unlink()
            return facts


def _prepared(context: RunContext, log: Path, home: Place | None, *, write: bool, computes: bool) -> RunFacts:
    """Run one preparing process and return its reply.

    Raises ProcessKilledError if it was killed, otherwise the error with which it ended.

    context: the run; home, write, computes: see trainer.lifecycle.prepare.main; log: file of its output, which is emptied
    before."""
    config = context.config
    log.parent.mkdir(parents=True, exist_ok=True)  # here, as another host may have removed the empty folder
    log.write_text("", encoding="utf-8")  # an earlier attempt's error must not be taken for this one's
    # Opened before the process starts: a set that is replaced from here on is refused.
    digest = context.shards.digest
    own_end, child_end = start_method().Pipe(duplex=False)
    with own_end:
        with child_end:
            child = Child("prepare", log, "trainer.lifecycle.prepare", config, digest, home, write, computes, child_end)
        try:
            while not own_end.poll(POLL_S):
                if child.hangs(config.heartbeat_timeout_s):
                    child.kill()
            reply = unpack_json(own_end.recv_bytes())
            for text in reply.pop("warnings"):
                console.say("sharding.training", text, text=f"warning: {text}", level="warning")
            return RunFacts.from_json(reply)
        except EOFError:
            child.join()
        finally:
            child.kill()
    code = child.exit_code() or 1
    cause = child.cause()
    if code < 0 or code == UNKNOWN:
        raise ProcessKilledError(cause)
    raise error_class(code)(cause)


def read_secret(config: Config, options: Options) -> Secret:
    """Return the token of --token-file, or a random one. Raises UsageError for a file without a long token."""
    encryption = config.processes.encryption
    if not options.token_file:
        return Secret(secrets.token_hex(32), encryption)
    try:
        # Text, so that all hosts can be given it in any way; random bytes are none.
        token = options.token_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        cause = getattr(error, "strerror", "") or error
        raise UsageError(
            f"--token-file {options.token_file} cannot be read as text ({cause}); make one with openssl rand -hex 32"
        ) from None
    if len(token) < 16:
        raise UsageError(
            f"--token-file {options.token_file} holds {len(token)} characters; write at least 16 random ones"
        )
    mode = stat.S_IMODE(options.token_file.stat().st_mode)
    if mode & stat.S_IROTH:
        text = (
            f"--token-file {options.token_file} can be read by every user of this host (mode {mode:o}), who could join the"
            f" run and read its messages: chmod 600 {shlex.quote(str(options.token_file))}"
        )
        console.say("sharding.training", text, level="warning")
    return Secret(token, encryption)
