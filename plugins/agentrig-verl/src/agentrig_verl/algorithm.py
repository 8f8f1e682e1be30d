"""The algorithm: composes verl's configuration, joins Ray, and runs verl's v1 trainer with agentrig's rollouts."""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from agentrig import AgentrigError, Endpoint
from agentrig.algorithms import Session
from agentrig.device_memory import GONE, shortage
from agentrig.errors import ConfigError, OutOfMemory
from agentrig.hardware import Hardware
from agentrig.pools import MakePool
from agentrig.runners.jobs import AgentPlan
from agentrig.tokenizers import disagreement
from agentrig_verl import schema, sharing, symbols
from agentrig_verl.checkpoints import whole_model
from agentrig_verl.checks import check, check_loggers
from agentrig_verl.keys import changed, keys_of, memory_plan, served_with
from agentrig_verl.planning import DYNAMIC, SHARE, TOKENS
from agentrig_verl.pool import PlacedPool
from agentrig_verl.schema import ACTOR, MODEL, ROLLOUT
from agentrig_verl.settings import VerlConfig

if TYPE_CHECKING:
    from agentrig_verl.manager import LoopManager
    from agentrig_verl.planning import VerlPlan

log = logging.getLogger(__name__)

ENGINE_DIED = "EngineDeadError"
"""What vLLM's server raises when its engine process has died. Ray wraps it as an error of the call."""

HOST = "ray.exceptions.OutOfMemoryError"
"""What Ray raises where it ended a process because the host has too little memory."""


