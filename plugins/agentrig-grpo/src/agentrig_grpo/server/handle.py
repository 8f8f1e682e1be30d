"""The parent's side of the server: start it, swap its weights, stop it. Imports no torch."""

from __future__ import annotations

import http.client
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import attrs

from agentrig.errors import AgentrigError

ANY_HOST = ("", "0.0.0.0")
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
"""glibc then keeps the memory of a decode step's tensors instead of faulting it in anew at each step,
which took longer than the arithmetic for the largest of them."""


class ServerError(AgentrigError):
    """The LLM server could not be started, or has died, or refuses its new weights."""


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
    host: str = "127.0.0.1"
    port: int = 0


class LLMServer:
    """A server process; a context manager that starts and stops it.

    Args:
        settings: See `ServerSettings`.
        environment: Variables to set for the process where they are unset.
        log: File for what it writes to its standard error; None for a temporary one.
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
        self._log = log
        self._temporary: Any = None
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

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
        if self._log is None:
            self._temporary = tempfile.NamedTemporaryFile(prefix="agentrig-server-", suffix=".log")  # noqa: SIM115
            self._log = Path(self._temporary.name)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as err:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "agentrig_grpo.server"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=err,
                env=self._environment,
                # Ctrl-C goes to the terminal's whole group, and a run still needs its server to end well.
                start_new_session=True,
            )
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(attrs.asdict(self.settings)).encode() + b"\n")
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # it died at once; the missing answer tells
        answer = self._answer()
        if "error" in answer:
            self.stop()
            raise ServerError(f"the LLM server for {self.settings.model} could not start: {answer['error']}")
        self.port = answer["port"]

    def _answer(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        deadline = time.monotonic() + self._timeout
        while True:
            readable, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                self.stop()
                raise ServerError(f"the LLM server did not start within {self._timeout:.0f} s{self._tail()}")
            line = self._process.stdout.readline()
            if not line:
                code = self._process.wait()
                raise ServerError(f"the LLM server died while it started (exit status {code}){self._tail()}")
            answer: dict[str, Any] = json.loads(line)
            return answer

    def check(self) -> None:
        """Raise `ServerError` if the process has died."""
        if self._process is None or self._process.poll() is not None:
            code = "never started" if self._process is None else f"exit status {self._process.returncode}"
            raise ServerError(f"the LLM server has died ({code}){self._tail()}")

    def swap(self, path: Path, version: int, *, timeout_s: float = 600.0) -> None:
        """Give the server new weights; returns when it samples with them.

        Args:
            path: A safetensors file or a Hugging Face directory; under `/dev/shm` it never meets a disk.
            version: Reported with every response, and part of the seed of requests that bring none.
            timeout_s: Requests that run are finished first.

        Raises:
            ServerError: It has died, or the weights do not fit.
        """
        self.check()
        answer = self._http("POST", "/admin/weights", {"path": str(path), "version": version}, timeout_s)
        if "error" in answer:
            raise ServerError(f"the LLM server refuses its new weights: {answer['error']['message']}")

    def health(self) -> dict[str, Any]:
        """Return what `/health` says: status, version, counts of steps, tokens, prompts and prefills."""
        self.check()
        return self._http("GET", "/health", None, 60.0)

    def _http(self, method: str, path: str, body: Any, timeout_s: float) -> dict[str, Any]:
        host = "127.0.0.1" if self.settings.host in ANY_HOST else self.settings.host
        connection = http.client.HTTPConnection(host, self.port, timeout=timeout_s)
        try:
            connection.request(method, path, body=None if body is None else json.dumps(body))
            answer: dict[str, Any] = json.loads(connection.getresponse().read())
        except OSError as error:
            self.check()
            raise ServerError(f"the LLM server at {self.base_url} does not answer: {error}{self._tail()}") from error
        finally:
            connection.close()
        return answer

    def stop(self) -> None:
        """Stop the process; harmless when it is not running."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _tail(self, lines: int = 15) -> str:
        if self._log is None or not self._log.is_file():
            return ""
        text = self._log.read_text("utf-8", errors="replace").splitlines()[-lines:]
        return "\n  its last words:\n  " + "\n  ".join(text) if text else ""
