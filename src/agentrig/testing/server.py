"""The checks of a server: of its answers, of its weights, and of its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrig.testing import server_ends as server_ends  # it declares the last checks, and imports what comes before
from agentrig.testing.checks import Report
from agentrig.testing.server_bench import TABLE


def check_server(
    subject: Any, *, settings: Any = None, only: Sequence[str] | None = None, raise_failed: bool = True, **options: Any
) -> Report:
    """Run the checks of a server; see `agentrig.testing.check`.

    Its options: `model`, a directory with a small model (a tiny random one if it is left out), `hardware`, `context`,
    `tolerance` of log-probabilities, and `end_s`, how long processes may take to end after a kill.
    """
    return TABLE.check_all(subject, settings, only, raise_failed, options)
