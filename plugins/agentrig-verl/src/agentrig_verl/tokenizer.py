"""Whether a model's own tokenizer is the one that verl and vLLM will use."""

from __future__ import annotations

import logging
from pathlib import Path

log = logging.getLogger(__name__)

SAMPLE = "Which 25 singers' ages are over 40.5?\nSELECT name_id, count(*) FROM t1 WHERE city = 'Köln'  -- 日本\n\tEND"
"""Words, plurals, numbers, names with underscores, signs, spaces, other scripts: where pre-tokenizers differ."""


def disagreement(model: str, *, trust_remote_code: bool = False) -> str | None:
    """Return what transformers makes otherwise of a model's `tokenizer.json`, None when they agree.

    For some model types (Qwen2 among them) transformers 5, and so vLLM, puts the family's pre-tokenizer in the
    place of the file's. Ids stay exact from end to end, but a model that was taught with the file's own cuts answers
    worse, and nothing says why.

    Args:
        model: A Hugging Face directory; of a name on the Hub nothing is looked at.
        trust_remote_code: Let transformers run code from the directory, as verl's key of that name lets it.
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
    """Say it in the log when a model's tokenizer will not be its own."""
    found = disagreement(model, trust_remote_code=trust_remote_code)
    if found is not None:
        log.warning(
            "verl and vLLM cut text otherwise than %s/tokenizer.json says (%s): a model that was taught with that "
            "file answers worse here. Train it with its family's pre-tokenizer.",
            model,
            found,
        )
