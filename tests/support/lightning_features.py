"""Makes docs/reference/agent-lightning.md: what of Agent Lightning 0.3 works, each row with the tests that prove it.

A row without a test that exists is an error. `python tests/support/reference.py` writes the page.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import attrs

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "plugins" / "agentrig-lightning" / "tests"

HEAD = """# What of Agent Lightning 0.3 works

This page is made by `tests/support/lightning_features.py` from the tests that prove each row; a test fails when a proof
is missing. How to use it: [Bring code from Agent Lightning](../lightning.md), which has
[Agent Lightning 1.x](../lightning.md#agents-of-1x) too.

"Same as upstream" means: the files of Agent Lightning's tag v0.3.0, unmodified, run on agentrig and on Agent
Lightning's own Trainer, in one environment, against one scripted model server. Every request to a model, every rollout
with its mode, status and reward, and the best prompt are the same. To run these tests yourself:

```bash
plugins/agentrig-lightning/tests/upstream/setup.sh /some/folder/venv
export AGENTRIG_AGENT_LIGHTNING=/path/to/agent-lightning-0.3.0
/some/folder/venv/bin/python -m pytest -m slow plugins/agentrig-lightning/tests/upstream
```

`setup.sh` copies `.venv` and installs what the examples need. AutoGen needs protobuf 5 and MCP 1, agentrig's own
environment has protobuf 7 and MCP 2, so the two can't share one.
"""

STARTS = ("works", "does not work: ")
"""How a verdict begins; `works with ...` names what to do."""


@attrs.frozen
class Row:
    """A feature of Agent Lightning.

    Attributes:
        feature: What a user of Agent Lightning knows it as.
        verdict: `works`, `works with ...`, or `does not work: ...`, with the reason and what to use.
        tests: `file::test` for each test that proves it, in the tests of agentrig-lightning.
    """

    feature: str
    verdict: str
    tests: Sequence[str]


AGENTS = "test_lightning_agents.py"
ALGORITHMS = "test_lightning_algorithms.py"
FAULTS = "test_lightning_faults.py"
LIGHTNING = "test_lightning.py"
RESULTS = "test_lightning_results.py"
SPANS = "test_lightning_spans.py"
TASKS = "test_lightning_tasks.py"
TRAINER = "test_lightning_trainer.py"
TRIPLETS = "test_lightning_triplets.py"
UPSTREAM = "upstream/test_upstream.py::test_an_example_gives_what_agent_lightning_gives"

FEATURES: Mapping[str, Sequence[Row]] = {
    "Agents": [
        Row("`LitAgent`, synchronous and asynchronous", "works", [f"{LIGHTNING}::test_an_unchanged_agent"]),
        Row("classes, instances, `@agl.rollout` and plain functions", "works", [f"{AGENTS}::test_functions"]),
        Row(
            "state in `self` during a rollout",
            "works",
            [f"{AGENTS}::test_rollouts_of_an_agent_with_state_are_not_mixed_up"],
        ),
        Row(
            "`training_rollout` and `validation_rollout`",
            "works",
            [f"{AGENTS}::test_the_mode_decides_which_method_is_called"],
        ),
        Row(
            "the rollout that an agent gets: mode, attempt, metadata, config",
            "works",
            [f"{AGENTS}::test_an_agent_gets_the_whole_rollout"],
        ),
        Row(
            "resources: several LLMs, `ProxyLLM`, `PromptTemplate`",
            "works",
            [f"{AGENTS}::test_resources_of_an_algorithm_arrive_as_they_are"],
        ),
        Row(
            "a returned number; `emit_reward`, several in one rollout",
            "works",
            [f"{LIGHTNING}::test_an_unchanged_agent", f"{RESULTS}::test_each_emitted_reward_stays_with_its_call"],
        ),
        Row("a list of spans as the result", "works", [f"{RESULTS}::test_returned_spans_are_kept"]),
        Row(
            "`@agl.operation`, `tracer.operation_context`",
            "works",
            [f"{RESULTS}::test_operations_are_spans_around_the_calls_inside"],
        ),
        Row(
            "raw OpenTelemetry spans of the agent",
            "works",
            [f"{RESULTS}::test_raw_opentelemetry_spans_are_recorded_around_the_calls_inside"],
        ),
        Row(
            "datasets: lists, data frames, Parquet, JSON Lines, CSV, Hugging Face datasets",
            "works with `lightning.tasks`",
            [f"{TASKS}::test_rows_of_every_form_are_tasks", f"{TASKS}::test_csv_and_texts"],
        ),
        Row(
            "rows with gold columns, for an agent that computes its own reward",
            "works with `lightning.agent(whole_rows=True)`; the manifest and the report say that it sees its gold",
            [f"{TASKS}::test_whole_rows_are_off_by_default_and_told"],
        ),
        Row("tasks that are texts", "works", [f"{FAULTS}::test_texts_are_tasks"]),
        Row("`Hook`", "works", [f"{AGENTS}::test_hooks_are_called_as_by_a_runner_of_agent_lightning"]),
        Row(
            "a failed rollout",
            "works with a kind of failure: it is no reward of 0.0",
            [f"{LIGHTNING}::test_an_agent_that_raises_is_a_typed_failure"],
        ),
    ],
    "Tracers and adapters": [
        Row("`AgentOpsTracer`", "works with `lightning.tracer`", [f"{LIGHTNING}::test_their_agentops_tracer"]),
        Row(
            "`OtelTracer`",
            "works with `lightning.tracer`; it sees no calls to the model, as upstream",
            [f"{LIGHTNING}::test_their_opentelemetry_tracer"],
        ),
        Row(
            "`TracerTraceToTriplet` with `agent_match`",
            "works with `lightning.adapter`",
            [f"{LIGHTNING}::test_their_adapter"],
        ),
        Row(
            "every setting of `TracerTraceToTriplet`: nodes, rewards in calls, reward policies, repair, duplicates",
            "works with `lightning.adapter`; tokens' texts and request headers are missing",
            [f"{TRIPLETS}::test_every_setting_gives_the_same_triplets"],
        ),
        Row(
            "`TraceToMessages`, with tools and tool calls",
            "works with `lightning.algorithm(adapter=...)`",
            [
                f"{LIGHTNING}::test_an_algorithm_gets_the_adapter_that_its_script_names",
                f"{SPANS}::test_an_agents_tools_reach_the_adapter_of_messages",
            ],
        ),
        Row(
            "upstream's own tests of adapters, on spans that went through agentrig",
            "works",
            [f"{SPANS}::test_upstreams_own_adapter_tests_pass_with_spans_that_went_through_a_trace"],
        ),
    ],
    "Algorithms": [
        Row(
            "`Algorithm`, asynchronous and synchronous",
            "works",
            [f"{LIGHTNING}::test_their_algorithm", f"{LIGHTNING}::test_their_synchronous_algorithm"],
        ),
        Row("classes, instances, `@agl.algo` with any of its parameters", "works", [f"{ALGORITHMS}::test_forms"]),
        Row(
            "train, validation and test rollouts",
            "works with a step for each version of the resources",
            [f"{FAULTS}::test_rollouts_are_filed_by_mode_and_step"],
        ),
        Row(
            "an agent, adapter or algorithm that breaks",
            "works with an error that names it; upstream hangs or goes on",
            [f"{FAULTS}::test_what_breaks_is_named"],
        ),
    ],
    "Scripts": [
        Row(
            "`Trainer(...)`, `fit`, `dev`",
            "works with `agentrig run SCRIPT`, or `from agentrig_lightning import Trainer`",
            [f"{TRAINER}::test_fit_runs_each_row_once_in_its_mode", f"{TRAINER}::test_dev_prints_every_span"],
        ),
        Row(
            "components as instance, class, path or dict; former names of arguments",
            "works",
            [
                f"{TRAINER}::test_fit_runs_each_row_once_in_its_mode",
                f"{TRAINER}::test_former_names_of_arguments_work_and_warn",
            ],
        ),
        Row("`hooks`", "works", [f"{TRAINER}::test_hooks_see_every_rollout"]),
        Row(
            "`port`, and a strategy's `server_port`",
            "works with the run's token; see [Runners that join a run](../how-to/machines.md#runners-that-join-a-run)",
            [f"{TRAINER}::test_a_port_serves_the_runs_store"],
        ),
        Row(
            "`agl.VERL(config)`",
            "works with agentrig-verl, which runs it with this configuration",
            [f"{TRAINER}::test_verl_of_a_script_is_the_algorithm_of_agentrig_verl"],
        ),
        Row(
            "`llm_proxy`: `LLMProxy` in every form",
            "works; litellm is imported only for it",
            [f"{TRAINER}::test_an_algorithm_gets_the_scripts_proxy_with_the_runs_store"],
        ),
        Row(
            "`trainer.store` after a run",
            "works",
            [f"{TRAINER}::test_fit_runs_each_row_once_in_its_mode"],
        ),
        Row(
            "`store`, `runner`, `max_rollouts`, `daemon=False`, a strategy's `role`",
            "does not work: agentrig brings its own store and runners; the error says what to use",
            [f"{TRAINER}::test_what_is_not_available_is_named_at_construction"],
        ),
    ],
    "Several machines": [
        Row(
            "runners that join a run at any time, and leave or die",
            "works with `agentrig train --store HOST:PORT` and `agentrig runner --store URL`",
            ["test_late_runners.py::test_one_joins_late_one_is_killed_and_one_leaves"],
        ),
        Row(
            "`LitAgentRunner` with a `LightningStoreClient`",
            "works with the run's token in the address",
            ["test_late_runners.py::test_agent_lightnings_own_runner_joins_by_hand"],
        ),
        Row(
            "`AGL_CURRENT_ROLE`, `AGL_SERVER_HOST`, `AGL_SERVER_PORT`",
            "works with the run's token",
            ["test_roles.py::test_a_role_is_honoured"],
        ),
        Row(
            "`AGL_MANAGED_STORE=0`: a store that another process keeps",
            "does not work: a run has a store of its own, which others can join",
            ["test_roles.py::test_what_train_cannot_be_is_refused"],
        ),
    ],
    "Upstream's examples": [
        Row(
            "`examples/spider`: `train_sql_agent.py`, and `LitSQLAgent` in `warmup`, `dev`, `grpo`, on our servers",
            "works, unmodified: three steps of `agentrig run train_sql_agent.py fast --algorithm grpo --model DIR "
            "--set algorithm.steps=3`; DIR has a model that `warmup` has taught two of the training tasks (one that "
            "answers none right ends the run in step 1)",
            [
                "upstream/test_training.py::test_the_agent_answers_in_dev",
                "upstream/test_training.py::test_the_training_script_takes_three_steps_of_grpo",
            ],
        ),
        Row("`examples/spider`: `LitSQLAgent` in `dev`", "works, same as upstream", [f"{UPSTREAM}[sql-dev]"]),
        Row(
            "`examples/spider`: `LitSQLAgent` in train, validation and test",
            "works, same as upstream",
            [f"{UPSTREAM}[sql-modes]"],
        ),
        Row("`examples/calc_x` (AutoGen, MCP)", "works, same as upstream", [f"{UPSTREAM}[calc-x]"]),
        Row("`examples/apo`: room selector", "works, same as upstream", [f"{UPSTREAM}[rooms]"]),
        Row("`examples/unsloth`: math agent (Agents SDK, MCP)", "works, same as upstream", [f"{UPSTREAM}[math]"]),
        Row("`examples/apo`: the first algorithm", "works, same as upstream", [f"{UPSTREAM}[first-algorithm]"]),
        Row("`Baseline` in `dev`, texts as tasks", "works, same as upstream", [f"{UPSTREAM}[baseline]"]),
        Row("`APO` with the room selector", "works, same as upstream", [f"{UPSTREAM}[apo]"]),
    ],
}


@cache
def _tests_of(file: Path) -> frozenset[str]:
    """Return the names of a file's tests, and `name[case]` for cases that are keys of a dict or strings in the file."""
    tree = ast.parse(file.read_text("utf-8"))
    names = [n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")]
    texts = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return frozenset([*names, *(f"{name}[{text}]" for name in names for text in texts)])


def problems(features: Mapping[str, Sequence[Row]]) -> list[str]:
    """Return what is wrong with rows: a verdict that says nothing, no test, or a test that does not exist."""
    found = []
    for row in (row for rows in features.values() for row in rows):
        if not row.verdict.startswith(STARTS):
            found.append(f"{row.feature}: the verdict {row.verdict!r} begins with none of {', '.join(STARTS)}")
        if not row.tests:
            found.append(f"{row.feature}: no test proves it")
        for test in row.tests:
            file, _, name = test.partition("::")
            if not (TESTS / file).is_file() or name not in _tests_of(TESTS / file):
                found.append(f"{row.feature}: agentrig-lightning has no test {test}")
    return found


def page() -> str:
    """Return the page's text.

    Raises:
        ValueError: A row has no proof.
    """
    wrong = problems(FEATURES)
    if wrong:
        raise ValueError("tests/support/lightning_features.py:\n  " + "\n  ".join(wrong))
    return "\n".join([HEAD, *_tables()])


def _tables() -> Iterator[str]:
    for title, rows in FEATURES.items():
        yield f"## {title}\n"
        yield "| feature | in agentrig | proof |"
        yield "| --- | --- | --- |"
        for row in rows:
            proof = ", ".join(f"`{test.rpartition('/')[2]}`" for test in row.tests)
            yield f"| {row.feature} | {row.verdict} | {proof} |"
        yield ""
