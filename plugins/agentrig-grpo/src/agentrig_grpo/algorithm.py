"""`grpo`: how its model is served, and its learner. The run's loop is `agentrig.run.loop`.

Defaults that differ from textbook GRPO (arXiv:2402.03300): the credit is `dr-grpo`, which does not divide advantages
by the group's standard deviation, the loss is the mean over all tokens and the upper clip is wider (DAPO),
there is no KL loss, and a step makes one update, so the ratio is 1 up to rounding.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from agentrig.algorithms import Session
from agentrig.errors import AgentrigError, ConfigError
from agentrig.hardware import Hardware
from agentrig.hardware.cpu import choose_vector_kernels
from agentrig.run.checkpoints import verify
from agentrig.servers import ServerMemory, ServerPlan
from agentrig_grpo.config import LearnerConfig
from agentrig_grpo.context import check_context
from agentrig_grpo.naming import model_directory, plain

if TYPE_CHECKING:
    from agentrig.servers import Server
    from agentrig_grpo.learner import Learner
    from agentrig_grpo.planning import MemoryPlan

log = logging.getLogger(__name__)

OVERLAP = (
    "the next step's rollouts run during an update (max_staleness = 1): the loss is that of decoupled PPO, with "
    "importance weights truncated at {threshold:g}"
)
"""What a run with stale rollouts notes."""

MODEL_NAME = "policy"
"""The model's name in requests."""


