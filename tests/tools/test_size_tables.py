"""The tables of sizes in the documentation, against the plans and by hand."""

import pytest

from primerl import planning
from tools import size_tables


@pytest.mark.thorough
def test_the_tables_in_the_documentation_are_those_of_the_plans():
    text = size_tables.PAGE.read_text(encoding="utf-8")
    assert size_tables.page(text) == text, "run python tools/size_tables.py"


def test_the_shapes_have_the_published_numbers_of_parameters():
    """In billions, as the model cards have them."""
    sizes = {name: planning.model_size(size_tables.build(name)) for name in size_tables.SHAPES}
    billions = {
        name: (round(one.total / 1e9, 1), round(one.active / 1e9, 1)) for name, one in sizes.items()
    }

    totals = {name.removeprefix("Qwen3-"): total for name, (total, _) in billions.items()}
    assert totals == {"0.6B": 0.6, "1.7B": 1.7, "4B": 4.0, "8B": 8.2, "30B-A3B": 30.5}
    assert billions["Qwen3-30B-A3B"][1] == pytest.approx(3.3, abs=0.3)


def test_a_memory_by_hand():
    """40 bytes of a trainer and 10 of an engine's copy; its cache is 15% of 100 - 20 - 10."""
    trainer = planning.RankMemory(rank=0, parameters=20, gradients=20, optimizer=0, host=0)
    memory = size_tables.RecipeMemory(settings=size_tables.SETTINGS[0], trainer=trainer, engine=10)

    assert memory.fits(100)
    assert memory.fits(54)  # 50 and 0.15 * 24 = 3.6
    assert not memory.fits(53)
    assert size_tables.RecipeMemory(settings=size_tables.SETTINGS[0], trainer=trainer).fits(40)
