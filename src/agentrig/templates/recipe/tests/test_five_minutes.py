"""Every key of `five-minutes` is one that its components have."""

from agentrig.plan import resolve


def test_it_resolves() -> None:
    plan = resolve("five-minutes")
    assert plan.components["tasks"].spec.name == "mini-sql"
    assert plan.configs["algorithm"].steps == 24
