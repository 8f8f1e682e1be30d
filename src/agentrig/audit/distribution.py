"""Link `distribution`: the log-probabilities are the model's, and the tokens are samples of it.

Whether tokens are samples is tested with likelihood ratios against distributions that a fault would sample from. If
the tokens are samples of p, the product over all tokens of q(token) / p(token) has the mean 1, whatever p and q are
and however they depend on the tokens before: it is a test martingale, and by Ville's inequality (1939) it ever reaches
1/a with a probability of at most a. No law of large numbers is needed, and the products go on over audited steps.
"""

from __future__ import annotations

import math
import random
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from agentrig.audit.model import MEASURED, batches, logits, logprobs, tokens
from agentrig.audit.record import Call, Record, Row
from agentrig.audit.verdicts import CannotLook, Verdict, fault, finite, ok

if TYPE_CHECKING:
    import torch

TOKENS = 2048
"""Sampled tokens that are looked at in a step, whole groups of rollouts at a time."""

CHANCE = 1e-9
"""How likely a healthy run is stopped by one of the tests, over all its steps."""

ALTERNATIVES = {
    "a quarter of the temperature": 4.0,
    "half the temperature": 2.0,
    "twice the temperature": 0.5,
    "the 2 likeliest tokens only": 2,
    "the 3 likeliest tokens only": 3,
    "the 10 likeliest tokens only": 10,
    "the 50 likeliest tokens only": 50,
}
"""Distributions that a fault would sample from: a power of p (a float), or p cut to its likeliest tokens (an int)."""

COPIES = "random numbers used twice, so that a reply repeats another one of its group"
"""An alternative too: the token that an earlier rollout of the group, equal up to there, went on with."""


class Evidence:
    """The logarithms of the likelihood ratios so far, by alternative; they add up over the audited steps of a run."""

    def __init__(self) -> None:
        self.log_ratios: dict[str, float] = defaultdict(float)

    @property
    def bound(self) -> float:
        """What a logarithm may reach: all alternatives share the chance."""
        return math.log((len(ALTERNATIVES) + 1) / CHANCE)


def distribution(
    record: Record, step: int, model: Any, other: Any, version: int, evidence: Evidence, *, budget_s: float
) -> Iterator[Verdict]:
    """Compare a step's recorded log-probabilities and tokens with the model that should have sampled them.

    The bound of a log-probability is derived from rounding and measured. As in docs/proofs.md, each of four matrix
    products of a layer rounds by half an ulp, and the root of their number, times 16 for the largest of many, is what
    independent errors add up to. Eight times the largest difference of two precisions, over some calls, is added, for a
    model that is more sensitive than a formula knows.

    Args:
        record: The run.
        step: The step.
        model: That of the version that sampled.
        other: The same in the second precision.
        version: That version.
        evidence: Of the run's audited steps; is added to.
        budget_s: After so many seconds no further prompt's calls are looked at.
    """
    import torch

    end = time.monotonic() + budget_s

    settings = record.settings
    temperature, top_p = settings.get("temperature", 1.0), settings.get("top_p", 1.0)
    earlier, total = _chosen(record, step, version)
    if not earlier:
        raise CannotLook(f"no call of step {step} was sampled by the weights of version {version}")
    rounding = 16 * 2**-24 * math.sqrt(4 * int(getattr(model.config, "num_hidden_layers", 1)) + 1)
    off, spread, outside = list[tuple[float, float, str]](), 0.0, ""  # differences with their bounds from rounding
    parts = batches(list(earlier))
    random.Random(step).shuffle(parts)
    looked = sampled = computed = 0
    for part in parts:
        if looked and time.monotonic() > end:
            break
        with torch.no_grad():
            scores = torch.cat(logits(model, part, temperature)).double()
            log_p = torch.log_softmax(scores, -1)
            ids = torch.tensor([token for call in part for token in call.reply], device=log_p.device)[:, None]
            own = log_p.gather(-1, ids)[:, 0]
            lengths = [len(call.reply) for call in part]
            if not own.isfinite().all():
                name = next(call.name for call, mine in zip(part, torch.split(own, lengths), strict=True)
                            if not mine.isfinite().all())  # fmt: skip
                detail = f"the weights of version {version} give {name} log-probabilities that are not finite"
                yield fault("distribution", detail, causes="weights with NaN or infinity")
                return
            if computed < MEASURED:
                apart = float((own - logprobs(other, part, temperature)).abs().max())
                spread = max(spread, finite(apart, "what two precisions of the model differ by"))
        looked, sampled, computed = looked + len(part), sampled + len(ids), computed + tokens(part)
        for call, mine in zip(part, torch.split(own, lengths), strict=True):
            if call.logprobs is not None:
                said = torch.tensor(call.logprobs, dtype=torch.float64, device=own.device)
                gap = float((said - mine).abs().max()) if len(said) == len(mine) else math.inf
                most = rounding * (1 + float(mine.abs().max()))
                off.append((math.inf if math.isnan(gap) else gap, most, call.name))
        if top_p < 1:
            log_p, cut = _nucleus(log_p, top_p, ids)
            outside = outside or (
                f"{part[0].name} and its like: {cut} sampled tokens are not among them" if cut else ""
            )
            own = log_p.gather(-1, ids)[:, 0]
        if temperature > 0:
            _weigh(evidence, log_p, own, ids)
            for call, mine in zip(part, torch.split(own, lengths), strict=True):
                _weigh_copies(evidence, mine.tolist(), call.reply, earlier[call])
    gap, bound, where = max(
        ((gap, rounding + 8 * spread, name) for gap, rounding, name in off),
        key=lambda each: each[0] / each[1],
        default=(0.0, 1.0, ""),
    )
    if gap > bound:
        detail = f"a log-probability of {where} differs from the model's by {gap:.3g}; the bound is {bound:.3g}"
        causes = "the server (temperature, weights, positions, cache), or tokens that are not those that it sampled"
        yield fault("distribution", f"{detail}, from rounding and measured", ratio=gap / bound, causes=causes)
    if outside:
        yield fault("distribution", f"top_p = {top_p}: {outside}", causes="the server's nucleus sampling")
    what, most = max(evidence.log_ratios.items(), key=lambda each: each[1], default=("", 0.0))
    if most > evidence.bound:
        detail = f"{sampled} tokens are exp({most:.4g}) times likelier with {what}, than from the "
        detail += f"distribution at temperature {temperature} and top_p {top_p} that is stated; chance reaches "
        detail += f"exp({evidence.bound:.3g}) once in {1 / CHANCE:.0e} runs (Ville's inequality)"
        causes = "the server's sampling or its random numbers"
        yield fault("distribution", detail, causes=causes, ratio=most / evidence.bound)
    share = f"{looked} of {total} calls, {sampled} tokens"
    if what and most <= evidence.bound:
        share += f"; no fault of sampling shows. The nearest to one: {what}, log likelihood ratio {most:.3g}, where "
        share += f"{evidence.bound:.3g} would be one"
    yield ok("distribution", share, ratio=max(gap / bound, most / evidence.bound))


