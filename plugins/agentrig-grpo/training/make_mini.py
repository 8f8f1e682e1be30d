"""Makes `mini`, the starting model of the recipe of that name, from nothing. See README.md beside this file."""

from __future__ import annotations

import argparse
import json
import random
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch  # noqa: TID253  (a script)
from agentrig_grpo import checkpoint
from agentrig_grpo.warmup import Example, fine_tune, new_model
from agentrig_langgraph_sql.prompts import SHORT
from agentrig_spider.tasks.domains import SEEN, UNSEEN
from agentrig_spider.tasks.mini_sql import MiniSql, MiniSqlConfig
from sampling import sample
from tokenizer import save

from agentrig import Task
from examples import Database, Share, chat, encode, later_turn, on_renamed, reading, same, turns

ALL = Share(frames=99, conditions=99)


def model_config(vocabulary: int) -> Any:
    """Return the architecture: Qwen2 of about a million parameters."""
    from transformers import Qwen2Config

    return Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=384,
        tie_word_embeddings=True,
        max_position_embeddings=512,
    )


@cache
def database_of(path: str) -> Database:
    """Return one of the task set's databases."""
    name = Path(path).stem
    domain = next(d for d in (*SEEN, *UNSEEN) if d.name == name)
    return Database(domain, sqlite3.connect(f"file:{path}?mode=ro", uri=True))


def write_prompt(tokenizer: Any, task: Task) -> list[int]:
    """Return the token ids of a task's write turn."""
    fields = {"schema": database_of(task.input["database"]).schema, "question": task.input["question"]}
    return list(encode(tokenizer, chat(SHORT.write, "", **fields)).prompt_ids)


def read_and_copy(tokenizer: Any, tasks: Sequence[Task], questions: int, share: Share, seed: int) -> list[Example]:
    """Return the first stage: plain questions on renamed databases with answers, all wordings without."""
    rng = random.Random(f"mini {seed} plain")
    found = [
        encode(tokenizer, example)
        for database, question, text in on_renamed(questions, share, rng)
        for example in turns(database, question, text, rng, others=0.2)
    ]
    rng = random.Random(f"mini {seed} reading")
    found += [reading(tokenizer, d.schema, text) for d, _, text in on_renamed(questions // 2, ALL, rng)]
    found += [reading(tokenizer, database_of(t.input["database"]).schema, t.input["question"]) for t in tasks]
    return found


def labelled(tokenizer: Any, tasks: Iterable[Task]) -> list[Example]:
    """Return write turns of tasks with their gold queries."""
    found = []
    for task in tasks:
        fields = {"schema": database_of(task.input["database"]).schema, "question": task.input["question"]}
        found.append(encode(tokenizer, chat(SHORT.write, task.private["gold"], **fields)))
    return found


def own_work(model: Any, tokenizer: Any, tasks: Sequence[Task], seed: int) -> list[Example]:
    """Return checks and rewrites of queries that the model itself samples for labelled tasks, and of the gold ones."""
    torch.manual_seed(seed)
    prompts = [write_prompt(tokenizer, task) for task in tasks]
    found = []
    for queries in (sample(model, tokenizer, prompts, temperature=1.0), [t.private["gold"] for t in tasks]):
        for task, query in zip(tasks, queries, strict=True):
            database, gold = database_of(task.input["database"]), task.private["gold"]
            right = same(database.run(query)[0], database.run(gold)[0], gold)
            kinds = ("check", "rewrite") if query != gold else ("check",)
            found += [
                encode(tokenizer, later_turn(kind, database, task.input["question"], gold, query, right=right))
                for kind in kinds
            ]
    return found


def measure(model: Any, tokenizer: Any, tasks: Sequence[Task]) -> dict[str, float]:
    """Return greedy figures: right after one turn and after two, and how checks judge right and wrong queries."""

    def right(task: Task, query: str) -> bool:
        database, gold = database_of(task.input["database"]), task.private["gold"]
        return same(database.run(query)[0], database.run(gold)[0], gold)

    def replies(kind: str, queries: Sequence[str]) -> list[str]:
        prompts = [
            encode(
                tokenizer, later_turn(kind, database_of(t.input["database"]), t.input["question"], "", q, right=True)
            )
            for t, q in zip(tasks, queries, strict=True)
        ]
        return sample(model, tokenizer, [list(prompt.prompt_ids) for prompt in prompts], temperature=0)

    first = sample(model, tokenizer, [write_prompt(tokenizer, t) for t in tasks], temperature=0)
    verdicts = [reply.strip() == SHORT.correct for reply in replies("check", first)]
    second = [q if v else new for q, v, new in zip(first, verdicts, replies("rewrite", first), strict=True)]
    write = [right(task, query) for task, query in zip(tasks, first, strict=True)]
    final = [right(task, query) for task, query in zip(tasks, second, strict=True)]
    return {
        "write": _share(write),
        "two_turns": _share(final),
        "accepts_right": _share([v for v, r in zip(verdicts, write, strict=True) if r]),
        "refuses_wrong": _share([not v for v, r in zip(verdicts, write, strict=True) if not r]),
    }


def _share(values: Sequence[bool]) -> float:
    return round(sum(values) / max(1, len(values)), 4)


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--questions", type=int, default=24000, help="questions on renamed databases")
    parser.add_argument("--epochs", type=float, default=6, help="passes over them")
    parser.add_argument("--share", type=int, default=2, help="plain wordings: the first so many of each list")
    parser.add_argument("--labelled", type=int, default=600, help="train tasks whose gold query is shown")
    parser.add_argument("--passes", type=float, default=4, help="passes over those")
    parser.add_argument("--label-lr", type=float, default=1e-3)
    parser.add_argument("--measured", type=int, default=0, help="measure on the first n tasks of a split; 0 for all")
    parser.add_argument("--start", type=Path, help="a model after the first stage, which is then skipped")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    tasks = {split: MiniSql(MiniSqlConfig()).load(split) for split in MiniSql.splits}
    tokenizer = save(arguments.out)
    options: Mapping[str, Any] = {"seed": arguments.seed, "device": arguments.device, "log": print}
    if arguments.start:
        model = checkpoint.load_model(arguments.start, device=arguments.device)
    else:
        model = new_model(model_config(len(tokenizer)), tokenizer, seed=arguments.seed)
        share = Share(frames=arguments.share, conditions=arguments.share)
        examples = read_and_copy(tokenizer, tasks["train"], arguments.questions, share, arguments.seed)
        print(fine_tune(model, examples, epochs=arguments.epochs, **options))
        checkpoint.save(model, tokenizer, arguments.out / "stage-1")
    chosen = random.Random(f"mini {arguments.seed} labelled").sample(tasks["train"], arguments.labelled)
    if chosen:
        shown = labelled(tokenizer, chosen)
        rate = {"lr": arguments.label_lr, "tokens_per_batch": 4096}
        print(fine_tune(model, shown, epochs=arguments.passes / 2, **rate, **options))
        work = own_work(model, tokenizer, chosen, arguments.seed)
        print(fine_tune(model, shown + work, epochs=max(1.0, arguments.passes / 2), **rate, **options))
    figures = {
        split: measure(model, tokenizer, tasks[split][: arguments.measured or None])
        for split in ("dev", "test", "unseen")
    }
    print(json.dumps(figures, indent=1))
    checkpoint.save(model, tokenizer, arguments.out, dtype=torch.bfloat16)  # half the size; runs compute in float32


if __name__ == "__main__":
    main()
