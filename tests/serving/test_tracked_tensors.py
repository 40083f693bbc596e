"""Which operations of a loader count as a use of a tensor."""

import pytest
import torch

from primerl.serving.worker.tracked_tensors import TrackedTensors

MATRIX = torch.arange(24.0).reshape(4, 6)


def is_used(operation, tensor=MATRIX):
    """Return whether a tensor counts as used after a loader has applied an operation to it."""
    with TrackedTensors([("m", tensor.clone())]) as tracked:
        for _, one in tracked:
            operation(one)
    return tracked.ignored == []


@pytest.mark.parametrize(
    "operation",
    [
        lambda t: (t.shape, t.dtype, t.device, t.nbytes, t.is_meta, t.type()),
        lambda t: (t.dim(), t.numel(), len(t), t.size(0), t.is_contiguous(), t.is_pinned()),
        lambda t: (torch.is_floating_point(t), t.is_same_size(MATRIX), t.data_ptr()),
        lambda t: t.unsqueeze(0).unbind(),
        lambda t: [part.narrow(0, 0, 1) for part in t.chunk(2)],
        lambda t: t[1:3, 2:4].T.detach()[0],
        lambda t: t.view(torch.uint8),
        lambda t: t.contiguous().to(torch.float32).cpu(),
        lambda t: (torch.empty_like(t), torch.zeros_like(t), torch.full_like(t, 2.0)),
        lambda t: (t.new_empty(3), t.new_zeros(3), t.new_full((3,), 2.0)),
        lambda t: torch.zeros(3).resize_as_(t),
        lambda t: (t.data, t.as_subclass(torch.nn.Parameter), torch.nn.Parameter(t)),
    ],
)
def test_shapes_views_and_tensors_alike_are_no_use(operation):
    """vLLM's loader of experts takes views of all experts, also of other workers'."""
    assert not is_used(operation)


def copied(tensor):
    return torch.zeros(4, 6).copy_(tensor)


def copied_without_overrides(tensor):
    with torch._C.DisableTorchFunctionSubclass():
        return copied(tensor)


def copied_from_a_parameter(tensor):
    parameter = torch.nn.Parameter(torch.zeros(4, 6))
    parameter.data = tensor
    return copied(parameter.detach())


@pytest.mark.parametrize(
    "operation",
    [
        copied,
        copied_without_overrides,
        copied_from_a_parameter,
        lambda t: torch.zeros(6, device="meta").copy_(t.unsqueeze(0).unbind()[0][2]),
        lambda t: torch.cat([torch.zeros(4, 6), t.data]),
        lambda t: torch.add(torch.zeros(4, 6), other=t),
        lambda t: torch._foreach_copy_([torch.zeros(4, 6)], [t]),
        lambda t: t.T.contiguous(),
        lambda t: t.T.reshape(-1),
        lambda t: t.bfloat16(),
        lambda t: t[0, 0].item(),
        lambda t: torch.equal(t, MATRIX),
        lambda t: t[[0, 2]],
        lambda t: t[0].mul_(2),
        lambda t: t.__setitem__(0, 1.0),
        lambda t: torch.empty(0).set_(t),
        lambda t: copied(torch.empty(0).set_(t.untyped_storage(), 0, (4, 6))),
        lambda t: copied(t.data),
        lambda t: copied(t.as_subclass(torch.Tensor)),
        lambda t: copied(torch.nn.Parameter(t).detach()),
        lambda t: torch.vmap(lambda row: row * 2)(t),
    ],
)
def test_a_read_is_a_use(operation):
    assert is_used(operation)


def test_a_copy_of_an_empty_tensor_is_a_use():
    assert is_used(lambda t: torch.zeros(0, 3).copy_(t), tensor=torch.zeros(0, 3))


@pytest.mark.parametrize(
    "operation",
    [
        lambda t: t.numpy().sum(),
        lambda t: t.tolist(),
        lambda t: setattr(torch.nn.Parameter(torch.zeros(4, 6)), "data", t),
    ],
)
def test_what_bypasses_the_dispatcher_is_not_seen(operation):
    """A limit that the docstring names: a good publication would be refused."""
    assert not is_used(operation)


def test_a_read_after_the_context_is_not_seen():
    with TrackedTensors([("m", MATRIX)]) as tracked:
        ((_, tensor),) = tracked
    assert torch.equal(tensor, MATRIX)
    assert tracked.ignored == ["m"]


def test_the_loader_gets_plain_tensors_that_share_the_memory():
    sliced = MATRIX[1:, 2:].T
    with TrackedTensors([("m", sliced)]) as tracked:
        ((_, tensor),) = tracked
    assert type(tensor) is torch.Tensor
    assert tensor.data_ptr() == sliced.data_ptr()
    assert tensor.stride() == sliced.stride()
    assert torch.equal(tensor, sliced)


def test_conjugated_and_negative_views_keep_their_values():
    conjugated = torch.tensor([1 + 2j, 3 - 4j]).conj()
    with TrackedTensors([("conjugated", conjugated), ("negative", conjugated.imag)]) as tracked:
        found = dict(tracked)
    assert found["conjugated"].tolist() == [1 - 2j, 3 + 4j]
    assert found["negative"].tolist() == [-2.0, 4.0]


def test_tensors_that_share_memory_are_told_apart():
    with TrackedTensors([("all", MATRIX), ("first", MATRIX[:2]), ("last", MATRIX[2:])]) as tracked:
        for name, tensor in tracked:
            if name == "first":
                tensor.clone()
    assert tracked.ignored == ["all", "last"]


def test_a_new_tensor_at_a_freed_address_is_not_mistaken_for_the_old_one():
    def tensors():
        for index in range(50):
            yield f"t{index}", torch.full((1000,), float(index))

    with TrackedTensors(tensors()) as tracked:
        for _, tensor in tracked:
            del tensor
            torch.ones(1000).clone()
    assert len(tracked.ignored) == 50


def test_uses_in_inference_mode_and_by_tensors_without_a_storage():
    with torch.inference_mode():
        assert is_used(copied)
        assert not is_used(lambda t: t[0])
    assert is_used(lambda t: torch.sparse.mm(torch.eye(4).to_sparse(), t))
