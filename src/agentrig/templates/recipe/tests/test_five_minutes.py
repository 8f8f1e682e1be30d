"""Tests what `five-minutes` does."""

from agentrig.plan import resolve


def test_it_resolves() -> None:
    plan = resolve("five-minutes")
    assert plan.components["tasks"].spec.name == "mini-sql"
    assert plan.configs["algorithm"].steps == 24
