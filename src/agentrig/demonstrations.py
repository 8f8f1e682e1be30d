"""Demonstrations: what a right conversation looks like, for the supervised training of a starting model.

`agentrig warmup` runs the agent on labelled tasks. A local server answers its calls with what a demonstrator says, so
prompts are exactly those that the agent sends. A demonstrator is, in this order: `AgentSpec.demonstrate`, the method
`demonstrate(task, call)` of the task set, or the gold of the task (`gold_reply`).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs

from agentrig.errors import ConfigError
from agentrig.tasks import Task

LEARN = "learn"
"""Field of a demonstration server's answer: false for a reply that is not to be learned (`Reply.learn`)."""

GOLD_KEYS = ("gold", "answer", "solution", "target", "label")
"""Keys of `Task.private` that hold a task's gold, in the order in which they are looked for."""


@attrs.frozen(kw_only=True)
class Call:
    """One call of the agent to the model, as the server got it.

    Attributes:
        messages: OpenAI's messages.
        tools: The request's `tools`.
        turn: How many calls this rollout has made before.
        replies: What these were answered with.
        rng: Random numbers of this conversation: the same in every run with the same seed.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    turn: int = 0
    replies: Sequence[Reply] = ()
    rng: random.Random = attrs.field(factory=random.Random, repr=False)

    @property
    def text(self) -> str:
        """The content of the last message."""
        content = self.messages[-1].get("content") if self.messages else None
        if isinstance(content, list):
            return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
        return str(content or "")


@attrs.frozen(kw_only=True)
class Reply:
    """What the model should say.

    Attributes:
        content: The text.
        tool_calls: Calls of tools: `{"name": str, "arguments": {…}}`.
        learn: Whether the model learns this reply. False for a mistake that a later turn repairs: the agent gets it,
            and only the repair is learned.
    """

    content: str = ""
    tool_calls: Sequence[Mapping[str, Any]] = ()
    learn: bool = True


Encode = Callable[[Any], tuple[Sequence[int], Sequence[int]]]
"""What `agentrig.learners.Imitating.encode` is: the token ids of a `Turn`'s prompt and reply. It raises ValueError."""

Demonstrate = Callable[[Task, Call], Reply | str | None]
"""A demonstrator: called in the main process as `demonstrate(task, call)`, one call of a rollout after the other.

It may read `task.private`; the agent does not get it. None if it can't say: the rollout fails.
"""


@attrs.frozen(kw_only=True)
class Turn:
    """One call with the reply that is learned.

    Attributes:
        messages: OpenAI's messages.
        tools: The request's `tools`.
        options: The request's `chat_template_kwargs`.
        reply: The reply.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    options: Mapping[str, Any] = attrs.field(factory=dict)
    reply: Reply

    @classmethod
    def of(cls, request: Mapping[str, Any], message: Mapping[str, Any]) -> Turn:
        """Return the turn of a chat completion's request, and the message that was replied.

        Raises:
            ValueError: They have not OpenAI's form.
        """
        try:
            called = [call["function"] for call in message.get("tool_calls") or ()]
            calls = [{"name": c["name"], "arguments": json.loads(c.get("arguments") or "{}")} for c in called]
            content = message.get("content") or ""
            if isinstance(content, list):
                content = "".join(part["text"] for part in content)
            messages, tools = list(request["messages"]), list(request.get("tools") or ())
            options = dict(request.get("chat_template_kwargs") or {})
        except (TypeError, LookupError, AttributeError, RecursionError) as error:
            raise ValueError(f"this is no chat in OpenAI's form: {type(error).__name__}: {error}") from error
        if not isinstance(content, str):
            raise ValueError(f"the content of the reply is {content!r:.80}, not a text")
        return cls(messages=messages, tools=tools, options=options, reply=Reply(content=content, tool_calls=calls))


@attrs.frozen(kw_only=True)
class StartPlan:
    """How a starting model is made; what `AlgorithmSpec.make_start` gets.

    Attributes:
        directory: Where the model goes, as a Hugging Face directory.
        model: `new` for random weights, or the name or directory of a model to start from.
        tokenizer: Of a new model: `texts` learns its tokens from the demonstrations, `bytes` has one for each byte.
        vocabulary: Of a new model's tokenizer `texts`: most tokens.
        parameters: Of a new model, about; 0 for as many as can be trained in the time, at most a million.
        context: Of a new model, in tokens; 0 for twice the longest demonstration, at least 512. Of another model: a
            longer context than its own; 0 keeps it.
        passes: Over the demonstrations.
        minutes: Training ends after this time, even if passes are left.
        lr: Greatest learning rate; 0 for one by the model's width.
        tokens_per_batch: Tokens of one optimizer step, beginnings that replies share counted once; 0 to choose it.
        seed: Of the weights and of the order.
        threads: Of torch.
        enough: Whether the model in `directory` has learned enough: to be called between passes, from half of them
            on, when the model has been written. True ends the training. None to do all passes.
    """

    directory: Path
    model: str = "new"
    tokenizer: Literal["texts", "bytes"] = "texts"
    vocabulary: int = 1024
    parameters: int = 0
    context: int = 0
    passes: float = 20.0
    minutes: float = 3.0
    lr: float = 0.0
    tokens_per_batch: int = 0
    seed: int = 0
    threads: int = 1
    enough: Callable[[], bool] | None = None


@attrs.frozen(kw_only=True)
class StartingModel:
    """A starting model, and how it was trained.

    Attributes:
        directory: The Hugging Face directory.
        parameters: Its number of weights.
        vocabulary: Its number of tokens.
        context: Tokens that it can read at most.
        longest: Tokens of the longest demonstration, prompt and reply.
        longest_reply: Tokens of the longest demonstrated reply.
        steps: Optimizer steps.
        tokens: Tokens that went through the model.
        losses: Mean loss per reply token in nats, one a pass.
        wall_s: Seconds of training.
    """

    directory: Path
    parameters: int
    vocabulary: int
    context: int
    longest: int
    longest_reply: int
    steps: int
    tokens: int
    losses: Sequence[float]
    wall_s: float


MakeStart = Callable[[Any, StartPlan, Sequence[Turn], Callable[[str], None]], StartingModel]
"""What `AlgorithmSpec.make_start` is: `make_start(config, plan, turns, log)`; `log` takes lines of progress."""


def gold_of(task: Task, key: str = "") -> str:
    """Return a task's gold as the text that a model should answer; a value that is no text becomes JSON.

    Args:
        task: With its private part.
        key: Of `task.private`; '' for the first of `GOLD_KEYS`, or the only key.

    Raises:
        ConfigError: The task has no such key; the message names those that it has.
    """
    found = [key] if key else [k for k in GOLD_KEYS if k in task.private] or list(task.private)[:2]
    if (not key and len(found) > 1 and found[0] not in GOLD_KEYS) or not found or found[0] not in task.private:
        has = ", ".join(task.private) or "nothing"
        wanted = f'no "{key}"' if key else "no gold to demonstrate"
        raise ConfigError(
            f"task {task.id} has {wanted}: its private part has {has}.\n  Name the key of the right answer: "
            "--gold KEY. Or let the task set or the agent say what is right: demonstrate(task, call) "
            "(docs/how-to/laptop.md)"
        )
    value = task.private[found[0]]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def gold_reply(key: str = "") -> Demonstrate:
    """Return the demonstrator that answers every call with the task's gold."""
    return lambda task, call: Reply(content=gold_of(task, key))
