"""Where the time of the embedded learner's update goes, and what each choice is worth; on a GPU.

```
python tests/benchmarks/learner_profile.py --shape qwen2.5-1.5b --groups 32 --size 4 --prompt 816 --answer 128
```

Prints, for each way of computing the same update: the seconds of some updates, the peak of memory, and for the first
two the seconds of each phase (measured with the device idle before and after it) and the kernels that took longest. The
samples are those of `learner.py`. `--attention` times attention alone, forward and backward, by each kernel.
"""

from __future__ import annotations

import argparse
import functools
import gc
import inspect
import statistics
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast
from unittest import mock

import attrs
import torch
from agentrig_grpo import learner as module
from agentrig_grpo.config import GrpoConfig
from agentrig_grpo.figures import Figures
from agentrig_grpo.learner import Learner, TrainSample
from agentrig_grpo.loss_inputs import LossInputs
from agentrig_grpo.masters import Masters
from torch.nn import functional

from agentrig.forest.levels import Levels
from agentrig.forest.segments import Pack
from agentrig.forest.sequences import collate, packed

sys.path.insert(0, str(Path(__file__).parent))
from learner import flops, model_of, samples_of


def wait() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextmanager
def phases() -> Iterator[dict[str, float]]:
    """Add up the seconds of each phase of the updates that are made meanwhile."""
    spent: dict[str, float] = defaultdict(float)

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **more: Any) -> Any:
            wait()
            start = time.perf_counter()
            try:
                return function(*args, **more)
            finally:
                wait()
                spent[name] += time.perf_counter() - start

        return call

    places = [
        (module, "packed", "forest and packs"), (module, "collate", "tensors of a pack"),
        (module.Batch, "to", "a pack to the device"), (Learner, "_score", "forward"),
        (torch.Tensor, "backward", "backward"), (torch.nn.utils, "clip_grad_norm_", "clipping"),
        (torch.optim.AdamW, "step", "optimizer"),
        (Learner, "_change", "weight_change"), (Masters, "refresh", "copies of the weights"),
        (LossInputs, "of", "tables"), (Figures, "add", "figures"), (Figures, "compare", "recorded log-probabilities"),
    ]  # fmt: skip
    with ExitStack() as stack:
        for owner, name, label in places:
            stack.enter_context(mock.patch.object(owner, name, timed(label, getattr(owner, name))))
        yield spent


def autocast(learner: Learner) -> None:
    """Compute under autocast, as before there were 16-bit copies."""
    learner._bf16 = True


def sharing_off(learner: Learner) -> None:
    """Compute each call in full."""
    learner.share = False


def plain_norms(learner: Learner) -> None:
    """Compute norms as transformers does."""
    for part in learner.model.modules():
        part.__dict__.pop("forward", None)


def small_chunks(learner: Learner) -> None:
    """Compute logits in chunks, and again for the gradient."""
    learner._chunk = 1 << 26


def large_chunks(learner: Learner) -> None:
    """Compute more logits at once."""
    learner._chunk = 1 << 29


def compiled_mlp(learner: Learner) -> None:
    """Compile what happens between the matrix products of the feed-forward part."""

    @functools.partial(torch.compile, dynamic=True)
    def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return functional.silu(gate) * up

    for part in learner.model.modules():
        if hasattr(part, "gate_proj") and hasattr(part, "down_proj"):
            part.forward = lambda x, part=part: part.down_proj(gated(part.gate_proj(x), part.up_proj(x)))


def compiled_rotation(learner: Learner) -> None:
    """Compile the rotation of queries and keys, and the feed-forward part."""
    compiled_mlp(learner)
    family = sys.modules[type(learner.model).__module__]
    if not hasattr(family, "plain_rotation"):
        family.plain_rotation = family.apply_rotary_pos_emb
        family.apply_rotary_pos_emb = torch.compile(family.plain_rotation, dynamic=True)


def plain_rotation(learner: Learner) -> None:
    """Undo `compiled_rotation`."""
    family = sys.modules[type(learner.model).__module__]
    if hasattr(family, "plain_rotation"):
        family.apply_rotary_pos_emb = family.plain_rotation


