"""Which credits have no meaning with which settings of an algorithm: refused before the first rollout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import attrs

from agentrig.errors import ConfigError


@attrs.frozen(kw_only=True)
class Learning:
    """How an algorithm learns what a credit says, for `CreditSpec.refuses`.

    Attributes:
        loss: Its loss, by the name that `algorithm.loss` of `grpo` has for it; '' if it is another one.
        max_tokens: Most tokens of one reply, where that is known.
        own_loop: Whether the algorithm has a loop of its own.
    """

    loss: str = ""
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 1 << 24
    max_staleness: int = 0
    own_loop: bool = False


BY_REPLY = ("gspo", "geo_mean")
"""The losses, by `Learning.loss`, with one ratio for a whole reply; the second is verl's."""


def refuses_replies(config: Any, learning: Learning) -> str:
    """Say why a credit has no meaning with the ratio of a whole reply; '' where it has one.

    That is so for what imitates: its worths are 1 or none, so a clipped ratio bounds no step of a policy that is better
    or worse than another. It is so for what tells calls or tokens apart: they have one ratio together.
    """
    if learning.loss in BY_REPLY:
        return (
            f"it has no meaning with loss = {learning.loss}, which has one ratio for a whole reply: use the loss clip"
        )
    return ""


def refuses_gate(config: Any, learning: Learning) -> str:
    """Say why a credit's gate (`CreditSpec.admit`) can't work with these settings; '' if it can."""
    if config.max_num_gen_batches > 1 and learning.own_loop:
        return (
            "dynamic sampling is not possible: this algorithm has a loop of its own, which asks for a step's tasks "
            "once. Set credit.max_num_gen_batches = 1"
        )
    if config.max_num_gen_batches > 1 and learning.max_staleness:
        return (
            "dynamic sampling and max_staleness = 1 exclude each other: a step's later batches would be of other "
            "weights. Set credit.max_num_gen_batches = 1, or max_staleness = 0"
        )
    return ""


def refuses_dapo(config: Any, learning: Learning) -> str:
    """Say why `dapo` can't work with these settings; '' if it can."""
    buffer = config.overlong_buffer_len
    if buffer * 2 > learning.max_tokens:
        return (
            f"overlong_buffer_len = {buffer} is more than half of a reply's {learning.max_tokens} tokens: set it to "
            f"{learning.max_tokens // 5}, or to 0 for none"
        )
    return ""


def refuses_opd(config: Any, learning: Learning) -> str:
    """Say why `opd` has no meaning with these settings; '' if it has."""
    if learning.temperature != 1 or learning.top_p != 1:
        return (
            f"the teacher's log-probabilities are those at temperature 1 and top_p 1, and rollouts have temperature "
            f"{learning.temperature:g} and top_p {learning.top_p:g}: set both to 1"
        )
    return refuses_replies(config, learning)


def check_single_calls(loss: str, samples: Iterable[object]) -> None:
    """Refuse rollouts of several calls for a loss whose ratio is that of a whole reply.

    The sequence of such a ratio is a rollout. With several calls there is none: each has a prompt of its own, and a
    ratio by call would clip something else than the paper does.

    Args:
        samples: Of each trained call of a step, which rollout it belongs to.
    """
    several = [rollout for rollout, n in Counter(samples).items() if n > 1]
    if loss in BY_REPLY and several:
        raise ConfigError(
            f"[algorithm] loss = {loss} has one ratio for a whole rollout, and {len(several)} rollouts of this step "
            "have several trained calls: use the loss clip, cispo or sapo, whose ratios are those of tokens, or an "
            "adapter that keeps one call of each rollout"
        )
