"""The dataset that verl reads: its rows are the tasks' indices, never their private parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch  # noqa: TID253  (verl imports this module, by the path in data.custom_cls)
from torch.utils.data import Dataset  # noqa: TID253

from agentrig import Task

MODULE = f"pkg://{__name__}"
CLASS = "TaskDataset"


def write_index(path: Path, tasks: list[Task]) -> None:
    """Write the file that `TaskDataset` reads: the tasks' ids, in order."""
    path.write_text(json.dumps([task.id for task in tasks]), "utf-8")


class TaskDataset(Dataset[dict[str, Any]]):
    """The tasks of a split, by index and id.

    Args:
        data_files: The file that `write_index` wrote.
        tokenizer: Not used: prompts are made by the agent, and tokenized by vLLM alone.
        processor: Not used.
        config: verl's `data` section; not used.
        max_samples: Use only the first ones; -1 for all.
    """

    def __init__(
        self, data_files: str, tokenizer: Any = None, processor: Any = None, config: Any = None, max_samples: int = -1
    ) -> None:
        ids: list[str] = json.loads(Path(data_files).read_text("utf-8"))
        self.ids = ids if max_samples < 0 else ids[:max_samples]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "index": index,
            "task_id": self.ids[index],
            "raw_prompt": [],  # verl determines the batch size from it
            "dummy_tensor": torch.zeros(1, dtype=torch.uint8),  # and requires at least one tensor
        }
