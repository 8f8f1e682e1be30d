"""verl's configuration, composed from the YAML of the installed verl."""

from __future__ import annotations

import importlib.util
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from agentrig_verl import schema
from agentrig_verl.recipes import ADDITIONS, recipes

from agentrig import Task
from agentrig.credit import GroupConfig, dr_grpo, grpo
from agentrig.errors import ConfigError
from agentrig.plan import resolve

README = Path(__file__).resolve().parents[1] / "README.md"

needs_yaml = pytest.mark.skipif(not schema.installed(), reason="verl is not installed; see docs/gpu.md")
pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of verl


@needs_yaml
@pytest.mark.parametrize("recipe", list(recipes()), ids=lambda r: r.name)
def test_every_key_of_every_recipe_is_verls(recipe):
    config = schema.compose(recipe.settings["algorithm"]["verl"])
    assert config.algorithm.adv_estimator == "grpo"
    assert config.actor_rollout_ref.rollout.n == 4
    assert config.actor_rollout_ref.actor.clip_ratio_high == 0.3


@needs_yaml
@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("trainer.test_frq", 1, 'Did you mean "trainer.test_freq"'),
        ("actor_rollout_ref.actor.lr", 1e-6, "actor_rollout_ref.actor.optim.lr"),
        ("trainr.nnodes", 1, 'Did you mean "trainer.nnodes"'),
        ("actor_rollout_ref.model.lora.rnk", 8, "actor_rollout_ref.model.lora_rank"),
        ("actor_rollout_ref.model.lora.rank", 8, "actor_rollout_ref.model.lora_rank"),
        ("data.train_batch_size", "many", "does not fit"),
        ("data.shuffle", "yes", "does not fit"),
        ("data.shuffle", "False", "Write shuffle = false; on the command line: algorithm.verl.data.shuffle=false"),
        ("actor_rollout_ref.rollout", 4, "is a table with the keys"),
        ("trainer.default_local_dir", "x", "checkpoints go to the run directory"),
        ("actor_rollout_ref.actor.use_prefix_grouper", True, "verl ignores it"),
        ("data.custom_cls.path", "x.py", "set [tasks]"),
        ("data.truncation", "left", "typed failure"),
        ("data.apply_chat_template_kwargs", {"enable_thinking": False}, "chat_template_kwargs"),
        ("actor_rollout_ref.rollout.multi_turn.enable", True, "set [agent]"),
        ("actor_rollout_ref.rollout.val_kwargs.do_sample", True, "val_kwargs.temperature alone"),
        ("actor_rollout_ref.model.custom_chat_template", "{{ x }}", "model's tokenizer"),
        ("reward", {"reward_manager": {"name": "dapo"}}, "reward.reward_manager.name cannot be set here: set [reward]"),
        ("reward.custom_reward_function.name", "f", "set [reward]"),
        ("algorithm.filter_groups.enable", True, "whole batches"),
        ("data.gen_batch_size", 64, "set data.train_batch_size"),
        ("trainer.critic_warmup", 5, "each step must train"),
        ("critic.optim.lr", 1e-3, "no critic"),
        ("distillation.enabled", True, "no teacher"),
        ("actor_rollout_ref.rollout.n", 0, "must be a whole number from 1"),
        ("data.train_batch_size", 32.5, "must be a whole number from 1"),
        ("trainer.total_epochs", None, "must be a whole number from 1"),
    ],
)
def test_a_wrong_key_is_an_error_with_the_right_one(key, value, told):
    with pytest.raises(ConfigError, match=r"\[algorithm\] verl") as error:
        schema.compose({key: value})
    assert told in str(error.value)


@needs_yaml
def test_a_key_may_be_set_to_verls_own_value():
    same = {"data.truncation": "error", "trainer.critic_warmup": 0, "reward": {"reward_manager": {"name": "naive"}}}
    assert schema.compose(same) == schema.compose({})


@needs_yaml
def test_each_key_that_is_refused_is_one_of_verls():
    known = schema.leaves(schema.compose({}))
    assert [key for key in schema.IGNORED if key.removesuffix(".") not in known] == []


