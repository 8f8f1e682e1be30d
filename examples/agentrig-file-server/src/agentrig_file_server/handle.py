"""The run's side of the server: starts its process, hands new weights over, ends it."""

from __future__ import annotations

import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
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

    Orders go over a pipe that only the two processes have: an agent, which has the key for requests, can't give any.
    """

    def __init__(self, threads: int, plan: ServerPlan) -> None:
        self._threads, self._plan = threads, plan
        self._key = secrets.token_urlsafe(32)
        self._pipe: Connection[Any, Any] | None = None
        self._process: ServerProcess | None = None
        self._folder: Path | None = None
        self.dtype = "float32"
        self.context = 0
        self.endpoints: Sequence[Endpoint] = ()

    def __enter__(self) -> FileServer:
        plan = self._plan
        self._pipe, theirs = Pipe()
        self._folder = Path(tempfile.mkdtemp(prefix="file-server-"))  # in the run's folder, which goes with the run
        command = [sys.executable, "-P", "-m", "agentrig_file_server.serving", str(theirs.fileno())]
        self._process = ServerProcess("the file server", command, log=plan.log, descriptors=[theirs.fileno()])
        theirs.close()
        try:
            ready = self._ask(
                model=str(plan.model), name=plan.name, context=plan.context, threads=self._threads, key=self._key
            )
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
        if self._pipe is not None:
            self._pipe.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def take(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Write a file, let the process read it, and delete it."""
        import torch
        from safetensors.torch import save_file

        self.check()
        assert self._folder is not None
        file = self._folder / f"{version}.safetensors"
        try:
            save_file({name: t.detach().to("cpu", torch.float32).contiguous() for name, t in weights}, str(file))
            self._ask(file=str(file), version=version)
        finally:
            file.unlink(missing_ok=True)

    def held(self) -> Sequence[Mapping[str, str]] | None:
        """Return the digests of the tensors that the process computes with."""
        return [self._ask(held=True)["digests"]]

    def sleep(self) -> None:
        """Do nothing: it has no memory of a device."""

    def wake(self) -> None:
        """Do nothing."""

    def check(self) -> None:
        """Raise `ServerError` if the process has died."""
        if self._process is None:
            raise ServerError("the file server was never started")
        self._process.check()

    def _ask(self, **order: Any) -> dict[str, Any]:
        assert self._pipe is not None
        assert self._process is not None
        try:
            self._pipe.send(order)
            if not self._pipe.poll(ANSWER_S):
                raise ServerError(f"the file server does not answer{self._process.tail()}")
            answer: dict[str, Any] = self._pipe.recv()
        except (EOFError, OSError):
            self._process.wait(5)
            self._process.check()
            raise ServerError(f"the file server has closed its pipe{self._process.tail()}") from None
        if "error" in answer:
            raise ServerError(f"the file server: {answer['error']}{self._process.tail()}")
        return answer
