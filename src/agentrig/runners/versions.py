"""Which weights may have sampled a batch of rollouts; a rollout of others is a failure with a kind of its own."""

from __future__ import annotations

import attrs

from agentrig.agents import Outcome
from agentrig.traces import Trace

STALE = "stale-weights"
"""The failure of a rollout with a call that older weights answered than its step allows."""

UNKNOWN = "unknown-weights"
"""The failure of a rollout with a call that newer weights answered than the server was given."""


@attrs.frozen(kw_only=True)
class Versions:
    """The versions of the weights that a batch of rollouts may be sampled with.

    Attributes:
        served: What the server has while they run: the step that made these weights.
        oldest: The oldest that is allowed.
    """

    served: int
    oldest: int

    @classmethod
    def of(cls, version: int, *, step: int, max_staleness: int) -> Versions:
        """Return the versions that a step allows.

        Args:
            version: What the server has.
            step: The training step that learns from the rollouts. Its update begins with the weights of `step - 1`.
            max_staleness: How many versions the rollouts may be behind these.

        Raises:
            ValueError: The server itself has other weights than these.
        """
        oldest = step - 1 - max_staleness
        if not oldest <= version <= step - 1:
            allowed = f"{oldest} to {step - 1}" if max_staleness else f"{oldest}"
            raise ValueError(
                f"rollouts of step {step} would be sampled with weights of version {version}; with max_staleness = "
                f"{max_staleness} it takes version {allowed}"
            )
        return cls(served=version, oldest=oldest)

    def refused(self, trace: Trace) -> Outcome | None:
        """Return the failure of a rollout whose calls other weights answered; None if all are allowed, or unknown."""
        for span, version in trace.versions().items():
            if self.oldest <= version <= self.served:
                continue
            allowed = f"{self.oldest} to {self.served}" if self.oldest < self.served else f"{self.served}"
            return Outcome(
                failure=STALE if version < self.oldest else UNKNOWN,
                message=f"call {span} was answered with weights of version {version}; its step takes version {allowed}",
            )
        return None
