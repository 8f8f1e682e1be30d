"""Former import paths: each works until 0.3, with a warning that names the new one."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from agentrig.renamed import moved_to

_TABLE = """
agentrig.agents > agentrig.endpoints
    Endpoint without_proxy
agentrig.algorithms > agentrig.rollouts
    Mode OnGroups Rollout
agentrig.builtin > agentrig.plugins.builtin
    own register_hardware register_rewards
agentrig.checks > agentrig.run.guards
    CONSTRAINTS check_failures check_rewards check_sampling
    check_triplets warn_of_constraints warn_of_sampling
agentrig.checks > agentrig.run.metrics
    count_failures count_nodes reason_of
agentrig.cli > agentrig.cli.commands.data
    DataGroup convert_command data
agentrig.cli > agentrig.cli.commands.dev
    dev
agentrig.cli > agentrig.cli.commands.eval
    eval_
agentrig.cli > agentrig.cli.commands.export
    export
agentrig.cli > agentrig.cli.commands.plugins
    plugins_ show
agentrig.cli > agentrig.cli.commands.report
    report
agentrig.cli > agentrig.cli.commands.train
    train
agentrig.cli > agentrig.cli.groups
    Group NearestGroup
agentrig.cli > agentrig.cli.options
    asked configured find_checkpoint make_plan measured_server model_options open_nothing
    stdout_to_stderr warn_of_failures
agentrig.config > agentrig.plan
    Plan RunSettings RunnerSettings SECTIONS parse_override read_run_file resolve to_toml
agentrig.config > agentrig.settings
    setting structure
agentrig.doctor > agentrig.cli.commands.doctor
    doctor
agentrig.doctor > agentrig.findings
    Check Finding Result
agentrig.doctor > agentrig.hardware.tools
    Answer ask
agentrig.doctor.cluster > agentrig_verl.ray_checks
    NEEDED_BY_WORKERS RayProcess SOCKET_PATH address_file check_ray_cluster check_ray_sockets
    check_ray_token ray_processes
agentrig.doctor.command > agentrig.cli.commands.doctor
    doctor
agentrig.doctor.command > agentrig.doctor.examination
    CHECKS could_start examine look
agentrig.doctor.findings > agentrig.doctor.situation
    Situation TORCH_REPORT
agentrig.doctor.findings > agentrig.findings
    Check Finding Result
agentrig.doctor.software > agentrig_verl.checks
    ACCEPTS_VLLM check_verl_vllm
agentrig.doctor.subprocesses > agentrig.hardware.tools
    Answer ask
agentrig.evaluate > agentrig.endpoints
    environment_endpoint
agentrig.evaluate > agentrig.run.evaluate
    CHUNK Evaluation eval_tasks evaluate prediction
agentrig.hardware > agentrig.plugins.builtin
    cpu_spec
agentrig.hardware > agentrig_verl.workers
    ray_environment
agentrig.hardware.cpu > agentrig.plugins.builtin
    cpu_spec
agentrig.hardware.workers > agentrig_verl.workers
    HOOK SETUP_VARIABLE ray_environment resolve set_up_worker set_up_worker_path
agentrig.hookspecs > agentrig.plugins.hookspecs
    hookspec on_rollout_end on_run_end on_run_error on_run_start on_step_end register_adapters
    register_agents register_algorithms register_hardware register_recipes register_rewards
    register_tasks
agentrig.plugins > agentrig.plugins.components
    Component PluginInfo
agentrig.plugins > agentrig.plugins.loading
    GROUP blocked_names load load_file
agentrig.plugins > agentrig.plugins.registry
    BLOCK_VARIABLE Registry
agentrig.pools > agentrig.runners.pools
    BasePool READY_S SPAWN_LIMIT Worker
agentrig.recording > agentrig.tracing.recorder
    OUTPUT_LIMIT Recorder current plain span
agentrig.recording > agentrig.tracing.recording
    install recording
agentrig.report.stories > agentrig.report.sample_traces
    Step TEXT_LIMIT cut question reply_of steps_of
agentrig.rewards > agentrig.runners.scorer
    GRACE_S Scorer
agentrig.rollouts > agentrig.runners.engine
    RolloutEngine
agentrig.run > agentrig.run.resume
    resume_plan
