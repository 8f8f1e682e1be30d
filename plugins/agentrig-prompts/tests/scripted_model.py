"""The scripted model of the tests: it answers the tasks of `prompted_plugin`, and reflects.

    python scripted_model.py PORT LOG

LOG gets a line for each answer: it counts what was paid, beyond the life of a run.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from pathlib import Path

from prompted_plugin import RULES

from agentrig.testing.scripted import LocalServer, QuietHandler


class Model(LocalServer):
    """Answers by the rules that the prompt names.

    Attributes:
        paid: What each answered request said, in order.
        reflects: A function of the request of a reflection, in the place of the scripted one.
        fails: How many of the next requests get status 500.
        delay_s: Seconds before each answer.
    """

    def __init__(self, port: int = 0, log: Path | None = None) -> None:
        super().__init__(_Handler, port)
        self.paid: list[str] = []
        self.log, self.lock = log, threading.Lock()
        self.reflects = reflect
        self.fails = 0
        self.delay_s = 0.0


class _Handler(QuietHandler):
    server: Model

    def do_GET(self) -> None:
        self.reply(200, {"object": "list", "data": [{"id": "scripted"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        said = body["messages"][-1]["content"]
        time.sleep(self.server.delay_s)
        with self.server.lock:
            failing = self.server.fails > 0
            self.server.fails -= failing
            if not failing:
                self.server.paid.append(said)
                if self.server.log is not None:
                    with self.server.log.open("a") as file:
                        file.write(json.dumps(said) + "\n")
        if failing:
            self.reply(500, {"error": {"message": "scripted failure"}})
            return
        text = self.server.reflects(said) if "Write a better prompt" in said else answer(said)
        message = {"role": "assistant", "content": text}
        usage = {"prompt_tokens": len(said) // 4, "completion_tokens": len(text) // 4 + 1}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        self.reply(
            200, {"id": "c", "object": "chat.completion", "model": "scripted", "choices": [choice], "usage": usage}
        )


def answer(prompt: str) -> str:
    """Answer right if the prompt has the rule of the task's kind."""
    kind, a, b = re.search(r"(\w+) of (\d+) and (\d+)", prompt).groups()  # type: ignore[union-attr]
    if RULES[kind] not in prompt:
        return "0"
    a, b = int(a), int(b)
    return str({"sum": a + b, "product": a * b, "difference": a - b, "largest": max(a, b)}[kind])


def reflect(asked: str) -> str:
    """Write a prompt with the rules of the one before, and one more that the feedback names."""
    prompt = re.search(r"```\n(.*?)\n```", asked, re.S)[1]  # type: ignore[index]
    named = re.findall(r"the rule for (\w+) is (\w+)", asked)
    new = next((f" For {kind}: {rule}." for kind, rule in named if rule not in prompt), "")
    return f"Here it is:\n```\n{prompt}{new}\n```"


if __name__ == "__main__":
    Model(int(sys.argv[1]), Path(sys.argv[2])).serve_forever()
