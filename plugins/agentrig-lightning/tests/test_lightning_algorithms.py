"""The forms in which `lightning.algorithm` takes an algorithm, and what the algorithm gets."""

from __future__ import annotations

from typing import Any

import agentlightning as agl
import agentrig_lightning as lightning
import pytest
from agentrig_lightning.algorithms import algorithm_of, datasets_for

from agentrig.errors import AgentrigError


class Whole(agl.Algorithm):
    def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None: ...


class TrainOnly(agl.Algorithm):
    def run(self, train_dataset: Any) -> None: ...


@agl.algo
def decorated(*, store: Any, val_dataset: Any) -> None: ...


async def plain(store: Any) -> None: ...


@pytest.mark.parametrize(
    ("source", "made", "datasets", "is_async"),
    [
        (Whole, Whole, ["train_dataset", "val_dataset"], False),
        (Whole(), Whole, ["train_dataset", "val_dataset"], False),
        (lambda: Whole(), Whole, ["train_dataset", "val_dataset"], False),
        (TrainOnly, TrainOnly, ["train_dataset"], False),
        (agl.Baseline, agl.Baseline, ["train_dataset", "val_dataset"], True),
        (decorated, type(decorated), ["val_dataset"], False),
        (plain, type(decorated), [], True),
    ],
    ids=["class", "instance", "factory", "one dataset", "baseline", "decorated", "plain"],
)
def test_forms(source: Any, made: type, datasets: list[str], is_async: bool) -> None:
    """Only the datasets that the signature takes are passed; a functional algorithm raises for any other."""
    lightning.algorithm(source, name="mine", summary="Mine.")
    algorithm = algorithm_of(source)
    assert type(algorithm) is made
    assert algorithm.is_async() is is_async
    given = datasets_for(algorithm.run, [1], [2])
    assert list(given) == datasets
    if not is_async:
        algorithm.set_store(object())
        algorithm.run(**given)


def test_what_is_no_algorithm_is_named() -> None:
    with pytest.raises(TypeError, match=r"takes an Algorithm class, an instance, .* this is 3"):
        lightning.algorithm(3, name="mine", summary="Mine.")
    with pytest.raises(
        TypeError, match=r"<lambda> has the parameter prompts, which no algorithm gets; it can have stor"
    ):
        lightning.algorithm(lambda store, prompts: None, name="mine", summary="Mine.")
    with pytest.raises(AgentrigError, match="this one made 7, which is no Algorithm"):
        algorithm_of(lambda: 7)
