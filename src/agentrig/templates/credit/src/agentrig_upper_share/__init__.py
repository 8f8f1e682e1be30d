"""The credit `upper-share`: imitates the best rollouts of each group."""

from functools import partial

import attrs

from agentrig import CreditSpec, hookimpl, setting


@attrs.frozen(kw_only=True)
class Config:
    """The settings: `[credit]` of a run file."""

    share: float = setting(0.5, help="share of a group that is imitated, if it is above the mean", gt=0, le=1)


def upper_share(groups, config):
    """Yield what the rollouts of each group are worth: 1 for those that are imitated, None leaves the others out."""
    for group in groups:
        values = sorted((r.value for r in group if r.value is not None), reverse=True)  # a failure has no value
        mean = sum(values) / max(len(values), 1)
        least = values[max(1, int(config.share * len(values))) - 1] if values else 0.0
        yield [1.0 if r.value is not None and mean < r.value >= least else None for r in group]


@hookimpl
def register_credits():
    """Register `upper-share`."""

    def build(config):
        return partial(upper_share, config=config)

    yield CreditSpec(name="upper-share", summary="Imitates the best of each group.", config=Config, build=build)
