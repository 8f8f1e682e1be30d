"""Link `distribution`: the log-probabilities are the model's, and the tokens are samples of it.

Whether tokens are samples is tested with likelihood ratios against distributions that a fault would sample from. If
the tokens are samples of p, the product over all tokens of q(token) / p(token) has the mean 1, whatever p and q are
and however they depend on the tokens before: it is a test martingale, and by Ville's inequality (1939) it ever reaches
1/a with a probability of at most a. No law of large numbers is needed, and the products go on over audited steps.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence, Set
from itertools import zip_longest
from typing import TYPE_CHECKING

import numpy as np

from agentrig.audit.model import MEASURED, Weights, batches, logits, logprobs, place, tokens
from agentrig.audit.record import Call, Row
from agentrig.audit.step import Step, work_clock
from agentrig.audit.verdicts import GIVEN, CannotLook, Verdict, fault, finite, ok
from agentrig.text import amount

if TYPE_CHECKING:
    import torch

TOKENS = 8192
"""Sampled tokens that are looked at in a step, whole groups of rollouts at a time."""

CHANCE = 1e-6
"""How likely a healthy run is stopped by one of the tests, over all its steps, of training or of measurements."""

ALTERNATIVES = {
    "a quarter of the temperature": 4.0,
    "half the temperature": 2.0,
    "0.7 of the temperature": 1 / 0.7,
    "0.9 of the temperature": 1 / 0.9,
    "the temperature over 0.9": 0.9,
    "the temperature over 0.7": 0.7,
    "twice the temperature": 0.5,
    "the 2 likeliest tokens only": 2,
    "the 3 likeliest tokens only": 3,
    "the 10 likeliest tokens only": 10,
    "the 50 likeliest tokens only": 50,
}
"""Distributions that a fault would sample from: a power of p (a float), or p cut to its likeliest tokens (an int)."""

SMALL = (1 / 0.7, 1 / 0.9, 0.9, 0.7)
"""Powers that are tested as they are: half of p beside them would take four tenths of the evidence, and nothing is
unlikely enough to need it."""

COPIES = "random numbers used twice, so that a reply repeats another one of its group"
"""An alternative too: the token that an earlier rollout of the group, equal up to there, went on with."""

UNSCALED = "the temperature 1"
"""An alternative to another stated temperature T: p to the power T."""

SAME_NUMBER = (
    "one random number for several tokens of a reply, in the order of the vocabulary",
    "one random number for several tokens of a reply, in the order of their probability",
)
"""Alternatives too: a token is the one whose part of [0, 1] has the number that gave the tokens before it."""

ACROSS = (
    "the random numbers of another prompt's reply, in the order of the vocabulary",
    "the random numbers of another prompt's reply, in the order of their probability",
)
"""Alternatives too: as `SAME_NUMBER`, with the n-th token of each prompt's n-th reply instead of those of one reply."""

NUCLEI = {f"the likeliest tokens up to {share} of the probability": share for share in (0.9, 0.95, 0.99)}
"""Alternatives too: a token's part of [0, 1], in the order of their probability, lies below the share."""

SAME_NOISE = "the same noise for several tokens of a reply, so that its tokens come again"
"""An alternative too: a token of the reply comes again with a weight of one over what it was sampled with, as if
argmax(log p + noise) had the same noise at each place."""

MOST = math.log((len([*ALTERNATIVES, *SAME_NUMBER, *ACROSS, *NUCLEI]) + 3) / CHANCE)
"""What the logarithm of a likelihood ratio may reach: all alternatives share the chance."""


