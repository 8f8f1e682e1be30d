"""The parent's side of the server: start it, swap its weights, stop it. Imports no torch."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import attrs

from agentrig.errors import exhausted
from agentrig.processes.servers import ServerError, ServerProcess
from agentrig_grpo.server.channel import Channel

if TYPE_CHECKING:
    import torch

    from agentrig_grpo.server.transfer import Sender

ANY_HOST = ("", "0.0.0.0")
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
"""With this, glibc keeps the memory of a decode step's tensors for the next step.

Without it, page faults took longer than the arithmetic of the largest tensors."""


@attrs.frozen(kw_only=True)
class ServerSettings:
    """What a server is started with.

    Attributes:
        model: A Hugging Face directory.
        name: The model name that requests must ask for.
        device: torch's name of the device.
        dtype: `float32`, `bfloat16` or `float16`.
        threads: torch threads on a CPU.
        slots: Most requests in one batch.
        max_length: Context in tokens; 0 for the model's own.
        seed: Of requests that bring none.
        prompt_cache_mb: Memory for prompts that are kept for reuse, MiB.
        prefill_tokens: Most prompt tokens between two decode steps.
        kv_cache_mb: Memory for the keys and values of running requests, MiB; 0 for `share` of the device's.
        share: See `kv_cache_mb`.
        host: Address to listen on.
        port: 0 for a free one.
    """

    model: str
    name: str
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 1
    slots: int = 64
    max_length: int = 0
    seed: int = 0
    prompt_cache_mb: int = 256
    prefill_tokens: int = 8192
    kv_cache_mb: int = 0
    share: float = 0.25
    host: str = "127.0.0.1"
    port: int = 0


class LLMServer:
    """A server process; a context manager that starts and stops it.

    Attributes:
        api_key: The key that every request must have; new for each server.
        port: The port that it listens on.
        max_length: Its context in tokens, once it is started.

    Args:
        settings: See `ServerSettings`.
        environment: Variables to set for the process where they are unset.
        log: File for its standard error; None for an unnamed one.
        start_timeout_s: Longest wait for the model to load.
    """

    def __init__(
        self,
        settings: ServerSettings,
        *,
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
        start_timeout_s: float = 600.0,
    ) -> None:
        self.settings = settings
        self._environment = {**MALLOC, **(environment or {}), **os.environ}
        self._timeout = start_timeout_s
        self._log_path = log
        self._process: ServerProcess | None = None
        self._channel: Channel | None = None
        self._sender: Sender | None = None
        self.api_key = secrets.token_urlsafe(32)
        self.port = self.max_length = 0
        self._failed = ""

    @property
    def base_url(self) -> str:
        """The address for OpenAI clients; with this machine's name when it listens on all its addresses."""
        host = socket.gethostname() if self.settings.host in ANY_HOST else self.settings.host
        return f"http://{host}:{self.port}/v1"

    @property
    def pid(self) -> int:
        """The process's id; 0 when it was never started."""
        return self._process.pid if self._process else 0

    def __enter__(self) -> LLMServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the process and wait until it answers.

        Raises:
            ServerError: It could not start; the message has its error.
        """
        self.launch()
        self.ready()

    def launch(self) -> None:
        """Start the process, and do not wait.

        Raises:
            ServerError: There can be no such process.
        """
        self.port, self.max_length, self._failed = 0, 0, ""
        self._channel, theirs = Channel.pair()
        # -P: never import modules from the current folder.
        command = [sys.executable, "-P", "-m", "agentrig_grpo.server", str(theirs.fileno()), str(os.getpid())]
        self._process = ServerProcess(
            "the LLM server",
            command,
            log=self._log_path,
            environment=self._environment,
            descriptors=[theirs.fileno()],
        )
        theirs.close()
        with contextlib.suppress(OSError):  # it has died already: `ready` says so
            self._channel.send({"settings": attrs.asdict(self.settings), "key": self.api_key})

    def ready(self) -> None:
        """Wait until the process answers; at once if it has answered already.

        Raises:
            ServerError: It could not start; the message has its error.
        """
        if self.port:
            return
        answer = self._receive(self._timeout, "start")
        if "error" in answer:
            self.stop()
            self._failed = f"the LLM server for {self.settings.model} could not start: {answer['error']}"
            raise ServerError(self._failed)
        self.port, self.max_length = answer["port"], answer["max_length"]

    def _ask(
        self, message: dict[str, Any], timeout_s: float, what: str, *, descriptor: int | None = None
    ) -> dict[str, Any]:
        """Send a message over the channel and return the answer. A server that does not answer is stopped."""
        assert self._channel is not None
        with contextlib.suppress(OSError):  # its end is closed: the answer says so
            self._channel.send(message, descriptor=descriptor)
        return self._receive(timeout_s, what)

    def _receive(self, timeout_s: float, what: str) -> dict[str, Any]:
        if self._channel is None or self._process is None:
            raise ServerError("the LLM server was never started, or is stopped")
        try:
            answer, _ = self._channel.receive(timeout_s)
        except TimeoutError:
            self.stop()
            raise ServerError(f"the LLM server did not {what} within {timeout_s:.0f} s{self._process.tail()}") from None
        except (EOFError, OSError):
            self._process.wait(5)  # its end of the channel closes just before its exit status is known
            self.stop()
            code, tail = self._process.exit_status, self._process.tail()
            raise ServerError(f"the LLM server has died, asked to {what} (exit status {code}){tail}") from None
        return answer

    def check(self) -> None:
        """Raise `ServerError` if the process has died."""
        if self._process is None:
            raise ServerError("the LLM server was never started")
        if self._failed:  # it was ended then: its exit status says nothing
            raise ServerError(self._failed)
        self._process.check()

    def swap(self, weights: Mapping[str, torch.Tensor], version: int, *, timeout_s: float = 600.0) -> None:
        """Give the server new weights; returns when it samples with them.

        They are sent in unnamed shared memory, or on a CUDA device in memory of it, over a channel that only these two
        processes have.

        Args:
            weights: Names, as in the model's own files, to tensors on any device.
            version: Reported with every response, and part of the seed of requests that bring none.
            timeout_s: Requests that run are finished first.

        Raises:
            ServerError: It has died, or the weights do not fit the model or are not finite: then the server goes on
                with those that it has.
        """
        import torch

        from agentrig_grpo.server.transfer import Sender

        self.check()
        if self._sender is None:
            self._sender = Sender(getattr(torch, self.settings.dtype), self.settings.device)
        try:
            message, descriptor = self._sender.pack(weights)
        except OSError as error:
            raise ServerError(f"the weights cannot be sent to the server: {exhausted(error) or error}") from None
        try:
            message["version"] = version
            answer = self._ask(message, timeout_s, "take its new weights", descriptor=descriptor)
        finally:
            if descriptor is not None:
                os.close(descriptor)
        if "error" in answer:
            raise ServerError(f"the LLM server refuses its new weights (version {version}): {answer['error']}")

    def free(self, *, timeout_s: float = 600.0) -> None:
        """Let the server free the keys and values of prompts, and the device memory that it does not use.

        Raises:
            ServerError: It has died.
        """
        self.check()
        self._ask({"free": True}, timeout_s, "free its memory")

    def health(self) -> dict[str, Any]:
        """Return what `/health` says: status, version, counts of steps, tokens, prompts and prefills."""
        self.check()
        return self._http("GET", "/health", 60.0)

    def _http(self, method: str, path: str, timeout_s: float) -> dict[str, Any]:
        host = "127.0.0.1" if self.settings.host in ANY_HOST else self.settings.host
        connection = http.client.HTTPConnection(host, self.port, timeout=timeout_s)
        try:
            connection.request(method, path, headers={"Authorization": f"Bearer {self.api_key}"})
            answer: dict[str, Any] = json.loads(connection.getresponse().read())
        except OSError as error:
            self.check()
            tail = self._process.tail() if self._process else ""
            raise ServerError(f"the LLM server at {self.base_url} does not answer: {error}{tail}") from error
        finally:
            connection.close()
        return answer

    def stop(self) -> None:
        """Stop the process; harmless when it is not running."""
        if self._process is None:
            return
        self._process.stop()  # at once: it has nothing to save
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._sender is not None:
            self._sender.close()
            self._sender = None
