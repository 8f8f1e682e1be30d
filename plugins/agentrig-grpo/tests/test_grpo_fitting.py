"""Which memory plan is chosen, for made-up devices and models: all of it is arithmetic."""

from __future__ import annotations

import re
from functools import cache
from types import SimpleNamespace

import attrs
import pytest
import torch
from agentrig_grpo import planning
from agentrig_grpo.config import GrpoConfig
from agentrig_grpo.fitting import (
    SCORED,
    Choice,
    Fitting,
    group_length,
    lower,
    proof_bytes,
    server_need,
)
from agentrig_grpo.memory import Need
from agentrig_grpo.planning import MemoryPlan

from agentrig.delivery import proof
from agentrig.errors import ConfigError
from agentrig.hardware.memory import CONTEXT, GIB, KNOWN, PASSES, DeviceMemory, ModelShape, ServerNeed
from agentrig.plan import resolve
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
FULL_CHUNK = 1 << 28
VLLM = ServerMemory(sequences=256, transfer=512 << 20)
POOLED = attrs.evolve(VLLM, transfer_of_torch=True)


def need(shape: ModelShape, config: GrpoConfig, tokens: int, recomputed: int) -> Need:
    """Return about what an update of a model in bfloat16 holds: fp32 weights and copies, or a frozen model."""
    weights = shape.parameters
    trained = weights // 100 if config.lora_rank else weights
    logits = 3 * 4 * min(FULL_CHUNK, tokens * shape.vocabulary)
    once, twice = 13 * shape.hidden + 4 * shape.intermediate, 2 * shape.hidden
    layers = tokens * (once * (shape.layers - recomputed) + twice * recomputed)
    return Need(
        weights=2 * weights if config.lora_rank else 6 * weights,
        gradients=4 * trained,
        optimizer=2 * trained if config.optimizer == "adamw8bit" else 8 * trained,
        activations=layers + logits,
        change=4 * trained,
        earlier=2 * trained if config.max_staleness else 0,
        proof=proof_bytes(shape.vocabulary, shape.hidden, frozen=bool(config.lora_rank)),
        frozen=2 * weights if config.lora_rank else 0,
    )


