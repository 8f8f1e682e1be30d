"""Makes the table of docs/how-to/which-model-fits.md: `python tests/support/model_table.py` writes it.

The memory plan of `agentrig doctor` computes it; a test compares them.
"""

from __future__ import annotations

from pathlib import Path

from agentrig_grpo.checks import fitting_about
from agentrig_grpo.config import GrpoConfig
from agentrig_grpo.fitting import Choice, Fitting
from agentrig_vllm import memory
from agentrig_vllm.config import VllmConfig

from agentrig.hardware.memory import GIB, KNOWN, DeviceMemory

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "which-model-fits.md"
BEGIN, END = "<!-- made by tests/support/model_table.py -->\n\n", "\n<!-- end -->\n"

CARDS = {"24 GB": 23.5, "40 GB": 39.4, "48 GB": 47.4, "80 GB": 79.2}
"""Cards as they are sold, and the GiB that they report."""

SIZES = ("0.5", "1.5", "3", "7")
RANK = 16
RANKS = {"0.5": (0,), "7": (RANK,)}
"""Shown for these sizes only; the page says why all weights of 7B fit no card."""

ROWS = {"815+128": (32, 4, 815, 128), "4000+200": (16, 8, 4000, 200), "8000+512": (4, 16, 8000, 512)}
"""Tasks, rollouts of each, tokens of prompt and answer."""

MEASURED = {("0.5", 0, "815+128", "24 GB"): "2.81 s", ("1.5", 0, "815+128", "24 GB"): "4.56 s",
            ("1.5", 0, "815+128", "80 GB"): "2.48 s", ("1.5", 0, "8000+512", "80 GB"): "5.61 s",
            ("1.5", 0, "4000+200", "40 GB"): "6.34 s", ("1.5", 0, "4000+200", "80 GB"): "5.17 s",
            ("1.5", RANK, "815+128", "80 GB"): "2.19 s", ("3", 0, "815+128", "80 GB"): "4.8 s",
            ("3", RANK, "815+128", "24 GB"): "5.53 s", ("7", RANK, "815+128", "24 GB"): "10.9 s",
            ("7", RANK, "815+128", "40 GB"): "8.0 s", ("7", RANK, "8000+512", "80 GB"): "15.5 s"}  # fmt: skip
"""Seconds of a step, from tests/benchmarks/one_gpu.md."""


def table() -> str:
    lines = ["| model | tokens | " + " | ".join(CARDS) + " |", "| --- " * (2 + len(CARDS)) + "|"]
    for size in SIZES:
        for rank in RANKS.get(size, (0, RANK)):
            for rows in ROWS:
                cells = (cell(size, rank, rows, card) for card in CARDS)
                lines.append(f"| {size}B{' adapters' if rank else ''} | {rows} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def cell(size: str, rank: int, rows: str, card: str) -> str:
    """Return whether a run fits a card, what it does to fit, and the seconds of a step where they were measured."""
    fitting = fitting_of(size, rank, rows, card)
    choice = fitting.first()
    if choice is None:
        return "no"
    seconds = MEASURED.get((size, rank, rows, card))
    return (marks(choice, fitting) or "yes") + (f" **{seconds}**" if seconds else "")


def marks(choice: Choice, fitting: Fitting) -> str:
    """Return the letters of what a choice does to fit."""
    ways = {
        "b": choice.lent,
        "c": choice.tokens < fitting.group,
        "h": choice.on_host,
        "k": choice.cache < 1,
        "s": choice.sleeps,
        "t": choice.recomputed > 0,
    }
    return "".join(letter for letter, does in ways.items() if does)


def fitting_of(size: str, rank: int, rows: str, card: str) -> Fitting:
    """Return what server and learner of a run with the default settings need."""
    tasks, n, prompt, answer = ROWS[rows]
    context = prompt + answer + 64
    return fitting_about(
        KNOWN[f"qwen/qwen2.5-coder-{size}b-instruct"],
        GrpoConfig(lora_rank=rank, tasks_per_step=tasks, group_size=n, max_tokens=answer, max_length=context),
        DeviceMemory(name="cuda", total=int(CARDS[card] * GIB)),
        memory(VllmConfig()),
        context=context,
        runners=128,
    )


def page() -> str:
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
