"""The engine with shared tokens beside verl's own: log-probabilities, loss and gradients are the same.

Both are real engines: FSDP2 over one process on the CPU, in fp32, with verl's own PPO loss.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from verl_engines import VOCABULARY, batch_of, logprobs, make_engine, make_model, on_the_cpu, update

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of verl and torch

Rows = list[tuple[list[int], list[int], list[int]]]


@pytest.fixture(scope="module")
def engines(needs_verl: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """verl's own engine, and the one with shared tokens."""
    folder = tmp_path_factory.mktemp("model")
    make_model(folder)
    with on_the_cpu(folder / "group"):
        yield make_engine(folder, forest=False), make_engine(folder, forest=True)


def rows_like_a_step(seed: int) -> Rows:
    """Groups with one prompt, rows of several turns with given tokens between, equal rows, rows without a mask."""
    rng = random.Random(seed)

    def some(low: int, high: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(rng.randint(low, high))]

    found: Rows = []
    for _ in range(rng.randint(1, 3)):
        prompt = some(1, 30)
        for _ in range(rng.randint(1, 4)):
            response = some(1, 9)
            mask = [1] * len(response)
            for _ in range(rng.randint(0, 2)):  # more turns
                given, said = some(1, 6), some(1, 5)
                response, mask = response + given + said, mask + [0] * len(given) + [1] * len(said)
            found.append((prompt, response, mask))
        if rng.random() < 0.5:
            found.append(found[-1])  # the same row twice
        if rng.random() < 0.5:  # a call that goes on after another one
            found.append((prompt + found[-1][1], some(1, 5), [1]))
            found[-1] = (found[-1][0], found[-1][1], [1] * len(found[-1][1]))
    found.append(([VOCABULARY - 1], [0], [0]))  # as verl fills up a mini-batch
    rng.shuffle(found)
    return found


def agree(one: tuple[float, dict[str, Any]], other: tuple[float, dict[str, Any]]) -> None:
    """Compare loss and gradients: 1e-5 of each tensor's norm."""
    assert one[0] == pytest.approx(other[0], rel=1e-5)
    assert one[1].keys() == other[1].keys()
    for name, expected in other[1].items():
        assert float(expected.norm()) > 0
        difference = float((one[1][name] - expected).norm() / expected.norm())
        assert difference < 1e-5, f"{name}: {difference}"


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("tokens", [60, 1000])
def test_loss_and_gradients_are_those_of_verls_engine(engines: tuple[Any, Any], seed: int, tokens: int) -> None:
    own, forest = engines
    rows = rows_like_a_step(seed)
    mode = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"][seed % 3]
    agree(
        update(forest, batch_of(rows, tokens=tokens, calculate_entropy=False), mode=mode),
        update(own, batch_of(rows, calculate_entropy=False), mode=mode),
    )


@pytest.mark.parametrize("seed", range(6))
def test_log_probabilities_and_entropies_are_those_of_verls_engine(engines: tuple[Any, Any], seed: int) -> None:
    own, forest = engines
    rows = rows_like_a_step(seed)
    expected, found = (logprobs(engine, batch_of(rows, tokens=80)) for engine in (own, forest))
    assert found.keys() == expected.keys() == {"log_probs", "entropy"}
    seen = 0
    for name, values in expected.items():
        for i, (prompt, response, mask) in enumerate(rows):
            assert len(found[name][i]) == len(prompt) + len(response)
            trained = len(prompt) - 1 + torch.nonzero(torch.tensor(mask))[:, 0]
            torch.testing.assert_close(found[name][i][trained], values[i][trained], rtol=1e-5, atol=2e-6)
            seen += len(trained)
    assert seen == 2 * sum(sum(mask) for _, _, mask in rows)
