"""The probe: up to 256 tokens that the run has recorded, kept in the run directory. The server must score them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import attrs

from agentrig.errors import RunFileError
from agentrig.rollouts import Rollout
from agentrig.traces import SERVER

FILE = "probe.json"
"""Its name in the run directory."""

LIMIT = 256
"""Most tokens of a probe."""

SAMPLED = 4
"""Tokens that the server samples after the probe: the first from the prompt's pass, the others from decode steps."""


@attrs.frozen(kw_only=True)
class Probe:
    """Tokens to score.

    Attributes:
        ids: At least two token ids.
        source: Where they come from, as text.
        recorded: Whether they are from a recorded call. The tokens of a task's prompt are used until there is one.
    """

    ids: Sequence[int]
    source: str
    recorded: bool

    def fitted(self, context: int) -> Probe:
        """Return the probe, cut off at the start so that it and the tokens sampled after it fit into the context."""
        room = min(LIMIT, context - SAMPLED - 1)  # the server may score these too, and samples at least one token
        if len(self.ids) <= room:
            return self
        return attrs.evolve(self, ids=self.ids[-room:], source=f"the last {room} tokens of {self.source}")


def recorded_probe(rollouts: Iterable[Rollout], *, limit: int = LIMIT) -> Probe | None:
    """Return the longest recorded call of at most `limit` tokens, else the shortest call; None without any."""
    found: list[tuple[int, str, Sequence[int], str]] = []
    for rollout in rollouts:
        for call in rollout.trace.llm_calls():
            prompt, response = (call.attributes.get(f"{part}_token_ids") for part in ("prompt", "response"))
            if prompt and response and SERVER not in call.attributes:
                source = f"a call of a {rollout.mode} rollout of step {rollout.step}"
                found.append((len(prompt) + len(response), call.id, [*prompt, *response], source))
    if not found:
        return None
    fitting = [each for each in found if each[0] <= limit]
    _, _, ids, source = max(fitting) if fitting else min(found)
    return Probe(ids=ids, source=source, recorded=True)


def save(probe: Probe, file: Path) -> None:
    """Write the file of a run's probe atomically."""
    part = file.with_name(f".{file.name}.part")
    part.write_text(json.dumps(attrs.asdict(probe)) + "\n", "utf-8")
    os.replace(part, file)


def load(file: Path) -> Probe | None:
    """Return the probe of a run directory, or None.

    Raises:
        RunFileError: The file is damaged.
    """
    try:
        found = json.loads(file.read_text("utf-8"))
        probe = Probe(ids=found["ids"], source=found["source"], recorded=found["recorded"])
        if len(probe.ids) < 2 or not all(isinstance(token, int) and token >= 0 for token in probe.ids):
            raise ValueError("ids must be two token ids or more")
        return probe
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunFileError(
            f"{file} cannot be read ({type(error).__name__}: {error}). Delete it: the run then chooses another probe"
        ) from None
