"""The events that observers get, as read-only copies (`agentrig.frozen`): observers cannot change a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs


@attrs.frozen(kw_only=True)
class RunStart:
    """A run begins.

    Attributes:
        directory: The run directory; `config.toml` and `manifest.json` are already there.
        config: The resolved configuration, section to keys.
        steps: Number of planned training steps; None if the algorithm does not set it.
        first_step: Greater than 1 when the run is resumed.
    """

    directory: Path
    config: Mapping[str, Any]
    steps: int | None
    first_step: int


@attrs.frozen(kw_only=True)
class StepEnd:
    """A training step ended.

    Attributes:
        step: Counted from 1.
        metrics: The line of `metrics.jsonl`.
    """

    step: int
    metrics: Mapping[str, Any]


@attrs.frozen(kw_only=True)
class RunEnd:
    """A run ended successfully.

    Attributes:
        directory: The run directory.
        summary: The content of `summary.json`.
    """

    directory: Path
    summary: Mapping[str, Any]


@attrs.frozen(kw_only=True)
class RunError:
    """A run ended by an error or by Ctrl-C.

    Attributes:
        directory: The run directory.
        error: What ended it; `KeyboardInterrupt` for Ctrl-C.
    """

    directory: Path
    error: BaseException
