"""Demonstrations: what a right conversation looks like, for the supervised training of a starting model.

`agentrig warmup` runs the agent on labelled tasks. A local server answers its calls with what a demonstrator says, so
prompts are exactly those that the agent sends. A demonstrator is, in this order: `AgentSpec.demonstrate`, the method
`demonstrate(task, call)` of the task set, or the gold of the task (`gold_reply`).

A file of demonstrations has one a line, in the form of OpenAI's chat messages:

    {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}], "tools": []}

The last message is the reply that is learned. `Turn` has the further keys, which are optional.
"""

from __future__ import annotations

import inspect
import json
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import attrs

from agentrig.errors import AgentrigError, ConfigError, exhausted, nearest
from agentrig.rows import read_rows
from agentrig.tasks import Task
from agentrig.text import LONE_SURROGATE
from agentrig.traces import mapping, message_of

LEARN = "learn"
"""Field of a demonstration server's answer: false for a reply that is not to be learned (`Reply.learn`)."""

GOLD_KEYS = ("gold", "answer", "solution", "target", "label")
"""Keys of `Task.private` that hold a task's gold, in the order in which they are looked for."""

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Whose a message may be."""

FAULTS = 5
"""Most faults of a file that a message lists."""


@attrs.frozen(kw_only=True)
class Call:
    """One call of the agent to the model, as the server got it.

    Attributes:
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
        tool_calls: Calls of tools: `{"name": str, "arguments": {…}}`, and `"id"` if it is known.
        learn: Whether the model learns this reply. False for a mistake that a later turn repairs: the agent gets it,
            and only the repair is learned.
        reasoning: What the model thinks before the text, `reasoning_content` of the message.
    """

    content: str = ""
    tool_calls: Sequence[Mapping[str, Any]] = ()
    learn: bool = True
    reasoning: str = ""

    def message(self, prefix: str = "call") -> dict[str, Any]:
        """Return it as OpenAI's assistant message; tool calls without an id get `PREFIX-NUMBER`."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content or (None if self.tool_calls else "")}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.get("id") or f"{prefix}-{i}",
                    "type": "function",
                    "function": {
                        "name": call["name"],
                        "arguments": json.dumps(call.get("arguments", {}), ensure_ascii=False),
                    },
                }
                for i, call in enumerate(self.tool_calls)
            ]
        return message


Encode = Callable[["Turn"], tuple[Sequence[int], Sequence[int]]]
"""What `agentrig.learners.Imitating.encode` is: the token ids of a call's prompt and reply. It raises ValueError."""

Demonstrate = Callable[[Task, Call], Reply | str | None]
"""A demonstrator: called in the main process as `demonstrate(task, call)`, one call of a rollout after the other.

It may read `task.private`; the agent does not get it. None if it can't say: the rollout fails.
"""


