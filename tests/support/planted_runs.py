"""Real trainings that were made to fail or stall, and healthy ones: what each is told, and how it is recorded.

    python tests/support/planted_runs.py [NAME …]        records them in tests/data/planted_runs.tar.xz

A recorded run directory has everything that the run wrote but its checkpoints, logs, pages, the spans and ids of its
rollouts, and parts of a second. All of them together take about fifteen minutes on two cores; a slow test makes each
of them again.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

ROOT = Path(__file__).resolve().parents[2]
ARCHIVE = ROOT / "tests" / "data" / "planted_runs.tar.xz"
ROUNDED = {"start": 0, "duration_s": 2, "reward_s": 3}
"""Columns of seconds, and their digits: exact ones are half of the archive, and no rule reads them."""

LEFT_OUT = ("checkpoints", "calls", "log.jsonl", "plots", "report.html", "server.log", "run.lock", "probe.json")


@attrs.frozen
class Planned:
    """The overrides of a training, and the cause that must be named first: none for a healthy run.

    `resumed` has the overrides of a second start, which resumes the run.
    """

    cause: str
    words: Sequence[str] = ()
    recipe: str = "letters"
    resumed: Sequence[str] = ()


SMALL_MINI = (
    "algorithm.tasks_per_step=32",
    "algorithm.validate_every=0",
    "run.report_tasks=120",
    'run.block=["report"]',
)

RUNS: Mapping[str, Planned] = {
    # --- made to fail or stall
    "learning rate too small": Planned("learning-rate-too-small", ["algorithm.lr=1e-6", "algorithm.steps=8"]),
    "a warm-up without end": Planned("warmup-too-long", ["algorithm.warmup_steps=20000", "algorithm.steps=8"]),
    "learning rate too large": Planned(
        "learning-rate-too-large", [*SMALL_MINI, "algorithm.lr=0.03", "algorithm.warmup_steps=0", "algorithm.steps=6"],
        "mini",
    ),
    "entropy collapse": Planned("entropy-collapse", ["reward.use=halves", "algorithm.lr=0.03", "algorithm.steps=16"]),
    "answers cut": Planned("truncated-answers", ["reward.use=ends", "algorithm.max_tokens=8", "algorithm.steps=8"]),
    "queries cut": Planned(
        "truncated-answers", [*SMALL_MINI, "agent.max_tokens=10", "algorithm.steps=4"], "mini"
    ),
    "prompts too long": Planned(
        "overlong-prompts", ["tasks.words=300", "run.failure_limit=0.6", "algorithm.steps=5"]
    ),
    "KL loss too strong": Planned("kl-too-strong", ["algorithm.kl_loss_coef=100", "algorithm.steps=10"]),
    "clip too narrow": Planned(
        "clip-fraction",
        ["algorithm.clip_low=1e-4", "algorithm.clip_high=1e-4", "algorithm.ppo_epochs=4", "algorithm.lr=1e-4",
         "algorithm.steps=4"],
    ),
    "temperature too low": Planned(
        "no-exploration", ["algorithm.temperature=1e-4", "algorithm.tasks_per_step=24", "algorithm.steps=6"]
    ),
    "the reward is hacked": Planned(
        "second-reward-behind",
        ["reward.use=short", "run.second_reward=letters", "algorithm.lr=0.01", "algorithm.steps=16"],
    ),
    # --- healthy
    "healthy: it learns": Planned(""),
    "healthy: LoRA": Planned("", ["algorithm.lora_rank=8", "algorithm.lr=0.01"]),
    "healthy: second rewards": Planned("", ['run.second_reward=["halves","few-letters"]']),
    "healthy: two rewards": Planned(
        "", ["reward.use=weighted", "reward.parts.letters=1", "reward.parts.short.weight=0.2"]
    ),
    "healthy: resumed": Planned("", ["algorithm.steps=6"], resumed=["algorithm.steps=12"]),
    "healthy: rollouts during updates": Planned("", ["algorithm.max_staleness=1"]),
    "healthy: high accuracy at the start": Planned("", ["reward.use=no-letter", "algorithm.steps=10"]),
    "healthy: several epochs, KL loss, validation": Planned(
        "",
        ["algorithm.ppo_epochs=2", "algorithm.mini_batches=2", "algorithm.kl_loss_coef=0.01",
         "algorithm.validate_every=5"],
    ),
    "healthy: few steps": Planned("", ["algorithm.steps=3"]),
    "healthy: solved": Planned("", ["algorithm.lr=0.02"]),
    "healthy: mini, after supervised training": Planned("", [*SMALL_MINI, "algorithm.steps=6"], "mini"),
    "healthy: gains within noise": Planned(
        "", [*SMALL_MINI, "algorithm.steps=6", "algorithm.lr=3e-5", "algorithm.warmup_steps=0"], "mini"
    ),
}  # fmt: skip


def make(name: str, folder: Path) -> Path:
    """Train a run in a folder; return its directory, which keeps the error if one ended it."""
    from agentrig.errors import RunStopped
    from agentrig.plan import resolve
    from agentrig.run.resume import resume_plan
    from agentrig.run.training import train
    from agentrig.testing.tiny_model import make_tiny_model

    planned, run = RUNS[name], folder / name.replace(":", "").replace(",", "").replace(" ", "-")
    words = [f"run.directory={json.dumps(str(folder))}", f"run.name={run.name}", *planned.words]
    files = []
    if planned.recipe == "letters":
        if not (folder / "model").is_dir():
            make_tiny_model(folder / "model")
        words.append(f"algorithm.model={json.dumps(str(folder / 'model'))}")
        files.append(str(ROOT / "tests" / "support" / "letters_plugin.py"))
    try:
        train(resolve(planned.recipe, overrides=words, files=files))
        if planned.resumed:
            train(resume_plan(run, overrides=planned.resumed), resume=run)
    except RunStopped:
        if not planned.cause:
            raise
    return run


def strip(run: Path, folder: Path) -> None:
    """Remove what is not recorded, and the places on this machine."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    for name in LEFT_OUT:
        path = run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    for file in run.glob("*.*"):
        if file.is_file():
            text, times = file.read_text("utf-8"), file.stat()  # whether an error is of the last start is told by times
            file.write_text(text.replace(f"{ROOT}{os.sep}", "").replace(str(folder), "runs"), "utf-8")
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    for file in sorted((run / "rollouts").glob("*.parquet")):
        table = pq.read_table(file)
        short = {
            "id": pa.array([f"{file.stem}-{i}" for i in range(table.num_rows)]),
            "spans": pa.array(["[]"] * table.num_rows, pa.string()),
            **{name: pc.round(table[name], digits) for name, digits in ROUNDED.items()},
        }
        for name, column in short.items():
            table = table.set_column(table.schema.get_field_index(name), name, column)
        pq.write_table(table, file, compression="none", use_dictionary=False, write_statistics=False)  # xz does better


def recorded(folder: Path) -> Mapping[str, Path]:
    """Unpack the recorded runs into a folder; return their directories by name."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    found = {name: folder / name.replace(":", "").replace(",", "").replace(" ", "-") for name in RUNS}
    assert all(path.is_dir() for path in found.values()), "record them again: python tests/support/planted_runs.py"
    return found


def main() -> None:
    """Record the runs that are named, or all; the others stay as they are."""
    names = sys.argv[1:] or list(RUNS)
    with tempfile.TemporaryDirectory() as kept, tempfile.TemporaryDirectory() as place:
        if ARCHIVE.exists() and sys.argv[1:]:
            with tarfile.open(ARCHIVE) as archive:
                archive.extractall(kept, filter="data")
        for name in names:
            run = make(name, Path(place))
            strip(run, Path(place))
            shutil.rmtree(Path(kept) / run.name, ignore_errors=True)
            shutil.copytree(run, Path(kept) / run.name)
        with tarfile.open(ARCHIVE, "w:xz") as archive:
            for path in sorted(Path(kept).iterdir()):
                archive.add(path, path.name, filter=_nobody)


def _nobody(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
