"""The keys of `grpo` that change an update, observed in real updates of the shipped model."""

from __future__ import annotations

import copy
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import pytest
import torch
from agentrig_grpo import checkpoint
from agentrig_grpo.algorithm import check_device
from agentrig_grpo.learner import Learner, TrainSample
from recorded_steps import mini

from agentrig.hardware import Cpu, CpuConfig
from effects import Elsewhere, Flip, Settings, config_of, exact

PLACE = "algorithm.grpo"
LR = 1e-3
CPU = Cpu(config=CpuConfig(threads=1))
Weights = Mapping[str, torch.Tensor]


def close(value: Any) -> Any:
    """Return an approximation with the precision of fp32."""
    return pytest.approx(value, rel=2e-3, abs=1e-9)


def learner(settings: Settings) -> Learner:
    """Return a new learner of the shipped model, as a run makes it."""
    config = config_of(PLACE, {"lr": LR, **settings})
    return Learner(copy.deepcopy(mini()), config, dtype=check_device(CPU, config.dtype), seed=0)


def samples(n: int = 8, *, advantage: float | None = None, most: int = 6) -> list[TrainSample]:
    """Return trained calls of random tokens: two a rollout, four a group, without log-probabilities."""
    rng = random.Random(7)
    found = []
    for i in range(n):
        response = [rng.randrange(5, 2000) for _ in range(2 + i % most)]
        found.append(
            TrainSample(
                prompt_ids=[5 + i // 4, 9, 11],
                response_ids=response,
                logprobs=None,
                advantage=rng.uniform(-1, 1) if advantage is None else advantage,
                rollout=i // 2,
                group=f"g{i // 4}",
            )
        )
    return found


@attrs.frozen(kw_only=True)
class Learned:
    """Results of updates: figures of each step, final weights, and the optimizer's final two means."""

    figures: Sequence[Mapping[str, float]]
    start: Weights = attrs.field(repr=False)
    weights: Weights = attrs.field(repr=False)
    mean: float
    mean_square: float
    trained: Mapping[str, tuple[int, ...]] = attrs.field(repr=False)
    calls: Counter[str] = attrs.field(repr=False)
    passes: Sequence[int] = attrs.field(repr=False)

    def change(self) -> float:
        """Return the L2 norm of the change of all trained weights."""
        return float(torch.stack([(self.weights[n] - self.start[n]).norm() for n in self.start]).norm())


_LEARNED: dict[str, Learned] = {}


def learn(settings: Settings, *, steps: int = 1, given: Sequence[TrainSample] | None = None) -> Learned:
    """Return the results of one or more updates with these settings; computed once for equal arguments."""
    question = repr((sorted(settings.items()), steps, given))
    if question not in _LEARNED:
        _LEARNED[question] = _learn(settings, steps, given or samples())
    return _LEARNED[question]


def _learn(settings: Settings, steps: int, given: Sequence[TrainSample]) -> Learned:
    made = learner(settings)
    start = {name: p.detach().clone() for name, p in made.trained.items()}
    calls: Counter[str] = Counter()
    passes: list[int] = []

    def watch(module: Any, inputs: Any, output: Any) -> None:
        calls[str(output.dtype)] += 1

    def measure(module: Any, inputs: Any) -> None:
        passes.append(inputs[0].numel())

    layer = next(m for n, m in made.model.named_modules() if n.endswith("layers.0.self_attn.q_proj"))
    hooks = [layer.register_forward_hook(watch), made.model.get_input_embeddings().register_forward_pre_hook(measure)]
    figures = [made.update(given, step=step) for step in range(1, steps + 1)]
    for hook in hooks:
        hook.remove()
    states = [made.optimizer.state[p] for p in made.trained.values() if p in made.optimizer.state]
    means = [float(torch.stack([s[which].norm() for s in states]).norm()) for which in ("exp_avg", "exp_avg_sq")]
    return Learned(
        figures=figures,
        start=start,
        weights={name: p.detach().clone() for name, p in made.trained.items()},
        mean=means[0],
        mean_square=means[1],
        trained={name: tuple(p.shape) for name, p in made.trained.items()},
        calls=calls,
        passes=passes,
    )


def off_policy(ratio: float, advantage: float) -> list[TrainSample]:
    """Return samples with about this ratio, all with the same advantage."""
    found = []
    for sample in samples(advantage=advantage):
        ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
        with torch.no_grad():
            logits = mini()(ids).logits[0, len(sample.prompt_ids) - 1 : -1]
        now = torch.log_softmax(logits, -1).gather(1, torch.tensor(sample.response_ids)[:, None])[:, 0]
        found.append(attrs.evolve(sample, logprobs=(now - torch.log(torch.tensor(ratio))).tolist()))
    return found


def clipped(ratio: float, advantage: float) -> Any:
    """Return a look: the share of clipped tokens."""
    return lambda settings: learn(settings, given=off_policy(ratio, advantage)).figures[0]["clip_fraction"]


def stale(settings: Settings) -> float:
    """Return the loss of samples with advantage 1 and importance weight 3, at ratio 1."""
    return learn({"max_staleness": 1, **settings}, given=off_policy(3.0, 1.0)).figures[0]["loss"]


def uneven(settings: Settings) -> float:
    """Return the loss of two rollouts, advantage 1 with two tokens and advantage 0.5 with six, at ratio 1."""
    first, second = samples(2)
    first = attrs.evolve(first, response_ids=[5, 6], advantage=1.0, rollout=0)
    second = attrs.evolve(second, response_ids=[7] * 6, advantage=0.5, rollout=1)
    return learn(settings, given=[first, second]).figures[0]["loss"]


def merged(settings: Settings) -> float:
    """Return how much adapters of the same size change the served model."""
    made = learner({"lora_rank": 2, **settings})
    with torch.no_grad():
        for name, p in made.trained.items():
            if "lora_B" in name:
                p.fill_(0.01)
    found, start = checkpoint.weights(made.model), checkpoint.weights(mini())
    return float(torch.stack([(found[name] - start[name]).norm() for name in start]).norm())


def far_from_start(settings: Settings) -> tuple[bool, float]:
    """Return whether the KL to the starting model is reported, and its value after four updates."""
    seen = learn(settings, steps=4)
    return "kl_reference" in seen.figures[0], seen.change()


def shapes(settings: Settings) -> Mapping[str, tuple[int, ...]]:
    return learner(settings).trained and {n: tuple(p.shape) for n, p in learner(settings).trained.items()}


def rate(settings: Settings) -> list[float]:
    return [figures["lr"] for figures in learn(settings, steps=3).figures]


def decayed(settings: Settings) -> float:
    """Return the norm of all weights after one update whose gradient is clipped to almost nothing."""
    return float(torch.stack([w.norm() for w in learn(settings).weights.values()]).norm())


def moments(settings: Settings) -> set[str]:
    """Return the dtypes in which the optimizer keeps the moments of an embedding after an update."""
    updated = learner(settings)
    updated.update(samples(), step=1)
    weight = updated.trained["model.embed_tokens.weight"]
    state = updated.optimizer.state[weight].values()
    return {str(value.dtype) for value in state if isinstance(value, torch.Tensor) and value.shape == weight.shape}


def places(settings: Settings) -> tuple[bool, str]:
    """Return whether moments pass through places on the device, and the digest of the weights after an update."""
    updated = learner(settings)
    updated.update(samples(), step=1)
    return bool(getattr(updated.optimizer, "_places", ())), updated.fingerprint()


TABLE = {
    "moments": Flip(
        a="device", b="host", look=places, shows=lambda a, b: (a[0], b[0]) == (False, True) and a[1] == b[1]
    ),
    "optimizer": exact("adamw", "adamw8bit", moments, ({"torch.float32"}, {"torch.uint8"})),
    "lr": Flip(
        a=1e-5, b=1e-4, look=lambda s: learn(s).change(), shows=lambda a, b: b == pytest.approx(10 * a, rel=0.02)
    ),
    "warmup_steps": Flip(
        a=0, b=4, look=rate, shows=lambda a, b: a == [LR] * 3 and b == close([LR / 4, LR / 2, 3 * LR / 4])
    ),
    "lr_scheduler_type": Flip(
        a="constant",
        b="linear",
        look=rate,
        shows=lambda a, b: a == [LR] * 3 and b == close([LR * left / 60 for left in (60, 59, 58)]),
    ),
    "beta1": Flip(a=0.9, b=0.5, look=lambda s: learn(s).mean, shows=lambda a, b: b == close(5 * a)),
    "beta2": Flip(a=0.95, b=0.5, look=lambda s: learn(s).mean_square, shows=lambda a, b: b == close(10 * a)),
    "weight_decay": Flip(
        a=0.0, b=50.0, look=decayed, shows=lambda a, b: b == pytest.approx(a * (1 - LR * 50), rel=2e-3)
    ),
    "max_grad_norm": Flip(
        a=1e-3,
        b=1e-2,
        look=lambda s: (learn(s).mean / 0.1, s["max_grad_norm"]),
        shows=lambda a, b: a[0] == close(1e-3) and b[0] == close(1e-2),
    ),
    "clip_low": exact(0.2, 0.6, clipped(0.5, -1.0), (1.0, 0.0)),
    "clip_high": exact(0.28, 1.0, clipped(1.6, 1.0), (1.0, 0.0)),
    "loss": Flip(
        a="clip",
        b="sapo",
        look=lambda s: learn(s, given=off_policy(1.6, 1.0)).figures[0]["loss"],
        shows=lambda a, b: a == close(-1.28) and b == close(-4 / (1 + math.exp(-0.6))),
    ),
    "rollout_is_threshold": exact(2.0, 4.0, stale, (close(-2.0), close(-3.0))),
    "kl_loss_coef": Flip(
        a=0.0, b=10.0, look=far_from_start, shows=lambda a, b: not a[0] and b[0] and b[1] < 0.9 * a[1]
    ),
    "loss_agg_mode": Flip(
        a="token-mean",
        b="seq-mean-token-mean",
        look=uneven,
        shows=lambda a, b: a == close(-(2 * 1.0 + 6 * 0.5) / 8) and b == close(-(1.0 + 0.5) / 2),
    ),
    "ppo_epochs": Flip(
        a=1,
        b=3,
        look=lambda s: (learn(s).figures[0]["updates"], learn(s).figures[0]["trained_tokens"]),
        shows=lambda a, b: a[0] == 1 and b == (3, 3 * a[1]),
    ),
    "mini_batches": Flip(
        a=1,
        b=2,
        look=lambda s: (learn(s).figures[0]["updates"], learn(s).figures[0]["trained_tokens"]),
        shows=lambda a, b: a[0] == 1 and b == (2, a[1]),
    ),
    "tokens_per_batch": Flip(
        a=64,
        b=8192,
        look=lambda s: learn(s, given=samples(40)).passes,
        shows=lambda a, b: len(b) == 1 < len(a) and max(a) <= 64 < b[0],
    ),
    "dtype": Flip(
        a="float32",
        b="bfloat16",
        look=lambda s: (set(learn(s).calls), {str(w.dtype) for w in learn(s).weights.values()}),
        shows=lambda a, b: (
            (a[0], b[0]) == ({"torch.float32"}, {"torch.bfloat16"}) and a[1] == b[1] == {"torch.float32"}
        ),
    ),
    "gradient_checkpointing": Flip(
        a=False, b=True, look=lambda s: learn(s).calls.total(), shows=lambda a, b: b == 2 * a
    ),
    "lora_rank": Flip(
        a=0,
        b=3,
        look=shapes,
        shows=lambda a, b: not any("lora" in n for n in a) and all("lora" in n and 3 in s for n, s in b.items()),
    ),
    "lora_alpha": Flip(a=16, b=32, look=merged, shows=lambda a, b: b == close(2 * a)),
    "lora_targets": Flip(
        a="all-linear",
        b="q_proj, down_proj",
        beside={"lora_rank": 2},
        look=lambda s: {n.split(".lora_")[0].rsplit(".", 1)[-1] for n in shapes(s)},
        shows=lambda a, b: b == {"q_proj", "down_proj"} < a,
    ),
    "lora_base": Elsewhere(
        "plugins/agentrig-grpo/tests/test_grpo_lent.py::test_a_run_serves_the_starting_model_and_its_learner_borrows_it",
        "a server that lends its weights needs a GPU; it shows in whose memory the learner's frozen weights are",
    ),
}
