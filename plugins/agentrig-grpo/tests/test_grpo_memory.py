"""The memory of an update is estimated before it; an update that does not fit is refused with a message."""

from __future__ import annotations

import json
import re
from functools import partial
from types import SimpleNamespace

import attrs
import pytest
import torch
from agentrig_cuda import Cuda, CudaConfig
from agentrig_forest.scoring import CHUNK
from agentrig_grpo import algorithm, planning
from agentrig_grpo import learner as learner_module
from agentrig_grpo.config import GrpoConfig
from agentrig_grpo.learner import Learner
from agentrig_grpo.memory import Counter, _full, need_of
from agentrig_grpo.planning import free_memory, measured, plan_memory
from quick import quick_first

from agentrig.errors import ConfigError, OutOfMemory, RunStopped
from agentrig.hardware import Cpu
from agentrig.hardware.memory import GIB, DeviceMemory, ServerNeed
from agentrig.servers import ServerMemory, ServerPlan

LARGE = {"vocab": 4000, "hidden": 128, "layers": 4}


@pytest.fixture(scope="module")
def directory(make_model, tokenizer, tmp_path_factory):
    from agentrig_grpo import checkpoint

    path = tmp_path_factory.mktemp("large")
    checkpoint.save(make_model(**LARGE), tokenizer, path)
    return path


def counted(model, config, dtype, chunk, recomputed=None):
    """Return the most bytes of tensors that were alive in a real update of two passes, in the second step."""
    learner = Learner(model, config, dtype=dtype, seed=0, chunk=chunk, recomputed=recomputed)
    samples = [
        attrs.evolve(s, prompt_ids=[first, *s.prompt_ids[1:]])
        for first in (8, 9)
        for s in _full(config, config.tokens_per_batch)
    ]
    learner.update(samples, step=1)
    with Counter("cpu") as counter:
        counter.add(iter([p.data for p in (*learner.trained.values(), *learner.model.parameters())]))
        counter.add(t for state in learner.optimizer.state.values() for t in state.values())
        if learner._reference is not None:
            counter.add(p.data for p in learner._reference.parameters())
        learner.update(samples, step=2)
    return counter.peak


