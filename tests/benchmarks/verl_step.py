"""How long a step takes, beside plain verl: the same model, prompts, lengths and n, one call a rollout.

    python tests/benchmarks/verl_step.py plain|agentrig [--shape 18m|135m|0.5b|1.5b|7b] [--rows 32x4x816+128]
        [--engine auto] [--tokens N] [--steps 8] [--gpus 1] [--cpus N] [--poll S] [--work DIR] [KEY=VALUE …]

`plain` runs verl's own single-turn agent loop from the same composed configuration; `agentrig` runs this project's
manager with an agent that makes one call, and with the engine that `--engine` names: `forest` computes tokens that
rows share once, `verl` is verl's own. `--rows` are tasks x n x prompt + response tokens of a step; `--tokens` lets the
learner fill passes up to that many tokens (verl's use_dynamic_bsz) in place of a number of rows. Both sample the same
number of tokens (end of text is ignored). verl's trainer looks every two seconds whether its rollouts are done;
`--poll` lets plain verl look that often instead, so that its rollout time is that of the rollouts. Prints the median
seconds of each part over all steps after the first two, tokens a second and MFU, as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path

import yaml

SHAPES = {
    "18m": {"hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
            "intermediate_size": 1024, "vocab_size": 16384, "tie_word_embeddings": False},
    "135m": {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
             "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True},
    "0.5b": {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
             "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True},
    "1.5b": {"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
             "intermediate_size": 8960, "vocab_size": 151936, "tie_word_embeddings": True},
    "3b": {"hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2,
           "intermediate_size": 11008, "vocab_size": 151936, "tie_word_embeddings": True},
    "7b": {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
           "intermediate_size": 18944, "vocab_size": 152064, "tie_word_embeddings": False},
}  # fmt: skip
ROWS = {
    "18m": "32x4x64+64",
    "135m": "32x4x256+64",
    "0.5b": "32x4x816+128",
    "1.5b": "32x4x816+128",
    "3b": "32x4x816+128",
    "7b": "32x4x816+128",
}
TASKS = 64
PLUGIN = """
import hashlib, httpx, json
from agentrig import AgentSpec, RewardSpec, Score, Task, TasksSpec, hookimpl, span

class Prompts:
    splits, roles = ("train",), {"train": "train", "validation": "train", "report": "train"}
    def load(self, split):
        rows = json.loads(open(PROMPTS).read())
        return [Task(id=str(i), input={"text": t}) for i, t in enumerate(rows)]

_client = httpx.Client(timeout=120)

def agent(task_input, endpoint):
    body = {"model": endpoint.model, "messages": [{"role": "user", "content": task_input["text"]}], **endpoint.sampling}
    with span("write_query"):
        key = {"Authorization": f"Bearer {endpoint.api_key}"}
        reply = _client.post(f"{endpoint.base_url}/chat/completions", json=body, headers=key)
    reply.raise_for_status()
    return reply.json()["choices"][0]["message"]["content"]

def reward(task, outcome, budget_s):
    return Score.ok(float(hashlib.sha256(outcome.answer.encode()).digest()[0] % 2))

@hookimpl
def register_tasks(): yield TasksSpec(name="bench-prompts", summary="", build=lambda c: Prompts())
@hookimpl
def register_agents(): yield AgentSpec(name="bench-call", summary="", build=lambda c: agent)
@hookimpl
def register_rewards(): yield RewardSpec(name="bench-hash", summary="", build=lambda c: reward)
"""
KEPT = ("rollout", "reward", "perf/mfu/actor", "perf/total_num_tokens", "memory_gb", "traced_tokens", "computed_tokens")
REWARD = """
import hashlib
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **more):
    return float(hashlib.sha256(solution_str.encode()).digest()[0] % 2)
"""

SAMPLER = """
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

class Eager(ReplayBuffer):
    def __init__(self, **more):
        super().__init__(**{**more, "poll_interval": POLL_S})
