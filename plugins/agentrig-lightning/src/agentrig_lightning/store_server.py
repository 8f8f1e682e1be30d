"""A run's store over HTTP: Agent Lightning's own server, behind a door, for runners that join at any time."""

from __future__ import annotations

import json
import logging
import socket
import sys
import threading
import time
import warnings
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from agentlightning import LightningStoreServer
from agentlightning.utils.server_launcher import PythonServerLauncherArgs
from fastapi import Request
from fastapi.exceptions import RequestValidationError, ResponseValidationError
from fastapi.responses import JSONResponse
from pydantic.json_schema import PydanticJsonSchemaWarning

from agentrig import __version__
from agentrig.endpoints import address_of, is_loopback
from agentrig.errors import AgentrigError
from agentrig.http_server import Access, ServerThread, listen
from agentrig.pools import Result
from agentrig.text import cut, mask, storable, words_of
from agentrig_lightning.joining import ALIVE, ENDED, JOIN, LEAVE, REPORT, RUNNING, TOKEN_VARIABLE
from agentrig_lightning.store import Store
from agentrig_lightning.store_door import StoreDoor, limit

log = logging.getLogger(__name__)

FAREWELL_S = 5.0
"""Longest time, at the run's end, in which runners are told that it has ended."""

ANSWER_S = 3.0
"""Seconds in which a server that is not busy accepts a connection."""


class ServedStore:
    """Serves a store from a thread of this process.

    Args:
        store: The run's store.
        address: Host and port to listen on; port 0 for a free one.
        token: What every request has to bring.
        silent_s: Seconds without a sign of life after which a runner's rollouts start again.
        offer: What a runner is told when it joins: `agent` (`name`, `config` with each secret's source, and `plugins`,
            the names of the run's plugin files), `deadline_s` and `retries`.

    Attributes:
        url: The address, once it is served.
    """

    def __init__(
        self, store: Store, *, address: tuple[str, int], token: str, silent_s: float, offer: Mapping[str, Any]
    ) -> None:
        self._store, self._address, self._token, self.silent_s = store, address, token, silent_s
        self._offer = {"version": __version__, **offer}
        mask(token, f"{token[:3]}…")  # in whatever is stored
        self.url = ""
        self._versions: list[str] = []
        self._server: ServerThread | None = None
        self._state = RUNNING
        self._present: set[str] = set()
        self._gone = threading.Condition()

    @property
    def warnings(self) -> list[str]:
        """What the run's summary says of its runners, and of others with its token."""
        foreign = [
            f"{n} rollouts were put into the run's store from {address}, with the run's token: its runners ran them, "
            "and no step has them. If this was not you, use another token (runners.store_token)"
            for address, n in self._store.foreign.items()
        ]
        return [*self._versions, *foreign]

    @property
    def how(self) -> str:
        """How a runner joins, without the token."""
        return f"join with: agentrig runner --store {self.url} (the token was printed when the run started)"

    def start(self) -> None:
        """Listen, and print the link with the token once."""
        host, wanted = self._address
        try:
            listener = listen(host, wanted)
        except OSError as error:
            raise AgentrigError(
                f"the store cannot listen on {host}:{wanted} (runners.store): {error.strerror or error}"
            ) from None
        port = listener.getsockname()[1]
        self.url = address_of(host, port)
        reached = urlsplit(self.url).hostname or host
        arguments = PythonServerLauncherArgs(
            host=host, port=port, access_host=reached, launch_mode="thread", log_level=logging.WARNING
        )
        app: Any = LightningStoreServer(self._store, launcher_args=arguments).app
        app.openapi = _quietly(app.openapi)
        for path, handler in ((JOIN, self._join), (ALIVE, self._alive), (REPORT, self._report), (LEAVE, self._leave)):
            app.add_route(path, _checked(handler), methods=["POST"])
        app.add_exception_handler(RequestValidationError, _not_valid)
        app.add_exception_handler(ResponseValidationError, _not_there)
        app.add_exception_handler(ValueError, _wrong)
        door = StoreDoor(app, token=self._token)
        basic = 'Basic realm="agentrig"'  # a browser asks its user then
        access = Access(door, door.admit, host=host, port=port, limit=limit, challenge=basic)
        # Not by Agent Lightning's launcher, whose server waits for half a request for ever and takes WebSockets.
        self._server = ServerThread(access, listener, "store", loop="asyncio", timeout_graceful_shutdown=5)
        print(
            f"agentrig: the run's store is at {self.url}; this is printed once:\n"
            f"  dashboard: {self.url}/?token={self._token}\n"
            f"  a runner:  {TOKEN_VARIABLE}={self._token} agentrig runner --store {self.url}",
            file=sys.stderr,
            flush=True,
        )
        if not is_loopback(reached):
            log.warning(
                "the store listens on %s: a person with the token gets the tasks' inputs and the model's key, and the "
                "connection is not encrypted. Use a private network or a tunnel",
                host,
            )

    def stop(self) -> None:
        """Tell the runners that the run has ended, then close."""
        if self._server is None:
            return
        self._state = ENDED
        end = time.monotonic() + FAREWELL_S
        with self._gone:
            alive = set(self._store.leases.workers(FAREWELL_S))
            while self._present & alive and time.monotonic() < end:
                self._gone.wait(0.2)
        self._server.stop()
        self._server = None

    def check(self) -> None:
        """Make sure that the server still runs."""
        if self._server is None:
            return
        own = urlsplit(self.url)
        try:
            socket.create_connection((own.hostname or "", own.port or 0), timeout=ANSWER_S).close()
        except TimeoutError:
            return  # it is busy
        except OSError as error:
            raise AgentrigError(
                f"the run's store at {self.url} has died ({error.strerror or error}): no runner can join or report"
            ) from None

    # --- the routes of agentrig's own runners ---------------------------------------------------------

    async def _join(self, sent: Any) -> Any:
        worker, version = str(sent["worker"]), sent.get("version")
        self._present.add(worker)
        log.info("the runner %s has joined", worker)
        if version != __version__:
            other = cut(storable(str(version)), 40) if version else "of an unknown version"
            warning = f"the runner {worker} has agentrig {other}, this run {__version__}: use the same version"
            if warning not in self._versions:
                self._versions.append(warning)
                log.warning("%s", warning)
        return self._offer

    async def _alive(self, sent: Any) -> Any:
        worker = str(sent["worker"])
        self._store.leases.alive(worker)
        if self._state == ENDED:
            self._forget(worker)
        return {"state": self._state}

    async def _report(self, sent: Any) -> Any:
        rollout_id, attempt_id = str(sent["rollout_id"]), str(sent["attempt_id"])
        result = Result.unpacked(rollout_id, sent["result"])
        status = "succeeded" if result.outcome.failure is None else "failed"
        return {"counts": await self._store.report(rollout_id, attempt_id, status, result)}

    async def _leave(self, sent: Any) -> Any:
        worker = str(sent["worker"])
        back = [await self._store.give_back(x.rollout_id, x.attempt_id) for x in self._store.leases.held_by(worker)]
        self._forget(worker)
        log.info("the runner %s has left; %d of its rollouts start again", worker, sum(back))
        return {"given_back": sum(back)}

    def _forget(self, worker: str) -> None:
        with self._gone:
            self._present.discard(worker)
            self._gone.notify()


