"""What the checks of a server share: the server with a tiny model, the same model in this process, and requests."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import attrs
import httpx

from agentrig.endpoints import Endpoint
from agentrig.hardware import Cpu, CpuConfig, Hardware
from agentrig.processes.families import marked
from agentrig.servers import Server, ServerPlan
from agentrig.testing.policy import Part, Policy
from agentrig.testing.subject import CheckFailed, CheckSkipped, Subject
from agentrig.testing.tiny_model import make_tiny_model

NAME = "policy"
"""The model's name in requests."""

MARK = "AGENTRIG_KIT"
"""Environment variable by which the processes of a subject are found."""

COUNT = itertools.count(1)


class Reply(NamedTuple):
    """A chat completion; `version` is `system_fingerprint`."""

    prompt: Sequence[int]
    tokens: Sequence[int]
    logprobs: Sequence[float]
    text: str
    finish: str
    version: Any


@attrs.define(kw_only=True, eq=False, slots=False)
class ServerSubject(Subject):
    """A server with a tiny model, the same model in this process, and requests.

    Attributes:
        model: A Hugging Face directory with a small model; None for a tiny random one.
        hardware: What to serve on; None for the CPU with one thread.
        context: Most tokens of a prompt and its answer together.
        tolerance: Largest difference of two log-probabilities that counts as equal, in nats.
        end_s: How long processes may take to end after their run was killed, seconds.
    """

    model: Path | None = None
    hardware: Hardware | None = None
    context: int = 128
    tolerance: float = 1e-3
    end_s: float = 30.0
    running: Server | None = attrs.field(default=None, init=False)
    _version: int = attrs.field(default=0, init=False)

    @cached_property
    def temporary(self) -> Path:
        """The folder for the server's temporary files."""
        folder = self.folder / "tmp"
        folder.mkdir()
        return folder

    @cached_property
    def directory(self) -> Path:
        """The model's directory."""
        return self.model or make_tiny_model(self.folder / "model")

    @cached_property
    def policy(self) -> Policy:
        """The model in this process.

        Raises:
            CheckSkipped: torch or transformers is not installed.
        """
        try:
            return Policy(self.directory)
        except ImportError as error:
            raise CheckSkipped(
                f"transformers computes the same log-probabilities, and is not installed: {error}"
            ) from None

    @contextmanager
    def marking(self) -> Iterator[None]:
        """Let what is started now be found by its environment, and put its temporary files into a folder."""
        own = {MARK: str(self.folder), "TMPDIR": str(self.temporary)}
        own["TORCHINDUCTOR_CACHE_DIR"] = str(self.folder / "torchinductor")  # as in a run: no temporary files
        with mock.patch.dict(os.environ, own), mock.patch.object(tempfile, "tempdir", own["TMPDIR"]):
            yield

    def processes(self) -> list[Any]:
        """Return the living processes that were started while `marking`."""
        return [p for p in marked(MARK, str(self.folder)) if p.pid != os.getpid()]

    def plan(self) -> ServerPlan:
        """Return the plan that the server gets."""
        return ServerPlan(
            model=self.directory,
            name=NAME,
            hardware=self.hardware or Cpu(config=CpuConfig(threads=1)),
            context=self.context,
            seed=3,
            sleeps=True,
            log=self.folder / "server.log",
        )

    @property
    def server(self) -> Server:
        """The server that checks share, running."""
        if self.running is None:
            with self.marking():
                server: Server = self.made(self.plan())
                server.__enter__()
                _ = server.endpoints
            self.running, self._version = server, 0
            self.policy.restore()
            self.opened.callback(self.stop)
        return self.running

    def stop(self) -> None:
        """End the shared server, if it runs."""
        server, self.running = self.running, None
        if server is not None:
            with self.marking():
                server.__exit__(None, None, None)

    def take(self, weights: Iterable[tuple[str, Any]]) -> int:
        """Hand weights over, and return their version."""
        server = self.server
        self._version += 1
        with self.marking():
            server.take(iter(weights), self._version)
        return self._version

    @property
    def endpoint(self) -> Endpoint:
        """The shared server's first address."""
        return self.server.endpoints[0]

    def give(self, part: Part | None = "most") -> int:
        """Change weights here (None changes none), hand all over, and return their version."""
        _ = self.server
        if part is not None:
            self.policy.change(self._version + 1, part)
        return self.take((name, tensor.clone()) for name, tensor in self.policy.weights())

    @cached_property
    def client(self) -> httpx.Client:
        """Sends requests, each over a connection of its own; certificates, which take long to read, are not needed."""
        limits = httpx.Limits(max_keepalive_connections=0)
        return self.opened.enter_context(httpx.Client(timeout=120, trust_env=False, verify=False, limits=limits))

    def prompt(self, words: int = 1) -> str:
        """Return a question that was not asked before."""
        return f"{next(COUNT)} " + "count name " * words

    def post(self, path: str, body: Mapping[str, Any], *, key: str | None = None) -> httpx.Response:
        """Send a request; `key=''` sends none."""
        endpoint = self.endpoint
        key = endpoint.api_key if key is None else key
        headers = {**endpoint.headers, **({"Authorization": f"Bearer {key}"} if key else {})}
        return self.client.post(f"{endpoint.base_url}{path}", json=dict(body), headers=headers)

    def body(self, text: str, **fields: Any) -> dict[str, Any]:
        """Return the body of a request as the tracer sends it."""
        asked = {"model": self.endpoint.model, "messages": [{"role": "user", "content": text}], "max_tokens": 8}
        return {**asked, "temperature": 1.0, "logprobs": True, "return_token_ids": True, **fields}

    def ask(self, text: str, **fields: Any) -> Reply:
        """Return the first of `replies`."""
        return self.replies(text, **fields)[0]

    def replies(self, text: str, **fields: Any) -> list[Reply]:
        """Return the choices of a completion.

        Raises:
            CheckFailed: The server does not answer, or the answer lacks what training needs.
        """
        answer = self.post("/chat/completions", self.body(text, **fields))
        if answer.status_code != 200:
            raise CheckFailed(f"POST /chat/completions answers {answer.status_code}: {answer.text[:300]}")
        body = answer.json()
        try:
            found = [
                Reply(
                    prompt=[int(i) for i in body["prompt_token_ids"]],
                    tokens=[int(i) for i in choice["token_ids"]],
                    logprobs=[float(c["logprob"]) for c in choice["logprobs"]["content"]],
                    text=choice["message"]["content"] or "",
                    finish=choice["finish_reason"],
                    version=body.get("system_fingerprint"),
                )
                for choice in body["choices"]
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckFailed(
                f"an answer lacks {error}: it has {', '.join(body)}",
                "Answer return_token_ids with prompt_token_ids beside choices and token_ids in each choice, and "
                "logprobs with logprobs.content, as vLLM does.",
            ) from None
        for reply in found:
            if len(reply.tokens) != len(reply.logprobs) or not reply.tokens:
                raise CheckFailed(f"{len(reply.tokens)} tokens came with {len(reply.logprobs)} log-probabilities")
        return found

    def compare(self, text: str, reply: Reply | None = None, *, temperature: float = 1.0, when: str = "") -> None:
        """Compare the log-probabilities of an answer, asked for now by default, with the model's own.

        Raises:
            CheckFailed: They differ; the message begins with `when`.
        """
        reply = reply or self.ask(text, temperature=temperature)
        own = self.policy.logprobs(self.policy.ids(text), reply.tokens, temperature)
        far = [abs(a - b) for a, b in zip(own, reply.logprobs, strict=True)]
        if not max(far) <= self.tolerance:  # NaN is not equal either
            at = far.index(max(far))
            raise CheckFailed(
                f"{when}token {at + 1} of {len(far)} has log-probability {reply.logprobs[at]:.4f}, and transformers "
                f"computes {own[at]:.4f} with the same weights; {self.tolerance:g} are allowed"
            )