"""


def make_model(shape: str, folder: Path, *, context: int) -> None:
    """Write a random Qwen2 with the shipped model's tokenizer, in which every id of the vocabulary has a text."""
    import torch
    from agentrig_grpo import checkpoint
    from agentrig_grpo.naming import model_directory
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = checkpoint.load_tokenizer(model_directory("mini"))
    torch.manual_seed(0)
    config = Qwen2Config(**SHAPES[shape], max_position_embeddings=context, eos_token_id=tokenizer.eos_token_id,
                         pad_token_id=tokenizer.pad_token_id, bos_token_id=None)  # fmt: skip
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters", file=sys.stderr)
    checkpoint.save(model, tokenizer, folder)
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # what is measured next gets the whole device
    # A random model samples any id, and an OpenAI endpoint answers with text.
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text("utf-8"))
    vocabulary = content["model"]["vocab"]
    vocabulary |= {f"Ġfiller{i}": i for i in range(len(tokenizer), config.vocab_size)}
    file.write_text(json.dumps(content, ensure_ascii=False), "utf-8")


def make_prompts(file: Path, tokens: int) -> None:
    """Write prompts of about that many tokens."""
    from agentrig_grpo import checkpoint
    from agentrig_grpo.naming import model_directory

    tokenizer = checkpoint.load_tokenizer(model_directory("mini"))
    import random

    rng = random.Random(0)
    words = [tokenizer.decode([i]) for i in range(len(tokenizer))]
    # Words with the space before them: put together, they are cut into the same tokens again.
    usable = [i for i, word in enumerate(words) if word.startswith(" ") and word[1:].isalpha()]
    texts = [tokenizer.decode(rng.choices(usable, k=tokens - 3)) for _ in range(TASKS)]
    file.write_text(json.dumps(texts), "utf-8")


def parsed(rows: str) -> tuple[int, int, int, int]:
    """Return tasks, n, prompt and response tokens of `TASKSxNxPROMPT+RESPONSE`."""
    tasks, n, prompt, response = map(int, re.fullmatch(r"(\d+)x(\d+)x(\d+)\+(\d+)", rows).groups())
    return tasks, n, prompt, response


def settings(shape: str, arguments: argparse.Namespace) -> dict[str, object]:
    """Return verl's keys, the same for both."""
    tasks, n, prompt, response = parsed(arguments.rows)
    big = shape != "18m"
    micro = 16 if big else 128
    while micro > 1 and micro * (prompt + response) > (16 if big else 128) * 960:
        micro //= 2
    rollout, actor = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
    return {
        "algorithm.adv_estimator": "grpo",
        "data.train_batch_size": tasks, "data.max_prompt_length": prompt + 64, "data.max_response_length": response,
        "data.dataloader_num_workers": 0, "data.seed": 0,
        f"{rollout}.name": "vllm", f"{rollout}.n": n, f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.gpu_memory_utilization": 0.4, f"{rollout}.ignore_eos": True, f"{rollout}.seed": 0,
        f"{rollout}.log_prob_micro_batch_size_per_gpu": micro,
        f"{rollout}.max_model_len": prompt + 64 + response,
        f"{actor}.ppo_mini_batch_size": tasks, f"{actor}.ppo_micro_batch_size_per_gpu": micro,
        f"{actor}.optim.lr": 1e-6, f"{actor}.use_kl_loss": False,
        "actor_rollout_ref.model.enable_gradient_checkpointing": big,
        "actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
        "actor_rollout_ref.model.use_remove_padding": False,
        "reward.num_workers": 1, "transfer_queue.backend.SimpleStorage.num_data_storage_units": 2,
        "trainer.n_gpus_per_node": arguments.gpus, "trainer.nnodes": 1, "trainer.val_before_train": False,
        "trainer.test_freq": -1, "trainer.save_freq": -1, "trainer.total_epochs": 100,
        "trainer.total_training_steps": arguments.steps, "trainer.logger": ["console"],
        **({f"{actor}.use_dynamic_bsz": True, f"{actor}.ppo_max_token_len_per_gpu": arguments.tokens,
            f"{rollout}.log_prob_use_dynamic_bsz": True, f"{rollout}.log_prob_max_token_len_per_gpu": arguments.tokens}
           if arguments.tokens else {}),
        **({"ray_kwargs.ray_init.num_cpus": arguments.cpus} if arguments.cpus else {}),
        **{key: yaml.safe_load(value) for key, _, value in (word.partition("=") for word in arguments.keys)},
    }  # fmt: skip


