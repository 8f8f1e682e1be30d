"""The figures of a report, compared with values computed by hand or by brute force."""

from __future__ import annotations

import json
import random
import re
from itertools import combinations, product
from pathlib import Path

import attrs
import pytest

from agentrig.figures import (
    EXACT,
    SIGNIFICANT,
    flip_interval,
    flip_test,
    least_gain,
    mean,
    mean_interval,
    no_room,
    paired_interval,
    percent,
    points,
    shuffle_test,
    sign_test,
    stratified_test,
    wilson,
)
from agentrig.testing.run_directory import write_run
from agentrig.view import figures
from agentrig.view.page import view
from agentrig.view.reading import read_run


def test_wilson_agrees_with_published_values():
    # Newcombe 1998 (Stat. Med. 17), table I, method 3: 81/263, 15/148, 0/20, 1/29
    for (right, n), expected in {
        (81, 263): (0.2553, 0.3662),
        (15, 148): (0.0624, 0.1605),
        (0, 20): (0.0000, 0.1611),
        (1, 29): (0.0061, 0.1718),
    }.items():
        assert wilson(right, n) == pytest.approx(expected, abs=5e-5)
    for n in range(1, 3000):  # it contains the share at both ends
        for right in (0, n):
            low, high = wilson(right, n)
            assert 0.0 <= low <= right / n <= high <= 1.0
    assert wilson(0, 0) == (0.0, 1.0)


def test_the_interval_of_a_paired_difference_agrees_with_a_published_one() -> None:
    """Agresti, Categorical Data Analysis (2002), table 10.1: of 1600, 86 and 150 changed; -0.059 to -0.021."""
    assert paired_interval(86, 150, 1600) == pytest.approx((-0.059, -0.021), abs=5e-4)
    assert paired_interval(150, 86, 1600) == pytest.approx((0.021, 0.059), abs=5e-4)
    low, high = paired_interval(4, 0, 4)
    assert 0 < low < high == 1.0, "no interval without a width"


@pytest.mark.parametrize(("better", "worse"), [(0, 0), (5, 0), (3, 3), (7, 2), (1, 9)])
def test_sign_test_counts_all_splits(better: int, worse: int):
    n, gap = better + worse, abs(better - worse)
    splits = [sum(s) for s in product((0, 1), repeat=n)]
    as_far = sum(abs(2 * k - n) >= gap for k in splits) / len(splits)
    assert sign_test(better, worse) == pytest.approx(as_far)


def test_the_interval_of_a_mean_has_the_quantile_of_t() -> None:
    for n, t in ((3, 4.3027), (5, 2.7764), (10, 2.2622), (100, 1.9842)):  # of a table
        low, high = mean_interval([1.0, -1.0, *[0.0] * (n - 2)])
        assert (high - low) / 2 == pytest.approx(t * (2 / (n - 1) / n) ** 0.5, rel=0.035 if n < 5 else 0.003)