def distribution(step: Step) -> Iterator[Verdict]:
    """Compare a step's recorded log-probabilities and tokens with the model that should have sampled them.

    The bound of a log-probability is derived from rounding and measured. As in docs/proofs.md, each of four matrix
    products of a layer rounds by half an ulp, and the root of their number, times 16 for the largest of many, is what
    independent errors add up to. They are relative to the largest logit: a model that is sure of its token has a
    log-probability near 0 and logits that round all the same. Eight times the largest difference of two precisions,
    over some calls, is added, for a model that is more sensitive than a formula knows.
    """
    if step.record.demonstrations:
        raise CannotLook(f"{GIVEN}nothing was sampled")
    version = step.number - 1 - int(step.line.get("max_staleness") or 0)
    weights = step.weights(version)
    groups = _groups(step, version)
    if not groups:
        raise CannotLook(_none_plain(step, version))
    temperature, top_p = step.settings.get("temperature", 1.0), step.settings.get("top_p", 1.0)
    yield from compared(
        step,
        weights,
        groups,
        evidence=step.evidence["distribution"],
        temperature=temperature,
        top_p=top_p,
        of=len(step.calls),
        otherwise=len(step.calls) - sum(map(len, groups)),
        streams=_streams(step, {call for group in groups for call in group}),
    )


