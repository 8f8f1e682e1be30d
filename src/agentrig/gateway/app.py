"""The gateway's routes: calls of agents under the base URL of their rollout, and opening and closing by runners."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from agentrig.endpoints import Endpoint
from agentrig.gateway.book import Book, GatewayCall, Opened
from agentrig.gateway.dialects import Chat
from agentrig.gateway.forward import CallRules, Exchange
from agentrig.gateway.messages import Messages
from agentrig.gateway.responses import Responses
from agentrig.http_server import Receive, Refused, Scope, Send, bearer, reply, same

OPEN, CLOSE = "/agentrig/open", "/agentrig/close"
"""The routes of runners; they ask for the run's token."""

CONTROL_LIMIT = 1 << 20
"""Most bytes of a request of a runner."""

ROLLOUTS = "/rollouts/"
"""Begins the path of every rollout: `/rollouts/ID/v1`."""

DIALECTS: Mapping[str, Chat] = {
    "chat/completions": Chat(),
    "responses": Responses(),
    "messages": Messages(),
    "messages/count_tokens": Messages(),
    "completions": Chat(),
    "embeddings": Chat(),
}
"""What an agent may call below its base URL, and in which form it gets errors."""


class Gateway:
    """The ASGI application."""

    def __init__(self, token: str, rules: CallRules) -> None:
        self._token, self._rules, self.book = token, rules, Book()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        path: str = scope["path"]
        if path in (OPEN, CLOSE):
            await self._control(path, receive, send)
            return
        route, opened = _route(scope), scope["agentrig.opened"]
        if route in DIALECTS and scope["method"] == "POST":
            await self._call(opened, route, scope, receive, send)
        elif route == "models" and scope["method"] == "GET":
            listed = [
                {"id": name, "object": "model", "created": 0, "owned_by": "agentrig"}
                for name in dict.fromkeys((opened.upstream.model, *self._rules.models))
            ]
            await reply(send, 200, {"object": "list", "data": listed})
        else:
            known = route in DIALECTS or route == "models"
            raise Refused(
                f"the gateway has no {scope['method']} /v1/{route}; it has POST /v1/"
                f"{', POST /v1/'.join(DIALECTS)} and GET /v1/models",
                status=405 if known else 404,
                code="method_not_allowed" if known else "not_found",
            )

    def admit(self, scope: Scope) -> bool:
        """Refuse a request without the token, or without the key of its rollout."""
        if scope["path"] in (OPEN, CLOSE):
            if not same(_key(scope), self._token):
                text = "only the run's runners open and close rollouts: they bring the run's token"
                raise Refused(text, status=401, code="invalid_token")
        else:
            below = scope["path"].removeprefix(ROLLOUTS)
            rollout, v1, _ = below.rpartition("/v1/")
            rollout, route = rollout.removesuffix("/v1"), ""  # Anthropic's clients add a /v1 of their own
            if not v1:
                route = max((route for route in DIALECTS if below.endswith(f"/{route}")), key=len, default="")
                rollout = below.removesuffix(f"/{route}")
            known = rollout if scope["path"].startswith(ROLLOUTS) else ""
            scope["agentrig.opened"] = self.book.caller(known, _key(scope))
            if not v1:
                text = f"a rollout's base URL ends in /v1, and this path has none: it is /v1/{route or '…'}"
                raise Refused(text, status=404, code="not_found")
        return True

    async def _call(self, opened: Opened, route: str, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        call = GatewayCall(task=task)
        opened.calls.add(call)
        try:
            await Exchange(
                opened=opened,
                call=call,
                route=route,
                dialect=DIALECTS[route],
                headers={name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]},
                receive=receive,
                send=send,
                abort=scope["agentrig.connection"].transport.abort,
                rules=self._rules,
            ).run()
        finally:
            opened.calls.discard(call)

    async def _control(self, path: str, receive: Receive, send: Send) -> None:
        """Open or close a rollout."""
        try:
            sent = json.loads((await receive())["body"])
            rollout, upstream = str(sent["rollout"]), Endpoint(**sent["upstream"]) if path == OPEN else None
            attempt, key, measured = int(sent.get("attempt", 0)), sent.get("key"), bool(sent.get("measured"))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise Refused(f"this is no body of a runner: {error}", status=400, code="invalid_json") from None
        if upstream is not None:
            if self._rules.models.get(upstream.model) is not None:
                text = f"the run's model is called {upstream.model}, and so is a fixed one in [gateway.models]"
                raise Refused(f"{text}: give that another name", status=409, code="name_taken")
            opened = await self.book.open(rollout, attempt, upstream, measured=measured)
            answer = json.dumps({"key": opened.key}).encode()
        else:
            opened = await self.book.close(rollout, key)
            answer = b'{"cut": %d, "spans": [%b]}' % (opened.cut, b",".join(opened.spans))
        await reply(send, 200, answer)


def limit(scope: Scope) -> int | None:
    """Return the most bytes of a runner's body; a call reads its own, which is recorded."""
    return CONTROL_LIMIT if scope["path"] in (OPEN, CLOSE) else None


def form(refused: Refused, scope: Scope) -> dict[str, Any]:
    """Return a refusal in the form of the API that the request speaks."""
    return DIALECTS.get(_route(scope), Chat()).error(refused)


def _route(scope: Scope) -> str:
    """Return what a request calls below the base URL of its rollout."""
    return str(scope["path"].rpartition("/v1/")[2])


def _key(scope: Scope) -> str:
    """Return what a request brings as its key: OpenAI's clients as a bearer token, Anthropic's as `x-api-key`."""
    return bearer(scope) or dict(scope["headers"]).get(b"x-api-key", b"").decode("latin-1")
