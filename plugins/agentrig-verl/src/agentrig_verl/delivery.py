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

import ray  # noqa: TID253  (imported with the trainer)

from agentrig import Endpoint
from agentrig.delivery import Delivery


class Transfers:
    """The proofs of a verl run. It implements `agentrig.delivery.Learner` with what the actor told of a transfer.

    Args:
        directory: The run directory; the servers must be able to write into it.
        task: A task's input, for a run that has recorded no call yet.
    """

    layers = 1

    def __init__(
        self, delivery: Delivery, directory: Path, rollout: Any, workers: Any, tokenizer: Any, task: Mapping[str, Any]
    ) -> None:
        self._delivery, self._directory, self._rollout = delivery, directory, rollout
        self._workers, self._tokenizer, self._task = workers, tokenizer, task
        self.dtype = str(rollout.dtype)
        self._ids: list[int] = []
        self._told: Mapping[str, Any] = {}
        self._sent: Mapping[str, str] = {}

    def logprobs(self, ids: Sequence[int], *, temperature: float = 1.0) -> Sequence[float]:
        """Return the actor's log-probabilities of the probe; none of other tokens, which it cannot score now."""
        return self._told["logprobs"] if list(ids) == self._ids and temperature == 1.0 else ()

    def digests(self, dtype: str) -> Mapping[str, str]:
        """Return the digests of what was sent."""
        return self._sent

    def spread(self, ids: Sequence[int], dtype: str) -> float:
        """Return the largest change of a log-probability by rounding to the servers' dtype in each layer."""
        return float(self._told["noise"])

    def before(self) -> None:
        """Tell the actors what to score with the next transfer of weights; call it before that.

        Raises:
            agentrig.errors.RunStopped: The proof of the previous transfer has failed.
        """
        if not self._delivery.on:
            return
        self._delivery.settle()
        self._delivery.step.seconds += self._told.get("seconds", 0.0)
        ids = list(self._delivery.probe(context=self._context, prompt=self._prompt))
        if ids != self._ids:
            self._workers.set_probe(ids, self.dtype)
            self._ids = ids

    def after(self, version: int, endpoints: Sequence[Endpoint], replicas: Sequence[Any]) -> None:
        """Begin to prove that the servers answer with the weights that were sent since `before`."""
        if self._ids:
            self._delivery.begin(
                version=version,
                learner=self,
                dtype=self.dtype,
                servers=[endpoint.with_sampling(temperature=1.0) for endpoint in endpoints],
                context=self._context,
                prompt=self._prompt,
                held=lambda: self._compared(len(endpoints), replicas),
            )

    def _compared(self, endpoints: int, replicas: Sequence[Any]) -> list[dict[str, str]]:
        """Get the digests of actors and servers; return those of the tensors that all have, for each endpoint."""
        told = self._workers.told()
        self._told = told[0]
        self.layers = self._told["layers"]
        sent: dict[str, tuple[str, list[int]]] = {k: v for rank in told for k, v in rank["sent"].items()}
        held = [self._held(i, replica, sent) for i, replica in enumerate(replicas)]
        held = held if len(held) == endpoints else [{} for _ in range(endpoints)]
        common = set(sent).intersection(*held)
        known = {sent[name][0] for name in common}  # a tied tensor is sent under two names and held under one
        missing = sum(value not in known for value, _ in sent.values())
        if missing:
            self._delivery.note(
                f"the servers hold {missing} of {len(sent)} tensors in another form (tensor parallel, quantized): of "
                "these only the log-probabilities are proven"
            )
        self._sent = {name: sent[name][0] for name in common}
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
