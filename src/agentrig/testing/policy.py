"""The model in this process, by transformers: what a server's answers are compared with, and its next weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from agentrig.hardware.cpu import choose_vector_kernels

Part = Literal["all", "most"]
"""Which tensors change: all, or all but the norms."""

STEP = 0.3
"""How far weights move, as a share of each tensor's standard deviation."""


class Policy:
    """A model of a Hugging Face directory, in fp32, and the weights that a server should compute with."""

    def __init__(self, directory: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # type: ignore[no-untyped-call]
        choose_vector_kernels()
        loader: Any = AutoModelForCausalLM
        self.model = loader.from_pretrained(str(directory), dtype=torch.float32, local_files_only=True).eval()
        self.tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(str(directory), local_files_only=True)
        self._tied = set(getattr(self.model, "all_tied_weights_keys", None) or {})
        self._start = {name: tensor.clone() for name, tensor in self.weights()}

    def weights(self) -> Iterator[tuple[str, Any]]:
        """Yield name and tensor as an algorithm hands them over: tied tensors once."""
        for name, tensor in self.model.state_dict().items():
            if name not in self._tied:
                yield name, tensor

    def restore(self) -> None:
        """Go back to the weights of the directory."""
        import torch

        with torch.no_grad():
            for name, tensor in self.weights():
                tensor.copy_(self._start[name])

    def change(self, seed: int, part: Part) -> None:
        """Move the starting weights by noise; the same seed gives the same weights."""
        import torch

        self.restore()
        noise = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, tensor in self.weights():
                step = STEP * float(tensor.std()) if tensor.numel() > 1 else STEP
                moved = torch.randn(tensor.shape, generator=noise) * (step or STEP)
                if part == "all" or "norm" not in name:
                    tensor.add_(moved)

    def merged(self, seed: int) -> list[tuple[str, Any]]:
        """Change the layers' matrices by low-rank adapters; return all tensors as an algorithm gives them.

        The changed ones are sums that were made just now: they require gradients and are not contiguous in memory.
        """
        import torch

        noise = torch.Generator().manual_seed(seed)
        found = []
        self.restore()
        with torch.no_grad():
            for name, tensor in self.weights():
                if not ("layers" in name and tensor.ndim == 2):
                    found.append((name, tensor.clone()))
                    continue
                rows, columns = tensor.shape
                down, up = torch.randn(2, columns, generator=noise), torch.randn(rows, 2, generator=noise)
                tensor.add_(up @ down * STEP * float(tensor.std()))
                with torch.enable_grad():
                    found.append((name, (tensor.t().contiguous().requires_grad_() * 1.0).t()))
        return found

    def ids(self, text: str) -> list[int]:
        """Return the token ids of a conversation with one message of the user."""
        messages = [{"role": "user", "content": text}]
        rendered = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        found: list[int] = self.tokenizer(rendered, add_special_tokens=False)["input_ids"]
        return found

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special ones."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def best(self, prompt: Sequence[int], most: int) -> list[int]:
        """Return the likeliest tokens after a prompt, up to the end of the answer or `most` of them."""
        answer: list[int] = []
        while len(answer) < most:
            answer.append(int(self._logp([*prompt, *answer], [0], 1.0)[0].argmax()))
            if answer[-1] == self.tokenizer.eos_token_id:
                break
        return answer

    def logprobs(self, prompt: Sequence[int], answer: Sequence[int], temperature: float = 1.0) -> list[float]:
        """Return the log-probability of each token of an answer, from softmax(logits / temperature)."""
        found = self._logp(prompt, answer, temperature)
        return [float(found[i, token]) for i, token in enumerate(answer)]

    def gaps(self, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
        """Return how far each token's log-probability is below the likeliest token's."""
        found = self._logp(prompt, answer, 1.0)
        return [float(found[i].max() - found[i, token]) for i, token in enumerate(answer)]

    def _logp(self, prompt: Sequence[int], answer: Sequence[int], temperature: float) -> Any:
        import torch

        with torch.no_grad():
            logits = self.model(input_ids=torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0].float()
        return torch.log_softmax(logits[len(prompt) - 1 : -1] / temperature, -1)
