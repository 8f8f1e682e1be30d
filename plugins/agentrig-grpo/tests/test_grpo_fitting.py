"""Which memory plan is chosen, for made-up devices and models: all of it is arithmetic."""

from __future__ import annotations

from functools import cache

import attrs
import pytest
from agentrig_grpo.config import GrpoConfig
from agentrig_grpo.fitting import (
    CONTEXT,
    GIB,
    MARGIN,
    PASSES,
    Choice,
    Device,
    Fitting,
    Needs,
    ServerNeed,
    group_length,
    lower,
    server_need,
)
from agentrig_grpo.memory import Need
from agentrig_grpo.planning import MemoryPlan

from agentrig.errors import ConfigError
from agentrig.hardware.memory import KNOWN, ModelShape
from agentrig.servers import ServerMemory

SHAPES = {
    "0.5B": KNOWN["qwen/qwen2.5-coder-0.5b-instruct"],
    "1.5B": KNOWN["qwen/qwen2.5-coder-1.5b-instruct"],
    "3B": KNOWN["qwen/qwen2.5-coder-3b-instruct"],
    "7B": ModelShape(
        layers=28, hidden=3584, intermediate=18944, heads=28, kv_heads=4, head_dim=128, vocabulary=152064, tied=False
    ),
}
ROWS = {"32x4": (32, 4, 816, 128), "16x8": (16, 8, 4000, 200), "4x16": (4, 16, 8000, 512)}
CARDS = {"24": 23.6, "40": 39.4, "80": 79.2, "141": 139.8}
VLLM = ServerMemory(sequences=256)


def need(shape: ModelShape, config: GrpoConfig, tokens: int, recomputed: int) -> Need:
    """Return about what an update of a model in bfloat16 holds: fp32 weights and copies, or a frozen model in fp32."""
    weights = shape.parameters
    trained = weights // 100 if config.lora_rank else weights
    logits = 3 * min(4 * (1 << 28), 4 * tokens * shape.vocabulary)
    once, twice = 13 * shape.hidden + 4 * shape.intermediate, 2 * shape.hidden
    layers = tokens * (once * (shape.layers - recomputed) + twice * recomputed)
    return Need(
        weights=4 * weights if config.lora_rank else 6 * weights,
        gradients=4 * trained,
        optimizer=2 * trained if config.optimizer == "adamw8bit" else 8 * trained,
        activations=layers + logits,
        change=4 * trained,
        earlier=2 * trained if config.max_staleness else 0,
    )


def fitting(model="1.5B", rows="32x4", card="80", *, others=0.0, limit=0.0, says=VLLM, **settings) -> Fitting:
    """Return what a run on a made-up device chooses from."""
    tasks, n, prompt, answer = ROWS[rows]
    context, shape, total = prompt + answer + 64, SHAPES[model], int(CARDS[card] * GIB)
    given = {"tasks_per_step": tasks, "group_size": n, "max_tokens": answer, "max_length": context, **settings}
    config, device = (
        GrpoConfig(**given),
        Device(name="cuda", total=total, others=int(others * GIB), limit=int(limit * GIB)),
    )
    server = server_need(
        config, says, shape, weights=2 * shape.parameters, element=2, context=context, runners=128, total=total
    )

    @cache
    def needs(asked: GrpoConfig) -> Needs:
        ends = (PASSES[-1], max(PASSES[0], 0 if asked.tokens_per_batch == "auto" else asked.tokens_per_batch))
        return Needs(lambda tokens, twice: need(shape, asked, tokens, twice), layers=shape.layers, passes=ends)

    group = group_length(config, context)
    return Fitting(config=config, device=device, server=server, needs=needs, layers=shape.layers, group=group)


def cheapest(choice: Choice, layers: int) -> str:
    """Return the most expensive rung that a choice uses, in a word."""
    if choice.on_host:
        return "host"
    if choice.sleeps:
        return "sleep"
    if choice.cache < 1:
        return "cache"
    return "all layers" if choice.recomputed == layers else "layers" if choice.recomputed else "pass"


def check_sums(found: Fitting, choice: Choice) -> None:
    """Check by hand that server and learner stay within what there is, while calls run and during an update."""
    config, shape = found.config, found.layers
    assert 0 <= choice.recomputed <= shape
    server, update = found.server, found.update(choice)
    awake = server.given or server.weights + server.beside + max(int(server.cache * choice.cache), server.least)
    during = server.asleep if choice.sleeps else awake
    free = min(found.device.total - found.device.others, found.device.limit - CONTEXT or found.device.total)
    if found.device.limit == 0:
        free = found.device.total - found.device.others
    assert update * MARGIN + during <= free
    exact = found.needs(config)(choice.tokens, choice.recomputed)
    assert exact.weights + (0 if choice.on_host else exact.optimizer) + awake <= free
    assert not (choice.sleeps and config.max_staleness)


TABLE = {
    ("0.5B", "32x4", "24", 0): "pass 8192",
    ("1.5B", "32x4", "80", 0): "pass",
    ("1.5B", "16x8", "80", 0): "pass",
    ("1.5B", "4x16", "80", 0): "layers",
    ("1.5B", "32x4", "141", 0): "pass 49152",
}


@pytest.mark.parametrize("rank", [0, 16])
@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("model", SHAPES)
def test_table(model, rows, card, rank) -> None:
    found = fitting(model, rows, card, lora_rank=rank)
    choice = found.first()
    print(
        model,
        rows,
        card,
        rank,
        choice and cheapest(choice, found.layers),
        choice,
        found.describe(choice) if choice else found.refusal(),
    )
