from __future__ import annotations

import pytest

from agentrig.tasks import tasks_of_step


def test_each_epoch_takes_every_task_once_and_in_another_order():
    tasks = list(range(10))
    taken = [t for step in range(1, 6) for t in tasks_of_step(tasks, n=4, step=step, seed=1)]
    assert sorted(taken[:10]) == sorted(taken[10:20]) == tasks
    assert taken[:10] != taken[10:20]
    assert tasks_of_step(tasks, n=4, step=3, seed=1) == taken[8:12]
    assert tasks_of_step(tasks, n=4, step=3, seed=2) != taken[8:12]


def test_a_step_larger_than_the_split_takes_tasks_again():
    assert len(tasks_of_step(["a", "b"], n=5, step=1, seed=0)) == 5
    with pytest.raises(ValueError, match="no training tasks"):
        tasks_of_step([], n=5, step=1, seed=0)
