"""The exchange of rows after which each rank of context parallelism has whole documents."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from primerl.attention import find_documents
from primerl.parallel.context_parallel.mixing import divide_documents, exchange_documents


def exchanged(parts, plans, counts):
    """What each rank receives, if rank r sends ``parts[r]``, divided by ``counts(plans[r])``."""
    sent = [torch.split(x, counts(plan)) for x, plan in zip(parts, plans, strict=True)]
    return [torch.cat([one[rank] for one in sent]) for rank in range(len(plans))]


@st.composite
def packs(draw):
    """Positions of a pack whose documents may share tokens, in equal parts for some ranks."""
    positions, longest = [], 0
    for length in draw(st.lists(st.integers(1, 12), min_size=1, max_size=8)):
        shared = draw(st.integers(0, longest))
        positions += range(shared, shared + length)
        longest = shared + length
    ranks = draw(st.integers(2, 5))
    while len(positions) % ranks:
        positions.append(longest)
        longest += 1
    return torch.tensor(positions), ranks


@given(packs())
def test_each_row_gets_the_sum_of_its_document_up_to_it(pack):
    positions, ranks = pack
    documents = find_documents(positions)
    values = torch.arange(1.0, len(positions) + 1)
    rows_of = [[row for part in one.keys for row in range(*part)] for one in documents]
    sums = [values[rows].cumsum(0) for rows in rows_of]
    expected = torch.cat([x[one.shared :] for one, x in zip(documents, sums, strict=True)])

    size = {"rows": len(positions) // ranks, "ranks": ranks, "device": torch.device("cpu")}
    plans = [exchange_documents(documents, rank=rank, **size) for rank in range(ranks)]
    own = values.chunk(ranks)
    parts = [x[plan.sent] for x, plan in zip(own, plans, strict=True)]
    received = exchanged(parts, plans, lambda plan: plan.sent_counts)
    results = []
    for x, plan in zip(received, plans, strict=True):
        assert plan.received_counts == [len(one) for one in _by_source(plan, plans)]
        rows = x[plan.order]
        mixed = [rows[one.begin : one.end].cumsum(0) for one in plan.layout.spans]
        assert len(rows) == sum(map(len, mixed)) > 0
        results.append(torch.cat(mixed)[plan.results])
    returned = exchanged(results, plans, lambda plan: plan.result_counts)
    found = [x[plan.inverse] for x, plan in zip(returned, plans, strict=True)]

    assert torch.equal(torch.cat(found), expected)
    for rank, plan in enumerate(plans):
        assert plan.returned_counts == [one.result_counts[rank] for one in plans]


def _by_source(plan, plans):
    rank = plans.index(plan)
    return [torch.split(one.sent, one.sent_counts)[rank] for one in plans]


@pytest.mark.parametrize(
    ("lengths", "ranks", "assigned"),
    [
        ([7, 2, 3, 4], 2, [[0, 1], [2, 3]]),
        ([5], 3, [[0], [], []]),
        ([1, 1, 1, 1], 2, [[0, 2], [1, 3]]),
        ([3, 3, 2, 2, 2], 2, [[0, 2, 4], [1, 3]]),
    ],
)
def test_documents_are_divided_by_their_tokens(lengths, ranks, assigned):
    assert divide_documents(lengths, ranks) == assigned


def test_one_document_leaves_the_other_ranks_a_token_without_a_result():
    documents = find_documents(torch.arange(8))
    size = {"rows": 4, "ranks": 2, "device": torch.device("cpu")}
    busy, idle = (exchange_documents(documents, rank=rank, **size) for rank in range(2))

    assert busy.received_counts == [4, 4]
    assert busy.result_counts == [4, 4]
    assert idle.sent.tolist() == [0, 1, 2, 3, 0]  # its rows to the first rank, one to itself
    assert idle.received_counts == [0, 1]
    assert idle.result_counts == [0, 0]
    assert np.sum(idle.returned_counts) == 4
