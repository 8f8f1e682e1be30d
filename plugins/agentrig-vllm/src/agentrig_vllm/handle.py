"""The run's side of the server: it starts vLLM's process, hands weights over, and ends it. Imports no torch itself."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from agentrig.endpoints import RECORDED, Endpoint, address_of
from agentrig.errors import ConfigError
from agentrig.hardware import Context
from agentrig.processes.servers import LOOKED_THROUGH, ServerError, ServerOutOfMemory, ServerProcess
from agentrig.tokenizers import disagreement
from agentrig_vllm.options import arguments_of, command_line
from agentrig_vllm.shortages import shortage_in

if TYPE_CHECKING:
    import torch

    from agentrig.servers import ServerPlan
    from agentrig_vllm.config import VllmConfig
    from agentrig_vllm.transfer import Sender

log = logging.getLogger(__name__)

NAME = "the vLLM server"
ORDER_S = 300.0
"""Longest wait for an order, in seconds: running requests end first."""

CHECK_S = 10.0
RELEASE_S = 10.0

ENVIRONMENT: Mapping[str, str] = {
    # The engine is forked from the process that has imported vLLM already; `spawn` would import all of it again.
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it is compiled at the first start, by a compiler that may not be there
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",  # vLLM would look for this machine's address, and listen there
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",  # the model is a directory
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Variables of vLLM's process, unless the run's environment has them."""

WITHHELD = ("VLLM_API_KEY", "VLLM_SERVER_DEV_MODE")
"""Variables that would change the access to vLLM's own server."""