def test_the_flips_of_differences_give_the_share_of_sums_as_far_from_0() -> None:
    differences = [0.5, 0.2, -0.1, 0.4, 0.3, 0.25, 0.0]
    sums = [abs(sum(s * d for s, d in zip(signs, differences, strict=True))) for signs in product((1, -1), repeat=7)]
    assert flip_test(differences) == pytest.approx(mean([s >= sum(differences) - 1e-9 for s in sums]), abs=0.01)
    assert flip_test([0.3] * 8 + [-0.3]) == pytest.approx(sign_test(8, 1), abs=0.01)
    assert flip_test([0.0, 0.0]) == flip_test([]) == 1.0
    for seed in range(40):  # the interval of the mean agrees with the test
        draw = random.Random(seed)
        some = [draw.choice((0.0, draw.gauss(0.05, 0.1))) for _ in range(draw.choice((5, 12, 60, EXACT + 1)))]
        p, middle = flip_test(some), mean(some)
        low, high = flip_interval(some, p)
        assert (low <= 0 <= high) == (p > SIGNIFICANT), seed
        assert low <= middle <= high
        if len(some) > 5:
            outside = [[d - end for d in some] for end in (low - 0.01, high + 0.01)]
            assert max(map(flip_test, outside)) < 0.06, "the ends are those of the test"
    many = [0.3] * (EXACT // 2 + 50) + [-0.3] * (EXACT // 2)
    assert flip_test(many) == pytest.approx(sign_test(EXACT // 2 + 50, EXACT // 2), abs=0.01)


def test_the_test_of_the_rewards_of_several_runs_counts_all_ways_to_choose_the_first_group() -> None:
    tasks = [([0.9, 0.4], [0.1, 0.3, 0.2]), ([0.5], [0.6, 0.2]), ([0.8, 0.7], [0.3]), ([0.5], [0.5]), ([1.0], [])]
    gaps = [
        [mean([v[i] for i in chosen]) - mean([x for i, x in enumerate(v) if i not in chosen])  # the first is as it was
         for chosen in combinations(range(len(v)), len(first))]
        for first, other in tasks if other and (v := [*first, *other])
    ]  # fmt: skip
    sums = [abs(sum(each)) for each in product(*gaps)]
    assert shuffle_test(tasks) == pytest.approx(mean([s >= sums[0] - 1e-9 for s in sums]), abs=0.01)
    differences = [0.5, 0.2, -0.1, 0.4, 0.3, 0.25, 0.0]
    assert shuffle_test([([d], [0.0]) for d in differences]) == pytest.approx(flip_test(differences), abs=0.01)
    many = [([0.3 + d, 0.2], [d, 0.2]) for d in [0.1] * 60 + [-0.1] * (EXACT - 59)]
    assert shuffle_test(many) == pytest.approx(shuffle_test(many[:EXACT]), abs=0.01)
    assert shuffle_test([]) == 1.0


def test_the_test_of_two_single_runs_is_the_sign_test() -> None:
    for n in range(40):
        for better in range(n + 1):
            changed = [((1, 1), (0, 1))] * better + [((0, 1), (1, 1))] * (n - better)
            assert stratified_test([*changed, ((1, 1), (1, 1)), ((0, 1), (0, 1))]) == sign_test(better, n - better)


@pytest.mark.parametrize(
    "tasks",
    [
        [],
        [((1, 1), (0, 3))] * 2 + [((0, 1), (2, 3))],
        [((2, 2), (1, 3)), ((1, 2), (0, 3)), ((2, 2), (2, 3)), ((0, 2), (0, 3))],
        [((3, 3), (1, 3)), ((2, 2), (0, 3)), ((1, 1), (1, 3)), ((1, 1), (0, 0))],  # not all measured each task
    ],
    ids=str,
)
def test_the_test_of_several_runs_counts_all_ways_to_choose_the_right_ones(
    tasks: list[tuple[tuple[int, int], tuple[int, int]]],
) -> None:
    measured = [task for task in tasks if task[0][1] and task[1][1]]
    ways = [list(combinations(range(n + m), a + b)) for (a, n), (b, m) in measured]
    sums = [
        sum(sum(run < n for run in chosen) for chosen, ((_, n), _) in zip(way, measured, strict=True))
        for way in product(*ways)
    ]
    observed = sum(a for (a, _), _ in measured)
    tails = sum(t <= observed for t in sums), sum(t >= observed for t in sums)
    assert stratified_test(tasks) == pytest.approx(min(1.0, 2 * min(tails) / len(sums)))


def test_a_test_of_many_tasks_is_near_the_exact_one(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = [((2, 2), (1, 3))] * 120 + [((1, 2), (3, 3))] * 100 + [((0, 2), (1, 3))] * 80
    for one_sided in (tasks, [(b, a) for a, b in tasks], tasks[:200], tasks[100:]):
        exact = stratified_test(one_sided)
        with monkeypatch.context() as patch:
            patch.setattr("agentrig.figures.EXACT", 100)
            assert stratified_test(one_sided) == pytest.approx(exact, rel=0.02, abs=1e-6)


def test_the_least_significant_gain():
    assert [least_gain(worse) for worse in range(4)] == [6, 8, 10, 12]
    for worse in (0, 1, 7, 30):
        assert sign_test(least_gain(worse), worse) <= SIGNIFICANT < sign_test(least_gain(worse) - 1, worse)
    few_tasks = no_room(0, 4, limited_by="run.report_tasks")
    assert few_tasks.endswith("Use more held-out tasks (run.report_tasks limits them)"), "none is too easy"
    assert no_room(0, 1).startswith("0 of 1 held-out task was right before training")
    assert no_room(3, 4).endswith("Use harder or more held-out tasks")


def test_a_curve_is_the_mean_of_a_quarter_of_the_steps_or_of_16_or_has_a_point_for_each_16(tmp_path: Path):
    run = read_run(write_run(tmp_path / "run", steps=4))
    steps, values = list(range(1, 81)), [float(v) for v in range(1, 81)]
    at, curve = figures.averaged(run, steps, values)
    assert (at, curve[0], curve[3], curve[39]) == (steps, 1.0, 2.5, 32.5)
    for n, last in ((1, 1.0), (6, 5.5), (15, 14.0)):  # of the latest 2 and 3
        assert figures.averaged(run, steps[:n], values[:n])[1][-1] == last
    steps, values = steps[:40], values[:40]
    binned = attrs.evolve(run, binned=True)
    assert figures.averaged(binned, steps, values) == ([16, 32, 40], [8.5, 24.5, 36.5])
    assert figures.averaged(binned, steps[2:17], values[2:17]) == ([16, 17], [9.5, 17.0])  # some steps have none


def test_the_best_validation_is_one_measurement(tmp_path: Path):
    """Its accuracy and its mean reward are those of the same step, also if that is the start."""
    made = write_run(tmp_path / "run", steps=4)

    def best() -> list[tuple[str, str, str]]:
        run = read_run(made)
        tiles = view(run, whole=False)["tiles"]
        return [tile for tile in tiles if tile[0] == "best validation"]

    lines = [json.loads(line) for line in (made / "metrics.jsonl").read_text().splitlines()]
    for line, (accuracy, reward) in zip(lines, [(0.5, 0.6), (0.4, 0.9), (0.3, 0.7), (0.2, 0.5)], strict=True):
        line["validation_accuracy"], line["validation_reward"] = accuracy, reward
    (made / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert best() == [("best validation", "50.0%", "step 1, mean reward 0.6")]
    measured = {**json.loads((made / "progress.json").read_text()), "validation_before": 0.7}
    (made / "progress.json").write_text(json.dumps({**measured, "validation_reward_before": 0.8}))
    assert best() == [("best validation", "70.0%", "before training, mean reward 0.8")]
    lines = [{key: each for key, each in line.items() if line["step"] < 3 or "validation" not in key} for line in lines]
    lines[1] |= {"validation_accuracy": 0.9, "validation_reward": 0.95}
    (made / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert best() == [("best validation", "90.0%", "step 2, none later, mean reward 0.95")]


def test_change_compares_the_ends(tmp_path: Path):
    run = read_run(write_run(tmp_path / "run", steps=40))
    _, values = figures.series(run, "response_tokens")
    found = figures.change(run, "response_tokens")
    assert found is not None
    assert found == pytest.approx({"first": sum(values[:10]) / 10, "last": sum(values[-10:]) / 10})
    assert figures.change(run, "no_such_figure") is None


def test_time_split_adds_up_to_the_wall_time(tmp_path: Path):
    run = read_run(write_run(tmp_path / "run", steps=6))
    split = figures.time_split(run)
    assert list(split) == ["rollout", "reward", "update", "other"]
    assert sum(split.values()) == pytest.approx(mean(figures.series(run, "step_s")[1]))
    assert split["other"] == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("better", "worse", "said"),
    [
        *((31, 17, "p = 0.059: may be chance"), (9, 2, "p = 0.065: may be chance"), (0, 6, "p = 0.031: significant")),
        *((5, 2, "p = 0.45: may be chance"), (32, 64, "p = 0.0014: significant"), (0, 11, "p < 0.001: significant")),
    ],
)
def test_the_sign_test_is_rounded(better: int, worse: int, said: str) -> None:
    assert figures.chance(better, worse) == f"sign test {said}"


def test_a_sign_test_near_the_limit_has_the_digits_that_tell_on_which_side_it_is() -> None:
    said = [figures.chance(n - k, k) for n in range(6, 200) for k in range(n // 2)]
    assert not [text for text in said if re.search(r"p = 0\.050*:", text)]
    assert "sign test p = 0.049: significant" in said
    assert any(re.search(r"p = 0\.05\d+: may be chance", text) for text in said)


def test_a_gain_is_rounded_once() -> None:
    before, after = 244 / 371, 298 / 371
    assert (percent(before), percent(after), points(after - before)) == ("65.8", "80.3", "+14.6")
    assert [points(of) for of in (-32 / 369, -20 / 369, 0.1 + 0.2 - 0.3, -1e-9)] == ["-8.7", "-5.4", "+0.0", "+0.0"]
    assert points(0.0625) == points(0.8125 - 0.75 + 1e-17) == "+6.2"


def test_a_model_that_comes_from_a_run_is_named_by_the_run_and_its_step(tmp_path: Path):
    run = write_run(tmp_path / "run", steps=2)
    assert figures.model_name(read_run(run)) == "qwen2-mini"
    manifest = json.loads((run / "manifest.json").read_text())
    descent = [{"run": "warm-up", "step": 3, "weights": "5c11"}]
    (run / "manifest.json").write_text(json.dumps({**manifest, "descent": descent}))
    assert figures.model_name(read_run(run)) == "warm-up, step 3"
