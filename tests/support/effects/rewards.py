"""The effects of the keys of `weighted` and `judge`: their own tests show them with parts and with a real endpoint."""

from __future__ import annotations

from effects import Elsewhere, shown_by

SUM = "tests/grading/test_weighted.py::test_values_are_added_by_weight_and_the_primary_part_decides_what_is_correct"
JUDGE = "tests/grading/test_judge.py"
KEYS = {
    "test_each_key_changes_what_the_judge_is_asked_or_what_its_grade_is": (
        *("base_url", "model", "rubric", "rubric_file", "low", "high", "correct_at", "shows", "structured"),
    ),
    "test_a_grade_becomes_a_reward_with_its_reason_and_the_judge_sees_the_record_as_data": ("api_key",),
    "test_equal_answers_are_graded_once_also_by_later_runs": ("cache",),
    "test_a_budget_of_calls_and_a_limit_of_requests_at_once": ("max_calls", "concurrency"),
}

TABLES = {
    "reward.weighted": {key: Elsewhere(SUM, "it needs other rewards") for key in ("parts", "primary")},
    "reward.judge": shown_by(JUDGE, KEYS, "it needs an endpoint"),
}
