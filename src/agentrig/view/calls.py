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
    directory: Path, rows: Collection[Mapping[str, Any]]
) -> tuple[dict[str, dict[str, list[dict[str, Any]]]], list[str]]:
    """Return where the calls of rollouts went, and why files of their calls cannot be read, one sentence each.

    Args:
        directory: The run directory.
        rows: The rollouts; only those of training have such files.

    Returns:
        Rollout to span to its rows in `calls/train-STEP.parquet`; none for a step without one.
    """
    import pyarrow
    import pyarrow.parquet

    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    damage = []
    ids = {str(row["id"]) for row in rows}
    for step in sorted({row["step"] for row in rows if row["mode"] == "train"}):
        file = directory / "calls" / f"train-{step:05d}.parquet"
        try:
            check_regular(file)
            table = pyarrow.parquet.read_table(file, filters=one_of("rollout", ids), partitioning=None)
            for call in table.to_pylist():
                found.setdefault(call["rollout"], {}).setdefault(str(call.get("span")), []).append(call)
        except FileNotFoundError:
            continue
        except (OSError, KeyError, pyarrow.ArrowException) as error:
            why = getattr(error, "strerror", None) or first_line(error)
            damage.append(f"calls/{file.name} is damaged, so it is not known which calls were trained: {why}")
    return found, damage


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
