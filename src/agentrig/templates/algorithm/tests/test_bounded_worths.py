"""Tests what `bounded-worths` does."""

import attrs
from agentrig_bounded_worths import Learner


@attrs.frozen
class Sample:
    """What `Learner` reads of a sample."""

    advantage: float


class Inner:
    """A learner that keeps what it gets."""

    used = ((3, ""),)

    def update(self, samples, *, step, sketch=None):
        """Keep the samples."""
        self.samples = samples
        return {"weight_change": 1.0}


def test_worths_are_bounded_on_both_sides() -> None:
    inner = Inner()
    learner = Learner(inner, most=0.5)
    assert learner.update([Sample(2.0), Sample(-2.0), Sample(0.25)], step=1) == {"weight_change": 1.0}
    assert [sample.advantage for sample in inner.samples] == [0.5, -0.5, 0.25]
    assert learner.used == inner.used
