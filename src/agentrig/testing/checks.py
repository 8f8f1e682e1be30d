"""Checks: what the kit asks of a component, and the report of what it found."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Sequence
from typing import Literal

import attrs

from agentrig.errors import AgentrigError, place_of
from agentrig.text import words_of


class CheckFailed(AssertionError):
    """A component lacks a property that training needs.

    Args:
        what: What was seen, and where.
        cure: What to do about it.
        check: The check's name; `Check` adds it.
        why: What goes wrong in training; `Check` adds it if it is empty.
    """

    def __init__(self, what: str, cure: str = "", check: str = "", why: str = "") -> None:
        super().__init__(what, cure, check, why)
        self.what, self.cure, self.check, self.why = what, cure, check, why

    def __str__(self) -> str:
        parts = [f"{self.check}: {self.what}" if self.check else self.what]
        parts += [f"  why it matters: {self.why}"] if self.why else []
        parts += [f"  what to do: {self.cure}"] if self.cure else []
        return "\n".join(parts)


class CheckSkipped(Exception):
    """A check does not apply here; the message says why. The pytest plugin turns it into a skipped test."""


class ChecksFailed(AssertionError):
    """At least one check failed.

    Attributes:
        report: What was found.
    """

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report


@attrs.frozen(kw_only=True)
class Check:
    """One named check of one component. Call it: it raises `CheckFailed` or `CheckSkipped`, or it passes.

    One that passes returns a fact that its author should know and that is no fault; '' if there is none.

    Attributes:
        name: Kind, dot, words with hyphens: `reward.same-twice`.
        why: What goes wrong in training without this property.
        cure: What to do if it fails; a failure may name a better cure.
        run: Does the check; `__call__` adds name, reason and cure to its failure.
    """

    name: str
    why: str
    cure: str
    run: Callable[[], str] = attrs.field(repr=False)

    def __call__(self) -> str:
        """Do the check, and return a fact or ''.

        Raises:
            CheckFailed: The component lacks the property.
            CheckSkipped: The check does not apply.
        """
        __tracebackhide__ = True  # pytest shows the test and the message, not this function
        try:
            return self.run()
        except CheckSkipped:
            raise
        except CheckFailed as failed:
            why = failed.why or self.why
            raise CheckFailed(failed.what, failed.cure or self.cure, self.name, why) from failed.__cause__
        except AgentrigError as error:
            raise CheckFailed(str(error), self.cure, self.name, self.why) from error
        except (Exception, SystemExit) as error:  # of the component: the checks' own failures are CheckFailed
            what = f"{words_of(error)}{place_of(error)}"
            raise CheckFailed(what, self.cure, self.name, self.why) from error

    def result(self) -> Result:
        """Do the check and return what was found; a failure is not raised."""
        start = time.perf_counter()
        status: Literal["passed", "failed", "skipped"] = "passed"
        message = ""
        try:
            message = self()
        except CheckFailed as failed:
            status, message = "failed", str(failed)
        except CheckSkipped as skipped:
            status, message = "skipped", str(skipped)
        return Result(check=self.name, status=status, message=message, seconds=time.perf_counter() - start)

    def __str__(self) -> str:
        """Return the name; pytest shows it (`ids=str`)."""
        return self.name


@attrs.frozen(kw_only=True)
class Result:
    """What one check found.

    Attributes:
        check: Its name.
        status: `passed`, `failed` or `skipped`.
        message: What was seen, why it matters and what to do; for a skipped check the reason; for one that passed
            a fact, which is no fault.
        seconds: Wall time.
    """

    check: str
    status: Literal["passed", "failed", "skipped"]
    message: str = ""
    seconds: float = 0.0

    def row(self, width: int) -> str:
        """Return it as a row of a report's table; why and cure follow on lines of their own.

        Args:
            width: Letters of the column of names.
        """
        first, _, rest = self.message.removeprefix(f"{self.check}: ").partition("\n")
        row = f"  {self.status:<8} {self.check:<{width}}  {self.seconds:5.2f} s  {first}".rstrip()
        return f"{row}\n{textwrap.indent(rest, ' ' * 11)}" if rest else row


@attrs.frozen(kw_only=True)
class Report:
    """What the checks of one component found; `str(report)` is a table.

    Attributes:
        kind: The component's kind.
        subject: Its name.
        results: One for each check, in the order in which they ran.
    """

    kind: str
    subject: str
    results: Sequence[Result]

    @property
    def failed(self) -> list[Result]:
        """The checks that failed."""
        return [r for r in self.results if r.status == "failed"]

    @property
    def ok(self) -> bool:
        """Whether no check failed; a skipped check is no failure."""
        return not self.failed

    def raise_failed(self) -> None:
        """Raise `ChecksFailed`, with the table, if a check failed."""
        if self.failed:
            raise ChecksFailed(self)

    @property
    def counts(self) -> str:
        """How many checks passed, failed and were skipped, as text."""
        counts = [f"{n} {s}" for s in ("passed", "failed", "skipped") if (n := self._count(s))]
        return ", ".join(counts) or "no checks"

    def __str__(self) -> str:
        width = max((len(r.check) for r in self.results), default=0)
        return "\n".join([f"{self.kind} {self.subject}", *(r.row(width) for r in self.results), f"  {self.counts}"])

    def _count(self, status: str) -> int:
        return sum(r.status == status for r in self.results)