WAYS = {
    "fp32": ("float32", {}, CHUNK),
    "checkpointing": ("float32", {"gradient_checkpointing": True}, CHUNK),
    "chunks of logits": ("float32", {}, 4000 * 64),
    "bf16": ("bfloat16", {}, CHUNK),
    "bf16, checkpointing": ("bfloat16", {"gradient_checkpointing": True}, CHUNK),
    "adapters": ("float32", {"lora_rank": 4}, CHUNK),
    "adapters in bf16": ("bfloat16", {"lora_rank": 4}, CHUNK),
    "a reference": ("float32", {"kl_loss_coef": 0.1}, CHUNK),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_the_estimate_is_what_an_update_holds(make_model, directory, way) -> None:
    dtype, more, chunk = WAYS[way]
    config = GrpoConfig(tokens_per_batch=1024, group_size=4, max_tokens=100, **more)
    need = need_of(directory, config, tokens=1024, dtype=dtype, device="cpu", attention="sdpa", chunk=chunk)
    real = counted(make_model(**LARGE), config, dtype, chunk)
    assert need.peak == pytest.approx(real, rel=0.05)


def test_the_estimate_of_adapters_knows_a_model_that_stays_in_16_bits(make_model, tokenizer, tmp_path) -> None:
    from agentrig_grpo import checkpoint

    checkpoint.save(make_model(**LARGE), tokenizer, tmp_path, dtype=torch.bfloat16)
    config = GrpoConfig(tokens_per_batch=1024, group_size=4, max_tokens=100, lora_rank=4)
    need = need_of(tmp_path, config, tokens=1024, dtype="bfloat16", device="cpu", attention="sdpa", chunk=CHUNK)
    real = counted(make_model(**LARGE).to(torch.bfloat16), config, "bfloat16", CHUNK)
    assert need.peak == pytest.approx(real, rel=0.05)
    held = sum(p.numel() for p in make_model(**LARGE).parameters())
    assert 2 * held < need.weights < 3 * held


def weights_of(directory):
    """Return the bytes that are left to the model's server on a CPU."""
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def fit(directory, free, **settings):
    config = GrpoConfig(group_size=4, max_tokens=100, **{"tokens_per_batch": 4096, **settings})
    device, server = DeviceMemory(name="cpu", total=free), ServerNeed(weights=weights_of(directory))
    return plan_memory(directory, config, dtype="float32", device=device, attention="sdpa", server=server)


def test_checkpointing_is_on_only_where_memory_is_short(directory) -> None:
    plenty = fit(directory, 64 * GIB)
    assert (plenty.choice.recomputed, plenty.known) == (0, False)
    config = GrpoConfig(group_size=4, max_tokens=100)
    need = need_of(directory, config, tokens=4096, dtype="float32", device="cpu", attention="sdpa", chunk=CHUNK)
    enough = fit(directory, int(need.peak * 1.3))
    assert (enough.choice.recomputed, enough.known, enough.fitting.need(enough.choice).peak) == (0, True, need.peak)
    short = fit(directory, int(need.peak * 0.9))
    assert short.choice.recomputed > 0
    assert short.fitting.need(short.choice).peak < need.peak


def test_a_pass_that_is_not_set_is_the_largest_that_fits(directory) -> None:
    assert fit(directory, 64 * GIB, tokens_per_batch="auto").choice.tokens == 8192
    plan = fit(directory, 130 << 20, tokens_per_batch="auto")
    assert plan.choice.tokens < 8192
    assert plan.fitting.need(plan.choice).room + weights_of(directory) <= 130 << 20
    exact = partial(need_of, directory, plan.config, dtype="float32", device="cpu", attention="sdpa", chunk=CHUNK)
    real = exact(tokens=plan.choice.tokens, recomputed=plan.choice.recomputed).peak
    assert 0.98 * real <= plan.fitting.need(plan.choice).peak <= 1.2 * real


@pytest.mark.slow
def test_only_as_many_layers_as_needed_compute_their_activations_twice(make_model, directory) -> None:
    config = GrpoConfig(group_size=4, max_tokens=100, tokens_per_batch=1024)
    need = partial(need_of, directory, tokens=1024, dtype="float32", device="cpu", attention="sdpa", chunk=CHUNK)
    none, every = need(config, recomputed=0), need(config, recomputed=4)
    for share, layers in ((0.6, 2), (0.02, 4)):
        activations = every.activations + share * (none.activations - every.activations)
        free = 1.02 * (none.peak - none.activations) + 1.15 * activations + weights_of(directory)
        short = fit(directory, int(free) + 1, tokens_per_batch=1024)
        assert short.choice.recomputed == layers
    twice = attrs.evolve(config, gradient_checkpointing=True)
    some = counted(make_model(**LARGE), twice, "float32", CHUNK, 2)
    assert need(config, recomputed=2).peak == pytest.approx(some, rel=0.05)


ADVICE = {
    "recompute": (250, {"gradient_checkpointing": False}, r"Set algorithm\.gradient_checkpointing = true"),
    "batches": (90, {}, r"Set algorithm\.tokens_per_batch = (2048|3072)"),
    "optimizer": (
        28,
        {"tokens_per_batch": 256},
        r"Set algorithm\.optimizer = \"adamw8bit\" \(pip install 'agentrig-grpo\[8bit\]'\)",
    ),
    "adapters": (26, {"tokens_per_batch": 256}, r"Set algorithm\.lora_rank = 16, which trains adapters only"),
    "model": (2, {}, r"Take a smaller model, or a device with more memory"),
}


@pytest.mark.parametrize("name", quick_first(ADVICE, ("batches",)))
def test_an_update_that_does_not_fit_is_refused_with_advice(directory, name) -> None:
    mib, settings, cure = ADVICE[name]
    words = rf"an update needs about [\d.]+ [GM]iB of memory, and [\d.]+ [GM]iB of cpu are free for it: .*\n  {cure}$"
    with pytest.raises(ConfigError, match=re.compile(words, re.DOTALL)) as error:
        fit(directory, mib << 20, **settings)
    said = re.search(r"Set algorithm\.(\w+) = (\S+?)[ ,]?(\n|,| |$)", str(error.value))
    if said:  # it keeps its word
        fit(directory, mib << 20, **{**settings, said[1]: json.loads(said[2])})


def test_free_memory_is_that_of_this_host() -> None:
    assert 1 << 24 < free_memory() < 1 << 50
    now = measured("cpu")
    assert (now.accelerator, now.others, now.limit) == (False, 0, 0)


def test_a_model_whose_calls_share_no_tokens_is_not_estimated(make_model, tokenizer, tmp_path, caplog):
    from agentrig_grpo import checkpoint

    checkpoint.save(make_model("gpt2", n_embd=32, n_layer=2, n_head=4, n_positions=64), tokenizer, tmp_path)
    found = fit(tmp_path, 64 * GIB)
    assert (found.known, found.recomputed) == (False, 0)
    whole = fit(tmp_path, 64 * GIB, gradient_checkpointing=True)
    assert whole.recomputed > 2
    words = (
        "how much memory an update needs is not known before the first one: NotImplementedError: the calls of a gpt2"
    )
    assert words in caplog.text


def test_an_estimate_that_fails_does_not_stop_a_run(directory, monkeypatch, caplog) -> None:
    def broken(*_, **__):
        raise RuntimeError("an operation without fake tensors")

    monkeypatch.setattr("agentrig_grpo.memory.need_of", broken)
    found = fit(directory, 200 << 20)
    assert (found.known, found.recomputed, found.chunk) == (False, 0, CHUNK)
    assert "RuntimeError: an operation without fake tensors. Gradient checkpointing is off" in caplog.text


def test_what_others_hold_is_all_that_this_process_does_not(monkeypatch) -> None:
    device = SimpleNamespace(mem_get_info=lambda: (30 * GIB, 80 * GIB), memory_reserved=lambda: 7 * GIB)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: device)
    found = measured("cuda", limit=60 * GIB)
    assert found == DeviceMemory(name="cuda", total=80 * GIB, others=43 * GIB, reserved=7 * GIB, limit=60 * GIB)
    assert found.budget == 37 * GIB
    assert measured("cuda", limit=24 * GIB).budget == 24 * GIB - 3 * GIB // 4


