import attrs
import pytest

from agentrig.hardware import Cpu, Device, Hardware, HardwareError, Probe, select


@attrs.frozen(kw_only=True)
class Board(Hardware):
    name: str = "board"
    torch_device: str = "cuda"
    found: Probe = attrs.field(factory=lambda: Probe(available=True, devices=(Device(name="B1"),)))

    def probe(self) -> Probe:
        return self.found


ABSENT = Probe(available=False, evidence=("no /dev/board0",))
BROKEN = Probe(available=False, problems=("the driver does not answer: reload it",))


@attrs.frozen(kw_only=True)
class Faulty(Board):
    """Hardware whose probe has a bug."""

    name: str = "faulty"
    gives: object = None

    def probe(self):
        if self.gives is None:
            raise KeyError("firmware")
        return self.gives


CHOICES = {
    "an explicit choice": ("cpu", [Board(), Cpu()], "cpu"),
    "the single accelerator": ("auto", [Cpu(), Board()], "board"),
    "the CPU, without accelerators": ("auto", [Board(found=ABSENT), Cpu()], "cpu"),
}
"""What is asked for, the candidates, and what is chosen."""


@pytest.mark.parametrize("name", CHOICES)
def test_the_choice(name):
    asked, candidates, chosen = CHOICES[name]
    assert select(asked, candidates).name == chosen


PAIR = [Board(), Board(name="tile"), Cpu()]
REFUSED = {
    "two accelerators": ("auto", PAIR, r"board: 1 x B1; tile: 1 x B1.*--hardware board or --hardware tile"),
    "a broken one beside the CPU": ("auto", [Board(found=BROKEN), Cpu()], "(?s)reload it.*--hardware cpu"),
    "a broken one beside a good one": ("auto", [Board(), Board(name="tile", found=BROKEN)], "tile is there but broken"),
    "a choice that is not there": ("board", [Board(found=ABSENT), Cpu()], "no /dev/board0"),
    "a choice that is broken": ("board", [Board(found=BROKEN), Cpu()], "reload it"),
    "a misspelled choice": ("bord", [Board(), Cpu()], r'Did you mean "board"\?'),
    "nothing, without the CPU": ("auto", [Board(found=ABSENT)], "none of the hardware"),
    "a probe that fails, alone": ("auto", [Faulty()], "raised KeyError: 'firmware'"),
    "a chosen one whose probe fails": (
        "faulty", [Faulty(), Cpu()], r"the probe of hardware faulty raised KeyError: 'firmware' \(test_choi",
    ),
}  # fmt: skip
"""What is asked for, the candidates, and what the error says."""


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_chosen_is_explained(name):
    asked, candidates, words = REFUSED[name]
    with pytest.raises(HardwareError, match=words):
        select(asked, candidates)


def test_auto_skips_hardware_whose_probe_fails_with_a_warning(caplog):
    assert select("auto", [Faulty(), Board(), Cpu()]).name == "board"
    assert select("auto", [Faulty(gives="yes"), Cpu()]).name == "cpu"
    said = [r.getMessage() for r in caplog.records]
    assert "hardware faulty is left out: the probe of hardware faulty raised KeyError: 'firmware'" in said[0]
    assert "test_choice.py" in said[0]
    assert "returned 'yes'; it must return an agentrig.hardware.Probe" in said[1]
