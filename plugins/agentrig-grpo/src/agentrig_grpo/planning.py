"""Measures a device and a model for the memory plan of a run, and keeps the plan while the run goes on.

The plan is made before the server starts, again when it has started, and once more after the first update.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from agentrig.device_memory import held_here, in_gib
from agentrig.errors import ConfigError
from agentrig.hardware.memory import CONTEXT, GIB, PASSES, DeviceMemory, ModelShape, ServerNeed
from agentrig.servers import Measuring, Server, ServerMemory
from agentrig_grpo.config import LearnerConfig
from agentrig_grpo.fitting import (
    CPU_PASS,
    Choice,
    Fitting,
    Need,
    group_length,
    passes_of,
)
from agentrig_grpo.model_files import stored_in

if TYPE_CHECKING:
    from agentrig_grpo.learner import Learner

log = logging.getLogger(__name__)

LENT = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Models whose weights have the same names in servers, but for the layers that these join."""

ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of these, but for the output layer."""

SMALL_CHUNKS = 48 * GIB
"""With a smaller budget, fewer logits are held at once: they take three more GiB otherwise."""


@attrs.define(kw_only=True, eq=False)
class MemoryPlan:
    """How a run uses a device.

    Attributes:
        chunk: Most logits at once.
        known: Whether the need of an update was estimated: a small one is not, nor one that can't be.
        server: The run's server, once it was asked to start.
        record: Keeps `facts` in the manifest, each time that it has changed.
    """

    fitting: Fitting
    choice: Choice
    chunk: int
    known: bool = True
    server: Server | None = None
    record: Callable[[Mapping[str, Any]], None] = lambda facts: None
    _first: Mapping[str, Any] = attrs.field(init=False)
    _chosen_again: list[Mapping[str, Any]] = attrs.field(factory=list, init=False)
    _started: bool = attrs.field(default=False, init=False)
    _exceeded: bool = attrs.field(default=False, init=False)

    @property
    def config(self) -> LearnerConfig:
        """The learner's settings, with the place of the moments that was chosen."""
        return attrs.evolve(self.fitting.config, moments="host" if self.choice.on_host else "device")

    @property
    def recomputed(self) -> int:
        """How many layers compute their activations twice; many where it is all of them."""
        return self.choice.recomputed if self.choice.recomputed < self.fitting.layers else 1 << 20

    @property
    def server_memory(self) -> int | None:
        """What the server gets; None where its own settings say it, or it is on a CPU or another device."""
        server = self.fitting.serving(self.choice)
        planned = self.fitting.device.accelerator and not server.given
        return server.memory(self.choice.cache) or None if planned else None

    def line(self) -> str:
        """Return the plan as one line."""
        if self.known:
            return self.fitting.describe(self.choice)
        device, server = self.fitting.device, self.fitting.serving(self.choice).memory(self.choice.cache)
        least = f"the server needs {in_gib(server)}; " if server else ""
        return (
            f"memory: {least}{in_gib(device.budget)} of {device.name} are free, and an update computes "
            f"{self.choice.tokens:,} tokens at once at most"
        )

    def facts(self) -> Mapping[str, Any]:
        """Return the plan for the manifest; sizes in bytes."""
        return {**self._first, "again": self._chosen_again} if self._chosen_again else self._first

    def __attrs_post_init__(self) -> None:
        found = {
            "device": attrs.asdict(self.fitting.device),
            "server": attrs.asdict(self.fitting.server),
            "choice": attrs.asdict(self.choice),
            "chunk": self.chunk,
            "line": self.line(),
        }
        self._first = {**found, "update": self.fitting.need(self.choice).peak} if self.known else found

    def chosen_again(self, tokens: int, recomputed: int, why: str) -> None:
        """Keep what was chosen later, and why, for the manifest too."""
        self.choice = attrs.evolve(self.choice, tokens=tokens, recomputed=recomputed)
        self._chosen_again.append({"choice": attrs.asdict(self.choice), "why": why, "line": self.line()})
        self.record(self.facts())

    def hold(self, updating: bool) -> None:
        """Where the run has a limit, or its server sleeps, let this process take what is left to the learner.

        Before torch takes more it gives back what it keeps for later. So the proofs and the audit between updates,
        while the server is awake or is to wake, take no more than there is.

        Args:
            updating: Whether that is for an update: the server may sleep then.
        """
        device = self.fitting.device
        if device.limit or (device.accelerator and self.choice.sleeps):
            import torch

            most = self.fitting.left(self.choice, updating=updating) + self.fitting.serving(self.choice).of_torch
            if updating and not device.limit:
                most = device.total  # nothing is beside an update but what sleeps
            module = torch.get_device_module(device.name.split(":")[0])
            module.set_per_process_memory_fraction(max(0, most) / device.total)

    def delivered(self, learner: Learner) -> None:
        """Choose again after the first delivery; after each one, say it if the run has more than its limit.

        Server and learner have most then: all weights, keys, values and moments, and what they keep for later.
        """
        if not self._started:
            self._started = True
            self.started(learner)
        device = self.fitting.device
        if device.limit and not self._exceeded:
            now = measured(device.name)
            # This process's own part of the device was in use already when `others` was measured.
            taken = now.others + now.reserved - max(0, device.others - CONTEXT)
            if taken > device.limit:  # perhaps by others
                taken = min(taken, self._counted() or taken)
            if taken > device.limit:
                self._exceeded = True
                log.warning(
                    "[hardware] memory_gib = %g: the run has %s of %s, or others took some of it since it began; torch "
                    "holds %s of that for the learner. Planned was: %s",
                    *(device.limit / GIB, in_gib(taken), device.name, in_gib(now.reserved), self.line()),
                )

    def started(self, learner: Learner) -> None:
        """Choose again, now that the server has started and its size is known."""
        device, server = self.fitting.device, self.fitting.serving(self.choice)
        if not self.known or not device.accelerator or self.choice.sleeps:
            return
        # What is taken beside torch here is the server's, what others held before, and what they took since.
        taken = measured(device.name, device.limit).others - device.others - server.transfer + server.of_torch
        counted = self._of_server()
        own = taken if counted is None else min(taken, counted)
        self._measured(
            device=attrs.evolve(device, others=device.others + taken - own),
            server=attrs.evolve(server, given=max(own, server.memory(self.choice.cache))),
            owner="its server" if counted is not None else "its server, or what others took while it started,",
        )
        self._choose(learner, self.fitting.choose(), "the size of its server, which has started")

    def _counted(self) -> int | None:
        """Return the bytes of the device that this process and its server hold; None where they can't be counted."""
        server = self._of_server()
        here = None if server is None else held_here(self.fitting.device.name)
        return None if server is None or here is None else server + here

    def _of_server(self) -> int | None:
        return self.server.device_memory() if isinstance(self.server, Measuring) else None

    def updated(self, learner: Learner, most: int) -> None:
        """Choose again, now that an update has been measured: it held at most `most` bytes."""
        self.choice = attrs.evolve(self.choice, tokens=learner.tokens, recomputed=learner.recomputed)
        if not self.known or most <= self.fitting.left(self.choice):
            return
        need = self.fitting.need(self.choice)
        more = most - need.peak
        self._measured(factor=self.fitting.factor * max(1.0, 1 + more / need.activations))
        found = self.fitting.first()
        if found is None:
            log.warning("an update took %s, and %s were planned", in_gib(most), in_gib(most - more))
        else:
            self._choose(learner, found, f"the first update, which took {in_gib(most)}")

    def _measured(self, **changes: Any) -> None:
        self.fitting = attrs.evolve(self.fitting, begun=self.choice, **changes)

    def _choose(self, learner: Learner, found: Choice, why: str) -> None:
        """Let the learner take less, if it has to."""
        if found.tokens < learner.tokens or found.recomputed > learner.recomputed:
            learner.fit(found.tokens, found.recomputed)
            self.chosen_again(found.tokens, found.recomputed, why)
            log.warning("chosen again, after a measurement: %s", self.line())