WAYS: dict[str, tuple[dict[str, Any], Callable[[Learner], None] | None]] = {
    "as it is": ({}, None),
    "sharing off": ({}, sharing_off),
    "autocast": ({"dtype": "float32"}, autocast),
    "plain norms": ({}, plain_norms),
    "small chunks": ({}, small_chunks),
    "large chunks": ({}, large_chunks),
    "checkpointing": ({"gradient_checkpointing": True}, None),
    "packs of 16384": ({"tokens_per_batch": 16384}, None),
    "packs of 32768": ({"tokens_per_batch": 32768}, None),
    "compiled mlp": ({}, compiled_mlp),
    "compiled mlp and rotation": ({}, compiled_rotation),
}


def measure(options: argparse.Namespace, name: str, samples: list[TrainSample]) -> None:
    """Measure one way; print its line, and for `as it is` its phases and kernels."""
    more, change = WAYS[name]
    settings = {"lr": 1e-6, "tokens_per_batch": options.budget, **more}
    dtype = settings.pop("dtype", "bfloat16")
    model = model_of(options.shape, options.device)
    here = options.device == "cuda"
    if here:
        torch.cuda.reset_peak_memory_stats()
    learner = Learner(model, GrpoConfig(**settings), dtype=dtype, seed=0)
    if change is not None:
        change(learner)
    seconds = []
    for step in range(1, options.updates + 1):
        start = time.perf_counter()
        metrics = learner.update(samples, step=step)
        wait()
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds[1:])
    peak = torch.cuda.max_memory_allocated() / 2**30 if here else 0.0
    print(
        f"{name:28} {median:7.3f} s  first {seconds[0]:6.2f}  MFU {flops(model, samples) / median / options.peak:6.1%}"
        f"  peak {peak:6.1f} GiB  computed {metrics['computed_tokens']:.0f} of "
        f"{metrics['traced_tokens']:.0f}  loss {metrics['loss']:.3g}  norm {metrics['grad_norm']:.4g}",
        flush=True,
    )
    if name in ("as it is", "sharing off"):
        with phases() as spent:
            start = time.perf_counter()
            learner.update(samples, step=9)
            wait()
            whole = time.perf_counter() - start
        for label, value in sorted(spent.items(), key=lambda item: -item[1]):
            print(f"    {label:32} {value:7.4f}")
        print(f"    {'rest':32} {whole - sum(spent.values()):7.4f}  of {whole:.3f} with waiting", flush=True)
        with torch.profiler.profile() as profile:
            learner.update(samples, step=10)
            wait()
        found = profile.key_averages()
        print(found.table(sort_by="self_device_time_total", row_limit=45, max_name_column_width=90), flush=True)
        print(found.table(sort_by="self_cpu_time_total", row_limit=12, max_name_column_width=50), flush=True)
    if change is compiled_rotation:
        plain_rotation(learner)


@attrs.frozen(eq=False)
class Expanded:
    """Each segment is a sequence of queries; its keys are copies of those of the path to its last token.

    Attributes:
        keys: The token of each key.
        sequences: The segments and their paths.
    """

    keys: torch.Tensor
    sequences: tuple[torch.Tensor, torch.Tensor, int, int]

    @classmethod
    def of(cls, pack: Pack) -> Expanded:
        """Return a pack's layout."""
        spans = pack.spans()
        paths = [torch.cat([torch.arange(*spans[i]) for i in pack.forest.path(index)]) for index in pack.segments]
        cu_q, cu_k = (
            torch.tensor([0, *lengths]).cumsum(0).int()
            for lengths in ([b - a for a, b in spans.values()], [len(path) for path in paths])
        )
        return cls(torch.cat(paths), (cu_q, cu_k, int(cu_q.diff().max()), int(cu_k.diff().max())))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None) -> torch.Tensor:
        """Use torch's attention for sequences of different lengths."""
        from torch.nn.attention.varlen import varlen_attn

        grouped = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
        more: dict[str, Any] = {"scale": scaling, "window_size": (-1, 0), **grouped}
        found: Any = varlen_attn(
            q.to(v.dtype).contiguous(), k.to(v.dtype)[self.keys], v[self.keys], *self.sequences, **more
        )
        return cast(torch.Tensor, found)

    def to(self, device: torch.device) -> Expanded:
        """Return the layout on a device."""
        cu_q, cu_k, *most = self.sequences
        return Expanded(self.keys.to(device), (cu_q.to(device), cu_k.to(device), *most))


