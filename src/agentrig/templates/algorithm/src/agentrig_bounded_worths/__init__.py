"""The algorithm `bounded-worths`: `grpo` with a learner that bounds what a call can be worth."""

import attrs
from agentrig_grpo import LearnerConfig, make_start, ready, workload

from agentrig import AlgorithmSpec, hookimpl, setting


@attrs.frozen(kw_only=True)
class Config(LearnerConfig):
    """The settings: `[algorithm]` of a run file."""

    most: float = setting(1.0, help="no call, and no token, is worth more than this, or less than minus this", gt=0)


class Learner:
    """Another learner, which gets bounded samples; the run calls its other methods as they are."""

    def __init__(self, inner, most):
        self._inner, self._most = inner, most

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def update(self, samples, *, step, sketch=None):
        """Update the weights on a step's samples; what becomes of each is in `used` of the inner learner."""
        bounded = [attrs.evolve(s, advantage=self._bounded(s.advantage)) for s in samples]
        return self._inner.update(bounded, step=step, sketch=sketch)

    def _bounded(self, worth):
        """Return a bounded worth: one number for a call, or one for each of its tokens."""
        if isinstance(worth, int | float):
            return min(max(worth, -self._most), self._most)
        return [self._bounded(token) for token in worth]


def build(config):
    """Return the algorithm; torch is imported when a run asks for its learner."""
    from agentrig_grpo.algorithm import Grpo

    class Bounded(Grpo):
        def learner(self, session):
            return Learner(super().learner(session), config.most)

    return Bounded(config)


@hookimpl
def register_algorithms():
    """Register `bounded-worths`."""
    yield AlgorithmSpec(
        name="bounded-worths",
        summary="GRPO with a bound on what a call can be worth.",
        config=Config,
        build=build,
        workload=workload,
        ready=ready,
        server=True,
        credit="dr-grpo",
        make_start=make_start,
    )
