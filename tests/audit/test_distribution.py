"""The tests of samples: true samples hardly ever reach a bound, others do."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from audited_runs import tiny_model
from transformers import AutoModelForCausalLM

from agentrig.audit.distribution import (
    ACROSS,
    ALTERNATIVES,
    COPIES,
    MOST,
    NUCLEI,
    SAME_NOISE,
    SAME_NUMBER,
    Intervals,
    _weigh,
    _weigh_across,
    _weigh_copies,
    _weigh_noise,
    compared,
    distribution,
)
from agentrig.audit.record import Call
from agentrig.audit.verdicts import CannotLook

REPLIES, TOKENS, VOCABULARY = 16, 8, 50
Sampler = Callable[[torch.Tensor, list[list[int]], torch.Generator], list[int]]


def evidence_of(sampler: Sampler, seed: int, groups: int) -> dict[str, float]:
    """Return the evidence of groups whose replies share their distributions, as for equal beginnings."""
    rng = torch.Generator().manual_seed(seed)
    found: dict[str, float] = defaultdict(float)
    streams: list[list[Intervals]] = [[] for _ in range(REPLIES)]
    for _ in range(groups):
        log_p = torch.log_softmax(2.5 * torch.randn(TOKENS, VOCABULARY, generator=rng, dtype=torch.float64), -1)
        earlier: list[list[int]] = []
        for _ in range(REPLIES):
            reply = sampler(log_p, earlier, rng)
            ids = torch.tensor(reply)[:, None]
            own = log_p.gather(-1, ids)[:, 0]
            _weigh(found, log_p, own)
            _weigh_copies(found, own.tolist(), reply, earlier)
            streams[len(earlier)].append(_weigh_noise(found, log_p.exp(), reply))
            earlier.append(reply)
    _weigh_across(found, streams)
    return found


def drawn(power: float = 1.0, top: int = VOCABULARY) -> Sampler:
    def sample(log_p: torch.Tensor, earlier: list[list[int]], rng: torch.Generator) -> list[int]:
        least = log_p.topk(top).values[:, -1:]
        p = (power * log_p).masked_fill(log_p < least, -torch.inf).softmax(-1)
        return torch.multinomial(p, 1, generator=rng)[:, 0].tolist()

    return sample


def in_pairs(log_p: torch.Tensor, earlier: list[list[int]], rng: torch.Generator) -> list[int]:
    return earlier[-1] if len(earlier) % 2 else drawn()(log_p, earlier, rng)


def one_number(log_p: torch.Tensor, earlier: list[list[int]], rng: torch.Generator) -> list[int]:
    number = torch.rand(1, generator=rng, dtype=torch.float64).repeat(TOKENS)[:, None]
    return torch.searchsorted(log_p.exp().cumsum(-1), number)[:, 0].clamp(max=VOCABULARY - 1).tolist()


def one_number_ranked(log_p: torch.Tensor, earlier: list[list[int]], rng: torch.Generator) -> list[int]:
    ordered, index = log_p.sort(-1, descending=True)
    ranks = torch.tensor(one_number(ordered, earlier, rng))[:, None]
    return index.gather(-1, ranks)[:, 0].tolist()


def one_noise(log_p: torch.Tensor, earlier: list[list[int]], rng: torch.Generator) -> list[int]:
    noise = -(-torch.rand(VOCABULARY, generator=rng, dtype=torch.float64).log()).log()
    return (log_p + noise).argmax(-1).tolist()


def across(log_p: torch.Tensor, earlier: list[list[int]], rng: torch.Generator) -> list[int]:
    numbers = torch.rand(TOKENS, 1, generator=torch.Generator().manual_seed(len(earlier)), dtype=torch.float64)
    return torch.searchsorted(log_p.exp().cumsum(-1), numbers)[:, 0].clamp(max=VOCABULARY - 1).tolist()


def nucleus(share: float) -> Sampler:
    def sample(log_p: torch.Tensor, earlier: list[list[int]], rng: torch.Generator) -> list[int]:
        ordered, index = log_p.exp().sort(-1, descending=True)
        kept = ordered.masked_fill(ordered.cumsum(-1) - ordered >= share, 0.0)
        return index.gather(-1, torch.multinomial(kept, 1, generator=rng))[:, 0].tolist()

    return sample


@pytest.mark.slow
def test_true_samples_reach_a_ratio_of_20_in_at_most_one_of_20_runs() -> None:
    reached = dict.fromkeys([*ALTERNATIVES, COPIES, *SAME_NUMBER, SAME_NOISE, *ACROSS, *NUCLEI], 0)
    runs = 100
    for seed in range(runs):
        for name, log_ratio in evidence_of(drawn(), seed, 2).items():
            reached[name] += log_ratio > math.log(20)
            assert log_ratio < MOST
    assert max(reached.values()) <= runs / 20, reached


@pytest.mark.parametrize(
    ("sampler", "named"),
    [
        (drawn(power=2.0), "half the temperature"),
        (drawn(power=0.5), "twice the temperature"),
        (drawn(top=3), "the 3 likeliest tokens only"),
        (in_pairs, COPIES),
        (one_number, SAME_NUMBER[0]),
        (one_number_ranked, SAME_NUMBER[1]),
        (one_noise, SAME_NOISE),
    ],
    ids=["half", "twice", "top 3", "pairs", "one number", "one number, ranked", "one noise"],
)
def test_samples_of_another_distribution_are_named(sampler: Sampler, named: str) -> None:
    found = evidence_of(sampler, 0, 4)
    assert found[named] > MOST, dict(found)


@pytest.mark.parametrize(
    ("sampler", "named"),
    [
        (drawn(power=1 / 0.9), "0.9 of the temperature"),
        (nucleus(0.95), "the likeliest tokens up to 0.95 of the probability"),
        pytest.param(nucleus(0.9), "the likeliest tokens up to 0.9 of the probability", marks=pytest.mark.slow),
        (across, ACROSS[0]),
    ],
    ids=["0.9", "top-p 0.95", "top-p 0.9", "across prompts"],
)
def test_small_faults_of_sampling_are_named_after_some_thousand_tokens(sampler: Sampler, named: str) -> None:
    found = evidence_of(sampler, 0, 24)
    assert found[named] > MOST, dict(found)
    assert evidence_of(drawn(), 0, 24)[named] < 7


def test_the_same_noise_is_seen_where_temperature_is_right_too() -> None:
    found = evidence_of(in_pairs, 1, 4)
    assert all(found[name] < MOST for name in ALTERNATIVES), "only the copies are beyond chance"


@pytest.mark.parametrize(("share", "result"), [(0.5, "ok"), (2.0, "fault")])
def test_the_bound_of_a_model_that_is_sure_of_its_tokens_is_that_of_its_logits(
    tmp_path: Path, share: float, result: str
) -> None:
    """A run was stopped at 1.1 of a bound that knew only log-probabilities: they were near 0, and the logits at 13."""
    directory = tiny_model(tmp_path, heads=4)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64).eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1000)
    prompt = list(range(3, 40))
    found = model(input_ids=torch.tensor([prompt])).logits[0, -1].detach()
    reply = int(found.argmax())
    largest, own = float(found.abs().max()), float(torch.log_softmax(found, -1)[reply])
    assert largest > 4 * (1 - own)
    rounding = 16 * 2**-24 * math.sqrt(4 * model.config.num_hidden_layers + 1)
    off = share * rounding * (1 + largest)
    stated = {"request": {}, "response": {}, "prompt": prompt, "reply": [reply], "version": 0, "logprobs": [own + off]}
    call = Call(rollout="r", span="s", **stated)
    step: Any = SimpleNamespace(
        budget_s=60.0, number=1, record=SimpleNamespace(on_cpu=True), precisions=lambda device, merged: (None, None)
    )
    weights: Any = SimpleNamespace(directory=directory, load=lambda precision: model)
    evidence: dict[str, float] = defaultdict(float)
    verdicts = list(compared(step, weights, [{call: []}], evidence=evidence, temperature=1.0, top_p=1.0, of=1))
    assert [verdict.result for verdict in verdicts] == (["fault", "ok"] if result == "fault" else ["ok"])
    assert verdicts[0].ratio == pytest.approx(share, rel=1e-3)


def test_why_no_call_is_a_sample_is_said_as_it_is() -> None:
    of: dict[str, Any] = {"response": {}, "prompt": [1], "reply": [2], "logprobs": [-0.1]}
    requests: list[tuple[dict[str, Any], int]] = [({"seed": 0}, 0), ({"seed": 5, "temperature": 0.2}, 0), ({}, 3)]
    calls = [Call(rollout="r", span="s", request=request, version=version, **of) for request, version in requests]
    record, rows = SimpleNamespace(demonstrations=""), [SimpleNamespace(group="g", calls=calls)]
    step: Any = SimpleNamespace(number=1, line={}, settings={}, record=record, rows=rows, weights=lambda version: None)
    said = "of 3 calls of step 1, 2 set seed, 1 set another temperature, 1 were sampled by other weights"
    with pytest.raises(CannotLook, match=f"^{said}$"):
        next(distribution(step))
