"""The server process: `python -m agentrig_grpo.server PARENT DESCRIPTOR`, started by `handle.Embedded`.

The first argument is the run's process, the second its end of the channel to the run. It
gets its settings and the key over the channel, answers with the port or an error, then takes new weights from it,
and serves until the run is gone or kills it.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import signal
import socket
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

from agentrig import http_server
from agentrig.device_memory import give_memory_back, held_here
from agentrig.errors import AgentrigError
from agentrig.hardware.cpu import choose_vector_kernels
from agentrig.processes.channel import Channel
from agentrig.processes.ends import SIGNALS
from agentrig.processes.supervisor import end_with_parent

log = logging.getLogger(__name__)

BESIDE = 1 << 30
"""Bytes of the device that are neither weights nor keys and values: the device's libraries, a pass of prompts."""

BODY_LIMIT = 16 << 20
"""Most bytes of a request's body, as many as the gateway takes; more where a model's context is very long."""


def main() -> None:
    """Run the server process."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # A terminal and Slurm send these to all processes of a run, whose current step still needs its server.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    parent, channel = int(sys.argv[1]), Channel.inherited(int(sys.argv[2]))
    if sys.platform == "linux":  # also while code holds the interpreter's lock; elsewhere the channel's end ends it
        end_with_parent(parent)
    gc.disable()
    started, _ = channel.receive()
    settings = started["settings"]
    try:
        api = _build(settings)
        host, port = settings["host"], settings["port"]
        try:
            listener = http_server.listen(host, port)
        except OSError as error:
            wrong_host = error.errno == errno.EADDRNOTAVAIL or (error.errno or 0) < 0  # negative: no such name
            cure = "set another server.port, or 0 for any free one"
            cure = "server.host must be an address of this machine, such as 127.0.0.1" if wrong_host else cure
            raise AgentrigError(f"it can't listen on {host}:{port}: {error.strerror}; {cure}") from None
    except Exception as error:
        log.error("the server could not start: %s", error, exc_info=not isinstance(error, AgentrigError))
        kind = "" if isinstance(error, AgentrigError) else f"{type(error).__name__}: "
        channel.send({"error": f"{kind}{error}"})
        sys.exit(1)
    import uvloop

    gc.collect()
    gc.freeze()  # libraries and the model stay: they need not be looked through again with every collection
    gc.enable()
    with listener:
        uvloop.run(_serve(api, listener, channel, settings["host"], started["key"]))


def _build(settings: dict[str, Any]) -> Any:
    import torch

    from agentrig_grpo import checkpoint
    from agentrig_grpo.server.app import Api
    from agentrig_grpo.server.chat import Chat
    from agentrig_grpo.server.engine import Engine
    from agentrig_grpo.server.loading import build_decoder, device_memory, eos_tokens

    device = settings["device"]
    if device == "cpu":
        torch.set_num_threads(settings["threads"])
    elif not torch.get_device_module(device.split(":")[0]).is_available():
        raise RuntimeError(f"torch {torch.__version__} cannot use the device {device!r}")

    choose_vector_kernels()

    directory = Path(settings["model"])
    tokenizer = checkpoint.load_tokenizer(directory)
    decoder, max_length = build_decoder(
        directory,
        device=device,
        dtype=getattr(torch, settings["dtype"]),
        slots=settings["batch"],
        max_length=settings["max_length"],
    )
    engine = Engine(
        decoder,
        eos=eos_tokens(directory, tokenizer),
        slots=settings["batch"],
        seed=settings["seed"],
        prompt_cache_bytes=settings["prompt_cache_mb"] << 20,
        cache_bytes=settings["kv_cache_mb"] << 20 or _left_for_cache(settings, device_memory(device)),
    )
    return Api(engine, Chat(tokenizer), model=settings["name"], max_length=max_length)


def _left_for_cache(settings: dict[str, Any], total: int) -> int:
    """Return the bytes for keys and values: what the run's plan leaves beside the rest, or a quarter of the device."""
    if not settings["memory"]:
        return total // 4
    import torch

    weights = int(torch.get_device_module(settings["device"].split(":")[0]).memory_allocated())
    left: int = settings["memory"] - weights - BESIDE - (settings["prompt_cache_mb"] << 20)
    return max(left, 1)


async def _serve(api: Any, listener: socket.socket, channel: Channel, host: str, key: str) -> None:
    port = listener.getsockname()[1]
    config = http_server.settings(
        http_server.Access(
            http_server.CallCounter(api.app()),
            partial(_admit, key),
            host=host,
            port=port,
            limit=max(BODY_LIMIT, 16 * api.max_length),  # JSON takes up to 16 bytes for a token of plain text
            form=http_server.openai_error,
        ),
        most=http_server.most_connections(),
        # Agents keep their connections over the time of an update.
        timeout_keep_alive=3600,
        timeout_graceful_shutdown=2,
    )
    server = http_server.Server(config)
    driving = asyncio.create_task(api.drive())
    driving.add_done_callback(lambda _: setattr(server, "should_exit", True))
    channel.send({"port": port, "max_length": api.max_length})
    arguments = (channel, api, asyncio.get_running_loop())
    threading.Thread(target=_take_weights, args=arguments, daemon=True).start()
    await server.serve(sockets=[listener])
    driving.cancel()


def _admit(key: str, scope: http_server.Scope) -> bool:
    if not http_server.same(http_server.bearer(scope), key):
        text = "every request must bring the run's key as its bearer token; an agent has it as endpoint.api_key"
        raise http_server.Refused(text, status=401, code="invalid_api_key")
    for kind in (value for name, value in scope["headers"] if name == b"content-type"):
        if kind.split(b";")[0].strip().lower() != b"application/json":
            raise http_server.Refused(f"send application/json, not {kind.decode('latin-1')!r}", status=415)
    if refused := http_server.packed(http_server.headers_of(scope)):
        raise refused
    return True


def _take_weights(channel: Channel, api: Any, loop: asyncio.AbstractEventLoop) -> None:
    """Take new weights from the run for ever; ends the process when the run closes the line."""
    from agentrig_grpo.server.transfer import Receiver

    receiver = Receiver(str(api.engine.decoder.device))
    while True:
        try:
            message, descriptor = channel.receive()
        except (EOFError, OSError):
            os._exit(0)
        if message.get("free"):
            asyncio.run_coroutine_threadsafe(api.free(), loop).result()
            receiver.close()
            give_memory_back(api.engine.decoder.device)
            channel.send({})
            continue
        if message.get("memory"):
            channel.send({"bytes": held_here(api.engine.decoder.device)})
            continue
        answer = {"version": message["version"]}
        weights: dict[str, Any] | None = None
        try:
            weights = receiver.unpack(message, descriptor)
            asyncio.run_coroutine_threadsafe(api.take_weights(weights, message["version"]), loop).result()
            _finish(str(api.engine.decoder.device))  # then the run may overwrite them
        except Exception as error:
            log.exception("new weights are refused")
            answer["error"] = f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error)
        weights = None  # or their memory would be held until the next ones come
        if "error" in answer:
            gc.collect()  # the error's traceback and its futures hold one another, and with them the refused weights
        channel.send(answer)


def _finish(device: str) -> None:
    """Wait until a CUDA device has done what it was told."""
    import torch

    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