def _chosen(record: Record, step: int, version: int) -> tuple[dict[Call, list[Sequence[int]]], int]:
    """Return the calls to look at, each with the replies of earlier rollouts of its group to the same prompt.

    Groups are taken whole and in an order by chance, up to `TOKENS` sampled tokens; the second number is that of all
    calls.
    """
    temperature = record.settings.get("temperature", 1.0)
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in record.rows("train", step):
        groups[row.group].append(row)
    order = sorted(groups)
    random.Random(step).shuffle(order)
    found: dict[Call, list[Sequence[int]]] = {}
    tokens = 0
    for name in order:
        replies: dict[tuple[int, ...], list[Sequence[int]]] = defaultdict(list)
        for row in groups[name]:
            for at, call in enumerate(row.calls):
                stated = call.version in (None, version) and call.request.get("temperature", temperature) == temperature
                if not (call.plain and stated) or tokens > TOKENS:
                    continue
                tokens += len(call.reply)
                alike = replies[tuple(call.prompt)] if at == 0 else []
                found[call] = list(alike)
                alike.append(call.reply)
    return found, sum(len(row.calls) for rows in groups.values() for row in rows)


def _weigh(evidence: Evidence, log_p: torch.Tensor, own: torch.Tensor, ids: torch.Tensor) -> None:
    """Add the log likelihood ratios of tokens.

    Args:
        evidence: Is added to.
        log_p: The stated distribution of each token, [tokens, vocabulary].
        own: Of the sampled tokens, [tokens].
        ids: The sampled tokens, [tokens, 1].
    """
    import torch

    ranks = (log_p > own[:, None]).sum(-1)
    for name, how in ALTERNATIVES.items():
        if isinstance(how, float):
            powered = how * log_p
            powered = torch.where(torch.isneginf(log_p), log_p, powered)
            ratio = how * own - torch.logsumexp(powered, -1) - own
        else:
            kept = torch.logsumexp(log_p.topk(min(how, log_p.shape[-1])).values, -1)
            ratio = -kept + torch.where(ranks < how, 0.0, -torch.inf)
            # A mixture, so that one token outside does not end the test: half of p stays.
        mixed = torch.logaddexp(ratio, torch.zeros_like(ratio)) - math.log(2)
        evidence.log_ratios[name] += float(mixed.sum())


def _weigh_copies(
    evidence: Evidence, own: Sequence[float], reply: Sequence[int], earlier: Sequence[Sequence[int]]
) -> None:
    """Add the log likelihood ratio of a reply that goes on as the `earlier` ones that begin like it."""
    alive = earlier
    for place, token in enumerate(reply):
        alive = [other for other in alive if len(other) > place]
        if not alive:
            break
        share = sum(other[place] == token for other in alive) / len(alive)
        likelier = math.log(share) - own[place] if share else -math.inf
        evidence.log_ratios[COPIES] += float(np.logaddexp(0.0, likelier)) - math.log(2)
        alive = [other for other in alive if other[place] == token]


def _nucleus(log_p: torch.Tensor, top_p: float, ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the distribution after nucleus sampling (arXiv:1904.09751), and how many tokens are not in it.

    A token whose place depends on rounding (the sum before it is within 1e-3 of top_p) counts as in it.
    """
    import torch

    ordered, index = log_p.sort(-1, descending=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    inside = torch.zeros_like(log_p, dtype=torch.bool).scatter_(-1, index, before < top_p)
    near = torch.zeros_like(inside).scatter_(-1, index, before < top_p + 1e-3)
    out = int((~near.gather(-1, ids)).sum())
    inside.scatter_(-1, ids, True)
    return torch.log_softmax(log_p.masked_fill(~inside, -torch.inf), -1), out
