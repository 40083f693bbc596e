"""Four ranks, two dimensions of shards: saved, killed while saving, resumed on two ranks."""

import json

import pytest
from forked_ranks import forked_ranks

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def folder(root, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    done = forked_ranks(
        root / "tests/ranks/checkpoint_resume.py", folder, "kill", ranks=4, cwd=folder
    )
    assert done.returncode != 0
    assert len(list(folder.glob("kill-*.json"))) == 4, done.stderr[-5000:]
    return folder


@pytest.fixture(scope="module")
def found(folder):
    return [json.loads((folder / f"kill-{rank}.json").read_text()) for rank in range(4)]


@pytest.fixture(scope="module")
def resumed(root, folder, found):
    done = forked_ranks(
        root / "tests/ranks/checkpoint_resume.py",
        folder,
        "resume",
        ranks=2,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return [json.loads((folder / f"resume-{rank}.json").read_text()) for rank in range(2)]


def test_experts_are_sharded_over_both_dimensions_of_the_mesh(found):
    kinds = found[0]["uninterrupted"]["placements"]

    assert any("_StridedShard(dim=0, sf=2), Shard(dim=0)" in kind for kind in kinds)
    assert "(Shard(dim=0),)" in kinds


def test_what_is_loaded_is_what_was_there_when_save_was_called(found):
    """Every parameter and moment, bit for bit, though training went on while it was written."""
    for rank in found:
        one = rank["uninterrupted"]
        assert one["begins"] == 0
        assert one["went_on_at"] == 2
        assert one["tensors"] == 100  # 25 parameters, of each two moments and a count of steps
        assert one["exact"]
        assert one["after"] == one["losses"][2:]


def test_muon_is_resumed_exactly(found):
    assert all(rank["muon"] for rank in found)


def test_four_ranks_resume_where_one_stopped(found):
    """Each reads its part of what was saved whole."""
    expected = found[0]["one_rank"]

    assert expected == pytest.approx(found[0]["uninterrupted"]["losses"], abs=5e-6)
    for rank in found:
        assert rank["from_one_rank"] == pytest.approx(expected[2:], abs=5e-6)


def test_each_rank_gets_its_generator_state_back(found):
    drawn = [rank["uninterrupted"]["drawn"] for rank in found]

    assert [rank["uninterrupted"]["drawn_again"] for rank in found] == drawn
    assert len({tuple(one) for one in drawn}) == 4


def test_another_model_is_refused_by_the_name_of_a_tensor_on_every_rank(found):
    for rank in found:
        refused = rank["misfits"]["other_model"]
        assert refused.startswith("ValueError")
        assert "model/model.embed_tokens.weight is ((64, 48), torch.float32) here" in refused
        assert "((64, 32), torch.float32) in the checkpoint" in refused


def test_a_load_that_is_refused_changes_nothing_on_the_disk(found):
    for rank in found:
        refused = rank["misfits"]["new_run"]
        assert refused.startswith("ValueError: rank 0: ")
        assert "already holds checkpoints, up to step-00000002; resume" in refused
        assert rank["misfits"]["unchanged"]


def test_a_rank_that_cannot_write_is_named_on_every_rank_and_the_next_save_is_good(found):
    for rank in found:
        assert rank["misfits"]["sync"].endswith("rank 2: [Errno 28] No space left on device")
        expected = "RuntimeError: an earlier checkpoint could not be saved: rank 2: [Errno 28]"
        assert rank["misfits"]["async"].startswith(expected)
        assert "step-00000003" in rank["misfits"]["left"]
        assert "step-00000002" not in rank["misfits"]["left"]


def test_a_process_killed_while_it_saves_leaves_the_save_before(folder, found):
    left = sorted(path.name for path in (folder / "killed" / "checkpoints").iterdir())

    assert left == ["step-00000002", "step-00000004.partial"]


@pytest.mark.parametrize("ep", ["2", "1"])
def test_two_ranks_resume_where_four_were_killed(found, resumed, ep):
    """The next three losses, to five decimals, with experts divided and not."""
    expected = found[0]["uninterrupted"]["losses"][2:]

    for rank in resumed:
        assert rank[ep]["step"] == 2
        assert rank[ep]["losses"] == pytest.approx(expected, abs=5e-6)
    assert resumed[0][ep]["worker"] == "of 2"


def test_another_number_of_ranks_draws_new_numbers_that_are_the_same_each_time(resumed):
    drawn = [[rank[ep]["drawn"] for ep in ("2", "1")] for rank in resumed]

    assert drawn[0][0] == drawn[0][1]
    assert drawn[1][0] == drawn[1][1]
    assert drawn[0][0] != drawn[1][0]
