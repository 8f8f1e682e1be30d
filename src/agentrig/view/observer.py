"""The report as an observer: it writes a run's page when the run has ended, with or without an error."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from agentrig import hookimpl
from agentrig.errors import AgentrigError
from agentrig.observers import RunEnd, RunError
from agentrig.processes.ends import Interrupted
from agentrig.view import ReportKept, build_report

log = logging.getLogger(__name__)


@hookimpl
def on_run_end(event: RunEnd) -> None:
    """Write the page of a run that ended successfully."""
    write_page(event.directory)


@hookimpl
def on_run_error(event: RunError) -> None:
    """Write the page of a run that ended by an error or a signal.

    Not if a signal came before its first step, and not after the second signal, which ends it at once.
    """
    if isinstance(event.error, Interrupted) and event.error.at_once:
        return
    if (event.directory / "metrics.jsonl").exists() or not isinstance(event.error, KeyboardInterrupt):
        write_page(event.directory)


def write_page(directory: Path) -> None:
    """Write a run's page. If that fails, log why and remove an older page, unless only that has the run's curves."""
    try:
        build_report([directory])
        return
    except ReportKept as kept:
        log.warning("%s", kept)
        return
    except AgentrigError as error:
        log.error("the report could not be built: %s", error)
    except Exception:
        log.exception("the report could not be built; the run's figures are safe in %s", directory)
    with contextlib.suppress(OSError):
        (directory / "report.html").unlink()
