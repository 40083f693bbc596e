"""Parity finds injected faults, on four gloo ranks, many in one launch.

`pytest -m slow tests/parity/test_parity_faults.py` injects the whole list (minutes).
"""

import json

import pytest
from forked_ranks import forked_ranks
from parity_faults import FAULTS, RANKS, Fault

pytestmark = pytest.mark.thorough

QUICK = [name for name, one in FAULTS.items() if one.quick]


def found_by_parity(names, root, folder):
    script = root / "tests/helpers/parity_faults.py"
    done = forked_ranks(script, names, folder, ranks=RANKS, cwd=folder, timeout_s=900)
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads((folder / "found.json").read_text())


@pytest.fixture(scope="module")
def found(root, tmp_path_factory):
    return found_by_parity("quick", root, tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize("name", QUICK)
def test_parity_finds(found, name):
    assert found[FAULTS[name].plan.name] == []  # without the fault
    assert found[name]


@pytest.mark.slow
def test_parity_finds_every_fault_of_the_list(root, tmp_path):
    found = found_by_parity("all", root, tmp_path)

    assert len(FAULTS) >= 20
    plans = {one.plan.name for one in FAULTS.values()}
    assert {name: found[name] for name in plans if found[name]} == {}
    assert [name for name in FAULTS if not found[name]] == []


def test_every_fault_has_a_name_of_its_own():
    assert all(isinstance(one, Fault) and one.name == name for name, one in FAULTS.items())
    assert {one.plan.optimizer for one in FAULTS.values()} == {"adamw", "muon"}
    assert len(QUICK) >= 10
