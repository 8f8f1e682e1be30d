"""The keys of `gepa`, of `apo`, and of the server `endpoint`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrig_prompts import build

from agentrig.endpoints import Endpoint
from agentrig.external.model import EndpointServer
from agentrig.servers import ServerPlan
from effects import Elsewhere, Flip, Inherited, Settings, config_of, exact

ASKING = "plugins/agentrig-prompts/tests/test_prompts_asking.py::"
RUNS = "plugins/agentrig-prompts/tests/test_prompts_run.py::"
MODEL = "tests/external/test_model.py::"
NOWHERE: Any = None
BASE = {"base_url": "http://127.0.0.1:9/v1", "model": "m"}


def served(settings: Settings) -> ServerPlan:
    return build(config_of("algorithm.gepa", settings))._plan(NOWHERE)


def sampling(settings: Settings) -> Mapping[str, Any]:
    return build(config_of("algorithm.gepa", settings))._sampled([Endpoint(**BASE)])[0].sampling


def endpoint(settings: Settings) -> Endpoint:
    """Return what the server `endpoint` gives to a run."""
    plan = ServerPlan(model=Path("m"), name="policy", hardware=NOWHERE)
    return EndpointServer(config_of("server.endpoint", settings), plan).endpoints[0]


def elsewhere(test: str) -> Elsewhere:
    """Return the entry of a key that needs a model."""
    return Elsewhere(test, "it needs a scripted model, or a run")


WAITS = f"{ASKING}test_a_model_that_stays_away_stops_the_run_with_the_command_that_goes_on"
REFLECTS = f"{ASKING}test_a_reflection_sees_inputs_outputs_and_feedback_and_is_paid_once"
REFUSED = f"{RUNS}test_what_can_find_nothing_is_refused_before_the_first_rollout"

TABLE: Mapping[str, Flip | Elsewhere] = {
    "model": exact("/a", "/b", lambda s: str(served(s).model)),
    "dtype": exact("float32", "bfloat16", lambda s: served(s).dtype),
    "temperature": exact(0.0, 0.7, lambda s: sampling(s)["temperature"], (0, 0.7)),
    "reply_tokens": exact(8, 16, lambda s: sampling(s)["max_tokens"]),
    "reflection_base_url": elsewhere(REFLECTS),
    "reflection_model": elsewhere(REFLECTS),
    "reflection_temperature": elsewhere(REFLECTS),
    "reflection_api_key": elsewhere(f"{ASKING}test_the_reflecting_model_gets_its_own_key"),
    "max_calls": elsewhere(REFUSED),
    "max_tokens": elsewhere(f"{ASKING}test_max_tokens_stops_the_search_and_a_value_too_small_is_refused"),
    "minibatch": elsewhere(REFUSED),
    "perfect": elsewhere(f"{ASKING}test_an_answer_with_the_perfect_reward_is_not_reflected_on"),
    "retries": elsewhere(f"{ASKING}test_a_run_in_which_everything_fails_stops"),
    "patience_s": elsewhere(WAITS),
}

BEAM = "plugins/agentrig-prompts/tests/test_apo.py::test_each_prompt_of_the_beam_gets_its_branches_and_the_best_go_on"

APO: Mapping[str, Elsewhere | Inherited] = {
    **{key: Inherited("algorithm.gepa") for key in TABLE},
    **{key: elsewhere(BEAM) for key in ("beam_width", "branch_factor")},
}

ENDPOINT: Mapping[str, Flip | Elsewhere] = {
    "base_url": exact(
        "http://a:1/v1",
        "http://b:1/v1/",
        lambda s: endpoint(s).base_url,
        ("http://a:1/v1", "http://b:1/v1"),
        beside={"model": "m"},
    ),
    "model": exact("one", "two", lambda s: endpoint(s).model, beside={"base_url": BASE["base_url"]}),
    "api_key": elsewhere(f"{MODEL}test_a_model_elsewhere_is_asked_with_its_key_and_cannot_be_trained"),
    "token_ids": exact(False, True, lambda s: endpoint(s).token_ids, beside=BASE),
}
