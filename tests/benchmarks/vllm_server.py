"""The vLLM server by itself: how long it takes to start, to take weights, to sample, to sleep, and to be missed.

    python tests/benchmarks/vllm_server.py [--shape 18m|1.5b] [--set KEY=VALUE …] [--takes 5]

A random model of the shape is the learner, with fp32 weights on the same GPU; it is loaded while vLLM starts. After
each change of its weights the server takes them; the digests of what vLLM computes with must be the learner's, and so
must the log-probabilities of given and of sampled tokens, within the noise of bf16. Prints JSON lines as it goes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import httpx
import psutil
import torch
import verl_step
from agentrig_cuda.hardware import Cuda
from agentrig_grpo import checkpoint
from agentrig_vllm.config import VllmConfig
from agentrig_vllm.handle import VllmServer

from agentrig.delivery.asking import ask
from agentrig.delivery.digests import digests
from agentrig.processes.servers import ServerError
from agentrig.servers import ServerPlan
from agentrig.settings import structure

LENGTHS = {"18m": (64, 64), "1.5b": (816, 128)}


CLIENT = httpx.Client(timeout=120, limits=httpx.Limits(max_connections=256, max_keepalive_connections=256))


def say(**figures: object) -> None:
    """Print figures at once."""
    print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in figures.items()}), flush=True)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(LENGTHS), default="18m")
    parser.add_argument("--set", action="append", default=[], help="a key of [server], as JSON: cuda_graphs=false")
    parser.add_argument("--takes", type=int, default=5)
    options = parser.parse_args()
    keys = {key: json.loads(value) for key, _, value in (word.partition("=") for word in options.set)}
    with tempfile.TemporaryDirectory(prefix="agentrig-vllm-") as folder:
        measure(Path(folder), options, structure(VllmConfig, keys, owner="vllm", section="server"))


def measure(folder: Path, options: argparse.Namespace, config: VllmConfig) -> None:
    """Start the server, use it and kill it."""
    prompt, answer = LENGTHS[options.shape]
    verl_step.make_model(options.shape, folder / "model", context=prompt + answer + 64)
    verl_step.make_prompts(folder / "prompts.json", prompt)
    torch.cuda.empty_cache()
    plan = ServerPlan(
        model=folder / "model", name="policy", hardware=Cuda(), dtype="bfloat16", context=prompt + answer + 64,
        log=folder / "server.log", sleeps=True,
    )  # fmt: skip
    server = VllmServer(plan, config)
    try:
        with server:
            use(server, folder, options, answer)
    except BaseException:
        print((folder / "server.log").read_text("utf-8", errors="replace")[-12_000:], flush=True)
        raise
    for line in (folder / "server.log").read_text("utf-8", errors="replace").splitlines():
        print("  log:", line[:220], flush=True)


def use(server: VllmServer, folder: Path, options: argparse.Namespace, answer: int) -> None:
    """Send weights, ask, let it sleep, kill it."""
    begun = time.perf_counter()
    model = checkpoint.load_model(folder / "model", device="cuda", attention="sdpa")
    loaded = time.perf_counter()
    endpoint = server.endpoints[0].with_sampling(temperature=1.0)
    say(learner_loaded=loaded - begun, started_after=time.perf_counter() - begun, parts=dict(server.parts))

    seconds = []
    for version in range(1, options.takes + 1):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.0 + 1e-3 * version)
        torch.cuda.synchronize()
        start = time.perf_counter()
        server.take(checkpoint.weights(model).items(), version)
        seconds.append(time.perf_counter() - start)
    say(take=seconds, median=statistics.median(seconds[1:]))
    start = time.perf_counter()
    theirs = server.held()[0]
    said = time.perf_counter()
    ours = digests(checkpoint.weights(model).items(), torch.bfloat16)
    wrong = [name for name, value in ours.items() if theirs.get(name) != value]
    say(tensors=len(ours), differ=wrong[:4], held_s=said - start, own_s=time.perf_counter() - said)
    prove(model, endpoint, options.takes)

    texts = json.loads((folder / "prompts.json").read_text())
    for turn in range(3):
        start = time.perf_counter()
        with ThreadPoolExecutor(128) as pool:
            asked = [texts[(i // 4 + 32 * turn) % 64] for i in range(128)]
            found = list(pool.map(lambda text: call(endpoint, text, answer), asked))
        wall = time.perf_counter() - start
        say(rollouts_s=wall, prompt=statistics.mean(f[0] for f in found), response=statistics.mean(f[1] for f in found))

    free = torch.cuda.mem_get_info()[0]
    start = time.perf_counter()
    server.sleep()
    slept = time.perf_counter()
    more = torch.cuda.mem_get_info()[0] - free
    refused = httpx.post(f"{endpoint.base_url}/completions", headers=key(endpoint), json={}).status_code
    again = time.perf_counter()
    server.wake()
    say(sleep=slept - start, freed_gib=more / 2**30, wake=time.perf_counter() - again, asked_while_asleep=refused)
    server.take(checkpoint.weights(model).items(), 77)
    prove(model, endpoint, 77)
    say(without_key=httpx.post(f"{endpoint.base_url.removesuffix('/v1')}/tokenize", json={}).status_code)

    family = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    engine = family[-1]
    os.kill(engine.pid, signal.SIGKILL)
    start = time.perf_counter()
    try:
        while time.perf_counter() - start < 30:
            server.check()
        say(engine_killed="not noticed")
    except ServerError as error:
        say(engine_killed=str(error).splitlines()[0], noticed_after=time.perf_counter() - start)
    server.__exit__(None, None, None)
    gone, alive = psutil.wait_procs(family, timeout=10)
    say(gone=len(gone), alive=len(alive))


def prove(model: torch.nn.Module, endpoint, version: int) -> None:
    """Compare log-probabilities of given tokens and of sampled ones."""
    ids = list(range(5, 105))
    scored = ask(endpoint, ids)
    sampled = ask(endpoint, ids, score=False, n=8, temperature=1.0)
    again = ask(endpoint, ids, score=False, n=1, temperature=1.0)
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        given = torch.tensor([[*ids, *sampled.tokens]], device="cuda")
        logits = model(input_ids=given).logits[0, :-1].float()
    found = (-torch.nn.functional.cross_entropy(logits, given[0, 1:], reduction="none")).tolist()
    say(
        version=(scored.version, sampled.version),
        right=scored.version == version,
        score_gap=max(abs(a - b) for a, b in zip(found, scored.logprobs, strict=False)),
        sample_gap=max(abs(a - b) for a, b in zip(found[len(ids) - 1 :], sampled.sampled, strict=True)),
        same=again.tokens == sampled.tokens[:1],
    )


def key(endpoint) -> dict[str, str]:
    """Return the header that the server asks for."""
    return {"Authorization": f"Bearer {endpoint.api_key}"}


def call(endpoint, text: str, answer: int) -> tuple[int, int]:
    """Make one call; return its prompt's and its answer's tokens."""
    body = {
        "model": endpoint.model, "messages": [{"role": "user", "content": text}], "max_tokens": answer,
        "temperature": 1.0, "ignore_eos": True, "logprobs": True, "return_token_ids": True,
    }  # fmt: skip
    reply = CLIENT.post(f"{endpoint.base_url}/chat/completions", json=body, headers=key(endpoint))
    reply.raise_for_status()
    usage = reply.json()["usage"]
    return usage["prompt_tokens"], usage["completion_tokens"]


if __name__ == "__main__":
    main()
