"""The agent `json-repair`: shows the model the validator's first error, applies the patch it gets, and tries again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import attrs

import agentrig
from agentrig import Endpoint, Task, setting
from agentrig.demonstrations import Call
from agentrig_json_repair.solver import patch, patched
from agentrig_json_repair.validation import first_error

BREAK = "\ndocument "
ERROR = "\nerror "


@attrs.frozen(kw_only=True)
class AgentConfig:
    """Settings of the agent."""

    turns: int = setting(3, help="how often it asks the model at most", ge=1, le=10)


@lru_cache(maxsize=8)
def client_of(base_url: str, api_key: str) -> Any:
    """Return a client for a server; kept, because making one takes longer than a call."""
    from openai import OpenAI

    return OpenAI(base_url=base_url, api_key=api_key)


def rules_text(schema: Mapping[str, Any]) -> str:
    """Return a line for each property, in few tokens."""
    lines = []
    for name, rule in schema["properties"].items():
        kind = " ".join(rule["enum"]) if "enum" in rule else rule["type"]
        lines.append(f"{name}: {kind} {rule['minimum']} {rule['maximum']}" if "minimum" in rule else f"{name}: {kind}")
    return "\n".join(lines)


def repair(task_input: Mapping[str, Any], endpoint: Endpoint, *, turns: int) -> str:
    """Return the document as JSON text, after at most so many patches, each for the first error that is left."""
    schema, document = task_input["schema"], task_input["document"]
    client = client_of(endpoint.base_url, endpoint.api_key)
    for _ in range(turns):
        error = first_error(schema, document)
        if not error:
            break
        prompt = f"{rules_text(schema)}{BREAK}{json.dumps(document)}{ERROR}{error}"
        with agentrig.span("repair"):
            reply = client.chat.completions.create(
                model=endpoint.model,
                messages=[{"role": "user", "content": prompt}],
                extra_body=dict(endpoint.sampling),
                extra_headers=dict(endpoint.headers),
            )
        document = patched(document, changes_of(reply.choices[0].message.content or ""))
    return json.dumps(document)


def changes_of(text: str) -> dict[str, Any]:
    """Return a reply's merge patch; an empty one if the reply is no JSON object."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def demonstrate(task: Task, call: Call) -> str:
    """Return the right reply to a call: a merge patch that repairs the prompt's error in the prompt's document."""
    document = call.text.partition(BREAK)[2].rpartition(ERROR)[0]
    return json.dumps(patch(task.input["schema"], json.loads(document)))
