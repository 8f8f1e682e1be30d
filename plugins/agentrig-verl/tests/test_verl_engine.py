"""The engine with shared tokens compared with verl's own: log-probabilities, loss and gradients are equal.

Both are real engines: FSDP2 over one process on the CPU, in fp32, with verl's own PPO loss.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import verl_engines
from verl_engines import VOCABULARY, batch_of, logprobs, make_engine, make_model, make_worker, on_the_cpu, update

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


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("tokens", [60, 1000])
def test_loss_and_gradients_are_those_of_verls_engine(engines: tuple[Any, Any], seed: int, tokens: int) -> None:
    own, forest = engines
    rows = rows_like_a_step(seed)
    mode = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"][seed % 3]
    agree(
        update(forest, batch_of(rows, tokens=tokens, calculate_entropy=False), mode=mode),
        update(own, batch_of(rows, calculate_entropy=False), mode=mode),
    )


def test_an_entropy_bonus_has_the_gradient_of_verls_engine(engines: tuple[Any, Any]) -> None:
    own, forest = engines
    rows = rows_like_a_step(5)
    found, expected, without = (
        update(engine, batch_of(rows, tokens=tokens), entropy=bonus)
        for engine, tokens, bonus in ((forest, 60, 0.5), (own, 130, 0.5), (own, 130, 0.0))
    )
    agree(found, expected)
    with pytest.raises(AssertionError):
        agree(found, without)


def test_rows_without_an_advantage_are_not_computed(engines: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    own, forest = engines
    rows = [row for seed in (1, 2) for row in rows_like_a_step(seed)]
    batches = [batch_of(rows, tokens=tokens, calculate_entropy=False) for tokens in (60, 130)]
    for data in batches:
        starts = data["advantages"].offsets()
        for i in range(4, len(rows)):
            data["advantages"].values()[starts[i] : starts[i + 1]] = 0.0
    computed = []
    for skips in (False, True):
        monkeypatch.setattr(forest, "skips", skips)
        monkeypatch.setattr(forest, "tokens", type(forest.tokens)())
        agree(update(forest, batches[0], kl=False), update(own, batches[1], kl=False))
        computed.append((forest.tokens.computed, forest.tokens.traced))
    assert computed[1][0] < computed[0][0]
    assert computed[1][1] == computed[0][1]
    with pytest.raises(AssertionError):  # under a KL loss they have a gradient: a wrong choice would be seen
        agree(update(forest, batches[0]), update(own, batches[1]))


def test_only_a_loss_that_advantages_multiply_may_skip_them() -> None:
    from agentrig_verl.engine import skips_zero_advantage
    from verl.workers.config import FSDPActorConfig, PolicyLossConfig
    from verl.workers.utils.losses import ppo_loss, sft_loss

    def skips(loss: Any = ppo_loss, **changes: Any) -> bool:
        config = FSDPActorConfig(strategy="fsdp2", rollout_n=1, use_dynamic_bsz=True, **changes)
        return skips_zero_advantage(partial(loss, config=config))

    assert skips()
    assert not skips(use_kl_loss=True)
    assert not skips(entropy_coeff=0.01)
    assert not skips(policy_loss=PolicyLossConfig(loss_mode="gspo"))
    assert not skips(sft_loss)


@pytest.mark.parametrize("seed", range(3))
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


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3"])
def test_each_kind_of_model_in_the_table(engines: tuple[Any, Any], tmp_path: Path, kind: str) -> None:
    make_model(tmp_path, kind, **({"sliding_window": None} if kind == "mistral" else {}))
    rows = rows_like_a_step(7)
    own, forest = (make_engine(tmp_path, forest=shared) for shared in (False, True))
    agree(update(forest, batch_of(rows, tokens=90)), update(own, batch_of(rows)))


def test_verls_default_attention_need_not_be_installed(engines: tuple[Any, Any], tmp_path: Path) -> None:
    """verl asks for flash_attention_2; shared tokens have an attention of their own, which needs no flash-attn."""
    make_model(tmp_path)
    rows = rows_like_a_step(9)
    own, forest = make_engine(tmp_path, forest=False), make_engine(tmp_path, forest=True, attention=None)
    agree(update(forest, batch_of(rows, use_remove_padding=True)), update(own, batch_of(rows)))


def test_adapters_are_trained_as_by_verls_engine(engines: tuple[Any, Any], tmp_path: Path) -> None:
    make_model(tmp_path)
    rows = rows_like_a_step(8)
    found = []
    for shared in (True, False):
        engine = make_engine(tmp_path, forest=shared, lora_rank=4)
        chance = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for name, p in engine.module.named_parameters():
                if "lora_B" in name:  # zero at first, and so would be the other half's gradient
                    p.to_local().copy_(0.1 * torch.randn(p.shape, generator=chance))
        found.append((update(engine, batch_of(rows, tokens=90)), logprobs(engine, batch_of(rows))["log_probs"]))
        with engine.disable_adapter():  # the reference of the KL loss
            found[-1] += (logprobs(engine, batch_of(rows))["log_probs"],)
    (one, with_adapters, without), (other, *_) = found
    assert {name.split(".")[-2] for name in one[1]} == {"default"}
    agree(one, other)
    assert any(float((a - b).abs().max()) > 0.1 for a, b in zip(with_adapters, without, strict=True))


def test_rows_that_are_no_tree_of_positions_are_refused(engines: tuple[Any, Any]) -> None:
    data = batch_of([([1, 2], [3], [1])])
    data["position_ids"] = torch.nested.as_nested_tensor([torch.tensor([0, 0, 1])], layout=torch.jagged)
    with pytest.raises(ValueError, match="positions that don't count from 0"):
        update(engines[1], data)
    data = batch_of([([1, 2], [3], [1]), ([1, 2], [4], [1])], temperature=torch.tensor([1.0, 0.5]))
    with pytest.raises(ValueError, match=r"algorithm\.engine=verl"):
        update(engines[1], data)


@pytest.mark.parametrize("shared", [True, False])
def test_a_worker_of_a_run_counts_tokens_and_saves(
    engines: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    """verl's own worker, with its mini-batches: from its registry comes the engine that the trainer chose."""
    from agentrig_verl.actor import Actor, ForestActor
    from transformers import AutoModelForCausalLM
    from verl.utils import tensordict_utils

    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")  # the process group is there already
    for name in ("max_memory_allocated", "max_memory_reserved"):
        monkeypatch.setattr(torch.cpu, name, lambda: 0, raising=False)
    make_model(tmp_path / "model")
    worker = make_worker((ForestActor if shared else Actor).actor_worker_cls, tmp_path / "model")
    assert type(worker.engine).__name__ == ("ForestEngine" if shared else "FSDPEngineWithLMHead")
    rows: Rows = [([1, 2, 3], [4, 5], [1, 1]), ([1, 2, 3], [6], [1]), ([7], [8, 9], [1, 1]), ([7], [8, 9], [1, 1])]
    data = batch_of(rows, calculate_entropy=False, global_batch_size=2)
    tensordict_utils.assign_non_tensor(data, mini_batch_size=2, epochs=2, dataloader_kwargs={"shuffle": False})
    metrics = tensordict_utils.get(worker.train_mini_batch(data), "metrics")
    assert len(metrics["grad_norm"]) == 4
    assert metrics["weight_change"][0] > 0
    if shared:
        assert (metrics["computed_tokens"], metrics["traced_tokens"]) == ([2.0 * (4 + 2)], [2.0 * (4 + 3 + 2 + 2)])
    else:
        assert "computed_tokens" not in metrics
    worker.save_checkpoint(str(tmp_path / "saved"))
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved" / "huggingface")
    trained = {name: p.full_tensor().bfloat16() for name, p in worker.engine.module.state_dict().items()}
    torch.testing.assert_close(dict(saved.state_dict()), trained)