def fitting(model="1.5B", rows="32x4", card="80", *, others=0.0, limit=0.0, says=VLLM, **settings) -> Fitting:
    """Return what a run on a made-up device chooses from."""
    tasks, n, prompt, answer = ROWS[rows]
    context, shape, total = prompt + answer + 64, SHAPES[model], int(CARDS[card] * GIB)
    given = {"tasks_per_step": tasks, "group_size": n, "max_tokens": answer, "max_length": context, **settings}
    config, device = (
        GrpoConfig(**given),
        DeviceMemory(name="cuda", total=total, others=int(others * GIB), limit=int(limit * GIB)),
    )
    server = server_need(
        config, says, shape, weights=2 * shape.parameters, element=2, context=context, runners=128, total=total
    )

    most = max(PASSES[0], 0 if config.tokens_per_batch == "auto" else config.tokens_per_batch)
    return Fitting(
        config=config,
        device=device,
        server=server,
        estimate=cache(lambda asked, tokens, twice: need(shape, asked, tokens, twice)),
        passes=(PASSES[-1], -(-FULL_CHUNK // shape.vocabulary), most),
        layers=shape.layers,
        group=group_length(config, context),
    )


def rung(found: Fitting, choice: Choice | None) -> str:
    """Return the most expensive rung that a choice uses, in a word."""
    if choice is None:
        return "refused"
    if choice.tokens < found.group:
        return "cut"
    if choice.on_host:
        return "host"
    if choice.sleeps:
        return "sleep"
    if choice.lent:
        return "lent"
    if choice.cache < 1:
        return "cache"
    return "layers" if choice.recomputed else f"pass {choice.tokens}"


def sums_hold(found: Fitting, choice: Choice) -> bool:
    """Whether server and learner stay within what there is, computed here from the sizes themselves."""
    server, device, config = found.server, found.device, found.config
    free = device.total - device.others
    if device.limit:
        free = min(free, device.limit - 3 * GIB // 4)  # this process's own part of the device
    awake = server.weights + server.beside + max(int(server.cache * choice.cache), server.least)
    size = need(SHAPES[NAMES[found.layers, server.weights]], config, choice.tokens, choice.recomputed)
    held = size.weights + size.earlier + (0 if choice.on_host else size.optimizer)
    update = held + size.gradients + max(size.activations, 0 if choice.on_host else size.change)
    free -= 512 << 20  # the buffer of new weights
    return update + (server.asleep if choice.sleeps else awake) <= free and held + awake <= free


NAMES = {(shape.layers, 2 * shape.parameters): name for name, shape in SHAPES.items()}

FULL = {
    ("0.5B", "32x4"): ("layers", "pass 24576", "pass 49152", "pass 49152"),
    ("0.5B", "16x8"): ("layers", "layers", "pass 49152", "pass 49152"),
    ("0.5B", "4x16"): ("layers", "pass 16384", "pass 49152", "pass 49152"),
    ("1.5B", "32x4"): ("host", "sleep", "layers", "pass 49152"),
    ("1.5B", "16x8"): ("host", "sleep", "layers", "pass 49152"),
    ("1.5B", "4x16"): ("host", "sleep", "pass 16384", "pass 49152"),
    ("3B", "32x4"): ("refused", "host", "cache", "pass 24576"),
    ("3B", "16x8"): ("refused", "host", "sleep", "layers"),
    ("3B", "4x16"): ("refused", "host", "sleep", "pass 16384"),
    ("7B", "32x4"): ("refused", "refused", "cut", "host"),
    ("7B", "16x8"): ("refused", "refused", "cut", "host"),
    ("7B", "4x16"): ("refused", "refused", "cut", "host"),
}
"""For each model and each shape of rows: the rung on cards of 24, 40, 80 and 141 GB, all weights trained.

7B fits 80 GB by 0.4 GiB, which CUDA itself takes; and `doctor` counts a whole chunk of logits (3 GiB) for small passes
too. Both say no.
"""

ADAPTERS = {
    ("0.5B", "32x4"): ("pass 16384", "pass 32768", "pass 49152", "pass 49152"),
    ("0.5B", "16x8"): ("pass 11392", "pass 28416", "pass 49152", "pass 49152"),
    ("0.5B", "4x16"): ("layers", "layers", "pass 49152", "pass 49152"),
    ("1.5B", "32x4"): ("layers", "layers", "pass 32768", "pass 49152"),
    ("1.5B", "16x8"): ("cache", "layers", "pass 28416", "pass 49152"),
    ("1.5B", "4x16"): ("cache", "layers", "layers", "pass 49152"),
    ("3B", "32x4"): ("layers", "layers", "layers", "layers"),
    ("3B", "16x8"): ("sleep", "layers", "layers", "layers"),
    ("3B", "4x16"): ("sleep", "cache", "layers", "pass 32768"),
    ("7B", "32x4"): ("refused", "cache", "layers", "pass 24576"),
    ("7B", "16x8"): ("refused", "sleep", "layers", "layers"),
    ("7B", "4x16"): ("refused", "sleep", "layers", "pass 16384"),
}
"""The same with adapters of rank 16."""


@pytest.mark.parametrize("rank", [0, 16])
@pytest.mark.parametrize(("model", "rows"), FULL)
def test_each_card_gets_the_cheapest_rung_that_fits(model, rows, rank) -> None:
    expected = (ADAPTERS if rank else FULL)[model, rows]
    found = [fitting(model, rows, card, lora_rank=rank) for card in CARDS]
    assert tuple(rung(one, one.first()) for one in found) == expected


@pytest.mark.parametrize("rows", ROWS)
def test_all_weights_of_7b_do_not_fit_80_gb_once_cuda_has_its_part(rows) -> None:
    assert fitting("7B", rows, "80", others=CONTEXT / GIB).first() is None


LENDING = attrs.evolve(POOLED, lends=512)

LENT = {
    ("1.5B", "32x4"): ("layers", "layers", "pass 32768", "pass 49152"),
    ("3B", "16x8"): ("lent", "lent", "layers", "layers"),
    ("7B", "32x4"): ("lent", "lent", "layers", "pass 24576"),
    ("7B", "16x8"): ("refused", "lent", "layers", "layers"),
}
"""The same with a server that lends its weights: not where a copy of the learner's own fits with the whole cache and at
most half of the layers computed twice; before sleep."""


@pytest.mark.parametrize(("model", "rows"), LENT)
def test_a_server_lends_its_weights_where_two_copies_do_not_fit(model, rows) -> None:
    found = [fitting(model, rows, card, lora_rank=16, says=LENDING) for card in CARDS]
    assert tuple(rung(one, one.first()) for one in found) == LENT[model, rows]


def test_lent_weights_are_counted_once_and_a_transfer_is_that_of_adapters() -> None:
    found = fitting("7B", "32x4", "80", lora_rank=16, says=LENDING)
    shape, own = SHAPES["7B"], found.choose()
    lent = attrs.evolve(own, lent=True)
    adapters = 2 * 28 * 16 * (7 * 3584 + 2 * 32 * 128 + 3 * 18944)
    assert found.server.adapters == adapters
    assert found.need(own).weights - found.need(lent).weights == 2 * shape.parameters
    assert found.serving(lent).memory() - found.server.memory() == 3 * adapters + (1 << 27)
    assert (found.serving(lent).transfer, found.serving(lent).of_torch) == (2 * adapters, 2 * adapters)
    assert found.left(lent) - found.left(own) == found.server.transfer - 5 * adapters - (1 << 27)
    assert "(weights 14.2, which the learner reads, the cache" in found.describe(lent)


@pytest.mark.parametrize(
    ("settings", "ways"),
    [
        ({}, {(False, False), (True, False), (False, True)}),
        ({"lora_base": "own"}, {(False, False), (False, True)}),
        ({"lora_base": "server"}, {(True, False)}),
        ({"server_sleep": True}, {(False, True)}),
        ({"server_sleep": False}, {(False, False), (True, False)}),
        ({"max_staleness": 1}, {(False, False), (True, False)}),
        ({"lora_rank": 513}, {(False, False), (False, True)}),
        ({"lora_rank": 0}, {(False, False), (False, True)}),
    ],
)
def test_lent_weights_stay_awake_and_the_setting_is_kept(settings, ways) -> None:
    found = fitting("7B", "32x4", "40", **{"lora_rank": 16, "says": LENDING, **settings})
    choices = list(found.choices())
    assert {(choice.lent, choice.sleeps) for choice in choices} == ways
    assert all(attrs.evolve(found, begun=one).first() in (None, *choices) for one in choices[:1])
    begun = attrs.evolve(found, begun=choices[-1])
    assert {choice.lent for choice in begun.choices()} == {choices[-1].lent}


@pytest.mark.parametrize("settings", [{}, {"lora_rank": 16, "server_sleep": True}])
def test_weights_that_are_lent_need_adapters_and_a_server_that_is_awake(settings) -> None:
    with pytest.raises(ValueError, match="is for adapters"):
        GrpoConfig(lora_base="server", **settings)


def test_a_lending_server_gets_its_bytes_and_its_size_is_measured(monkeypatch) -> None:
    plan, learner = begun(model="7B", rows="32x4", card="24", says=LENDING, lora_rank=16)
    assert plan.choice.lent
    server = plan.fitting.serving(plan.choice)
    assert plan.server_memory == server.memory(plan.choice.cache)
    more = plan.server_memory + GIB // 8
    monkeypatch.setattr(planning, "measured", lambda *_: attrs.evolve(plan.fitting.device, others=more))
    plan.started(learner)
    assert plan.fitting.serving(plan.choice).memory() == more
    assert plan.choice.lent


def all_of(found: Fitting) -> list[Choice]:
    sleeps = (False, True) if not found.config.max_staleness else (False,)
    tokens = sorted({*PASSES, -(-min(found.group, PASSES[0]) // 64) * 64})
    return [
        Choice(tokens=n, recomputed=k, cache=share, sleeps=asleep)
        for n in tokens
        for k in (0, found.layers)
        for share in (0.25, 1.0)
        for asleep in sleeps
    ]


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("rank", [0, 16])
@pytest.mark.parametrize("stale", [0, 1])
def test_the_sums_hold_and_a_group_is_cut_or_a_run_refused_only_where_nothing_avoids_it(card, rank, stale) -> None:
    for model in SHAPES:
        for rows in ROWS:
            found = fitting(model, rows, card, lora_rank=rank, max_staleness=stale)
            choice = found.first()
            if choice is None:
                assert not [c for c in all_of(found) if found.fits(c)], (model, rows)
                continue
            assert sums_hold(found, choice), (model, rows)
            assert not (choice.sleeps and stale)
            if choice.tokens < found.group:
                assert not [c for c in all_of(found) if c.tokens >= found.group and found.fits(c)], (model, rows)
            if choice.recomputed:
                assert not found.fits(attrs.evolve(choice, recomputed=choice.recomputed - 1))


def test_almost_no_free_memory_is_refused_with_the_numbers() -> None:
    words = r"and 0\.0 MiB of cuda are free for it: it has 79\.2 GiB, of which 77\.2 GiB were taken before"
    with pytest.raises(ConfigError, match=words):
        fitting(others=77.2).choose()


def test_a_limit_that_is_too_small_is_refused_with_the_least_that_fits() -> None:
    with pytest.raises(ConfigError, match=r", or hardware\.memory_gib = \d+ or more$") as refused:
        fitting(limit=10).choose()
    least = int(re.search(r"memory_gib = (\d+) or more", str(refused.value))[1])
    assert fitting(limit=least).first()
    assert not fitting(limit=least - 1).first()
    with pytest.raises(ConfigError, match=r"with more memory$"):  # no limit that the card has would do
        fitting("7B", "32x4", "40", limit=20).choose()


@pytest.mark.parametrize("name", ["cuda", "ascend"])
def test_a_negative_limit_is_refused(name) -> None:
    with pytest.raises(ConfigError, match="memory_gib"):
        resolve("mini", uses={"hardware": name}, overrides=["hardware.memory_gib=-1"]).configs["hardware"]


def test_the_fastest_of_passes_and_layers_is_chosen() -> None:
    """Measured on an H200: 2.45 s with a group a pass, 2.31 with four and 18 layers twice, 2.18 with two and 5."""
    found = fitting("1.5B", "16x8", "80")
    ways = [(8192, 0), (24576, 18), (12288, 5), (16384, 0), (24576, 0), (49152, 0)]
    assert sorted(ways, key=lambda way: -found.cost(*way)) == ways
    first = found.choose()
    same = [c for c in found.choices() if attrs.evolve(c, tokens=first.tokens, recomputed=first.recomputed) == first]
    faster = [c for c in same if found.cost(c.tokens, c.recomputed) < found.cost(first.tokens, first.recomputed)]
    assert faster
    assert not any(map(found.fits, faster))
    assert (first.tokens // found.group, 0 < first.recomputed < 14) == (4, True)


def test_moments_move_to_host_memory_before_groups_are_cut() -> None:
    assert fitting("1.5B", "32x4", "24", moments="device").first() is None
    moved = fitting("1.5B", "32x4", "24")
    choice = moved.choose()
    assert (choice.on_host, choice.sleeps) == (True, True)
    assert choice.tokens >= moved.group
    assert sums_hold(moved, choice)
    for where, expected in (("device", False), ("host", True)):
        set_ = fitting("1.5B", "32x4", "141", moments=where)
        assert {choice.on_host for choice in set_.choices()} == {expected}
    assert not any(choice.on_host for choice in fitting(optimizer="adamw8bit").choices())
    assert "moments in host memory" in moved.describe(choice)


def test_a_pass_that_is_set_is_kept_or_refused_with_the_nearest_that_fits() -> None:
    assert fitting(tokens_per_batch=10_000).choose().tokens == 10_000
    wide = {"gradient_checkpointing": False, "server_sleep": False, "tokens_per_batch": 60_000}
    with pytest.raises(ConfigError, match=r"60000\.\n  Set algorithm.gradient_checkpointing = true$"):
        fitting(**wide).choose()
    with pytest.raises(
        ConfigError, match=r"with tokens_per_batch = 1000000\.\n  Set algorithm.tokens_per_batch = 49152$"
    ):
        fitting(tokens_per_batch=1_000_000).choose()
    assert fitting(tokens_per_batch=49152).first() is not None


def test_settings_are_kept() -> None:
    assert {c.recomputed for c in fitting(gradient_checkpointing=True).choices()} == {28}
    assert {c.recomputed for c in fitting(gradient_checkpointing=False).choices()} == {0}
    assert {c.sleeps for c in fitting(server_sleep=True).choices()} == {True}
    assert {c.sleeps for c in fitting(server_sleep=False).choices()} == {False}
    assert {c.sleeps for c in fitting(max_staleness=1).choices()} == {False}
    assert {c.sleeps for c in fitting().choices()} == {False, True}


def test_a_cpu_has_passes_of_8192_and_nothing_sleeps() -> None:
    found = attrs.evolve(fitting(), device=DeviceMemory(name="cpu", total=500 * GIB), server=ServerNeed(weights=GIB))
    assert found.choose() == Choice(tokens=8192)
    assert {c.sleeps for c in found.choices()} == {False}


def test_a_servers_own_settings_win() -> None:
    shared = fitting(says=ServerMemory(sequences=256, share=0.3))
    assert shared.server.memory(0.25) == int(0.3 * 79.2 * GIB) == shared.server.memory()
    cached = fitting(says=ServerMemory(sequences=256, cache=5 * GIB))
    assert cached.server.memory(0.25) == cached.server.weights + cached.server.beside + 5 * GIB
    with pytest.raises(ConfigError, match=r"\n  Set server.gpu_memory_utilization = (0.\d+) or less, or 0 ") as refused:
        fitting(says=ServerMemory(sequences=256, share=0.9), server_sleep=False).choose()
    share = float(re.search(r"utilization = (\S+)", str(refused.value))[1])
    for more, fits in ((0.0, True), (0.01, False)):
        says = ServerMemory(sequences=256, share=share + more)
        assert bool(fitting(says=says, server_sleep=False).first()) is fits
    assert fitting(says=ServerMemory(sequences=256, elsewhere=True)).server.memory() == 0


def test_a_server_that_keeps_its_weights_asleep_takes_them_during_updates() -> None:
    found = fitting(says=ServerMemory(sequences=64, asleep=GIB, keeps_weights=True))
    assert found.server.asleep == GIB + found.server.weights
    assert found.server.transfer == found.server.weights


def test_a_long_context_does_not_fill_the_device_with_keys_and_values() -> None:
    """Without `max_length` a call is planned as 4,096 tokens and its answer; one of the whole context fits always."""
    config = GrpoConfig(max_tokens=1024)
    shape = SHAPES["1.5B"]
    found = server_need(config, VLLM, shape, weights=0, element=2, context=32768, runners=32, total=80 * GIB)
    assert found.cache == 32 * shape.kv_bytes(4096 + 1024 + 32)
    assert found.least == shape.kv_bytes(32768 + 32)
    assert group_length(config, 32768) == 4096 + 8 * 1025


def test_the_plan_of_a_model_of_unknown_shape_leaves_its_server_what_vllm_takes() -> None:
    found = server_need(GrpoConfig(), VLLM, None, weights=9, element=2, context=100, runners=0, total=1000)
    assert (found.given, found.calls) == (400, 256)


def test_estimates_are_asked_for_at_the_ends_only_and_never_too_small() -> None:
    asked = []
    shape, config = SHAPES["1.5B"], GrpoConfig()

    def estimate(config, tokens, twice):
        asked.append((tokens, twice))
        return need(shape, config, tokens, twice)

    found = attrs.evolve(fitting(), config=config, estimate=cache(estimate), passes=(256, 1767, 49152))

    def needs(tokens, twice):
        return found.need(Choice(tokens=tokens, recomputed=twice))

    assert needs(49152, 0) == need(shape, config, 49152, 0)
    assert asked == [(49152, 0)]
    for tokens in (300, 1024, 8192, 30_000):
        for twice in (0, 5, 28):
            assert needs(tokens, twice).activations >= 0.999 * need(shape, config, tokens, twice).activations
    assert sorted(asked) == [(n, twice) for n in (256, 1767, 49152) for twice in (0, 28)]


def test_the_line_says_what_was_chosen() -> None:
    found = fitting()
    assert found.describe(found.choose()) == (
        "memory: 79.2 GiB of cuda: server 8.8 (weights 2.9, the cache of 128 calls 3.6), update 62.3 (pass of 23,744 "
        "tokens, one layer computed twice), 7.7 left"
    )
    tight = fitting("1.5B", "16x8", "40")
    assert "1.5 while it sleeps during updates)" in tight.describe(tight.choose())


class FakeLearner:
    def __init__(self, choice: Choice) -> None:
        self.tokens, self.recomputed = choice.tokens, choice.recomputed

    def fit(self, tokens, recomputed):
        self.tokens, self.recomputed = tokens, recomputed


def begun(**more):
    found = fitting(**more)
    plan = MemoryPlan(fitting=found, choice=found.choose(), chunk=1)
    return plan, FakeLearner(plan.choice)


@pytest.mark.parametrize(("extra", "tokens"), [(0, 23744), (-5, 23744), (20, 11200)])
def test_a_server_that_takes_more_than_planned_makes_passes_smaller(monkeypatch, extra, tokens) -> None:
    """As does another process that has started meanwhile; memory that is not used yet stays the server's."""
    plan, learner = begun()
    taken = plan.fitting.server.memory() + int(extra * GIB)
    now = attrs.evolve(plan.fitting.device, others=taken)
    monkeypatch.setattr(planning, "measured", lambda device, limit: now)
    recorded, first = [], plan.facts()
    plan.record = recorded.append
    plan.started(learner)
    assert learner.tokens == tokens == plan.choice.tokens
    if tokens != 23744:
        (facts,) = recorded
        (again,) = facts.pop("again")
        assert (facts, again["choice"]) == (first, attrs.asdict(plan.choice))
        assert (again["why"], again["line"]) == ("the size of its server, which has started", plan.line())
    assert sums_hold(attrs.evolve(plan.fitting, device=fitting(others=max(extra, 0)).device), plan.choice)


def test_what_another_run_takes_while_a_server_starts_is_not_the_servers(monkeypatch, caplog) -> None:
    """Two runs with a limit start at once on one card: the server says what it holds, the rest is the other run's."""
    plan, learner = begun(model="0.5B", card="141", limit=24, says=POOLED)
    assert not plan.choice.sleeps
    before, choice = plan.fitting.device, plan.choice
    own, others = plan.fitting.server.memory(choice.cache), 20 * GIB
    now = attrs.evolve(before, others=before.others + own + others)
    monkeypatch.setattr(planning, "measured", lambda *_: now)
    plan.server = SimpleNamespace(device_memory=lambda: None)
    with pytest.raises(ConfigError, match=r"its server, or what others took while it started, takes \d\d\.\d GiB"):
        plan.started(learner)

    plan, learner = begun(model="0.5B", card="141", limit=24, says=POOLED)
    plan.server = SimpleNamespace(device_memory=lambda: own + GIB // 8)  # rather too much than too little
    plan.delivered(learner)
    assert (plan.fitting.device.others, plan.fitting.server.memory()) == (
        before.others + others - GIB // 8,
        own + GIB // 8,
    )
    assert plan.choice.tokens == choice.tokens
    here = 2 * GIB
    monkeypatch.setattr(planning, "held_here", lambda device: here)
    now = attrs.evolve(now, others=now.others + 30 * GIB)  # the other run goes on
    plan.delivered(learner)
    assert "the run has" not in caplog.text
    here = 24 * GIB
    plan.delivered(learner)
    assert f"memory_gib = 24: the run has {(here + own) / GIB + 1 / 8:.1f} GiB" in caplog.text


def test_a_server_that_leaves_nothing_ends_the_run_with_the_numbers(monkeypatch) -> None:
    plan, learner = begun()
    now = attrs.evolve(plan.fitting.device, others=70 * GIB)
    monkeypatch.setattr(planning, "measured", lambda device, limit: now)
    with pytest.raises(
        ConfigError, match=r"9\.2 GiB of cuda are free for it: .* its server, or what .*, takes 69\.5 GiB"
    ):
        plan.started(learner)


def limited(monkeypatch, **more):
    """Return a plan with a limit in which the server sleeps, and the shares that torch is held to."""
    plan, learner = begun(model="1.5B", rows="16x8", limit=40, says=POOLED, **more)
    assert plan.choice.sleeps
    shares: list[float] = []
    module = SimpleNamespace(set_per_process_memory_fraction=shares.append)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    return plan, learner, shares


def test_with_a_limit_torch_gets_less_while_the_server_is_awake(monkeypatch) -> None:
    """Torch, the server and this process's own part are the limit in both phases."""
    plan, _, shares = limited(monkeypatch)
    plan.hold(updating=True)
    plan.hold(updating=False)
    server, total = plan.fitting.server, plan.fitting.device.total
    for share, taken in zip(shares, (server.asleep, server.memory(plan.choice.cache)), strict=True):
        assert round(share * total) + taken + 3 * GIB // 4 == pytest.approx(40 * GIB, abs=2)
    need = plan.fitting.need(plan.choice)
    assert need.state + need.proof + server.of_torch <= shares[1] * total
    free, _ = begun()
    free.hold(updating=True)
    assert len(shares) == 2, "without a limit nothing is set"


def test_without_a_limit_torch_leaves_a_server_that_wakes_its_memory(monkeypatch) -> None:
    """An audit of long rows took 134 of 140 GiB, and the server could not answer after it."""
    plan, _, shares = limited(monkeypatch)
    plan.fitting = attrs.evolve(plan.fitting, device=attrs.evolve(plan.fitting.device, limit=0))
    plan.hold(updating=False)
    plan.hold(updating=True)
    device = plan.fitting.device
    assert shares[0] * device.total + plan.fitting.server.memory(plan.choice.cache) <= device.total - device.others
    assert shares[1] == 1


def test_a_run_above_its_limit_says_so_once(monkeypatch, caplog) -> None:
    plan, learner, _ = limited(monkeypatch, others=0.6)  # this process's own part, on a card that nothing else uses
    used = 39.9
    now = attrs.evolve(plan.fitting.device, limit=0, reserved=24 * GIB)
    monkeypatch.setattr(planning, "measured", lambda *_: attrs.evolve(now, others=int(used * GIB) - 24 * GIB))
    plan.delivered(learner)
    assert not caplog.records
    used = 42.98
    plan.delivered(learner)
    plan.delivered(learner)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("[hardware] memory_gib = 40: the run has 43.0 GiB of cuda, ")
    assert "torch holds 24.0 GiB of that for the learner. Planned was: memory: 39.2 GiB of cuda" in said


def test_a_buffer_that_torch_holds_is_not_taken_from_the_servers_size(monkeypatch) -> None:
    plan, learner = begun(says=POOLED)
    more = plan.fitting.server.memory() + 2 * GIB
    now = attrs.evolve(plan.fitting.device, others=more)  # torch's own are not among them
    monkeypatch.setattr(planning, "measured", lambda *_: now)
    plan.delivered(learner)
    assert plan.fitting.server.memory() == more


def test_the_buffer_is_as_large_as_the_largest_tensor() -> None:
    for model, size in (("1.5B", 512 << 20), ("7B", 152064 * 3584 * 2)):
        server = fitting(model, says=POOLED, card="141", lora_rank=16).server
        assert server.transfer == server.of_torch == size
    elsewhere = fitting(says=attrs.evolve(POOLED, elsewhere=True)).server
    assert (elsewhere.memory(), elsewhere.of_torch) == (0, 512 << 20)


def test_proofs_are_counted_between_updates() -> None:
    assert SCORED == proof.LIMIT + proof.SAMPLED
    found = fitting("1.5B", "16x8", "40")
    choice = found.choose()
    need = found.need(choice)
    room = found.left(choice, updating=False) - need.state
    assert choice.sleeps
    assert room >= need.proof > 0
    for size, fits in ((room, True), (room + 1, False)):
        more = attrs.evolve(found, estimate=lambda *of, n=size: attrs.evolve(found.estimate(*of), proof=n))
        assert more.fits(choice) is fits


def test_an_update_that_took_more_than_planned_makes_passes_smaller() -> None:
    plan, learner = begun()
    plan.updated(learner, plan.fitting.left(plan.choice))
    planned = learner.tokens, learner.recomputed
    assert planned == (23744, 1)
    plan.updated(learner, plan.fitting.left(plan.choice) + 10 * GIB)
    assert plan.fitting.cost(learner.tokens, learner.recomputed) > plan.fitting.cost(*planned)
    (again,) = plan.facts()["again"]
    assert again["why"].startswith("the first update, which took ")
    assert again["choice"]["tokens"] == learner.tokens
    assert plan.fitting.factor > 1


def test_a_smaller_pass_after_an_error_cuts_groups_last() -> None:
    steps, now = [], (49152, 0)
    while now is not None:
        steps.append(now)
        now = lower(*now, latest=now[0] - 9, group=10_000, most=28)
    assert steps == [(49152, 0), (24576, 0), (12288, 0), (12288, 28)] + [(12288 >> i, 28) for i in range(1, 6)]
    assert lower(512, 0, latest=500, group=10_000, most=0) == (256, 0)
    assert lower(511, 0, latest=500, group=10_000, most=0) is None


def test_a_smaller_pass_is_smaller_than_the_one_that_was_too_large() -> None:
    assert lower(49152, 0, latest=7000, group=100, most=28) == (6144, 0)
    assert lower(8192, 0, latest=8000, group=100, most=28) == (4096, 0)
    assert lower(1000, 0, latest=1001, group=100, most=28) == (1000, 28)
    assert lower(1000, 28, latest=1001, group=100, most=28) is None
