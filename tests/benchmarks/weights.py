"""What a transfer of new weights to the embedded server takes: by memory that both share, and by a file.

    python tests/benchmarks/weights.py [--shape 135m] [--device cpu] [--versions 6] [--ways shared,file] [--json]

`shared` is what a run does: on the CPU unnamed shared memory, on a CUDA device memory of that device. `host` is shared
memory of the host for weights that are on a CUDA device. `file` is a safetensors file in --folder, written by one
process and read into its own tensors by another. Seconds from the call until the server computes with the weights; the
first transfer, which allocates, is shown by itself. At the end the server's tensors are compared with the model's.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from agentrig_grpo import checkpoint
from agentrig_grpo.naming import model_directory
from agentrig_grpo.server.handle import LLMServer, ServerSettings
from agentrig_grpo.server.transfer import Sender
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from agentrig.delivery.asking import ask
from agentrig.delivery.digests import digests
from agentrig.endpoints import Endpoint

SHAPES: dict[str, tuple[Any, Any]] = {
    "tiny": (LlamaForCausalLM, LlamaConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=128,
        vocab_size=512, tie_word_embeddings=True, max_position_embeddings=512)),
    "135m": (LlamaForCausalLM, LlamaConfig(
        hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, intermediate_size=1536,
        vocab_size=49152, tie_word_embeddings=True, max_position_embeddings=2048)),
    "1.5b": (Qwen2ForCausalLM, Qwen2Config(
        hidden_size=1536, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2, intermediate_size=8960,
        vocab_size=151936, tie_word_embeddings=True, max_position_embeddings=2048)),
}  # fmt: skip

Take = Callable[[dict[str, torch.Tensor], int], None]


@contextmanager
def by_server(directory: Path, device: str, dtype: str, *, host: bool) -> Iterator[tuple[Take, LLMServer]]:
    """Yield the transfer of a run."""
    settings = ServerSettings(
        model=str(directory), name="x", device=device, dtype=dtype, slots=1, max_length=256, kv_cache_mb=64
    )
    with LLMServer(settings, log=directory / "server.log") as server:
        if host:
            server._sender = Sender(getattr(torch, dtype), "cpu")
        yield server.swap, server


def _reader(connection: Any, device: str) -> None:
    """Read files into tensors of this process, as a server would."""
    places: dict[str, torch.Tensor] = {}
    while (file := connection.recv()) is not None:
        for name, tensor in load_file(file).items():
            if name not in places:
                places[name] = torch.empty_like(tensor, device=device)
            places[name].copy_(tensor)
        if device != "cpu":
            torch.cuda.synchronize()
        connection.send(len(places))


@contextmanager
def by_file(folder: Path, device: str, dtype: str) -> Iterator[tuple[Take, None]]:
    """Yield the transfer by a file."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_reader, args=(theirs, device), daemon=True)
    process.start()

    def take(weights: dict[str, torch.Tensor], version: int) -> None:
        file = folder / "weights.safetensors"
        kind = getattr(torch, dtype)
        save_file({name: t.detach().to("cpu", kind).contiguous() for name, t in weights.items()}, str(file))
        ours.send(str(file))
        ours.recv()
        file.unlink()

    try:
        take({"x": torch.zeros(1)}, 0)  # the process has started
        yield take, None
    finally:
        ours.send(None)
        process.join(20)


def arrived(server: LLMServer, weights: dict[str, torch.Tensor], dtype: str) -> str:
    """Say how many of the server's tensors are the model's, bit by bit."""
    endpoint = Endpoint(base_url=server.base_url, model="x", api_key=server.api_key)
    theirs = ask(endpoint, [5, 6, 7]).digests
    ours = digests(weights.items(), getattr(torch, dtype))
    return f"{sum(ours.get(name) == value for name, value in theirs.items())} of {len(theirs)}"


def measure(way: str, directory: Path, folder: Path, model: Any, given: argparse.Namespace) -> dict[str, Any]:
    """Send some versions in one way."""
    weights = checkpoint.weights(model)
    making: Any = (
        by_file(folder, given.device, given.dtype)
        if way == "file"
        else by_server(directory, given.device, given.dtype, host=way == "host")
    )
    seconds = []
    with making as (take, server), torch.no_grad():
        for version in range(1, given.versions + 1):
            for parameter in model.parameters():
                parameter.add_(1e-3)
            if given.device != "cpu":
                torch.cuda.synchronize()
            start = time.perf_counter()
            take(weights, version)
            seconds.append(time.perf_counter() - start)
        proof = arrived(server, weights, given.dtype) if server is not None else ""
    return {
        "way": way,
        "first_s": round(seconds[0], 4),
        "median_s": round(statistics.median(seconds[1:]), 4),
        "all_s": [round(s, 4) for s in seconds],
        "bytes": sum(t.numel() for t in weights.values()) * getattr(torch, given.dtype).itemsize,
        "arrived": proof,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="135m")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", default="", help="what the server computes in; float32 on a CPU, else bfloat16")
    parser.add_argument("--versions", type=int, default=6)
    parser.add_argument("--ways", default="", help="shared, host, file")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of this process on a CPU")
    parser.add_argument("--folder", type=Path, default=None, help="for the file; a temporary folder by default")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    given.dtype = given.dtype or ("float32" if given.device == "cpu" else "bfloat16")
    ways = given.ways.split(",") if given.ways else ["shared", "file"] + (["host"] if given.device != "cpu" else [])
    torch.set_num_threads(given.threads)
    make, config = SHAPES[given.shape]
    with tempfile.TemporaryDirectory() as made:
        directory, folder = Path(made) / "model", given.folder or Path(made)
        torch.manual_seed(0)
        model = make(config).to(getattr(torch, given.dtype))
        checkpoint.save(model, checkpoint.load_tokenizer(model_directory("mini")), directory)
        model = model.to(given.device)
        parameters = sum(p.numel() for p in model.parameters())
        print(f"{given.shape}: {parameters / 1e6:.1f} million parameters, {given.device}, {given.dtype}", flush=True)
        found = []
        for way in ways:
            found.append(measure(way, directory, folder, model, given))
            line = found[-1]
            print(
                f"{way:<7} median {line['median_s']:.3f} s, first {line['first_s']:.3f} s, {line['bytes'] / 1e9:.2f} GB"
                + (f", tensors bit by bit: {line['arrived']}" if line["arrived"] else ""),
                flush=True,
            )
    if given.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
