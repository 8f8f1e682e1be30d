"""Tags and a note that somebody gives to a run: `notes.json` in its directory, which the run itself never reads."""

from __future__ import annotations

import json
import os
from pathlib import Path

import attrs

from agentrig.errors import AgentrigError, RunFileError
from agentrig.run.damage import read_object, writing
from agentrig.run.files import write_whole
from agentrig.text import storable

FILE = "notes.json"

MOST_TAGS, LONGEST_TAG, LONGEST_NOTE = 20, 40, 4000
"""How many tags a run can have, and the characters of each and of the note."""


@attrs.frozen(kw_only=True)
class Notes:
    """What somebody wrote about a run.

    Attributes:
        damage: Why the file cannot be read; empty if it can, or if there is none.
    """

    tags: tuple[str, ...] = ()
    note: str = ""
    damage: str = ""


def read_notes(directory: Path) -> Notes:
    """Return a run's tags and note; those of a file that is missing or damaged are empty."""
    file = directory / FILE
    try:
        found = read_object(file) if os.path.lexists(file) else {}
    except (OSError, RunFileError) as error:
        return Notes(damage=f"{FILE} cannot be read: {error}")
    tags, note = found.get("tags"), found.get("note")
    some = [str(tag)[:LONGEST_TAG] for tag in tags[:MOST_TAGS]] if isinstance(tags, list) else []
    return Notes(tags=tuple(some), note=str(note or "")[:LONGEST_NOTE])


def write_notes(directory: Path, tags: str, note: str) -> None:
    """Write a run's tags, which are separated by commas, and its note.

    Raises:
        AgentrigError: They are too long, or the directory cannot be written to.
    """
    some = list(dict.fromkeys(filter(None, (" ".join(tag.split()) for tag in storable(tags).split(",")))))
    note = storable(note).strip()
    if len(some) > MOST_TAGS or any(len(tag) > LONGEST_TAG for tag in some) or len(note) > LONGEST_NOTE:
        raise AgentrigError(
            f"a run has at most {MOST_TAGS} tags of {LONGEST_TAG} characters, and a note of {LONGEST_NOTE}"
        )
    with writing(directory / FILE):
        write_whole(directory / FILE, json.dumps({"tags": some, "note": note}, ensure_ascii=False, indent=2) + "\n")


def can_write(directory: Path) -> bool:
    """Whether tags and notes can be kept in the directory."""
    return os.access(directory, os.W_OK)
