"""The live page: its addresses, as a Starlette application, and the server on loopback.

It only reads, except for a run's tags and note (`agentrig.view.watch.notes`).

Every address begins with a random token: without the link nobody gets anything, also not another page that the same
browser shows, nor another user of this machine. Answers carry a Content-Security-Policy that runs no script but
the page's own; all text is escaped by the templates.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route, Router
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from agentrig.errors import AgentrigError
from agentrig.view import table
from agentrig.view.beside import calls_of, private_of, tokenizer_of
from agentrig.view.comparison import compared
from agentrig.view.html import Links, templates
from agentrig.view.page import before_and_after, differing_settings, of_diagnosis, view
from agentrig.view.plots import colors_of
from agentrig.view.prices import Prices
from agentrig.view.reading import RunData
from agentrig.view.rollout import differences, readable, readable_private
from agentrig.view.samples import add_gold
from agentrig.view.watch import rewards, views
from agentrig.view.watch.notes import can_write, read_notes, write_notes
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

LIVE, ENDED = "live", "ended"
"""What the top of a page says while it follows a run, and when there is nothing more to follow."""

NOTES = re.compile(r"/[^/]+/run/[^/]+/notes")
"""The only address that is written to."""

MOST_WRITTEN = 1 << 20
"""Most bytes of a request that writes."""


@contextmanager
def serving(place: Path, port: int = 0, *, prices: Prices | None = None) -> Iterator[str]:
    """Serve the page of a run directory, or of a folder of them, in a thread; yields the link.

    Args:
        port: On 127.0.0.1; 0 for any free one.
        prices: For comparisons: what tokens and machines cost.

    Raises:
        AgentrigError: There is no such folder, or the port is taken.
    """
    from agentrig.http_server import ServerThread, listen

    token = secrets.token_urlsafe(24)
    pages = Pages(Runs(place), prices)

    async def nowhere(scope: Scope, receive: Receive, send: Send) -> None:
        raise KeyError(scope["path"].partition(token)[2])

    routes = [
        Route("/", pages.front),
        Route("/compare", pages.compare),
        Route("/chart.csv", pages.csv),
        Route("/events", pages.events),
        Mount("/static", StaticFiles(packages=[("agentrig.view.watch", "static")])),
        Route("/run/{key}", pages.run),
        Route("/run/{key}/why", pages.why),
        Route("/run/{key}/checks", pages.why),
        Route("/run/{key}/examples", pages.examples),
        Route("/run/{key}/traces", pages.traces),
        Route("/run/{key}/rewards", pages.rewards),
        Route("/run/{key}/notes", pages.notes, methods=["POST"]),
        Route("/run/{key}/rollout/{id}", pages.rollout),
    ]
    try:
        listener = listen("127.0.0.1", port)
    except OSError as error:
        raise AgentrigError(f"port {port} on this machine can't be used: {error.strerror}. Leave --port out") from None
    port = listener.getsockname()[1]
    handlers: Mapping[Any, Any] = dict.fromkeys((AgentrigError, KeyError), pages.missing)
    mount = Mount(f"/{token}", app=Router(routes, default=nowhere))
    app = Starlette(routes=[mount], exception_handlers=handlers)
    server = ServerThread(door(app, token, port), listener, "watch", log_level="critical", timeout_graceful_shutdown=1)
    try:
        yield f"http://127.0.0.1:{port}/{token}/"
    finally:
        server.stop()


def door(app: ASGIApp, token: str, port: int) -> ASGIApp:
    """Return the application behind a door, which adds the headers to every answer.

    It lets a request in if its address begins with the token and it names this machine.
    """
    from agentrig.http_server import Access, Refused, same

    def admit(scope: Scope) -> bool:
        if not same(scope["path"][1:].partition("/")[0], token):
            raise Refused("use the link that `agentrig watch` printed, with its token", status=403)
        if scope["method"] in ("GET", "HEAD"):
            return True
        if scope["method"] != "POST" or not NOTES.fullmatch(scope["path"]):
            raise Refused("this page only reads, and keeps tags and notes", status=405)
        headers = dict(scope["headers"])
        # A browser names the page that a request comes from, and `Access` has let only this one in.
        if b"origin" not in headers or headers.get(b"content-type") != b"application/json":
            raise Refused("tags and notes are taken from this page only", status=403)
        return True

    access = Access(
        app,
        admit,
        host="127.0.0.1",
        port=port,
        limit=lambda scope: MOST_WRITTEN if scope["method"] == "POST" else None,
        form=lambda refused, _: f"{refused}\n".encode(),
    )

    async def entered(scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *((k.encode(), v.encode()) for k, v in HEADERS.items())]
            await send(message)

        await access(scope, receive, with_headers)

    return entered


class Pages:
    """Renders the pages of some runs; Starlette calls these functions in threads."""

    def __init__(self, runs: Runs, prices: Prices | None = None) -> None:
        self._runs, self._prices = runs, prices
        self._templates = templates("agentrig.view.watch")

    def front(self, request: Request) -> Response:
        """Answer the first address: the runs of the folder, or the one run."""
        if self._runs.single:
            return RedirectResponse(f"{request.scope['root_path']}/run/{quote(next(iter(self._runs.all())), safe='')}")
        found = views.run_list(self._runs.all(), request.query_params)
        chosen = request.query_params.get("chosen", "")
        return self._page(request, "front", title="runs", chosen=chosen, **found)

    def run(self, request: Request) -> Response:
        """Show a run's figures and curves; of its rollouts, only the measurements of both ends are read."""
        run = self._run(request)
        data = run.data()
        chosen, drawn = views.curves(request, {run.key: data})
        shown = view(data, whole=False, drawn=drawn)
        notes, writable = read_notes(run.directory), can_write(run.directory)
        return self._page(
            request, "run", run, title=data.name, run=shown, chosen=chosen, notes=notes, writable=writable
        )

    async def notes(self, request: Request) -> Response:
        """Keep a run's tags and note; nothing else is ever written."""
        run = self._run(request)
        try:
            given = await request.json()
            tags, note = given["tags"], given["note"]
        except (ValueError, RecursionError, TypeError, KeyError):
            tags = note = None
        if not (isinstance(tags, str) and isinstance(note, str)):
            return PlainTextResponse("send JSON with two texts, tags and note\n", 400)
        try:
            await run_in_threadpool(write_notes, run.directory, tags, note)
        except AgentrigError as error:
            return PlainTextResponse(f"{error}\n", 400)
        return Response(status_code=204)

    def why(self, request: Request) -> Response:
        """Show what held learning back, or the checks: parts of the run's page, which asks for them later."""
        run = self._run(request)
        shown = {**of_diagnosis(run.diagnosis()), "missing": []}
        return self._page(request, "why", run, title=run.key, still=True, run=shown)

    def examples(self, request: Request) -> Response:
        """Show tasks before and after training, then the held-out accuracy by class."""
        run = self._run(request)
        data = run.data()
        found = before_and_after(data)
        add_gold(data, found["pairs"])
        missing = dict.fromkeys([*data.unread, *found["missing"], *data.damage])
        shown = {**found, "at": "", "tables": found["slices"], "missing": list(missing)}
        return self._page(request, "examples", run, title=data.name, run=shown)

    def compare(self, request: Request) -> Response:
        """Show runs side by side: their rows, curves, and the settings in which they differ."""
        runs = self._several(request)
        if not runs:
            return RedirectResponse(f"{request.scope['root_path']}/?chosen=none")
        data, each = list(runs.values()), "each" in request.query_params
        chosen, drawn = views.curves(request, runs)
        comparison = compared(data, prices=self._prices, each=each)
        toggle = urlencode([*(("run", key) for key in runs), *([] if each else [("each", 1)])])
        toggle = toggle if each or len(comparison.lines) < len(data) else ""
        return self._page(
            request,
            "compare",
            title=f"{len(data)} runs",
            runs=[
                (run.name, address, color)
                for run, address, color in zip(data, chosen["runs"], colors_of(data), strict=True)
            ],
            curves=drawn,
            chosen=chosen,
            settings=differing_settings(data),
            comparison=comparison.table(),
            each=each,
            toggle=toggle,
            results=table.results([table.row_of(each) for each in data], colors=colors_of(data)),
        )

    def csv(self, request: Request) -> Response:
        """Answer with the points of a curve, of one run or of several, as CSV."""
        name, runs = request.query_params.get("plot", ""), self._several(request)
        if not runs:
            raise AgentrigError("name a run in the address: chart.csv?run=RUN&plot=NAME")
        plot = next((plot for plot in views.curves(request, runs)[1] if plot.name == name), None)
        if plot is None:
            raise KeyError(name)
        file = re.sub(r"[^\w-]+", "-", name, flags=re.ASCII)
        headers = {"content-disposition": f'attachment; filename="{file}.csv"'}
        return Response(plot.csv(), media_type="text/csv", headers=headers)

    def traces(self, request: Request) -> Response:
        """Show a step's groups, or the rollouts that a filter lets through."""
        run = self._run(request)
        wanted, error = _filter(request.query_params)
        page = max(1, _whole(request.query_params.get("page")) or 1)
        batches = [(file.mode, file.step) for file in run.rollouts.files()]
        if not error and not wanted.narrow and not wanted.mode and wanted.step is None and batches:
            mode, step = ([batch for batch in batches if batch[0] == "train"] or batches)[-1]
            wanted = Filter(mode=mode, step=step)
        whole = not wanted.narrow and wanted.mode and wanted.step is not None
        groups, (rows, found) = list[dict[str, Any]](), (list[dict[str, Any]](), 0)
        try:
            if whole and not error:
                groups = views.groups(run, wanted)
            elif not error:
                rows, found = views.found_rollouts(run, wanted, page)
        except ValueError as wrong:
            error = str(wrong)
        run.rollouts.read_all()
        at = next((i for i, batch in enumerate(batches) if batch == (wanted.mode, wanted.step)), None)
        return self._page(
            request,
            "traces",
            run,
            title=f"traces of {run.key}",
            wanted=wanted,
            modes=_modes([wanted.mode, *(mode for mode, _ in batches)]),
            groups=groups,
            rows=rows,
            found=found,
            page=page,
            pages=max(1, -(-found // views.PAGE)),
            error=error,
            empty=not batches,
            before=batches[at - 1] if at else None,
            after=batches[at + 1] if at is not None and at + 1 < len(batches) else None,
            query=views.query,
            reading=run.rollouts.progress(),  # before what is read so far is looked at
            rollouts=run.rollouts,
        )

    def rewards(self, request: Request) -> Response:
        """Show how often each reward was given, and tasks by step."""
        run, asked = self._run(request), request.query_params
        files = run.rollouts.files()
        measured = [file.mode for file in files]
        modes = _modes(measured)
        usual = "validation" if measured.count("validation") > 1 else next(iter(modes), "train")
        mode = asked.get("mode") if asked.get("mode") in modes else usual
        order = asked.get("order") if asked.get("order") in rewards.ORDERS else "task"
        page = max(1, _whole(asked.get("page")) or 1)
        run.rollouts.read_all()
        return self._page(
            request,
            "rewards",
            run,
            title=f"rewards of {run.key}",
            mode=mode,
            modes=modes,
            order=order,
            orders=rewards.ORDERS,
            page=page,
            reading=run.rollouts.progress(),  # before what is read so far is looked at
            rollouts=run.rollouts,
            **rewards.rewards_of(run, str(mode), str(order), page),
        )

    def rollout(self, request: Request) -> Response:
        """Show a rollout, or two side by side."""
        run, id, other = self._run(request), request.path_params["id"], request.query_params.get("against", "")
        tokenizer, why_ids = tokenizer_of(run.data())
        rows = [run.rollouts.row(each) for each in filter(None, (id, other))]
        calls, damage = calls_of(run.directory, rows)
        shown = [readable(row, calls.get(str(row["id"]), {}), tokenizer) for row in rows]
        private = private_of(run.directory, str(shown[0].row["task_id"]))
        return self._page(
            request,
            "rollout" if len(shown) == 1 else "two",
            run,
            title=f"rollout {id}",
            still=True,
            shown=shown,
            private=readable_private(private),
            beside=views.neighbours(run, shown[0].row),
            lines=differences(*shown) if len(shown) == 2 else [],
            why_ids=why_ids,
            damage=damage,
        )

    def missing(self, request: Request, error: Exception) -> Response:
        """Say what there is not at an address, and lead back."""
        said = f"There is nothing called {error.args[0]!r:.200} here." if isinstance(error, KeyError) else str(error)
        if request.method == "POST":  # the page shows it beside the button
            return PlainTextResponse(f"{said}\n", 404)
        return self._page(request, "missing", title="not found", still=True, status=404, said=said)

    async def events(self, request: Request) -> Response:
        """Say when a run, or any run of the folder, has changed, and whether it goes on: server-sent events."""
        key = request.query_params.get("run", "")
        if key:
            self._runs.get(key)

        def stamp() -> str:
            runs = self._runs.all()
            chosen = [runs[key]] if key in runs else [] if key else list(runs.values())
            return " ".join(run.stamp() for run in chosen)

        def label() -> str:
            with suppress(AgentrigError, KeyError):  # it is gone
                return self._label(key)
            return LIVE

        async def stream() -> AsyncIterator[str]:
            last, quiet = await run_in_threadpool(stamp), 0.0
            yield "retry: 1000\n\n"
            while not await request.is_disconnected():
                await asyncio.sleep(LOOK_S)
                now = await run_in_threadpool(stamp)
                quiet += LOOK_S
                if now != last:
                    last, quiet = now, 0.0
                    yield f"event: changed\ndata: {await run_in_threadpool(label)}\n\n"
                elif quiet >= STILL_S:
                    quiet = 0.0
                    yield ": still there\n\n"

        return StreamingResponse(stream(), media_type="text/event-stream")

    def _label(self, key: str) -> str:
        """Return what the top of a page says of its run; of pages of several runs, that they are live."""
        return ENDED if key and not self._runs.get(key).data().running else LIVE

    def _several(self, request: Request) -> dict[str, RunData]:
        """Return the runs of an address, the oldest first: the others are compared with it."""
        runs = {key: self._runs.get(key).data() for key in request.query_params.getlist("run")}
        return dict(sorted(runs.items(), key=lambda run: str(run[1].manifest.get("created", ""))))

    def _run(self, request: Request) -> Run:
        return self._runs.get(request.path_params["key"])

    def _page(
        self,
        request: Request,
        name: str,
        of: Run | None = None,
        /,
        *,
        title: str,
        still: bool = False,
        status: int = 200,
        **values: Any,
    ) -> Response:
        """Render a page, or for a page that is open already its changing part; `still` pages follow no changes."""
        base, key = request.scope["root_path"], of.key if of else ""
        here = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        values |= {"title": title, "label": self._label(key), "live": LIVE, "events": None if still else key}
        values |= {"base": base, "here": here, "single": self._runs.single, "key": key}
        values["to"] = Links(f"{base}/run/{quote(key, safe='')}" if of else "")
        template = self._templates.get_template(f"{name}.html.j2")
        if request.headers.get("agentrig-part") is not None and "part" in template.blocks:
            return HTMLResponse("".join(template.blocks["part"](template.new_context(values))))
        return HTMLResponse(template.render(values), status)


def _filter(given: Mapping[str, str]) -> tuple[Filter, str]:
    """Return what a query asks for, and what of it cannot be read; '' if all can."""
    stated = {key: given.get(key, "").strip() for key in ("step", "last", "shortest", "longest")}
    numbers: dict[str, Any] = {key: _whole(text) for key, text in stated.items()}
    wrong = [f"{key} is {text!r:.60}, which is no whole number" for key, text in stated.items()
             if text and numbers[key] is None]  # fmt: skip
    texts: dict[str, Any] = {
        key: given.get(key, "").strip() for key in ("mode", "score", "failure", "node", "text", "task")
    }
    return Filter(**texts, **numbers), "; ".join(wrong)


def _modes(found: Collection[str]) -> list[str]:
    """Return the modes that occur, in the order of a run."""
    return [mode for mode in ("train", "validation", "report", "dev") if mode in found]


def _whole(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() and len(text) < 12 else None
