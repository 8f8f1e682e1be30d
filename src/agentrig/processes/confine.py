"""Limits a runner's environment variables to a small base and those that its agent declares; API keys are left out."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import translate
from functools import cache
from multiprocessing import forkserver
from typing import Any

BASE = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "PWD", "LANG", "LANGUAGE", "LC_*", "TZ",
    "TMPDIR", "TMP", "TEMP", "XDG_*",
    "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE",
    "PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "DYLD_*",
    "OMP_*", "MKL_*", "OPENBLAS_*", "MALLOC_*", "TOKENIZERS_PARALLELISM", "CUDA_VISIBLE_DEVICES",
    "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_ENDPOINT", "TRANSFORMERS_OFFLINE",
    "LITELLM_LOCAL_MODEL_COST_MAP", "AGENTOPS_TELEMETRY", "AGENTOPS_LOG*", "LANGSMITH_TRACING", "AGENTRIG_*",
)  # fmt: skip
"""Names, or patterns of names, that every runner gets."""

MODEL_KEYS = re.compile(
    r"\b(OPENAI_API_KEY|AZURE_OPENAI_API_KEY|ANTHROPIC_API_KEY|ANTHROPIC_AUTH_TOKEN)\b"
    "|Could not resolve authentication method"  # Anthropic's client names no variable
)
"""Matches an error about the key of a model service whose client has not got the run's endpoint."""

_swap = threading.Lock()
_withheld: frozenset[str] = frozenset()


def declared(names: Iterable[str]) -> dict[str, str]:
    """Return this process's variables that match these names or patterns (`LC_*`)."""
    patterns = tuple(names)
    return {name: value for name, value in os.environ.items() if _matches(name, patterns)}


def withheld(names: Iterable[str]) -> list[str]:
    """Return the names of this process's variables that match neither the base nor these names."""
    patterns = (*BASE, *names)
    return sorted(name for name in os.environ if not _matches(name, patterns))


def confine(names: Iterable[str], values: Mapping[str, str], absent: Iterable[str]) -> None:
    """Remove all environment variables of this runner except the base and those that its agent declares.

    Args:
        values: Variables to set; they replace existing ones.
        absent: Names that the run has and this runner does not get; see `hint`.
    """
    global _withheld
    patterns = (*BASE, *names)
    for name in list(os.environ):
        if not _matches(name, patterns):
            del os.environ[name]
    os.environ.update(values)
    _withheld = frozenset(absent)


def key_advice(text: str) -> str:
    """Return what to do about an error about the key of a model service, as a sentence to stand before it; or ''.

    The agent most likely made a client of its own: with such a key it would call a hosted model, and nothing would be
    trained.
    """
    key = MODEL_KEYS.search(text)
    if key is None or "endpoint.api_key" in text:  # the gateway's answer to a wrong key says it already
        return ""
    other = f" ({key[1]} in AgentSpec.environment is only for another model, which is not trained)" if key[1] else ""
    return (
        "give the agent's client endpoint.base_url and endpoint.api_key, in the function that answers a task, not in "
        f"`build`{other}. "
    )


def hint(text: str) -> str:
    """Return a hint for an error that names a variable of the run that this runner does not get, or ''."""
    if MODEL_KEYS.search(text):  # see `key_advice`
        return ""
    named = [name for name in re.findall(r"[A-Za-z_][A-Za-z0-9_]+", text) if name in _withheld]
    if not named:
        return ""
    return (
        f" (the run has {named[0]}, but a runner gets only the variables that its agent declares: name it in "
        "AgentSpec.environment, or in runners.environment of the run)"
    )


class ConfinedName(str):
    """The name of a process to start, which calls `confine` when it arrives there.

    The name is the first thing that a process gets. So the script that started the run, and the plugins of what the
    process runs, are imported with the variables that they get.
    """

    def __new__(cls, *given: Any) -> ConfinedName:
        """Return the name `runner`."""
        name = super().__new__(cls, "runner")
        name.given = given
        return name

    given: tuple[Any, ...]

    def __reduce__(self) -> Any:
        """Return what makes it in the other process, where it is a plain text."""
        return _arrived, self.given


def _arrived(*given: Any) -> str:
    confine(*given)
    return "runner"


def start_forkserver() -> None:
    """Start the process that runners are forked from, unless it runs, with only the base variables.

    `/proc/PID/environ` of every runner shows this environment, even after the runner deletes variables.
    """
    with _swap, environment({name: None for name in os.environ if not _matches(name, BASE)}):
        forkserver.ensure_running()


@contextmanager
def environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Change variables of this process within this block; None removes one."""
    before = {name: os.environ.get(name) for name in changes}
    _set(changes)
    try:
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return _expression(patterns).match(name) is not None


@cache
def _expression(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(translate, patterns)) or "(?!)")  # an empty one would match every name
