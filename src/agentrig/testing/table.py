"""Tables: the checks of one kind of component, declared one by one, and made for a subject."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from typing import Any, Generic, TypeVar

import attrs

from agentrig.errors import ConfigError, nearest
from agentrig.testing.checks import Check, CheckSkipped, Report
from agentrig.testing.elsewhere import elsewhere
from agentrig.testing.subject import Subject, subject_of

LOADS_S = 120.0
"""Seconds that a plugin file may take to load and to build."""

LOADS = "loads"
"""The first check of every kind; without it no other check can run."""


@attrs.define(kw_only=True, eq=False, slots=False)
class Bench:
    """What the checks of one subject share. A kind's own bench adds its options as fields.

    Attributes:
        subject: The component under test.
    """

    subject: Subject
    _done: dict[str, BaseException | str] = attrs.field(factory=dict, init=False)
    _open: ExitStack = attrs.field(factory=ExitStack, init=False)

    @property
    def made(self) -> Any:
        """The component, built once and shared by the checks."""
        return self.subject.made

    def holding(self, context: Any) -> Any:
        """Enter a context that stays open until the process ends or `close` is called; return what it gives."""
        return self._open.enter_context(context)

    def close(self) -> None:
        """Close what the checks have opened."""
        self._open.close()


B = TypeVar("B", bound=Bench)


@attrs.frozen(kw_only=True)
class Declared(Generic[B]):
    """A check before it has a subject; see `Check` for the attributes."""

    name: str
    why: str
    cure: str
    needs: Sequence[str]
    run: Callable[[B], str | None]


class Table(Generic[B]):
    """The checks of one kind.

    Args:
        kind: The kind of component.
        bench: The class of what the checks of a subject share; its fields are the options of the kind's checks.
        builds: Whether the check `loads` also builds the component.

    Example:
        ```python
        TABLE = Table("reward", RewardBench)

        @TABLE.check("same-twice", why="The gradient is noise.", cure="Seed it from task.id.")
        def same_twice(bench: RewardBench) -> None:
            if bench.score() != bench.score():
                raise CheckFailed("two calls gave 0.2 and 0.7")
        ```
    """

    def __init__(self, kind: str, bench: type[B], *, builds: bool = True) -> None:
        self.kind, self.bench = kind, bench
        self._declared: dict[str, Declared[B]] = {}

        def loads(bench: B) -> None:
            if bench.subject.file is not None:  # its code has not run in this process yet, and may end it
                elsewhere(_loaded_there, bench.subject.sendable(), builds, deadline_s=LOADS_S)
            _ = bench.made if builds else bench.subject.config

        self._add(
            LOADS,
            loads,
            why="A run with it does not start.",
            cure="Mend what the message names; `agentrig plugins` shows every plugin and its error. What takes long to "
            "import belongs into `build`.",
        )

    def check(
        self, name: str, *, why: str, cure: str, needs: Sequence[str] = ()
    ) -> Callable[[Callable[[B], str | None]], Callable[[B], str | None]]:
        """Declare a check: a function that gets the bench, and raises `CheckFailed` or `CheckSkipped`.

        It may return a fact: what the author should know, though it is no fault.

        Args:
            name: Words with hyphens; the kind is put before it.
            why: What goes wrong in training without this property.
            cure: What to do; a `CheckFailed` with a cure of its own replaces it.
            needs: Names of checks that must pass first; if one does not, this check is skipped.
        """

        def declare(run: Callable[[B], str | None]) -> Callable[[B], str | None]:
            self._add(name, run, why=why, cure=cure, needs=(LOADS, *needs))
            return run

        return declare

    def _add(
        self, name: str, run: Callable[[B], str | None], *, why: str, cure: str, needs: Sequence[str] = ()
    ) -> None:
        full = f"{self.kind}.{name}"
        unknown = [n for n in needs if f"{self.kind}.{n}" not in self._declared]
        if full in self._declared or unknown:
            raise ValueError(f"the check {full} is declared twice, or needs what is declared later: {unknown}")
        asks = tuple(f"{self.kind}.{n}" for n in needs)
        self._declared[full] = Declared(name=full, why=why, cure=cure, needs=asks, run=run)

    def __iter__(self) -> Iterator[Declared[B]]:
        """Yield the declared checks, in order."""
        return iter(self._declared.values())

    def open(self, given: Any, settings: Any, options: dict[str, Any]) -> B:
        """Return the bench of a subject.

        Raises:
            ConfigError: An option that this kind does not have.
        """
        known = [f.name for f in attrs.fields(self.bench) if f.init and f.name != "subject"]
        for name in options:
            if name not in known:
                raise ConfigError(
                    f"the checks of a {self.kind} have no option {name!r}.{nearest(name, known)}\n"
                    f"  their options: {', '.join(known) or 'none'}"
                )
        return self.bench(subject=subject_of(self.kind, given, settings), **options)

    def check_all(
        self,
        given: Any,
        settings: Any,
        only: Sequence[str] | None,
        raise_failed: bool,
        options: dict[str, Any],
        say: Callable[[str], None] | None = None,
    ) -> Report:
        """Run the checks of a subject, in order, and close what they opened.

        Args:
            given: What finds the component; see `agentrig.testing.checks`.
            settings: Its keys.
            only: Names of checks; None for all.
            raise_failed: Whether a failed check raises.
            options: Of this kind's checks.
            say: Gets the lines of the report's table one by one, each as soon as it is known.

        Raises:
            ChecksFailed: A check failed, and `raise_failed` is True.
            ConfigError: There is no such check or option.
        """
        bench = self.open(given, settings, options)
        try:
            report = self.report(bench, only, say)
        finally:
            bench.close()
        if raise_failed:
            report.raise_failed()
        return report

    def report(self, bench: B, only: Sequence[str] | None, say: Callable[[str], None] | None = None) -> Report:
        """Run the checks of a bench, in order; see `check_all`."""
        checks, results = self.made(bench, only), []
        width = max((len(check.name) for check in checks), default=0)
        tell = say if say is not None and checks else lambda line: None
        tell(f"{self.kind} {bench.subject}")
        for check in checks:
            results.append(check.result())
            tell(results[-1].row(width))
        report = Report(kind=self.kind, subject=str(bench.subject), results=results)
        tell(f"  {report.counts}\n")
        return report

    def made(self, bench: B, only: Sequence[str] | None = None) -> list[Check]:
        """Return the checks of a bench.

        Args:
            bench: From `open`.
            only: Names of checks, with or without the kind, or patterns (`same-*`); None for all.

        Raises:
            ConfigError: A name that no check has.
        """
        if only is not None:
            short = [name.partition(".")[2] for name in self._declared]
            for wanted in only:
                if not any(_matches(name, wanted) for name in self._declared):
                    raise ConfigError(
                        f"the checks of a {self.kind} have none called {wanted!r}.{nearest(wanted, short)}\n"
                        f"  they are: {', '.join(short)}"
                    )
        chosen = [d for d in self if only is None or any(_matches(d.name, wanted) for wanted in only)]
        return [Check(name=d.name, why=d.why, cure=d.cure, run=self._runner(d, bench)) for d in chosen]

    def _runner(self, declared: Declared[B], bench: B) -> Callable[[], str]:
        def run() -> str:
            found = bench._done[declared.name] = self._attempt(declared, bench)
            if isinstance(found, BaseException):
                raise found
            return found

        return run

    def _attempt(self, declared: Declared[B], bench: B) -> BaseException | str:
        """Run a check and return its error, or its fact; what it needs runs once for each bench."""
        for name in declared.needs:
            if name not in bench._done:
                bench._done[name] = self._attempt(self._declared[name], bench)
            error = bench._done[name]
            if isinstance(error, BaseException):
                return error if isinstance(error, CheckSkipped) else CheckSkipped(f"it needs {name}, which failed")
        try:
            return declared.run(bench) or ""
        except (Exception, SystemExit) as error:
            return error


def _loaded_there(subject: Subject, builds: bool) -> None:
    """Load and build in the other process."""
    _ = subject.made if builds else subject.config


def _matches(name: str, wanted: str) -> bool:
    return fnmatchcase(name, wanted) or fnmatchcase(name.partition(".")[2], wanted)
