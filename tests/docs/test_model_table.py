"""The table of docs/how-to/which-model-fits.md is that of the memory plan, and its seconds are recorded."""

from __future__ import annotations

from pathlib import Path

import model_table
import pytest

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
    page = model_table.PAGE.read_text("utf-8")
    assert [letter for letter in "tkshc" if f"\n- {letter}: " not in page] == []
