"""Context parallel: which rank computes what, and that results stay the same."""

import json
import types

import numpy as np
import pytest
import torch
import transformers
from conftest import make_sample
from forked_ranks import forked_ranks
from hypothesis import given
from hypothesis import strategies as st

from primerl import flops, packing, parallel, testing
from primerl.attention import find_documents
from primerl.parallel.context_parallel.balancing import divide_attention
from primerl.parallel.context_parallel.sharing import row_spans, share_context
from primerl.types import NOT_SAMPLED, TrainingSample

TWO = parallel.Mesh(replicate=1, fsdp=1, ep=1, cp=2)


@pytest.fixture(scope="session")
def found(root, tmp_path_factory):
    """What tests/ranks/context_parallel.py found on each of four ranks, in one launch."""
    folder = tmp_path_factory.mktemp("ranks")
    done = forked_ranks(root / "tests/ranks/context_parallel.py", folder, ranks=4, cwd=folder)
    assert done.returncode == 0, done.stderr[-5000:]
    assert "Warning" not in done.stderr, done.stderr[-5000:]
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(4)]


def positions(*lengths):
    return np.concatenate([np.arange(length) for length in lengths])


@st.composite
def packs(draw, parts):
    """Positions of documents, some of which share tokens of the last that began at 0."""
    rows, found, whole = draw(st.integers(1, 12)) * parts, [], 0
    while len(found) < rows:
        longest = min(whole, found[-1] + 1) if found else 0  # of the document before, too
        first = draw(st.integers(1, longest)) if longest and draw(st.booleans()) else 0
        if found and found[-1] + 1 == first:
            first = 0
        length = min(draw(st.integers(1, 20)), rows - len(found))
        whole = whole if first else length
        found += range(first, first + length)
    return np.array(found)


def test_the_last_rows_of_a_long_document_go_to_the_rank_with_the_first():
    # 1 + 2 + 3 + 4 pairs against 5 + 6 + 7 + 8; 8 of them make it 18 each.
    assert divide_attention(1.0 + positions(8), 2).tolist() == [0, 0, 0, 0, 1, 1, 1, 0]


def test_ranks_with_equal_work_keep_their_rows():
    assert divide_attention(1.0 + positions(4, 4), 2).tolist() == [0] * 4 + [1] * 4


def test_surplus_work_goes_to_the_ranks_with_the_least():
    # 4, 4, 10 and 26 pairs: the mean is 11, so that part 3 gives 7 + 8 to those that lack 7 each.
    workers = divide_attention(1.0 + positions(1, 1, 1, 1, 1, 1, 1, 1, 8), 4)

    assert workers.tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3, 3, 0, 1]


def test_a_row_that_would_overload_another_rank_stays():
    # 10 and 13 pairs: giving 6 of them away would make it 16 and 7.
    assert divide_attention(1.0 + positions(6, 1, 1), 2).tolist() == [0] * 4 + [1] * 4


def test_a_rank_keeps_a_row():
    assert divide_attention(1.0 + np.array([0, 1, 2, 3, 0, 1, 2, 4, 1]), 9).tolist() == list(
        range(9)
    )


def test_the_most_expensive_rows_are_given_wherever_they_are():
    # Part 1 has 300 .. 499 of a document, then a hundred documents of one token: 80,200 pairs
    # against 45,150, so it gives those of 464 .. 499, which are 17,370 of its 17,525 too many.
    workers = divide_attention(1.0 + positions(500, *[1] * 100), 2)

    assert np.flatnonzero(workers[:300]).tolist() == []
    assert np.flatnonzero(workers[300:] == 0).tolist() == list(range(164, 200))


def test_rows_that_cannot_be_divided_are_refused():
    with pytest.raises(ValueError, match="7 rows cannot be divided equally by parts=2"):
        divide_attention(1.0 + positions(7), 2)


