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


def test_an_explicit_choice_wins_over_what_else_is_there():
    assert select("cpu", [Board(), Cpu()]).name == "cpu"


def test_auto_takes_the_single_accelerator():
    assert select("auto", [Cpu(), Board()]).name == "board"


def test_auto_takes_the_cpu_only_when_nothing_else_is_there():
    assert select("auto", [Board(found=ABSENT), Cpu()]).name == "cpu"


def test_auto_asks_when_two_are_there():
    with pytest.raises(HardwareError, match=r"board: 1 x B1; tile: 1 x B1.*--hardware board or --hardware tile"):
        select("auto", [Board(), Board(name="tile"), Cpu()])


def test_auto_never_replaces_a_broken_accelerator_by_the_cpu():
    with pytest.raises(HardwareError, match="reload it") as caught:
        select("auto", [Board(found=BROKEN), Cpu()])
    assert "--hardware cpu" in str(caught.value)


def test_auto_stops_on_a_broken_accelerator_even_beside_a_good_one():
    with pytest.raises(HardwareError, match="tile is there but broken"):
        select("auto", [Board(), Board(name="tile", found=BROKEN), Cpu()])


@pytest.mark.parametrize(("found", "words"), [(ABSENT, "no /dev/board0"), (BROKEN, "reload it")])
def test_an_explicit_choice_that_cannot_be_used_is_an_error_that_explains(found, words):
    with pytest.raises(HardwareError, match=words):
        select("board", [Board(found=found), Cpu()])


def test_a_misspelled_choice_names_the_nearest():
    with pytest.raises(HardwareError, match=r'Did you mean "board"\?'):
        select("bord", [Board(), Cpu()])


def test_auto_without_the_cpu_among_the_candidates_is_an_error():
    with pytest.raises(HardwareError, match="none of the hardware"):
        select("auto", [Board(found=ABSENT)])
