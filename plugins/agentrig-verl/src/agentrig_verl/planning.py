"""The memory plan of a run, stated in verl's own keys: those that the run sets are kept, the others are chosen.

In a step of verl, learner and server take turns. During an update the server sleeps; during rollouts it has its share
of the device, beside those of the learner's weights and moments that are not offloaded. A pass of an update is the
largest that fits. Beside the server, the first of these that fits is taken:

    nothing offloaded → moments offloaded → weights too, each with ever smaller key-value caches
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import attrs

from agentrig.device_memory import in_gib
from agentrig.errors import ConfigError
from agentrig.hardware import Hardware
from agentrig.hardware.memory import (
    CACHES,
    CONTEXT,
    GIB,
    KNOWN,
    MARGIN,
    PASSES,
    ROUNDING,
    DeviceMemory,
    MemoryEstimate,
    ModelShape,
    ServerNeed,
    Workload,
    estimate,
    or_more,
)
from agentrig.servers import ServerMemory
from agentrig_verl.schema import ACTOR, MODEL, ROLLOUT
from agentrig_verl.settings import LORA_SHARE

log = logging.getLogger(__name__)

SHARE = f"{ROLLOUT}.gpu_memory_utilization"
MOMENTS = f"{ACTOR}.fsdp_config.optimizer_offload"
WEIGHTS = f"{ACTOR}.fsdp_config.param_offload"
ROWS = f"{ACTOR}.ppo_micro_batch_size_per_gpu"
DYNAMIC = f"{ACTOR}.use_dynamic_bsz"
TOKENS = f"{ACTOR}.ppo_max_token_len_per_gpu"
SLEEPS = f"{ROLLOUT}.free_cache_engine"
TWICE = f"{MODEL}.enable_gradient_checkpointing"
RANK = f"{MODEL}.lora_rank"
STRATEGY = f"{ACTOR}.strategy"

DEFAULTS: Mapping[str, Any] = {
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "trainer.n_gpus_per_node": 1,
    "trainer.nnodes": 1,
    f"{ROLLOUT}.n": 1,
    f"{ROLLOUT}.max_num_seqs": 1024,
    f"{ROLLOUT}.max_num_batched_tokens": 8192,
    f"{ROLLOUT}.tensor_model_parallel_size": 1,
    SLEEPS: True,
    TWICE: True,
    RANK: 0,
    STRATEGY: "fsdp",
}
"""verl's own values of the keys that are read here."""

LOG_PROBS = (
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
)

CHUNK = 3 * GIB
"""Bytes of the logits that the engine `forest` holds at once, with their gradient."""

LOGIT = 12
"""Bytes of a logit in verl's own engine at its peak: the most that was measured, fragmentation included."""

UNKNOWN = 40 * GIB
"""The device that is planned for where nothing says its memory: the least that the reference run needs."""

UNPLANNED: Mapping[str, Any] = {SHARE: 0.5, MOMENTS: True, WEIGHTS: True}
"""What is set for a model whose sizes are not known, where the run does not set it."""

OTHERWISE = "Take a smaller model, shorter prompts and answers, more devices, or a device with more memory"


@attrs.frozen(kw_only=True)
class Choice:
    """Values of verl's keys.

    Attributes:
        tokens: Most tokens of a pass.
        cache: Share of the key-value cache of all calls.
        moments: Whether the optimizer's moments are in host memory during rollouts.
        weights: Whether the learner's weights are.
    """

    tokens: int
    cache: float
    moments: bool
    weights: bool


