"""The doctor plays the agent on one task, and says which of its calls would be trained on."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from agentrig.doctor import Situation, examination
from agentrig.doctor.agent import check_agent
from agentrig.findings import Finding
from agentrig.hardware import Cpu
from agentrig.plan import resolve

TOY = str(Path(__file__).parents[1] / "support" / "toy_plugin.py")


def findings(*overrides: str, credit: str = "") -> list[Finding]:
    cpu = Cpu()
    plan = resolve("toy", overrides=overrides, files=[TOY], uses={"hardware": "cpu"})
    if credit:  # the algorithm brings its own
        plan = attrs.evolve(
            plan, configs={**plan.configs, "credit": plan.registry.find("credit", credit).spec.config()}
        )
    situation = Situation(hardware=cpu, candidates=[cpu], probes={"cpu": cpu.probe()}, plan=plan, versions={})
    return list(check_agent(situation))


def found(*overrides: str) -> Finding:
    (finding,) = findings(*overrides)
    return finding


def test_the_calls_that_would_be_trained_on_are_counted() -> None:
    finding = found("adapter.match=write")
    assert (finding.result, finding.cure) == ("ok", "")
    assert "1 of 1 call to the model would be trained on (toy-match)" in finding.evidence


@pytest.mark.parametrize(
    ("overrides", "evidence", "cure"),
    [
        (["adapter.match=check"], "none of its calls would be trained on. The adapter toy-match kept none of 1 call",
         "adapter.match=write_query"),
        pytest.param(['tasks.do=["no-call"]'], "No call to the model was recorded",
                     "OPENAI_BASE_URL", marks=pytest.mark.slow),
        pytest.param(['tasks.do=["raise"]'], "this agent cannot count", "agentrig dev", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_an_agent_without_a_call_to_train_on_is_a_warning(overrides: list[str], evidence: str, cure: str) -> None:
    finding = found(*overrides)
    assert finding.result == "warning"
    assert evidence in finding.evidence
    assert cure in finding.cure


def test_a_reward_without_scores_of_calls_is_a_warning_for_the_credit_turn() -> None:
    counted, unscored = findings("adapter.match=write", credit="turn")
    assert (counted.result, unscored.result) == ("ok", "warning")
    assert unscored.evidence == "the credit `turn` learns from rewards of calls, and no call of 1 rollout has one"
    assert unscored.cure.startswith("let your reward return Score.ok(..., calls=[...]) (docs/rewards.md)")


def test_a_module_to_preload_that_is_not_installed_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, plan = Cpu(), resolve("toy", files=[TOY], uses={"hardware": "cpu"})
    agent = plan.components["agent"]
    with_module = attrs.evolve(agent, spec=attrs.evolve(agent.spec, preload=("json", "no_such_module_x.y")))
    plan = attrs.evolve(plan, components={**plan.components, "agent": with_module})
    situation = Situation(hardware=cpu, candidates=[cpu], probes={"cpu": cpu.probe()}, plan=plan, versions={})
    first, second = check_agent(situation)
    assert (first.result, second.result) == ("ok", "warning")
    assert second.evidence.startswith("its `preload` has no_such_module_x.y, not installed")


def test_the_agent_is_not_played_where_the_run_could_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Situation) -> list[Finding]:
        return [Finding.problem("broken", "no disk")]

    monkeypatch.setattr(examination, "CHECKS", (check_agent, broken))
    checks = [f.check for f in examination.examine("toy", files=[TOY], uses={"hardware": "cpu"})]
    assert "broken" in checks
    assert "agent" not in checks
