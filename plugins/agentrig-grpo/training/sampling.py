"""Samples queries from a model in batches, without a server: for the warm-up's own checks and rewrites."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch  # noqa: TID253  (a script)


@torch.no_grad()
def sample(
    model: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], *, temperature: float, max_tokens: int = 40
) -> list[str]:
    """Return a reply to each prompt, greedy at temperature 0."""
    replies: list[str] = []
    for begin in range(0, len(prompts), 256):
        part = prompts[begin : begin + 256]
        width = max(map(len, part))
        ids = torch.full((len(part), width), tokenizer.pad_token_id)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(part):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        drawn = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        out = model.generate(
            input_ids=ids.to(model.device), attention_mask=mask.to(model.device), max_new_tokens=max_tokens, **drawn
        )
        replies += tokenizer.batch_decode(out[:, width:], skip_special_tokens=True)
    return replies