def compared(
    step: Step,
    weights: Weights,
    groups: Sequence[Mapping[Call, Sequence[Sequence[int]]]],
    *,
    evidence: MutableMapping[str, float],
    temperature: float,
    top_p: float,
    of: int,
    otherwise: int = 0,
    streams: Sequence[Sequence[Call]] = (),
) -> Iterator[Verdict]:
    """Compare calls, of so many, with what weights say of their tokens; see `distribution`.

    `otherwise` of them are in no group, because they were not sampled as the settings say.
    `groups` have for each call the replies of its group that should be independent of it. They are taken whole, up to
    `TOKENS` sampled tokens; where the time is up before, or there are more, what needs no model is still computed, from
    the recorded log-probabilities. `streams` are the n-th first calls of all groups, for each n. `evidence` has the
    log likelihood ratios over all steps, and is added to. At temperature 0 a token is the likeliest, or within the
    bounds of two log-probabilities of it.
    """
    import torch

    clock, earlier, taken = work_clock(), dict[Call, Sequence[Sequence[int]]](), 0
    end = clock() + step.budget_s / 2
    for group in groups:
        if taken <= TOKENS:
            earlier.update(group)
            taken += sum(len(call.reply) for call in group)
    precisions = step.precisions(place(weights.directory, 8, on_cpu=step.record.on_cpu), merged=True)
    model, other = (weights.load(precision) for precision in precisions)
    rounding = 16 * 2**-24 * math.sqrt(4 * int(getattr(model.config, "num_hidden_layers", 1)) + 1)
    off, spread, outside = list[tuple[float, float, str]](), 0.0, ""  # differences with their bounds from rounding
    parts: dict[Call, Intervals] = {}
    late = list[tuple[float, float, str]]()  # the same of tokens that should be the likeliest
    looked = sampled = computed = 0
    for part in batches(list(earlier), step.number):
        if looked and clock() > end:
            break
        with torch.no_grad():
            raw = torch.cat(logits(model, part, temperature)).double()
            log_p, largest = torch.log_softmax(raw, -1), raw.abs().amax(-1)
            ids = torch.tensor([token for call in part for token in call.reply], device=log_p.device)[:, None]
            own = log_p.gather(-1, ids)[:, 0]
            lengths = [len(call.reply) for call in part]
            by_call = list(zip(part, torch.split(own, lengths), strict=True))
            bounds = [rounding * (1 + float(of_call.max())) for of_call in torch.split(largest, lengths)]
            if strange := [call.name for call, mine in by_call if not mine.isfinite().all()]:
                detail = f"the weights give {strange[0]} log-probabilities that are not finite"
                yield fault(detail, "weights with NaN or infinity")
                return
            if computed < MEASURED:
                apart = float((own - logprobs(other, part, temperature)).abs().max())
                spread = max(spread, finite(apart, "what two precisions of the model differ by"))
        looked, sampled, computed = looked + len(part), sampled + len(ids), computed + tokens(part)
        for (call, mine), bound in zip(by_call, bounds, strict=True):
            if call.logprobs is not None:
                stated = torch.tensor(call.logprobs, dtype=torch.float64, device=own.device)
                gap = float((stated - mine).abs().max()) if len(stated) == len(mine) else math.inf
                off.append((math.inf if math.isnan(gap) else gap, bound, call.name))
        if temperature == 0:
            short = torch.split(log_p.max(-1).values - own, lengths)
            late += [(float(s.max()) / 2, bound, c.name) for c, s, bound in zip(part, short, bounds, strict=True)]
        if top_p < 1:
            log_p, cut = _nucleus(log_p, top_p, ids)
            if cut and not outside:
                outside = f"{part[0].name} and its like: {cut} sampled tokens are not among them"
            own = log_p.gather(-1, ids)[:, 0]
        if temperature > 0:
            unscaled = {UNSCALED: float(temperature)} if temperature != 1 else {}
            _weigh(evidence, log_p, own, {**ALTERNATIVES, **unscaled})
            for call, mine, whole in zip(part, torch.split(own, lengths), torch.split(log_p, lengths), strict=True):
                _weigh_copies(evidence, mine.tolist(), call.reply, earlier[call])
                parts[call] = _weigh_noise(evidence, whole.exp(), call.reply)
    _weigh_across(evidence, [[parts[call] for call in each if call in parts] for each in streams])
    gap, bound, where = _farthest(off, spread)
    if gap > bound:
        detail = f"a log-probability of {where} differs from the model's by {gap:.3g}; the bound is {bound:.3g}"
        causes = "the server (temperature, weights, positions, cache), or tokens that are not those that it sampled"
        yield fault(f"{detail}, from rounding and measured", causes, gap / bound)
    elif temperature > 0 and top_p == 1:
        for call, alike in (pair for group in groups for pair in group.items()):
            said = call.logprobs or ()
            if call not in parts and len(said) == len(call.reply) and math.isfinite(sum(said)):
                _weigh_copies(evidence, said, call.reply, alike)
    half, least, where = _farthest(late, spread)
    if half > least:
        detail = f"{where} has the temperature 0, and a token of it is exp({2 * half:.3g}) times less likely than the "
        yield fault(f"{detail}likeliest; the bound is exp({2 * least:.3g})", "the server's sampling", half / least)
    if outside:
        yield fault(f"top_p = {top_p}: {outside}", "the server's nucleus sampling")
    what, most = max(evidence.items(), key=lambda each: each[1], default=("", 0.0))
    if most > MOST:
        detail = f"the tokens of all audited steps are exp({most:.4g}) times likelier with {what}, than from the "
        detail += f"distribution at temperature {temperature} and top_p {top_p} that is stated; chance reaches "
        detail += f"exp({MOST:.3g}) once in {1 / CHANCE:.0e} runs (Ville's inequality)"
        yield fault(detail, "the server's sampling or its random numbers", most / MOST)
    share = f"{looked} of {of} calls, {sampled} tokens"
    if what and most <= MOST:
        share += f"; no fault of sampling shows. The nearest to one: {what}, log likelihood ratio {most:.3g}, where "
        share += f"{MOST:.3g} would be one"
    yield ok(share, max(gap / bound, half / least, most / MOST), read=(looked, of), otherwise=otherwise)


def _farthest(found: Sequence[tuple[float, float, str]], spread: float) -> tuple[float, float, str]:
    """Return the difference that is the largest share of its bound, the bound, and where it is."""
    bounds = [(gap, most + 8 * spread, name) for gap, most, name in found]
    return max(bounds, key=lambda each: each[0] / each[1], default=(0.0, 1.0, ""))


