"""Batched decoding of Llama-like models in plain torch: one padded KV cache, one row a request.

Why not transformers' own forward: for a small model on a CPU its per-call overhead is several times
the arithmetic, and its caches neither take nor drop single rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import attrs
import torch  # noqa: TID253  (imported in the server process only)
from torch.nn import functional as F  # noqa: TID253

from agentrig_grpo.server.parameters import Parameters

FAMILIES = frozenset({"llama", "qwen2", "qwen3"})
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ROTARY = frozenset({"default", "linear", "llama3", "yarn"})
"""Rotary embeddings whose angles depend on the position alone; others change with the length of the sequence."""

SCORED = 128
"""Tokens whose logits are there at once while given tokens are scored."""

MASKED = 1 << 25
"""Most entries of the mask of prompts whose beginning is known; where it would be larger, they are computed in full."""

FIRST_ROWS, FIRST_LENGTH = 8, 256
"""What the cache holds before it grows."""


@attrs.frozen(eq=False)
class Prompt:
    """A prompt that has been through the model; it can be appended to a batch any number of times.

    Attributes:
        length: Tokens.
        logits: What the model says comes next, fp32 [vocabulary].
        kv: Keys [layers, kv_heads, head_dim, length] and values [layers, kv_heads, length, head_dim]; the
            fallback keeps transformers' cache here.
        nbytes: Memory that it holds, in bytes.
    """

    length: int
    logits: torch.Tensor
    kv: Any
    nbytes: int = attrs.field(init=False)

    @nbytes.default
    def _held(self) -> int:
        return tensor_bytes(self.logits, self.kv)


@attrs.frozen(eq=False)
class Known:
    """A kept prompt, and how many of its first tokens another one begins with."""

    prompt: Prompt
    tokens: int


def tensor_bytes(*things: Any) -> int:
    """Return the bytes of memory behind all tensors that can be reached from these objects, each counted once."""
    seen: set[int] = set()
    storages: dict[int, int] = {}
    waiting = list(things)
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or isinstance(thing, str | bytes | int | float | type | torch.nn.Module):
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(thing, Mapping):
            waiting += thing.values()
        elif isinstance(thing, list | tuple | set):
            waiting += thing
        else:
            waiting += getattr(thing, "__dict__", {}).values()
    return sum(storages.values())


@attrs.frozen(eq=False)
class Layer:
    """One block's weights; those of the query, key and value, and of gate and up, lie in one matrix."""

    norm_in: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    qk_norm: torch.Tensor | None
    out: torch.Tensor
    out_bias: torch.Tensor | None
    norm_mlp: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


def supports(config: Any) -> str | None:
    """Return None when `LlamaDecoder` computes this model exactly, else the reason why not."""
    if config.model_type not in FAMILIES:
        return f"model type {config.model_type} (known: {', '.join(sorted(FAMILIES))})"
    if getattr(config, "use_sliding_window", False):
        return "sliding-window attention"
    if config.hidden_act != "silu":
        return f"activation {config.hidden_act}"
    rope = config.rope_parameters or {}
    if rope.get("rope_type", "default") not in ROTARY or rope.get("partial_rotary_factor", 1.0) != 1.0:
        return f"rotary embedding {dict(rope)}"
    return None


