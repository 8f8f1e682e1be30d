"""The server `file-server`: transformers behind HTTP, which takes new weights by a file."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs

from agentrig import ServerSpec, hookimpl, setting


@attrs.frozen(kw_only=True)
class FileServerConfig:
    """Settings of `file-server`."""

    threads: int = setting(1, help="its torch threads", ge=1, le=1024)


def build(config: FileServerConfig) -> Any:
    """Return what makes the server of a plan."""
    from agentrig_file_server.handle import FileServer

    return lambda plan: FileServer(config.threads, plan)


def refusal(hardware: Any) -> str:
    """Say why it can't serve on this hardware."""
    return "" if hardware.torch_device == "cpu" else "it serves on a CPU only"


@hookimpl
def register_servers() -> Iterable[ServerSpec]:
    """Register `file-server`; without a rank, `auto` never takes it."""
    yield ServerSpec(
        name="file-server",
        summary="transformers behind HTTP, one request at a time; new weights by a file.",
        config=FileServerConfig,
        build=build,
        refusal=refusal,
        sequences=lambda config: 1,
    )
