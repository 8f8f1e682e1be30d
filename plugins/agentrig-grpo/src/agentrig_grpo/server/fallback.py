"""Decoding through transformers' own forward pass, for models that `LlamaDecoder` does not support.

One request at a time: right for every architecture that transformers can generate with, and slow.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch  # noqa: TID253  (imported in the server process only)

from agentrig_grpo.server.decoder import Decoder, Known, Prompt, tensor_bytes
from agentrig_grpo.server.parameters import Parameters


class TransformersDecoder(Decoder):
    """The same interface as `LlamaDecoder`, over any Hugging Face causal language model.

    Args:
        model: In evaluation mode, on its device.

    Raises:
        ValueError: The model returns no cache, so that every token would cost a pass over all before it.
    """

    def __init__(self, model: Any, *, device: str) -> None:
        self.model = model
        self.device = torch.device(device)
        self._caches: list[Any] = []
        embedding = model.get_input_embeddings().weight
        self.vocabulary, self.dtype = int(embedding.shape[0]), embedding.dtype
        tied = getattr(model, "all_tied_weights_keys", None) or {}
        self._parameters = Parameters(tied=tied)
        for name, tensor in model.state_dict().items():
            if name not in tied:
                self._parameters.add(name, tensor)
        # Logits of a long prompt are larger than everything else about it, and only the last are used.
        keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._options: dict[str, Any] = {"use_cache": True, **({"logits_to_keep": 1} if keeps else {})}
        sizes = [tensor_bytes(p.kv) for p in self.prefill([[0] * 2, [0] * 6])]
        self.token_bytes = (sizes[1] - sizes[0]) // 4

    @property
    def rows(self) -> int:
        """How many requests are in the batch."""
        return len(self._caches)

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]], known: Sequence[Known | None] = ()) -> list[Prompt]:
        """Run prompts through the model, each in full: not every cache can be cut. Returns them in their order."""
        done = []
        for prompt in prompts:
            logits, cache = self._forward(prompt)
            done.append(Prompt(len(prompt), logits, cache))
        return done

    @torch.inference_mode()
    def score(self, tokens: Sequence[int]) -> tuple[torch.Tensor, Prompt | None]:
        """Return the log-probability of each token after the first, given those before it, fp32 [len(tokens) - 1]."""
        ids = torch.tensor([list(tokens)], device=self.device)
        logits = self.model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        return -torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none"), None

    @torch.inference_mode()
    def append(self, prompts: Sequence[Prompt]) -> None:
        """Add rows at the end of the batch; the same prompt may come several times."""
        self._caches += [copy.deepcopy(p.kv) for p in prompts]

    def remove(self, row: int) -> None:
        """Remove a row; the last row moves to its index."""
        self._caches[row] = self._caches[-1]
        self._caches.pop()

    @torch.inference_mode()
    def step(self, tokens: Sequence[int]) -> torch.Tensor:
        """Feed one token to every row; returns fp32 logits [rows, vocabulary]."""
        logits = []
        for row, token in enumerate(tokens):
            last, self._caches[row] = self._forward([token], past_key_values=self._caches[row])
            logits.append(last)
        return torch.stack(logits)

    def clear(self) -> None:
        """Drop all rows."""
        self._caches = []

    def _forward(self, tokens: Sequence[int], **more: Any) -> tuple[torch.Tensor, Any]:
        """Return the last token's logits, fp32 [vocabulary] with memory of their own, and the cache."""
        out = self.model(input_ids=torch.tensor([list(tokens)], device=self.device), **self._options, **more)
        cache = getattr(out, "past_key_values", None)
        if cache is None:
            raise ValueError(
                f"models of type {self.model.config.model_type} return no past_key_values, which this server decodes "
                "with; choose a transformer with a key-value cache"
            )
        return out.logits[0, -1].to(torch.float32, copy=True), cache
