"""A program's answer, or the typed failure that it ended with."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrig.errors import AgentFailure
from agentrig.external.config import CommandConfig
from agentrig.external.running import MIB, TOLD, Ending
from agentrig.processes.ends import signal_name
from agentrig.text import DEPTH_LIMIT, cut, json_fault, storable

KINDS: Mapping[str, str] = {
    "time": "deadline",
    "memory": "memory-limit",
    "output": "output-limit",
    "disk": "disk-limit",
    "processes": "process-limit",
}
"""Limit to failure kind."""

NO_CONTAINER = 125
"""Exit code of docker and podman that could not start a container."""


ANSWER_BYTES = 40_000_000
"""Longest answer in a file: `agentrig.runners.attempt.ANSWER_LIMIT` characters of JSON."""

TOO_DEEP = f"nested too deep: at most {DEPTH_LIMIT} lists or objects in one another"


def check_ending(ending: Ending, config: CommandConfig, *, answered: bool) -> None:
    """Raise the failure that a program ended with, if any; one that has answered by a callback may be stopped."""
    last = _end_of_stderr(ending)
    if ending.exceeded in KINDS:
        raise AgentFailure(f"{_excess(ending, config)}, and was ended{last}", kind=KINDS[ending.exceeded])
    if ending.exceeded == "stopped" and answered:
        return
    if ending.status < 0:
        raise AgentFailure(f"the program was killed by {signal_name(-ending.status)}{last}")
    no_container = ending.status == NO_CONTAINER and config.sandbox in ("docker", "podman")
    kind = config.exit_codes.get(str(ending.status), "cannot-start" if no_container else "agent-error")
    if ending.status and kind != "answer":
        raise AgentFailure(f"the program ended with exit code {ending.status}{last}", kind=kind)


def _excess(ending: Ending, config: CommandConfig) -> str:
    match ending.exceeded:
        case "time":
            return f"the program ran longer than time_s = {config.time_s:g}"
        case "processes":
            return f"the program had {ending.observed:g} processes at once, processes = {config.processes}"
        case name:
            limit = {"memory": config.memory_mb, "output": config.output_mb, "disk": config.disk_mb}[name]
            what = {"memory": "used", "output": "wrote to stdout or stderr", "disk": "filled its folder with"}[name]
            return f"the program {what} {ending.observed / MIB:.1f} MiB, {name}_mb = {limit:g}"


def _end_of_stderr(ending: Ending) -> str:
    text = storable(ending.stderr.decode("utf-8", "replace")).strip()
    return f"; the end of its stderr: {text[-TOLD:]}" if text else ""


def from_stdout(data: bytes, *, json_line: bool) -> Any:
    """Return the answer on stdout: all of it as text, or the last line that is JSON.

    Raises:
        LookupError: There is none.
        AgentFailure: It is not UTF-8, or nested too deep; the kind is `bad-answer`.
    """
    text = _text(data, "stdout")
    if not json_line:
        if not text.strip():
            raise LookupError("it wrote nothing to stdout")
        return text.strip("\r\n")
    for line in reversed(text.splitlines()):
        if line.strip():
            try:
                return json.loads(line)
            except RecursionError:
                raise AgentFailure(f"a line of its stdout is {TOO_DEEP}", kind="bad-answer") from None
            except json.JSONDecodeError:
                continue
            except ValueError as error:
                raise AgentFailure(f"a line of its stdout {json_fault(error)}", kind="bad-answer") from None
    shown = cut(storable(text.strip()[-TOLD:]), TOLD)
    raise LookupError(f"no line of its stdout is JSON: {shown!r}" if shown else "it wrote nothing to stdout")


def from_file(folder: Path, name: str) -> Any:
    """Return the answer in a file: JSON if its name says so, else text.

    Raises:
        LookupError: There is no such file.
        AgentFailure: It is not UTF-8, or not JSON; the kind is `bad-answer`.
    """
    data = _read(folder, name)
    if data is None:
        raise LookupError(f"there is no file {name} in its working directory")
    text = _text(data, name)
    if not name.endswith(".json"):
        return text
    try:
        return json.loads(text)
    except RecursionError:
        raise AgentFailure(f"the answer {name} is {TOO_DEEP}", kind="bad-answer") from None
    except ValueError as error:
        raise AgentFailure(f"the answer {name} {json_fault(error)}", kind="bad-answer") from None


def _text(data: bytes, where: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise AgentFailure(
            f"its {where} is not UTF-8: {error.reason} at byte {error.start}", kind="bad-answer"
        ) from None


def none(reason: str, *, required: bool) -> None:
    """Return None for an end without an answer; where one is required, raise `no-answer`."""
    if required:
        raise AgentFailure(f"the program ended without an answer: {reason}", kind="no-answer")


def _read(folder: Path, name: str) -> bytes | None:
    """Return a file of the working directory; None if there is none.

    Only a regular file inside it, of at most `ANSWER_BYTES`, is read: a link would let a program in a sandbox answer
    with a file from outside.
    """
    path = folder / name
    if not path.resolve().is_relative_to(folder) or path.resolve() != path.absolute():
        raise AgentFailure(f"the answer {name} is a link, or is outside the working directory", kind="bad-answer")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise AgentFailure(f"the answer {name} cannot be read: {error.strerror}", kind="bad-answer") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise AgentFailure(f"the answer {name} is no regular file", kind="bad-answer")
    with os.fdopen(descriptor, "rb") as file:  # refuses a folder with an error of its own
        data = file.read(ANSWER_BYTES + 1)
    if len(data) > ANSWER_BYTES:
        raise AgentFailure(f"the answer {name} has more than {ANSWER_BYTES} bytes", kind="bad-answer")
    return data
