"""The check of samples itself: it accepts what is exact, and reports each kind of fault."""

import attrs
import numpy as np
import pytest
from exactness import inexact

from primerl.types import Completion, Sample

pytestmark = pytest.mark.agents


def completion(tokens, version):
    return Completion(
        token_ids=tokens,
        logprobs=[-0.5 * token for token in tokens],
        versions=[version] * len(tokens),
        finish_reason="stop",
    )


# The second request continues the first; the third begins anew.
REQUESTS = [
    ([1, 2], completion([3, 4], 1)),
    ([1, 2, 3, 4, 5], completion([6], 2)),
    ([9], completion([3, 4], 3)),
]
SAMPLES = [
    Sample(
        token_ids=[1, 2, 3, 4, 5, 6],
        loss_mask=[False, False, True, True, False, True],
        behavior_logprobs=[0.0, 0.0, -1.5, -2.0, 0.0, -3.0],
        versions=[-1, -1, 1, 1, -1, 2],
    ),
    Sample(
        token_ids=[9, 3, 4],
        loss_mask=[False, True, True],
        behavior_logprobs=[0.0, -1.5, -2.0],
        versions=[-1, 3, 3],
    ),
]


def test_exact_samples_have_no_fault():
    assert inexact(REQUESTS, SAMPLES) == []


@pytest.mark.parametrize(
    ("field", "position", "value", "fault"),
    [
        ("token_ids", 0, 7, "after other tokens"),
        ("loss_mask", 3, False, "trained 0 times"),
        ("loss_mask", 4, True, "no request sampled"),
        ("behavior_logprobs", 5, -1.0, "other logprobs"),
        ("versions", 2, 2, "trained 0 times"),
    ],
)
def test_a_change_is_reported(field, position, value, fault):
    changed = np.array(getattr(SAMPLES[0], field))
    changed[position] = value
    fields = {field: changed}
    if field == "loss_mask":
        fields["behavior_logprobs"] = np.where(changed, -1.0, 0.0)
        fields["versions"] = np.where(changed, np.maximum(SAMPLES[0].versions, 1), -1)
    sample = attrs.evolve(SAMPLES[0], **fields)

    assert fault in "\n".join(inexact(REQUESTS, [sample, SAMPLES[1]]))


def test_samples_too_many_and_too_few_are_reported():
    assert "trained 2 times" in "\n".join(inexact(REQUESTS, [*SAMPLES, SAMPLES[1]]))
    assert inexact(REQUESTS, SAMPLES[:1]) == ["the reply to request 2 is trained 0 times"]
