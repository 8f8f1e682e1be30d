"""The run's side of the server: starts its process, hands new weights over, ends it."""

from __future__ import annotations

import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from agentrig import Endpoint
from agentrig.processes.servers import ServerError, ServerProcess
from agentrig.servers import ServerPlan

if TYPE_CHECKING:
    import torch

ANSWER_S = 300.0
"""Longest wait for an answer of the process."""


class FileServer:
    """Implements `agentrig.servers.Server`.

    Orders go over a channel that only the two processes have: an agent, which has the key for requests, can't give any.
    """

    def __init__(self, threads: int, plan: ServerPlan) -> None:
        self._threads, self._plan = threads, plan
        self._key = secrets.token_urlsafe(32)
        self._process: ServerProcess | None = None
        self._folder: Path | None = None
        self.dtype = "float32"
        self.context = 0
        self.endpoints: Sequence[Endpoint] = ()

    def __enter__(self) -> FileServer:
        plan = self._plan
        self._folder = Path(tempfile.mkdtemp(prefix="file-server-"))  # in the run's folder, which goes with the run
        settings = {"model": str(plan.model), "name": plan.name, "context": plan.context, "threads": self._threads}
        command = [sys.executable, "-P", "-m", "agentrig_file_server.serving"]
        self._process = ServerProcess("the file server", command, first={**settings, "key": self._key}, log=plan.log)
        try:
            ready = self._process.receive("start", ANSWER_S)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        self.context = ready["context"]
        url = f"http://127.0.0.1:{ready['port']}/v1"
        self.endpoints = [Endpoint(base_url=url, model=plan.name, api_key=self._key, token_ids=True)]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.stop()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def take(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Write a file, let the process read it, and delete it."""
        import torch
        from safetensors.torch import save_file

        assert self._folder is not None
        file = self._folder / f"{version}.safetensors"
        try:
            save_file({name: t.detach().to("cpu", torch.float32).contiguous() for name, t in weights}, str(file))
            self._ask(f"take the weights of version {version}", file=str(file), version=version)
        finally:
            file.unlink(missing_ok=True)

    def held(self) -> Sequence[Mapping[str, str]] | None:
        """Return the digests of the tensors that the process computes with."""
        return [self._ask("tell its digests", held=True)["digests"]]

    def sleep(self) -> None:
        """Do nothing: it has no memory of a device."""

    def wake(self) -> None:
        """Do nothing."""

    def check(self) -> None:
        """Raise `ServerError` if the process has died."""
        if self._process is None:
            raise ServerError("the file server was never started")
        self._process.check()

    def _ask(self, what: str, **order: Any) -> dict[str, Any]:
        self.check()
        assert self._process is not None
        return self._process.ask(what, order, ANSWER_S)
