"""Every file of `changes/` has a known kind, and goes into the changelog."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def settings() -> dict[str, object]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        found: dict[str, object] = tomllib.load(file)["tool"]["towncrier"]
    return found


KINDS = [kind["directory"] for kind in settings()["type"]]  # type: ignore[index,attr-defined]


def faults(folder: Path) -> Iterator[str]:
    """Yield what is wrong with the files of a folder of changes."""
    for file in sorted(folder.iterdir()):
        if file.name == "template.jinja":
            continue
        name = re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*\.([a-z]+)\.md", file.name)
        if name is None or name[2] not in KINDS:
            yield f"changes/{file.name}: name it TOPIC.KIND.md, with KIND one of {', '.join(KINDS)}"
        elif not file.read_text("utf-8").strip():
            yield f"changes/{file.name}: it is empty; say in one sentence what a user sees"


def test_the_files_have_a_known_kind() -> None:
    assert list(faults(ROOT / "changes")) == []


def test_a_wrong_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a-thing.fixed.md").write_text("It works.\n")
    assert list(faults(tmp_path)) == []
    for name in ("b.bugfix.md", "Thing.fixed.md", "c.fixed.txt", "d.fixed.md"):
        (tmp_path / name).touch()
    said = list(faults(tmp_path))
    assert [line.partition(":")[0] for line in said] == [
        "changes/Thing.fixed.md",
        "changes/b.bugfix.md",
        "changes/c.fixed.txt",
        "changes/d.fixed.md",
    ]


def test_the_contributors_page_lists_the_kinds() -> None:
    page = " ".join((ROOT / "CONTRIBUTING.md").read_text("utf-8").split())
    assert f"KIND one of {', '.join(f'`{kind}`' for kind in KINDS)}" in page


def test_a_release_writes_them_above_the_last_one(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "changes").mkdir()
    shutil.copy(ROOT / "changes" / "template.jinja", tmp_path / "changes")
    (tmp_path / "changes" / "a-thing.fixed.md").write_text("A thing works\nagain.\n")
    (tmp_path / "changes" / "b-thing.added.md").write_text("Another thing.\n")
    subprocess.run(
        [sys.executable, "-m", "towncrier", "build", "--version", "9.8", "--date", "2030-01-02", "--keep"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    new = "## 9.8 (2030-01-02)\n\n### Added\n\n- Another thing.\n\n### Fixed\n\n- A thing works\n  again.\n\n"
    before = (ROOT / "CHANGELOG.md").read_text("utf-8")
    head, mark, rest = before.partition(str(settings()["start_string"]))
    assert (tmp_path / "CHANGELOG.md").read_text("utf-8") == f"{head}{mark}\n{new}{rest.lstrip()}"
