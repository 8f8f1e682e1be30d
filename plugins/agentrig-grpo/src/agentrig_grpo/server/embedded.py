"""The server `embedded`: agentrig's own LLM server, as one process on the learner's device. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from agentrig import Endpoint
from agentrig.servers import ServerPlan
from agentrig_grpo.config import EmbeddedConfig
from agentrig_grpo.server.handle import LLMServer, ServerSettings

if TYPE_CHECKING:
    import torch


class Embedded:
    """Implements `agentrig.servers.Server`.

    `__enter__` does not wait for the process: the learner can load while it starts. Methods that need it wait.

    Its answers have the version of its weights and, if it scores tokens, the digests of its tensors.

    Args:
        config: The keys of `[server]`.
        plan: The algorithm's plan.
    """

    def __init__(self, config: EmbeddedConfig, plan: ServerPlan) -> None:
        hardware = plan.hardware
        settings = ServerSettings(
            model=str(plan.model),
            name=plan.name,
            device=hardware.torch_device,
            dtype=plan.dtype,
            # The agents need the other half of the cores. More threads do not speed up small batches.
            threads=config.threads or max(1, getattr(hardware, "threads", 1) // 2),
            slots=config.batch,
            max_length=plan.context,
            seed=plan.seed,
            kv_cache_mb=config.kv_cache_mb,
            prompt_cache_mb=config.prompt_cache_mb,
            share=plan.share or 0.25,
            host=config.host,
            port=config.port,
        )
        self.process = LLMServer(settings, environment=hardware.environment(), log=plan.log)
        self.dtype = plan.dtype

    @property
    def endpoints(self) -> Sequence[Endpoint]:
        """The one address."""
        server = self.process
        server.ready()
        return [Endpoint(base_url=server.base_url, model=server.settings.name, api_key=server.api_key, token_ids=True)]

    @property
    def context(self) -> int:
        """Most tokens of a prompt and its answer together."""
        self.process.ready()
        return self.process.max_length

    def __enter__(self) -> Embedded:
        self.process.launch()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.stop()

    def take(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Give the process new weights; see `LLMServer.swap`."""
        self.process.ready()
        self.process.swap(dict(weights), version)

    def held(self) -> Sequence[Mapping[str, str]] | None:
        """Return None: they are in its answers."""
        return None

    def sleep(self) -> None:
        """Free the keys and values of prompts, and the device memory that is not in use; the weights stay."""
        self.process.free()

    def wake(self) -> None:
        """Do nothing: it takes memory as it needs it."""

    def check(self) -> None:
        """Raise `ServerError` if the process has died."""
        self.process.check()
