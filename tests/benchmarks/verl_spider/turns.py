"""Turns of the agent as training examples: the exact text that the model reads, and the reply to learn."""

from __future__ import annotations

import random
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from agentrig_langgraph_sql.prompts import SHORT, Template
from agentrig_langgraph_sql.schema import schema_text
from schemas import SCHEMA_LIMIT

RESULT_LIMIT = 64
"""`execution_truncate` of the run, in characters."""


@attrs.frozen
class Turn:
    """The text that the model reads, with the markers of the template, and the text to write."""

    prompt: str
    reply: str


def read_as(template: Template, **fields: str) -> str:
    """Return what the model reads of a call, as the chat template puts it."""
    messages = template.messages(**fields)
    return "".join(f"<|{m['role']}|>{m['content']}" for m in messages) + "<|assistant|>"


def write(schema: str, question: str, query: str) -> Turn:
    """Return a write turn."""
    return Turn(read_as(SHORT.write, schema=schema, question=question), f"{query}<|end|>")


def first_prompt(database: str | Path, question: str) -> str:
    """Return what the model reads when the agent first asks it about a database."""
    schema = schema_text(database, style=SHORT.schema_style, limit=SCHEMA_LIMIT)
    return read_as(SHORT.write, schema=schema, question=question)


def conversation(schema: str, asked: Sequence[tuple[str, str]]) -> Turn:
    """Return several questions on one schema, one after the other.

    The agent never asks so. But a schema that is read once serves several questions, and the model also learns to
    expect questions from schemas.
    """
    (question, query), *rest = asked
    first = write(schema, question, query)
    more = "".join(f"<|user|>\n{q}<|assistant|>{sql}<|end|>" for q, sql in rest)
    return Turn(first.prompt, first.reply + more)


def check(question: str, query: str, result: str, *, right: bool) -> Turn:
    """Return a check turn."""
    prompt = read_as(SHORT.check, question=question, query=query, result=result)
    return Turn(prompt, f"{SHORT.correct if right else SHORT.incorrect}<|end|>")


def rewrite(schema: str, question: str, query: str, result: str, gold: str) -> Turn:
    """Return a rewrite turn."""
    prompt = read_as(SHORT.rewrite, schema=schema, question=question, query=query, result=result)
    return Turn(prompt, f"{gold}<|end|>")


def mutant(tokens: Sequence[str], columns: Mapping[str, Sequence[str]], rng: random.Random) -> str:
    """Return a query that goes wrong the way models go wrong; now and then it is right all the same.

    Args:
        tokens: Of a query in the style of `canonical`.
        columns: To each column's name the names of its neighbours in its table.
        rng: The source of chance.
    """
    new = list(tokens)
    ways = [i for i, t in enumerate(new) if columns.get(t) or t in _SWAPS or t in ("WHERE", "DESC", "DISTINCT")]
    ways += [i for i, t in enumerate(new) if re.fullmatch(r"'.*'|\d+", t)]
    if not ways:
        return "SELECT " + " ".join(new[2:])
    at = rng.choice(ways)
    token = new[at]
    if columns.get(token):
        new[at] = rng.choice(columns[token]) if rng.random() < 0.85 else f"{token}s"
    elif token in _SWAPS:
        new[at] = rng.choice(_SWAPS[token])
    elif token == "WHERE":
        ends = [i for i in range(at, len(new)) if new[i] in ("GROUP", "ORDER", ")", "INTERSECT", "EXCEPT", "UNION")]
        del new[at : ends[0] if ends else len(new)]
    elif token.startswith("'"):
        new[at] = token.lower() if rng.random() < 0.5 else f"'{token[2:]}"
    elif token.isdigit():
        new[at] = str(int(token) + 1)
    else:
        del new[at]
    return " ".join(new)


_SWAPS: Mapping[str, Sequence[str]] = {
    **{f: [g for g in ("AVG", "MAX", "MIN", "SUM", "COUNT") if g != f] for f in ("AVG", "MAX", "MIN", "SUM")},
    ">": ("<", ">="),
    "<": (">", "<="),
    "=": ("<>",),
    ">=": (">", "="),
    "<=": ("<",),
    "INTERSECT": ("UNION", "EXCEPT"),
    "EXCEPT": ("UNION", "INTERSECT"),
    "AND": ("OR",),
}


def encoded(tokenizer: Any, turns: Iterable[Turn]) -> list[tuple[list[int], list[int]]]:
    """Return token ids of prompts and replies; of turns with the same prompt only the first.

    The warm-up lays replies to one prompt side by side, which takes a mask and with it the fast kernels of attention.
    """
    first: dict[str, Turn] = {}
    for turn in turns:
        first.setdefault(turn.prompt, turn)
    kept = list(first.values())
    backend = tokenizer.backend_tokenizer
    found = []
    for begin in range(0, len(kept), 4096):
        part = kept[begin : begin + 4096]
        prompts = backend.encode_batch([t.prompt for t in part], add_special_tokens=False)
        replies = backend.encode_batch([t.reply for t in part], add_special_tokens=False)
        found += [(p.ids, r.ids) for p, r in zip(prompts, replies, strict=True)]
    return found


def save(path: Path, stages: Mapping[str, Sequence[tuple[list[int], list[int]]]]) -> None:
    """Write token ids as arrays of 16 bits; LZMA, for schemas repeat."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as file:
        for name, pairs in stages.items():
            flat = np.fromiter((i for p, r in pairs for part in (p, r) for i in part), np.uint16)
            lengths = np.array([(len(p), len(r)) for p, r in pairs], np.uint16)
            for kind, array in (("ids", flat), ("lengths", lengths)):
                with file.open(f"{name}.{kind}.npy", "w") as member:
                    np.lib.format.write_array(member, array)


def load(path: Path) -> dict[str, list[tuple[list[int], list[int]]]]:
    """Return what `save` wrote."""
    stages = {}
    with np.load(path) as file:
        for name in sorted({key.split(".")[0] for key in file.files}):
            flat, lengths, pairs, at = file[f"{name}.ids"].tolist(), file[f"{name}.lengths"].tolist(), [], 0
            for prompt, reply in lengths:
                pairs.append((flat[at : at + prompt], flat[at + prompt : at + prompt + reply]))
                at += prompt + reply
            stages[name] = pairs
    return stages