def _none_plain(step: Step, version: int) -> str:
    """Say why `_groups` has no call of a step."""
    calls = [call for row in step.rows for call in row.calls]
    if not calls:
        return f"step {step.number} has no call"
    why = Counter(f"set {name}" for call in calls for name in call.otherwise)
    temperature = step.settings.get("temperature", 1.0)
    why["set another temperature"] = sum(call.request.get("temperature", temperature) != temperature for call in calls)
    why["were sampled by other weights"] = sum(call.version not in (None, version) for call in calls)
    parts = [f"{n} {what}" for what, n in why.most_common() if n]
    return f"of {amount(len(calls), 'call')} of step {step.number}, {', '.join(parts)}"


def _groups(step: Step, version: int) -> list[dict[Call, Sequence[Sequence[int]]]]:
    """Return the calls that weights sampled, each with the replies of earlier rollouts of its group to the same prompt.

    They are in groups, whose order is by chance.
    """
    temperature = step.settings.get("temperature", 1.0)
    rows: dict[str, list[Row]] = defaultdict(list)
    for row in step.rows:
        rows[row.group].append(row)
    order = sorted(rows)
    random.Random(step.number).shuffle(order)
    found = list[dict[Call, Sequence[Sequence[int]]]]()
    for name in order:
        group: dict[Call, Sequence[Sequence[int]]] = {}
        replies: dict[tuple[int, ...], list[Sequence[int]]] = defaultdict(list)
        for row in rows[name]:
            for at, call in enumerate(row.calls):
                stated = call.version in (None, version) and call.request.get("temperature", temperature) == temperature
                if call.plain and stated:
                    alike = replies[tuple(call.prompt)] if at == 0 else []
                    group[call] = list(alike)
                    alike.append(call.reply)
        if group:
            found.append(group)
    return found


def _streams(step: Step, chosen: Set[Call]) -> list[list[Call]]:
    """Return for each n the calls that began as the n-th first call of their group; one for each prompt."""
    groups: dict[str, list[tuple[float, int, Call]]] = defaultdict(list)
    for at, row in enumerate(step.rows):
        if row.calls and row.calls[0] in chosen:
            start = next((float(span["start"]) for span in row.spans if span["id"] == row.calls[0].span), 0.0)
            groups[row.group].append((start, at, row.calls[0]))
    found: dict[int, dict[tuple[int, ...], Call]] = defaultdict(dict)
    for name in sorted(groups):
        for n, (_, _, call) in enumerate(sorted(groups[name], key=lambda each: each[:2])):
            found[n].setdefault(tuple(call.prompt), call)
    return [list(calls.values()) for calls in found.values()]


def _weigh(
    evidence: MutableMapping[str, float],
    log_p: torch.Tensor,
    own: torch.Tensor,
    alternatives: Mapping[str, float] = ALTERNATIVES,
) -> None:
    """Add the log likelihood ratios of the sampled tokens to the evidence.

    `log_p` is the stated distribution of each, [tokens, vocabulary], and `own` what it gives the sampled, [tokens].
    """
    import torch

    ranks = (log_p > own[:, None]).sum(-1)
    for name, how in alternatives.items():
        if isinstance(how, float):
            powered = torch.where(torch.isneginf(log_p), log_p, how * log_p)
            ratio = how * own - torch.logsumexp(powered, -1) - own
        else:
            kept = torch.logsumexp(log_p.topk(min(how, log_p.shape[-1])).values, -1)
            ratio = -kept + torch.where(ranks < how, 0.0, -torch.inf)
        if how not in SMALL:  # a mixture, so that one token outside does not end the test: half of p stays
            ratio = torch.logaddexp(ratio, torch.zeros_like(ratio)) - math.log(2)
        evidence[name] += float(ratio.sum())


def _weigh_copies(
    evidence: MutableMapping[str, float], own: Sequence[float], reply: Sequence[int], earlier: Sequence[Sequence[int]]
) -> None:
    """Add the log likelihood ratio of a reply that goes on as the `earlier` ones that begin like it."""
    alive = earlier
    for at, token in enumerate(reply):
        alive = [other for other in alive if len(other) > at]
        if not alive:
            break
        share = sum(other[at] == token for other in alive) / len(alive)
        likelier = math.log(share) - own[at] if share else -math.inf
        evidence[COPIES] += float(np.logaddexp(0.0, likelier)) - math.log(2)
        alive = [other for other in alive if other[at] == token]


