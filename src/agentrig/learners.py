"""Learners: from a step's samples to new weights; and the settings of the loop that calls them, `agentrig.run.loop`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import attrs

from agentrig import delivery
from agentrig.ledger import Call
from agentrig.settings import setting

if TYPE_CHECKING:
    import torch

    from agentrig.audit.sketch import Sketch
    from agentrig.demonstrations import Turn

MOST_ROLLOUTS = 1 << 17
"""Most rollouts of one step."""


@attrs.frozen(kw_only=True)
class TrainSample:
    """One trained LLM call.

    Attributes:
        prompt_ids: Token ids.
        response_ids: Token ids.
        logprobs: Of the response under the policy that sampled it; None to compute them.
        advantage: What the credit says that the call is worth, or each of its response tokens.
        rollout: Which of the step's rollouts it belongs to.
        group: Which group that belongs to.
        call: Which recorded call it is, for the ledger; None if it is none.
        proximal: With stale rollouts: log-probabilities of the response under the weights that the step began with;
            None where the update's own pass gives them.
    """

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    logprobs: Sequence[float] | None
    advantage: float | Sequence[float]
    rollout: int
    group: str
    call: Call | None = None
    proximal: Sequence[float] | None = None

    @property
    def advantages(self) -> Sequence[float]:
        """The advantage of each response token."""
        one = self.advantage
        return [one] * len(self.response_ids) if isinstance(one, int | float) else one

    @property
    def learned(self) -> bool:
        """Whether some token has an advantage other than 0."""
        return bool(self.advantage) if isinstance(self.advantage, int | float) else any(self.advantage)


class Learner(delivery.Learner, Protocol):
    """Holds the weights that are trained. It knows nothing of agents, rollouts and rewards.

    Attributes:
        used: What the latest `update` did with each of its samples: how many response tokens the gradient came from,
            and why it was none (a reason of `agentrig.ledger`), else ''. Count the tokens where the loss is computed.
    """

    used: Sequence[tuple[int, str]]

    def update(self, samples: Sequence[TrainSample], *, step: int, sketch: Sketch | None = None) -> Mapping[str, float]:
        """Update the weights on a step's samples.

        With `server_sleep`, give the device the memory back that is kept for later: the server wakes next.

        Args:
            samples: All calls of the step that the credit gives a worth, also a worth of 0.
            step: Derive every random stream from it, so that a resumed run repeats the step.
            sketch: What the run's auditor gets: call `take` right before each `optimizer.step()`, and `after` right
                behind it. A run passes one in each step; None outside of a run.

        Returns:
            The step's figures, see `Session.end_step`: `weight_change` is required. `sampled_difference`, the mean
            absolute difference of the recorded log-probabilities from those before the update, lets the run check them.

        Raises:
            agentrig.errors.RunStopped: The device has too little memory, or samples cannot be learned from.
        """

    def weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Return the weights for the model's server, see `agentrig.servers.Server.take`."""

    def save(self, directory: Path) -> None:
        """Write a Hugging Face directory that vLLM and transformers can load, and what `load` needs under `trainer/`.

        The weights of the latest `keep` belong to that.
        """

    def load(self, directory: Path) -> None:
        """Continue from what `save` wrote.

        Raises:
            agentrig.errors.CheckpointDamaged: A file is missing or damaged, or does not fit.
            agentrig.errors.AgentrigError: It belongs to other settings.
        """

    def keep(self) -> None:
        """Copy the weights, so that `restore` can set them again. It replaces the copy before."""

    def restore(self) -> None:
        """Set the weights of the latest `keep`."""

    def fingerprint(self) -> str:
        """Return a digest of what is trained: a resumed run begins with no other weights."""

    def prompt(self, text: str) -> Sequence[int]:
        """Return the token ids of a user's message, as the server would prompt the model with it."""

    def ready(self) -> None:
        """Check that the memory is enough for an update; called when the server has new weights, each time.

        Raises:
            agentrig.errors.ConfigError: It is not; the message says what to set.
        """


