"""Checks: functions `check_…(subject)`, listed by kind. pytest and `agentrig validate` run the same list.

The module `agentrig.testing.KIND` has the checks of a kind, in the order in which they run. A check raises
`CheckFailed` or `CheckSkipped`, or it passes; then it may return a fact that the author should know. Its docstring says
what it asks for, why that matters in training ("Why:"), and what to do if it fails ("Cure:").
"""

from __future__ import annotations

import atexit
import inspect
import re
import textwrap
import time
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import attrs

from agentrig.errors import ConfigError, nearest
from agentrig.plugins.loading import told_if_slow
from agentrig.plugins.specs import KINDS
from agentrig.testing.elsewhere import elsewhere
from agentrig.testing.subject import CheckFailed, CheckSkipped, Subject
from agentrig.text import account_of

TRIAL = "play"
"""The checks of an agent with its tasks and its reward; `agentrig validate` runs them."""

Function = Callable[[Any], str | None]


_needs: dict[Function, tuple[Function, ...]] = {}
_basic: list[Any] = []


def basic(function: Function) -> Function:
    """Mark a check that all later checks of its kind need."""
    _basic.append(function)
    return function


def needs(*before: Function) -> Callable[[Function], Function]:
    """Skip a check if one of these checks has not passed."""

    def mark(function: Function) -> Function:
        _needs[function] = before
        return function

    return mark


def check_loads(subject: Subject) -> None:
    """It can be found and built.

    Why: A run with it does not start.
    Cure: Mend what the message names; `agentrig plugins` shows every plugin and its error. What takes long to import
        belongs into `build`.
    """
    if subject.file is not None:  # its code has not run in this process yet, and may end it
        elsewhere(_load, subject.sendable())
    _load(subject)


def _load(subject: Subject) -> None:
    _ = subject.made if subject.builds else subject.config


@attrs.frozen(kw_only=True)
class Check:
    """One check of one component. Call it: it raises `CheckFailed` or `CheckSkipped`, or returns a fact or ''.

    Attributes:
        kind: The kind of component.
        function: What is asked of it.
        subject: The component; None in a list of what there is.
    """

    kind: str
    function: Function = attrs.field(repr=False)
    subject: Any = attrs.field(default=None, repr=False)

    @property
    def name(self) -> str:
        """Kind, dot, words with hyphens: `reward.same-twice`."""
        return f"{self.kind}.{self.function.__name__.removeprefix('check_').replace('_', '-')}"

    @property
    def why(self) -> str:
        """What goes wrong in training without the property."""
        return self._section("Why")

    @property
    def cure(self) -> str:
        """What to do if it fails; a failure may name a better cure."""
        return self._section("Cure")

    def _section(self, title: str) -> str:
        text = inspect.getdoc(self.function) or ""
        found = re.search(rf"^{title}: (.*?)(?=^\w+: |\Z)", text, re.M | re.S)
        return " ".join(found[1].split()) if found else ""

    def __call__(self) -> str:
        """Do the check.

        Raises:
            CheckFailed: The component lacks the property.
            CheckSkipped: The check does not apply, or one that it needs has failed.
        """
        __tracebackhide__ = True  # pytest shows the test and the message, not this function
        found = self._ended()
        if isinstance(found, str):
            return found
        raise found from found.__cause__

    def _ended(self) -> CheckFailed | CheckSkipped | str:
        """Return how the check ended, or its fact; it runs once for each subject."""
        done: dict[Function, CheckFailed | CheckSkipped | str] = self.subject.done
        if self.function not in done:
            done[self.function] = self._needed() or self._run()
        return done[self.function]

    def _needed(self) -> CheckFailed | CheckSkipped | None:
        """Do what the check needs; return what ended it, None if all passed."""
        for function in _before(self.function):
            before = attrs.evolve(self, function=function)
            found = before._ended()
            if isinstance(found, CheckFailed) and function in self.subject.chosen:
                return CheckSkipped(f"it needs {before.name}, which failed")
            if not isinstance(found, str):  # a failure of what nobody asked for is told here
                return found
        return None

    def _run(self) -> CheckFailed | CheckSkipped | str:
        try:
            with told_if_slow(f"doing the check {self.name}"):
                return self.function(self.subject) or ""
        except CheckSkipped as skipped:
            return skipped
        except (Exception, SystemExit) as error:
            own = error if isinstance(error, CheckFailed) else CheckFailed(account_of(error))
            failure = CheckFailed(own.what, _no_file(own.what) or own.cure or self.cure, own.why or self.why, self.name)
            failure.__cause__ = error.__cause__ if own is error else error
            return failure

    def result(self) -> Result:
        """Do the check and return what was found; a failure is not raised."""
        start = time.perf_counter()
        found = self._ended()
        status: Literal["passed", "failed", "skipped"] = "passed"
        if not isinstance(found, str):
            status = "failed" if isinstance(found, CheckFailed) else "skipped"
        return Result(check=self.name, status=status, message=str(found), seconds=time.perf_counter() - start)

    def __str__(self) -> str:
        """Return the name; pytest shows it (`ids=str`)."""
        return self.name


def _no_file(said: str) -> str:
    """Return what to do about the file that an error, also of another process, did not find; '' if it says another."""
    found = re.search(r"FileNotFoundError: \[Errno \d+\] [^:]+: '([^'\n]+)'", said)
    if found is None:
        return ""
    return (
        f"There is no {Path(found[1]).absolute()}: make the file, or call agentrig in the folder where it is. Code "
        "finds a file beside itself from any folder by Path(__file__).with_name(NAME)."
    )


