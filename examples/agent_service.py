"""An agent as a service, for the agent `http`: `uvicorn agent_service:app --port 8800`, in this folder."""

import asyncio
import hmac
import os
from collections import OrderedDict

import httpx
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

KEY = os.environ.get("AGENT_SERVICE_KEY", "")
RUNS = OrderedDict()  # the last runs, by idempotency key


async def agent(job):
    """Ask the model of this rollout, and answer."""
    body = {"model": job["model"], "messages": [{"role": "user", "content": job["input"]["question"]}]}
    headers = {"Authorization": f"Bearer {job['api_key']}", "agentrig-span": "write_query", **job["headers"]}
    async with httpx.AsyncClient(timeout=job["timeout_s"]) as client:
        reply = await client.post(
            f"{job['base_url']}/chat/completions", json={**body, **job["sampling"]}, headers=headers
        )
    if reply.status_code != 200:
        return {"failure": "llm-error", "message": reply.text}
    return {"answer": reply.json()["choices"][0]["message"]["content"]}


async def started(request):
    """Start a rollout, or find the one that this request started before; return it with its task."""
    given = request.headers.get("authorization", "")
    if KEY and not hmac.compare_digest(given.encode(), f"Bearer {KEY}".encode()):
        return None, None
    job, key = await request.json(), request.headers["idempotency-key"]
    if key not in RUNS:
        RUNS[key] = asyncio.create_task(agent(job))
        while len(RUNS) > 1000:
            RUNS.popitem(last=False)
    return job, RUNS[key]


async def solve(request):
    """Answer when the agent has ended."""
    _, run = await started(request)
    if run is None:
        return JSONResponse({"error": "wrong key"}, 401)
    return JSONResponse(await asyncio.shield(run))


async def begin(request):
    """Answer 202 now, and call back when the agent has ended: for agents that take minutes."""
    job, run = await started(request)
    if run is None:
        return JSONResponse({"error": "wrong key"}, 401)

    async def call_back():
        headers = {"Authorization": f"Bearer {job['callback']['key']}"}
        async with httpx.AsyncClient() as client:
            await client.post(job["callback"]["url"], json=await run, headers=headers)

    RUNS[f"{request.headers['idempotency-key']} called back"] = asyncio.create_task(call_back())
    return Response(status_code=202)


app = Starlette(routes=[Route("/solve", solve, methods=["POST"]), Route("/begin", begin, methods=["POST"])])
