"""The keys of the named credits: their own tests show what they change."""

from __future__ import annotations

from typing import Any

from agentrig_grpo.config import GrpoConfig
from rollouts import rollout

from agentrig import Task
from agentrig.credit import differ
from agentrig.run.drawing import Drawing
from agentrig.run.gate import Gate
from effects import Elsewhere, Settings, config_of, exact

CREDITS = "tests/test_named_credits.py::"
TEACHER = "tests/test_teacher.py::"


def shown(test: str) -> Elsewhere:
    """Return the entry of a key that a test of credits shows."""
    return Elsewhere(test, "it has a test")


def batches(settings: Settings) -> int:
    """Return how many batches a step has if no group is admitted."""
    tasks = [Task(id=str(i), input={}) for i in range(6)]
    gate, found = Gate(differ, config_of("credit.dapo", settings).max_num_gen_batches), list[int]()

    def sample(drawn: Any) -> list[Any]:
        found.append(len(drawn))
        return [rollout(1.0, group=f"{len(found)}-{i}") for i in range(len(drawn))]

    gate.sample(1, Drawing(tasks, GrpoConfig(tasks_per_step=2), seed=1), sample)
    return len(found)


NEGATIVE = shown(f"{CREDITS}test_negative_worths_are_scaled")
WEIGHTING = shown(f"{CREDITS}test_a_baseline_can_count_calls")
TURNS = shown(f"{CREDITS}test_the_return_to_go_is_discounted")
ASKED = shown(f"{TEACHER}test_it_scores_what_was_sampled_after_its_prompt")

TABLES = {
    "credit.dapo": {
        "negative_scale": NEGATIVE,
        "overlong_buffer_len": shown(f"{CREDITS}test_overlong_replies_are_punished_as_the_paper_says"),
        "max_num_gen_batches": exact(1, 3, batches),
    },
    "credit.opd": {
        **dict.fromkeys(("base_url", "model", "api_key"), ASKED),
        "concurrency": shown(f"{TEACHER}test_as_many_calls_are_scored_at_once_as_concurrency_says"),
    },
    **{f"credit.{name}": {"negative_scale": NEGATIVE, "weighting": WEIGHTING} for name in ("dr-grpo", "grpo")},
    **{f"credit.{name}": {"negative_scale": NEGATIVE} for name in ("rloo", "reinforce++")},
    "credit.turn": {"negative_scale": TURNS, "discount": TURNS},
}
