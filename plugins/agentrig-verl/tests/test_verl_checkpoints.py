from __future__ import annotations

import json

import pytest
from agentrig_verl.algorithm import Verl
from agentrig_verl.settings import VerlConfig

from agentrig.errors import ConfigError
from agentrig.hardware import Cpu

torch = pytest.importorskip("torch")


@pytest.fixture
def tiny():
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.3, tie_word_embeddings=False,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).eval()


def verl_saved(path, model, state, step, meta=None):
    """Lay files out as verl's checkpoint manager does."""
    from safetensors.torch import save_file

    folder = path / "trainer" / f"global_step_{step}" / "actor" / "huggingface"
    folder.mkdir(parents=True)
    save_file({k: v.contiguous().clone() for k, v in state.items()}, str(folder / "model.safetensors"))
    model.config.save_pretrained(str(folder))
    if meta:
        (folder.parent / "lora_train_meta.json").write_text(json.dumps(meta))


def logits(model):
    with torch.no_grad():
        return model(torch.arange(10)[None]).logits


def test_a_checkpoint_is_a_directory_that_transformers_loads(tiny, tmp_path):
    from agentrig_verl.checkpoints import finish_checkpoint, trainer_state
    from transformers import AutoModelForCausalLM

    base = tmp_path / "base"
    base.mkdir()
    (base / "tokenizer_config.json").write_text('{"chat_template": "as it was"}')
    out = tmp_path / "step-00003"
    verl_saved(out, tiny, tiny.state_dict(), 3)
    finish_checkpoint(out, 3, base=str(base))
    loaded = AutoModelForCausalLM.from_pretrained(str(out), dtype=torch.float32).eval()
    assert torch.equal(logits(loaded), logits(tiny))
    assert "as it was" in (out / "tokenizer_config.json").read_text()
    assert trainer_state(out).name == "global_step_3"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
def test_adapters_are_merged_as_peft_merges_them(tiny, tmp_path):
    from agentrig_verl.checkpoints import finish_checkpoint
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = get_peft_model(tiny, LoraConfig(r=4, lora_alpha=12, target_modules="all-linear")).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    out = tmp_path / "step-00001"
    verl_saved(out, tiny, model.state_dict(), 1, meta={"r": 4, "lora_alpha": 12})
    finish_checkpoint(out, 1, base="a/name-on-the-hub")
    loaded = AutoModelForCausalLM.from_pretrained(str(out), dtype=torch.float32).eval()
    assert torch.allclose(logits(loaded), logits(model), atol=1e-5)
    with model.disable_adapter():
        assert not torch.allclose(logits(loaded), logits(model), atol=1e-2)


def test_a_merge_is_computed_in_fp32_and_stored_in_the_models_dtype(tmp_path):
    from agentrig_verl.checkpoints import merge_adapter
    from safetensors.torch import load_file, save_file

    torch.manual_seed(0)
    weight, a, b = (torch.randn(*shape).to(torch.bfloat16) for shape in ((48, 64), (4, 64), (48, 4)))
    names = ("base_layer.weight", "lora_A.default.weight", "lora_B.default.weight")
    layer = "base_model.model.model.layers.0.mlp.up_proj"
    state = {f"{layer}.{name}": tensor for name, tensor in zip(names, (weight, a, b), strict=True)}
    save_file({**state, "base_model.model.model.norm.weight": weight[0].clone()}, str(tmp_path / "a.safetensors"))
    merge_adapter(tmp_path, {"r": 4, "lora_alpha": 12})
    merged = load_file(str(tmp_path / "model.safetensors"))
    exact = (weight.float() + 3.0 * (b.float() @ a.float())).to(torch.bfloat16)
    assert merged.keys() == {"model.layers.0.mlp.up_proj.weight", "model.norm.weight"}
    assert torch.equal(merged["model.layers.0.mlp.up_proj.weight"], exact)
    assert torch.equal(merged["model.norm.weight"], weight[0])


def test_a_checkpoint_without_weights_is_an_error(tmp_path):
    from agentrig_verl.checkpoints import finish_checkpoint

    (tmp_path / "trainer" / "global_step_1" / "actor" / "huggingface").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="no weights"):
        finish_checkpoint(tmp_path, 1, base="")


def test_another_algorithms_checkpoint_cannot_be_resumed(tmp_path):
    from agentrig_verl.checkpoints import trainer_state

    with pytest.raises(ConfigError, match=r"algorithm\.model instead of --resume"):
        trainer_state(tmp_path)


def test_a_checkpoint_of_adapters_is_no_model_to_start_from_or_to_serve(tmp_path):
    (tmp_path / "starting_model.json").write_text("{}")
    for ask in (
        Verl(VerlConfig(model=str(tmp_path)))._model,
        lambda: Verl(VerlConfig(model="m")).serve(hardware=Cpu(), checkpoint=tmp_path),
    ):
        with pytest.raises(ConfigError, match=r"holds adapters only\. .* agentrig export "):
            ask()
