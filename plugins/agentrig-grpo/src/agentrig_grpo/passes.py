"""What is said where calls don't fit into a pass, an update not into the device's memory, or samples lack a part."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch  # noqa: TID253  (imported with the learner only)

from agentrig.device_memory import shortage
from agentrig.errors import OutOfMemory, RunStopped
from agentrig.learners import TrainSample
from agentrig.tasks import Task
from agentrig_grpo.config import LearnerConfig

log = logging.getLogger(__name__)


def out_of_memory(
    error: torch.OutOfMemoryError, config: LearnerConfig, step: int, latest: int, most: int
) -> OutOfMemory:
    """Return what to do where the device's memory is too small for the smallest passes that were left.

    Args:
        latest: Tokens of the latest pass.
        most: Most tokens that one may have.
    """
    if config.gradient_checkpointing is False:
        cure = "Set algorithm.gradient_checkpointing = true"
    elif latest > most:
        cure = f"A call of {latest} tokens is longer than that. Set algorithm.max_length to less"
    elif config.lora_rank:
        cure = "Smaller ones were not left. Take a smaller model, or a device with more memory"
    else:
        cure = "Smaller ones were not left. Set algorithm.lora_rank = 16, which trains adapters only"
    return OutOfMemory(
        f"step {step}: the device ran out of memory in a pass of {latest} tokens, with at most {most} a pass: "
        f"{shortage(str(error))}\n  {cure}"
    )


LOOKED_AT = 64
"""About how many tasks are looked at for long prompts."""


def too_small(tasks: Sequence[Task], prompt: Callable[[str], Sequence[int]], config: LearnerConfig, budget: int) -> str:
    """Say that prompts are computed for each answer again, because a pass holds no prompt with two answers.

    Args:
        tasks: Their inputs are the least that a prompt has; an agent's own instructions come on top.
        prompt: Returns the tokens of a text as a chat prompt.
        budget: Most tokens of a pass.

    Returns:
        A message; an empty string if it is larger than each prompt.
    """
    prompts = [len(prompt(task.input_text())) for task in tasks[:: max(1, len(tasks) // LOOKED_AT)]]
    longest = max(prompts, default=0)
    if longest < budget:
        return ""
    many = sum(n >= budget for n in prompts)
    return (
        f"{many} of {len(prompts)} training tasks that were looked at have prompts of algorithm.tokens_per_batch = "
        f"{budget} tokens or more, up to {longest}: no two calls with such a prompt fit into one pass, so each of them "
        f"computes it again. To compute it once for a group, set tokens_per_batch to "
        f"{longest + 2 * config.max_tokens} or more"
    )


def check_tokens(samples: Sequence[TrainSample], vocabulary: int, step: int) -> None:
    """Check that the model has all tokens of the samples: no embedding could be looked up for others."""
    for sample in samples:
        for name, ids in (("prompt", sample.prompt_ids), ("response", sample.response_ids)):
            if not ids or (min(ids) >= 0 and max(ids) < vocabulary):
                continue
            wrong = next(token for token in ids if not 0 <= token < vocabulary)
            rollout, span = sample.call or (f"{sample.rollout} of the step", "without a span")
            raise RunStopped(
                f"step {step}: the {name} of call {span} of rollout {rollout} has the token {wrong}, and the model has "
                f"the tokens 0 to {vocabulary - 1}. Did another model's server answer, or one with another tokenizer?\n"
                "  Let agents call only the endpoint that they are given, and let it serve the model that is trained"
            )


def check_recorded(samples: Sequence[TrainSample], step: int) -> None:
    """Check that the server gave log-probabilities with all samples: those of older weights can't be computed again."""
    lacking = sum(s.logprobs is None for s in samples)
    if lacking:
        raise RunStopped(
            f"step {step}: {lacking} of {len(samples)} calls have no log-probabilities. With max_staleness = 1 other "
            "weights than the learner's may have sampled them, and without theirs the importance weights are unknown.\n"
            "  Use a server that returns `logprobs`, or set algorithm.max_staleness = 0",
            cause="stale-rollouts",
        )
