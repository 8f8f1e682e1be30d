"""Tests what `bounded-worths` does."""

from agentrig_bounded_worths import Learner

from agentrig.learners import TrainSample


class Inner:
    """A learner that keeps what it gets."""

    used = ((3, ""),)

    def update(self, samples, *, step, sketch=None):
        """Keep the samples."""
        self.samples = samples
        return {"weight_change": 1.0}


def sample(advantage):
    """Return a call with three response tokens."""
    return TrainSample(prompt_ids=[1], response_ids=[2, 3, 4], logprobs=None, advantage=advantage, rollout=0, group="a")


def test_worths_of_calls_and_of_tokens_are_bounded_on_both_sides() -> None:
    inner = Inner()
    learner = Learner(inner, most=0.5)
    samples = [sample(2.0), sample(-2.0), sample(0.25), sample([2.0, -2.0, 0.25])]
    assert learner.update(samples, step=1) == {"weight_change": 1.0}
    assert [sample.advantage for sample in inner.samples] == [0.5, -0.5, 0.25, [0.5, -0.5, 0.25]]
    assert learner.used == inner.used
