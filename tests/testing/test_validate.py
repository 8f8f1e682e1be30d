"""`agentrig validate`: a whole domain in one file, keys of its parts, and input that names nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from agentrig.cli.entry import main

FILE = str(Path(__file__).parent / "domain.py")


def validate(*words: str) -> Result:
    return CliRunner().invoke(main, ["validate", *words])


def test_a_domain_is_validated_and_its_costs_are_shown() -> None:
    result = validate(FILE, "--json", "--limit", "3")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [(r["kind"], r["ok"]) for r in found["reports"]] == [
        ("tasks", True),
        ("agent", True),
        ("play", True),
        ("reward", True),
    ]
    (trial,) = found["trials"]
    assert trial["rollouts"] == 6
    assert trial["reward_mean"] == {"gold": 1.0, "nonsense": 0.0}
    assert trial["trained_by_node"] == {"solve": 6}
    assert trial["calls_per_rollout"] == 1.0
    assert trial["step_of_128"]["calls"] == 128
    assert trial["prompt_tokens_per_rollout"] > trial["response_tokens_per_rollout"] > 0


@pytest.mark.parametrize(
    ("right", "wrong", "caught", "said"),
    [
        ("build=lambda config: equal", "build=lambda config: 1 / 0", "play.parts", "ZeroDivisionError"),
        (
            "return Score.ok(",
            "return Score.invalid('no number') or (",
            "play.scored",
            "the score is invalid (no number)",
        ),
    ],
)
def test_a_reward_that_breaks_a_trial_is_red(tmp_path: Path, right: str, wrong: str, caught: str, said: str) -> None:
    text = Path(FILE).read_text("utf-8")
    assert right in text
    file = tmp_path / "broken_domain.py"
    file.write_text(text.replace(right, wrong))
    result = validate(str(file), "--only", caught, "--limit", "2")
    assert result.exit_code == 1, result.output
    assert f"failed   {caught}" in result.stdout
    assert said in result.stdout
    assert "what to do: " in result.stdout


def test_a_key_of_a_part_is_used() -> None:
    result = validate(FILE, "adapter.match=sovle", "--only", "play.trains", "--limit", "2")
    assert result.exit_code == 1, result.output
    assert "failed   play.trains" in result.stdout
    assert "the calls are under: solve" in result.stdout


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("spider-exce", 'and no file of a plugin. Did you mean "spider-exec"?'),
        ("nowhere.py", "there is no file"),
    ],
)
def test_what_cannot_be_validated_is_named(word: str, said: str) -> None:
    result = validate(word)
    assert result.exit_code == 1
    assert said in result.stderr


def test_a_check_that_does_not_exist_is_named() -> None:
    result = validate(FILE, "--only", "agent.samplin")
    assert result.exit_code == 1
    assert 'there is no check "agent.samplin". Did you mean "agent.sampling"?' in result.stderr


def test_a_file_that_ends_its_process_is_named(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("import os\nos._exit(7)\n")
    result = validate(str(tmp_path / "ends.py"))
    assert result.exit_code == 1
    assert "its import calls os._exit(7)" in result.stderr