@attrs.frozen(kw_only=True, eq=False)
class VerlPlan:
    """What verl's keys take of one device, and which of them fit.

    Attributes:
        flat: verl's keys as the run sets them, dotted.
        shape: The model's sizes.
        device: The device; `others` is 0, since another node's is not known here.
        calls: Calls that run at once at most; 0 if it is not known.
        forest: Whether the engine trains that computes shared tokens once, and few logits at a time.
    """

    flat: Mapping[str, Any]
    shape: ModelShape
    device: DeviceMemory
    calls: int = 0
    forest: bool = False

    def value(self, key: str) -> Any:
        """Return a key's value: the run's, or verl's own."""
        found = self.flat.get(key)
        return DEFAULTS.get(key) if found is None else found

    def number(self, key: str) -> int:
        """Return a key's value as a whole number."""
        return int(self.value(key) or 0)

    @property
    def budget(self) -> int:
        """Bytes for learner and server: without what their libraries take."""
        return max(0, self.device.budget - (0 if self.device.limit else CONTEXT))

    @property
    def row(self) -> int:
        """Most tokens of a prompt and its answer: no pass is smaller."""
        return self.number("data.max_prompt_length") + self.number("data.max_response_length")

    @property
    def server(self) -> ServerNeed:
        """What one of vLLM's processes needs."""
        own = ServerMemory(sequences=self.number(f"{ROLLOUT}.max_num_seqs"))
        shards = self.number(f"{ROLLOUT}.tensor_model_parallel_size") or 1
        devices = self.number("trainer.nnodes") * self.number("trainer.n_gpus_per_node")
        servers = max(1, devices // shards)
        batch = -(-self.number("data.train_batch_size") * self.number(f"{ROLLOUT}.n") // servers)
        return ServerNeed.of(
            attrs.evolve(self.shape, kv_heads=max(1, self.shape.kv_heads // shards)),
            weights=2 * self.shape.parameters // shards,
            element=2,
            calls=min(n for n in (batch, own.sequences, -(-self.calls // servers)) if n),
            length=self.row,
            context=self.number(f"{ROLLOUT}.max_model_len") or self.row,
            prefill=self.number(f"{ROLLOUT}.max_num_batched_tokens"),
            sequences=own.sequences,
            beside=own.beside,
            asleep=own.asleep,
            given=int(float(self.value(SHARE) or 0.0) * self.device.total),
        )

    def need(self, tokens: int) -> MemoryEstimate:
        """Return what an update needs with passes of so many tokens."""
        load = Workload(
            model="",
            micro_batch=1,
            context=tokens,
            trained=LORA_SHARE if self.number(RANK) else 1.0,
            shards=self.number("trainer.nnodes") * self.number("trainer.n_gpus_per_node"),
        )
        found = estimate(self.shape, load)
        logits = tokens * self.shape.vocabulary
        more = CHUNK - 6 * logits if self.forest else (LOGIT - 6) * logits  # `estimate` counts six bytes
        if not self.value(TWICE):
            more += self.shape.layers * tokens * (13 * self.shape.hidden + 4 * self.shape.intermediate) * 2
        return attrs.evolve(found, activations=found.activations + more)

    @property
    def reference(self) -> int:
        """Bytes of the frozen starting model of a KL loss, in two bytes each; 0 without one."""
        wanted = self.value(f"{ACTOR}.use_kl_loss") or self.value("algorithm.use_kl_in_reward")
        away = self.number(RANK) or self.value("actor_rollout_ref.ref.fsdp_config.param_offload")
        devices = self.number("trainer.nnodes") * self.number("trainer.n_gpus_per_node")
        return 2 * self.shape.parameters // devices if wanted and not away else 0

    def update(self, choice: Choice) -> int:
        """Return the bytes that an update takes, its sleeping server among them."""
        need, server = self.need(choice.tokens), self.server
        whole = 4 * self.shape.vocabulary * self.shape.hidden  # FSDP gathers one part at a time, in two bytes
        asleep = server.asleep if self.value(SLEEPS) else server.memory(choice.cache)
        state = need.weights + need.gradients + need.optimizer + self.reference
        return int(state * ROUNDING + need.activations * (MARGIN if self.forest else 1)) + whole + asleep

    def rollouts(self, choice: Choice) -> int:
        """Return the bytes that are taken during rollouts, or while the server gets new weights."""
        need, server = self.need(choice.tokens), self.server
        moments = self.reference + (0 if choice.moments else need.optimizer)
        sampling = server.memory(choice.cache) + (0 if choice.weights else need.weights)
        return moments + max(sampling, server.weights + server.beside + need.weights)

    def fits(self, choice: Choice) -> bool:
        """Whether it fits at all times, and the server can start with its share."""
        server = self.server
        starts = not server.given or server.given >= server.weights + server.beside + server.least
        return starts and max(self.update(choice), self.rollouts(choice)) <= self.budget

    def choices(self) -> Iterator[Choice]:
        """Yield what may be chosen, the best first; what the run sets is in each."""
        own = self.flat.get(MOMENTS), self.flat.get(WEIGHTS)
        offloads = [
            (moments if own[0] is None else bool(own[0]), weights if own[1] is None else bool(own[1]))
            for moments, weights in ((False, False), (True, False), (True, True))
        ]
        for tokens, (moments, weights), cache in product(self.passes(), dict.fromkeys(offloads), CACHES):
            yield Choice(tokens=tokens, cache=cache, moments=moments, weights=weights)

    def passes(self) -> Sequence[int]:
        """Return the tokens of a pass that may be chosen, the largest first."""
        if self.rows:
            return [self.rows * self.row]
        if self.flat.get(TOKENS):
            return [self.number(TOKENS)]
        least = -(-self.row // 64) * 64
        return [*(n for n in PASSES if n > least), least]

    def first(self) -> Choice | None:
        """Return the best choice that fits, or None."""
        return next(filter(self.fits, self.choices()), None)

    def choose(self) -> Choice:
        """Return the best choice that fits.

        Raises:
            ConfigError: None does; the message says what would.
        """
        found = self.first()
        if found is None:
            raise ConfigError(self.refusal())
        return found

    def keys(self, choice: Choice) -> dict[str, Any]:
        """Return verl's keys for a choice, without those that the run sets."""
        share = math.ceil(1000 * self.server.memory(choice.cache) / self.device.total) / 1000
        chosen = {SHARE: share, MOMENTS: choice.moments, WEIGHTS: choice.weights, **self.pass_keys(choice.tokens)}
        return {key: value for key, value in chosen.items() if self.flat.get(key) is None}

    def pass_keys(self, tokens: int) -> dict[str, Any]:
        """Return the keys for passes of so many tokens; log-probabilities are computed in micro-batches of as many."""
        if self.rows:
            return dict.fromkeys(LOG_PROBS, self.rows)
        return {} if self.flat.get(f"{ACTOR}.ppo_micro_batch_size") else {DYNAMIC: True, TOKENS: tokens}

    def describe(self, choice: Choice) -> str:
        """Return the plan as one line."""
        server = self.server
        away = [name for name, is_ in (("moments", choice.moments), ("weights", choice.weights)) if is_]
        limit = f" of memory_gib = {self.device.limit / GIB:g}" if self.device.limit else ""
        cached = max(int(server.cache * choice.cache), server.least)
        some = "" if choice.cache == 1 else f" {choice.cache:.0%} of"
        inside = "" if server.given else f",{some} the cache of {server.calls} calls {cached / GIB:.1f}"
        chosen = ", ".join(f"{k.rpartition('.')[2]} = {_said(v)}" for k, v in self.keys(choice).items())
        who = "forest" if self.forest else "verl's own engine"
        return (
            f"memory: {in_gib(self.budget)} of {self.device.name}{limit}: update {self.update(choice) / GIB:.1f} (pass "
            f"of {choice.tokens:,} tokens by {who}, a sleeping server), rollouts {self.rollouts(choice) / GIB:.1f} "
            f"(server {server.memory(choice.cache) / GIB:.1f}: weights {server.weights / GIB:.1f}{inside}"
            f"{'; offloaded: ' + ' and '.join(away) if away else ''}). Chosen: {chosen or 'nothing'}"
        )

    def facts(self) -> Mapping[str, Any]:
        """Return the plan for the manifest; sizes in bytes."""
        choice = self.choose()
        return {
            "device": attrs.asdict(self.device),
            "server": attrs.asdict(self.server),
            "choice": attrs.asdict(choice),
            "update": self.update(choice),
            "rollouts": self.rollouts(choice),
            "keys": self.keys(choice),
            "line": self.describe(choice),
        }

    def refusal(self) -> str:
        """Return why nothing fits, and what to set so that something does."""
        tightest = list(self.choices())[-1]
        server, limit = self.server, f" ([hardware] memory_gib = {self.device.limit / GIB:g})" * bool(self.device.limit)
        said = (
            f"[algorithm] verl: an update needs about {in_gib(self.update(tightest))} of memory, and rollouts "
            f"{in_gib(self.rollouts(tightest))}, of which the server takes {in_gib(server.memory(tightest.cache))}; "
            f"{in_gib(self.budget)} of {self.device.name} are free for them{limit}. With passes of "
            f"{tightest.tokens:,} tokens: {self.need(tightest.tokens).describe()}.\n  "
        )
        cure = next((cure for cure, plan in self._cures() if plan.first()), OTHERWISE)
        return said + cure + or_more(self.device, lambda device: bool(attrs.evolve(self, device=device).first()))

    def _cures(self) -> Iterator[tuple[str, VerlPlan]]:
        """Yield what may help, in words, and the plan with it."""
        parts = (SHARE,), (ROWS, DYNAMIC, TOKENS), (MOMENTS, WEIGHTS)
        own = [mine for part in parts if (mine := [key for key in part if key in self.flat])]
        every = [key for part in own for key in part]
        if self.value(SLEEPS) is not True:
            yield f"Set {SLEEPS} = true", self.with_({SLEEPS: True})
        if self.rows:
            for rows in range(self.rows - 1, 0, -1):
                yield f"Set {ROWS} = {rows}", self.with_({ROWS: rows})
        for left_out in [*own, every]:
            plan = self.without(left_out)
            if found := plan.first():
                chosen = plan.keys(found).items() - self.keys(found).items()
                yield f"Set {', '.join(f'{key} = {_said(value)}' for key, value in sorted(chosen))}", plan
        if not self.value(TWICE):
            yield f"Set {TWICE} = true", self.without(every).with_({TWICE: True})
        if not self.number(RANK):
            also = f", and leave out {', '.join(every)}" if every else ""
            cure = f"Set {RANK} = 16, which trains adapters only{also}"
            yield cure, self.without(every).with_({RANK: 16})

    @property
    def rows(self) -> int:
        """Rows of a micro-batch, where the run counts a pass in rows; else 0."""
        return 0 if self.flat.get(DYNAMIC) is True else self.number(ROWS)

    def with_(self, keys: Mapping[str, Any]) -> VerlPlan:
        """Return the plan with other values of keys."""
        return attrs.evolve(self, flat={**self.flat, **keys})

    def without(self, keys: Sequence[str]) -> VerlPlan:
        """Return the plan without some of the run's keys."""
        return attrs.evolve(self, flat={key: value for key, value in self.flat.items() if key not in keys})


def plan_of(
    flat: Mapping[str, Any],
    model: str,
    hardware: Hardware,
    *,
    calls: int = 0,
    memory: int | None = None,
    forest: bool = False,
) -> VerlPlan | None:
    """Return the plan of a run; None for a model whose sizes are not known, and for other strategies than FSDP.

    Args:
        flat: verl's keys as the run sets them, dotted.
        model: The model's directory, or its name on the Hub.
        calls: Calls that run at once at most; 0 if it is not known.
        memory: Bytes of the smallest device; None to ask the hardware.
        forest: Whether the engine trains that computes shared tokens once.

    Raises:
        ConfigError: The limit of the hardware is more than a device has.
    """
    shape = shape_of(model)
    if shape is None or str(flat.get(STRATEGY) or "fsdp") not in ("fsdp", "fsdp2"):
        return None
    limit = hardware.memory_limit
    total = memory or min((device.memory for device in hardware.probe().devices if device.memory), default=0)
    if not total and not limit:
        log.warning(
            "%s does not say its memory: verl's keys are planned for %s. hardware.memory_gib says another size",
            *(hardware.name, in_gib(UNKNOWN)),
        )
    device = DeviceMemory(name=hardware.torch_device, total=total or limit or UNKNOWN, limit=limit)
    return VerlPlan(flat=flat, shape=shape, device=device, calls=calls, forest=forest)


def planned(flat: Mapping[str, Any], plan: VerlPlan | None) -> dict[str, Any]:
    """Return the keys that a plan chooses, or those of a run that is not planned."""
    if plan is not None:
        return plan.keys(plan.choose())
    row = sum(int(flat.get(key) or DEFAULTS[key]) for key in ("data.max_prompt_length", "data.max_response_length"))
    passes = {} if flat.get(ROWS) or flat.get(f"{ACTOR}.ppo_micro_batch_size") else {DYNAMIC: True, TOKENS: row}
    fsdp = str(flat.get(STRATEGY) or "fsdp") in ("fsdp", "fsdp2")
    return {key: value for key, value in {**(UNPLANNED if fsdp else {}), **passes}.items() if flat.get(key) is None}


def shape_of(model: str) -> ModelShape | None:
    """Return a model's sizes: from its `config.json`, here or in the Hub's cache, or from what is known of its name."""
    known = None if (Path(model).expanduser() / "config.json").is_file() else KNOWN.get(model.lower())
    if known is not None:
        return known
    folder = folder_of(model)
    return ModelShape.from_config(json.loads((folder / "config.json").read_text("utf-8"))) if folder else None


def folder_of(model: str) -> Path | None:
    """Return the folder of a model's configuration, from its own folder or the Hub's cache; None without one."""
    folder = Path(model).expanduser()
    if not model or (folder / "config.json").is_file():
        return folder if model else None
    from transformers.utils.hub import cached_file

    try:
        found = cached_file(model, "config.json", local_files_only=True)
    except OSError:
        return None
    return Path(found).parent if found else None


def _said(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
