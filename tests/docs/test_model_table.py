"""The table of docs/how-to/which-model-fits.md is that of the memory plan, and its seconds are recorded."""

from __future__ import annotations

import re
from pathlib import Path

import attrs
import model_table
import pytest
from agentrig_grpo.fitting import Choice

RECORD = (Path(__file__).parents[1] / "benchmarks" / "one_gpu.md").read_text("utf-8")


def test_the_table_is_up_to_date() -> None:
    assert model_table.PAGE.read_text("utf-8") == model_table.page(), "run: python tests/support/model_table.py"


@pytest.mark.parametrize(("case", "seconds"), model_table.MEASURED.items())
def test_seconds_of_a_step_are_in_the_record(case: tuple[str, int, str, str], seconds: str) -> None:
    number = seconds.removesuffix(" s")
    assert f"**{number}**" in RECORD or f"**{seconds}**" in RECORD
    assert model_table.cell(*case).endswith(f" **{seconds}**")


def test_a_larger_card_never_fits_less() -> None:
    for size in model_table.SIZES:
        for rank in (0, model_table.RANK):
            for rows in model_table.ROWS:
                fits = [model_table.cell(size, rank, rows, card) != "no" for card in model_table.CARDS]
                assert fits == sorted(fits)


def test_every_letter_is_explained() -> None:
    page, everything = model_table.PAGE.read_text("utf-8"), Choice(tokens=1, recomputed=1, cache=0.5)
    everything = attrs.evolve(everything, sleeps=True, on_host=True, lent=True)
    letters = model_table.marks(everything, model_table.fitting_of("7", 0, "815+128", "80 GB"))
    assert len(letters) == 6
    assert [letter for letter in letters if f"\n- {letter}: " not in page] == []


def test_the_reason_why_all_weights_of_7b_fit_no_card_is_that_of_the_plan() -> None:
    page = model_table.PAGE.read_text("utf-8")
    refused = model_table.fitting_of("7", 0, "815+128", "80 GB")
    assert refused.first() is None
    numbers = re.findall(r"(?:about|and|weights|gradients|activations) (\d+\.\d) GiB", refused.refusal())
    assert len(numbers) == 5
    reason = page.partition("All weights of 7B ")[2].partition("\n\n")[0]
    assert [number for number in numbers if number not in reason] == []
