"""Decoding through transformers' own forward pass, for models that `LlamaDecoder` doesn't know.

One request at a time: right for every architecture that transformers can generate with, and slow.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch  # noqa: TID253  (imported in the server process only)

from agentrig_grpo.server.decoder import Prompt
from agentrig_grpo.server.parameters import Parameters


class TransformersDecoder:
    """The same interface as `LlamaDecoder`, over any Hugging Face causal language model."""

    def __init__(self, model: Any, *, device: str) -> None:
        self.model = model
        self.device = torch.device(device)
        self._caches: list[Any] = []
        tied = getattr(model, "all_tied_weights_keys", None) or {}
        self._parameters = Parameters(tied=tied)
        for name, tensor in model.state_dict().items():
            if name not in tied:
                self._parameters.add(name, tensor)

    @property
    def rows(self) -> int:
        """How many requests are in the batch."""
        return len(self._caches)

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take new weights, all or none; rows and prompts computed with the old ones must not be used again.

        Raises:
            WeightsError: They do not fit; names the tensor. The old weights are still there.
        """
        self._parameters.fill(state)

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[Prompt]:
        """Run prompts through the model; returns them in their order."""
        done = []
        for prompt in prompts:
            out = self.model(input_ids=torch.tensor([list(prompt)], device=self.device), use_cache=True)
            done.append(Prompt(len(prompt), out.logits[0, -1].float(), out.past_key_values))
        return done

    def append(self, prompts: Sequence[Prompt]) -> None:
        """Add rows at the end of the batch; the same prompt may come several times."""
        self._caches += [copy.deepcopy(p.kv) for p in prompts]

    def remove(self, row: int) -> None:
        """Drop a row; the last row takes its place."""
        self._caches[row] = self._caches[-1]
        self._caches.pop()

    @torch.inference_mode()
    def step(self, tokens: Sequence[int]) -> torch.Tensor:
        """Feed one token to every row; returns fp32 logits [rows, vocabulary]."""
        logits = []
        for row, token in enumerate(tokens):
            out = self.model(
                input_ids=torch.tensor([[token]], device=self.device),
                past_key_values=self._caches[row],
                use_cache=True,
            )
            self._caches[row] = out.past_key_values
            logits.append(out.logits[0, -1].float())
        return torch.stack(logits)

    def clear(self) -> None:
        """Drop all rows."""
        self._caches = []