def _checked(handler: Callable[[Any], Awaitable[Any]]) -> Callable[[Request], Awaitable[JSONResponse]]:
    """Return a route that hands over the JSON value of a request; status 400 for one that no runner sends."""

    async def route(request: Request) -> JSONResponse:
        try:
            return JSONResponse(await handler(json.loads(await request.body())))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            log.warning("a request of a runner to %s is refused: %s", request.url.path, words_of(error))
            return JSONResponse({"error": words_of(error)}, status_code=400)

    return route


def _quietly(schema: Callable[[], Any]) -> Callable[[], Any]:
    """Return what makes an application's schema without the warnings about Agent Lightning's own default values."""

    def made() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PydanticJsonSchemaWarning)
            return schema()

    return made


async def _not_valid(request: Request, error: RequestValidationError) -> JSONResponse:
    """Say what is wrong with a request without its values, which FastAPI would send back, all of them."""
    wrong = [{key: each[key] for key in ("type", "loc", "msg")} for each in error.errors()[:10]]
    return JSONResponse({"detail": wrong}, status_code=422)


async def _not_there(request: Request, error: ResponseValidationError) -> JSONResponse:
    """Answer with status 404 where Agent Lightning's server finds nothing, and its route can't return that."""
    if error.body is not None:
        raise error
    return JSONResponse({"detail": f"there is nothing at {request.url.path}"}, status_code=404)


async def _wrong(request: Request, error: ValueError) -> JSONResponse:
    """Say why the store refuses a request; most often it has no such rollout or attempt."""
    log.warning("a request to %s is refused: %s", request.url.path, words_of(error))
    return JSONResponse({"detail": words_of(error)}, status_code=400)
