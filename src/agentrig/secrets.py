"""Secrets: settings whose value is read from the environment or a file, and shown nowhere."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from agentrig.text import mask

HOW = 'write {env = "NAME"} for an environment variable, or {file = "PATH"} for a file that holds nothing else'


class Secret:
    """A value that no file, display, message or `repr` shows; only `reveal` returns it.

    It can be pickled, so that the run's runners get the secrets of their agent.

    Args:
        value: The secret itself.
        source: Where it was read from, as in a run file: `{"env": NAME}` or `{"file": PATH}`; empty in tests.
    """

    def __init__(self, value: str, source: Mapping[str, str] | None = None) -> None:
        self._value = value
        self.source = dict(source or {})
        mask(value, str(self))

    @classmethod
    def read(cls, source: Any) -> Secret:
        """Read a secret from the source that a run file names.

        Args:
            source: `{"env": NAME}` or `{"file": PATH}`; a `Secret` is returned unchanged.

        Raises:
            ValueError: It is neither, or there is no value; the message never contains the given value.
        """
        if isinstance(source, Secret):
            return source
        if isinstance(source, Mapping) and set(source) == {"env", "file"}:
            raise ValueError("a secret is named twice, by env and by file, here and in what this builds upon: name one")
        if not isinstance(source, Mapping) or len(source) != 1 or not {"env", "file"} & set(source):
            raise ValueError(f"a secret does not belong into a run file or onto a command line: {HOW}")
        ((kind, where),) = source.items()
        if not isinstance(where, str) or not where:
            raise ValueError(f"{kind} of a secret must be a text: {HOW}")
        if kind == "env":
            value = os.environ.get(where, "").strip()
            if not value:
                raise ValueError(f"the environment variable {where}, which holds the secret, is not set")
            return cls(value, {"env": where})
        path = Path(where).expanduser().absolute()
        try:
            value = path.read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise ValueError(f"the file {path}, which holds the secret, cannot be read: {reason}") from None
        if not value:
            raise ValueError(f"the file {path}, which holds the secret, is empty")
        return cls(value, {"file": str(path)})

    def reveal(self) -> str:
        """Return the value; pass it on, and do not store it."""
        return self._value

    def __reduce__(self) -> tuple[Any, ...]:
        return Secret, (self._value, self.source)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._value == other._value

    def __hash__(self) -> int:
        return hash(self._value)

    def __str__(self) -> str:
        where = " ".join(f"{kind} {name}" for kind, name in self.source.items())
        return f"<secret from {where}>" if where else "<secret>"

    __repr__ = __str__


def sources(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with each secret replaced by its source, as in a run file."""
    return {key: value.source if isinstance(value, Secret) else value for key, value in keys.items()}


TOKENS = ("token", "key", "password", "secret")
"""Parts of the name of a URL's parameter that holds a secret."""


def http_address(config: Any, attribute: Any, url: str) -> None:
    """Reject what is no HTTP address, or holds a login; a validator of `setting`. An empty default is accepted.

    Raises:
        ValueError: It is; the message says how an address is written.
    """
    if not url and attribute.default == "":
        return
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{attribute.name} = {url!r} is no address: write http://HOST:PORT/PATH")
    without_login(config, attribute, url)


def without_login(config: Any, attribute: Any, url: str) -> None:
    """Reject a URL that holds a login: a run writes its settings into its directory.

    Raises:
        ValueError: It has a user, a password, or a parameter such as `write_token`.
    """
    parts = urlsplit(url)
    named = [name for name, _ in parse_qsl(parts.query) if any(word in name.lower() for word in TOKENS)]
    if "@" in parts.netloc or named:
        raise ValueError(
            f"'{attribute.name}' holds a login, and the run directory must not: take it out of the URL, and give it "
            "by the setting for a key, if there is one, or by the environment variables of the client"
        )
