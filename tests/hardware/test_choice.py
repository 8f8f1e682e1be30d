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


def test_an_explicit_choice_is_used():
    assert select("cpu", [Board(), Cpu()]).name == "cpu"


def test_auto_takes_the_single_accelerator():
    assert select("auto", [Cpu(), Board()]).name == "board"


def test_auto_takes_the_cpu_only_without_accelerators():
    assert select("auto", [Board(found=ABSENT), Cpu()]).name == "cpu"


def test_auto_is_an_error_with_two_accelerators():
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


@attrs.frozen(kw_only=True)
class Faulty(Board):
    """Hardware whose probe has a bug."""

    name: str = "faulty"
    gives: object = None

    def probe(self):
        if self.gives is None:
            raise KeyError("firmware")
        return self.gives


def test_auto_skips_hardware_whose_probe_fails_with_a_warning(caplog):
    assert select("auto", [Faulty(), Board(), Cpu()]).name == "board"
    assert select("auto", [Faulty(gives="yes"), Cpu()]).name == "cpu"
    said = [r.getMessage() for r in caplog.records]
    assert "hardware faulty is left out: the probe of hardware faulty raised KeyError: 'firmware'" in said[0]
    assert "test_choice.py" in said[0]
    assert "returned 'yes'; it must return an agentrig.hardware.Probe" in said[1]


def test_auto_without_other_hardware_names_the_failed_probes():
    with pytest.raises(HardwareError, match="raised KeyError: 'firmware'"):
        select("auto", [Faulty()])


def test_a_failed_probe_of_the_chosen_hardware_is_an_error():
    with pytest.raises(HardwareError, match=r"the probe of hardware faulty raised KeyError: 'firmware' \(test_choi"):
        select("faulty", [Faulty(), Cpu()])