@given(st.data(), st.sampled_from([1, 2, 3, 4]))
def test_every_row_has_one_worker_and_none_has_much_more_than_the_mean(data, parts):
    of_rows = data.draw(packs(parts))
    cost, owners = of_rows + 1, np.repeat(np.arange(parts), len(of_rows) // parts)
    before = np.bincount(owners, cost, minlength=parts)

    workers = divide_attention(1.0 + of_rows, parts)
    after = np.bincount(workers, cost, minlength=parts)

    assert after.sum() == before.sum()
    moved = workers != owners
    assert (before[owners[moved]] > before.mean()).all()
    assert (before[workers[moved]] < before.mean()).all()
    # A rank gives to the nearest row; what it may be given in excess is as much for each giver.
    assert after.max() <= 1.01 * before.mean() + parts * cost.max()
    assert after.max() <= max(before.max(), before.mean() + parts * cost.max())


def test_work_is_balanced_by_what_windows_let_queries_see():
    """Nearly all rows of a long document see as many keys, so few are moved."""
    config = types.SimpleNamespace(num_hidden_layers=2, sliding_window=4)
    config.layer_types = ["sliding_attention", "chunked_attention"]
    config.attention_chunk_size = 3

    cost = flops.seen_keys(config, positions(8))

    # 1 2 3 4 4 4 4 4 keys in the first layer, and 1 2 3 1 2 3 1 2 in the second.
    assert cost.tolist() == [1, 2, 3, 2.5, 3, 3.5, 2.5, 3]
    config.layer_types = ["sliding_attention"] * 2
    long = flops.seen_keys(config, positions(4000))
    workers = divide_attention(long, 2)
    assert (workers == np.repeat([0, 1], 2000)).all()
    assert (divide_attention(1.0 + positions(4000), 2) != workers).sum() > 500


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_large_packs_are_balanced(parts):
    for lengths in ([65536], [40960, 8192, 8192, 4096, 4096], [100] * 640, [1] * 64 + [64000] * 1):
        of_rows = positions(*lengths)
        of_rows = of_rows[: len(of_rows) // parts * parts]
        work = np.bincount(divide_attention(1.0 + of_rows, parts), of_rows + 1)
        assert work.max() / work.mean() <= 1.02


def seen(spans, rows):
    """For each row, the rows whose keys it sees."""
    keys = {}
    for begin, end, ranges in spans:
        every = [key for one in ranges for key in range(*one)]
        for query in range(begin, end):
            keys[rows[query]] = every[: len(every) - (end - 1 - query)]
    return keys


@given(st.data(), st.sampled_from([1, 2, 4]))
def test_the_ranks_see_for_each_row_what_its_document_sees(data, parts):
    of_rows = data.draw(packs(parts))
    documents = find_documents(torch.from_numpy(of_rows))
    workers = data.draw(
        st.lists(st.integers(0, parts - 1), min_size=len(of_rows), max_size=len(of_rows))
    )

    together = {}
    for part in range(parts):
        rows = np.flatnonzero(np.array(workers) == part)
        together |= seen(row_spans(rows, documents), rows.tolist())

    expected = {}
    for one in documents:
        for row in range(one.begin, one.end):
            shared = [key for begin, end in one.prefix for key in range(begin, end)]
            expected[row] = shared + list(range(one.begin, row + 1))
    assert together == expected


def test_a_rank_may_have_no_queries():
    assert row_spans(np.array([], int), find_documents(torch.arange(4))) == ()


def test_a_batch_is_split_by_rows():
    long, short = (
        make_sample(2, n, kind=TrainingSample, advantages=np.zeros(n + 2)) for n in (3, 1)
    )
    ((batch,),) = packing.pack([long, short], max_tokens=8, ranks=1)

    first, second = batch.split(2)

    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert first.position_ids.tolist() == [0, 1, 2, 3]
    assert second.position_ids.tolist() == [4, 0, 1, 2]
    assert second.sequence_ids.tolist() == [0, 1, 1, 1]
    assert first.labels.tolist() == batch.labels[:4].tolist()
    assert second.loss_mask.tolist() == [False, False, True, False]
    assert first.cu_seqlens.tolist() == second.cu_seqlens.tolist() == [0, 5, 8]
    assert first.ref_logprobs is None


def test_rows_that_do_not_divide_are_followed_by_a_masked_document():
    one = make_sample(2, 3, kind=TrainingSample, advantages=np.ones(5), version=7)
    ((batch,),) = packing.pack([one], max_tokens=8, ranks=1)

    *_, last = batch.split(4)

    assert len(last.token_ids) == 2
    assert last.token_ids.tolist() == [batch.token_ids[0]] * 2
    assert last.position_ids.tolist() == [1, 2]
    assert last.sequence_ids.tolist() == [1, 1]
    assert last.loss_mask.tolist() == [False, False]
    assert last.versions.tolist() == [NOT_SAMPLED] * 2
    assert last.temperature.tolist() == [1, 1]
    assert last.labels.tolist() == last.advantages.tolist() == [0, 0]
    assert last.behavior_logprobs.tolist() == [0, 0]
    assert last.cu_seqlens.tolist() == [0, 5, 8]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 6))
def test_the_parts_of_a_batch_are_all_of_it(lengths, parts):
    samples = [
        make_sample(1, n, kind=TrainingSample, advantages=np.ones(n + 1), seed=n) for n in lengths
    ]
    ((batch,),) = packing.pack(samples, max_tokens=64, ranks=1)

    divided = batch.split(parts)

    assert len({len(part.token_ids) for part in divided}) == 1
    rows = len(batch.token_ids)
    joined = torch.cat([part.labels for part in divided])
    assert joined[:rows].tolist() == batch.labels.tolist()
    assert len(joined) - rows < parts
    assert sum(int(part.loss_mask.sum()) for part in divided) == int(batch.loss_mask.sum())
    documents = find_documents(torch.cat([part.position_ids for part in divided]))
    assert [one.begin for one in documents] == divided[0].cu_seqlens[:-1].tolist()
    ids = torch.cat([part.sequence_ids for part in divided]).tolist()
    assert ids == [n for n, one in enumerate(documents) for _ in range(one.end - one.begin)]


