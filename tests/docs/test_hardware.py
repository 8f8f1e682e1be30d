"""docs/hardware.md agrees with the code."""

import re
from pathlib import Path

import pytest
from agentrig_ascend import Ascend
from agentrig_cuda import Cuda

from agentrig.hardware import Cpu, HardwareError, select

PAGE = (Path(__file__).parents[2] / "docs" / "hardware.md").read_text("utf-8")
ALL = (Cpu(), Cuda(), Ascend())


def row(first):
    """Return the cells of the table row whose first cell is this."""
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| {first} |")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


@pytest.mark.parametrize("stack", [s for h in ALL for s in h.stacks()], ids=lambda s: s.name)
def test_every_stack_has_its_row(stack):
    proof, algorithms, *_ = row(stack.name)
    assert proof == stack.proof
    assert algorithms == ", ".join(stack.algorithms)
    numbers = [re.sub(r"[^\d.a-z]|\.\*", "", part) for want in stack.versions.values() for part in want.split(",")[:1]]
    text = " ".join([stack.name, *row(stack.name)]).replace("8.2.RC1", "8.2rc1")
    assert [n for n in numbers if n not in text] == []


def test_the_matrix_has_the_fields():
    assert row("torch device") == [h.torch_device for h in ALL]
    assert [c.strip("`").partition("`")[0] for c in row("visible devices")] == [h.visible_devices or "" for h in ALL]
    assert row("dtype") == [h.dtypes[0] for h in ALL]
    assert row("verl's platform name") == [h.verl_platform or "" for h in ALL]
    assert row("Ray's resource") == [h.ray_resource for h in ALL]


@pytest.mark.parametrize("symptom", [s for h in ALL for s in h.symptoms], ids=lambda s: s.cause)
def test_every_known_symptom_has_its_row(symptom):
    if "newer CUDA" in symptom.cause:
        assert "for a newer one than the driver has" in PAGE
    else:
        assert symptom.cause in PAGE
    lines = [line for line in PAGE.splitlines() if line.startswith("| ")]
    assert any(re.search(symptom.pattern, line.replace("`", "").replace("… ", "")) for line in lines) or (
        "driver" in symptom.pattern
    )


def test_the_example_on_the_page_works():
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    space: dict = {}
    exec(compile(code, "docs/hardware.md", "exec"), space)
    (spec,) = space["register_hardware"]()
    rocm = spec.build(spec.config())
    assert rocm.ray_resource == "GPU"
    assert rocm.probe().available is Path("/dev/kfd").exists()
    if not rocm.probe().available:
        with pytest.raises(HardwareError, match="no /dev/kfd"):
            select("rocm", [rocm])
