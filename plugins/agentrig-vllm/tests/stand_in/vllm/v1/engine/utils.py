"""vLLM's engine: a process that is forked, holds the worker, and answers several clients."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import tempfile
from multiprocessing.connection import Listener, wait
from pathlib import Path
from types import SimpleNamespace


def get_engine_zmq_addresses(config, num_api_servers=1, *, defer_api_server_ports=True):
    folder = Path(tempfile.mkdtemp())
    inputs = [str(folder / f"in-{i}") for i in range(num_api_servers)]
    return SimpleNamespace(inputs=inputs, outputs=[path.replace("in-", "out-") for path in inputs])


@contextlib.contextmanager
def launch_core_engines(config, executor_class, log_stats, addresses, num_api_servers=1):
    assert len(addresses.inputs) == num_api_servers
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context(os.environ["VLLM_WORKER_MULTIPROC_METHOD"])
    process = context.Process(target=_engine, args=(theirs, config.args, addresses.inputs), daemon=True)
    process.start()
    theirs.close()
    yield SimpleNamespace(processes=[process]), None, addresses, None
    failed = ours.recv()
    if failed is not None:
        raise RuntimeError("Engine core initialization failed. See root cause above.") from failed


def _engine(ready, args, addresses):
    module, _, name = args.worker_cls.rpartition(".")
    try:
        worker = getattr(importlib.import_module(module), name)(args)
        worker.compile_or_warm_up_model()
    except Exception as error:
        ready.send(error)
        raise
    listeners = [Listener(address) for address in addresses]
    ready.send(None)
    clients = [listener.accept() for listener in listeners]
    while True:
        for client in wait(clients):
            method, given = client.recv()
            try:
                client.send(getattr(worker, method)(*given))
            except Exception as error:
                client.send(error)