@needs_yaml
def test_numbers_that_are_written_as_text_become_numbers():
    config = schema.compose({"actor_rollout_ref.actor.optim.lr": "1e-5", "trainer.total_epochs": "2"})
    assert config.actor_rollout_ref.actor.optim.lr == 1e-5
    assert config.trainer.total_epochs == 2
    assert type(config.trainer.total_epochs) is int


@needs_yaml
def test_a_key_that_agentrig_sets_is_not_silently_overwritten():
    with pytest.raises(ConfigError, match=r"agentrig itself sets transfer_queue\.enable, to True"):
        schema.compose({"transfer_queue.enable": False}, trusted={"transfer_queue.enable": True})
    assert schema.compose({"transfer_queue.enable": True}, trusted={"transfer_queue.enable": True})


@needs_yaml
def test_keys_of_other_libraries_are_not_checked():
    vllm = "actor_rollout_ref.rollout.engine_kwargs.vllm"
    config = schema.compose({f"{vllm}.enable_auto_tool_choice": True, "ray_kwargs.ray_init.num_gpus": 1})
    assert config.actor_rollout_ref.rollout.engine_kwargs.vllm.enable_auto_tool_choice is True
    assert config.ray_kwargs.ray_init.num_gpus == 1


@needs_yaml
def test_nested_and_dotted_keys_are_the_same():
    nested = {"actor_rollout_ref": {"rollout": {"n": 8}, "actor.optim.lr": 1e-5}}
    assert schema.flatten(nested) == {"actor_rollout_ref.rollout.n": 8, "actor_rollout_ref.actor.optim.lr": 1e-5}
    assert schema.compose(nested).actor_rollout_ref.rollout.n == 8
    with pytest.raises(ConfigError, match="set twice"):
        schema.flatten({"a": {"b": 1}, "a.b": 2})


@needs_yaml
def test_a_run_file_with_a_wrong_key_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(ConfigError, match=r"trainer\.test_freq"):
        resolve("fast", overrides=["algorithm.verl.trainer.test_frq=1"], uses={"hardware": "cuda"})


def test_an_override_changes_one_key_and_keeps_the_others():
    plan = resolve(
        "fast",
        overrides=["algorithm.verl.actor_rollout_ref.rollout.n=8"],
        uses={"hardware": "cuda", "tasks": "mini-sql"},
    )
    flat = schema.flatten(plan.configs["algorithm"].verl)
    assert flat["actor_rollout_ref.rollout.n"] == 8
    assert flat["data.train_batch_size"] == 32


def test_the_recipes_train_the_calls_that_write():
    assert resolve("fast", uses={"hardware": "cuda", "tasks": "mini-sql"}).configs["adapter"].match == "write"


def test_each_departure_is_in_the_readme():
    text = README.read_text("utf-8")
    assert [key for key in ADDITIONS if f"`{key}`" not in text] == []


@pytest.fixture
def composed(needs_verl, tmp_path):
    """Compose a recipe for a hardware, as a run does."""

    def compose(recipe="fast", hardware="cuda", checkpoint=None, **verl):
        overrides = [f"algorithm.verl.{k}={v}" for k, v in verl.items()]
        plan = resolve(recipe, overrides=overrides, uses={"hardware": hardware, "tasks": "mini-sql"})
        session = SimpleNamespace(
            hardware=plan.build("hardware"), directory=tmp_path, seed=7, checkpoint=checkpoint, calls=40,
            train_tasks=[Task(id=f"t{i}", input={}) for i in range(70)],
        )  # fmt: skip
        return plan.build("algorithm").compose(session)

    return compose


def test_a_run_connects_verl_to_its_tasks_seed_and_checkpoints(composed, tmp_path):
    from agentrig_verl.checks import check
    from agentrig_verl.dataset import TaskDataset

    config = composed()
    check(config)
    assert config.data.seed == config.actor_rollout_ref.rollout.seed == 7
    assert config.actor_rollout_ref.rollout.max_model_len == 4096 + 2048
    assert "hf_model" in config.actor_rollout_ref.actor.checkpoint.save_contents
    rows = TaskDataset(config.data.train_files)
    assert (len(rows), rows[3]["task_id"], rows[3]["index"]) == (70, "t3", 3)