def plan_memory(
    directory: Path, config: LearnerConfig, *, dtype: str, device: DeviceMemory, attention: str, server: ServerNeed
) -> MemoryPlan:
    """Choose how a run uses a device.

    Args:
        device: The device, before the run starts anything on it.
    """
    from agentrig_forest.scoring import CHUNK

    from agentrig_grpo.learner import GPU_CHUNK

    chunk = GPU_CHUNK if device.accelerator and device.budget >= SMALL_CHUNKS else CHUNK
    shape = shape_of(directory)
    layers, context = shape.layers if shape else 1, context_of_model(directory, config)

    group = group_length(config, context)
    most = passes_of(config, device, group)[0]
    full = min(-(-2 * chunk // shape.vocabulary), most) if shape else most  # half of the tokens have logits
    # What is chosen makes no difference to an estimate.
    chosen: Any = dict.fromkeys(("tokens_per_batch", "gradient_checkpointing", "server_sleep", "moments"), "auto")

    @cache
    def estimated(asked: LearnerConfig, tokens: int, recomputed: int) -> Need:
        from agentrig_grpo.memory import need_of

        more: dict[str, Any] = {"device": device.name, "attention": attention, "chunk": chunk}
        return need_of(directory, asked, tokens=tokens, recomputed=recomputed, dtype=dtype, **more)

    fitting = Fitting(
        config=config,
        device=device,
        server=server,
        estimate=lambda asked, *of: estimated(attrs.evolve(asked, **chosen), *of),
        passes=sorted({min(PASSES[-1], most), full, most}),
        layers=layers,
        group=group,
    )
    cheapest = next(fitting.choices())
    if 2 * _roughly(shape, config, cheapest.tokens) < fitting.left(cheapest):
        return MemoryPlan(fitting=fitting, choice=cheapest, chunk=chunk, known=False)
    try:
        fitting.need(cheapest)
    except Exception as error:  # the estimate, not the update, has failed: the run can go on without it
        choice = attrs.evolve(cheapest, tokens=min(cheapest.tokens, CPU_PASS)) if not fitting.asked else cheapest
        log.warning(
            "how much memory an update needs is not known before the first one: %s. Gradient checkpointing is %s",
            *(f"{type(error).__name__}: {error}", "on" if choice.recomputed else "off"),
        )
        share = next((s for s in (1.0, 0.5, 0.25) if server.memory(s) < 0.4 * device.budget), 0.25)
        return MemoryPlan(fitting=fitting, choice=attrs.evolve(choice, cache=share), chunk=CHUNK, known=False)
    return MemoryPlan(fitting=fitting, choice=fitting.choose(), chunk=chunk)


def measured(device: str, limit: int = 0) -> DeviceMemory:
    """Return a device's memory, as it is now: `others` is what torch does not hold for this process."""
    import torch

    kind = device.split(":")[0]
    if kind == "cpu":
        return DeviceMemory(name=device, total=free_memory())
    module = torch.get_device_module(kind)
    free, total = module.mem_get_info()
    reserved = int(module.memory_reserved())
    return DeviceMemory(name=device, total=total, others=total - free - reserved, reserved=reserved, limit=limit)


def lends(directory: Path, config: LearnerConfig, dtype: str, says: ServerMemory | None) -> bool:
    """Return whether a learner of adapters can compute with its server's weights; see `why_not_lent`.

    Raises:
        ConfigError: It can't, and the settings want it.
    """
    refused = why_not_lent(directory, config, dtype, says)
    if refused and config.lora_base == "server":
        raise ConfigError(f'[algorithm] lora_base = "server": {refused}. Leave it out, or set "own"')
    return not refused


def why_not_lent(directory: Path, config: LearnerConfig, dtype: str, says: ServerMemory | None) -> str:
    """Return why a learner of adapters can't compute with its server's weights, as a short text; '' if it can."""
    own = json.loads((directory / "config.json").read_text("utf-8"))
    kind = (own.get("architectures") or ["model of an unknown kind"])[0]
    others = set(config.lora_targets.replace(" ", "").split(",")) - {"all-linear", *ADAPTED}
    if says is None or not says.lends:
        return "its server has no weights on the learner's device that another process can read"
    if config.lora_rank > says.lends:
        return f"its server takes adapters of rank {says.lends} at most"
    if kind not in LENT or shape_of(directory) is None:
        return f"of a {kind}, server and learner may name the weights differently"
    if others:
        return f"its server takes no adapters of {', '.join(sorted(others))}"
    if dtype != "bfloat16" or not stored_in(directory, "BF16"):
        return "the model's files and both must have bfloat16, or each has weights of its own precision"
    return ""


def free_memory() -> int:
    """Return the bytes of this machine's memory that this process can still get."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    try:
        group = Path("/sys/fs/cgroup")
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return free
    return min(free, int(limit) - int(used)) if limit.isdigit() else free


def weight_bytes(directory: Path, dtype: str) -> int:
    """Return the bytes of a model's weights in a dtype."""
    files = [*directory.glob("*.safetensors"), *directory.glob("pytorch_model*.bin")]
    shape = shape_of(directory)
    return shape.parameters * size_of(dtype) if shape else sum(file.stat().st_size for file in files)


def size_of(dtype: str) -> int:
    """Return the bytes of a number."""
    return {"float32": 4, "bfloat16": 2}[dtype]


def shape_of(directory: Path) -> ModelShape | None:
    """Return a model's sizes; None for a model of another kind."""
    return ModelShape.from_config(json.loads((directory / "config.json").read_text("utf-8")))


def context_of_model(directory: Path, config: LearnerConfig) -> int:
    """Return most tokens that a model's server takes."""
    own = json.loads((directory / "config.json").read_text("utf-8")).get("max_position_embeddings")
    return config.max_length or own or 4096


def _roughly(shape: ModelShape | None, config: LearnerConfig, tokens: int) -> float:
    """Return more bytes than an update needs without checkpointing, from the model's sizes; infinite if unknown."""
    if shape is None:
        return float("inf")
    a_token = shape.layers * (40 * shape.hidden + 12 * shape.intermediate) + 8 * shape.vocabulary
    return (24 + 4 * config.max_staleness) * shape.parameters + 4 * a_token * tokens
