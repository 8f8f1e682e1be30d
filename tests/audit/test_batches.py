"""How the auditor computes calls side by side: what their prompts begin with once, and nothing for long in vain."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from audited_runs import UPDATE, tiny_model

from agentrig.audit.model import Precision, Weights, batches, logprobs, place, tokens
from agentrig.audit.record import Call
from agentrig.audit.update import Update, repeat
from agentrig.audit.verdicts import CannotLook

PLAIN, EXACT = Precision(torch.float32), Precision(torch.float64)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    torch.set_num_threads(1)
    folder = tiny_model(tmp_path_factory.mktemp("tiny"))
    start = Weights(directory=folder, trained={})
    return Weights(directory=folder, trained=dict(start.load(PLAIN).named_parameters()))


def step(common: int, *, tasks: int = 3, group: int = 4) -> list[Call]:
    """The calls of an agent with tools: each rollout has two turns, and `common` tokens describe the tools."""
    rng, found = random.Random(common), []

    def text(low: int, high: int) -> list[int]:
        return [rng.randrange(20, 60) for _ in range(rng.randint(low, high))]

    tools = text(common, common)
    for task in range(tasks):
        first = [*tools, *text(5, 9)]
        for one in range(group):
            prompt = first
            for turn in ("a", "b"):
                more: dict[str, Any] = {"request": {}, "response": {}, "version": 0, "logprobs": None}
                found.append(Call(rollout=f"{task}-{one}", span=turn, prompt=prompt, reply=text(1, 8), **more))
                prompt = [*prompt, *found[-1].reply, *text(0, 5)]
    return found


def update_of(weights: Weights, calls: list[Call]) -> Update:
    advantages = {(call.rollout, call.span): 1.0 for call in calls}
    return Update(settings=UPDATE, calls=calls, advantages=advantages, weights=weights, begin=weights)


@pytest.mark.parametrize("common", [*(pytest.param(n, marks=pytest.mark.slow) for n in (0, 1)), 30])
def test_calls_side_by_side_have_the_numbers_of_each_alone(common: int, weights: Weights) -> None:
    calls, model = step(common), weights.load(EXACT)
    seen = 0
    for part in batches(calls, 0):
        together = torch.split(logprobs(model, part, 0.7), [len(call.reply) for call in part])
        for call, own in zip(part, together, strict=True):
            ids = torch.tensor([[*call.prompt, *call.reply]])
            plain = torch.log_softmax(model(input_ids=ids).logits[0, :-1] / 0.7, -1).gather(-1, ids[0, 1:, None])[:, 0]
            torch.testing.assert_close(own, plain[-len(call.reply) :], rtol=0, atol=1e-5)
            seen += 1
    assert seen == len(calls)


def test_what_the_prompts_of_a_step_begin_with_is_not_computed_for_each_call(weights: Weights) -> None:
    calls, model, computed = step(180), weights.load(PLAIN), []
    real = model.forward
    model.forward = lambda **given: (computed.append(given["input_ids"].numel()), real(**given))[1]
    for part in batches(calls, 0):
        logprobs(model, part, 1.0)
    assert sum(computed) < tokens(calls) / 4, (computed, tokens(calls))


def test_an_update_that_would_take_too_long_is_given_up_after_its_first_batch(
    weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrig.audit.model.AT_ONCE", 1)
    calls = step(0)
    with pytest.raises(CannotLook, match="it may take 0 s"):
        repeat(update_of(weights, calls), (PLAIN, EXACT), seed=0, budget_s=0.0)
    with pytest.raises(CannotLook, match="it may take 0 s"):
        repeat(update_of(weights, calls), (PLAIN, EXACT), seed=0, wall_s=0.0)


def test_a_second_precision_that_overflows_is_no_bound(weights: Weights) -> None:
    large = Weights(directory=weights.directory, trained={n: 300 * p.detach() for n, p in weights.trained.items()})
    with pytest.raises(CannotLook, match="two precisions of the model differ by: nan"):
        repeat(update_of(large, step(0)), (PLAIN, Precision(torch.float16)), seed=0)


def test_the_audit_of_a_run_on_the_cpu_takes_nothing_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"dtype": "float32"}', "utf-8")
    (tmp_path / "model.safetensors").write_bytes(bytes(4000))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (80 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda: 1.0)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    assert place(tmp_path, 8, on_cpu=False) == "cuda"
    assert place(tmp_path, 8, on_cpu=True) == "cpu"