def test_without_flash_attention_sdpa_is_chosen_and_reported_once(composed, caplog):
    from agentrig_verl import keys

    keys._said.clear()
    config = composed()
    composed()
    if importlib.util.find_spec("flash_attn") is None:
        assert config.actor_rollout_ref.model.override_config.attn_implementation == "sdpa"
        assert config.actor_rollout_ref.model.use_remove_padding is False
        assert sum("sdpa" in line for line in caplog.messages) == 1


def test_the_number_of_steps_decides_how_many_passes_there_are(composed):
    steps = {"trainer.total_training_steps": 9, "trainer.total_epochs": 1}  # 70 tasks: two steps of 32 in a pass
    assert composed(**steps).trainer.total_epochs == 5
    assert composed(**{**steps, "trainer.total_epochs": 8}).trainer.total_epochs == 8


def test_lora_is_served_merged(composed):
    config = composed(**{"actor_rollout_ref.model.lora_rank": 16})
    assert config.actor_rollout_ref.model.lora.merge is True
    assert composed().actor_rollout_ref.model.lora.merge is False


def test_resume_names_verls_own_state(composed, tmp_path):
    (tmp_path / "step-00012" / "trainer" / "global_step_12").mkdir(parents=True)
    config = composed(checkpoint=tmp_path / "step-00012")
    assert config.trainer.resume_mode == "resume_path"
    assert config.trainer.resume_from_path.endswith("step-00012/trainer/global_step_12")
    assert composed("qwen").trainer.val_before_train is True
    assert composed("qwen", checkpoint=tmp_path / "step-00012").trainer.val_before_train is False
    (tmp_path / "other").mkdir()
    with pytest.raises(ConfigError, match="another algorithm"):
        composed(checkpoint=tmp_path / "other")


def test_the_recipe_npu_gets_the_overrides_of_its_hardware(composed):
    config = composed("npu", "ascend")
    assert config.trainer.device == "npu"
    assert "tool_call_parser" not in config.actor_rollout_ref.rollout.engine_kwargs.vllm


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("trainer.v1.trainer_mode", "separate_async", "synchronous"),
        ("trainer.use_v1", "false", "old trainer"),
        ("actor_rollout_ref.rollout.name", "sglang", "must be vllm"),
        ("actor_rollout_ref.rollout.val_kwargs.n", 4, "must be 1"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size", 64, "more than data.train_batch_size, 32"),
        ("trainer.n_gpus_per_node", 3, "128 rollouts, which 3 GPUs cannot share"),
        ("actor_rollout_ref.actor.checkpoint.async_save", "true", "async_save"),
        (
            "actor_rollout_ref.actor.loss_agg_mode",
            "seq-mean-token-sum",
            "works on whole sequences.*merge=false",
        ),
        ("actor_rollout_ref.actor.policy_loss.loss_mode", "gspo", "merge=false"),
        ("algorithm.adv_estimator", "rloo", "merge=false"),
        ("algorithm.use_kl_in_reward", "true", "use_kl_loss"),
        ("actor_rollout_ref.rollout.n", 1, "n must be 2 or more"),
        ("actor_rollout_ref.rollout.temperature", 0, "must be above 0"),
        ("algorithm.rollout_correction.rollout_is", "sequence", "merge=false"),
        ("algorithm.rollout_correction.rollout_rs", "seq_mean_k3", "merge=false"),
        ("algorithm.adv_estimator", "grppo", 'Did you mean "grpo"'),
        ("algorithm.adv_estimator", "gae", "needs a critic"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode", "gspoo", 'Did you mean "gspo"'),
        ("actor_rollout_ref.actor.strategy", "megatron", "strategy is megatron"),
        ("data.train_batch_size", 128, "the training split has 70"),
    ],
)
def test_impossible_settings_are_refused(composed, key, value, told):
    from agentrig_verl.checks import check

    with pytest.raises(ConfigError, match=told):
        check(composed(**{key: value}))
    if "merge=false" in told:
        check(composed(**{key: value}), merge=False)


