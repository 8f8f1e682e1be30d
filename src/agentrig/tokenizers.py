"""Whether transformers, and so vLLM, uses a model's tokenizer as its file says."""

from __future__ import annotations

from pathlib import Path

SAMPLE = "Which 25 singers' ages are over 40.5?\nSELECT name_id, count(*) FROM t1 WHERE city = 'Köln'  -- 日本\n\tEND"
"""Words, plurals, numbers, names with underscores, signs, spaces, other scripts: where pre-tokenizers differ."""


def disagreement(model: str, *, trust_remote_code: bool = False) -> str | None:
    """Return how transformers tokenizes differently from a model's `tokenizer.json`; None when they agree.

    For some model types (Qwen2 among them) transformers 5, and so vLLM, replaces the file's pre-tokenizer with
    the model family's. Token ids stay exact from end to end, but a model that was trained with the file's tokenizer
    gives worse answers, without an error.

    Args:
        model: A Hugging Face directory; a name on the Hub is not checked.
        trust_remote_code: Allow transformers to run code from the directory, as its own argument of that name does.
    """
    file = Path(model) / "tokenizer.json"
    if not file.is_file():
        return None
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    own = Tokenizer.from_file(str(file)).encode(SAMPLE, add_special_tokens=False).tokens
    auto = AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)
    others = auto.convert_ids_to_tokens(auto(SAMPLE, add_special_tokens=False)["input_ids"])
    if own == others:
        return None
    first = next((i for i, (a, b) in enumerate(zip(own, others, strict=False)) if a != b), min(len(own), len(others)))
    return f"{own[first : first + 3]} as the file says, {others[first : first + 3]} as {type(auto).__name__} does"