@attrs.frozen(kw_only=True)
class Turn:
    """One call with the reply that is learned; a line of a file of demonstrations.

    Attributes:
        messages: OpenAI's messages before the reply.
        tools: The request's `tools`.
        options: The request's `chat_template_kwargs`.
        reply: The reply.
        task: The id of the task; '' if it is not known.
        reward: Of the rollout; None if it is not known.
        prompt_token_ids: The exact token ids of the prompt; empty if they are not known.
        response_token_ids: Those of the reply, with the one that ends it; empty if and only if the prompt's are.
        tokenizer: A name or digest of the tokenizer that the ids belong to; '' if it is not known.
        source: Where the demonstration comes from.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    options: Mapping[str, Any] = attrs.field(factory=dict)
    reply: Reply
    task: str = ""
    reward: float | None = None
    prompt_token_ids: Sequence[int] = attrs.field(default=(), repr=False)
    response_token_ids: Sequence[int] = attrs.field(default=(), repr=False)
    tokenizer: str = ""
    source: str = ""


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
        minutes: Training ends after this time, even if passes are left, with the step that is under way.
        lr: Greatest learning rate; 0 for one by the model's width.
        tokens_per_batch: Tokens of one optimizer step, beginnings that replies share counted once; 0 to choose it.
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


@attrs.frozen(kw_only=True)
class StartingModel:
    """A starting model, and how it was trained; what `AlgorithmSpec.make_start` returns has not been trained yet.

    Attributes:
        context: Tokens that it can read at most.
        longest: Tokens of the longest demonstration, prompt and reply.
        longest_reply: Tokens of the longest demonstrated reply.
        updates: Optimizer steps of a pass over the demonstrations.
        steps: Optimizer steps that were done.
        passes: Passes over the demonstrations that were done.
        losses: Mean loss per reply token in nats, one for each step of the run, a pass or a part of it.
        interrupted: The number of the signal that ended the training early; 0 for none.
    """

    directory: Path
    parameters: int
    vocabulary: int
    context: int
    longest: int
    longest_reply: int
    lr: float
    updates: int
    steps: int = 0
    passes: float = 0.0
    losses: Sequence[float] = ()
    wall_s: float = 0.0
    interrupted: int = 0


MakeStart = Callable[[Any, StartPlan, Sequence[Turn]], StartingModel]
"""What `AlgorithmSpec.make_start` is: `make_start(config, plan, turns)`; `agentrig warmup` then trains the model."""


def gold_key(private: Mapping[str, Any]) -> str | None:
    """Return the key of a task's gold: the first of `GOLD_KEYS` that is there, or the only key; else None."""
    only = next(iter(private)) if len(private) == 1 else None
    return next((key for key in GOLD_KEYS if key in private), only)


def gold_of(task: Task, key: str = "") -> str:
    """Return a task's gold as the text that a model should answer; a value that is no text becomes JSON.

    Args:
        key: Of `task.private`; '' for its `gold_key`.

    Raises:
        ConfigError: The task has no such key; the message names those that it has.
    """
    found = key or gold_key(task.private)
    if found is None or found not in task.private:
        has = ", ".join(task.private) or "nothing"
        wanted = f'no "{key}"' if key else "no gold to demonstrate"
        raise ConfigError(
            f"task {task.id} has {wanted}: its private part has {has}.\n  Name the key of the right answer: "
            "--gold KEY. For an answer made of several keys, let the agent or the task set say it: "
            "AgentSpec(demonstrate=...), or a method demonstrate(task, call) (docs/how-to/laptop.md)"
        )
    value = task.private[found]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def built(agent: str, build: Callable[[Any], Demonstrate], config: Any) -> Demonstrate:
    """Return the demonstrator that an agent's `AgentSpec.demonstrate` builds.

    Raises:
        ConfigError: It is no function of the agent's settings, or returns no function.
    """
    takes = True
    with suppress(ValueError):  # a callable without a signature
        try:
            inspect.signature(build).bind(config)
        except TypeError:
            takes = False
    found = build(config) if takes else None
    if not callable(found):
        raise ConfigError(
            f"agent {agent}: `demonstrate` of its AgentSpec must be a function of the agent's settings that returns a "
            "function of a task and a call. If yours is that function, write demonstrate=lambda config: demonstrate"
        )
    return found


def gold_reply(key: str = "") -> Demonstrate:
    """Return the demonstrator that answers every call with the task's gold."""
    return lambda task, call: Reply(content=gold_of(task, key))


OPTIONS = "chat_template_kwargs"
"""The key of a request, and of a line of a file, that has `Turn.options`."""

TEXTS = ("task", "tokenizer", "source")
TOKENS = ("prompt_token_ids", "response_token_ids")
"""Optional keys of a line of a file."""


