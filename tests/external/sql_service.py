"""A service for the tests: it asks the model for a query, and answers in its reply (`/solve`) or later (`/begin`).

`python sql_service.py PORT` listens once it has read a line on stdin.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import httpx
import uvicorn
from agentrig_langgraph_sql.schema import schema_text
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

CALLBACKS: set[asyncio.Task[None]] = set()


async def answered(job: dict[str, Any]) -> dict[str, Any]:
    """Ask the rollout's model."""
    given = job["input"]
    prompt = schema_text(given["database"], style="spaced") + "\n" + given["question"]
    body = {"model": job["model"], "messages": [{"role": "user", "content": prompt}], **job["sampling"]}
    headers = {"authorization": f"Bearer {job['api_key']}", "agentrig-span": "write_query", **job["headers"]}
    async with httpx.AsyncClient(timeout=job["timeout_s"]) as client:
        reply = await client.post(f"{job['base_url']}/chat/completions", json=body, headers=headers)
    reply.raise_for_status()
    return {"answer": reply.json()["choices"][0]["message"]["content"]}


async def solve(request: Request) -> Response:
    """Answer in the reply."""
    return JSONResponse(await answered(await request.json()))


async def begin(request: Request) -> Response:
    """Answer by the callback."""
    job = await request.json()

    async def call_back() -> None:
        answer = await answered(job)
        async with httpx.AsyncClient() as client:
            headers = {"authorization": f"Bearer {job['callback']['key']}"}
            await client.post(job["callback"]["url"], json=answer, headers=headers)

    task = asyncio.create_task(call_back())
    CALLBACKS.add(task)
    task.add_done_callback(CALLBACKS.discard)
    return Response(status_code=202)


if __name__ == "__main__":
    app = Starlette(routes=[Route("/solve", solve, methods=["POST"]), Route("/begin", begin, methods=["POST"])])
    sys.stdin.readline()
    uvicorn.run(app, port=int(sys.argv[1]), log_config=None)