def _before(function: Any) -> list[Function]:
    """Return the checks that a check needs: `loads`, the last basic one above it, and those that it names itself."""
    if function is check_loads:
        return []
    line = function.__code__.co_firstlineno
    above = [f for f in _basic if f.__module__ == function.__module__ and f.__code__.co_firstlineno < line]
    return [check_loads, *above[-1:], *_needs.get(function, ())]


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

    def __str__(self) -> str:
        first, _, rest = self.message.removeprefix(f"{self.check}: ").partition("\n")
        row = f"  {self.status:<8} {self.check:<26} {self.seconds:5.2f} s  {first}".rstrip()
        return f"{row}\n{textwrap.indent(rest, ' ' * 11)}" if rest else row


@attrs.frozen(kw_only=True)
class Report:
    """What the checks of one component found; `str(report)` has a line for each.

    Attributes:
        kind: The kind of component.
        subject: Its name.
        results: One for each check, in the order in which they ran.
    """

    kind: str
    subject: str
    results: Sequence[Result]

    @property
    def failed(self) -> list[Result]:
        """The checks that failed; a skipped check is no failure."""
        return [r for r in self.results if r.status == "failed"]

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return not self.failed

    def __str__(self) -> str:
        return "\n".join([f"{self.kind} {self.subject}", *map(str, self.results), self.counts])

    @property
    def counts(self) -> str:
        """How many checks passed, failed and were skipped."""
        found = [r.status for r in self.results]
        return "  " + ", ".join(f"{found.count(s)} {s}" for s in ("passed", "failed", "skipped") if s in found)


def declared(kind: str) -> list[Check]:
    """Return the checks of a kind, in order, without a subject.

    Raises:
        ConfigError: There are no checks of that kind.
    """
    if kind not in (*KINDS, TRIAL):
        raise ConfigError(f'there are no checks of a "{kind}".{nearest(kind, KINDS)} Kinds: {", ".join(KINDS)}')
    module = f"agentrig.testing.{kind}"
    own = [f for f in vars(import_module(module)).values() if getattr(f, "__module__", "") == module]
    functions = [check_loads, *(f for f in own if f.__name__.startswith("check_"))]
    return [Check(kind=kind, function=function) for function in functions]


def subject_class(kind: str) -> type[Subject]:
    """Return the class whose fields are the options of a kind's checks, and on which they call."""
    found: type[Subject] = getattr(import_module(f"agentrig.testing.{kind}"), f"{kind.capitalize()}Subject")
    return found


def options_of(kind: str) -> list[str]:
    """Return the names of the options of a kind's checks."""
    common = {f.name for f in attrs.fields(Subject)}
    return [f.name for f in attrs.fields(subject_class(kind)) if f.init and f.name not in common]


def checks(
    kind: str, subject: Any, *, settings: Any = None, only: Sequence[str] | None = None, **options: Any
) -> list[Check]:
    """Return the checks of a component, for `pytest.mark.parametrize`. The component is loaded by the first one.

    Args:
        kind: The component's kind: `reward`, `agent` …
        subject: The name of an installed component, `FILE.py:name`, its spec, or the component itself.
        settings: Its keys, as in a run file.
        only: Names of checks, with or without the kind, or patterns (`same-*`); None for all.
        options: The options of this kind's checks (docs/tutorials/publish-it.md).

    Raises:
        ConfigError: There is no such kind, check or option.

    Example:
        ```python
        @pytest.mark.parametrize("check", checks("reward", "my-reward"), ids=str)
        def test_reward(check):
            check()
        ```
    """
    every = declared(kind)
    if not isinstance(subject, Subject):
        known = options_of(kind)
        for name in options.keys() - known:
            raise ConfigError(
                f"the checks of {kind} have no option {name!r}.{nearest(name, known)}\n"
                f"  their options: {', '.join(known) or 'none'}"
            )
        subject = subject_class(kind)(kind=kind, given=subject, settings=settings, **options)
        atexit.register(subject.close)  # pytest calls the checks one by one: nobody says when the last one has ended
    for wanted in ["*"] if only is None else only:
        pattern = wanted if wanted.startswith(f"{kind}.") else f"{kind}.{wanted}"
        found = {each.function for each in every if fnmatchcase(each.name, pattern)}
        if not found:
            short = [each.name.removeprefix(f"{kind}.") for each in every]
            raise ConfigError(
                f"the checks of {kind} have none called {wanted!r}.{nearest(wanted, short)}\n"
                f"  they are: {', '.join(short)}"
            )
        subject.chosen |= found
    return [attrs.evolve(each, subject=subject) for each in every if each.function in subject.chosen]


def check(
    kind: str, subject: Any, *, raise_failed: bool = True, say: Callable[[str], None] | None = None, **more: Any
) -> Report:
    """Run the checks of a component and return the report.

    Args:
        kind: The component's kind; `subject` and `more` are the arguments of `checks`.
        raise_failed: Whether failed checks raise `CheckFailed`, with the whole report.
        say: Gets the lines of the report one by one, each as soon as it is known.

    Raises:
        CheckFailed: A check failed.
        ConfigError: There is no such kind, check or option.
    """
    found, results = checks(kind, subject, **more), []
    of, tell = found[0].subject, say or (lambda line: None)
    tell(f"{kind} {of}")
    try:
        for each in found:
            results.append(each.result())
            tell(str(results[-1]))
    finally:
        if of is not subject:
            of.close()
    report = Report(kind=kind, subject=str(of), results=results)
    tell(f"{report.counts}\n")
    if raise_failed and report.failed:
        raise CheckFailed(str(report))
    return report
