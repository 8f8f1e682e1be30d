"""Plugin file for runs with random weights: the reward `letters`, the tasks `paragraphs` and the agent `reader`.

A random model never answers right, so every answer would be worth the same and the run would stop, as it should. The
reward `letters` is the share of small letters in an answer: it differs from one random text to the next.
"""

from __future__ import annotations

import random

import attrs

from agentrig import AgentSpec, RewardSpec, Score, Task, TasksSpec, hookimpl, setting, span

WORDS = (
    *("table", "column", "index", "query", "row", "value", "answer", "question", "number", "name", "date", "order"),
    *("total", "count", "city", "year", "river", "engine", "student", "teacher", "price", "weight", "length", "volume"),
    *("signal", "sensor", "market", "garden", "winter", "summer", "bridge", "station", "village"),
)


@attrs.frozen(kw_only=True)
class ParagraphsConfig:
    """Settings of `paragraphs`."""

    words: int = setting(800, help="words of a paragraph", ge=1)
    tasks: int = setting(32, help="rows of each split", ge=1)


class Paragraphs:
    """Rows with one long paragraph each, made from a seed."""

    splits = ("train", "dev", "test")
    roles = {"train": "train", "validation": "dev", "report": "test"}  # noqa: RUF012
    held_out = ("test",)

    def __init__(self, config):
        self.config = config

    def load(self, split):
        """Return the split's rows."""
        return [
            Task(id=f"{split}-{i}", input={"text": paragraph(f"{split} {i}", self.config.words)}, private={"gold": ""})
            for i in range(self.config.tasks)
        ]


def paragraph(seed, words):
    """Return so many words."""
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def read(task_input, endpoint):
    """Let the model say something about a paragraph, in one call."""
    from openai import OpenAI

    with OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client, span("reader"):
        reply = client.chat.completions.create(
            model=endpoint.model,
            messages=[{"role": "user", "content": task_input["text"]}],
            extra_body=dict(endpoint.sampling),
            extra_headers=dict(endpoint.headers),
        )
    return reply.choices[0].message.content or ""


def letters(task, outcome, budget_s):
    """Return the share of small letters a to z in the answer."""
    text = str(outcome.answer)
    return Score.ok(sum("a" <= c <= "z" for c in text) / max(len(text), 1))


@hookimpl
def register_tasks():
    """Register `paragraphs`."""
    yield TasksSpec(name="paragraphs", summary="Long random paragraphs.", config=ParagraphsConfig, build=Paragraphs)


@hookimpl
def register_agents():
    """Register `reader`."""
    yield AgentSpec(name="reader", summary="One call about a long paragraph.", build=lambda config: read)


@hookimpl
def register_rewards():
    """Register `letters`."""
    yield RewardSpec(name="letters", summary="The share of small letters in an answer.", build=lambda config: letters)
