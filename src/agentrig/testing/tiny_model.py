"""A tiny random model with a tokenizer, as a Hugging Face directory: every server and algorithm can load it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]


def make_tiny_model(directory: Path, *, seed: int = 0, context: int = 512, hidden: int = 32, layers: int = 2) -> Path:
    """Write a random Qwen2 of about 30,000 parameters with a byte-level tokenizer of 300 tokens; return its directory.

    Args:
        context: Most tokens of a prompt and its answer together.
    """
    import torch
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=[]):
        model = make_model(hidden=hidden, layers=layers, seed=seed, max_position_embeddings=context)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(str(directory))
    make_tokenizer().save_pretrained(str(directory))
    return directory


def make_model(
    kind: str = "qwen2", *, vocab: int = 300, hidden: int = 32, layers: int = 2, seed: int = 0, **more: Any
) -> Any:
    """Return a random model of transformers; `more` are further keys of its configuration. It seeds torch."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    settings = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 2 * hidden,
        "max_position_embeddings": 512,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "bos_token_id": None,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
        **more,
    }
    torch.manual_seed(seed)
    loader: Any = AutoModelForCausalLM
    model = loader.from_config(CONFIG_MAPPING[kind](**settings)).eval()
    with torch.no_grad():  # biases start at zero, which would hide an error in them
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.2)
    return model


def make_tokenizer() -> Any:
    """Return a byte-level BPE tokenizer of 300 tokens with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["select count from where name order by the and answer question"] * 4, trainer)
    loader: Any = PreTrainedTokenizerFast
    made = loader(tokenizer_object=backend, eos_token="<|end|>", pad_token="<|pad|>")
    made.chat_template = TEMPLATE
    return made