@pytest.mark.parametrize("settings", [{}, {"optimizer": "adamw8bit"}, {"lora_rank": 4}], ids=str)
def test_moments_are_made_before_the_first_activations(make_model, settings) -> None:
    """Later they would lie between activations and gradients, whose memory torch could not give back."""
    if "optimizer" in settings:
        pytest.importorskip("bitsandbytes")
    learner = Learner(make_model(), GrpoConfig(**settings), dtype="float32", seed=0)
    made = {p: [t.data_ptr() for t in learner.optimizer.state[p].values() if torch.is_tensor(t)] for p in (
        learner.trained.values()
    )}  # fmt: skip
    assert all(made.values())
    learner.update(groups(), step=1)
    for parameter, places in made.items():
        now = [t.data_ptr() for t in learner.optimizer.state[parameter].values() if torch.is_tensor(t)]
        assert set(places) & set(now), "the first step has kept them"


def test_places_of_moments_in_host_memory_are_made_before_the_first_activations(make_model) -> None:
    learner = Learner(make_model(), GrpoConfig(moments="host"), dtype="float32", seed=0)
    made = [t.data_ptr() for pair in learner.optimizer._places for t in pair]
    assert made
    learner.update(groups(), step=1)
    assert [t.data_ptr() for pair in learner.optimizer._places for t in pair] == made


def test_an_update_has_a_limit_of_its_own_and_gives_memory_back_before_that_ends(make_model, monkeypatch) -> None:
    events = []
    learner = Learner(make_model(), GrpoConfig(), dtype="float32", seed=0)
    learner.limit, learner.gives_back = lambda updating: events.append(updating), True
    monkeypatch.setattr(learner_module, "give_memory_back", lambda device: events.append("back"))
    learner.update(groups(), step=1)
    assert events == [True, "back", False]


NO_ROOM = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.18 GiB of which 1.50 GiB is "
    "free. Including non-PyTorch memory, this process has 40.90 GiB memory in use."
)
HELD = (
    r"2\.0 GiB were asked for; of the device's 79\.2 GiB, 1\.5 GiB are free, this process holds 40\.9 GiB, and other "
    r"processes hold 36\.8 GiB"
)