RANK = """
import json, os, sys, warnings
from pathlib import Path
warnings.filterwarnings("ignore")
sys.path.insert(0, sys.argv[4])
import torch
from agentrig_verl.actor import ForestActor
from verl.utils import tensordict_utils
from verl_engines import batch_of, make_engine, make_worker, on_the_cpu, update

folder, rank, ranks = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # the process group is there already
rows = json.loads((folder / "rows.json").read_text())
size = len(rows) // ranks
mine = rows[rank * size : (rank + 1) * size]
with on_the_cpu(folder / "group", rank=rank, ranks=ranks):
    import agentrig_verl.engine

    agentrig_verl.engine.LOGITS = 64  # logits of two tokens at a time, computed again for the gradient
    found = {}
    for shared in (False, True):
        engine = make_engine(folder, forest=shared)
        data = batch_of(mine, tokens=30 if shared else 130, global_batch_size=len(rows))
        found[shared] = update(engine, data)
        if shared:
            found["tokens"] = (engine.tokens.computed, engine.tokens.traced)
    torch.cpu.max_memory_allocated = torch.cpu.max_memory_reserved = lambda: 0
    worker = make_worker(ForestActor.actor_worker_cls, folder)
    data = batch_of(mine, tokens=30, global_batch_size=len(rows), calculate_entropy=False)
    tensordict_utils.assign_non_tensor(data, mini_batch_size=len(rows), epochs=1, dataloader_kwargs={"shuffle": False})
    found["metrics"] = tensordict_utils.get(worker.train_mini_batch(data), "metrics")
    torch.save(found, folder / f"found-{rank}.pt")
"""


@pytest.mark.slow
def test_two_ranks_with_sharded_weights_learn_what_verls_engine_does(needs_verl: None, tmp_path: Path) -> None:
    """One rank has several passes, the other nothing to train: both take part in every pass of the sharded model."""
    make_model(tmp_path)
    rows = [row for seed in (1, 4) for row in rows_like_a_step(seed)]
    rows += [([1], [0], [0])] * len(rows)
    (tmp_path / "rows.json").write_text(json.dumps(rows), "utf-8")
    words = [str(tmp_path), "2", str(Path(verl_engines.__file__).parent)]
    started = [subprocess.Popen([sys.executable, "-c", RANK, words[0], str(rank), *words[1:]]) for rank in range(2)]
    assert [process.wait(timeout=240) for process in started] == [0, 0]
    busy, idle = (torch.load(tmp_path / f"found-{rank}.pt", weights_only=False) for rank in range(2))
    for found in (busy, idle):
        agree(found[True], found[False])
    assert busy["tokens"][1] > busy["tokens"][0] > 30, "in more than one pass"
    assert idle["tokens"][1] == 0
    for metrics in (busy["metrics"], idle["metrics"]):  # gathered from as many micro-batches of each rank
        of_both = [float(a + b) for a, b in zip(busy["tokens"], idle["tokens"], strict=True)]
        assert (metrics["computed_tokens"] + metrics["traced_tokens"]) == of_both
        assert metrics["grad_norm"][0] > 0
        assert metrics["weight_change"][0] > 0