agentrig.run > agentrig.run.setup
    agent_plan make_engine ready_hardware
agentrig.run > agentrig.run.splits
    ROLES load_splits split_warnings
agentrig.run > agentrig.run.training
    train
agentrig.rundir > agentrig.run.checkpoints
    KEPT_CHECKPOINTS
agentrig.rundir > agentrig.run.directory
    RunDirectory
agentrig.rundir > agentrig.run.manifest
    PACKAGES manifest manifest_changes
agentrig.rundir > agentrig.run.rows
    row_of
agentrig.runtime > agentrig.runners.lightning_resources
    endpoint_of lightning_llm
agentrig.runtime > agentrig.runners.lightning_spans
    final_reward from_lightning to_lightning
agentrig.runtime > agentrig.runners.lightning_runner
    IDLE_POLL_S PoolRunner
agentrig.runtime > agentrig.runners.lightning_store
    Store
agentrig.runtime > agentrig.runners.lightning_tracer
    RecorderTracer SpanAdapter
agentrig.runtime > agentrig.runners.runtime
    MODES Runtime
agentrig.session > agentrig.figures
    mean
agentrig.session > agentrig.run.session
    RunSession
agentrig.specs > agentrig.plugins.specs
    AdapterSpec AgentSpec AlgorithmSpec HardwareSpec KINDS NoConfig RecipeSpec RewardSpec Spec
    TasksSpec
agentrig.workers > agentrig.runners.attempt
    CLIENTS failure_kind json_values run_agent running_loop
agentrig.workers > agentrig.runners.jobs
    AgentPlan Job Result
agentrig.workers > agentrig.runners.processes
    PRELOAD Pool worker_main
agentrig.report.text > agentrig.figures
    counted percent
agentrig_spider.rewards.execution > agentrig_spider.rewards.exec_match
    MAX_ROWS
agentrig_spider.rewards.execution > agentrig_spider.sandbox.query
    HEAP_BYTES MAX_FILE_BYTES MAX_RESULT_BYTES NeedsWorker QueryTimeout QueryTooLarge WorkerDied
    looks_plain run_query
agentrig_spider.rewards.guard > agentrig_spider.sandbox.guard
    FORBIDDEN_FUNCTIONS Guard PLAIN_FUNCTIONS set_limits
agentrig_spider.rewards.sandbox > agentrig_spider.sandbox.pool
    GRACE_S KEEP_IDLE MAX_WORKERS READY WORKERS Worker WorkerLost WorkerTimeout Workers
agentrig_spider.rewards.sqlite > agentrig_spider.sandbox.connection
    CHECKS Connection Escalate Fetched Fingerprint MAX_CELL_BYTES POOL Pool QueryFailed Row SLICE_S
    STEPS_PER_CHECK fingerprint is_damage open_read_only read_only_uri
agentrig_spider.rewards.worker > agentrig_spider.sandbox.worker
    BASE_BYTES CELL_BYTES KILL_AFTER_S STEPS_PER_CHECK TYPE_CHECKING bound_memory guard main mapped_bytes
    read_exactly run
agentrig_grpo.attention > agentrig.forest.attention
    Blocks Layout NAME Part Varlen forest_attention layout_of use
agentrig_grpo.forest > agentrig.forest.segments
    Forest Pack Sample Segment Tokens grow packs rows
agentrig_grpo.scoring > agentrig.forest.scoring
    prepare score shares_tokens token_entropy token_logprobs
agentrig_grpo.sequences > agentrig.forest.sequences
    Batch Sample collate packed
agentrig_grpo.advantages > agentrig.credit
    EPSILON LARGEST group_advantages
agentrig_verl.credit > agentrig.credit
    EPSILON Weighting advantages
