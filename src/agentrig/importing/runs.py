"""The calls of a run directory of agentrig, with their exact token ids."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentrig.demonstrations import TOKENS, Unfit, recorded_call
from agentrig.errors import AgentrigError
from agentrig.importing.calls import Found, line_of, rollout_fault
from agentrig.ledger import DUPLICATE, LEFT_OUT_BY_ADAPTER, OTHER_SERVER, REASONS, UNMATCHED_MODEL, UNMATCHED_NODE
from agentrig.rollouts import Rollout
from agentrig.run.past import recorded_in
from agentrig.run.rows import stored_rollouts
from agentrig.traces import LLM_CALL, mapping
from agentrig.view.beside import calls_of
from agentrig.view.reading import dig, read_run

NOT_TRAINED = (OTHER_SERVER, UNMATCHED_NODE, UNMATCHED_MODEL, DUPLICATE, LEFT_OUT_BY_ADAPTER)
"""Reasons of the ledger for calls that the run's adapter does not train."""


def run_calls(directory: Path, min_reward: float | None) -> Iterator[Found]:
    """Yield the calls of a run; without `min_reward`, which the caller compares, only those of correct rollouts.

    Raises:
        AgentrigError: It is no run directory, has no rollouts, or a file is damaged.
    """
    run = read_run(directory)
    if not run.of_mode("train"):
        raise AgentrigError("\n  ".join([f"{directory} has no rollouts of training", *run.unread]))
    model = str(dig(run.config, "algorithm", "model") or "")
    for rollouts in stored_rollouts(directory / "rollouts", size=64, recorded=recorded_in(directory)):
        entries, damage = calls_of(directory, [{"id": r.id, "mode": r.mode, "step": r.step} for r in rollouts])
        if damage:
            raise AgentrigError(f"{directory}: {damage[0]}")
        for rollout in rollouts:
            ledger = entries.get(rollout.id, {})
            reasons = {span: call.get("reason") for span, found in ledger.items() for call in found}
            yield from _calls(rollout, reasons, min_reward, f"{directory}, rollout {rollout.id}", model)


def _calls(
    rollout: Rollout, reasons: dict[str, Any], min_reward: float | None, place: str, model: str
) -> Iterator[Found]:
    wrong = min_reward is None and not rollout.correct
    for call in (span for span in rollout.trace.spans if span.name == LLM_CALL):
        attributes, where = call.attributes, f"{place}, span {call.id}"
        found: Any
        if fault := rollout_fault(mode=rollout.mode, failure=rollout.failure, incorrect=wrong):
            found = fault
        elif reasons.get(call.id) in NOT_TRAINED:
            found = Unfit(f"the run does not train it: {REASONS[reasons[call.id]]}")
        elif mapping(attributes.get("request")).get("continue_final_message"):
            found = Unfit("the call continues a message of the assistant")
        else:
            said = recorded_call(attributes)
            said |= {"task": rollout.task.id, "reward": rollout.value}
            said |= {"tokenizer": model} if TOKENS[0] in said else {}
            found = line_of(**said, finish=attributes.get("finish_reason"), error=call.error)
        yield where, found
