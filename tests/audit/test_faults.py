"""The auditor: healthy runs raise nothing, and faults that train on in silence are named with their link."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import audited_runs
import pyarrow.parquet as pq
import pytest
import torch
from audit_faults import FAULTS, SAMPLE, SCORES, Fault
from audited_runs import PLUGIN, plant, tiny_model, trained, verdicts
from click.testing import CliRunner

from agentrig.audit import distribution, update
from agentrig.audit.verdicts import LINKS, CannotLook
from agentrig.cli import main
from agentrig.errors import RunStopped
from agentrig.plan import resolve
from agentrig.run import auditing
from agentrig.run.resume import resume_plan
from agentrig.run.training import train
from agentrig.view.diagnosis import diagnose, verdict

TOGETHER = (
    ("the same tasks in every step",),
    ("sampled at half the temperature", "only the first layer's adapters are trained"),
    ("the agent gets the text of another reply", "rewards are exchanged within a group",
     "the size of advantages is ignored", "token weights times 0.1", "the learning rate is a thousandth"),
)  # fmt: skip
"""Faults of each link but the measurements', which show in one step: none hides another."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the variable that one of the faults sets in this process."""
    monkeypatch.setenv("AUDIT_EQUAL", "")
    monkeypatch.delenv("AUDIT_EQUAL")


