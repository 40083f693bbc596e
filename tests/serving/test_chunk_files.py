"""Files with keys and values of prompts: names, what is stored, damage, versions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from primerl.serving.worker.chunk_files import ChunkFiles, WeightsLabel, copy_blocks, write_blocks

LAYERS = {"a": torch.arange(12.0).reshape(2, 1, 3, 2), "b": torch.ones(2, 4, dtype=torch.uint8)}
FIRST, SECOND, THIRD = "12345678-1", "12345678-2", "12345678-3"


def files(folder, **other):
    return ChunkFiles(folder, **{"tokens": 4, "identity": "model", **other})


def test_a_chunk_is_named_after_all_tokens_up_to_its_end(tmp_path):
    one = files(tmp_path)
    names = one.names([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert len(names) == len(set(names)) == 2
    assert one.names([1, 2, 3, 4]) == names[:1]
    assert one.names([1, 2, 3, 4, 5, 6, 7, 9])[0] == names[0]
    assert one.names([1, 2, 3, 4, 5, 6, 7, 9])[1] != names[1]
    assert one.names([2, 2, 3, 4, 5, 6, 7, 8])[1] != names[1]
    assert one.names([1, 2, 3]) == []


@given(st.lists(st.integers(0, 300_000), max_size=40), st.integers(0, 40))
def test_names_of_a_prompt_begin_with_those_of_its_prefix(tmp_path_factory, tokens, cut):
    one = files(tmp_path_factory.getbasetemp())
    names = one.names(tokens)
    assert len(names) == len(tokens) // 4
    assert one.names(tokens[:cut]) == names[: min(cut, len(tokens)) // 4]


@pytest.mark.parametrize("other", [{"tokens": 2}, {"identity": "other"}, {"ranks": 2}])
def test_other_models_and_layouts_have_other_names(tmp_path, other):
    names = files(tmp_path).names([1, 2, 3, 4])
    assert not set(files(tmp_path, **other).names([1, 2, 3, 4])) & set(names)


def test_what_is_stored_is_loaded_for_the_same_weights_only(tmp_path):
    one = files(tmp_path)
    names = one.names(range(12))
    one.save(FIRST, names[1], LAYERS)
    assert one.missing(FIRST, names) == [0, 2]
    assert one.missing(SECOND, names) == [0, 1, 2]
    loaded = one.load(FIRST, names[1])
    assert loaded.keys() == LAYERS.keys()
    assert all(torch.equal(loaded[name], LAYERS[name]) for name in LAYERS)
    with pytest.raises(OSError, match="No such file"):
        one.load(SECOND, names[1])


def test_a_chunk_is_stored_once_all_workers_have_stored_it(tmp_path):
    ranks = [files(tmp_path, ranks=2, rank=rank) for rank in range(2)]
    names = ranks[0].names(range(4))
    ranks[0].save(FIRST, names[0], LAYERS)
    assert ranks[1].missing(FIRST, names) == [0]
    ranks[1].save(FIRST, names[0], LAYERS)
    assert ranks[0].missing(FIRST, names) == []


def test_a_damaged_file_and_a_folder_that_can_not_be_written(tmp_path):
    one = files(tmp_path / "store")
    (name,) = one.names(range(4))
    one.save(FIRST, name, LAYERS)
    (path,) = (one for one in (tmp_path / "store").rglob("*") if one.is_file())
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(OSError, match="is damaged"):
        one.load(FIRST, name)
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(OSError, match="file"):
        files(tmp_path / "file").save(FIRST, name, LAYERS)


def test_an_interrupted_save_leaves_no_file(tmp_path):
    one = files(tmp_path)
    (name,) = one.names(range(4))
    with pytest.raises(ValueError, match="contiguous"):
        one.save(FIRST, name, {"a": torch.ones(2, 3).T})
    assert one.missing(FIRST, [name]) == [0]
    assert [one for one in tmp_path.rglob("*") if one.is_file()] == []


def test_only_the_version_before_is_kept(tmp_path):
    one = files(tmp_path)
    (name,) = one.names(range(4))
    (tmp_path / "notes.txt").write_text("not ours")
    for place in (FIRST, SECOND, THIRD, "87654321-7"):
        one.save(place, name, LAYERS)
    one.remove_others(THIRD)
    assert {found.name for found in tmp_path.iterdir()} == {SECOND, THIRD, "notes.txt"}
    one.remove_others("12345678-9")  # it has stored nothing yet
    assert {found.name for found in tmp_path.iterdir()} == {THIRD, "notes.txt"}
    files(tmp_path / "missing").remove_others(FIRST)


def test_the_label_goes_from_one_process_to_another():
    worker, scheduler, other = WeightsLabel("a"), WeightsLabel("a"), WeightsLabel("b")
    assert scheduler.get() == (None, "")
    worker.set("run-3", THIRD)
    assert scheduler.get() == ("run-3", THIRD)
    assert other.get() == (None, "")
    worker.set(None, "")
    assert scheduler.get() == (None, "")
    worker.set(None, "")


def test_blocks_are_copied_where_they_belong():
    cache = torch.arange(24.0).reshape(6, 2, 2)
    part = copy_blocks(cache, [4, 1])
    assert torch.equal(part, torch.stack([cache[4], cache[1]]))
    target = torch.zeros(6, 2, 2)
    write_blocks(target, [0, 5], part)
    assert torch.equal(target[[0, 5]], part)
    assert not target[1:5].any()


@pytest.mark.parametrize(
    "content", [torch.ones(2, 2, 3), torch.ones(1, 2, 2), torch.ones(2, 2, 2).double()]
)
def test_blocks_of_another_cache_are_refused(content):
    with pytest.raises(OSError, match=r"the stored keys and values are .*, expected torch.float32"):
        write_blocks(torch.zeros(6, 2, 2), [0, 5], content)
