"""The addresses of the live page, as a Starlette application that only reads.

Every address begins with a random token: without the link nobody gets anything, also not another page that the same
browser shows, nor another user of this machine. Answers carry a Content-Security-Policy that runs no script but
the page's own; all text is escaped by the templates.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from agentrig.errors import AgentrigError
from agentrig.view.calls import calls_of
from agentrig.view.gold import Gold
from agentrig.view.html import Addresses, Links, templates
from agentrig.view.page import of_diagnosis
from agentrig.view.rollout import differences, readable, text_of
from agentrig.view.tokens import Tokenizers
from agentrig.view.watch import views
from agentrig.view.watch.rollouts import Filter
from agentrig.view.watch.runs import Run, Runs

LOOK_S = 0.5
"""Seconds between two looks at the files of a run."""

STILL_S = 15.0
"""Seconds after which a silent stream of events says that it is still there."""

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
"""Headers of every answer."""

STATIC = {"watch.js": "text/javascript", "watch.css": "text/css", "page.css": "text/css"}


def make_app(place: Path, token: str) -> ASGIApp:
    """Return the application.

    Args:
        place: A run directory, or a folder of them.
        token: The first part of every address.

    Raises:
        AgentrigError: There is no such folder.
    """
    pages = Pages(Runs(place))
    routes = [
        Route("/", pages.front),
        Route("/compare", pages.compare),
        Route("/events", pages.events),
        Route("/static/{name}", pages.static),
        Route("/run/{key}", pages.run),
        Route("/run/{key}/why", pages.why),
        Route("/run/{key}/examples", pages.examples),
        Route("/run/{key}/traces", pages.traces),
        Route("/run/{key}/rollout/{id}", pages.rollout),
    ]
    return Door(Starlette(routes=routes, exception_handlers={AgentrigError: _told, KeyError: _unknown}), token)


class Door:
    """Lets a request in if its address begins with the token and it names this machine; adds the headers.

    A page of another origin that makes its own name point to this machine is refused by its name.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._prefix = app, f"/{token}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *((k.encode(), v.encode()) for k, v in HEADERS.items())]
            await send(message)

        host = Request(scope).url.hostname
        path = scope["path"]
        first, _, rest = path[1:].partition("/")
        if host not in ("127.0.0.1", "localhost", "::1") or not secrets.compare_digest(
            first.encode(), self._prefix[1:].encode()
        ):
            refusal = PlainTextResponse("use the link that `agentrig watch` printed, with its token\n", 403)
            await refusal(scope, receive, with_headers)
            return
        scope["agentrig.connection"].prove()
        if scope["method"] not in ("GET", "HEAD"):
            await PlainTextResponse("this page only reads\n", 405)(scope, receive, with_headers)
            return
        inner = {**scope, "path": f"/{rest}", "raw_path": f"/{rest}".encode(), "root_path": "", "prefix": self._prefix}
        await self._app(inner, receive, with_headers)