class Decoder(Protocol):
    """What the engine needs of a model: its weights, by name, and a batch of rows, one for each request.

    Attributes:
        token_bytes: Bytes of one token of one row in the cache.
        vocabulary: How many tokens the model has an embedding for.
        dtype: What it computes in.
    """

    token_bytes: int
    vocabulary: int
    dtype: torch.dtype
    device: torch.device
    _parameters: Parameters

    @property
    def rows(self) -> int: ...  # noqa: D102
    def prefill(self, prompts: Sequence[Sequence[int]], known: Sequence[Known | None]) -> list[Prompt]: ...  # noqa: D102
    def append(self, prompts: Sequence[Prompt]) -> None: ...  # noqa: D102
    def remove(self, row: int) -> None: ...  # noqa: D102
    def step(self, tokens: Sequence[int]) -> torch.Tensor: ...  # noqa: D102
    def clear(self) -> None: ...  # noqa: D102
    def score(self, tokens: Sequence[int]) -> tuple[torch.Tensor, Prompt | None]: ...  # noqa: D102

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take new weights, all or none; rows and prompts computed with the old ones must not be used again.

        Raises:
            WeightsError: They do not fit; names the tensor. The old weights are still there.
        """
        self._parameters.fill(state)

    def free(self) -> None:
        """Free the memory of the weights and of all rows; `load` must bring new weights before the next request."""
        self.clear()
        self._parameters.free()

    def held(self) -> dict[str, str]:
        """Return name to digest of the weights that it computes with."""
        return self._parameters.digests()


class LlamaDecoder(Decoder):
    """Qwen2, Qwen3 and Llama: prefill, and one decode step for all rows at once.

    Rows are packed: a batch of B requests uses rows 0 … B-1 of the cache. The cache grows with the rows and
    lengths that are asked for, and `clear` gives it back.

    Args:
        config: A `transformers` configuration for which `supports` returns None.
        state: Parameter names, as transformers has them, to tensors.
        dtype: To compute in; norms and softmax are in fp32 either way.
        slots: Most rows.
        max_length: Most tokens of one row, prompt and response.
    """

    def __init__(
        self,
        config: Any,
        state: Mapping[str, torch.Tensor],
        *,
        device: str,
        dtype: torch.dtype,
        slots: int,
        max_length: int,
    ) -> None:
        self.device, self.dtype, self.slots, self.max_length = torch.device(device), dtype, slots, max_length
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.layers_n, self.eps, self.scale = config.num_hidden_layers, config.rms_norm_eps, self.head_dim**-0.5
        self.token_bytes = 2 * self.layers_n * self.kv_heads * self.head_dim * dtype.itemsize
        self.vocabulary = config.vocab_size
        self.lengths = torch.zeros(slots, dtype=torch.long, device=self.device)
        self._longest: list[int] = []  # those of the rows, on the host: reading a device tensor would wait for it
        self._cos, self._sin = (t.to(self.device, dtype) for t in _rotary(config, max_length, self.head_dim))
        self._keys, self._values = self._first_cache()
        embed, head = state.get(EMBED), state.get(HEAD)
        tied = bool(getattr(config, "tie_word_embeddings", False)) and (
            embed is None or head is None or torch.equal(embed, head)
        )
        self._parameters = Parameters(tied=[HEAD] if tied else [])
        self._allocate(config, state, tied=tied)
        self._parameters.fill(state, start=True)

    @property
    def rows(self) -> int:
        """How many requests are in the batch."""
        return len(self._longest)

    def _allocate(self, config: Any, state: Mapping[str, torch.Tensor], *, tied: bool) -> None:
        """Make room for the weights; which biases there are, the state says."""
        hidden, inner, d = config.hidden_size, config.intermediate_size, self.head_dim
        rows = {"q": self.heads * d, "k": self.kv_heads * d, "v": self.kv_heads * d}

        def new(*shape: int) -> torch.Tensor:
            return torch.empty(shape, device=self.device, dtype=self.dtype)

        def joined(names: Mapping[str, int], *columns: int) -> torch.Tensor:
            whole = new(sum(names.values()), *columns)
            for name, part in zip(names, torch.split(whole, list(names.values())), strict=True):
                self._parameters.add(name, part)
            return whole

        def bias(names: Mapping[str, int]) -> torch.Tensor | None:
            named = {name.removesuffix("weight") + "bias": size for name, size in names.items()}
            return joined(named) if next(iter(named)) in state else None

        def layer(i: int) -> Layer:
            at, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
            norms = None
            if at + "q_norm.weight" in state:
                norms = new(self.heads + self.kv_heads, d)
                self._parameters.add(at + "q_norm.weight", norms[: self.heads], (d,))
                self._parameters.add(at + "k_norm.weight", norms[self.heads :], (d,))
            qkv = {f"{at}{n}_proj.weight": size for n, size in rows.items()}
            out = {at + "o_proj.weight": hidden}
            gate_up = {f"{mlp}{n}_proj.weight": inner for n in ("gate", "up")}
            down = {mlp + "down_proj.weight": hidden}
            return Layer(
                norm_in=joined({f"model.layers.{i}.input_layernorm.weight": hidden}),
                qkv=joined(qkv, hidden),
                qkv_bias=bias(qkv),
                qk_norm=norms,
                out=joined(out, rows["q"]),
                out_bias=bias(out),
                norm_mlp=joined({f"model.layers.{i}.post_attention_layernorm.weight": hidden}),
                gate_up=joined(gate_up, hidden),
                gate_up_bias=bias(gate_up),
                down=joined(down, inner),
                down_bias=bias(down),
            )

        self._layers = [layer(i) for i in range(self.layers_n)]
        self._embed = joined({EMBED: config.vocab_size}, hidden)
        self._norm = joined({"model.norm.weight": hidden})
        self._head = self._embed if tied else joined({HEAD: config.vocab_size}, hidden)

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]], known: Sequence[Known | None] = ()) -> list[Prompt]:
        """Run prompts through the model, padded to the longest; returns them in their order.

        Args:
            prompts: Token ids.
            known: For each, a prompt of the same weights that begins with the same tokens; only the others are
                computed, at least one. Empty for none.
        """
        lengths = [len(p) for p in prompts]
        starts = [0 if k is None else k.tokens for k in known] or [0] * len(prompts)
        width = max(n - start for n, start in zip(lengths, starts, strict=True))
        if len(prompts) * width * (max(starts) + width) > MASKED:
            starts = [0] * len(prompts)
        x, keys, values = self._through(prompts, known, starts)
        last = torch.tensor([n - start - 1 for n, start in zip(lengths, starts, strict=True)], device=self.device)
        logits = self._logits(x[torch.arange(len(prompts), device=self.device), last])
        return [
            Prompt(length, logits[i].clone(), (keys[:, i, ..., :length].clone(), values[:, i, :, :length].clone()))
            for i, length in enumerate(lengths)
        ]

    @torch.inference_mode()
    def score(self, tokens: Sequence[int]) -> tuple[torch.Tensor, Prompt | None]:
        """Score given tokens; the result of the pass can also be used as a prompt to sample after.

        Returns:
            The log-probability of each token after the first, given those before it, fp32 [len(tokens) - 1]; and the
            tokens as a prompt.
        """
        x, keys, values = self._through([tokens], (), [0])
        targets = torch.tensor([*tokens[1:], 0], device=self.device)
        parts = zip(torch.split(x[0], SCORED), torch.split(targets, SCORED), strict=True)
        found = []
        for part, given in parts:
            logits = self._logits(part)
            found.append(-F.cross_entropy(logits, given, reduction="none"))
        prompt = Prompt(len(tokens), logits[-1].clone(), (keys[:, 0].clone(), values[:, 0].clone()))
        return torch.cat(found)[:-1], prompt

    def _through(
        self, prompts: Sequence[Sequence[int]], known: Sequence[Known | None], starts: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Run the ends of prompts through all blocks, padded to the longest, after keys and values that are known.

        Returns:
            The hidden states, and keys and values of the whole prompts.
        """
        ends = [list(p[start:]) for p, start in zip(prompts, starts, strict=True)]
        width = max(map(len, ends))
        padded = [[*end, *[0] * (width - len(end))] for end in ends]
        x = F.embedding(torch.tensor(padded, device=self.device), self._embed)
        n, longest = len(prompts), max(starts) + width  # padding included
        shape = (self.layers_n, n, self.kv_heads)
        # Zeros, not empty: what a mask hides has weight 0, but 0 times a stray NaN would be NaN.
        keys = torch.zeros((*shape, self.head_dim, longest), dtype=self.dtype, device=self.device)
        values = torch.zeros((*shape, longest, self.head_dim), dtype=self.dtype, device=self.device)
        for row, known_one in enumerate(known):
            if known_one is not None and starts[row]:
                before, same = known_one.prompt.kv, known_one.tokens
                keys[:, row, ..., :same], values[:, row, :, :same] = before[0][..., :same], before[1][..., :same, :]
        at = torch.tensor(starts, device=self.device)[:, None] + torch.arange(width, device=self.device)
        rows = torch.arange(n, device=self.device)[:, None]
        # A padded place may lie beyond the longest sequence; nobody reads what it computes.
        turn = at.clamp(max=len(self._cos) - 1)
        cos, sin = self._cos[turn][:, :, None], self._sin[turn][:, :, None]
        # Padding is on the right, so the causal mask alone hides it from real tokens where nothing is known.
        sees = (torch.arange(longest, device=self.device) <= at[..., None])[:, None] if any(starts) else None
        for i, layer in enumerate(self._layers):
            q, k, v = self._qkv(layer, x, cos, sin)
            if sees is None:
                keys[i], values[i] = k.permute(0, 2, 3, 1), v.transpose(1, 2)
            else:
                keys[i][rows, :, :, at], values[i][rows, :, at] = k, v
            mixed = F.scaled_dot_product_attention(
                q.transpose(1, 2),
                keys[i].transpose(2, 3).contiguous(),  # or torch computes all scores at once, at twice the time
                values[i],
                attn_mask=sees,
                is_causal=sees is None,
                enable_gqa=self.heads != self.kv_heads,
            )
            x = self._rest(layer, x, mixed.transpose(1, 2).flatten(2))
        return x, keys, values

    @torch.inference_mode()
    def append(self, prompts: Sequence[Prompt]) -> None:
        """Add rows at the end of the batch; the same prompt may come several times."""
        self._reserve(self.rows + len(prompts), max(p.length for p in prompts) + 1)
        for prompt in prompts:
            keys, values = prompt.kv
            self._keys[:, self.rows, ..., : prompt.length] = keys
            self._values[:, self.rows, :, : prompt.length] = values
            self._longest.append(prompt.length)
        self.lengths[: self.rows] = torch.tensor(self._longest, device=self.device)

    @torch.inference_mode()
    def remove(self, row: int) -> None:
        """Remove a row; the last row moves to its index."""
        last = self.rows - 1
        if row != last:
            length = self._longest[last]
            self._keys[:, row, ..., :length] = self._keys[:, last, ..., :length]
            self._values[:, row, :, :length] = self._values[:, last, :, :length]
            self.lengths[row] = length
            self._longest[row] = length
        self._longest.pop()

    @torch.inference_mode()
    def step(self, tokens: Sequence[int]) -> torch.Tensor:
        """Feed one token to every row; returns fp32 logits [rows, vocabulary]."""
        rows = self.rows
        longest = max(self._longest) + 1
        self._reserve(rows, longest)
        at = self.lengths[:rows]
        index = torch.arange(rows, device=self.device)
        x = F.embedding(torch.tensor(tokens, device=self.device), self._embed)
        cos, sin = self._cos[at][:, None], self._sin[at][:, None]
        hidden = torch.arange(longest, device=self.device) > at[:, None]
        mask = torch.zeros((rows, longest), dtype=self.dtype, device=self.device).masked_fill_(hidden, -torch.inf)
        mask = mask.repeat_interleave(self.kv_heads, 0)[:, None]
        for i, layer in enumerate(self._layers):
            q, k, v = self._qkv(layer, x, cos, sin)
            keys, values = self._keys[i], self._values[i]
            keys[index, :, :, at], values[index, :, at] = k, v
            keys, values = keys[:rows, ..., :longest].flatten(0, 1), values[:rows, :, :longest].flatten(0, 1)
            q = q.reshape(rows * self.kv_heads, -1, self.head_dim)
            scores = torch.baddbmm(mask, q, keys, alpha=self.scale)
            weights = torch.softmax(scores, -1, dtype=torch.float32).to(self.dtype)
            x = self._rest(layer, x, torch.bmm(weights, values).view(rows, -1))
        self.lengths[:rows] += 1
        self._longest = [n + 1 for n in self._longest]
        return self._logits(x)

    def clear(self) -> None:
        """Drop all rows, whatever numbers they left behind (a NaN would spread), and the memory that they took."""
        self._longest = []
        self._keys, self._values = self._first_cache()

    def _qkv(
        self, layer: Layer, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return rotated queries and keys, and values: [..., heads, head_dim] each."""
        x = F.rms_norm(x, (x.shape[-1],), layer.norm_in, self.eps)
        heads = F.linear(x, layer.qkv, layer.qkv_bias)
        heads = heads.view(*heads.shape[:-1], -1, self.head_dim)
        turned = heads[..., : self.heads + self.kv_heads, :]
        if layer.qk_norm is not None:
            turned = F.rms_norm(turned, (self.head_dim,), None, self.eps) * layer.qk_norm
        # Rotation of the halves (a, b) → (a cos - b sin, b cos + a sin); the sign lies in `sin`.
        a, b = turned.chunk(2, -1)
        swapped = torch.cat([b, a], -1)
        turned = torch.addcmul(turned * cos, swapped, sin)
        return turned[..., : self.heads, :], turned[..., self.heads :, :], heads[..., self.heads + self.kv_heads :, :]

    def _rest(self, layer: Layer, x: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """Finish a block after its attention: output projection and MLP, each added to its input."""
        x = x + F.linear(mixed, layer.out, layer.out_bias)
        y = F.rms_norm(x, (x.shape[-1],), layer.norm_mlp, self.eps)
        gate, up = F.linear(y, layer.gate_up, layer.gate_up_bias).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, layer.down, layer.down_bias)

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.rms_norm(x, (x.shape[-1],), self._norm, self.eps), self._head).float()

    def _first_cache(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._new_cache(min(FIRST_ROWS, self.slots), min(FIRST_LENGTH, self.max_length))

    def _new_cache(self, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys, which lie as the product with a query wants them, and values."""
        shape = (self.layers_n, rows, self.kv_heads)
        # Zeros, not empty: a hidden key's weight is 0, but 0 times a stray NaN would be NaN.
        keys = torch.zeros((*shape, self.head_dim, length), dtype=self.dtype, device=self.device)
        return keys, torch.zeros((*shape, length, self.head_dim), dtype=self.dtype, device=self.device)

    def _reserve(self, rows: int, length: int) -> None:
        """Make the cache hold at least so many rows of that length; it grows by half or more, so that copies are few.

        Called in inference mode only, so what it makes are inference tensors: only methods in that mode write to them.
        """
        had_rows, had = self._values.shape[1], self._values.shape[3]
        if rows <= had_rows and length <= had:
            return
        if rows > had_rows:
            had_rows = min(max(rows, had_rows + had_rows // 2), self.slots)
        if length > had:
            had = min(-(-max(length, had + had // 2) // 64) * 64, self.max_length)
        keys, values = self._new_cache(had_rows, had)
        used = max(self._longest, default=0)
        keys[:, : self.rows, ..., :used] = self._keys[:, : self.rows, ..., :used]
        values[:, : self.rows, :, :used] = self._values[:, : self.rows, :, :used]
        self._keys, self._values = keys, values


def _rotary(config: Any, length: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and signed sines for every position, [length, head_dim] in fp32 each.

    Source: RoFormer (arXiv:2104.09864), with the scalings that transformers knows (Llama 3, YaRN, …).
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = config.rope_parameters.get("rope_type", "default")
    factor = 1.0
    if kind == "default":
        frequencies = config.rope_parameters["rope_theta"] ** (-torch.arange(0, dim, 2).float() / dim)
    else:
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=length)
    angles = torch.arange(length).float()[:, None] * frequencies
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
