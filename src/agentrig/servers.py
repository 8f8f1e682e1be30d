"""Servers: what serves the model while it is trained and evaluated, and what an algorithm may ask of it.

An algorithm whose spec has `server=True` gets its server from the run: `session.server(plan)` while it trains, and the
argument `server` of its `serve` for `agentrig eval` and `agentrig dev`. `[server] use` selects which server that is.

Everything here is called in the main process, in the thread `algorithm`, one call at a time; only `held` is called
in another thread. A server answers requests in its own processes, so that it continues while the algorithm computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, runtime_checkable

import attrs

from agentrig.endpoints import Endpoint
from agentrig.hardware import Hardware
from agentrig.processes.servers import ServerError as ServerError

if TYPE_CHECKING:
    import torch


@attrs.frozen(kw_only=True)
class ServerPlan:
    """How an algorithm wants the model to be served.

    Attributes:
        model: A Hugging Face directory: configuration, weights, tokenizer.
        name: The model's name in requests.
        hardware: What to serve on. A server may use another device of the same kind than the learner.
        dtype: The dtype in which the server computes: `float32` or `bfloat16`. The proof of delivery rounds
            the learner's weights to it.
        context: Most tokens of a prompt and its answer together; 0 for the model's own limit.
        memory: Bytes of the device's memory that the server may take while it is awake, with its weights; None if the
            server's own settings say.
        seed: Of requests that bring none: a run with the same seed samples the same, where the server can.
        log: File that the server's output is appended to; None for none.
        sleeps: Whether `sleep` and `wake` will be called, so that the learner can have the memory in between. Some
            servers have to be started for that.
        adapters: The rank of the adapters that `take` gets in place of whole weights, where the learner reads the
            server's own weights (`Lending`): it computes with both, and with adapters of zeros until then. 0 for whole
            weights.
    """

    model: Path
    name: str
    hardware: Hardware
    dtype: str = "float32"
    context: int = 0
    memory: int | None = None
    seed: int = 0
    log: Path | None = None
    sleeps: bool = False
    adapters: int = 0


@attrs.frozen(kw_only=True)
class ServerMemory:
    """What a server's settings say of its memory, for the plan of a run; `ServerSpec.memory(config)` returns it.

    Attributes:
        sequences: Most requests that it samples at once.
        beside: Bytes beside weights, keys and values, whatever the model is: the device's libraries, recorded graphs.
        prefill: Tokens of prompts that go through the model at once.
        asleep: Bytes that it keeps while it sleeps, beside weights.
        keeps_weights: Whether it keeps its weights while it sleeps.
        transfer: Bytes that the learner's process keeps on the device to hand weights over, or those of the largest
            tensor if that has more; 0 for as many as the weights have.
        transfer_of_torch: Whether torch holds these bytes, as one of the learner's tensors.
        share: Share of the device's memory that the settings give it, from 0 to 1; 0 if the plan may choose.
        cache: Bytes for keys and values that the settings give it; 0 if the plan may choose.
        elsewhere: Whether it runs on another device than the learner.
        lends: The largest rank of adapters with which it is `Lending`; 0 if it is not.
    """

    sequences: int
    beside: int = 1 << 30
    prefill: int = 8192
    asleep: int = 3 << 29
    keeps_weights: bool = False
    transfer: int = 0
    transfer_of_torch: bool = False
    share: float = 0.0
    cache: int = 0
    elsewhere: bool = False
    lends: int = 0


class Server(Protocol):
    """A model server of a run; `ServerSpec.build(config)(plan)` returns it, not started.

    It is a context manager. `__enter__` starts it with the weights of `plan.model`; `__exit__` ends it with all its
    processes, also after an error, and never raises one of its own. If the run itself is killed, the server's processes
    must end by themselves. Those that don't are killed when the next run starts: it finds them by the variable
    `AGENTRIG_SCRATCH`, which every child of a run has.

    The attributes are there from `__enter__` on. A server that takes long to start may return from it before every
    address answers. Whatever needs the server then waits, and the learner is loaded meanwhile.

    What a method raises ends the run, with the message in `error.json`. Raise `ServerError` with what happened, where
    the log is, and what to do.
    """

    @property
    def endpoints(self) -> Sequence[Endpoint]:
        """The addresses, without sampling fields; every address answers when it returns.

        Several are replicas: the groups of a step go to them in turn. Each takes OpenAI's chat completions with
        `return_token_ids` and `logprobs`. An endpoint that can also score tokens (`prompt_logprobs` at `/completions`)
        gets the strong proof of delivery, others the weaker one.
        """

    @property
    def dtype(self) -> str:
        """What it computes in."""

    @property
    def context(self) -> int:
        """Most tokens of a prompt and its answer together."""

    def __enter__(self) -> Self:
        """Start.

        Raises:
            ServerError: It could not start; the message has the end of its log. Nothing is left running. If it returns
                before every address answers, what waits raises this.
        """

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all its processes; remove its files."""

    def take(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Compute with new weights from now on.

        Called after each update, and once before the first step, when no request is running: an algorithm whose
        rollouts run during an update waits for them first. Return only when every address answers with these weights
        and no prefix cache holds keys and values of older ones. How they get there is the server's choice: CUDA handles
        on one device, shared memory, a file. Leave no file behind.

        Args:
            weights: Name and tensor, as in the model's own files: the names and shapes of the Hugging Face state dict,
                tied tensors once, adapters added in. They are live tensors of this process, on any device, in the
                learner's dtype: read them before you return, never write to them. Iterate only once.
            version: The step that made them. A server that can states it in its answers, as `system_fingerprint` =
                `vVERSION`: then replicas with old weights are found.

        Raises:
            ServerError: The server has died, or the weights do not fit or are not finite.
        """

    def held(self) -> Sequence[Mapping[str, str]] | None:
        """Return, for each endpoint, name to digest (`agentrig.delivery.digests`) of the tensors that it computes with.

        Called after each `take` if the run proves its transfers, in a thread of its own: the next `take` waits until it
        has returned. A name that the learner has is compared with the
        learner's tensor, rounded to `dtype`, bit by bit; a mapping may leave names out.

        Returns:
            None if the digests come with the answers, or can't be known. The proof then rests on log-probabilities.
        """

    def sleep(self) -> None:
        """Give the device's memory to the learner until `wake`; a server without such a way does nothing.

        Called before an update, when no request is running, only if `plan.sleeps`. Weights need not be kept: `take`
        follows `wake`, before any request.
        """

    def wake(self) -> None:
        """Take the memory back, at least that of the weights; called once after each `sleep`, before `take`.

        Memory that only requests need, as for keys and values, may also come back at the end of `take`: until then the
        transfer may need it.

        Raises:
            ServerError: The memory is not free any more, or the server has died.
        """

    def check(self) -> None:
        """Make sure that the server is alive. Called when a run stops, because a dead server is the likely reason.

        Raises:
            ServerError: It is dead; the message names it and has the end of its log.
        """


@runtime_checkable
class Lending(Protocol):
    """A server with this method too can hold the frozen weights for itself and the learner: `plan.adapters`."""

    def lend(self, shapes: Mapping[str, Sequence[int]]) -> Mapping[str, torch.Tensor]:
        """Return the server's own tensors, on the learner's device without a copy; nobody may change them.

        Called once, when every address answers. They can be read until the server ends.

        Args:
            shapes: The names and shapes of the learner's tensors.

        Returns:
            The learner's names and these tensors; without those that the server does not hold in this shape.

        Raises:
            ServerError: Its memory can't be read from another process.
        """


@runtime_checkable
class Measuring(Protocol):
    """A server with this method too can tell what it holds of the learner's device, where other programs take some."""

    def device_memory(self) -> int | None:
        """Return the bytes of the learner's device that its processes hold, rather too many than too few.

        Called when every address answers. `agentrig.device_memory.held_here` counts them in a process. None if they
        can't be counted: then what others take of the device while the server starts counts as the server's.

        Raises:
            ServerError: It has died.
        """


MakeServer = Callable[[ServerPlan], Server]
"""What `ServerSpec.build(config)` returns, `Session.server` is, and an algorithm's `serve` gets as `server`."""
