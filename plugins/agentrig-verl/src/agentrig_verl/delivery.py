"""The proof of delivery with verl: the actor scores the probe before each transfer, vLLM after it.

The actor computes while the servers sleep, as in its other work: with offloaded parameters the GPU may not have room
for both. So the tokens that a server samples after the probe are compared with the server's own new scores of these
tokens, which vLLM never takes from its prefix cache.
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
from agentrig.delivery.verdict import difference

SCORINGS = 3
"""How often the actor scores the probe with noise of the size of the dtype's rounding."""


@attrs.define(kw_only=True)
class Scored:
    """Implements `agentrig.delivery.Learner` with what the actor said before a transfer.

    Attributes:
        ids: The probe.
        found: Its log-probabilities.
        noise: The most that rounding changes one.
        layers: Blocks of the model.
        dtype: What the servers compute in.
        sent: Name to digest of the tensors that were sent.
    """

    ids: Sequence[int]
    found: Sequence[float]
    noise: float
    layers: int
    dtype: str
    sent: Mapping[str, str] = attrs.field(factory=dict)

    def logprobs(self, ids: Sequence[int], *, temperature: float = 1.0) -> Sequence[float]:
        """Return the actor's log-probabilities of the probe; it cannot be asked for other tokens now."""
        assert list(ids) == list(self.ids)
        assert temperature == 1.0
        return self.found

    def digests(self) -> Mapping[str, str]:
        """Return the digests of what was sent."""
        return self.sent

    def spread(self, ids: Sequence[int]) -> float:
        """Return the largest change of a log-probability by rounding to the servers' dtype in each block."""
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
        self._noise: float | None = None
        self._ids: Sequence[int] = ()

    def before(self) -> None:
        """Let the actor score the probe; call it while the servers sleep, before they get the weights."""
        if not self._delivery.on:
            return
        ids = list(self._delivery.probe(context=self._context, prompt=self._prompt))
        plain, layers = self._ask(ids)
        if self._noise is None or ids != self._ids:
            noisy = [self._ask(ids, seed=seed)[0] for seed in range(1, SCORINGS + 1)]
            again, _ = self._ask(ids)
            self._noise = max(difference(plain, found) for found in [*noisy, again])
        self._ids = ids
        self._scored = Scored(ids=ids, found=plain, noise=self._noise, layers=layers, dtype=str(self._rollout.dtype))

    def after(self, version: int, endpoints: Sequence[Endpoint], replicas: Sequence[Any]) -> None:
        """Prove that the servers answer with the weights that `before` has scored.

        Raises:
            agentrig.errors.RunStopped: A server answers with other weights.
        """
        if not self._delivery.on or self._scored is None:
            return
        sent: Mapping[str, tuple[str, list[int]]] = self._workers.sent_digests()[0]
        held = [self._held(i, replica, sent) for i, replica in enumerate(replicas)]
        held = held if len(held) == len(endpoints) else [{} for _ in endpoints]
        common = set(sent).intersection(*held)
        known = {sent[name][0] for name in common}  # a tied tensor is sent under two names and held under one
        missing = sum(value not in known for value, _ in sent.values())
        if missing:
            self._delivery.record.say(
                f"the servers hold {missing} of {len(sent)} tensors in another form (tensor parallel, quantized): of "
                "these only the log-probabilities are proven"
            )
        own = {name: sent[name][0] for name in common}
        at_one = [endpoint.with_sampling(temperature=1.0) for endpoint in endpoints]
        for endpoint, digests in zip(at_one, held, strict=True):
            self._delivery.begin(
                version=version,
                learner=attrs.evolve(self._scored, sent=own),
                servers=[endpoint],
                context=self._context,
                prompt=self._prompt,
                held=lambda digests=digests: [{n: d for n, d in digests.items() if n in own}],  # type: ignore[misc]
                fresh=True,
            )
            self._delivery.settle()

    @property
    def _context(self) -> int:
        return int(self._rollout.max_model_len or self._rollout.prompt_length + self._rollout.response_length)

    def _prompt(self) -> list[int]:
        text = json.dumps(dict(self._task), ensure_ascii=False, default=str)
        return list(self._tokenizer.encode(text))

    def _ask(self, ids: Sequence[int], *, seed: int = 0) -> tuple[list[float], int]:
        found, layers = self._workers.probe(list(ids), seed, str(self._rollout.dtype))[0]
        return found, layers

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