@runtime_checkable
class Imitating(Protocol):
    """A learner with this method too can learn from demonstrations, where `[algorithm]` has a key `demonstrations`."""

    def encode(self, turn: Turn) -> tuple[Sequence[int], Sequence[int]]:
        """Return the token ids of a demonstrated call: of its prompt, as the server would prompt the model, and reply.

        Ids that the turn has are returned if they say the same with this model's tokenizer and chat template.

        Raises:
            ValueError: It can't be learned: the template refuses it, it is empty, or it is longer than the context.
        """


@runtime_checkable
class Copying(Protocol):
    """A learner with these methods too is saved while it trains on; the run waits for `save` of any other."""

    def plan_saving(self) -> int:
        """Get ready for `copied`, before the first step; return about how many bytes `save` writes."""

    def copied(self) -> Callable[[Path], None] | None:
        """Copy what `save` writes, and return what writes the copy.

        The returned function writes the same files as `save`, in another thread, while the next `update` runs. It is
        called once, and has ended before `copied` is called again.

        Returns:
            None if there is no memory for a copy: the run then waits for `save`.
        """


@attrs.frozen(kw_only=True)
class StepSettings:
    """The keys of the loop, whatever its steps learn from."""

    steps: int = setting(60, help="training steps", ge=1)
    tasks_per_step: int = setting(32, help="tasks of one step", ge=1, le=16_384)
    max_tokens: int = setting(256, help="most tokens of one reply", ge=1, le=1 << 24)
    val_temperature: float = setting(0.0, help="temperature of validation and report rollouts", ge=0, le=2)
    validate_every: int = setting(10, help="validate after every so many steps; 0 for never", ge=0)
    save_every: Literal["auto"] | int = setting(
        "auto",
        help="save a checkpoint after every so many steps; `auto` as often as the run waits at most 5% of its time for "
        "it and a crash loses at most ten minutes: a small model after every step",
        ge=1,
    )
    keep_every: int = setting(
        0, help="keep the checkpoint of every so many steps for good; 0 for the latest two only", ge=0
    )
    final: str = setting(
        "last",
        help="weights that the run ends with: the last, or the best in validation by accuracy, then mean reward",
        choices=("last", "best"),
    )
    server_sleep: Literal["auto", True, False] = setting(
        "auto",
        help="let the model's server give its device memory to the learner during each update; "
        '"auto" where both would not fit otherwise',
    )


@attrs.frozen(kw_only=True)
class LoopSettings(StepSettings):
    """The keys of a loop that samples: `[algorithm]` of each algorithm that is a credit and a learner has them."""

    task_sampling: str = setting(
        "uniform",
        help="which tasks a step draws: uniform, each once before any comes twice; by-difficulty, more often those "
        "whose groups differed lately; skip-solved, without those whose last group was all correct",
        choices=("uniform", "by-difficulty", "skip-solved"),
    )
    recheck_every: int = setting(
        4, help="skip-solved draws a solved task every so many times that its turn comes, to check it again", ge=2
    )
    group_size: int = setting(8, help="rollouts of each task", ge=2, le=1024)
    temperature: float = setting(1.0, help="temperature of training rollouts, and of the ratio", gt=0, le=2)
    top_p: float = setting(1.0, help="nucleus sampling in training; below 1 the ratio is not exact", gt=0, le=1)
    max_staleness: int = setting(
        0,
        help="how many versions the weights that sample may be behind those that are trained; with 1 the next step's "
        "rollouts run during an update",
        ge=0,
        le=1,
    )

    def __attrs_post_init__(self) -> None:
        if self.max_staleness and self.server_sleep is True:
            raise ValueError(
                "max_staleness = 1 and server_sleep = true exclude each other: the server samples during an update, so "
                "it can't give its memory to the learner. Leave one of them out; without server_sleep both must fit"
            )
        rollouts = self.tasks_per_step * self.group_size
        if rollouts > MOST_ROLLOUTS:
            raise ValueError(
                f"tasks_per_step × group_size is {rollouts} rollouts a step; at most {MOST_ROLLOUTS}: all of them are "
                "held in memory until the update"
            )
