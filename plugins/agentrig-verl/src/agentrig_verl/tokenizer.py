"""Whether a model's own tokenizer is the one that verl and vLLM will use."""

from __future__ import annotations

import logging
from pathlib import Path

log = logging.getLogger(__name__)

SAMPLE = "Which 25 singers' ages are over 40.5?\nSELECT name_id, count(*) FROM t1 WHERE city = 'Köln'  -- 日本\n\tEND"
"""Words, plurals, numbers, names with underscores, signs, spaces, other scripts: where pre-tokenizers differ."""


def disagreement(model: str, *, trust_remote_code: bool = False) -> str | None:
    """Return how transformers tokenizes differently from a model's `tokenizer.json`; None when they agree.

    For some model types (Qwen2 among them) transformers 5, and so vLLM, replaces the file's pre-tokenizer with
    the model family's. Token ids stay exact from end to end, but a model that was trained with the file's tokenizer
    gives worse answers, without an error.

    Args:
        model: A Hugging Face directory; a name on the Hub is not checked.
        trust_remote_code: Allow transformers to run code from the directory, as verl's key of the same name does.
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


def warn(model: str, *, trust_remote_code: bool = False) -> None:
    """Log a warning when verl and vLLM will not use the model's own tokenizer."""
    found = disagreement(model, trust_remote_code=trust_remote_code)
    if found is not None:
        log.warning(
            "verl and vLLM tokenize text differently from %s/tokenizer.json (%s): a model that was trained with that "
            "file gives worse answers here. Train it with its model family's pre-tokenizer.",
            model,
            found,
        )
