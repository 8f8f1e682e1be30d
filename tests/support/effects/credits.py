"""The keys of the named credits, observed in what they say that calls are worth."""

from __future__ import annotations

from typing import Any

from rollouts import rollout, trace_of

from agentrig import Score, Triplet
from effects import Flip, Settings
from effects.tasks import build


def worths(name: str) -> Any:
    """Return a look at the worths of two rollouts: three calls with the rewards 1, 0 and 1, and one with 0."""

    def made(*calls: float) -> Any:
        triplets = [Triplet(prompt_ids=[1], response_ids=[2], span_id=f"c{i}") for i in range(len(calls))]
        score = Score(status="ok", value=calls[-1], calls=calls)
        return rollout(score=score, trace=trace_of(*["write"] * len(calls)), triplets=triplets)

    def look(settings: Settings) -> list[Any]:
        (found,) = build(f"credit.{name}", settings)([[made(1.0, 0.0, 1.0), made(0.0)]])
        return list(found)

    return look


def halved(name: str) -> Flip:
    """Return the entry of `negative_scale`."""
    return Flip(
        a=1.0,
        b=0.5,
        look=worths(name),
        shows=lambda a, b: a[0] == b[0] and _sum(a[1]) < 0 and _sum(b[1]) == _sum(a[1]) / 2,
    )


def _sum(worth: Any) -> float:
    return sum(worth) if isinstance(worth, list) else worth


WEIGHTING = Flip(
    a="rollout", b="call", look=worths("dr-grpo"), shows=lambda a, b: a == [0.5, -0.5] and b == [0.25, -0.75]
)
SPREAD = Flip(
    a="rollout",
    b="call",
    look=worths("grpo"),
    shows=lambda a, b: abs(a[0] + a[1]) < 1e-9 and abs(3 * b[0] + b[1]) < 1e-9 < a[0],
)

TABLES = {
    "credit.dr-grpo": {"negative_scale": halved("dr-grpo"), "weighting": WEIGHTING},
    "credit.grpo": {"negative_scale": halved("grpo"), "weighting": SPREAD},
    "credit.rloo": {"negative_scale": halved("rloo")},
    "credit.reinforce++": {"negative_scale": halved("reinforce++")},
    "credit.turn": {
        "negative_scale": halved("turn"),
        "discount": Flip(
            a=0.0,
            b=1.0,
            look=worths("turn"),
            shows=lambda a, b: (a[0], b[0]) == ([0.5, 0.0, 0.0], [1.0, 0.0, 0.0]),
        ),
    },
}
