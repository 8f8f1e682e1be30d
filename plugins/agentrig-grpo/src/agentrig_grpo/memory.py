"""The memory of an update, estimated before the first rollout by running its code on tensors without storage.

torch's fake tensors have a shape, a dtype and a device, but no bytes. The learner is built from them and computes the
gradient of one full pack, and a counter adds up the tensors that are alive. So the estimate follows the actual code of
the model, gradient checkpointing, the chunks of logits and the kernels, but for one: a fake weight is of a class of its
own, so the output head is computed by torch's operations, whose logits take 12 bytes each where the kernels of
`agentrig_forest.head` take 4. That is 1.7 GiB of an update of 1.5B, and 15 to 25% of one of a model of 50 MB. It stands
for what is no tensor of this code, such as libraries' workspaces: of 1.5B with 32 x 4 rows, 46.3 GiB were estimated and
46.1 counted, so that without it the estimate would be too small.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch  # noqa: TID253  (imported with the algorithm only)
from agentrig_forest.sequences import collate, packed
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: TID253
from torch.utils._pytree import tree_leaves  # noqa: TID253

from agentrig_grpo.config import LearnerConfig
from agentrig_grpo.fitting import Need, proof_bytes
from agentrig_grpo.learner import Learner, TrainSample
from agentrig_grpo.loss import token_losses
from agentrig_grpo.model_files import stored_in
from agentrig_grpo.optimizers import optimizer_bytes


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the tensors that operations create on a device, and of tensors that are added to it.

    Attributes:
        alive: Bytes of the tensors that are alive.
        peak: The most bytes that were alive at once.
    """

    def __init__(self, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive = self.peak = 0
        self._device = torch.device(device).type
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation."""
        found = func(*args, **(kwargs or {}))
        self.add(leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor))
        return found

    def add(self, tensors: Iterator[torch.Tensor]) -> None:
        """Count each tensor's storage once, until it is freed."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            number, size = storage._cdata, storage.nbytes()
            if tensor.device.type != self._device or number in self._known:
                continue
            self._known.add(number)
            weakref.finalize(storage, self._gone, number, size)
            self.alive += size
            self.peak = max(self.peak, self.alive)

    def _gone(self, number: int, size: int) -> None:
        self._known.discard(number)
        self.alive -= size


def need_of(
    directory: Path,
    config: LearnerConfig,
    *,
    tokens: int,
    dtype: str,
    device: str,
    attention: str,
    chunk: int,
    recomputed: int | None = None,
) -> Need:
    """Return what an update needs: passes of so many tokens, half of them of the longest answers.

    Args:
        config: Settings; `gradient_checkpointing` is "auto" for off here.
        chunk: Most logits at once.
        recomputed: How many layers compute their activations twice; None for what `gradient_checkpointing` says.

    Raises:
        NotImplementedError: The model's calls share no tokens: its passes depend on values, which fake tensors lack.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = AutoConfig.from_pretrained(str(directory), local_files_only=True)
    pack = next(packed(_full(config, tokens), tokens, share=True))
    real = collate(pack, share=True, varlen=dtype == "bfloat16" and torch.device(device).type == "cuda")
    with FakeTensorMode(allow_non_fake_inputs=True):
        with torch.device(device), _staying():
            model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                settings, dtype=torch.float32, attn_implementation=attention
            )
            learner = Learner(
                model.eval(),
                attrs.evolve(config, kl_loss_coef=0.0, optimizer="adamw", moments="device"),
                dtype=dtype,
                seed=0,
                chunk=chunk,
                recomputed=recomputed,
                frozen_exact=stored_in(directory, "BF16"),
                start={},  # nothing is saved, and fake weights cannot be read
            )
        if not learner.share:
            raise NotImplementedError(f"the calls of a {settings.model_type} share no tokens")
        trained, parameters = list(learner.trained.values()), list(learner.model.parameters())
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
        with Counter(device) as counter:
            counter.add(iter([p.data for p in (*trained, *parameters)]))
            weights = counter.alive
            counter.add(p.grad for p in trained if p.grad is not None)
            held = counter.alive
            batch = _fake(real, device)
            logprobs, _ = learner._score(learner.model, batch)
            out = token_losses(
                logprobs, logprobs.detach(), torch.ones_like(logprobs), clip_low=0.2, clip_high=0.2, reference=None,
                kl_loss_coef=0.0,
            )  # fmt: skip
            out.loss.sum().backward()  # type: ignore[no-untyped-call]
            if learner._masters is not None:
                learner._masters.collect()
    # With a KL loss there is a frozen copy of the model, as it computes.
    reference = parameters if config.kl_loss_coef and not config.lora_rank else []
    bytes_trained = _bytes(trained)
    head = learner.model.get_output_embeddings().weight
    return Need(
        weights=weights + _bytes(reference),
        gradients=held - weights,
        optimizer=optimizer_bytes(trained, config.optimizer),
        activations=counter.peak - held,
        change=bytes_trained,
        earlier=bytes_trained // (1 if learner._masters is None else 2) if config.max_staleness else 0,
        proof=proof_bytes(*head.shape, frozen=bool(config.lora_rank) and head.dtype != torch.float32),
        frozen=_bytes([p for p in parameters if not p.requires_grad]),
    )


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@contextmanager
def _staying() -> Iterator[None]:
    """Let adapters stay where they are made: fake parameters cannot be moved, and are on the right device."""
    move = torch.nn.Module.to
    torch.nn.Module.to = lambda module, *_, **__: module  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.nn.Module.to = move  # type: ignore[method-assign]


def _full(config: LearnerConfig, budget: int) -> list[TrainSample]:
    """Return the samples of a full pass: groups whose answers, as long as allowed, are half of its tokens."""
    size = config.group_size
    answer = max(1, min(config.max_tokens, budget // (2 * size) - 1))
    groups = max(1, budget // (2 * size * (answer + 1)))
    prompt = max(2, budget // groups - size * (answer + 1))
    return [
        # The last token differs, or several would have one hidden state in common, which depends on values.
        TrainSample(
            prompt_ids=[5 + group // 64, 5 + group % 64, *[5] * (prompt - 2), 6 + i],
            response_ids=[7] * answer,
            logprobs=None,
            advantage=1.0,
            rollout=group * size + i,
            group="",
        )
        for group in range(groups)
        for i in range(size)
    ]


def _fake(thing: Any, device: str) -> Any:
    """Return tensors, and what holds them, without storage on a device."""
    if isinstance(thing, torch.Tensor):
        return torch.empty(thing.shape, dtype=thing.dtype, device=device)
    if isinstance(thing, list | tuple):
        return [_fake(part, device) for part in thing]
    if attrs.has(type(thing)):
        return attrs.evolve(thing, **{f.name: _fake(getattr(thing, f.name), device) for f in attrs.fields(type(thing))})
    return thing
