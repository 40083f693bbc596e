"""The flagship recipe at the scale of a laptop."""

import json

import pytest
import torch
from forked_ranks import forked_ranks
from glm_swe_trainer import load, step

from primerl import parallel, testing


@pytest.fixture(scope="module")
def recipe(root):
    return load(root / "recipes" / "glm_swe.py")


@pytest.mark.parametrize("family", ["glm_moe_dsa", "glm4_moe"])
def test_its_trainer_on_two_ranks_makes_the_step_of_one_process(root, recipe, tmp_path, family):
    folder = testing.tiny_chat_model(tmp_path / "model", family, max_position_embeddings=512)
    program = root / "tests/ranks/glm_swe_trainer.py"
    script = root / "recipes" / "glm_swe.py"

    done = forked_ranks(program, script, folder, tmp_path, ranks=2, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-5000:]
    with parallel.process_group() as world:
        loss, norm, weights = step(recipe, folder, world)

    found = json.loads((tmp_path / "found.json").read_text())
    assert abs(loss) > 1e-4
    assert found["loss"] == pytest.approx(loss, rel=1e-2)
    assert found["norm"] == pytest.approx(norm, rel=2e-2)
    theirs = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert theirs.keys() == weights.keys()