@pytest.mark.parametrize("names", TOGETHER, ids=", ".join)
def test_faults_of_several_links_in_one_run_are_all_named(
    names: Sequence[str], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = [FAULTS[name] for name in names]
    for fault in faults:
        plant(fault, tmp_path, monkeypatch)
    with pytest.raises(RunStopped, match="the audit found") as stopped:
        trained(tmp_path, model, *(word for fault in faults for word in fault.settings))
    message = str(stopped.value)
    assert [fault.link for fault in faults if not re.search(rf"^  {fault.link}: ", message, re.M)] == [], message
    assert [fault.names for fault in faults if fault.names not in message] == []
    assert "Likely causes" in message
    assert f"agentrig audit {tmp_path / 'run'} --step" in message


@pytest.mark.slow
@pytest.mark.parametrize("rate", ["1e-3", "1e-5"])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_that_trains_on_in_silence_is_named_with_its_link(
    name: str, rate: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = FAULTS[name]
    plant(fault, tmp_path, monkeypatch)
    with pytest.raises(RunStopped, match="the audit found") as stopped:
        trained(tmp_path, model, f"algorithm.lr={rate}", *fault.settings)
    message = str(stopped.value)
    assert re.search(rf"^  {fault.link}: ", message, re.M), message
    assert fault.names in message
    assert fault.link != "distribution" or "\n  held-out: " not in message


@pytest.fixture
def short_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no step have the time for a gradient, and let one group of rollouts be computed."""
    real = update.repeat

    def repeat(*given: Any, budget_s: float, **more: Any) -> update.Gradient:
        if budget_s < 30:
            raise CannotLook(f"it may take {budget_s:.0f} s")
        return real(*given, budget_s=budget_s, **more)

    monkeypatch.setattr(update, "repeat", repeat)
    monkeypatch.setattr(distribution, "TOKENS", 0)


@pytest.mark.slow
def test_a_run_without_time_for_a_gradient_computes_one_at_its_end(
    short_of_time: None, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    run = trained(tmp_path, model)
    assert verdicts(run)[1]["gradient"]["result"] == "ok"
    assert verdicts(run)[2]["gradient"]["result"] == "not looked at"
    assert "all 8 parts that could be checked agree" in caplog.text
    assert "; distribution: a sample of 8 of 24 calls; not looked at: gradient (it may take 10 s)" in caplog.text
    found = diagnose(run)
    assert "9 of 9 parts of steps 1, 2; distribution of 16 of 48 calls (32 left out to save time)" in found.audited
    assert found.unseen == []
    plant(FAULTS["token weights times 10"], tmp_path, monkeypatch)
    (tmp_path / "again").mkdir()
    with pytest.raises(RunStopped, match=r"step 1: the audit found .*\n  gradient: "):
        trained(tmp_path / "again", model)


@pytest.mark.slow
def test_why_names_a_link_that_no_step_had_the_time_for(
    short_of_time: None, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auditing, "OWED_S", 1.0)
    run = trained(tmp_path, model, "algorithm.steps=1")
    assert "Not checked by the auditor in any step: gradient (it may take 10 s)." in verdict(diagnose(run))


@pytest.mark.slow
def test_repeats_within_groups_are_seen_in_calls_that_no_model_computed(
    short_of_time: None, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(FAULTS["sampled with the same noise for pairs"], tmp_path, monkeypatch)
    with pytest.raises(RunStopped, match=r"\n  distribution: .*random numbers used twice"):
        trained(tmp_path, model)
    assert verdicts(tmp_path / "run")[1].keys() == set(LINKS)


@pytest.mark.slow
def test_a_checkpoint_of_other_weights_is_no_model_to_export_and_why_names_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = FAULTS["the last weights are saved as those of the start, the best"]
    plant(fault, tmp_path, monkeypatch)
    run = trained(tmp_path, model, "run.audit=false", *fault.settings)
    exported = CliRunner().invoke(main, ["export", str(run), str(tmp_path / "exported")])
    assert exported.exit_code != 0
    assert fault.names in str(exported.exception) + exported.output
    assert not (tmp_path / "exported").exists()
    audited = CliRunner().invoke(main, ["audit", str(run)])
    assert audited.exit_code == 1
    assert fault.names in audited.output


@pytest.mark.slow
def test_a_run_ends_with_the_best_weights_without_a_fault_also_when_it_goes_on(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained(tmp_path, model, *FAULTS["the worst weights are kept as the best"].settings)
    monkeypatch.setenv("AUDIT_ROOT", "/another/cache")  # where the tasks' files are from now on
    train(resume_plan(run, overrides=["algorithm.steps=4"]), resume=run)
    assert {each["result"] for links in verdicts(run).values() for each in links.values()} == {"ok"}


def test_the_table_of_faults_in_the_docs_counts_those_of_each_link() -> None:
    page = (Path(__file__).parents[2] / "docs" / "proofs.md").read_text("utf-8")
    counts = Counter(fault.link for fault in FAULTS.values())
    assert [link for link, n in counts.items() if f"| `{link}` ({n}) |" not in page] == []


@pytest.mark.slow
def test_why_warns_of_invalid_scores_that_a_second_scoring_finds_valid(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = 'found[1] = attrs.evolve(found[1], triplets=(), score=type(found[1].score).invalid("the disk was full"))'
    plant(Fault(link="score", code=SCORES.format(body=body)), tmp_path, monkeypatch)
    run = trained(tmp_path, model, "algorithm.steps=1")
    note = verdicts(run)[1]["score"]["note"]
    assert re.match(r"1 of 1 invalid scores are valid at a second scoring: rollout .*: the disk was full", note)
    assert f"the auditor noted: {note}" in [finding.text for finding in diagnose(run).warnings]


@pytest.mark.slow
def test_of_a_credit_of_ones_own_only_the_advantages_are_not_looked_at(model: Path, tmp_path: Path) -> None:
    found = verdicts(trained(tmp_path, model, "credit.use=bar"))
    results = {link: each["result"] for link, each in found[2].items()}
    assert results == {**dict.fromkeys(LINKS, "ok"), "advantages": "not looked at"}
    assert "bar has a formula of its own" in found[2]["advantages"]["detail"]


@pytest.mark.slow
def test_rewards_that_the_agent_gives_reach_the_credit_turn_and_are_confirmed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's reward scores no calls; that of a rollout stays what it says."""
    said = 'return reply.json()["choices"][0]["message"]["content"]'
    code = PLUGIN.replace(said, f"{said.replace('return', 'text =')}\n    agentrig.reward(len(text))\n    return text")
    code = code.replace(", calls=[value])", ")")
    assert code.count("agentrig.reward(") == 1
    assert "calls=" not in code
    monkeypatch.setattr(audited_runs, "PLUGIN", code)
    run = trained(tmp_path, model, "credit.use=turn", "credit.negative_scale=1")
    assert {each["result"] for links in verdicts(run).values() for each in links.values()} == {"ok"}
    rows = pq.read_table(run / "rollouts" / "train-00001.parquet").to_pylist()
    lengths = {row["id"]: len(json.loads(row["answer"])) for row in rows}
    groups = {row["id"]: row["group"] for row in rows}
    for call in pq.read_table(run / "calls" / "train-00001.parquet").to_pylist():
        mates = [lengths[name] for name, group in groups.items() if group == groups[call["rollout"]]]
        assert call["advantage"] == pytest.approx(lengths[call["rollout"]] - sum(mates) / len(mates))
    assert max(row["value"] for row in rows) <= 1.0


@pytest.mark.slow
def test_a_fault_is_named_with_a_credit_of_ones_own_too(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(FAULTS["token weights times 10"], tmp_path, monkeypatch)
    with pytest.raises(RunStopped, match="\n  gradient: "):
        trained(tmp_path, model, "credit.use=bar")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stated", "other"),
    [
        (1.0, "temperature=settings.temperature * 0.7"),
        (0.7, "temperature=settings.temperature / 0.7"),
        (1.0, "temperature=settings.temperature * 0.9"),
        (1.0, "top_p=torch.full_like(settings.temperature, 0.95)"),
    ],
    ids=["0.7 of 1", "1 of 0.7", "0.9 of 1", "top-p 0.95"],
)
def test_a_small_fault_of_sampling_is_named_in_the_recipe_mini(
    stated: float, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = f"evolve(settings, {other})"
    body = f"tokens = real(logits, {other}, uniforms, allowed)[0]"
    plant(Fault(link="distribution", where="server", code=SAMPLE.format(body=body)), tmp_path, monkeypatch)
    settings = ("algorithm.steps=2", f"algorithm.temperature={stated}", "algorithm.validate_every=0")
    own = (f"run.directory={tmp_path}", "run.name=run", "run.report_tasks=2", 'run.block=["report"]')
    with pytest.raises(RunStopped, match=r"\n  distribution: .* times likelier with"):
        train(resolve("mini", overrides=[*settings, *own]))


@pytest.mark.slow
def test_an_optimizer_whose_state_was_not_restored_is_named(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained(tmp_path, model)
    monkeypatch.setattr(torch.optim.AdamW, "load_state_dict", lambda self, state: None)
    with pytest.raises(RunStopped, match=r"\n  weights: not AdamW.*: update \d+ of the run: the optimizer has made 0"):
        train(resume_plan(run, overrides=["algorithm.steps=3"]), resume=run)


HEALTHY = {
    "all weights": (),
    "all weights, 1e-5": ("algorithm.lr=1e-5",),
    "several updates": ("algorithm.ppo_epochs=2", "algorithm.mini_batches=2", "algorithm.tokens_per_batch=96"),
    "adapters": ("algorithm.lora_rank=4",),
    "adapters and KL": ("algorithm.lora_rank=4", "algorithm.kl_loss_coef=0.1"),
    "KL, by rollout, scaled": (
        "algorithm.kl_loss_coef=0.1", "algorithm.loss_agg_mode=seq-mean-token-mean", "credit.negative_scale=0.7",
    ),
    "a schedule, decay, a nucleus": (
        "algorithm.lr_scheduler_type=linear", "algorithm.warmup_steps=3", "algorithm.weight_decay=0.1",
        "algorithm.top_p=0.9", "algorithm.temperature=0.8",
    ),
    "best-of-group, cispo": (
        "credit.use=best-of-group", "algorithm.loss=cispo", "algorithm.ppo_epochs=2", "algorithm.mini_batches=2",
    ),
    "reinforce++, sapo": ("credit.use=reinforce++", "algorithm.loss=sapo", "algorithm.ppo_epochs=2"),
    "rloo, gspo": (
        "credit.use=rloo", "algorithm.loss=gspo", "algorithm.loss_agg_mode=seq-mean-token-mean",
        "algorithm.clip_low=3e-4", "algorithm.clip_high=4e-4", "algorithm.ppo_epochs=2", "algorithm.mini_batches=2",
    ),
    "turn, by call": ("credit.use=turn",),
    "tasks by difficulty": ("algorithm.task_sampling=by-difficulty",),
    "dr-grpo, by call": ("credit.use=dr-grpo", "credit.weighting=call"),
    "stale": ("algorithm.max_staleness=1", "algorithm.steps=4"),
    "bfloat16": ("algorithm.dtype=bfloat16",),
    "bfloat16, adapters": ("algorithm.dtype=bfloat16", "algorithm.lora_rank=4"),
    "checkpointing": ("algorithm.gradient_checkpointing=true",),
    "the model mini": ("algorithm.model=mini", "algorithm.temperature=1.5"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_has_no_fault_in_any_link(name: str, model: Path, tmp_path: Path) -> None:
    found = verdicts(trained(tmp_path, model, *HEALTHY[name]))
    assert {1, 2} <= found.keys()
    for step in found:
        assert list(found[step]) == list(LINKS)
        results = {link: each["result"] for link, each in found[step].items()}
        assert set(results.values()) == {"ok"}, found[step]
        ratios = {link: each["ratio"] for link, each in found[step].items()}
        assert max(ratios.values()) < 0.8, ratios
