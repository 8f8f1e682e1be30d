"""vLLM's client of an engine."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Client
from types import SimpleNamespace


class AsyncLLM:
    def __init__(self, args, address):
        self.calls = []
        self.model_config = SimpleNamespace(max_model_len=args.max_model_len or 4096)
        self._pipe = _connected(address)
        resources = SimpleNamespace(engine_manager=None)
        self.engine_core = SimpleNamespace(resources=resources, start_engine_core_monitor=lambda: None)

    @classmethod
    def from_vllm_config(
        cls, config, *, usage_context, disable_log_stats, client_addresses, client_count, client_index
    ):
        assert 0 <= client_index < client_count
        return cls(config.args, client_addresses["input_address"])

    @property
    def errored(self):
        manager = self.engine_core.resources.engine_manager
        return manager is not None and not all(process.is_alive() for process in manager.processes)

    async def get_supported_tasks(self):
        return ("generate",)

    async def check_health(self):
        if self.errored:
            raise RuntimeError("EngineDeadError")

    async def collective_rpc(self, method, args=()):
        self.calls.append(method)
        self._pipe.send((method, args))
        found = self._pipe.recv()
        if isinstance(found, Exception):
            raise found
        return [found]

    async def pause_generation(self, *, mode, clear_cache):
        self.calls.append(f"pause {mode} {clear_cache}")

    async def resume_generation(self):
        self.calls.append("resume")

    async def reset_prefix_cache(self):
        self.calls.append("reset_prefix_cache")
        return True

    async def sleep(self, *, level, mode):
        self.calls.append(f"sleep {level} {mode}")

    async def wake_up(self, tags):
        self.calls.append(f"wake_up {' '.join(tags)}")
        if tags == [os.environ.get("STAND_IN_CANNOT_WAKE")]:
            raise RuntimeError("CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62")


def _connected(address):
    """Connect to an engine that may not listen yet, as ZeroMQ does."""
    while True:
        try:
            return Client(address)
        except (FileNotFoundError, ConnectionRefusedError):
            time.sleep(0.05)
