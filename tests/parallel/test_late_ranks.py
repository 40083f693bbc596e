"""Real ranks that are late by more than a collective's time limit, or that hang.

`pytest -m slow tests/parallel/test_late_ranks.py` runs the slow test (a minute).
"""

import json

import pytest
from forked_ranks import forked_ranks

pytestmark = pytest.mark.thorough


def run(root, folder, kind):
    done = forked_ranks(root / "tests/ranks/late_ranks.py", folder, kind, ranks=3, cwd=folder)
    found = [json.loads((folder / f"{kind}-{rank}.json").read_text()) for rank in (0, 2)]
    return done, found


@pytest.mark.slow
def test_each_rank_may_be_late_where_ranks_wait_outside_of_collectives(root, tmp_path):
    """Servers, first rollouts, evaluation, loading, saving, verification, publication, report."""
    done, found = run(root, tmp_path, "late")
    assert done.returncode == 0, done.stderr[-3000:]
    for rank, one in zip((0, 2), found, strict=True):
        assert one["batches"] == [[rank, rank], [rank + 1, rank + 1]]
        assert one["step"] == 1
        assert one["published"] == [1, 0, 1, 2]


LAST = "its last report: training: micro-batches: 7, at late_ranks.py"
SAYS = {
    "stopped": "gives no sign of life: it is suspended or was killed, or its host is down",
    "asleep": "is alive, but late",
    "silent-load": (
        "has given no sign of life for 3 s, while the end of loading on all ranks was waited for"
    ),
    "never-loads": "is alive, but the end of loading on all ranks did not come within 6 s",
}


@pytest.mark.parametrize("kind", SAYS)
def test_a_rank_that_hangs_is_named_by_the_others(root, tmp_path, kind):
    done, found = run(root, tmp_path, kind)
    assert done.returncode != 0
    for one in found:
        assert f"rank 1 {SAYS[kind]}; {LAST}" in one["error"]
        assert "memory" not in one["error"]