def runs_out(monkeypatch, learner, when):
    """Let the learner run out of memory where `when(number of the pass, its tokens)` says so; return all its passes."""
    passes, score = [], learner._score

    def scored(model, batch, *more):
        passes.append((batch.computed, learner.recomputed))
        found = score(model, batch, *more)
        if when(len(passes), batch.computed):
            if found[0].requires_grad:
                found[0].sum().backward()  # it has left gradients, too
            raise torch.OutOfMemoryError(NO_ROOM)
        return found

    monkeypatch.setattr(learner, "_score", scored)
    return passes


def groups(n=6, size=4):
    """Return groups of calls, each of about 250 tokens together."""
    samples = [s for first in range(8, 8 + n) for s in _full(GrpoConfig(group_size=size, max_tokens=40), 250)]
    return [
        attrs.evolve(
            s, prompt_ids=[8 + i // size, *s.prompt_ids[1:]], group=str(i // size), rollout=i, advantage=i - 9.5
        )
        for i, s in enumerate(samples)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{}, {"lora_rank": 4}, {"mini_batches": 2, "ppo_epochs": 2}, {"kl_loss_coef": 0.1}], ids=str
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_update_that_ran_out_of_memory_is_that_of_a_run_with_the_smaller_pass(
    make_model, monkeypatch, caplog, settings, dtype
) -> None:
    """Digest for digest, weights and moments, over two steps."""

    def learner(tokens):
        config = GrpoConfig(lr=1e-3, max_length=64, max_tokens=8, group_size=4, tokens_per_batch=tokens, **settings)
        return Learner(make_model(), config, dtype=dtype, seed=0)

    short, whole = learner(600), learner(1200)
    samples = [attrs.evolve(s, logprobs=[-5.0] * len(s.response_ids)) for s in groups()]
    passes = runs_out(monkeypatch, whole, lambda n, tokens: tokens > 700)
    for step in (1, 2):
        expected, found = short.update(samples, step=step), whole.update(samples, step=step)
        assert whole.fingerprint() == short.fingerprint()
        assert whole.used == short.used
        timeless = {name for name in expected if name != "learner_tokens_per_s"}
        assert {name: found[name] for name in timeless} == {name: expected[name] for name in timeless}
    for one, other in zip(short.optimizer.state.values(), whole.optimizer.state.values(), strict=True):
        assert torch.equal(one["exp_avg_sq"], other["exp_avg_sq"])
    too_large = [tokens for tokens, _ in passes if tokens > 700]
    assert len(too_large) == 1
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING" and "ran out of memory" in r.message]
    assert len(warnings) == 1
    assert "step 1: the device ran out of memory (2.0 GiB were asked for; of the device's 79.2" in warnings[0]


def test_a_later_pass_that_runs_out_of_memory_repeats_the_ones_before(make_model, monkeypatch) -> None:
    def learner(tokens):
        config = GrpoConfig(lr=1e-3, max_length=64, max_tokens=8, group_size=4, tokens_per_batch=tokens)
        return Learner(make_model(), config, dtype="float32", seed=0)

    short, whole, lowered = learner(300), learner(600), []
    whole.lowered = lambda *said: lowered.append(said)
    passes = runs_out(monkeypatch, whole, lambda n, tokens: n == 2)
    assert whole.update(groups(), step=1)["computed_tokens"] == short.update(groups(), step=1)["computed_tokens"]
    assert whole.fingerprint() == short.fingerprint()
    ((tokens, recomputed, why),) = lowered
    assert (tokens, recomputed) == (whole.tokens, whole.recomputed)
    assert re.fullmatch(f"step 1: the device ran out of memory: {HELD}", why)
    assert [tokens > 300 for tokens, _ in passes] == [True, True] + [False] * (len(passes) - 2)


def test_layers_compute_their_activations_twice_before_a_group_is_cut(make_model, monkeypatch) -> None:
    """The weights are the same, too; `gradient_checkpointing = false` is kept."""

    def learner(**more):
        config = GrpoConfig(lr=1e-3, max_length=290, max_tokens=40, group_size=4, tokens_per_batch=450, **more)
        return Learner(make_model(), config, dtype="float32", seed=0)

    plain, auto = learner(gradient_checkpointing=False), learner()
    passes = runs_out(monkeypatch, auto, lambda n, tokens: not auto.recomputed)
    plain.update(groups(), step=1)
    auto.update(groups(), step=1)
    assert auto.fingerprint() == plain.fingerprint()
    assert (auto.tokens, auto.recomputed, plain.recomputed) == (450, auto.layers, 0)
    assert {twice for _, twice in passes} == {0, auto.layers}
    kept = learner(gradient_checkpointing=False)
    runs_out(monkeypatch, kept, lambda n, tokens: n == 1)
    with pytest.raises(RunStopped, match=r"\n  Set algorithm.gradient_checkpointing = true$"):
        kept.update(groups(), step=1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {},
            rf"^step 3: the device ran out of memory in a pass of 2\d\d tokens, with at most 8192 a pass: {HELD}"
            r"\n  Smaller ones were not left. Set algorithm.lora_rank = 16, which trains adapters only$",
        ),
        ({"tokens_per_batch": 64}, r"A call of \d+ tokens is longer than that. Set algorithm.max_length to less$"),
        ({"lora_rank": 4}, r"\n  Smaller ones were not left. Take a smaller model, or a device with more memory$"),
        ({"gradient_checkpointing": False}, r"\n  Set algorithm.gradient_checkpointing = true$"),
    ],
)
def test_an_update_whose_least_pass_runs_out_of_memory_says_what_to_do(make_model, monkeypatch, settings, words):
    learner = Learner(make_model(), GrpoConfig(**settings), dtype="float32", seed=0)
    passes = runs_out(monkeypatch, learner, lambda n, tokens: True)
    with pytest.raises(OutOfMemory, match=words) as error:
        learner.update(_full(GrpoConfig(group_size=2, max_tokens=40), 240), step=3)
    assert error.value.cause == "out-of-memory"
    assert len(passes) < 8


