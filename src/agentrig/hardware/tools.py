"""Command-line tools of drivers: asked with a deadline, and what became of it in words."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping

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
    """Run a driver's tool; a hanging one (a wedged driver does that) is given up after the deadline."""
    environ = os.environ if environ is None else environ
    path = shutil.which(name, path=environ.get("PATH"))
    if path is None:
        return ToolAnswer(found=False, ok=False, why="not on PATH")
    try:
        done = subprocess.run(
            [path, *arguments], capture_output=True, text=True, timeout=timeout_s, env=dict(environ), check=False
        )
    except subprocess.TimeoutExpired:
        return ToolAnswer(found=True, ok=False, why=f"no answer within {timeout_s:.0f} s")
    except OSError as error:
        return ToolAnswer(found=True, ok=False, why=error.strerror or str(error))
    if done.returncode != 0:
        words = " ".join((done.stderr.strip() or done.stdout.strip()).split())
        return ToolAnswer(
            found=True, ok=False, output=done.stdout, why=f"exit status {done.returncode}: {words[:300]}".rstrip(": ")
        )
    return ToolAnswer(found=True, ok=True, output=done.stdout)
