import pytest

from agentrig.hardware.memory import GB, KNOWN, ModelShape, Workload, estimate

SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 500,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_counted_as_transformers_builds_them(tied):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = {**SMALL, "tie_word_embeddings": tied}
    model = Qwen2ForCausalLM(Qwen2Config(**config))
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    shape = ModelShape.from_config(config)
    assert shape.parameters == matrices
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(matrices, rel=0.02)


def test_a_config_of_another_kind_has_no_shape():
    assert ModelShape.from_config({"d_model": 512}) is None


def test_the_cache_counts_keys_and_values():
    assert ModelShape.from_config(SMALL).kv_bytes(10) == 2 * 2 * 2 * 16 * 2 * 10


def test_the_known_models_have_their_published_sizes():
    sizes = {name.rpartition("/")[2]: shape.parameters / GB for name, shape in KNOWN.items()}
    assert sizes["qwen2.5-coder-0.5b-instruct"] == pytest.approx(0.49, abs=0.01)
    assert sizes["qwen2.5-coder-1.5b-instruct"] == pytest.approx(1.54, abs=0.01)
    assert sizes["qwen2.5-coder-3b-instruct"] == pytest.approx(3.09, abs=0.01)
    assert sizes["llama-3.2-1b-instruct"] == pytest.approx(1.24, abs=0.01)


def test_lora_and_shards_make_it_smaller():
    name = "qwen/qwen2.5-coder-1.5b-instruct"
    full = estimate(KNOWN[name], Workload(model=name, micro_batch=1, context=1024))
    lora = estimate(KNOWN[name], Workload(model=name, micro_batch=1, context=1024, trained=0.01, weight_bytes=2))
    halves = estimate(KNOWN[name], Workload(model=name, micro_batch=1, context=1024, shards=2))
    assert lora.floor < full.floor / 6
    assert halves.floor == pytest.approx(full.floor / 2)
    assert "optimizer 12.3" in full.describe()