class Pages:
    """Renders the pages of some runs."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._tokenizers = Tokenizers()
        self._gold = Gold()
        self._templates = templates("agentrig.view.watch")

    async def front(self, request: Request) -> Response:
        """Answer the first address: the runs of the folder, or the one run."""
        if self._runs.single:
            return RedirectResponse(f"{request.scope['prefix']}/run/{quote(next(iter(self._runs.all())), safe='')}")
        rows = await run_in_threadpool(lambda: views.listing(self._runs.all()))
        return self._page(request, "front", events="", rows=rows, title="runs")

    async def run(self, request: Request) -> Response:
        """Show a run's figures and curves."""
        run = self._run(request)
        values = await run_in_threadpool(views.overview, run)
        return self._page(request, "run", events=run.key, title=values["run"]["name"], **values)

    async def why(self, request: Request) -> Response:
        """Show what held learning back; a part of the run's page, which asks for it when it is there."""
        run = self._run(request)
        told = await run_in_threadpool(lambda: of_diagnosis(run.diagnosis()))
        return self._page(request, "why", events=None, title=run.key, key=run.key, run={**told, "missing": []})

    async def examples(self, request: Request) -> Response:
        """Show what takes reading all rollouts: the report's examples of tasks before and after."""
        run = self._run(request)

        def read() -> dict[str, Any]:
            from agentrig.view import table
            from agentrig.view.page import view

            data = run.data()
            return {"run": view(data, table.row_of(data)), "key": run.key}

        values = await run_in_threadpool(read)
        return self._page(request, "examples", events=None, title=values["run"]["name"], **values)

    async def compare(self, request: Request) -> Response:
        """Show runs side by side."""
        keys = request.query_params.getlist("run")
        chosen = [self._runs.get(key) for key in keys]
        if not chosen:
            return RedirectResponse(f"{request.scope['prefix']}/")
        values = await run_in_threadpool(views.comparison, chosen)
        return self._page(request, "compare", events="", title=f"{len(chosen)} runs", **values)

    async def traces(self, request: Request) -> Response:
        """Show a step's groups, or the rollouts that a filter lets through."""
        run, wanted = self._run(request), _filter(request.query_params)
        page = max(1, _whole(request.query_params.get("page")) or 1)
        error, batches = "", [(file.mode, file.step) for file in run.rollouts.files()]
        if not wanted.narrow and not wanted.mode and wanted.step is None and batches:
            trained = [batch for batch in batches if batch[0] == "train"]
            mode, step = (trained or batches)[-1]
            wanted = Filter(mode=mode, step=step)

        def read() -> dict[str, Any]:
            nonlocal error
            whole = not wanted.narrow and wanted.mode and wanted.step is not None
            try:
                rows, n = ([], 0) if whole else views.found_rollouts(run, wanted, page)
            except ValueError as wrong:
                rows, n, error = [], 0, str(wrong)
            return {
                "groups": views.groups(run, wanted) if whole and not error else [],
                "rows": rows,
                "found": n,
                "pages": max(1, -(-n // views.PAGE)),
                "nodes": run.rollouts.nodes(),
                "kinds": run.rollouts.values("failure"),
                "unreadable": list(dict.fromkeys(run.rollouts.unreadable)),
            }

        values = await run_in_threadpool(read)
        at = next((i for i, batch in enumerate(batches) if batch == (wanted.mode, wanted.step)), None)
        return self._page(
            request,
            "traces",
            events=run.key,
            title=f"traces of {run.key}",
            key=run.key,
            wanted=wanted,
            page=page,
            error=error,
            batches=views.steps_of(batches),
            before=batches[at - 1] if at else None,
            after=batches[at + 1] if at is not None and at + 1 < len(batches) else None,
            query=views.query,
            **values,
        )

    async def rollout(self, request: Request) -> Response:
        """Show a rollout, or two side by side."""
        run, id, other = self._run(request), request.path_params["id"], request.query_params.get("against", "")

        def read() -> dict[str, Any]:
            tokenizer, why_ids = self._tokenizers.of(run.data())
            shown, damage = [], []
            for each in filter(None, (id, other)):
                row = run.rollouts.row(each)
                if row is None:
                    raise KeyError(each)
                calls, wrong = calls_of(run.directory, row["step"], [each]) if row["mode"] == "train" else ({}, "")
                damage += [wrong] if wrong and wrong not in damage else []
                shown.append(readable(row, calls.get(each, {}), tokenizer))
            gold, why = self._gold.of(run.directory, str(shown[0].row["task_id"]))
            return {
                "shown": shown,
                "gold": [(key, text_of(value)) for key, value in (gold or {}).items()],
                "no_gold": why,
                "beside": views.neighbours(run, shown[0].row),
                "lines": differences(*shown) if len(shown) == 2 else [],
                "why_ids": why_ids,
                "damage": damage,
            }

        values = await run_in_threadpool(read)
        name = "rollout" if len(values["shown"]) == 1 else "two"
        return self._page(request, name, events=None, title=f"rollout {id}", key=run.key, **values)

    async def static(self, request: Request) -> Response:
        """Answer with the page's script and styles."""
        name = request.path_params["name"]
        if name not in STATIC:
            raise KeyError(name)
        package = "templates" if name == "page.css" else "watch/static"
        text = (Path(__file__).parents[1] / package / name).read_text("utf-8")
        return Response(text, media_type=STATIC[name])

    async def events(self, request: Request) -> Response:
        """Say when a run, or any run of the folder, has changed: server-sent events."""
        key = request.query_params.get("run", "")
        if key:
            self._runs.get(key)

        def stamp() -> str:
            runs = self._runs.all()
            chosen = [runs[key]] if key in runs else [] if key else list(runs.values())
            return " ".join(run.stamp() for run in chosen)

        async def stream() -> AsyncIterator[str]:
            last, quiet = await run_in_threadpool(stamp), 0.0
            yield "retry: 1000\n\n"
            while not await request.is_disconnected():
                await asyncio.sleep(LOOK_S)
                now = await run_in_threadpool(stamp)
                quiet += LOOK_S
                if now != last:
                    last, quiet = now, 0.0
                    yield "event: changed\ndata: 1\n\n"
                elif quiet >= STILL_S:
                    quiet = 0.0
                    yield ": still there\n\n"

        return StreamingResponse(stream(), media_type="text/event-stream")

    def _run(self, request: Request) -> Run:
        return self._runs.get(request.path_params["key"])

    def _page(self, request: Request, name: str, *, events: str | None, **values: Any) -> Response:
        """Render a page, or for a page that is open already its changing part."""
        base = request.scope["prefix"]
        here = base + request.url.path + (f"?{request.url.query}" if request.url.query else "")
        part = request.headers.get("agentrig-part") is not None
        template = self._templates.get_template(f"{name}{'_part' if part else ''}.html.j2")
        to = Addresses(f"{base}/run/{quote(str(values['key']), safe='')}") if "key" in values else Links()
        text = template.render(base=base, here=here, events=events, single=self._runs.single, to=to, **values)
        return HTMLResponse(text)


def _filter(given: Mapping[str, str]) -> Filter:
    numbers: dict[str, Any] = {key: _whole(given.get(key)) for key in ("step", "shortest", "longest")}
    texts: dict[str, Any] = {
        key: given.get(key, "").strip() for key in ("mode", "score", "failure", "node", "text", "task")
    }
    return Filter(**texts, **numbers)


def _whole(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() and len(text) < 12 else None


async def _told(request: Request, error: Exception) -> Response:
    return PlainTextResponse(f"{error}\n", 404)


async def _unknown(request: Request, error: Exception) -> Response:
    return PlainTextResponse(f"there is nothing called {error.args[0]!r:.200} here\n", 404)