def test_no_parts_are_refused():
    one = make_sample(2, 3, kind=TrainingSample, advantages=np.ones(5))
    ((batch,),) = packing.pack([one], max_tokens=8, ranks=1)

    with pytest.raises(ValueError, match="parts is 0"):
        batch.split(0)


CASES = [
    "qwen3, ulysses",
    "qwen3, gathered",
    "qwen3, four ranks, ulysses",
    "qwen3, four ranks, gathered",
    "qwen3, replicated",
    "qwen3, twelve and six heads",
    "qwen3, three heads",
    "llama, ulysses",
    "llama, gathered",
    "qwen3_moe, ulysses",
    "qwen3_moe, gathered",
    "glm4_moe, ulysses",
    "glm4_moe, gathered",
    "deepseek_v3, ulysses",
    "deepseek_v3, gathered",
    "minimax_m2, ulysses",
    "minimax_m2, gathered",
    "lfm2, ulysses",
    "qwen3_next, gathered",
    "qwen3_moe, replayed",
    "glm4_moe, replayed",
]


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_context_parallel_ranks_train_as_one_process_does(found, name):
    one = found[0][name]

    assert len(one["history"]) == len(one["single"]) == 2
    for ours, single in zip(one["history"], one["single"], strict=True):
        (loss, norm), (expected, expected_norm) = ours[:2], single[:2]
        assert loss == pytest.approx(expected, abs=1e-6)
        assert norm == pytest.approx(expected_norm, rel=1e-5)
        assert norm > 1e-3
    assert all(other[name]["history"] == one["history"] for other in found)


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_each_rank_gets_its_part_of_the_batches_it_shares(found, name):
    assert all(one[name]["scattered"] for one in found)
    assert all(one[name]["gathered"] for one in found)
    assert all(one[name]["rows"] == found[0][name]["rows"] for one in found[:2])


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_ranks_that_replay_routes_force_those_of_their_own_rows(found, family):
    """That they train as one process does is shown above; the routes make a difference."""
    ours, plain = found[0][f"{family}, replayed"], found[0][f"{family}, gathered"]

    assert abs(ours["single"][0][0] - plain["single"][0][0]) > 1e-5
    for _, _, differing, missing, lost in ours["history"]:
        assert differing > 0.4
        assert 0.1 < missing < 0.3
        assert lost == 0


@pytest.mark.thorough
def test_heads_choose_the_method(found):
    assert found[0]["qwen3, replicated"]["attention"] == "primerl_context_ulysses"
    assert found[0]["qwen3, three heads"]["attention"] == "primerl_context_gathered"


@pytest.mark.thorough
def test_the_batches_have_documents_that_share_tokens(found):
    assert found[0]["qwen3, four ranks, ulysses"]["shares"]
    assert found[0]["qwen3, four ranks, gathered"]["shares"]
    assert not found[0]["qwen3, ulysses"]["shares"]


@pytest.mark.thorough
def test_two_forward_passes_may_precede_a_backward_pass(found):
    for one in found:
        assert max(one["interleaved"]) < 1e-5


@pytest.mark.thorough
def test_what_cannot_be_computed_over_ranks_is_refused_on_every_rank(found):
    for one in found:
        said = one["refusals"]
        assert "have [8, 9, 8, 9] rows" in said["uneven"]
        assert "position_ids of [8, 0, 8, 8] rows" in said["no positions"]
        assert "position_ids of [8, 8, 8, 0] rows" in said["two"]
        assert "got a mask of shape [1, 8], as for padding" in said["padding"]
        assert "(dropout=0.1)" in said["dropout"]
        assert "Whole has no split(parts)" in said["no split"]
    assert "batches has 2 lists, expected 1" in found[0]["refusals"]["lists"]
    assert "rank 1 passes batches" in found[1]["refusals"]["lists"]


@pytest.mark.parametrize(
    ("kind", "config", "message"),
    [
        ("glm_moe_dsa", {"index_topk": 4}, "sparse attention, which needs gathered keys"),
        ("axk2", {"index_topk": 4}, "sparse attention, whose indexer"),
        ("bart", {}, "bart takes no position_ids"),
        ("xglm", {}, "xglm has its own attention implementation"),
        ("qwen3", {"num_attention_heads": 3, "num_key_value_heads": 3}, '3 .* context="gathered"'),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "depend on the longest position",
        ),
    ],
)
def test_a_model_that_would_see_its_own_rows_only_is_refused(kind, config, message):
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {kind}")
    model = testing.tiny_model(kind, **config)

    with pytest.raises(ValueError, match=message):
        share_context(model, TWO, method="ulysses")


def test_another_method_is_refused():
    with pytest.raises(ValueError, match="context is 'ring'; expected one of"):
        share_context(testing.tiny_model("llama"), TWO, method="ring")


def test_a_model_that_is_called_in_parts_explains_how_to_call_it():
    from primerl.parallel.context_parallel.attention import _ulysses

    rows = torch.zeros(1, 2, 4, 8)
    with pytest.raises(ValueError, match="Linear does not receive the documents"):
        _ulysses(torch.nn.Linear(1, 1), rows, rows, rows, None)