class Unfit(ValueError):
    """Something is no demonstration.

    Args:
        reason: Why, in words that are the same for all that have this fault.
        detail: What is particular to this one; '' for nothing.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


def demonstration_of(row: Any) -> Turn:
    """Return the demonstration that a line of a file holds.

    Args:
        row: The line's value, as plain data. Keys that are not known are ignored, and so are those that are null.

    Raises:
        Unfit: It is none, or has a key of ours with a value of another type.
    """
    if not isinstance(row, Mapping) or not isinstance(row.get("messages"), list):
        raise Unfit("it has no list of messages", "" if isinstance(row, Mapping) else f"it is {row!r:.80}")
    try:
        text = json.dumps(row, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise Unfit("it holds NaN or an infinite number, which JSON does not have") from None
    except RecursionError:
        raise Unfit("it is nested too deep") from None
    if half := LONE_SURROGATE.search(text):
        raise Unfit("it holds half of a UTF-16 character", f"\\u{ord(half[0]):04x}, which no tokenizer reads")
    messages = row["messages"]
    for i, message in enumerate(messages):
        _check_message(message, f"messages[{i}]")
    if not messages or messages[-1]["role"] != "assistant":
        last = f"it ends with one of the role {messages[-1]['role']}" if messages else "there are none"
        raise Unfit("the last message is not the assistant's, which is learned", last)
    if len(messages) == 1:
        raise Unfit("no message comes before the reply")
    tools = row.get("tools") or ()
    for tool in tools if isinstance(tools, list | tuple) else ["no list"]:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise Unfit('a tool is not of the form {"type": "function", "function": {"name": …}}', f"{tool!r:.80}")
    found: dict[str, Any] = {key: row[key] for key in (*TEXTS, *TOKENS, "reward") if row.get(key) is not None}
    for key in TEXTS:
        if not isinstance(found.get(key, ""), str):
            raise Unfit(f"{key} is no text", f"{found[key]!r:.80}")
    reward = found.get("reward", 0.0)
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        raise Unfit("reward is no number", json.dumps(reward)[:80])
    for key in TOKENS:
        ids = found.get(key, [0])
        if not isinstance(ids, list) or not ids or not all(type(token) is int and token >= 0 for token in ids):
            raise Unfit(f"{key} is no list of token ids", f"{ids!r:.80}")
    if (TOKENS[0] in found) != (TOKENS[1] in found):
        raise Unfit(f"it has only one of {TOKENS[0]} and {TOKENS[1]}")
    options = row.get(OPTIONS) or {}
    if not isinstance(options, Mapping):
        raise Unfit(f"{OPTIONS} is no object", f"{options!r:.80}")
    return Turn(messages=messages[:-1], tools=tools, options=options, reply=_reply(messages[-1]), **found)


def _check_message(message: Any, place: str) -> None:
    """Raise `Unfit` if a message is none of OpenAI's form, or has parts that are no text."""
    role = message.get("role") if isinstance(message, Mapping) else None
    if role not in ROLES:
        wrong = f"{place} has the role {role!r}.{nearest(str(role), ROLES)}" if role else f"{place} is {message!r:.80}"
        raise Unfit(f"a message has no role that is one of {', '.join(ROLES)}", wrong)
    if message.get("function_call"):
        raise Unfit("a message has function_call, the former name of tool_calls", place)
    content = message.get("content")
    if not isinstance(content, str | list | None):
        raise Unfit("the content of a message is no text", f"{place}.content is {content!r:.80}")
    for part in content if isinstance(content, list) else ():
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise Unfit("a part of a message is no text", f"{place}.content has {kind!r:.80}")
    calls = message.get("tool_calls") or []
    for call in calls if isinstance(calls, list) else ["no list"]:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise Unfit('a tool call is not of the form {"function": {"name": …, "arguments": …}}', f"{call!r:.80}")


