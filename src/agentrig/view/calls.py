"""The ledger of calls in the report: where the calls of all training steps went, and those of one rollout."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from agentrig.figures import number
from agentrig.ledger import REASONS
from agentrig.text import check_regular
from agentrig.view.reading import RunData, first_line, mapping, one_of

PLACES: Mapping[str, str] = {
    "trained": "in the loss",
    "masked": "in a sequence as context, without loss",
    "handed_over": "handed over to the algorithm, which does not say what it did with them",
    "unaccounted": "neither trained, masked nor dropped: the run stopped",
}
"""The report's text for each place."""


def calls_of(
    directory: Path, step: int, ids: Collection[str]
) -> tuple[dict[str, dict[str, list[dict[str, Any]]]], str]:
    """Return where the calls of training rollouts went, and '' or why their file cannot be read.

    Args:
        directory: The run directory.
        step: The rollouts' step.
        ids: The rollouts.

    Returns:
        Rollout to span to its rows in `calls/train-STEP.parquet`; empty if the step has none.
    """
    import pyarrow
    import pyarrow.parquet

    file = directory / "calls" / f"train-{step:05d}.parquet"
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    try:
        check_regular(file)
        rows = pyarrow.parquet.read_table(file, filters=one_of("rollout", ids), partitioning=None).to_pylist()
    except FileNotFoundError:
        return {}, ""
    except (OSError, KeyError, pyarrow.ArrowException) as error:
        why = getattr(error, "strerror", None) or first_line(error)
        return (
            {},
            f"calls/{file.name} is damaged, so it is not known which calls were trained: {why}",
        )
    for row in rows:
        found.setdefault(row["rollout"], {}).setdefault(str(row.get("span")), []).append(row)
    return found, ""


def books(run: RunData, key: str) -> dict[str, int]:
    """Return the sums over all steps of `calls` or `call_tokens`: `recorded`, each place, `dropped` and each reason.

    Reasons come as `dropped: REASON`. Empty before the first step.
    """
    found: dict[str, int] = {}

    def add(name: str, value: Any) -> None:
        found[name] = found.get(name, 0) + int(number(value) or 0)

    for step in run.steps:
        for name, value in mapping(step.get(key)).items():
            if name != "dropped":
                add(name, value)
                continue
            for reason, n in mapping(value).items():
                add("dropped", n)
                add(f"dropped: {reason}", n)
    return found


def rows(run: RunData) -> list[tuple[str, str, int, int, float]]:
    """Return place or reason, what it means, calls, tokens, and the share of the calls; the largest place first."""
    calls, tokens = books(run, "calls"), books(run, "call_tokens")
    whole = calls.get("recorded")
    if not whole:
        return []
    places = [(name, PLACES[name], name) for name in PLACES if calls.get(name) or name == "trained"]
    reasons = [k for k in calls if k.startswith("dropped: ")]
    reasons.sort(key=lambda k: -calls[k])
    places += [(k, REASONS.get(k.removeprefix("dropped: "), ""), k) for k in reasons]
    return [(name, meaning, calls.get(k, 0), tokens.get(k, 0), calls.get(k, 0) / whole) for name, meaning, k in places]
