"""The Ray cluster of a run: joins one that exists; Ray finds it, this module says what to do if there is none."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from agentrig.errors import ConfigError

log = logging.getLogger(__name__)

NAMED = "Is it running, and is that the port of its head (6379 by default)? runners.address or RAY_ADDRESS names it"
"""What to do about a cluster that does not answer."""

NONE = (
    "no Ray cluster is named (runners.address, RAY_ADDRESS), and none runs on this machine: start one with `ray start "
    "--head`, name one, or let the run start one here with runners.address=local"
)

REACH_S = 10.0
"""Seconds that an address may take to accept a connection; Ray itself would try for minutes."""


def join(address: str, *, logs: bool = False) -> bool:
    """Join a Ray cluster, unless this process has joined one already.

    Args:
        address: `HOST:PORT`, `local` for a new cluster on this machine, or empty: the one that Ray finds.
        logs: Print the workers' output.

    Returns:
        Whether it joined one now.

    Raises:
        ConfigError: There is no such cluster, or it refuses.
    """
    import ray

    _shorten_messages()
    if ray.is_initialized():
        if address:
            found = ray.get_runtime_context().gcs_address
            log.warning("runners.address=%s is not used: the run has joined the Ray cluster %s", address, found)
        return False
    given = address or os.environ.get("RAY_ADDRESS", "").strip() or "auto"
    if given.startswith("ray://"):
        raise ConfigError(
            f"{given} is an address of Ray Client, which would carry every rollout through one proxy. Start the run on "
            "a node of the cluster (`ray job submit -- agentrig train …`), or give the address of its GCS (HOST:6379)"
        )
    reach(given)
    with _kept_signals():
        try:
            ray.init(address=given, log_to_driver=logs, configure_logging=False)
        except ConnectionError as error:
            raise refused(given, error) from error
    nodes = sum(bool(node["Alive"]) for node in ray.nodes())
    log.info("joined the Ray cluster %s: %d nodes", ray.get_runtime_context().gcs_address, nodes)
    return True


def reach(address: str, cure: str = NAMED) -> None:
    """Raise `ConfigError` immediately if nothing listens at `HOST:PORT`; other forms of address are left to Ray."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_S).close()
    except OSError as error:
        raise refused(address, error, cure) from error


def refused(address: str, error: Exception, cure: str = NAMED) -> ConfigError:
    """Return the error for a cluster that can't be joined, with what to do."""
    cause: BaseException | None = error
    while cause is not None:
        if type(cause).__name__ == "AuthenticationError":
            return ConfigError(
                f"the Ray cluster {address} asks for a token: export RAY_AUTH_MODE=token, and put the cluster's own in "
                "RAY_AUTH_TOKEN or ~/.ray/auth_token"
            )
        cause = cause.__cause__
    if address == "auto":
        return ConfigError(NONE)
    return ConfigError(f"the Ray cluster {address} does not answer: {error}\n  {cure}")


def _shorten_messages() -> None:
    """Log a message of the cluster in one line; Ray prints it whole, for a lost node with 20 lines of its raylet's log.

    Ray has no setting for this: its thread that receives the messages prints them by this function.
    """
    from ray._private import worker

    prints = worker.print_to_stdstream
    if getattr(prints, "shortens", False):
        return

    def shortened(data: Mapping[str, Any], *more: Any, **options: Any) -> None:
        if data.get("pid") != "raylet":
            prints(data, *more, **options)
            return
        for message in data["lines"]:
            log.debug("Ray: %s", message)
            if not message.startswith("Raylet is terminated"):  # of a node that the next message names
                log.warning("Ray: %s", re.split(r"[.!]?\s*\n|[.!] (?=[A-Z])", message.strip(), maxsplit=1)[0])

    shortened.shortens = True  # type: ignore[attr-defined]
    worker.print_to_stdstream = shortened
    # In another thread than the main one, Ray warns that it does not replace the handler of SIGTERM: as it should be.
    worker.logger.addFilter(lambda record: "SIGTERM handler" not in record.getMessage())


@contextlib.contextmanager
def _kept_signals() -> Iterator[None]:
    """Keep this process's handler of SIGTERM, which `ray.init` replaces: the run saves its work there."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)
