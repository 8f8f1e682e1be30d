"""Which environment variables a runner gets: a small base and what its agent declares; keys of the run stay outside."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from multiprocessing import forkserver

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

RAY = ("RAY_*",)
"""What a runner in a Ray actor gets beside these: Ray itself needs it."""

_swap = threading.Lock()
_withheld: frozenset[str] = frozenset()


def declared(names: Iterable[str]) -> dict[str, str]:
    """Return the variables of this process whose names are among these names or patterns (`LC_*`)."""
    patterns = tuple(names)
    return {name: value for name, value in os.environ.items() if _matches(name, patterns)}


def withheld(names: Iterable[str]) -> list[str]:
    """Return the names of this process's variables that a runner does not get, beside the base and these."""
    patterns = (*BASE, *names)
    return sorted(name for name in os.environ if not _matches(name, patterns))


def confine(names: Iterable[str], values: Mapping[str, str], absent: Iterable[str]) -> None:
    """Leave this process, a runner, only the base and what its agent declares.

    Args:
        names: Names or patterns that the agent declares.
        values: Variables to set, over what is there.
        absent: Names that the run has and this runner does not get; see `hint`.
    """
    global _withheld
    patterns = (*BASE, *names)
    for name in list(os.environ):
        if not _matches(name, patterns):
            del os.environ[name]
    os.environ.update(values)
    _withheld = frozenset(absent)


def hint(text: str) -> str:
    """Return what to add to an error that names a variable which the run has and this runner does not get, or ''."""
    named = [name for name in re.findall(r"[A-Za-z_][A-Za-z0-9_]+", text) if name in _withheld]
    if not named:
        return ""
    return (
        f" (the run has {named[0]}, but a runner gets only the variables that its agent declares: name it in "
        "AgentSpec.environment, or in runners.environment of the run)"
    )


def start_forkserver() -> None:
    """Start the process that runners are forked from, if it does not run, with the base alone.

    Its environment is what `/proc/PID/environ` of every runner shows, whatever the runner deletes later.
    """
    with _swap:
        kept = dict(os.environ)
        try:
            for name in kept:
                if not _matches(name, BASE):
                    del os.environ[name]
            forkserver.ensure_running()
        finally:
            os.environ.update({name: value for name, value in kept.items() if name not in os.environ})


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