class VllmServer:
    """A vLLM process; implements `agentrig.servers.Server`.

    `__enter__` returns immediately, so that the learner can load while vLLM starts; methods that need the server wait.

    Attributes:
        dtype: The dtype in which it computes.
        parts: Seconds of the start's parts, once it has started.
    """

    def __init__(self, plan: ServerPlan, config: VllmConfig) -> None:
        self._plan, self._config = plan, config
        self._process: ServerProcess | None = None
        self._sender: Sender | None = None
        self._ready: dict[str, Any] | None = None
        self._lent: Mapping[str, Sequence[int]] = {}  # the learner's names and shapes of the weights that it reads
        self._counters: set[Path] = set()  # torch's, of who uses the lent memory
        self._key = secrets.token_urlsafe(32)
        self.dtype = plan.dtype
        self.parts: Mapping[str, float] = {}

    # --- start and end ----------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._begun = time.perf_counter()
        self._process = ServerProcess(
            NAME,
            [sys.executable, "-P", "-m", "agentrig_vllm.serving"],
            first={
                "command_line": command_line(arguments_of(self._plan, self._config)),
                "key": self._key,
                "host": self._config.host,
                "port": self._config.port,
                "api_server_count": self._config.api_server_count,
                "adapters": self._plan.adapters,
            },
            log=self._plan.log,
            environment=self._environment(),
        )
        found = disagreement(str(self._plan.model))
        if found is not None:
            log.warning(
                "vLLM tokenizes text differently from %s/tokenizer.json (%s): a model that was trained with that file "
                "gives worse answers here. Use server.use=embedded, or train it with its model family's pre-tokenizer.",
                self._plan.model,
                found,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._sender is not None:
            with contextlib.suppress(ServerError):  # it is dead, and so holds no memory
                self._order("release the buffer", order="release", timeout_s=RELEASE_S)
            self._sender.close()
        if self._process is not None:
            self._process.stop()  # at once: it has nothing to save
        for counter in self._counters:  # torch would have removed it at the end of vLLM's engine
            counter.unlink(missing_ok=True)

    def _environment(self) -> dict[str, str]:
        own = self._plan.hardware.environment(Context(role="rollout"))
        # The sampler has small compiled parts too; the first of them would cost some seconds at the start.
        eager = {} if self._config.compile or self.dtype == "float32" else {"TORCHDYNAMO_DISABLE": "1"}
        found = {**ENVIRONMENT, **eager, **own, **{k: v for k, v in os.environ.items() if k not in WITHHELD}}
        visible = devices(os.environ.get("CUDA_VISIBLE_DEVICES"), own=self._learner, other=self._config.device)
        return found | ({"CUDA_VISIBLE_DEVICES": visible} if visible else {})

    @property
    def _learner(self) -> int:
        """The number of the learner's GPU among those that the run sees."""
        return int(self._plan.hardware.torch_device.partition(":")[2] or 0)

    @property
    def pid(self) -> int:
        """The process's id; 0 before it is started."""
        return self._process.pid if self._process else 0

    @property
    def endpoints(self) -> Sequence[Endpoint]:
        """The addresses, all of one engine; waits until they answer."""
        urls = [f"{address_of(self._config.host, port)}/v1" for port in self._started()["ports"]]
        more: dict[str, Any] = {"api_key": self._key, "headers": {RECORDED: "1"}, "token_ids": True}
        return [Endpoint(base_url=url, model=self._plan.name, **more) for url in urls]

    @property
    def context(self) -> int:
        """Most tokens of a prompt and its answer together; waits until the server has started."""
        return int(self._started()["context"])

    def _started(self) -> dict[str, Any]:
        if self._ready is None:
            with self._shortages("start"):
                found = self._running().receive("start", self._config.start_s - (time.perf_counter() - self._begun))
            self._ready, self.parts = found, found["parts"]
            parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in self.parts.items())
            log.info("%s started in %.1f s (%s)", NAME, time.perf_counter() - self._begun, parts)
        return self._ready

    # --- weights ----------------------------------------------------------------------------------

    def take(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Compute with new weights from now on; see `agentrig.servers.Server`."""
        import torch

        from agentrig.device_memory import give_memory_back
        from agentrig_vllm.transfer import ALIGNED, Sender

        room = self._config.chunk_mb << 20
        if self._plan.adapters:  # they go in one message
            weights = list(weights)
            room = sum(-(-t.numel() * t.element_size() // ALIGNED) * ALIGNED for _, t in weights)
        if self._sender is None:
            self._sender = Sender(getattr(torch, self.dtype), room)
        what = f"take the weights of version {version}"
        self._order(what, order="begin")
        device = torch.device(self._plan.hardware.torch_device.partition(":")[0], self._learner)
        for message in self._sender.messages(weights, device):
            self._order(what, order="load", message=json.dumps(message), device=self._place)
        if self._plan.sleeps:
            give_memory_back(device)  # the server takes its memory for keys and values now
        self._order(what, order="end", version=version)

    @property
    def _place(self) -> int:
        """The number that the learner's GPU has in vLLM's process."""
        return 0 if self._config.device in (-1, self._learner) else 1

    def held(self) -> Sequence[Mapping[str, str]] | None:
        """Return the digests of the tensors that vLLM computes with, under the learner's names."""
        if self._sender is None:
            return None
        shapes = {**self._lent, **self._sender.shapes}
        answer = self._order("tell its digests", order="held", shapes=json.dumps(shapes))
        return [json.loads(answer["digests"])] * len(self.endpoints)

    def lend(self, shapes: Mapping[str, Sequence[int]]) -> Mapping[str, torch.Tensor]:
        """Return vLLM's own weights on the learner's GPU; see `agentrig.servers.Lending`."""
        from agentrig_vllm import transfer

        what = "lend its weights to the learner"
        self._lent = dict(shapes)
        try:
            answer = self._order(what, order="lend", shapes=json.dumps(shapes))
            entries = json.loads(answer["tensors"])
            self._counters = {transfer.counter_of(entry) for entry in entries.values()}
            found = {name: transfer.opened(entry, self._learner) for name, entry in entries.items()}
            return {name: transfer.view_of(buffer, entries[name]) for name, buffer in found.items()}
        except (RuntimeError, ServerError) as error:
            raise ServerError(
                f"{NAME} could not {what}, by CUDA's handles of memory: {error}\n  Let the learner have its own copy: "
                'algorithm.lora_base = "own"'
            ) from error

    # --- memory and health ------------------------------------------------------------------------

    def device_memory(self) -> int | None:
        """Return the bytes that vLLM holds of the learner's GPU; see `agentrig.servers.Measuring`."""
        if self._place:  # it computes on another one
            return 0
        found: int | None = self._order("tell its memory", order="memory")["bytes"]
        return found

    def sleep(self) -> None:
        """Give the GPU's memory to the learner; the weights go too, and `take` brings new ones."""
        self._order("sleep", order="sleep")

    def wake(self) -> None:
        """Take the weights' memory back; that of keys and values follows at the end of `take`."""
        self._order("wake", order="wake")

    def check(self) -> None:
        """Raise `ServerError` if vLLM's process or its engine has died."""
        with self._shortages("answer"):
            self._running().check()
        if self._ready is not None:
            self._order("answer", order="check", timeout_s=CHECK_S)

    def _running(self) -> ServerProcess:
        if self._process is None:
            raise ServerError(f"{NAME} was never started")
        return self._process

    def _order(self, what: str, *, timeout_s: float = ORDER_S, **order: Any) -> dict[str, Any]:
        """Let the server carry out an order and return the answer; see `ServerProcess.ask`."""
        self._started()
        with self._shortages(what):
            return self._running().ask(what, order, timeout_s)

    @contextlib.contextmanager
    def _shortages(self, what: str) -> Iterator[None]:
        """Say in one message which memory is too small where vLLM fails because of that, without its traceback."""
        try:
            yield
        except ServerError as error:
            process = self._running()
            dead = process.exit_status is not None
            found = shortage_in(f"{error}\n{process.tail(LOOKED_THROUGH) if dead else ''}", started=bool(self._ready))
            if not found:
                raise
            reason, _, cure = found.partition("\n")
            log_file = f"\n  its log: {self._plan.log}" if self._plan.log else ""
            raise ServerOutOfMemory(f"{NAME} could not {what}: {reason}\n{cure}{log_file}") from None


def devices(visible: str | None, *, own: int, other: int) -> str:
    """Return the value of CUDA_VISIBLE_DEVICES for vLLM's process: the server's GPU first, then the learner's.

    vLLM's process sees both, because it reads the weights from the learner's.

    Args:
        visible: The variable's value in the run; None if it is unset.
        own: The number of the learner's GPU among those that the run sees.
        other: The number of the server's; -1 for the same one.

    Raises:
        ConfigError: The run does not see that many.
    """
    names = [name.strip() for name in visible.split(",") if name.strip()] if visible is not None else None
    wanted = [own] if other in (-1, own) else [other, own]
    if names is None:
        return ",".join(map(str, wanted))
    if max(wanted) >= len(names):
        raise ConfigError(
            f"[server] device = {max(wanted)}: the run sees {len(names)} GPUs (CUDA_VISIBLE_DEVICES={visible}), "
            "counted from 0"
        )
    return ",".join(names[number] for number in wanted)
