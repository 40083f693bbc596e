"""Which operations of a loader count as a use of a tensor."""

import pytest
import torch

from primerl.serving.worker.tracked_tensors import TrackedTensors

MATRIX = torch.arange(24.0).reshape(4, 6)


def uses_of(operation, tensor=MATRIX):
    """Return how often the use of a tensor is reported while a loader applies an operation."""
    used = []
    tracked = TrackedTensors([("m", tensor.clone())], on_use=lambda name, _: used.append(name))
    for _, one in tracked:
        operation(one)
    assert tracked.ignored == ([] if used else ["m"])
    return len(used)


@pytest.mark.parametrize(
    "operation",
    [
        lambda t: (t.shape, t.dtype, t.device, t.nbytes, t.is_meta),
        lambda t: (t.dim(), t.numel(), len(t), t.size(0), t.is_contiguous()),
        lambda t: torch.is_floating_point(t),
        lambda t: t.unsqueeze(0).unbind(),
        lambda t: [part.narrow(0, 0, 1) for part in t.chunk(2)],
        lambda t: t[1:3, 2:4].T.detach()[0],
        lambda t: t.view(torch.uint8),
        lambda t: t.contiguous().to(torch.float32).cpu(),
    ],
)
def test_shapes_and_views_are_no_use(operation):
    """vLLM's loader of experts takes views of all experts, also of other workers'."""
    assert uses_of(operation) == 0


@pytest.mark.parametrize(
    "operation",
    [
        lambda t: torch.zeros(4, 6).copy_(t),
        lambda t: torch.zeros(6, device="meta").copy_(t.unsqueeze(0).unbind()[0][2]),
        lambda t: torch.cat([torch.zeros(4, 6), t.data]),
        lambda t: torch.add(torch.zeros(4, 6), other=t),
        lambda t: t.T.contiguous(),
        lambda t: t.bfloat16(),
        lambda t: t[0, 0].item(),
        lambda t: t[[0, 2]],
        lambda t: t.numpy(),
        lambda t: t[0].mul_(2),
        lambda t: t.__setitem__(0, 1.0),
        lambda t: [torch.zeros(4, 6).copy_(t) for _ in range(3)],
    ],
)
def test_a_read_is_a_use_and_reported_once(operation):
    assert uses_of(operation) == 1


def test_a_copy_of_an_empty_tensor_is_a_use():
    assert uses_of(lambda t: torch.zeros(0, 3).copy_(t), tensor=torch.zeros(0, 3)) == 1


def test_a_copy_is_a_plain_tensor_with_the_values():
    ((_, tracked),) = TrackedTensors([("m", MATRIX)])
    copy = tracked.unsqueeze(0).clone()
    assert type(copy) is torch.Tensor
    assert torch.equal(copy[0], MATRIX)


def test_the_used_tensor_is_the_one_that_came():
    """Not a view of it: its digest is that of all its bytes."""
    used = {}
    tracked = TrackedTensors([("m", MATRIX)], on_use=used.__setitem__)
    ((_, tensor),) = tracked
    tensor[1].clone()
    assert used["m"] is MATRIX
