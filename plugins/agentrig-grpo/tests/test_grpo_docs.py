from __future__ import annotations

import re
from pathlib import Path

import attrs
from agentrig_grpo.config import EmbeddedConfig, GrpoConfig

from agentrig import Outcome, Score, Task, Trace, Triplet
from agentrig.rollouts import Rollout

HERE = Path(__file__).resolve().parents[1]
PAGE = HERE.parents[1] / "docs" / "algorithms.md"


def test_the_readme_names_every_setting_with_its_default():
    rows = dict(re.findall(r"^\| `(\w+)` \| `(.*?)` \|", (HERE / "README.md").read_text(), re.M))
    for field in (*attrs.fields(GrpoConfig), *attrs.fields(EmbeddedConfig)):
        default = field.default
        if isinstance(default, bool):
            default = str(default).lower()
        elif isinstance(default, float):
            default = f"{default:g}"
        assert rows.pop(field.name).strip('"') == str(default)
    assert not rows


def test_the_example_of_the_docs_works():
    space: dict = {}
    exec(re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.S | re.M)[0], space)
    (spec,) = space["register_credits"]()
    credit = spec.build(spec.config())
    rollouts = [
        Rollout(
            id=str(i),
            task=Task(id="t", input={}),
            group="g",
            mode="train",
            step=1,
            outcome=Outcome(answer=""),
            score=Score.ok(float(i == 2)),
            trace=Trace(rollout_id=str(i)),
            triplets=[Triplet(prompt_ids=[1], response_ids=[i])],
        )
        for i in range(4)
    ]
    assert list(credit([rollouts])) == [[-0.25, -0.25, 0.5, -0.25]]
