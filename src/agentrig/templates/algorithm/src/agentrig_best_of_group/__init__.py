"""The algorithm `best-of-group`: imitates the best rollouts of each group, with the learner of `grpo`."""

import attrs
from agentrig_grpo import LearnerConfig, from_credit

from agentrig import hookimpl, setting


@attrs.frozen(kw_only=True)
class Config(LearnerConfig):
    """The settings: `[algorithm]` of a run file."""

    best: float = setting(0.5, help="share of a group that is imitated, if it is above the mean", gt=0, le=1)


def best_of_group(groups, config):
    """Yield what the rollouts of each group are worth: 1 for those that are imitated, None leaves the others out."""
    for group in groups:
        values = sorted((r.value for r in group if r.value is not None), reverse=True)  # a failure has no value
        mean = sum(values) / max(len(values), 1)
        least = values[max(1, int(config.best * len(values))) - 1] if values else 0.0
        yield [1.0 if r.value is not None and mean < r.value >= least else None for r in group]


@hookimpl
def register_algorithms():
    """Register `best-of-group`."""
    yield from_credit(best_of_group, name="best-of-group", summary="Imitates the best of each group.", config=Config)
