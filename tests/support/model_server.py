"""The model of the toy tasks: the kit's scripted server, which the last message can change.

`[status=503]`, `[sleep=0.5]`, `[no-ids]`, `[break=3]`, `[reply=SELECT 1]`. Token ids are the bytes of the messages'
contents and of the reply.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from agentrig.testing.scripted import Reply, ScriptedServer, serving

WISH = re.compile(r"\[([a-z-]+)(?:=([^\]]*))?\]")


def wished(body: Mapping[str, Any]) -> Reply:
    """Answer `odd`, unless the last message wishes something else."""
    content = body["messages"][-1]["content"]
    wishes = dict(WISH.findall(content if isinstance(content, str) else json.dumps(content)))
    status = int(wishes.get("status", 200))
    return Reply(
        text=f"asked for {status}" if status >= 400 else wishes.get("reply", "odd"),
        status=status,
        delay_s=float(wishes.get("sleep", 0)),
        breaks_after=int(wishes["break"]) if "break" in wishes else None,
        token_ids="no-ids" not in wishes,
    )


class ModelServer(ScriptedServer):
    def __init__(self) -> None:
        super().__init__(wished, model="toy-model")

    def prompt_ids(self, body: Mapping[str, Any]) -> list[int]:
        return list("".join(str(m["content"]) for m in body["messages"]).encode())

    def logprob(self, token: int, position: int) -> float:
        return -0.25


def model_server() -> AbstractContextManager[ModelServer]:
    return serving(ModelServer())
