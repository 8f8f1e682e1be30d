"""A task's input as a chat prompt: the probe of a new run, and a lower bound of how long prompts are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from agentrig.tasks import Task
from agentrig_grpo.server.chat import Chat

LOOKED_AT = 64
"""About how many tasks are looked at for long prompts."""


def probe_of(task: Task, tokenizer: Any) -> list[int]:
    """Return the token ids of a task's input as a chat prompt: the probe of a run that has recorded no call yet."""
    text = json.dumps(dict(task.input), ensure_ascii=False, default=str)
    return list(Chat(tokenizer).prompt_ids([{"role": "user", "content": text}]))


def prompts_of(tasks: Sequence[Task], tokenizer: Any) -> list[int]:
    """Return how many tokens the inputs of some of the tasks have as chat prompts: of at most `LOOKED_AT`."""
    return [len(probe_of(task, tokenizer)) for task in tasks[:: max(1, len(tasks) // LOOKED_AT)]]
