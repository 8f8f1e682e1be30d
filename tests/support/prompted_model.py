"""A scripted model that answers the tasks of `prompted_plugin`, and reflects; and what runs with it have in common."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prompted_plugin import RULES, right

from agentrig.testing.scripted import LocalServer, QuietHandler

PLUGIN = Path(__file__).with_name("prompted_plugin.py")


def settings(url: str, place: Path, algorithm: str) -> list[str]:
    """Return what all runs with the model have in common."""
    return [
        *("tasks.use=sums", "agent.use=prompted", "reward.use=exact", f"algorithm.use={algorithm}", "hardware.use=cpu"),
        *("server.use=endpoint", f"server.base_url={url}", "server.model=scripted", f"run.plugins=['{PLUGIN}']"),
        *(f"run.directory={place}", "run.name=run", "run.report_tasks=20", "runners.n=1"),
    ]


class Model(LocalServer):
    """Answers by the rules that the prompt names.

    Attributes:
        paid: What each answered request said, in order.
        keys: The keys that requests came with.
        temperatures: Those of reflections.
        answers: What it answers to everything else.
        reflects: What it answers to a request for a better prompt, or for a critique.
        failing: Called with each request before it is paid: True for an answer of status 500, or a number of seconds
            for which the server is away from now on.
    """

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.paid: list[str] = []
        self.keys: set[str] = set()
        self.temperatures: list[Any] = []
        self.answers: Callable[[str], str] = answer
        self.reflects: Callable[[str], Any] = reflect
        self.failing: Callable[[str], bool | float] = lambda said: False
        self.back = 0.0
        self.lock = threading.Lock()


class _Handler(QuietHandler):
    server: Model

    def do_GET(self) -> None:
        if not self._away():
            self.reply(200, {"object": "list", "data": [{"id": "scripted"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        said = "\n".join(message["content"] for message in body["messages"])
        if self._away():
            return
        with self.server.lock:
            failing = self.server.failing(said)
            if not failing:
                self.server.paid.append(said)
        if failing is not True and failing:
            self.server.back = time.monotonic() + failing
            self._away()
            return
        if failing:
            self.reply(500, {"error": {"message": "scripted failure"}})
            return
        self.server.keys.add(self.headers["authorization"])
        if any(words in said for words in REFLECTIONS):
            self.server.temperatures.append(body.get("temperature"))
            text = self.server.reflects(said)
        else:
            text = self.server.answers(said)
        message = {"role": "assistant", "content": text}
        usage = {"prompt_tokens": len(said) // 4, "completion_tokens": len(str(text)) // 4 + 1}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        self.reply(200, {"id": "c", "object": "chat.completion", "model": "m", "choices": [choice], "usage": usage})

    def _away(self) -> bool:
        """Close the connection without an answer, while the server is away."""
        self.close_connection = away = time.monotonic() < self.server.back
        return away


REFLECTIONS = ("Write a better prompt", "What is wrong with the prompt?", "Change the prompt")
"""Words of what `gepa` asks, and of the two questions of `apo`."""


def answer(prompt: str) -> str:
    """Answer right if the prompt has the rule of the task's kind."""
    kind, a, b = re.search(r"(\w+) of (\d+) and (\d+)", prompt).groups()  # type: ignore[union-attr]
    if RULES[kind] not in prompt:
        return "0"
    return right(kind, int(a), int(b))


def reflect(asked: str) -> str:
    """Write a prompt with the rules of the one before, and one more that the feedback names; or say which that is."""
    prompt = re.search(r"```\n(.*?)\n```\n\nThe prompt is", asked, re.S)[1]  # type: ignore[index]
    named = re.findall(r"the rule for (\w+) is (\w+)", asked)
    kind, rule = next((each for each in named if each[1] not in prompt), ("", ""))
    if REFLECTIONS[1] in asked:
        return f"The prompt does not say that the rule for {kind} is {rule}." if rule else "Nothing."
    return f"Here it is:\n```\n{prompt}{f' For {kind}: {rule}.' if rule else ''}\n```"
