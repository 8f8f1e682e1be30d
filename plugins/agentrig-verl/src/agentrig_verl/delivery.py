"""The proof of delivery with verl: the actor scores the probe with each transfer, vLLM after it.

The actor computes while the servers sleep, as in its other work: with offloaded parameters the GPU may not have room
for both. So the tokens that a server samples after the probe are compared with its own new scores of these tokens,
which vLLM never takes from its prefix cache. The rest runs in the background, while the next rollouts begin.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import ray  # noqa: TID253  (imported with the trainer)

from agentrig import Endpoint
from agentrig.delivery import Delivery


@attrs.define(kw_only=True)
class Scored:
    """Implements `agentrig.delivery.Learner` with the actor's scores before a transfer.

    Attributes:
        ids: The probe.
        dtype: The dtype in which the servers compute.
        found: The probe's log-probabilities, which are read from the actor in the background.
        noise: The largest change of a log-probability by rounding.
        layers: Number of blocks of the model.
        sent: Name to digest of the tensors that were sent.
        seconds: How long the actor took.
    """

    ids: Sequence[int]
    dtype: str
    found: Sequence[float] = ()
    noise: float = 0.0
    layers: int = 1
    sent: Mapping[str, str] = attrs.field(factory=dict)
    seconds: float = 0.0

    def logprobs(self, ids: Sequence[int], *, temperature: float = 1.0) -> Sequence[float]:
        """Return the actor's log-probabilities of the probe; it cannot score other tokens now."""
        assert list(ids) == list(self.ids)
        assert temperature == 1.0
        return self.found

    def digests(self) -> Mapping[str, str]:
        """Return the digests of what was sent."""
        return self.sent

    def spread(self, ids: Sequence[int]) -> float:
        """Return the largest change of a log-probability by rounding to the servers' dtype in each layer."""
        return self.noise


class Transfers:
    """The proofs of a verl run.

    Args:
        delivery: The session's proofs of delivery.
        directory: The run directory; the servers must be able to write into it.
        rollout: verl's configuration of the servers.
        workers: The actors' worker group.
        tokenizer: The model's tokenizer.
        task: A task's input, for a run that has recorded no call yet.
    """

    def __init__(
        self, delivery: Delivery, directory: Path, rollout: Any, workers: Any, tokenizer: Any, task: Mapping[str, Any]
    ) -> None:
        self._delivery, self._directory, self._rollout = delivery, directory, rollout
        self._workers, self._tokenizer, self._task = workers, tokenizer, task
        self._scored: Scored | None = None
        self._ids: Sequence[int] = ()

    def before(self) -> None:
        """Tell the actors what to score with the next transfer of weights; call it before that.

        Raises:
            agentrig.errors.RunStopped: The proof of the previous transfer has failed.
        """
        if not self._delivery.on:
            return
        self._delivery.settle()
        if self._scored is not None:
            self._delivery.record.seconds += self._scored.seconds
        ids = list(self._delivery.probe(context=self._context, prompt=self._prompt))
        dtype = str(self._rollout.dtype)
        if ids != self._ids:
            self._workers.set_probe(ids, dtype)
            self._ids = ids
        self._scored = Scored(ids=ids, dtype=dtype)

    def after(self, version: int, endpoints: Sequence[Endpoint], replicas: Sequence[Any]) -> None:
        """Begin to prove that the servers answer with the weights that were sent since `before`."""
        if not self._delivery.on or self._scored is None:
            return
        scored = self._scored
        self._delivery.begin(
            version=version,
            learner=scored,
            servers=[endpoint.with_sampling(temperature=1.0) for endpoint in endpoints],
            context=self._context,
            prompt=self._prompt,
            held=lambda: self._compared(scored, len(endpoints), replicas),
            fresh=True,
        )

    def _compared(self, scored: Scored, endpoints: int, replicas: Sequence[Any]) -> list[dict[str, str]]:
        """Get the digests of actors and servers; return those of the tensors that all have, for each endpoint."""
        told: Mapping[str, Any] = self._workers.told()[0]
        sent: Mapping[str, tuple[str, list[int]]] = told.get("sent", {})
        held = [self._held(i, replica, sent) for i, replica in enumerate(replicas)]
        held = held if len(held) == endpoints else [{} for _ in range(endpoints)]
        common = set(sent).intersection(*held)
        known = {sent[name][0] for name in common}  # a tied tensor is sent under two names and held under one
        missing = sum(value not in known for value, _ in sent.values())
        if missing:
            self._delivery.record.say(
                f"the servers hold {missing} of {len(sent)} tensors in another form (tensor parallel, quantized): of "
                "these only the log-probabilities are proven"
            )
        scored.found, scored.noise, scored.layers = told["logprobs"], told["noise"], told["layers"]
        scored.sent = {name: sent[name][0] for name in common}
        scored.seconds = told["seconds"]
        return [{name: value for name, value in digests.items() if name in common} for digests in held]

    @property
    def _context(self) -> int:
        return int(self._rollout.max_model_len or self._rollout.prompt_length + self._rollout.response_length)

    def _prompt(self) -> list[int]:
        text = json.dumps(dict(self._task), ensure_ascii=False, default=str)
        return list(self._tokenizer.encode(text))

    def _held(self, number: int, replica: Any, sent: Mapping[str, tuple[str, list[int]]]) -> dict[str, str]:
        """Return the digests of a replica's tensors; its workers write them into the run directory."""
        file = (self._directory / f".digests-{number}.json").resolve()
        shapes = {name: list(shape) for name, (_, shape) in sent.items()}
        if self._rollout.name != "vllm" or not shapes:
            return {}
        for server in replica.servers:
            ray.get(server.collective_rpc.remote("write_digests", args=(str(file), shapes)))
        found: dict[str, str] = json.loads(file.read_text("utf-8"))
        file.unlink()
        return found
