"""The tasks `mini-sql`: generated on first use, into a cache; the same seed gives the same bytes."""

from __future__ import annotations

import json
import os
import random
import shutil
import sqlite3
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs

from agentrig import Task
from agentrig.errors import AgentrigError, ConfigError, nearest
from agentrig.settings import setting
from agentrig_spider.difficulty import difficulty
from agentrig_spider.tasks.databases import rows_of, write_database
from agentrig_spider.tasks.domains import SEEN, UNSEEN, Domain
from agentrig_spider.tasks.questions import Question, Wording, questions_of

FORMAT = 3
"""Increased when the generator changes, so that an older cache is not used."""

SPLITS = ("train", "dev", "test", "unseen")
_DEV, _TEST = 0.13, 0.17  # shares of a seen database's questions
_SCALE = {"seen": 2, "unseen": 1}
_WORDINGS = 4  # of each training question; the other splits ask each question once


@attrs.frozen(kw_only=True)
class MiniSqlConfig:
    """Keys of `mini-sql`."""

    seed: int = setting(0, help="another seed makes other rows and questions", ge=0)
    cache: str = setting("", help="folder to generate into; empty for $AGENTRIG_CACHE, else ~/.cache/agentrig")


class MiniSql:
    """Small databases with templated questions.

    Splits: `train`, `dev` and `test` ask about the same 14 databases, but no gold query is in two of
    them; `unseen` asks about 5 other databases. Settings are chosen on `dev`; `test` is reported.
    """

    splits: Sequence[str] = SPLITS
    roles: Mapping[str, str] = MappingProxyType({"train": "train", "validation": "dev", "report": "test"})
    held_out: Sequence[str] = ("test", "unseen")

    def __init__(self, config: MiniSqlConfig) -> None:
        self._seed = config.seed
        self._cache = Path(config.cache).expanduser() if config.cache else cache_folder()

    @property
    def folder(self) -> Path:
        """The folder of the generated files; they are generated on first access."""
        folder = self._cache / "mini-sql" / f"v{FORMAT}-seed{self._seed}"
        if not folder.is_dir():
            generate(folder, seed=self._seed)
        keep_apart(folder)  # an older version may have made it
        return folder

    def load(self, split: str) -> Sequence[Task]:
        """Return a split's tasks; private parts have the gold query and how the question was generated."""
        if split not in SPLITS:
            raise ConfigError(f"mini-sql has no split {split!r}.{nearest(split, SPLITS)} It has {', '.join(SPLITS)}")
        folder = self.folder
        try:
            with (folder / f"{split}.jsonl").open(encoding="utf-8") as lines:
                return [_task(json.loads(line), folder) for line in lines]
        except PermissionError as error:
            raise AgentrigError(
                f"{error.filename} can't be read: it has gold answers, and only its owner may read it. Use a folder of "
                "your own: tasks.cache=FOLDER, or AGENTRIG_CACHE"
            ) from error


def _task(row: Mapping[str, Any], folder: Path) -> Task:
    database = folder / "database" / row["db_id"] / f"{row['db_id']}.sqlite"
    return Task(
        id=row["id"],
        input={"question": row["question"], "db_id": row["db_id"], "database": str(database.absolute())},
        private={name: row[name] for name in ("gold", "intent", "frame", "conditions")},
        slices={"difficulty": difficulty(row["gold"]), "database": row["db_id"]},
        root=str(folder.absolute()),
    )


def cache_folder() -> Path:
    """Return `$AGENTRIG_CACHE`, else `$XDG_CACHE_HOME/agentrig`, else `~/.cache/agentrig`."""
    if own := os.environ.get("AGENTRIG_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentrig"


def generate(target: Path, *, seed: int) -> None:
    """Generate all files of one seed in `target`; safe with several processes, and after a crash."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise AgentrigError(
            f"the databases of mini-sql cannot be generated in the cache folder {target.parent}: {error.strerror}. "
            "Name a folder that you can write to: tasks.cache=FOLDER, or AGENTRIG_CACHE"
        ) from error
    try:
        _generate(made, seed)
        keep_apart(made)
        made.chmod(0o755)
        try:
            made.rename(target)
        except OSError:
            if not target.is_dir():  # else another process has written the same bytes
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _generate(folder: Path, seed: int) -> None:
    rows: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}
    for kind, domains in (("seen", SEEN), ("unseen", UNSEEN)):
        for domain in domains:
            path = folder / "database" / domain.name / f"{domain.name}.sqlite"
            path.parent.mkdir(parents=True)
            write_database(path, domain, rows_of(domain, random.Random(f"mini-sql {seed} rows {domain.name}")))
            rng = random.Random(f"mini-sql {seed} questions {domain.name}")
            connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
            try:
                questions = questions_of(domain, connection, _SCALE[kind], rng)
            finally:
                connection.close()
            for index, question in enumerate(questions):
                split = _split(rng) if kind == "seen" else "unseen"
                rows[split] += _rows(domain, index, question, _WORDINGS if split == "train" else 1, rng)
    for split, content in rows.items():
        # A run with fewer tasks uses the first ones, so the databases are mixed.
        random.Random(f"mini-sql {seed} order {split}").shuffle(content)
        text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in content)
        (folder / f"{split}.jsonl").write_text(text, encoding="utf-8")


def keep_apart(folder: Path) -> None:
    """Make the files with gold answers readable for this user only, and the databases read-only.

    Files of another user, or on a read-only disk, are left unchanged: this user's programs can't change them either.
    """
    kept = [(path, 0o600) for path in folder.glob("*.jsonl")]
    kept += [(path, 0o444) for path in folder.glob("database/*/*.sqlite")]
    for path, mode in kept:
        status = path.stat()
        if status.st_mode & 0o777 != mode and status.st_uid == os.geteuid() and os.access(folder, os.W_OK):
            path.chmod(mode)


def _split(rng: random.Random) -> str:
    place = rng.random()
    return "dev" if place < _DEV else "test" if place < _DEV + _TEST else "train"


def _rows(domain: Domain, index: int, question: Question, n: int, rng: random.Random) -> list[dict[str, Any]]:
    """Return a question's rows: `n` wordings with frames that differ as much as possible."""
    chosen: list[Wording] = []
    wordings = question.wordings()
    frames = list({wording.frame: None for wording in wordings})
    rng.shuffle(frames)
    for place in range(min(n, len(wordings))):
        frame = frames[place % len(frames)]
        left = [w for w in wordings if w.frame == frame and w not in chosen]
        if left:
            chosen.append(rng.choice(left))
    return [
        {
            "id": f"{domain.name}-{index:03d}-{place}",
            "db_id": domain.name,
            "question": wording.text,
            "gold": question.sql,
            "intent": question.intent.name,
            "frame": wording.frame,
            "conditions": list(wording.conditions),
        }
        for place, wording in enumerate(chosen)
    ]
