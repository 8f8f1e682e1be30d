"""The parent's side of the server: starts it, gives it new weights, stops it. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import attrs

from agentrig.device_memory import GONE, out_of_device_memory, shortage
from agentrig.endpoints import RECORDED, Endpoint, address_of
from agentrig.errors import exhausted
from agentrig.processes.servers import LOOKED_THROUGH, ServerError, ServerOutOfMemory, ServerProcess
from agentrig.servers import ServerPlan
from agentrig_grpo.config import EmbeddedConfig

if TYPE_CHECKING:
    import torch

    from agentrig_grpo.server.transfer import Sender

LESS = (
    "Lower server.kv_cache_mb or server.batch, or set algorithm.server_sleep = true, which frees the server's memory "
    "during updates"
)
"""What helps where a device has too little memory for learner and server."""

LOADING_S = 600.0
"""Longest wait for the model to load, in seconds."""

MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
"""With this, glibc keeps the memory of a decode step's tensors for the next step.

Without it, page faults took longer than the arithmetic of the largest tensors."""


class Embedded:
    """The server `embedded`, a process; implements `agentrig.servers.Server`.

    `__enter__` does not wait for the process: the learner can load while it starts. What needs it waits. On Linux the
    process ends with the thread that entered. Its answers have the version of its weights and, if it scores tokens, the
    digests of its tensors.

    Attributes:
        api_key: The key that every request must have; new for each server.
        dtype: The dtype in which it computes.
        settings: What the process gets.
    """

    def __init__(self, config: EmbeddedConfig, plan: ServerPlan) -> None:
        hardware = plan.hardware
        self.settings = {
            **attrs.asdict(config),
            "model": str(plan.model),
            "name": plan.name,
            "device": hardware.torch_device,
            "dtype": plan.dtype,
            # The agents need the other half of the cores. More threads do not speed up small batches.
            "threads": config.threads or max(1, getattr(hardware, "threads", 1) // 2),
            "max_length": plan.context,
            "seed": plan.seed,
            "memory": plan.memory or 0,
        }
        self.dtype, self._device, self._name, self._host = plan.dtype, hardware.torch_device, plan.name, config.host
        self._environment, self._log = {**MALLOC, **hardware.environment(), **os.environ}, plan.log
        self._process: ServerProcess | None = None
        self._sender: Sender | None = None
        self.api_key = secrets.token_urlsafe(32)
        self._ready: Mapping[str, Any] = {}
        self._failed = ""

    def __enter__(self) -> Self:
        self._ready, self._failed = {}, ""
        self._process = ServerProcess(
            "the LLM server",
            # -P: never import modules from the current folder.
            [sys.executable, "-P", "-m", "agentrig_grpo.server", str(os.getpid())],
            first={"settings": self.settings, "key": self.api_key},
            log=self._log,
            environment=self._environment,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def ready(self) -> Mapping[str, Any]:
        """Wait until the process answers; return its `port` and its `max_length`."""
        if not self._ready:
            try:
                with self._shortages("start"):
                    self._ready = self._running().receive("start", LOADING_S)
            except ServerError as error:
                self._failed = self._failed or str(error)
                self.stop()
                raise
        return self._ready

    def _running(self) -> ServerProcess:
        if self._process is None:
            raise ServerError("the LLM server was never started")
        if self._failed:  # it was ended then: its exit status says nothing
            raise ServerError(self._failed)
        return self._process

    @contextlib.contextmanager
    def _shortages(self, what: str) -> Iterator[None]:
        """Say what to set where the device's memory is too small for the server."""
        try:
            yield
        except ServerError as error:
            process = self._running()
            text = f"{error}\n{process.tail(LOOKED_THROUGH) if process.exit_status is not None else ''}"
            said = [line for line in text.splitlines() if GONE.search(line)]
            if not said:
                raise
            lacks = shortage(max(said, key=len), "the server")
            where = f"\n  its log: {self._log}" if self._log else ""
            raise ServerOutOfMemory(
                f"the LLM server could not {what}: its device ran out of memory: {lacks}\n  {LESS}{where}"
            ) from None

    @property
    def pid(self) -> int:
        """The process's id; 0 when it was never started."""
        return self._process.pid if self._process else 0

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self.ready()["port"])

    @property
    def base_url(self) -> str:
        """The address for OpenAI clients; with this machine's name when it listens on all its addresses."""
        return f"{address_of(self._host, self.port)}/v1"

    @property
    def endpoints(self) -> Sequence[Endpoint]:
        """The one address."""
        own = {RECORDED: "1"}
        return [Endpoint(base_url=self.base_url, model=self._name, api_key=self.api_key, headers=own, token_ids=True)]

    @property
    def context(self) -> int:
        """Most tokens of a prompt and its answer together."""
        return int(self.ready()["max_length"])

    def check(self) -> None:
        """Raise `ServerError` if the process has died."""
        with self._shortages("answer"):
            self._running().check()

    def take(
        self,
        weights: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
        version: int,
        *,
        timeout_s: float = 600.0,
    ) -> None:
        """Give the server new weights; returns when it samples with them.

        They are sent in unnamed shared memory, or on a CUDA device in memory of it, over a channel that only these two
        processes have.

        Args:
            weights: Names, as in the model's own files, and tensors on any device; see `Sender.pack`.
            version: Reported with every response, and part of the seed of requests that bring none.
            timeout_s: Requests that run are finished first.

        Raises:
            ServerError: It has died, or the weights do not fit the model or are not finite: then the server goes on
                with those that it has.
        """
        import torch

        from agentrig_grpo.server.transfer import Sender

        self.ready()
        self.check()
        if self._sender is None:
            self._sender = Sender(getattr(torch, self.dtype), self._device)
        try:
            message, descriptor = self._sender.pack(weights)
        except OSError as error:
            if text := out_of_device_memory(error):
                raise ServerOutOfMemory(
                    f"the weights cannot be sent to the LLM server: {shortage(text)}\n  {LESS}"
                ) from None
            raise ServerError(f"the weights cannot be sent to the server: {exhausted(error) or error}") from None
        try:
            what = f"take the weights of version {version}"
            with self._shortages(what):
                self._running().ask(what, {**message, "version": version}, timeout_s, descriptor=descriptor)
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def held(self) -> Sequence[Mapping[str, str]] | None:
        """Return None: they are in its answers."""
        return None

    def device_memory(self) -> int | None:
        """Return the bytes that the process holds of its device; see `agentrig.servers.Measuring`."""
        self.ready()
        found: int | None = self._running().ask("tell its memory", {"memory": True}, 600.0)["bytes"]
        return found

    def sleep(self) -> None:
        """Free the weights, the prompts' keys and values, and the memory of the transfer; `take` brings new weights."""
        self.check()
        with self._shortages("free its memory"):
            self._running().ask("free its memory", {"free": True}, 600.0)
        if self._sender is not None:
            self._sender.close()

    def wake(self) -> None:
        """Do nothing: it takes memory as it needs it."""

    def stop(self) -> None:
        """Stop the process; harmless when it is not running."""
        if self._process is not None:
            self._process.stop()  # at once: it has nothing to save
        if self._sender is not None:
            self._sender.close()
            self._sender = None
