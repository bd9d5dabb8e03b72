"""The check of Kerberos: tickets and delegation tokens of the driver and of executors."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.core.storage.hadoop_conf import AUTHENTICATION
from pipeline.doctor.checks import FAILED, OK, WARNING, Check, shorten_names
from pipeline.doctor.facts import ExecutorAccess, ProcessFacts

NO_TOKENS = (
    "YARN gives its containers tokens; elsewhere give executors a ticket, or a file of tokens by"
    " spark.executorEnv.HADOOP_TOKEN_FILE_LOCATION"
)


def check_kerberos(kerberos: bool, uses_hdfs: bool, facts: Sequence[ProcessFacts]) -> Check:
    """Return the check of Kerberos: failed if it is required and a process has neither ticket nor tokens.

    It is only a warning if no path is on HDFS. facts: the driver's first, then the executors'."""
    if not kerberos:
        return Check("kerberos", OK, f"off ({AUTHENTICATION} is simple)")
    lacking = [each.where for each in facts if not (each.has_ticket or each.has_tokens)]
    if not lacking:
        return Check("kerberos", OK, "a ticket or tokens everywhere")
    level = FAILED if uses_hdfs else WARNING
    if not (facts[0].has_ticket or facts[0].has_tokens):
        return Check(
            "kerberos", level, f"on, and there is no valid ticket on {shorten_names(lacking)}", "run kinit first"
        )
    return Check("kerberos", level, f"on, and neither ticket nor tokens on {shorten_names(lacking)}", NO_TOKENS)


def no_tokens(views: Sequence[ExecutorAccess]) -> str:
    """Return the error line for executors that HDFS will refuse, or an empty text."""
    lacking = [view.where for view in views if not view.may_use_hdfs]
    if not lacking:
        return ""
    return f"HDFS asks for Kerberos, and {shorten_names(lacking)} of the cluster have neither ticket nor tokens: {NO_TOKENS}"
