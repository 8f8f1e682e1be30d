"""Runs drivers' command-line tools with a timeout, and describes failures."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import attrs


@attrs.frozen(kw_only=True)
class ToolAnswer:
    """What a tool answered.

    Attributes:
        found: It is on PATH.
        ok: It ended with exit status 0.
        output: What it wrote to stdout.
        why: Why it is not `ok`, in a few words; empty otherwise.
    """

    found: bool
    ok: bool
    output: str = ""
    why: str = ""


def run_tool(
    name: str, *arguments: str, environ: Mapping[str, str] | None = None, timeout_s: float = 20.0
) -> ToolAnswer:
    """Run a driver's tool; one that hangs (for example because of a stuck driver) is killed at the timeout."""
    path = shutil.which(name, path=(os.environ if environ is None else environ).get("PATH"))
    if path is None:
        return ToolAnswer(found=False, ok=False, why="not on PATH")
    done = _ran([path, *arguments], environ, timeout_s)
    if isinstance(done, str):
        return ToolAnswer(found=True, ok=False, why=done)
    if done.returncode != 0:
        words = " ".join((done.stderr.strip() or done.stdout.strip()).split())
        return ToolAnswer(
            found=True, ok=False, output=done.stdout, why=f"exit status {done.returncode}: {words[:300]}".rstrip(": ")
        )
    return ToolAnswer(found=True, ok=True, output=done.stdout)


@attrs.frozen(kw_only=True)
class ToolOutput:
    """What a process answered.

    Attributes:
        ok: It ended well and printed JSON.
        data: That JSON; empty when not `ok`.
        error: The last lines of what it wrote to stderr; empty when `ok`.
    """

    ok: bool
    data: Mapping[str, Any] = attrs.field(factory=dict)
    error: str = ""

    @property
    def reason(self) -> str:
        """The exception that ended it and, where that hides another, the first one of the chain."""
        lines = [line.strip() for line in self.error.splitlines() if line.strip()]
        raised = [line for line in lines if re.match(r"[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt)\b", line)]
        if not raised:
            return lines[-1] if lines else ""
        return raised[-1] if raised[0] == raised[-1] else f"{raised[-1]} <- {raised[0]}"


def ask(code: str, *arguments: str, environ: Mapping[str, str] | None = None, timeout_s: float = 180.0) -> ToolOutput:
    """Run Python code in a fresh interpreter; its last line on stdout must be a JSON object.

    The program sees `arguments` as `sys.argv[1:]`; without `environ` it has the environment of this process. Importing
    torch and vLLM from a cold disk takes a minute.
    """
    done = _ran([sys.executable, "-P", "-c", code, *arguments], environ, timeout_s)
    if isinstance(done, str):
        return ToolOutput(ok=False, error=done)
    if done.returncode != 0:
        killed = f"ended by signal {-done.returncode}" if done.returncode < 0 else f"exit status {done.returncode}"
        return ToolOutput(ok=False, error=done.stderr[-4000:] or killed)
    try:
        return ToolOutput(ok=True, data=json.loads(done.stdout.strip().splitlines()[-1]))
    except (IndexError, json.JSONDecodeError):
        return ToolOutput(ok=False, error=f"it printed no JSON: {done.stdout[-300:]!r}")


def _ran(
    words: list[str], environ: Mapping[str, str] | None, timeout_s: float
) -> subprocess.CompletedProcess[str] | str:
    """Run a command; return why it has no result if it has none."""
    variables = None if environ is None else dict(environ)
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, env=variables, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer within {timeout_s:.0f} s"
    except OSError as error:
        return error.strerror or str(error)
