"""The server process: `python -m agentrig_grpo.server`.

It reads its settings as one line of JSON from its standard input, answers with one line of JSON on
its standard output (`{"port": n}` or `{"error": text}`), and serves until its parent is gone or
sends SIGTERM. `handle.LLMServer` is the other end of that talk.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any


def main() -> None:
    """Run the server process."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # Whatever a library prints must not get into the answer line.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    settings = json.loads(sys.stdin.readline())
    try:
        api, app = _build(settings)
        listener = socket.create_server((settings["host"], settings["port"]), backlog=1024)
        # asyncio sets it only on sockets made with an explicit protocol; without it head and body of
        # a response, two writes, wait 40 ms for each other.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except Exception as error:
        logging.exception("the server could not start")
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=answers, flush=True)
        sys.exit(1)
    import uvloop

    with listener:
        uvloop.run(_serve(api, app, listener, answers))


def _end_with_parent(parent: int) -> None:
    """Leave at once when the parent process is gone.

    A pipe's end would not do: processes that the parent forked keep its other end open.
    """
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(0)


def _build(settings: dict[str, Any]) -> tuple[Any, Any]:
    import torch

    from agentrig_grpo.server.app import Api
    from agentrig_grpo.server.chat import Chat
    from agentrig_grpo.server.engine import Engine
    from agentrig_grpo.server.loading import build_decoder, eos_tokens, read_weights

    device = settings["device"]
    if device == "cpu":
        torch.set_num_threads(settings["threads"])
    elif not torch.get_device_module(device.split(":")[0]).is_available():
        raise RuntimeError(f"torch {torch.__version__} cannot use the device {device!r}")
    from agentrig_grpo import checkpoint

    directory = Path(settings["model"])
    tokenizer = checkpoint.load_tokenizer(directory)
    decoder, max_length = build_decoder(
        directory,
        device=device,
        dtype=getattr(torch, settings["dtype"]),
        slots=settings["slots"],
        max_length=settings["max_length"],
    )
    engine = Engine(
        decoder,
        eos=eos_tokens(directory, tokenizer),
        slots=settings["slots"],
        seed=settings["seed"],
        prompt_cache_bytes=settings["prompt_cache_mb"] << 20,
        prefill_tokens=settings["prefill_tokens"],
    )
    api = Api(engine, Chat(tokenizer), model=settings["name"], max_length=max_length, read_weights=read_weights)
    return api, api.app()


async def _serve(api: Any, app: Any, listener: socket.socket, answers: Any) -> None:
    import uvicorn

    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        http="httptools",
        # Agents keep their connections over the time of an update.
        timeout_keep_alive=3600,
        timeout_graceful_shutdown=2,
    )
    server = uvicorn.Server(config)
    driver = asyncio.create_task(api.drive())
    driver.add_done_callback(lambda _: setattr(server, "should_exit", True))
    print(json.dumps({"port": listener.getsockname()[1]}), file=answers, flush=True)
    answers.close()
    await server.serve(sockets=[listener])
    driver.cancel()


if __name__ == "__main__":
    main()
