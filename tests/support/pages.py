"""The pages of the documentation: their fenced blocks, and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import attrs

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [
        *ROOT.glob("docs/**/*.md"),
        ROOT / "README.md",
        *ROOT.glob("plugins/*/README.md"),
        *ROOT.glob("examples/*/README.md"),
    ]
)

PROGRAMS = (
    "agentrig",
    "make",
    "python",
    "pip",
    "uv",
    "cd",
    "export",
    "source",
    "git",
    "curl",
    "docker",
    "ray",
    "vllm",
    "modelscope",
)
"""Programs: a block without a language whose first line begins with one of them is a block of commands."""


@attrs.frozen(kw_only=True)
class Block:
    """A fenced block: its page, its first line's number, its language (empty for none) and its text."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def id(self) -> str:
        """`docs/gpu.md:24`."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def is_shell(self) -> bool:
        """Whether it has commands: by its language, or without one by a first line that begins with a program."""
        if self.language in ("bash", "sh", "console"):
            return True
        first = next(iter(self.lines()), "").split(" ")[0]
        return not self.language and (first in PROGRAMS or first.endswith(".sh"))

    def lines(self) -> Iterator[str]:
        """Yield the lines, those that end in a backslash joined with the next, without a console's prompt."""
        for line in re.sub(r"\\\n\s*", "", self.text).splitlines():
            if line.strip() and not line.lstrip().startswith("#"):
                yield line.strip().removeprefix("$ ")


@attrs.frozen(kw_only=True)
class Command:
    """One command of a block.

    Attributes:
        block: Where it is.
        text: As it is written, without its comment.
        variables: What is set in front of it (`NAME=value command`).
        words: The program and its arguments; what is optional (`[--gpus 2]`) is given.
        folder: Where it runs, relative to the repository's root: where a `cd` before it went.
    """

    block: Block
    text: str
    variables: dict[str, str]
    words: tuple[str, ...]
    folder: str = "."

    @property
    def id(self) -> str:
        return f"{self.block.id} {self.text}"


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text("utf-8")
        for match in re.finditer(r"^```(\w*)[^\n]*\n(.*?)^```", text, re.S | re.M):
            line = text[: match.start()].count("\n") + 1
            found.append(Block(page=page, line=line, language=match[1], text=match[2]))
    return found


def commands(block: Block) -> list[Command]:
    """Return the commands of a block, in order; `cd` is one too."""
    found, folder = [], "."
    for line in block.lines():
        words = shlex.split(re.sub(r"\[(--[^\]]+)\]", r"\1", line), comments=True)
        variables = {}
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            name, _, value = words.pop(0).partition("=")
            variables[name] = value
        text = re.sub(r"\s+#.*$", "", line)
        found.append(Command(block=block, text=text, variables=variables, words=tuple(words), folder=folder))
        if words[:1] == ["cd"]:
            folder = words[1]
    return found
