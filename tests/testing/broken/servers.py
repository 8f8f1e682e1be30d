"""Servers with one fault each: the one called X is caught by the check `server.X` and by no other.

They serve in a thread of their run, with the model of the example `agentrig-file-server`, so that they start at once.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

from agentrig import Endpoint, ServerSpec, hookimpl
from agentrig.delivery.digests import digests
from agentrig.servers import ServerError, ServerPlan

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "agentrig-file-server" / "src"
KEY = "the key"
FAULTS = (
    *("starts", "token-ids", "logprobs", "takes-weights", "takes-weights-merged", "takes-weights-cache"),
    *("reads-only", "refuses-weights", "version", "greedy", "seed", "sampling", "concurrent", "scores", "digests"),
    *("sleep", "context", "key", "ends", "names-its-death", "ends-with-its-run"),
)


class Broken:
    """A server with one fault."""

    dtype = "float32"

    def __init__(self, fault: str, plan: ServerPlan) -> None:
        self.fault, self.plan, self.context = fault, plan, plan.context
        self.stale: Any = None
        self.slept = False
        self.running, self.together = 0, False
        self.kept: dict[tuple[int, ...], Any] = {}

    @cached_property
    def policy(self) -> Any:
        """The model; torch is imported with the first request."""
        sys.path.insert(0, str(EXAMPLE))
        from agentrig_file_server.serving import Policy

        sys.path.remove(str(EXAMPLE))
        made = Policy(str(self.plan.model), self.plan.name, self.plan.context)
        made.first = {name: tensor.clone() for name, tensor in made.model.state_dict().items()}
        return made

    def __enter__(self) -> Broken:
        command = ["sleep", "60"] if self.fault == "ends-with-its-run" else ["sh", "-c", "read x"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        if self.fault == "ends":
            Path(tempfile.mkdtemp(prefix="left-"))
        lock = threading.Lock()

        class Late:
            """A handler that imports the example with the first request."""

            def __new__(cls, *arguments: Any) -> Any:
                with lock:
                    handler = self.handler
                return handler(*arguments)

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Late)  # type: ignore[arg-type]
        self.http.daemon_threads = True
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"
        sampling = {"temperature": 0.5} if self.fault == "starts" else {}
        self.endpoints = [Endpoint(base_url=url, model="policy", api_key=KEY, token_ids=True, sampling=sampling)]
        return self

    def __exit__(self, *error: Any) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.process.kill()
        self.process.communicate()

    def take(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        self.check()
        policy, fault = self.policy, self.fault
        given = list(weights)
        state = {name: tensor.detach().clone() for name, tensor in given}
        if fault == "takes-weights":
            state = {name: policy.first[name] if "norm" in name else tensor for name, tensor in state.items()}
        elif fault == "reads-only":
            given[0][1].mul_(0.5)
        self.stale = digests(policy.model.state_dict().items())
        whole = policy.model.state_dict()
        wrong = [name for name, tensor in state.items() if name not in whole or tensor.shape != whole[name].shape]
        wrong += [name for name in whole if name not in state and name != "lm_head.weight"]
        if fault != "refuses-weights":
            wrong += [name for name, tensor in state.items() if not tensor.isfinite().all()]
        if wrong:
            raise ServerError(f"{wrong[0]} does not fit")
        if fault == "takes-weights-merged" and state[given[0][0]].equal(whole[given[0][0]]):
            return  # the first tensor is the same: nothing is new
        if fault == "sleep" and self.slept:
            self.slept = False
            return  # it loads its old weights again
        policy.model.load_state_dict(state, strict=False)
        policy.version = version

    def held(self) -> Any:
        """Return digests: with the fault, those of before the last `take`."""
        return [self.stale if self.fault == "digests" else self.policy.held()]

    def sleep(self) -> None:
        self.slept = True

    def wake(self) -> None:
        """Do nothing."""

    def check(self) -> None:
        if self.process.poll() is not None and self.fault != "names-its-death":
            raise ServerError("the server has died")

    @cached_property
    def handler(self) -> type:
        """The example's handler, with the fault."""
        policy, server, fault = self.policy, self, self.fault
        from agentrig_file_server.serving import Handler

        whole: Callable[..., Any] = policy.answer
        lock = threading.Lock()

        def answer(ids: Sequence[int], fields: dict[str, Any], index: int = 0) -> Any:
            asked = dict(fields)
            if fault == "seed":
                asked["seed"] = None
            if fault == "sampling":
                asked["stop"] = None
            if fault == "greedy" and not asked.get("temperature", 1.0):
                asked["temperature"], asked["seed"] = 1.0, 7
            found = whole(ids, asked, index)
            if fault == "logprobs":
                t = float(fields.get("temperature") or 1.0)
                found = (found[0], [p * t for p in found[1]], *found[2:])
            if fault == "takes-weights-cache":
                found = server.kept.setdefault(tuple(ids[:60]), found) if len(ids) > 60 else found
            if fault == "concurrent" and server.together:
                found = (found[0], [p - 0.5 for p in found[1]], *found[2:])
            if fault == "version":
                found = (*found[:3], 0)
            return found

        policy.answer = answer
        if fault == "scores":
            score = policy.score

            def moved(ids: Sequence[int]) -> Any:
                values = [next(iter(place.values())) for place in score(ids)[1:]]
                return [None, *({str(t): v} for t, v in zip(ids[1:], values[1:] + values[:1], strict=True))]

            policy.score = moved

        class Faulty(Handler):  # type: ignore[misc]
            """The fault in what goes over HTTP."""

            key = KEY

            def do_POST(self) -> None:
                if fault == "concurrent":
                    with lock:
                        server.running += 1
                    time.sleep(0.1)  # the others of a step arrive
                    server.together = server.running > 1
                super().do_POST()
                with lock:
                    server.running -= 1

            def do_GET(self) -> None:
                if fault == "key":
                    self.key = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
                    if not self.headers.get("Authorization"):
                        self.headers["Authorization"] = "Bearer "
                super().do_GET()

            def _complete(self, body: dict[str, Any], ids: list[int], *, chat: bool) -> None:
                if fault == "context":
                    ids = ids[-(server.context - 20) :]
                super()._complete(body, ids, chat=chat)

            def _send(self, status: int, body: dict[str, Any]) -> None:
                if fault == "token-ids" and "prompt_token_ids" in body:
                    body["prompt_token_ids"] = body["prompt_token_ids"][:-1]
                super()._send(status, body)

        Faulty.policy = policy
        return Faulty


@hookimpl
def register_servers() -> Iterable[ServerSpec]:
    yield ServerSpec(name="loads", summary="Broken.", build=lambda config: 1 / 0)
    for fault in FAULTS:
        yield ServerSpec(name=fault, summary="Broken.", build=lambda config, fault=fault: partial(Broken, fault))
