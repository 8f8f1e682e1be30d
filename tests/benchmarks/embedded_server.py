"""Tokens and requests a second of agentrig-grpo's server, beside transformers with the same weights.

    python tests/benchmarks/embedded_server.py [--model DIR] [--device cpu] [--threads 1] [--json]

Without --model it is a random Qwen2 of the size of `mini` (hidden 128, 4 layers, 4 heads, 2 KV heads, FFN 384,
1300 tokens). Requests come in groups of 8 with the same prompt of 100 tokens and ask for 25 tokens, log-probabilities
and token ids. The server is asked over HTTP by a client of a few lines in this process. Beside it, `generate` (padded
batches) gets token ids and gives token ids, without HTTP, text or log-probabilities. CPU seconds are the server's own,
or this process's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

GROUP, PROMPT, REPLY = 8, 100, 25


def random_model(directory: Path) -> Path:
    """Write a random model with a word-level tokenizer, so that a prompt's length is known."""
    import torch
    from agentrig_grpo import checkpoint
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

    vocabulary = {word: i for i, word in enumerate(["<pad>", "<end>", "?", *(f"w{i}" for i in range(1297))])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<end>", unk_token="?")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=1300,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=384,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    model: Any = AutoModelForCausalLM
    checkpoint.save(model.from_config(config), tokenizer, directory)
    return directory


def prompts(n: int) -> list[str]:
    rng = random.Random(0)
    texts = [" ".join(f"w{rng.randrange(1297)}" for _ in range(PROMPT)) for _ in range(-(-n // GROUP))]
    return [text for text in texts for _ in range(GROUP)][:n]


async def ask(server: Any, texts: list[str], connections: int, reply: int) -> int:
    """Send all requests over so many keep-alive connections; returns the tokens that came back."""
    left = [
        json.dumps(
            {
                "model": "m",
                "messages": [{"role": "user", "content": text}],
                "max_tokens": reply,
                "logprobs": True,
                "return_token_ids": True,
            }
        ).encode()
        for text in reversed(texts)
    ]
    tokens, port = 0, server.port
    head_of = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {server.api_key}\r\n"
    )

    async def one() -> None:
        nonlocal tokens
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while left:
            body = left.pop()
            writer.write(head_of.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            if b" 200 " not in head[:20]:
                raise RuntimeError((await reader.read(2000)).decode())
            answer = await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r")[0]))
            tokens += int(answer[answer.rfind(b'"completion_tokens": ') + 21 :].split(b",")[0])
        writer.close()

    await asyncio.gather(*(one() for _ in range(connections)))
    return tokens


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def server_side(directory: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the server at several numbers of requests at once."""
    from embedded_servers import embedded

    dtype = "float32" if arguments.device == "cpu" else "bfloat16"
    rows = []
    with embedded(
        directory, name="m", device=arguments.device, dtype=dtype, threads=arguments.threads, slots=64
    ) as server:
        pid = server.pid
        asyncio.run(ask(server, prompts(64), 64, REPLY))
        for connections, n, reply in ((1, 64, REPLY), (8, 256, REPLY), (64, 1024, REPLY), (64, 2048, 1)):
            # New prompts, so that nothing is left over from the round before.
            texts = [f"w{connections} {text.split(' ', 1)[1]}" for text in prompts(n)]
            start, cpu = time.perf_counter(), cpu_seconds(pid)
            tokens = asyncio.run(ask(server, texts, connections, reply))
            wall, cpu = time.perf_counter() - start, cpu_seconds(pid) - cpu
            rows.append(row(f"server, {connections} at once, {reply} tokens", tokens, n, wall, cpu, reply))
    return rows


def generate_side(directory: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure `generate` in batches, sampling as the server does."""
    import torch
    from agentrig_grpo import checkpoint

    torch.set_num_threads(arguments.threads)
    dtype = torch.float32 if arguments.device == "cpu" else torch.bfloat16
    tokenizer = checkpoint.load_tokenizer(directory)
    model = checkpoint.load_model(directory, dtype=dtype, device=arguments.device)
    rows = []
    for batch, n in ((1, 16), (8, 64), (64, 256)):
        texts, tokens = prompts(n), 0
        start, cpu = time.perf_counter(), sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        for at in range(0, n, batch):
            ids = tokenizer(texts[at : at + batch], return_tensors="pt", padding=True).to(arguments.device)
            answer = model.generate(**ids, max_new_tokens=REPLY, min_new_tokens=REPLY, do_sample=True)
            tokens += answer[:, ids["input_ids"].shape[1] :].numel()
        wall = time.perf_counter() - start
        cpu = sum(resource.getrusage(resource.RUSAGE_SELF)[:2]) - cpu
        rows.append(row(f"generate, batch of {batch}, {REPLY} tokens", tokens, n, wall, cpu))
    return rows


def row(what: str, tokens: int, requests: int, wall: float, cpu: float, reply: int = REPLY) -> dict[str, Any]:
    """Return one line of the table; raises SystemExit if a side gave fewer tokens than it was asked for."""
    if tokens < 0.95 * requests * reply:  # the server may end a reply: its random model draws the end in 1 of 1,300
        raise SystemExit(f"{what}: {tokens} tokens instead of about {requests * reply}")
    return {
        "what": what,
        "tokens_per_s": tokens / wall,
        "requests_per_s": requests / wall,
        "tokens_per_cpu_s": tokens / cpu,
        "requests_per_cpu_s": requests / cpu,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face directory; default: a random one")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = arguments.model or random_model(Path(folder))
        rows = [r for side in (server_side, generate_side) for r in side(directory, arguments)]
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{'':38} {'tokens/s':>9} {'requests/s':>11} {'tokens/CPU-s':>13} {'requests/CPU-s':>15}")
    for r in rows:
        print(
            f"{r['what']:38} {r['tokens_per_s']:9.0f} {r['requests_per_s']:11.0f} {r['tokens_per_cpu_s']:13.0f} "
            f"{r['requests_per_cpu_s']:15.0f}"
        )


if __name__ == "__main__":
    main()
