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

from agentrig.algorithms import Session
from agentrig.errors import AgentrigError, ConfigError
from agentrig.hardware import Hardware
from agentrig.run.checkpoints import verify
from agentrig.servers import ServerPlan
from agentrig_grpo.config import LearnerConfig
from agentrig_grpo.context import check_context
from agentrig_grpo.naming import model_directory

if TYPE_CHECKING:
    from agentrig_grpo.learner import Learner

log = logging.getLogger(__name__)

OVERLAP = (
    "the next step's rollouts run during an update (max_staleness = 1): the loss is that of decoupled PPO, with "
    "importance weights truncated at {threshold:g}"
)
"""What a run with stale rollouts notes."""

MODEL_NAME = "policy"
"""The model's name in requests."""


class Grpo:
    """Implements `agentrig.algorithms.LoopAlgorithm`.

    Args:
        config: The settings.
    """

    def __init__(self, config: LearnerConfig) -> None:
        self.config = config

    def serving(self, hardware: Hardware, checkpoint: Path | None) -> ServerPlan:
        """Return how to serve a checkpoint, or the starting model."""
        config = self.config
        source = checkpoint or model_directory(config.model)
        dtype = check_device(hardware, config.dtype)
        check_context(source, max_length=config.max_length, max_tokens=config.max_tokens)
        return ServerPlan(model=source, name=MODEL_NAME, hardware=hardware, dtype=dtype, context=config.max_length)

    def learner(self, session: Session) -> Learner:
        """Return the learner of the starting model, on the session's hardware; torch is imported here."""
        import torch

        from agentrig_grpo import checkpoint
        from agentrig_grpo.fitting import check_left, plan_memory
        from agentrig_grpo.learner import Learner
        from agentrig_grpo.passes import too_small

        config, hardware = self.config, session.hardware
        source, device = model_directory(config.model), hardware.torch_device
        verify(source)  # it may be another run's checkpoint
        if device == "cpu" and (threads := getattr(hardware, "threads", None)):
            torch.set_num_threads(threads)
        tokenizer, attention = checkpoint.load_tokenizer(source), checkpoint.attention_of(hardware)
        dtype = check_device(hardware, config.dtype)
        memory = plan_memory(source, config, dtype=dtype, device=device, attention=attention)
        model = checkpoint.load_model(source, device=device, attention=attention)
        checkpoint.check_vocabulary(model, tokenizer)
        learner = Learner(
            model,
            memory.config,
            dtype=dtype,
            seed=session.seed,
            chunk=memory.chunk,
            recomputed=memory.recomputed,
            tokenizer=tokenizer,
            ready=partial(check_left, memory, device),
        )
        if not learner.share:
            session.note(learner.path)
        if config.max_staleness:
            session.note(OVERLAP.format(threshold=config.rollout_is_threshold))
        if learner.share and (small := too_small(session.train_tasks, learner.prompt, config)):
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