class Grpo:
    """Implements `agentrig.algorithms.LoopAlgorithm`."""

    def __init__(self, config: LearnerConfig) -> None:
        self.config = config
        self._memory: MemoryPlan | None = None
        self._server: Server | None = None  # that lends its weights

    def serving(self, hardware: Hardware, checkpoint: Path | None) -> ServerPlan:
        """Return how to serve a checkpoint, or the starting model."""
        config = self.config
        source = plain(checkpoint) if checkpoint else model_directory(config.model)
        dtype = check_device(hardware, config.dtype)
        check_context(source, max_length=config.max_length, max_tokens=config.max_tokens)
        limit = hardware.memory_limit or None  # all of it for an evaluation; `fit` plans for training
        return ServerPlan(
            model=source, name=MODEL_NAME, hardware=hardware, dtype=dtype, context=config.max_length, memory=limit
        )

    def fit(self, plan: ServerPlan, session: Session) -> ServerPlan:
        """Plan the device's memory for server and learner together, before either starts.

        On a CPU the server takes what it needs, and the learner is planned when it is made.
        """
        if plan.hardware.torch_device == "cpu" and self.config.lora_base != "server":
            return plan
        says = session.server_memory or ServerMemory(sequences=session.calls or 64)
        self._memory = self._plan_memory(plan.hardware, says, session.calls)
        session.note(self._memory.line())
        self._record(self._memory, session)
        plan = attrs.evolve(plan, memory=self._memory.server_memory, sleeps=self._memory.choice.sleeps)
        return attrs.evolve(plan, adapters=self.config.lora_rank if self._memory.choice.lent else 0)

    def borrow(self, server: Server) -> None:
        """Let the memory plan ask the server what it holds, and the learner read its weights where the plan says so."""
        if self._memory is not None:
            self._memory.server = server
            self._server = server if self._memory.choice.lent else None

    def _record(self, memory: MemoryPlan, session: Session) -> None:
        """Keep the plan in the manifest, and what is chosen again later."""
        memory.record = partial(session.record, "memory")
        memory.record(memory.facts())

    def _plan_memory(self, hardware: Hardware, says: ServerMemory | None, calls: int = 0) -> MemoryPlan:
        """Return the memory plan of the learner and of a server, None for one whose memory is not planned."""
        from agentrig.hardware.memory import ServerNeed
        from agentrig_grpo import checkpoint, planning
        from agentrig_grpo.fitting import server_need

        config, source = self.config, model_directory(self.config.model)
        dtype, device = check_device(hardware, config.dtype), hardware.torch_device
        memory = planning.measured(device, hardware.memory_limit)
        weights = planning.weight_bytes(source, dtype)
        server = ServerNeed(weights=weights)
        lends = planning.lends(source, config, dtype, says)
        if says is not None:
            server = server_need(
                config,
                says,
                planning.shape_of(source),
                weights=weights,
                element=planning.size_of(dtype),
                context=planning.context_of_model(source, config),
                runners=calls,
                total=memory.total,
                lends=lends,
            )
        attention = checkpoint.attention_of(hardware)
        return planning.plan_memory(source, config, dtype=dtype, device=memory, attention=attention, server=server)

    def learner(self, session: Session) -> Learner:
        """Return the learner of the starting model, on the session's hardware; torch is imported here."""
        import torch

        from agentrig_grpo import checkpoint, lent
        from agentrig_grpo.learner import Learner
        from agentrig_grpo.model_files import stored_in
        from agentrig_grpo.passes import too_small
        from agentrig_grpo.planning import free_memory

        config, hardware = self.config, session.hardware
        source, device = model_directory(config.model), hardware.torch_device
        verify(source)  # it may be another run's checkpoint
        if device == "cpu" and (threads := getattr(hardware, "threads", None)):
            torch.set_num_threads(threads)
        choose_vector_kernels()
        tokenizer, attention = checkpoint.load_tokenizer(source), checkpoint.attention_of(hardware)
        dtype = check_device(hardware, config.dtype)
        if self._memory is None:
            self._memory = self._plan_memory(hardware, None)
            self._record(self._memory, session)
        memory = self._memory
        memory.hold(updating=False)
        # Adapters leave the model as its files have it: in bfloat16 it needs half the memory.
        short = bool(config.lora_rank) and dtype == "bfloat16" and stored_in(source, "BF16")
        kept = torch.bfloat16 if short else torch.float32
        digests = None
        if self._server is not None:
            model, digests = lent.load_model(source, self._server, dtype=kept, device=device, attention=attention)
        else:  # a forecast has no server, and the memory of its weights
            model = checkpoint.load_model(source, dtype=kept, device=device, attention=attention)
        checkpoint.check_vocabulary(model, tokenizer)
        learner = Learner(
            model,
            memory.config,
            dtype=dtype,
            seed=session.seed,
            chunk=memory.chunk,
            recomputed=memory.recomputed,
            frozen_exact=True if short else None,
            tokenizer=tokenizer,
            host_memory=free_memory,
            lent=digests,
        )
        learner.tokens = memory.choice.tokens
        learner.gives_back = memory.choice.sleeps or bool(memory.fitting.device.limit)
        learner.limit, learner.lowered = memory.hold, memory.chosen_again
        learner.ready = partial(memory.delivered, learner)
        if device != "cpu":
            learner.measured = partial(memory.updated, learner)
        if not learner.share:
            session.note(learner.path)
        if config.max_staleness:
            session.note(OVERLAP.format(threshold=config.rollout_is_threshold))
        if learner.share and (small := too_small(session.train_tasks, learner.prompt, config, learner.tokens)):
            log.warning("%s", small)
            session.note(small)
        return learner


def check_device(hardware: Hardware, dtype: str) -> str:
    """Check that torch can use the hardware; returns the dtype to compute in.

    Raises:
        AgentrigError: torch cannot use it. There is no fallback to the CPU.
        ConfigError: The hardware doesn't train in that dtype.
    """
    kind = hardware.torch_device.split(":")[0]
    if kind != "cpu":
        import torch

        try:
            usable = torch.get_device_module(kind).is_available()
        except RuntimeError:
            usable = False
        if not usable:
            raise AgentrigError(
                f"the run's hardware is {hardware.name}, but torch {torch.__version__} cannot use the device {kind!r}: "
                f"{hardware.torch_cure}. Or use the CPU: --hardware cpu"
            )
    if dtype == "auto":
        return "bfloat16" if kind != "cpu" and "bfloat16" in hardware.dtypes else "float32"
    if kind != "cpu" and dtype not in hardware.dtypes:
        raise ConfigError(f"[algorithm] dtype = {dtype!r}: {hardware.name} trains in {', '.join(hardware.dtypes)}")
    return dtype