Intervals = Sequence[Sequence[tuple[float, float]]]
"""The part of [0, 1] of each token of a reply, in both orders of `SAME_NUMBER`."""


def _weigh_across(evidence: MutableMapping[str, float], streams: Sequence[Sequence[Intervals]]) -> None:
    """Add the log likelihood ratios of replies to different prompts whose n-th tokens have the same random number."""
    for stream in streams:
        for order, name in enumerate(ACROSS):
            for parts in zip_longest(*(reply[order] for reply in stream)):
                evidence[name] += _same_number(part for part in parts if part is not None)


def _same_number(parts: Iterable[tuple[float, float]]) -> float:
    """Return the log likelihood ratio of tokens with one random number: it lies where their parts of [0, 1] overlap."""
    begin, end, total = 0.0, 1.0, 0.0  # where the number lies, by the tokens so far
    for first, last in parts:
        if last <= first:  # smaller than what fp64 can add to the parts before
            total += math.log(0.5)
            continue
        inside = max(0.0, min(end, last) - max(begin, first))
        total += math.log(0.5 + 0.5 * inside / (end - begin) / (last - first))
        same = inside > 1e-6  # else rounding, or a new number
        begin, end = (max(begin, first), min(end, last)) if same else (first, last)
    return total


def _weigh_noise(evidence: MutableMapping[str, float], p: torch.Tensor, reply: Sequence[int]) -> Intervals:
    """Add the log likelihood ratios of a reply whose tokens depend on the noise of those before them, or of `NUCLEI`.

    `p` is the stated distribution of each token, [tokens, vocabulary]. Returns the parts of [0, 1] of the tokens.
    """
    import torch

    ids = torch.tensor(reply, device=p.device)
    own, places = p.gather(-1, ids[:, None]), torch.arange(p.shape[-1], device=p.device)
    before, parts = places < ids[:, None], []
    for name, smaller in zip(SAME_NUMBER, (before, (p > own) | ((p == own) & before)), strict=True):
        low = (p * smaller).sum(-1)
        parts.append(list(zip(low.tolist(), (low + own[:, 0]).tolist(), strict=True)))
        evidence[name] += _same_number(parts[-1])
    for name, share in NUCLEI.items():
        for first, last in parts[-1]:
            inside = max(0.0, min(last, share) - first) / (last - first) if last > first else 0.0
            evidence[name] += math.log(0.5 + 0.5 * inside / share)
    weights: dict[int, float] = {}  # of the tokens that the reply has
    there = p[:, ids].tolist()
    for at, token in enumerate(reply):
        now = dict(zip(reply[:at], there[at], strict=False))
        total = 1.0 + math.fsum(now[one] * (weight - 1.0) for one, weight in weights.items())
        evidence[SAME_NOISE] += math.log(0.5 + 0.5 * weights.get(token, 1.0) / total)
        weights[token] = max(weights.get(token, 1.0), 1.0 / there[at][at])
    return parts


def _nucleus(log_p: torch.Tensor, top_p: float, ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the distribution after nucleus sampling (arXiv:1904.09751), and how many tokens are not in it.

    A token whose place depends on rounding (the sum before it is within 1e-3 of top_p) counts as in it.
    """
    import torch

    ordered, index = log_p.sort(-1, descending=True)
    before = torch.zeros_like(log_p).scatter_(-1, index, ordered.exp().cumsum(-1) - ordered.exp())
    inside = (before < top_p).scatter_(-1, ids, True)
    out = int((before.gather(-1, ids) >= top_p + 1e-3).sum())
    return torch.log_softmax(log_p.masked_fill(~inside, -torch.inf), -1), out
