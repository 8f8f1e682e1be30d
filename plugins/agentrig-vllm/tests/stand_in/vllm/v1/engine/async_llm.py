"""vLLM's engine: a process that is forked and holds the worker."""

from __future__ import annotations

import importlib
import multiprocessing
import os
from types import SimpleNamespace


def _engine(pipe, args):
    module, _, name = args.worker_cls.rpartition(".")
    try:
        worker = getattr(importlib.import_module(module), name)(args)
    except Exception as error:
        pipe.send(error)
        raise
    pipe.send(None)
    while True:
        method, given = pipe.recv()
        try:
            pipe.send(getattr(worker, method)(*given))
        except Exception as error:
            pipe.send(error)


class AsyncLLM:
    def __init__(self, args):
        self.calls = []
        self.model_config = SimpleNamespace(max_model_len=args.max_model_len or 4096)
        self._pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context(os.environ["VLLM_WORKER_MULTIPROC_METHOD"])
        self._process = context.Process(target=_engine, args=(theirs, args), daemon=True)
        self._process.start()
        theirs.close()
        failed = self._pipe.recv()
        if failed is not None:
            raise RuntimeError("Engine core initialization failed. See root cause above.") from failed

    @classmethod
    def from_vllm_config(cls, config, *, usage_context, disable_log_stats):
        return cls(config.args)

    @property
    def errored(self):
        return not self._process.is_alive()

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

    async def wake_up(self):
        self.calls.append("wake_up")
