"""vLLM's process: its engine and its OpenAI servers, controlled by the run that started it.

    python -m agentrig_vllm.serving DESCRIPTOR

Orders come over the channel and cannot be sent by HTTP. When the run's end of the channel
closes, the run has ended. Then this process ends, and with it vLLM's engine, which is a separate process.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from agentrig.processes.channel import Channel
from agentrig_vllm.api_server_process import ApiServerProcess, client, processes

if TYPE_CHECKING:
    from agentrig_vllm.api_server import ApiServer

WATCH_S = 0.2
"""Seconds between two checks that the engine is alive."""

NO_WEIGHTS = "the server has slept and has no weights yet: its run sends them before it asks"
TAKING = "the server takes new weights"
ASLEEP = "the server sleeps: its run uses the GPU for learning"


class Orders:
    """Carries out the run's orders, one at a time.

    Args:
        answering: All that answer requests, in this process and in others.
    """

    def __init__(self, engine: Any, answering: Sequence[ApiServer | ApiServerProcess]) -> None:
        self._engine, self._answering = engine, answering
        self._asleep = self._without_cache = False

    async def carry_out(self, order: dict[str, Any]) -> dict[str, Any]:
        """Carry out an order and return the answer; what goes wrong is part of it."""
        does: dict[str, Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]] = {
            "begin": self._begin,
            "load": self._load,
            "end": self._end,
            "held": self._held,
            "lend": self._lend,
            "memory": self._memory,
            "release": self._release,
            "sleep": self._sleep,
            "wake": self._wake,
            "check": self._check,
        }
        try:
            return await does[order["order"]](order)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}

    async def _begin(self, order: dict[str, Any]) -> dict[str, Any]:
        """Let running requests end, and prepare for new weights; keys and values of the old ones go in `_end`."""
        if self._asleep:
            raise RuntimeError("the server sleeps: wake it first")
        await self._engine.pause_generation(mode="wait", clear_cache=False)
        await self._tell(TAKING)
        await self._engine.collective_rpc("agentrig_begin")
        return {}

    async def _load(self, order: dict[str, Any]) -> dict[str, Any]:
        await self._engine.collective_rpc("agentrig_load", args=(order["message"], order["device"]))
        return {}

    async def _end(self, order: dict[str, Any]) -> dict[str, Any]:
        missing = (await self._engine.collective_rpc("agentrig_missing"))[0]
        if missing:
            raise RuntimeError(f"the new weights lack {len(missing)} tensors of the model: {', '.join(missing[:4])}")
        if self._without_cache:
            await self._engine.wake_up(tags=["kv_cache"])
            self._without_cache = False
        if not await self._engine.reset_prefix_cache():
            raise RuntimeError("vLLM did not empty its prefix cache")
        await self._tell("", order["version"])
        await self._engine.resume_generation()
        return {}

    async def _held(self, order: dict[str, Any]) -> dict[str, Any]:
        return {"digests": (await self._engine.collective_rpc("agentrig_held", args=(order["shapes"],)))[0]}

    async def _lend(self, order: dict[str, Any]) -> dict[str, Any]:
        return {"tensors": (await self._engine.collective_rpc("agentrig_lend", args=(order["shapes"],)))[0]}

    async def _memory(self, order: dict[str, Any]) -> dict[str, Any]:
        return {"bytes": (await self._engine.collective_rpc("agentrig_memory"))[0]}

    async def _release(self, order: dict[str, Any]) -> dict[str, Any]:
        await self._engine.collective_rpc("agentrig_release")
        return {}

    async def _sleep(self, order: dict[str, Any]) -> dict[str, Any]:
        self._asleep = self._without_cache = True
        await self._tell(ASLEEP)
        await self._engine.sleep(level=2, mode="wait")  # the weights go too: new ones come before it answers again
        return {}

    async def _wake(self, order: dict[str, Any]) -> dict[str, Any]:
        # The keys and values follow in `_end`: until then the learner's buffer and the new weights need the memory.
        await self._engine.wake_up(tags=["weights"])
        self._asleep = False
        await self._tell(NO_WEIGHTS)
        return {}

    async def _check(self, order: dict[str, Any]) -> dict[str, Any]:
        await self._engine.check_health()
        return {}

    async def _tell(self, closed: str, version: int | None = None) -> None:
        """Let all refuse requests or answer them; see `ApiServer.tell`."""
        await asyncio.gather(*(each.tell(closed, version) for each in self._answering))


async def serve(channel: Channel, order: dict[str, Any], begun: float) -> None:
    """Start the engine and the HTTP server, and carry out orders until the run is gone.

    Args:
        order: The first one: vLLM's command line, the key, and the address.
        begun: When this process began, of `time.perf_counter`.
    """
    loop = asyncio.get_running_loop()
    orders: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    threading.Thread(target=_listen, args=(channel, orders, loop), daemon=True).start()  # the run may end meanwhile

    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.utils import get_engine_zmq_addresses, launch_core_engines
    from vllm.v1.executor import Executor

    from agentrig_vllm.api_server import ApiServer

    imported = time.perf_counter()
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(order["command_line"])
    validate_parsed_serve_args(arguments)
    config = AsyncEngineArgs.from_cli_args(arguments).create_engine_config(UsageContext.OPENAI_API_SERVER)
    configured = time.perf_counter()
    count = processes(order["api_server_count"])
    found = get_engine_zmq_addresses(config, count, defer_api_server_ports=False)
    clients = [
        {"client_addresses": {"input_address": one, "output_address": other}, "client_count": count, "client_index": i}
        for i, (one, other) in enumerate(zip(found.inputs, found.outputs, strict=True))
    ]
    # They are forked first: they get nothing of what this process then has open to the engine.
    others = [ApiServerProcess(i, config, arguments, clients[i], order) for i in range(1, count)]
    stats = not arguments.disable_log_stats
    with launch_core_engines(config, Executor.get_class(config), stats, found, count) as (manager, *_):
        pass  # the engine is waited for at the end of the block
    engine = client(config, arguments, clients[0])
    # As if vLLM's client had started the engine: it then notices its death, and no order waits for a dead one.
    engine.engine_core.resources.engine_manager = manager
    engine.engine_core.start_engine_core_monitor()
    loaded = time.perf_counter()
    server = await ApiServer.started(engine, arguments, order, 0)
    ports = [server.port, *[await each.port() for each in others]]
    parts = {"import": imported - begun, "configure": configured - imported, "engine": loaded - configured}
    parts["http"] = time.perf_counter() - loaded
    print("agentrig: serving, seconds: " + ", ".join(f"{part} {s:.1f}" for part, s in parts.items()), flush=True)
    channel.send({"ports": ports, "context": engine.model_config.max_model_len, "parts": parts})
    at_work = Orders(engine, [server, *others])
    while not engine.errored and not server.ended and all(each.alive for each in others):
        try:
            order = await asyncio.wait_for(orders.get(), WATCH_S)
        except TimeoutError:
            continue
        channel.send(await at_work.carry_out(order))
    print("vLLM's engine has died" if engine.errored else "an HTTP server has ended", file=sys.stderr)
    end(1)


def _listen(channel: Channel, orders: asyncio.Queue[dict[str, Any]], loop: asyncio.AbstractEventLoop) -> None:
    """Pass the run's orders on; end all of this process when the run is gone."""
    while True:
        try:
            order, _ = channel.receive()
        except (EOFError, OSError):
            end(0)
        loop.call_soon_threadsafe(orders.put_nowait, order)


def end(status: int) -> NoReturn:
    """End this process at once, and with it vLLM's engine."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main() -> None:
    """Take the first order and serve."""
    begun = time.perf_counter()
    channel = Channel.inherited(int(sys.argv[1]))
    order, _ = channel.receive()
    # A terminal's Ctrl-C does not come here; what else asks to end ends all at once: there is nothing to save.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    import uvloop

    try:
        uvloop.run(serve(channel, order, begun))
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        end(1)


if __name__ == "__main__":
    main()
