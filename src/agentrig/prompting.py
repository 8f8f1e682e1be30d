"""Prompts that an agent declares: templates by name, which a run may replace, and an algorithm may improve."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from string import Formatter
from typing import Any

from agentrig.errors import ConfigError, nearest
from agentrig.text import json_fault
from agentrig.traces import mapping

PROMPTS_FILE = "prompts.json"
"""The file of a run directory with the prompts that an algorithm found: an object with `prompts`, name to template."""

_in_force: ContextVar[Mapping[str, str]] = ContextVar("agentrig-prompts")


def prompts(defaults: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the prompts in force in this rollout, name to template.

    Args:
        defaults: What holds outside of a rollout, as in a test of the agent; the same as `AgentSpec.prompts`.

    Example:
        ```python
        PROMPTS = {"system": "Answer the question {question} with one word."}

        def agent(task_input, endpoint):
            system = agentrig.prompts(PROMPTS)["system"].format(question=task_input["question"])
        ```
    """
    return {**(defaults or {}), **_in_force.get({})}


@contextmanager
def prompted(templates: Mapping[str, str]) -> Iterator[None]:
    """Let `prompts` return these templates in this context, and in threads that copy it."""
    before = _in_force.set(templates)
    try:
        yield
    finally:
        _in_force.reset(before)


def fields(template: str) -> frozenset[str]:
    """Return the fields of a template, as `str.format` reads it: `{question}`, `{task.id}`; `{{` is a plain brace.

    Raises:
        ValueError: It is no template: a brace is open, or a field has no name.
    """
    found: set[str] = set()
    for _, name, spec, _ in Formatter().parse(template):
        if name is None:
            continue
        if not name or name[0].isdigit():
            raise ValueError(f"its field {{{name}}} has no name; write a brace that is text twice: {{{{ }}}}")
        found |= {name, *fields(spec or "")}
    return frozenset(found)


def misfit(template: Any, like: str | None) -> str:
    """Return why a text can't take the place of a template, '' if it can.

    Args:
        like: The template that the agent declares; None if it declares none.
    """
    if not isinstance(template, str) or not template.strip():
        return "it is no text" if not isinstance(template, str) else "it is empty"
    try:
        has = fields(template)
    except ValueError as error:
        return f"it is no template: {error}"
    wanted = has if like is None else fields(like)
    wrong = [f"it lacks the field {{{name}}}" for name in sorted(wanted - has)]
    wrong += [f"it has a field {{{name}}}, which the agent does not fill" for name in sorted(has - wanted)]
    return "; ".join(wrong)


def checked(given: Mapping[str, Any], declared: Mapping[str, str] | None, *, agent: str) -> dict[str, str]:
    """Return the prompts in force: those that the agent declares, with those of the run file in their place.

    Args:
        given: Section `[prompts]`.
    """
    for name, template in given.items():
        if declared is not None and name not in declared:
            has = f"It has: {', '.join(declared)}" if declared else "It declares none (AgentSpec.prompts)"
            raise ConfigError(f"[prompts] agent {agent} has no prompt {name}.{nearest(name, declared)} {has}")
        if why := misfit(template, declared[name] if declared is not None else None):
            raise ConfigError(f"[prompts] {name}: {why}")
    return {**(declared or {}), **given}


_FORM = 'it must hold {"prompts": {NAME: TEMPLATE}}'


def read_prompts(path: Path) -> dict[str, Any]:
    """Return the prompts of a run directory that an algorithm found, or of such a file."""
    file = path / PROMPTS_FILE if path.is_dir() else path
    try:
        found = mapping(json.loads(file.read_text("utf-8"))).get("prompts")
    except FileNotFoundError:
        raise ConfigError(f"there is no {file}: name the run directory of an algorithm that finds prompts") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} {json_fault(error)}; {_FORM}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{file} {'has no prompts' if found is None else 'has prompts of another form'}; {_FORM}")
    return found