def flex(pack: Any, device: torch.device) -> Callable[[Any, Any, Any], torch.Tensor]:
    """Return flex attention over a pack, compiled."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    sees = torch.zeros(len(pack.segments), len(pack.segments), dtype=torch.bool)
    number = {index: i for i, index in enumerate(pack.segments)}
    for index in pack.segments:
        for above in pack.forest.path(index)[:-1]:
            sees[number[index], number[above]] = True
    owner = torch.cat([torch.full((b - a,), number[index]) for index, (a, b) in pack.spans().items()]).to(device)
    sees = sees.to(device)

    def mask(_batch: Any, _head: Any, q: Any, k: Any) -> Any:
        return sees[owner[q], owner[k]] | ((owner[q] == owner[k]) & (q >= k))

    blocks = torch.compile(create_block_mask)(mask, None, None, pack.tokens, pack.tokens, device=device)
    compiled: Any = torch.compile(flex_attention, dynamic=False)

    def call(q: Any, k: Any, v: Any) -> torch.Tensor:
        found: torch.Tensor = compiled(
            *(x.transpose(0, 1)[None] for x in (q, k, v)), block_mask=blocks, enable_gqa=True
        )
        return found[0].transpose(0, 1)

    return call


def time_attention(options: argparse.Namespace, samples: list[TrainSample]) -> None:
    """Time attention alone on the first pack, forward and backward."""
    device = torch.device("cuda")
    pack = next(iter(packed(samples, options.budget, share=True)))
    config = model_of("qwen2.5-0.5b", "meta").config
    heads, small, size = (12, 2, 128) if "1.5b" in options.shape else (14, 2, config.hidden_size // 14)
    shapes = ((heads, size), (small, size), (small, size))
    q, k, v = (torch.randn(pack.tokens, *s, device=device, dtype=torch.bfloat16, requires_grad=True) for s in shapes)
    gradient = torch.randn_like(q)
    levels, expanded = Levels.of(pack).to(device), Expanded.of(pack).to(device)
    blocks: Any = collate(pack, share=True).to(device).layout
    with torch.no_grad():
        exact = blocks.attend(q.float(), k.float(), v.float(), None)
    ways: dict[str, Callable[[], Callable[[Any, Any, Any], torch.Tensor]]] = {
        "levels": lambda: lambda *x: levels.attend(*x, None),
        "expanded keys": lambda: lambda *x: expanded.attend(*x, None),
        "blocks of sdpa": lambda: lambda *x: blocks.attend(*x, None),
        "flex": lambda: flex(pack, device),
    }
    sizes = f"{pack.tokens} tokens, {len(pack.segments)} segments, {len(expanded.keys)} expanded keys"
    print(f"attention of one pack: {sizes}")
    for name, build in ways.items():
        try:
            wait()
            start = time.perf_counter()
            way = build()
            out = way(q, k, v)
            out.backward(gradient)
            wait()
            first = time.perf_counter() - start
            times = []
            for _ in range(7):
                marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
                marks[0].record()
                out = way(q, k, v)
                marks[1].record()
                out.backward(gradient)
                marks[2].record()
                wait()
                times.append((marks[0].elapsed_time(marks[1]), marks[1].elapsed_time(marks[2])))
            forward, backward = (statistics.median(column) for column in zip(*times, strict=True))
            error = float((out.detach().float() - exact).norm() / exact.norm())
            print(
                f"  {name:22} forward {forward:7.3f} ms  backward {backward:7.3f} ms  first {first:6.2f} s  "
                f"error {error:.2g}",
                flush=True,
            )
        except Exception:
            print(f"  {name}: {traceback.format_exc(limit=-2)}", flush=True)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2.5-1.5b")
    for name, value in {"groups": 32, "size": 4, "prompt": 816, "answer": 128, "turns": 1, "updates": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--budget", type=int, default=8192, help="tokens_per_batch")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--peak", type=float, default=790e12, help="the device's bf16 FLOP/s, for the MFU")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--attention", action="store_true", help="time attention alone")
    options = parser.parse_args()
    samples = samples_of(options, model_of(options.shape, "meta").config.vocab_size)
    if options.attention:
        time_attention(options, samples)
        return
    for name in options.ways.split(","):
        try:
            measure(options, name, samples)
        except Exception:
            print(f"{name}: {traceback.format_exc(limit=-4)}", flush=True)
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