def test_loggers_are_checked_before_anything_starts(composed, tmp_path, monkeypatch):
    from agentrig_verl.checks import check_loggers

    key = "trainer.logger"
    check_loggers(composed(**{key: '["console", "file"]'}))
    with pytest.raises(ConfigError, match=r'no logger "consol".*Did you mean "console"'):
        check_loggers(composed(**{key: '["consol"]'}))
    with pytest.raises(ConfigError, match="pip install clearml"):
        check_loggers(composed(**{key: '["clearml"]'}))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    # A package of that name: W&B itself need not be installed.
    (tmp_path / "wandb.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    config = composed(**{key: '["wandb"]'})
    with pytest.raises(ConfigError, match=r"set WANDB_API_KEY .* WANDB_MODE=offline"):
        check_loggers(config)
    monkeypatch.setenv("WANDB_MODE", "offline")
    check_loggers(config)
    monkeypatch.delenv("WANDB_MODE")
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret")
    check_loggers(config)


def test_the_servers_options_are_kept_for_evaluation():
    from agentrig_verl.keys import served_with

    rollout, model = "actor_rollout_ref.rollout", "actor_rollout_ref.model"
    flat = {
        f"{rollout}.engine_kwargs.vllm.enable_auto_tool_choice": True,
        f"{rollout}.engine_kwargs.vllm.tool_call_parser": "hermes",
        f"{rollout}.engine_kwargs.vllm.disable_custom_all_reduce": False,
        f"{rollout}.tensor_model_parallel_size": 2,
        f"{model}.trust_remote_code": False,
    }
    assert served_with(flat) == {
        "enable-auto-tool-choice": True, "tool-call-parser": "hermes", "tensor-parallel-size": 2,
    }  # fmt: skip


def test_a_credit_is_refused_where_verl_takes_its_own_advantages(composed):
    from agentrig_verl.checks import check

    halved = partial(grpo, config=GroupConfig(negative_scale=0.5))
    check(composed(), credit=halved)
    check(composed(**{"algorithm.adv_estimator": "rloo"}), merge=False)
    for credit in (halved, partial(dr_grpo, config=GroupConfig()), lambda groups: groups):
        with pytest.raises(ConfigError, match=r"adv_estimator rloo takes verl's own advantages, so what \[credit\]"):
            check(composed(**{"algorithm.adv_estimator": "rloo"}), credit=credit, merge=False)
    undivided = {"algorithm.norm_adv_by_std_in_grpo": "false"}
    check(composed(**undivided), credit=partial(dr_grpo, config=GroupConfig()))
    with pytest.raises(ConfigError, match=r'norm_adv_by_std_in_grpo = false would change nothing.*use = "dr-grpo"'):
        check(composed(**undivided))


def test_loggers_write_into_the_run_directory_unless_told_otherwise(tmp_path, monkeypatch):
    from agentrig_verl.algorithm import logging_into

    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    monkeypatch.setenv("SWANLAB_LOG_DIR", "elsewhere")
    with logging_into(tmp_path):
        assert os.environ["TENSORBOARD_DIR"] == str(tmp_path / "tensorboard")
        assert os.environ["SWANLAB_LOG_DIR"] == "elsewhere"
    assert "TENSORBOARD_DIR" not in os.environ
    assert os.environ["SWANLAB_LOG_DIR"] == "elsewhere"


@pytest.mark.usefixtures("needs_verl")
def test_the_doctor_looks_at_settings_and_loggers(capsys):
    from agentrig_verl.checks import check_settings

    from agentrig.findings import Situation

    def finding(*overrides):
        plan = resolve("fast", overrides=overrides, uses={"hardware": "cuda", "tasks": "mini-sql"})
        (found,) = check_settings(Situation(hardware=plan.build("hardware"), plan=plan))
        return found.result, found.evidence

    console = 'algorithm.verl.trainer.logger=["console"]'
    assert finding(console)[0] == "ok"
    assert capsys.readouterr().out == ""  # the doctor's own output may be JSON
    result, evidence = finding(console, "algorithm.verl.algorithm.adv_estimator=grppo")
    assert (result, 'Did you mean "grpo"' in evidence) == ("problem", True)
