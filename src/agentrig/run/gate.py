"""The gate of a step: groups that the credit does not admit are replaced by those of other tasks, up to a limit.

It is DAPO's dynamic sampling (arXiv:2503.14476, section 3.2), bounded. The groups of all batches are recorded; those
that are not admitted are left out of the loss (`not-admitted` in the ledger). How many batches a step has depends on
its own groups only, so a resumed run repeats it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import attrs

from agentrig.errors import AgentrigError, place_of
from agentrig.rollouts import Rollout
from agentrig.run.drawing import Drawing
from agentrig.tasks import Task
from agentrig.text import words_of


@attrs.define(eq=False)
class Gate:
    """The gate of a run.

    Args:
        admit: The credit's (`CreditSpec.admit`); None admits every group.

    Attributes:
        figures: What `metrics.jsonl` says of the latest step.
    """

    admit: Callable[[Sequence[Rollout]], bool] | None = None
    batches: int = 1
    figures: Mapping[str, float] = attrs.field(factory=dict, init=False)

    @classmethod
    def of(cls, spec: Any, config: Any) -> Gate:
        """Return the gate of a credit."""
        admit, batches = getattr(spec, "admit", None), getattr(config, "max_num_gen_batches", 1)
        return cls(admit if batches > 1 else None, batches)

    def refused(self, rollouts: Sequence[Rollout]) -> set[str]:
        """Return the groups that are not admitted."""
        if self.admit is None:
            return set()
        try:
            return {name for name, group in _groups(rollouts) if not self.admit(group)}
        except Exception as error:
            raise AgentrigError(f"the credit's gate failed: {words_of(error)}{place_of(error)}") from error

    def sample(
        self, step: int, drawing: Drawing, sample: Callable[[Sequence[Task]], Sequence[Rollout]]
    ) -> list[Rollout]:
        """Return a step's rollouts: those of the tasks that are drawn, then of others for groups that are not admitted.

        Args:
            sample: Rolls out some tasks, as one batch of the step.
        """
        found, batches = list(sample(drawing.draw(step))), 1
        refused = lacking = len(self.refused(found))
        while lacking and batches < self.batches:
            batches += 1
            latest = sample(drawing.again(step, batches, lacking, taken={r.task.id for r in found}))
            found += latest
            lacking = len(self.refused(latest))
            refused += lacking
        if self.admit is not None:
            self.figures = {"num_gen_batches": batches, "groups_not_admitted": refused}
        return found


def _groups(rollouts: Sequence[Rollout]) -> Iterator[tuple[str, Sequence[Rollout]]]:
    """Yield the name and the rollouts of each group."""
    for name, group in groupby(sorted(rollouts, key=lambda r: r.group), key=lambda r: r.group):
        yield name, list(group)
