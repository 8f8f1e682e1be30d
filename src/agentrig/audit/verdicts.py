"""What the auditor says of each link of a step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import attrs

FIRST = 2
"""So many first steps of a run, or of a resumed one, are audited, whatever it takes."""

SHARE = 0.02
"""Of the run's time: what the audits of later steps may take."""

LINKS = ("tasks", "text", "distribution", "score", "advantages", "gradient", "weights", "delivery", "held-out")
"""The links between the task set and the model's server, in the order of the data."""

OF_WEIGHTS = ("text", "distribution", "advantages", "gradient", "weights", "delivery")
"""Those that an algorithm which changes no weights does not have."""

NO_WEIGHTS = "prompts, no weights"
"""Why these are not looked at in such a run."""

TWO_SCORES = "the reward gives two scores to one answer"
"""Begins why a link is not looked at that needs a reward which can be asked again."""

GIVEN = "demonstrations: "
"""Begins why a link is not looked at that a run on demonstrations does not have."""

UNSEEN: Literal["not looked at"] = "not looked at"


@attrs.frozen(kw_only=True)
class Verdict:
    """What was seen of one link.

    Attributes:
        result: `ok`; `fault`: what is recorded is not what the settings and the papers say; `not looked at`.
        detail: What was compared; for a fault both numbers, the bound and where it comes from; else why not.
        ratio: The largest difference, as a share of its bound; 0 where things are equal or not.
        causes: Of a fault: what it may come from.
        link: One of `LINKS`; the auditor fills it in.
        note: What is no fault but may hold learning back; '' if nothing is known.
        read: How many calls were looked at, and of how many; None where that is all or stands in no relation.
        otherwise: Of the calls that were not looked at, those that were not sampled as the settings say; the others
            were left out to save time.
        damaged: Of a fault: whether it is of a file that was cut short or changed since the run wrote it.
    """

    result: Literal["ok", "fault", "not looked at"]
    detail: str
    ratio: float = 0.0
    causes: str = ""
    link: str = ""
    note: str = ""
    read: tuple[int, int] | None = None
    otherwise: int = 0
    damaged: bool = False


@attrs.frozen(kw_only=True)
class Audited:
    """An audited step."""

    step: int
    verdicts: Sequence[Verdict]
    seconds: float

    @property
    def faults(self) -> list[Verdict]:
        """The links that do not hold."""
        return [verdict for verdict in self.verdicts if verdict.result == "fault"]

    @property
    def looked(self) -> set[str]:
        """The links that could be looked at."""
        return {verdict.link for verdict in self.verdicts if verdict.result != UNSEEN}

    def words(self, again: str) -> str:
        """Return the message of the faults: link, what was found, what may cause it, and the command `again`."""
        what = {True: "a damaged file", False: "what is not as the settings and the papers say"}
        kinds = sorted({what[v.damaged] for v in self.faults})
        lines = [f"step {self.step}: the audit found {', and '.join(kinds)}:"]
        lines += [f"  {v.link}: {v.detail}.\n    Likely causes: {v.causes}" for v in self.faults]
        return "\n".join([*lines, *([f"  See it again: {again}"] if again else [])])


class CannotLook(Exception):
    """A link can't be looked at; the text says why."""


def ok(
    detail: str, ratio: float = 0.0, note: str = "", read: tuple[int, int] | None = None, otherwise: int = 0
) -> Verdict:
    """Return the verdict on a link that holds."""
    detail = f"{detail}; {note}" if note else detail
    return Verdict(result="ok", detail=detail, ratio=ratio, note=note, read=read, otherwise=otherwise)


def fault(detail: str, causes: str, ratio: float = 0.0, *, damaged: bool = False) -> Verdict:
    """Return the verdict on a link that does not hold."""
    return Verdict(result="fault", detail=detail, causes=causes, ratio=ratio, damaged=damaged)


def faults(what: str, wrong: Sequence[str], causes: str, ratio: float = 0.0) -> Iterator[Verdict]:
    """Yield the verdict on a link of which some items do not hold, the first of them named; none if all hold."""
    if wrong:
        yield fault(f"{what}: {some(wrong)}", causes, ratio)


def finite(value: float, of: str) -> float:
    """Return a number that a bound is made of.

    Raises:
        CannotLook: It is NaN or infinite, and so is the bound: nothing would be outside of it.
    """
    if not math.isfinite(value):
        raise CannotLook(f"{of}: {value}")
    return value


def some(items: Sequence[str]) -> str:
    """Return the first three items as text, and how many more there are."""
    return "; ".join(items[:3]) + (f"; and {len(items) - 3} more" if len(items) > 3 else "")
