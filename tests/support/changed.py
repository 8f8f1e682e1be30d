"""Changes a value at a place in a file of a run directory: Parquet, JSON, JSON lines, or torch's."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

Place = tuple[Any, ...]
"""Keys and indices, from the outside to the inside; the first may be `calls`: of a file of rollouts."""


def put(held: Any, place: Place, value: Any) -> None:
    """Set what is at a place, or let `value` say what becomes of it; at no place, let it change what is held."""
    if not place:
        value(held)
        return
    for key in place[:-1]:
        held = held[key]
    held[place[-1]] = value(held[place[-1]]) if callable(value) else value


def change(run: Path, name: str, place: Place, value: Any, *, told: bool = True) -> None:
    """Change a file of a run.

    Args:
        run: The run directory.
        name: The file.
        place: Where in it.
        value: See `put`.
        told: Let the run state the digest of rollouts and calls, as if it had written them so.
    """
    file = run / name
    if file.suffix == ".parquet":
        table = pq.read_table(file)
        rows = table.to_pylist()
        if place[:1] == ("calls",):
            spans = [json.loads(row["spans"]) for row in rows]
            calls = [span["attributes"] for of in spans for span in of if "prompt_token_ids" in span["attributes"]]
            put(calls, place[1:], value)
            for row, of in zip(rows, spans, strict=True):
                row["spans"] = json.dumps(of)
        else:
            put(rows, place, value)
        pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), file)
        if told:
            state_digest(file)
    elif file.suffix == ".pt":
        state = torch.load(file, weights_only=True)
        put(state, place, value)
        torch.save(state, file)
    elif file.suffix == ".jsonl":
        lines = [json.loads(text) for text in file.read_text().splitlines()]
        put(lines, place, value)
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    else:
        held = json.loads(file.read_text())
        put(held, place, value)
        file.write_text(json.dumps(held))


def state_digest(file: Path) -> None:
    run, digest = file.parents[1], hashlib.sha256(file.read_bytes()).hexdigest()
    mode, _, step = file.stem.partition("-")
    if mode == "report":
        change(run, "progress.json", ("files", f"rollouts/{file.name}"), digest)
    else:
        kind = "calls" if file.parent.name == "calls" else mode
        change(run, "metrics.jsonl", (int(step) - 1, "files", kind), digest)
