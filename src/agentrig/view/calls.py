"""The ledger of calls in the report: where the calls of all training steps went."""

from __future__ import annotations

from collections.abc import Mapping

from agentrig.ledger import REASONS
from agentrig.view.figures import totals
from agentrig.view.reading import RunData

PLACES: Mapping[str, str] = {
    "trained": "in the loss",
    "masked": "in a sequence as context, without loss",
    "handed_over": "handed over to the algorithm, which does not say what it did with them",
    "unaccounted": "neither trained, masked nor dropped: the run stopped",
}
"""The report's text for each place."""


def books(run: RunData, key: str) -> dict[str, int]:
    """Return the sums over all steps of `calls` or `call_tokens`: `recorded`, each place, `dropped` and each reason.

    Reasons come as `dropped: REASON`. Empty before the first step.
    """
    reasons = totals(run, key, "dropped")
    found = totals(run, key) | {f"dropped: {reason}": n for reason, n in reasons.items()}
    return found | {"dropped": sum(reasons.values())} if found else {}


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