def _reply(message: Mapping[str, Any]) -> Reply:
    """Return the assistant's last message as a reply; it is one of OpenAI's form."""
    content = message.get("content") or ""
    text = content if isinstance(content, str) else "".join(part["text"] for part in content)
    calls = []
    for call in message.get("tool_calls") or ():
        name, arguments = call["function"]["name"], call["function"].get("arguments")
        try:
            given = json.loads(arguments or "{}") if isinstance(arguments, str | None) else arguments
        except (ValueError, RecursionError):
            given = None
        if not isinstance(given, Mapping):
            raise Unfit("the arguments of the reply's tool call are no JSON object", f"{name}({arguments!r:.80})")
        calls.append({"name": name, "arguments": given})
        if isinstance(call.get("id"), str):
            calls[-1]["id"] = call["id"]
    if not text.strip() and not calls:
        raise Unfit("the reply is empty")
    if message.get("weight") == 0:
        raise Unfit('the reply has "weight": 0, so nothing is learned of it')
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    if not isinstance(reasoning, str):
        raise Unfit("the reasoning of the reply is no text", f"{reasoning!r:.80}")
    return Reply(content=text, tool_calls=calls or (), reasoning=reasoning)


def recorded_call(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was recorded of a call: `messages`, `reply`, `tools`, options, and token ids if there are both lists.

    Args:
        attributes: Of the call's span. What was not recorded is None, a reply empty.
    """
    request = mapping(attributes.get("request"))
    ids = {key: attributes[key] for key in TOKENS if attributes.get(key)}
    return {
        "messages": request.get("messages"),
        "reply": message_of(attributes),
        "tools": request.get("tools"),
        OPTIONS: request.get(OPTIONS),
        **(ids if len(ids) == len(TOKENS) else {}),
    }


def row_of(turn: Turn) -> dict[str, Any]:
    """Return a demonstration as a line of a file has it; `demonstration_of` returns the same from it."""
    found: dict[str, Any] = {"messages": [*turn.messages, turn.reply.message()]}
    optional = ("tools", *TEXTS, "reward", *TOKENS)
    found |= {key: value for key in optional if (value := getattr(turn, key)) not in (None, "", (), [])}
    return found | ({OPTIONS: dict(turn.options)} if turn.options else {})


def read_demonstrations(path: Path) -> list[Turn]:
    """Return the demonstrations of a file, in its order.

    Args:
        path: JSON Lines (`.jsonl`), or another file that `agentrig.rows.read_rows` reads.

    Raises:
        AgentrigError: The file does not exist, or is not JSON; the message names the line.
        ConfigError: It holds no demonstration, or a line is none; the message names the first `FAULTS` lines.
    """
    rows, place = read_rows(path, least=0)
    turns, faults = [], []
    for number, row in enumerate(rows):
        try:
            turns.append(demonstration_of(row))
        except Unfit as error:
            faults.append(f"{place(number)}: {error}")
    if len(faults) > 1:
        more = f"\n  … and {len(faults) - FAULTS} more" if len(faults) > FAULTS else ""
        said = "".join(f"\n  {fault}" for fault in faults[:FAULTS])
        raise ConfigError(f"{len(faults)} of {len(rows)} lines of {path} are no demonstrations:{said}{more}")
    if faults:
        raise ConfigError(faults[0])
    if not turns:
        raise ConfigError(f'{path} is empty: a line is {{"messages": […, {{"role": "assistant", "content": …}}]}}')
    return turns


def write_demonstrations(path: Path, turns: Iterable[Turn]) -> None:
    """Write a file of demonstrations atomically, in the place of one that is there.

    Raises:
        ConfigError: A demonstration holds NaN, or half of a UTF-16 character; the message has its number.
        AgentrigError: The file cannot be written.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        try:
            part.unlink(missing_ok=True)
            with part.open("x", encoding="utf-8") as file:
                for number, turn in enumerate(turns):
                    try:
                        file.write(json.dumps(row_of(turn), ensure_ascii=False, allow_nan=False) + "\n")
                    except ValueError as error:
                        raise ConfigError(f"demonstration {number} (of 0 …) can't be written: {error}") from None
            os.replace(part, path)
        except BaseException:
            with suppress(OSError):
                part.unlink()
            raise
    except OSError as error:
        raise AgentrigError(f"{path} cannot be written: {exhausted(error) or error.strerror}") from error
