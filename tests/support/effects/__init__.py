"""The effect of each key of a run file: two values, and the difference that must be observed.

A table lists the keys of one component. `Flip` gives a key two values, observes the component with each, and states
how the two observations must differ. The same rule must refuse two equal observations: a key without an effect
cannot pass.
"""

from __future__ import annotations

import ast
import atexit
import inspect
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import attrs

from agentrig.plan import OWN_SECTIONS
from agentrig.plugins.loading import load
from agentrig.plugins.registry import Registry
from agentrig.plugins.specs import RUN_KINDS
from agentrig.pools import RunnerSettings
from agentrig.settings import structure

ROOT = Path(__file__).parents[3]
Settings = Mapping[str, Any]


@attrs.frozen(kw_only=True)
class Flip:
    """Two values of a key, and what they change.

    Attributes:
        a: The first value.
        b: The second value.
        look: Gets a component's settings, and returns what was observed with them.
        shows: Whether the observations with `a` and `b` differ as the key's help says.
        beside: Further settings of that component, the same for both values.
    """

    a: Any
    b: Any
    look: Callable[[Settings], Any]
    shows: Callable[[Any, Any], bool]
    beside: Settings = attrs.field(factory=dict)

    def check(self, place: str, key: str) -> None:
        """Try both values; raise `AssertionError` if the key has no effect, or another one than its help says."""
        config = configs()[place]
        for value in (self.a, self.b):
            structure(config, {**self.beside, key: value}, owner=place, section=place.split(".")[0])
        first, second = (self.look({**self.beside, key: value}) for value in (self.a, self.b))
        for seen in (first, second):
            assert not self.shows(seen, seen), f"{place} {key}: this test would pass for a key without an effect"
        assert self.shows(first, second), (
            f"{place} {key} does not do what it says ({attrs.fields_dict(config)[key].metadata['help']}).\n"
            f"  {key} = {self.a!r}: {first!r:.500}\n  {key} = {self.b!r}: {second!r:.500}"
        )


def exact(a: Any, b: Any, look: Callable[[Settings], Any], seen: Any = None, beside: Settings | None = None) -> Flip:
    """Return the entry of a key whose observations are known: the two of `seen`, or else the values themselves."""
    return Flip(a=a, b=b, look=look, shows=lambda one, other: (one, other) == (seen or (a, b)), beside=beside or {})


@attrs.frozen
class Elsewhere:
    """A key whose effect cannot be observed here.

    Attributes:
        test: The test that shows it: `FILE::FUNCTION`, from the root of the repository.
        reason: Why it cannot be observed here.
    """

    test: str
    reason: str

    def check(self, place: str, key: str) -> None:
        """Raise `AssertionError` if there is no such test, or it doesn't name the key."""
        file, _, name = self.test.partition("::")
        tree = ast.parse((ROOT / file).read_text("utf-8"))
        found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
        assert found, f"{place} {key}: there is no test {self.test}"
        text = ast.unparse(found[0])
        text += "".join(
            ast.unparse(n) for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) in text
        )
        assert key in text, f"{place} {key}: neither {self.test} nor its table names it"
        assert self.reason


def shown_by(file: str, tests: Mapping[str, Iterable[str]], reason: str = "it has a test") -> dict[str, Elsewhere]:
    """Return the entries of keys that tests of a file show, by key."""
    return {key: Elsewhere(f"{file}::{test}", reason) for test, keys in tests.items() for key in keys}


def free_port(host: str = "127.0.0.1") -> int:
    with socket.create_server((host, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@attrs.frozen
class Inherited:
    """A key that a component has from a class of settings which it shares with another one, as it shares what reads it.

    Attributes:
        other: The other component's place, whose entry shows the effect.
    """

    other: str

    def check(self, place: str, key: str) -> None:
        """Raise `AssertionError` if the two don't share the class, or what is built of it."""
        mine, theirs = configs()[place], configs()[self.other]
        owners = [next(c for c in config.__mro__ if key in inspect.get_annotations(c)) for config in (mine, theirs)]
        assert owners[0] is owners[1] is not mine, f"{place} {key}: it is not that of {self.other}"
        kind = place.split(".")[0]
        builds = [registry().find(kind, each.split(".")[1]).spec.build for each in (place, self.other)]  # type: ignore[attr-defined]
        assert builds[0] is builds[1], f"{place} {key}: it builds something else than {self.other}"


class Together:
    """Keys that share a set-up, which runs twice: with every key's first value and with every key's second value.

    Args:
        run: Gets the settings, and returns the result that all looks use.
        base: Settings of both runs.
    """

    def __init__(self, run: Callable[[Settings], Any], base: Settings | None = None) -> None:
        self._run = cache(lambda second: run({**(base or {}), **{k: v[second] for k, v in self._keys.items()}}))
        self._keys: dict[str, tuple[Any, Any]] = {}

    def flip(self, key: str, a: Any, b: Any, look: Callable[[Any], Any], shows: Callable[[Any, Any], bool]) -> Flip:
        """Return the entry of one key; `look` gets the run's result."""
        self._keys[key] = (a, b)

        def looked(settings: Settings) -> Any:
            return look(self._run(int(settings[key] != a)))

        return Flip(a=a, b=b, look=looked, shows=shows)

    def exact(self, key: str, a: Any, b: Any, look: Callable[[Any], Any], seen: Any = None) -> Flip:
        """As the function of this name."""
        return self.flip(key, a, b, look, lambda one, other: (one, other) == (seen or (a, b)))


@cache
def folder() -> Path:
    """Return a folder for the files of looks; it is removed with this process."""
    made = Path(tempfile.mkdtemp(prefix="agentrig-effects-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


@cache
def registry() -> Registry:
    return load(block=[], files=[])


def first_party() -> set[str]:
    """Return the distributions of this repository: the core's, and one for each folder of `plugins/`."""
    return {"agentrig", *(folder.name for folder in (ROOT / "plugins").iterdir() if folder.is_dir())}


@cache
def configs() -> dict[str, type]:
    """Return the config class of each section of the run's own and of each first-party component."""
    found: dict[str, type] = dict(OWN_SECTIONS)
    for kind in RUN_KINDS:
        for component in registry().components(kind):
            if component.distribution in first_party():
                found[f"{kind}.{component.spec.name}"] = component.spec.config
    return found


def config_of(place: str, settings: Settings) -> Any:
    """Return a component's config object, as a run file with these settings has it."""
    return structure(configs()[place], settings, owner=place, section=place.split(".")[0])


def keys() -> set[tuple[str, str]]:
    """Return all keys: section or component, and name; those of all runners only once, under the section."""
    common = attrs.fields_dict(RunnerSettings)
    return {
        (place, name)
        for place, config in configs().items()
        for name in attrs.fields_dict(config)
        if not (place.startswith("runners.") and name in common)
    }
