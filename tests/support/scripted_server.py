"""A scripted OpenAI-compatible server for the examples of Agent Lightning: the same request gets the same reply.

It stands in for the models only. Every reply is a function of the request, so two runs that ask the same get the same
answers, and the requests that the server has seen can be compared.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from agentrig.testing.scripted import LocalServer, QuietHandler, serving

VERSION = re.compile(r"\[v(\d+)\]")
BEST_VERSION = 2
"""The prompt of this version makes the room selector right; versions before and after make it wrong more often."""

ROOM_PROMPT = (
    "[v{version}] Find a room on {{date}} at {{time}} for {{duration_min}} minutes, {{attendees}} attendees. "
    "Needs: {{needs}}. Accessible required: {{accessible_required}}"
)


class ScriptedServer(LocalServer):
    """Answers by its script.

    Args:
        script: `sql` maps a question to the queries of the first answer and of the rewrite; `calculator` maps a
            question to the expression that the model sends to the calculator.

    Attributes:
        requests: The body of each request, in the order of arrival.
    """

    def __init__(self, script: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(_Handler)
        self.script = script
        self.requests: list[dict[str, Any]] = []


class _Handler(QuietHandler):
    server: ScriptedServer

    def do_GET(self) -> None:
        self.reply(200, {"object": "list", "data": [{"id": "scripted", "object": "model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.requests.append(body)
        message = {"role": "assistant", "content": None, **reply(body, self.server.script)}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if "tool_calls" in message else "stop"}
        prompt = "".join(_text(m.get("content")) for m in body["messages"])
        ids = list(_text(message["content"]).encode())
        found = {
            "id": f"chatcmpl-{len(self.server.requests)}",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "choices": [choice],
            "usage": {
                "prompt_tokens": len(prompt),
                "completion_tokens": len(ids),
                "total_tokens": len(prompt) + len(ids),
            },
        }
        if body.get("return_token_ids"):
            found["prompt_token_ids"], choice["token_ids"] = list(prompt.encode()), ids
        self.reply(200, found)


def reply(body: Mapping[str, Any], script: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    messages = body["messages"]
    first, last = _text(messages[0].get("content")), messages[-1]
    text = _text(last.get("content"))
    tools = [t["function"]["name"] for t in body.get("tools", [])]
    everything = "\n".join(_text(m.get("content")) for m in messages)
    if body.get("response_format"):
        return {"content": _judged(text)}
    if "get_rooms_and_availability" in tools:
        when = re.search(r"on (\S+) at (\S+) for (\d+) minutes", text)
        arguments = {"date": when[1], "time": when[2], "duration_min": int(when[3])} if when else {}
        return {"tool_calls": [_call("get_rooms_and_availability", arguments)]}
    if '"rooms"' in text and last["role"] == "tool":
        return {"content": _room(everything, json.loads(text))}
    if tools == ["calculate"] and last["role"] == "user":
        return {"tool_calls": [_call("calculate", {"expression": _scripted(script["calculator"], text)})]}
    if last["role"] == "tool":
        number = re.search(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?", text)
        answer = number[0] if number else "none"
        return {"content": f"### ANSWER: {answer} ###" if "### ANSWER:" in everything else f"### {answer} ###"}
    if "interact with a SQL database" in first:
        answers = _scripted(script["sql"], text)
        again = "Rewrite the previous" in first
        return {"content": f"```sqlite\n{answers[1] if again else answers[0]}\n```"}
    if "You are a SQL expert" in first:
        right = _scripted(script["sql"], text)[1] in text
        return {"content": f"THE QUERY IS {'CORRECT' if right else 'INCORRECT'}."}
    if text.startswith("Evaluate how well the output"):
        return {"content": "0.9" if "knowledgeable" in text else "0.4"}
    if body["model"] == "gpt-5-mini":
        return {"content": f"The prompt [v{_version(everything)}] says too little about the choice."}
    if body["model"] == "gpt-4.1-mini":
        return {"content": ROOM_PROMPT.format(version=_version(everything) + 1)}
    return {"content": f"This is the answer to: {text[:40]}"}


def _judged(text: str) -> str:
    output, expected = re.search(r"Task output:\n(.*?)\n\nTask expected answer:\n(.*?)\n\n", text, re.S).groups()  # type: ignore[union-attr]
    right = f"final_choice: {expected}\n" in output
    return json.dumps({"reason": "right" if right else "wrong", "score": 1.0 if right else 0.25})


def _room(prompt: str, found: Mapping[str, Any]) -> str:
    """Choose a room: with the best prompt by all requirements, with another only by capacity."""
    needs = re.search(r"for (\d+) minutes, (\d+) attendees\. Needs: (.*?)\. Accessible required: (\w+)", prompt)
    assert needs is not None, prompt
    rooms = [r for r in found["rooms"] if r["free"] and r["capacity"] >= int(needs[2])]
    if _version(prompt) == BEST_VERSION:
        wanted = re.findall(r"'(\w+)'", needs[3])
        rooms = [r for r in rooms if set(wanted) <= set(r["equipment"])]
        rooms = [r for r in rooms if r["accessible"] or needs[4] == "False"]
        rooms.sort(key=lambda r: (r["capacity"], len(r["equipment"]), r["distance_m"], len(r["booked"])))
    return f"final_choice: {rooms[0]['id'] if rooms else 'No Room'}\nreason: by the rules"


def _version(text: str) -> int:
    return max((int(v) for v in VERSION.findall(text)), default=0)


def _scripted(table: Mapping[str, Any], text: str) -> Any:
    known = [question for question in table if question in text]
    assert known, f"the script has no answer to: {text}"
    return table[max(known, key=len)]


def _call(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""


def scripted_server(script: Mapping[str, Mapping[str, Any]]) -> AbstractContextManager[ScriptedServer]:
    return serving(ScriptedServer(script))
