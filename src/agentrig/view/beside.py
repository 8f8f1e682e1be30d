"""What is not in a rollout's row: its sampled tokens as text, where its calls went, and its task's private part."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from agentrig.demonstrations import gold_key
from agentrig.figures import number
from agentrig.text import account_of, check_regular, cut
from agentrig.view.reading import RunData, first_line, one_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MOST_TOKENS = 4000
"""Tokens of a call that a page shows one by one."""


@attrs.frozen
class Token:
    """One sampled token.

    Attributes:
        text: What it adds to the text; its id in brackets where no tokenizer is known.
        probability: Under the model that sampled it; None if the server gave none.
    """

    text: str
    probability: float | None

    @property
    def level(self) -> int:
        """0 for a probability below 10%, up to 9; 9 if it is not known."""
        return 9 if self.probability is None else min(9, int(10 * self.probability))


def tokenizer_of(run: RunData) -> tuple[Tokenizer | None, str]:
    """Return a run's tokenizer, and '' or what is known of why there is none.

    It is that of a checkpoint, else that of the run's model; None if neither is here or can be read.
    """
    damaged = []
    for file in _places(run):
        try:
            found = _read(file, file.stat().st_mtime_ns)
        except OSError:
            continue
        if not isinstance(found, str):
            return found, ""
        damaged.append(found)
    return None, "; ".join(damaged) or "the run's tokenizer is not here"


@cache
def _read(file: Path, changed: int) -> Tokenizer | str:
    """Return the tokenizer of a file, or what is wrong with it; it is read again if the time of its change differs."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare exceptions for files that it can't read
        return f"the run's tokenizer {file} is damaged: {cut(str(error), 200)}"


def tokens_of(attributes: Mapping[str, Any], tokenizer: Tokenizer | None, most: int = MOST_TOKENS) -> list[Token]:
    """Return the sampled tokens of a call, the first `most` of them."""
    ids = attributes.get("response_token_ids")
    ids = [i for i in ids if isinstance(i, int) and 0 <= i < 1 << 32] if isinstance(ids, list) else []
    given = attributes.get("response_logprobs")
    logprobs = map(number, given) if isinstance(given, list) and len(given) == len(ids) else repeat(None)
    return [
        Token(text, None if logprob is None else math.exp(min(0.0, logprob)))
        for text, logprob in zip(_texts(ids[:most], tokenizer), logprobs, strict=False)
    ]


def _texts(ids: Sequence[int], tokenizer: Tokenizer | None) -> list[str]:
    """Return what each token adds to the text; a character of several tokens comes with the last of them."""
    if tokenizer is None:
        return [f"[{i}]" for i in ids]
    found: list[str] = []
    open_ids, before = [], ""
    for place, i in enumerate(ids, 1):
        open_ids.append(i)
        text = tokenizer.decode(open_ids, skip_special_tokens=False)
        if text.endswith("\ufffd") and len(open_ids) < 8 and place < len(ids):
            found.append("")
            continue
        found.append(text[len(before) :])
        # Decode from a few tokens back: some tokenizers drop a space at the start.
        open_ids = open_ids[-4:]
        before = tokenizer.decode(open_ids, skip_special_tokens=False)
    return found


def _places(run: RunData) -> list[Path]:
    checkpoints = run.directory / "checkpoints"
    found = sorted(checkpoints.glob("*/tokenizer.json")) + sorted(checkpoints.glob("*/*/tokenizer.json"))
    stated = (run.setting("algorithm", "model"), run.manifest.get("model"))
    return found + [Path(model) / "tokenizer.json" for model in stated if isinstance(model, str) and model]


def calls_of(
    directory: Path, rows: Collection[Mapping[str, Any]]
) -> tuple[dict[str, dict[str, list[dict[str, Any]]]], list[str]]:
    """Return where the calls of rollouts went, and why files of their calls cannot be read, one sentence each.

    Returns:
        Rollout to span to its rows in `calls/train-STEP.parquet`; none for a step without one.
    """
    import pyarrow
    import pyarrow.parquet

    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    damage = []
    ids = {str(row["id"]) for row in rows}
    for step in sorted({row["step"] for row in rows if row["mode"] == "train"}):
        file = _calls_file(directory, step)
        try:
            check_regular(file)
            table = pyarrow.parquet.read_table(file, filters=one_of("rollout", ids), partitioning=None)
            for call in table.to_pylist():
                found.setdefault(call["rollout"], {}).setdefault(str(call.get("span")), []).append(call)
        except FileNotFoundError:
            continue
        except (OSError, KeyError, pyarrow.ArrowException) as error:
            why = getattr(error, "strerror", None) or first_line(error)
            damage.append(f"calls/{file.name} is damaged, so it is not known which calls were trained: {why}")
    return found, damage


def rollouts_of_reason(directory: Path, step: int, reason: str) -> set[str] | None:
    """Return the rollouts of a step with a call that was dropped for a reason; None if the file can't be read."""
    import pyarrow
    import pyarrow.parquet

    file = _calls_file(directory, step)
    try:
        check_regular(file)
        dropped = one_of("reason", [reason])
        table = pyarrow.parquet.read_table(file, columns=["rollout"], filters=dropped, partitioning=None)
        return set(table["rollout"].to_pylist())
    except (OSError, KeyError, pyarrow.ArrowException):
        return None


def worths_of(directory: Path, step: int) -> dict[str, float]:
    """Return the mean advantage of the trained calls of each rollout of a step; none if the file can't be read."""
    import pyarrow
    import pyarrow.parquet

    file, columns = _calls_file(directory, step), ["rollout", "place", "advantage"]
    try:
        check_regular(file)
        rows = pyarrow.parquet.read_table(file, columns=columns, partitioning=None).to_pylist()
    except (OSError, KeyError, pyarrow.ArrowException):
        return {}
    found: dict[str, list[float]] = {}
    for row in rows:
        if row.get("place") == "trained" and row.get("advantage") is not None:
            found.setdefault(str(row["rollout"]), []).append(row["advantage"])
    return {rollout: math.fsum(each) / len(each) for rollout, each in found.items()}


def _calls_file(directory: Path, step: int) -> Path:
    return directory / "calls" / f"train-{step:05d}.parquet"


@attrs.frozen
class PrivatePart:
    """The private part of a task.

    Attributes:
        parts: Its keys and values; the gold comes first.
        has_gold: Whether the first of them is known to be the gold.
        missing: Why it cannot be shown; '' if it can.
    """

    parts: Mapping[str, Any] = attrs.field(factory=dict)
    has_gold: bool = False
    missing: str = ""


def private_of(directory: Path, task: str) -> PrivatePart:
    """Return the private part of a run's task, the gold first."""
    found, why = _load(directory)
    if task not in found:
        return PrivatePart(missing=why or "the run's task set has no task with this id any more")
    private, gold = found[task], gold_key(found[task])
    return PrivatePart(dict(sorted(private.items(), key=lambda item: item[0] != gold)), gold is not None)


@cache
def _load(directory: Path) -> tuple[Mapping[str, Mapping[str, Any]], str]:
    """Load a run's task set, once, and return the private parts of its tasks, and '' or why it cannot be loaded."""
    from agentrig.plan import resolve

    try:
        plan = resolve(str(directory / "config.toml"))
        tasks = plan.build("tasks")
        found = {task.id: dict(task.private) for split in tasks.splits for task in tasks.load(split)}
    except Exception as error:  # a task set of somebody's plugin may raise anything
        return {}, f"the run's task set cannot be loaded here: {account_of(error).splitlines()[0]}"
    return found, ""
