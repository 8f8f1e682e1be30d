"""Pages, docstrings, comments, messages and tests use plain, modern English: some phrases must not occur in them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

PHRASES = {
    r"see to it that": "make sure that, or say what to do",
    r"by whomever|whomever|whoever|whosoever": "the person, the caller, you",
    r"would take them for|take them for what": "say what would be wrong",
    r"in (?:its|their) stead": "instead",
    r"weights (?:stood|stand) still|stood still": "did not change",
    r"drawn with": "sampled with",
    r"where the two part\b|the two part\b": "where the two disagree",
    r"in the place of": "instead of",
    r"takes? the place of": "replaces",
    r"what weighs the same": "name the aggregation",
    r"\bshall\b|\bshalt\b": "will, must, or the simple present",
    r"\blest\b": "so that … not",
    r"\b(?:thereof|therein|thereby|thereupon|wherein|whereby|whereof|whereupon|hereby|herein)\b": "of it, in it",
    r"\b(?:hence|whence|thence|hitherto|heretofore)\b": "so, from there",
    r"\b(?:albeit|amid|amidst|unto|betwixt|whilst|anew|aught|naught|nought)\b": "a word of today",
    r"\bto be had\b|\bfor want of\b": "available, because there is none",
    r"\bin words(?=\.(?!\w)|[;,'\"]| \(| and| for the)": "as text, with a message",
    r"\bbrings? word\b|\bgives? word\b": "report",
    r"\bbegotten|befall|befell|bethink|forthwith\b": "a word of today",
    r"\bmust needs\b|\bwould fain\b|\bas soon as ever\b": "must, would like to, as soon as",
    r"takes? (?:\w+'s|its|their) place|place is taken by": "replaces",
    r"\bunbroken\b": "uninterrupted",
    r"\bown making\b": "name where it comes from",
    r"\b(?:last|own) words\b": "the end of its output, its own message",
    r"\bhears? of\b": "is called, is notified",
    r"\b(?:tells?|told|says?|said) of\b": "reports about",
    r"\bbut the (?:first|last)\b": "except the first, after the first",
    r"\bsome (?:\d[\d,]*|two|three|four|five|six|seven|eight|nine|ten|dozen|hundred|thousand)\b": "about",
    r"\bfor (?:it|they|these|there) (?:is|are|needs?|has|have)\b": "because it is",
    r"\bnats in the mean\b|\bgoes? to such lengths\b|\bof one mind\b": "on average, plain words",
    r"\b(?:_Courier|_bury|partings|stories)\b": "a name that says what the thing does",
}
"""Regular expression to what to write instead. Keep the list short: the worst phrases, not a dictionary."""

PATTERNS = """
    *.md Makefile mkdocs.yml pyproject.toml conftest.py changes/*.md docs/**/*.md src/**/*.py src/**/*.j2
    plugins/**/*.py plugins/*/README.md examples/**/*.py examples/**/*.md tests/**/*.py tests/**/*.md
"""
FILES = sorted({path for pattern in PATTERNS.split() for path in ROOT.glob(pattern)} - {Path(__file__).resolve()})


def found(text: str) -> list[str]:
    """Return the phrases of a text that must not occur, also where a line break divides them."""
    return [
        f"line {text.count(chr(10), 0, match.start()) + 1}: {' '.join(match.group().split())!r}; instead: {instead}"
        for phrase, instead in PHRASES.items()
        for match in re.finditer(phrase.replace(" ", r"[\s#]+"), text, re.IGNORECASE)
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_archaic_phrase(path: Path) -> None:
    assert found(path.read_text("utf-8")) == []


def test_a_phrase_over_two_lines_is_found() -> None:
    text = "Never take the CPU in the\n    # place of a GPU. Let errors\nthrough, and do not answer in its stead."
    assert [line.partition(":")[0] for line in found(text)] == ["line 3", "line 1"]


def test_the_files_are_those_that_users_read() -> None:
    names = {str(path.relative_to(ROOT)) for path in FILES}
    assert {"README.md", "docs/gpu.md", "src/agentrig/plan.py", "src/agentrig/report/templates/page.html.j2"} <= names
    assert {"plugins/agentrig-verl/src/agentrig_verl/manager.py", "plugins/agentrig-verl/README.md"} <= names