def test_memory_that_runs_out_after_the_passes_is_not_blamed_on_them(make_model, monkeypatch) -> None:
    learner = Learner(make_model(), GrpoConfig(), dtype="float32", seed=0)

    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(learner.optimizer, "step", full)
    with pytest.raises(
        RunStopped, match=r"step 3: the update, beside its passes: .*2\.0 GiB were.*\n.*moments"
    ) as error:
        learner.update(groups(), step=3)
    assert error.value.cause == "out-of-memory"


@pytest.mark.parametrize(("limit", "runners"), [(0, 128), (24, 4)])
def test_server_and_learner_are_planned_before_the_server_starts(directory, monkeypatch, limit, runners) -> None:
    """On a made-up card: the server gets bytes for as many calls as the runners make, and the manifest the plan."""
    noted, recorded = [], {}
    hardware = attrs.evolve(Cuda(config=CudaConfig(memory_gib=limit)), attention=("sdpa",))
    monkeypatch.setattr(algorithm, "check_device", lambda hardware, dtype: "bfloat16")

    def now(device, limit):
        return DeviceMemory(name=device, total=80 * GIB, others=GIB, limit=limit)

    monkeypatch.setattr(planning, "measured", now)
    session = SimpleNamespace(
        calls=runners, server_memory=ServerMemory(sequences=64), note=noted.append, record=recorded.__setitem__
    )
    config = GrpoConfig(model=str(directory), max_length=128, max_tokens=32)
    asked = ServerPlan(model=directory, name="policy", hardware=hardware)
    plan = algorithm.Grpo(config).fit(asked, session)
    assert algorithm.Grpo(config).serving(hardware, None).memory == (limit * GIB or None)  # for an evaluation
    shape = planning.shape_of(directory)
    beside = GIB + 8192 * (8 * shape.hidden + 3 * shape.intermediate) * 2 + 20 * 64 * shape.vocabulary
    cache = min(64, runners) * shape.kv_bytes(128 + 32)
    assert plan.memory == 2 * shape.parameters + beside + cache
    assert plan.sleeps is False
    assert noted == [recorded["memory"]["line"]]
    needed, free = noted[0].split("; ")  # in this order
    assert needed.startswith("memory: the server needs ")
    assert free.startswith(f"{23.2 if limit else 79.0} GiB of cuda are free, and an update computes ")
    assert recorded["memory"]["device"]["limit"] == limit * GIB
    json.dumps(recorded)


def test_a_cpu_is_planned_when_the_learner_is_made(directory) -> None:
    asked = ServerPlan(model=directory, name="policy", hardware=Cpu())
    assert algorithm.Grpo(GrpoConfig(model=str(directory))).fit(asked, SimpleNamespace()) is asked