def run_plain(work: Path, keys: dict[str, object], *, poll_s: float | None) -> list[dict[str, float]]:
    """Run verl's own loop; return its metrics, one dict a step."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from agentrig_verl import schema
    from omegaconf import OmegaConf, open_dict
    from verl.trainer.main_ppo import TaskRunnerV1, run_ppo

    texts = json.loads((work / "prompts.json").read_text("utf-8"))
    rows = [{"prompt": [{"role": "user", "content": t}], "data_source": "bench", "reward_model": {"ground_truth": ""},
             "extra_info": {"index": i}} for i, t in enumerate(texts)]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), work / "prompts.parquet")
    (work / "reward.py").write_text(REWARD, "utf-8")
    if poll_s is not None:
        (work / "sampler.py").write_text(f"POLL_S = {poll_s}\n{SAMPLER}", "utf-8")
        custom = "trainer.v1.sampler.custom_sampler"
        keys = {**keys, f"{custom}.path": str(work / "sampler.py"), f"{custom}.name": "Eager"}
    config = schema.compose(keys, trusted={
        "actor_rollout_ref.model.path": str(work / "model"), "data.train_files": str(work / "prompts.parquet"),
        "data.val_files": str(work / "prompts.parquet"), "trainer.resume_mode": "disable",
        "reward.custom_reward_function.path": str(work / "reward.py"),
    })  # fmt: skip
    with open_dict(config):
        config.transfer_queue.enable = True
        config.actor_rollout_ref.rollout.agent.num_workers = 8
    print(OmegaConf.select(config, "trainer.total_training_steps"), "steps of plain verl", file=sys.stderr)
    captured = Path(os.environ.get("BENCH_LOG", work / "plain.log"))
    with captured.open("w") as log, _descriptors(log):
        run_ppo(config, TaskRunnerV1)
    found = []
    for line in captured.read_text("utf-8", errors="replace").splitlines():
        if re.search(r"step:\d+ - ", line):
            pairs = re.findall(
                r"([\w/@.()-]+):(-?[\d.]+(?:e[+-]?\d+)?)", line.replace("np.float64(", "").replace("np.int64(", "")
            )
            found.append({k: float(v) for k, v in pairs})
    return found


@contextlib.contextmanager
def _descriptors(log: io.TextIOBase):
    """Send this process's and Ray's output to a file."""
    sys.stdout.flush()
    kept = os.dup(1), os.dup(2)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept[0], 1)
        os.dup2(kept[1], 2)


def run_agentrig(work: Path, keys: dict[str, object], *, engine: str) -> list[dict[str, float]]:
    """Run this project's loop; return verl's timers, one dict a step."""
    from agentrig.plan import resolve
    from agentrig.run.training import train

    name = f"run-{time.strftime('%H%M%S')}"

    (work / "bench.py").write_text(f"PROMPTS = {str(work / 'prompts.json')!r}\n{PLUGIN}", "utf-8")
    lines = ["[run]", f'directory = "{work}"', f'name = "{name}"', "report_tasks = 1", "validation_tasks = 1",
             "[tasks]", 'use = "bench-prompts"', "[agent]", 'use = "bench-call"', "[reward]", 'use = "bench-hash"',
             "[adapter]", 'use = "agent-match"', "[hardware]", 'use = "cuda"', "[runners]", "n = 8", "threads = 16",
             "[algorithm]", 'use = "verl"', f'engine = "{engine}"', f'model = "{work}/model"',
             "[algorithm.verl]"]  # fmt: skip
    lines += [f"{json.dumps(k)} = {json.dumps(v)}" for k, v in keys.items()]
    (work / "bench.toml").write_text("\n".join(lines), "utf-8")
    train(resolve(str(work / "bench.toml"), files=[str(work / "bench.py")]))
    found = []
    for text in (work / name / "metrics.jsonl").read_text("utf-8").splitlines():
        line = json.loads(text)
        times, figures = line["time_s"], line["algorithm"]
        found.append({
            "timing_s/step": figures["verl_step_s"], "timing_s/gen": figures["verl_rollout_s"],
            "rollout": times["rollout"], "reward": times["reward"], "timing_s/old_log_prob": times["log_probs"],
            "timing_s/update_actor": times["update"], "timing_s/update_weights": times["weight_sync"],
            "timing_s/adv": times["credit"], "perf/mfu/actor": figures["mfu"],
            "perf/total_num_tokens": figures["total_tokens"], "memory_gb": figures.get("memory_gb", 0.0),
            "traced_tokens": figures.get("traced_tokens", 0.0), "computed_tokens": figures.get("computed_tokens", 0.0),
            **{f"timing_s/{k}": v for k, v in figures.items() if re.match("weight_sync_|rollout_|verl_sleep", k)},
        })  # fmt: skip
    return found


def main() -> None:
    """Run one side and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=("plain", "agentrig"))
    parser.add_argument("--shape", choices=tuple(SHAPES), default="18m")
    parser.add_argument("--rows", metavar="TASKSxNxPROMPT+RESPONSE", help="a step's rows; by shape when left out")
    parser.add_argument("--engine", choices=("auto", "forest", "verl"), default="auto", help="of the side agentrig")
    parser.add_argument("--tokens", type=int, help="tokens of a pass of the learner, in place of a number of rows")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--cpus", type=int, help="CPUs for Ray, when the process may not use all of the machine's")
    parser.add_argument("--poll", type=float, metavar="S", help="plain verl looks for finished rollouts this often")
    parser.add_argument("--work", type=Path, help="folder for model and prompts; made once, shared by both sides")
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE", help="more of verl's keys, for both sides")
    arguments = parser.parse_intermixed_args()
    work = (arguments.work or Path(tempfile.mkdtemp(prefix="verl-step-"))).resolve()
    arguments.rows = arguments.rows or ROWS[arguments.shape]
    _, _, prompt, response = parsed(arguments.rows)
    if not (work / "model").is_dir():
        work.mkdir(parents=True, exist_ok=True)
        make_prompts(work / "prompts.json", prompt)
        make_model(arguments.shape, work / "model", context=prompt + 64 + response)
    keys = settings(arguments.shape, arguments)
    plain = arguments.side == "plain"
    lines = run_plain(work, keys, poll_s=arguments.poll) if plain else run_agentrig(work, keys, engine=arguments.engine)
    tasks, n, _, _ = parsed(arguments.rows)
    wanted = tasks * n * (prompt + response)
    less = [line for line in lines if line.get("perf/total_num_tokens", 0.0) < 0.95 * wanted]
    if not lines or less:
        raise SystemExit(
            f"not the work that was asked for: {len(less)} of {len(lines)} steps have under {wanted} tokens"
        )
    names = sorted({k for line in lines for k in line if k.startswith("timing_s/") or k in KEPT})
    later = lines[2:] or lines
    medians = {
        n: round(statistics.median(line[n] for line in later if n in line), 4)
        for n in names
        if any(n in line for line in later)
    }
    print(
        json.dumps(
            {"side": arguments.side, "shape": arguments.shape, "gpus": arguments.gpus, "steps": len(lines), **medians}
        )
    )


if __name__ == "__main__":
    main()