"""
"""`former module > new module`, and below it the names that went there."""


def _read(table: str) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for line in table.strip().splitlines():
        if not line.startswith(" "):
            old, _, new = line.partition(" > ")
        else:
            found.setdefault(old, {}).update(dict.fromkeys(line.split(), new))
    return found


MOVED: Mapping[str, Mapping[str, str]] = _read(_TABLE)
"""Former module to its names, and the module that has each of them now."""

RENAMED: Mapping[tuple[str, str], tuple[str, str]] = {
    ("agentrig.lightning_import", "open_door"): ("agentrig.lightning_import", "skip_litellm"),
    ("agentrig.report.samples", "Parting"): ("agentrig.report.samples", "RewardDisagreement"),
    ("agentrig.report.samples", "partings"): ("agentrig.report.samples", "reward_disagreements"),
    ("agentrig.report.stories", "STORY"): ("agentrig.report.sample_traces", "SAMPLE_COLUMNS"),
    ("agentrig.report.stories", "Story"): ("agentrig.report.sample_traces", "SampleTrace"),
    ("agentrig.report.stories", "story"): ("agentrig.report.sample_traces", "sample_trace"),
    ("agentrig.run.guards", "DRAWN_BY"): ("agentrig.run.guards", "SAMPLING_FIELDS"),
    ("agentrig.run.guards", "SERVERS_OWN"): ("agentrig.run.guards", "SERVER_DEFAULTS"),
    ("agentrig.checks", "DRAWN_BY"): ("agentrig.run.guards", "SAMPLING_FIELDS"),
    ("agentrig.checks", "SERVERS_OWN"): ("agentrig.run.guards", "SERVER_DEFAULTS"),
    ("agentrig.cli", "KINDS"): ("agentrig.plugins.specs", "RUN_KINDS"),
    ("agentrig.config", "COMPONENT_SECTIONS"): ("agentrig.plugins.specs", "RUN_KINDS"),
    ("agentrig.report.findings", "CONSTANT_LIMIT"): ("agentrig.report.findings", "ZERO_VARIANCE_LIMIT"),
}
"""Former module and name to the present ones, where the name itself has changed."""

ENDED: Mapping[tuple[str, str], str] = {
    ("agentrig.checks", "check_finite"): "a session's end_step checks it",
    ("agentrig.checks", "check_weights"): "a session's end_step checks it",
    ("agentrig.doctor.cluster", "uses_ray"): "give the check to the spec of the component that needs Ray",
    ("agentrig.doctor.place", "check_open_files"): "agentrig_verl.ray_checks.check_place looks at the limit",
    ("agentrig.doctor.place", "open_files"): "resource.getrlimit(resource.RLIMIT_NOFILE)[0] gives it",
    ("agentrig.plugins", "REGISTER_HOOKS"): "agentrig.plugins.specs.KINDS has the specs, each with its hook",
    ("agentrig.report.canvas", "STAND_INS"): "a page draws its own curves, agentrig.report.curves",
    ("agentrig.report.canvas", "for_page"): "a page draws its own curves, agentrig.report.curves",
    ("agentrig.report.page", "CAPTIONS"): "each drawing of agentrig.report.curves has its caption",
    (
        "agentrig.run",
        "audit_reward",
    ): "agentrig.run.training.audit_scorers builds the audits with their scorers",
    ("agentrig.run", "interrupt_stops"): "agentrig.processes.ends.RunSignals handles the signals of a run",
    ("agentrig.session", "accuracy_of"): "agentrig.algorithms.Measurement.of counts what is correct",
    ("agentrig_spider.rewards.sandbox", "START_S"): "a worker's start now has the query's own deadline",
}
"""Former module and name of what nothing replaces one to one, and what to use; `agentrig._former` has it until 0.3."""


def former(module: str) -> Callable[[str], Any]:
    """Return a `__getattr__` for a module from which names have moved."""

    def getattr_(name: str) -> Any:
        moved = MOVED.get(module, {})
        if (module, name) in RENAMED:
            return moved_to(".".join(RENAMED[module, name]), module, name)
        if (module, name) in ENDED:
            advice = f"{module}.{name} works until agentrig 0.3: {ENDED[module, name]}"
            return moved_to(f"agentrig._former.{name}", module, name, advice)
        if name in moved:
            return moved_to(f"{moved[name]}.{name}", module, name)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return getattr_


class _Finder:
    """Finds and loads former modules that no longer exist; it is searched last, so existing modules are found first.

    It does not inherit from `importlib.abc`, which would make every command start later.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        loader: Any = self
        return importlib.machinery.ModuleSpec(fullname, loader) if fullname in MOVED else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """Leave it to Python."""

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__getattr__"] = former(module.__name__)


def install() -> None:
    """Let former modules be imported; called once, when agentrig is imported."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