@attrs.define(eq=False)
class Verl:
    """Implements `agentrig.algorithms.Algorithm`."""

    config: VerlConfig
    _pool: PlacedPool | None = None

    def pool(self, plan: AgentPlan, *, make: MakePool | None = None, **settings: Any) -> PlacedPool:
        """Return the runners' pool. The runners start after `run` has joined Ray.

        Args:
            make: Makes the runners that `[runners] use` names; None: `algorithm.runners` says where they run.
        """
        self._pool = PlacedPool(plan, make=make, **settings)
        return self._pool

    def run(self, session: Session) -> None:
        """Train.

        Raises:
            ConfigError: The verl version is not supported, a key does not exist in verl, or settings contradict each
                other.
            AgentrigError: A worker or a server died or failed; the message says how to resume.
        """
        symbols.require()
        composed = self.compose(session)
        if (plan := self._plan(session)) is not None:
            session.note(plan.describe(plan.choose()))
            session.record("memory", plan.facts())
        check(composed, merge=self.config.merge, credit=session.credit)
        check_loggers(composed)
        import ray
        import transfer_queue as tq
        from omegaconf import OmegaConf

        from agentrig_verl.trainer import Trainer, shut_down

        OmegaConf.resolve(composed)
        forest, why = sharing.choose(self.config.engine, composed, device=session.hardware.torch_device)
        session.note(why)
        model = composed.actor_rollout_ref.model
        warn_of_tokenizer(model.tokenizer_path or model.path, trust_remote_code=model.trust_remote_code)
        nodes = self.connect(composed, session.hardware)
        trainer: Trainer | None = None
        try:
            self.place(nodes)
            tq.init(composed.transfer_queue)
            trainer = Trainer(composed, session, forest=forest)
            trainer.init()
            with logging_into(session.directory):
                trainer.fit(self.manager(composed, session, trainer.endpoints))
        except (ray.exceptions.RayActorError, ray.exceptions.RayTaskError) as error:
            if memory := out_of_memory(str(error), session.resumes):
                raise memory from error
            alive = isinstance(error, ray.exceptions.RayTaskError) and ENGINE_DIED not in str(error)
            what = "failed" if alive else "died"
            raise AgentrigError(
                f"a worker or server of verl {what}: {str(error).strip()}\n  The unfinished step is lost. "
                f"Resume from the last checkpoint with: {session.resumes}"
            ) from error
        finally:
            if self._pool is not None:
                self._pool.withdraw()  # before Ray shuts down: its actors end with it
            cause = sys.exception()
            shut_down(trainer, failed=f"{type(cause).__name__}: {cause}" if cause else "")

    def connect(self, composed: Any, hardware: Hardware) -> int:
        """Join Ray, or start it; return its number of nodes."""
        from agentrig_verl import cluster

        return cluster.connect(composed, hardware, logs=self.config.worker_logs)

    def place(self, nodes: int) -> None:
        """Start the runners where the settings say, on a cluster of that many nodes."""
        if self._pool is not None:
            on_ray = self.config.runners == "ray" or (self.config.runners == "auto" and nodes > 1)
            self._pool.place(on_ray, cpus=self.config.runner_cpus)

    def manager(self, composed: Any, session: Session, endpoints: Sequence[Endpoint]) -> LoopManager:
        """Return what runs the agent on each step's prompts."""
        from agentrig_verl.manager import LoopManager

        return LoopManager(composed, session, endpoints, merged=self.config.merge)

    def serve(self, *, hardware: Hardware, checkpoint: Path | None) -> AbstractContextManager[Endpoint]:
        """Serve a checkpoint, or the starting model, with vLLM."""
        from agentrig_verl.serve import serve_model

        flat = changed(self.config, hardware)
        prompt, response = flat.get("data.max_prompt_length"), flat.get("data.max_response_length")
        return serve_model(
            str(whole_model(checkpoint)) if checkpoint else self._model(),
            sampling={"temperature": 0.0, **({"max_tokens": response} if response else {})},
            max_model_len=flat.get(f"{ROLLOUT}.max_model_len") or (prompt + response if prompt and response else None),
            memory=self._share(flat, hardware),
            options=served_with(flat),
        )

    def _share(self, flat: Mapping[str, Any], hardware: Hardware) -> float:
        """Return the share of a device that a server alone gets: 0.6 of what the run may take, unless it is set."""
        limit = hardware.memory_limit
        total = min((device.memory for device in hardware.probe().devices if device.memory), default=limit)
        return flat.get(f"{ROLLOUT}.gpu_memory_utilization") or 0.6 * (min(limit / total, 1.0) if limit else 1.0)

    def compose(self, session: Session) -> Any:
        """Return verl's whole configuration for a run."""
        flat = keys_of(self.config, session.hardware, plan=self._plan(session))
        if session.checkpoint is not None:
            # verl would validate the checkpoint again; its own step has validated it.
            flat["trainer.val_before_train"] = False
        composed = schema.compose(flat, trusted=self._trusted(session, flat))
        batch, n = composed.data.train_batch_size, len(session.train_tasks)
        if n < batch:
            raise ConfigError(
                f"[algorithm] verl: a step takes {batch} tasks (data.train_batch_size), the training split has {n}: "
                "lower data.train_batch_size, or raise run.train_tasks"
            )
        if composed.trainer.total_training_steps:
            # verl ends at the lower of steps and epochs, and at the epochs without a last checkpoint.
            passes = math.ceil(composed.trainer.total_training_steps / (n // batch))
            composed.trainer.total_epochs = max(composed.trainer.total_epochs, passes)
        return composed

    def _plan(self, session: Session) -> VerlPlan | None:
        """Return the memory plan."""
        forest, _ = sharing.foreseen(self.config, session.hardware) or (False, "")  # verl's own engine needs more
        return memory_plan(self.config, session.hardware, calls=session.calls, forest=forest)

    def _model(self) -> str:
        if not self.config.model:
            raise ConfigError("[algorithm] verl needs model: a Hugging Face directory, or a name on the Hub")
        path = Path(self.config.model).expanduser()
        return str(whole_model(path.resolve())) if path.is_dir() else self.config.model

    def _trusted(self, session: Session, flat: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys that connect verl to the run. Keys that a recipe may set, and has set, are left out."""
        from agentrig_verl import dataset, extension

        index = session.directory / "verl-tasks.json"
        dataset.write_index(index, list(session.train_tasks))
        keys: dict[str, Any] = {
            f"{MODEL}.path": self._model(),
            "data.train_files": str(index),
            "data.val_files": str(index),
            "data.custom_cls.path": dataset.MODULE,
            "data.custom_cls.name": dataset.CLASS,
            "transfer_queue.enable": True,
            "trainer.resume_mode": "disable",
        }
        if "trainer.experiment_name" not in flat:
            keys["trainer.experiment_name"] = session.directory.resolve().name
        keys.update({k: session.seed for k in ("data.seed", f"{ROLLOUT}.seed") if k not in flat})
        if flat.get(f"{MODEL}.lora_rank"):
            keys[f"{MODEL}.lora.merge"] = True
        keys[f"{ACTOR}.checkpoint.save_contents"] = ["model", "optimizer", "extra", "hf_model"]
        if session.checkpoint is not None:
            from agentrig_verl.checkpoints import trainer_state

            keys["trainer.resume_mode"] = "resume_path"
            keys["trainer.resume_from_path"] = str(trainer_state(session.checkpoint))
            keys[f"{ACTOR}.checkpoint.load_contents"] = ["model", "optimizer", "extra"]
        workers = f"{ROLLOUT}.engine_kwargs.vllm.worker_extension_cls"
        if flat.get(f"{ROLLOUT}.name", "vllm") == "vllm" and workers not in flat:
            keys[workers] = extension.CLASS
        prompt, response = flat.get("data.max_prompt_length"), flat.get("data.max_response_length")
        if f"{ROLLOUT}.max_model_len" not in flat and prompt and response:
            keys[f"{ROLLOUT}.max_model_len"] = prompt + response
        return keys


def out_of_memory(text: str, resumes: str) -> OutOfMemory | None:
    """Return what to raise for a worker's error if its device ran out of memory, else None.

    Args:
        text: What Ray says: the worker's traceback.
        resumes: The command that resumes the run.
    """
    lines = [line for line in text.splitlines() if GONE.search(line) and HOST not in line]
    if not lines:
        return None
    said = max(lines, key=len)  # some have the error's class only
    cure = f"Set {SHARE} lower" if "/vllm/" in text else f"Set {TOKENS} lower, with {DYNAMIC} = true"
    return OutOfMemory(
        f"a worker of verl: its device ran out of memory: {shortage(said, 'the worker')}\n  {cure}, in "
        f"[algorithm.verl]. The unfinished step is lost. Resume from the last checkpoint with: {resumes}"
    )


def warn_of_tokenizer(model: str, *, trust_remote_code: bool = False) -> None:
    """Log a warning when verl and vLLM will not use the model's own tokenizer."""
    found = disagreement(model, trust_remote_code=trust_remote_code)
    if found is not None:
        log.warning(
            "verl and vLLM tokenize text differently from %s/tokenizer.json (%s): a model that was trained with that "
            "file gives worse answers here. Train it with its model family's pre-tokenizer.",
            *(model, found),
        )


FOLDERS: Mapping[str, str] = {"TENSORBOARD_DIR": "tensorboard", "SWANLAB_LOG_DIR": "swanlab", "WANDB_DIR": "."}
"""The variable that sets each logger's folder, and that folder's name in the run directory.

W&B creates its own folder, `wandb`, inside the one it is given.
"""


@contextmanager
def logging_into(directory: Path) -> Iterator[None]:
    """Make verl's loggers write into the run directory. Variables that are already set are kept."""
    own = {name: str(directory / folder) for name, folder in FOLDERS.items() if name not in os.environ}
    os.environ.update(own)
    try:
        yield
    finally:
        for name in own:
            os.environ.pop(name, None)
