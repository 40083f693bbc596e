import json
import os
import random
import signal
import socket
import subprocess
import sys

import attrs
import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import make_sample, torchrun
from forked_ranks import forked_ranks

from primerl import loss, packing, parallel, testing
from primerl._common.interrupts import StoppedError
from primerl.parallel.device_mesh import mesh_device
from primerl.parallel.host_values import _decode, _encode
from primerl.parallel.launch.failures import first_failure
from primerl.parallel.launch.world import rank_device
from primerl.types import TrainingSample

FAMILIES = ["llama", "llama, tied", "qwen3", "qwen3_moe"]


@pytest.fixture(scope="session")
def found(root, tmp_path_factory):
    """What tests/ranks/sharded_training.py found on each of three ranks, in one launch."""
    folder = tmp_path_factory.mktemp("ranks")
    done = forked_ranks(root / "tests/ranks/sharded_training.py", folder, ranks=3, cwd=folder)
    assert done.returncode == 0, done.stderr[-5000:]
    assert "Warning" not in done.stderr, done.stderr[-5000:]
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(3)]


@pytest.fixture(scope="session")
def failed(root, tmp_path_factory):
    """What each of three ranks raised when rank 1 failed."""
    folder = tmp_path_factory.mktemp("ranks")
    done = torchrun(root / "tests/ranks/failing_rank.py", folder, ranks=3, cwd=folder, check=False)
    assert done.returncode != 0
    return [json.loads((folder / f"failed-{rank}.json").read_text()) for rank in range(3)]


@attrs.frozen
class Batch:
    values: object


def test_batches_arrive_exactly_on_every_rank(found):
    """Uneven sizes, many dtypes, a transposed table, no rows, NaN, None on some ranks only."""
    assert found[0]["scattered_exactly"] == 3
    assert found[0]["nothing_scattered"] == 0
    assert [one["first"] for one in found] == [[0, "a"]] * 3
    assert "Tensor is not JSON serializable" in found[0]["unsendable"]
    assert found[1]["unsendable"].startswith("rank 0 failed: TypeError: Object of type Tensor")
    expected = [[{"r": [rank, 7], "s": []}, {}] for rank in range(3)]
    assert [one["gathered"] for one in found] == [expected, [], []]
    assert [one["nothing_gathered"] for one in found] == [[[], [], []], [], []]
    assert "rows of [1, 0, 0] micro-batches" in found[0]["uneven_rows"]


def test_ranks_without_a_sample_get_a_masked_token(found):
    assert found[0]["fillers"] == 2


def test_sums_over_ranks(found):
    for one in found:
        assert one["sums"] == [3 * 2**40 + 3, pytest.approx(0.3), [3.0, 3.0]]


def test_what_cannot_be_scattered_is_refused_before_anything_is_sent(found):
    assert "batches has 1 lists, expected 3; call packing.pack" in found[0]["too_few_lists"]
    assert "[1, 0, 0] micro-batches" in found[0]["uneven"]
    assert "rank 2 passes batches" in found[2]["batches_of_others"]


def test_an_update_that_is_not_finite_on_one_rank_is_skipped_on_all(found):
    for one in found:
        allowed, moved, skipped, stopped, _ = one["guarded"]
        assert allowed == moved == [True, False, False, True]
        assert skipped == 2
        assert "the loss is not finite on 1 rank(s), the gradient norm on 0" in stopped


def test_a_head_that_is_split_over_ranks_keeps_its_logits(found):
    assert all(one["split_head"] < 1e-6 for one in found)


def test_tensors_by_name_are_summed_over_ranks(found):
    assert [one["guarded"][-1] for one in found] == [{"a": 3, "b": [3.0, 3.0]}] * 3


@pytest.mark.parametrize("kind", FAMILIES)
def test_three_ranks_train_as_one_process_does(found, kind):
    """From rank 0's weights: the losses, gradient norms and weights of three steps of SGD."""
    one = found[0][kind]

    assert one["micro_batches"] >= 2
    assert len(one["history"]) == len(one["single"]) == 3
    for ours, theirs in zip(one["history"], one["single"], strict=True):
        assert ours == pytest.approx(theirs, rel=2e-6, abs=1e-6)
    assert one["moved"] > 0.05
    assert one["weights"] < 1e-6
    assert all(other[kind]["history"] == one["history"] for other in found)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_sharded_model_materializes_no_logits_and_a_rank_may_train_no_row(found, kind):
    """Each forward pass gathers the whole head, whose product linear_logprobs then replaces."""
    for one in found:
        assert len(one[kind]["heads"]) == 3 * found[0][kind]["micro_batches"]
        assert {(*shape, of) for _, shape, of in one[kind]["heads"]} == {
            (*one[kind]["head_shape"], "Parameter")
        }
    rows = [[rows for rows, _, _ in one[kind]["heads"]] for one in found]
    assert any(0 in step and max(step) > 0 for step in zip(*rows, strict=True))


@pytest.mark.parametrize("kind", FAMILIES)
def test_each_parameter_is_held_once_over_all_ranks(found, kind):
    assert found[0][kind]["shares"] == 1.0


def test_tied_embeddings_stay_tied(found):
    assert all(one["llama, tied"]["tied"] for one in found)
    assert not any(one["llama"]["tied"] for one in found)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_sharded_model_is_published_exactly(found, kind):
    assert found[0][kind]["sent"] == found[0][kind]["names"]
    assert found[0][kind]["sent_exactly"]
    assert not [name for name in found[0][kind]["sent"] if "inv_freq" in name]


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_sharded_model_is_saved_exactly(found, kind):
    assert found[0][kind]["saved"]
    assert found[0][kind]["loaded"]


def test_only_rank_0_has_engines(found):
    assert "there is no engine" in found[0]["engines"]
    assert all("only rank 0 publishes" in one["engines"] for one in found[1:])


def test_a_weight_that_two_layers_share_is_refused(found):
    assert all("layers.1.weight is shared between a layer" in one["shared"] for one in found)


@pytest.mark.thorough
def test_when_a_rank_fails_the_others_name_it_and_stop_soon(failed):
    assert failed[1]["error"] == "ValueError"
    assert failed[1]["message"] == "the loss is NaN"
    for rank in (0, 2):  # one sleeps, as in waiting for rollouts; one is in a collective
        expected = f"rank {rank} stopped: rank 1 failed: ValueError: the loss is NaN"
        assert failed[rank]["error"] == "RuntimeError"
        assert failed[rank]["message"] == expected
        assert failed[rank]["seconds"] < 60


@pytest.mark.thorough
def test_a_rank_that_is_killed_within_a_layer_is_named_by_the_others(root, tmp_path):
    script = root / "tests/ranks/killed_rank.py"
    done = torchrun(script, tmp_path, ranks=3, cwd=tmp_path, check=False)

    assert done.returncode != 0
    for rank in (0, 2):
        found = json.loads((tmp_path / f"died-{rank}.json").read_text())
        assert found["message"].startswith(f"rank {rank} stopped: rank 1 died without an error")
        assert found["step"] == 2
        assert found["seconds"] < 60
    assert not (tmp_path / "died-1.json").exists()


def test_a_column_of_a_table_with_one_row_is_sent_as_it_is():
    table = torch.arange(10.0).reshape(2, 5)

    (found,) = _decode(*_encode([{"column": table[:1, 3], "whole": table, "row": table[1:, 2:]}]))

    assert found["column"].tolist() == [3.0]
    assert torch.equal(found["whole"], table)
    assert torch.equal(found["row"], table[1:, 2:])


def test_a_rank_that_reported_no_error_was_killed():
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")

    assert "no rank reported an error" in first_failure(dist.HashStore(), 1, lost)
    assert "SIGTERM" in first_failure(dist.HashStore(), 1, StoppedError(signal.SIGTERM))


def test_a_rank_that_is_still_dying_when_its_connections_are_lost_is_named():
    store = dist.HashStore()
    dying = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.5)"])
    store.set("primerl/rank/0", f"{socket.gethostname()} {os.getpid()}")
    store.set("primerl/rank/1", f"{socket.gethostname()} {dying.pid}")
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")

    said = first_failure(store, 0, lost, ranks=2)
    dying.wait()

    assert said.startswith("rank 1 died without an error")


def test_ranks_that_were_told_to_stop_from_outside_have_no_failure_among_them():
    here = f"{socket.gethostname()} {os.getpid()}"
    store = dist.HashStore()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    store.set("primerl/rank/0", here)
    store.set("primerl/rank/1", f"{socket.gethostname()} {ended.pid}")
    store.set("primerl/told/1", "")
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")

    for error in (StoppedError(signal.SIGTERM), KeyboardInterrupt(), lost):
        assert first_failure(store, 0, error, ranks=2) is None

    store.set("primerl/rank/2", f"{socket.gethostname()} {ended.pid}")  # killed: it was not told
    said = first_failure(store, 0, StoppedError(signal.SIGTERM), ranks=3)
    assert said.startswith("rank 2 died without an error")


def test_the_first_failure_is_the_cause():
    store = dist.HashStore()

    assert first_failure(store, 2, KeyError("x")) is None
    assert first_failure(store, 0, ValueError("later")) == "rank 2 failed: KeyError: 'x'"
    assert first_failure(store, 1, StoppedError(signal.SIGTERM)) == "rank 2 failed: KeyError: 'x'"


@pytest.fixture
def alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_each_rank_has_its_own_seed(alone):
    def draw(world):
        with world:
            return random.random(), float(np.random.rand()), torch.rand(1).item()  # noqa: NPY002

    first = draw(parallel.process_group(seed=3))
    assert draw(parallel.process_group(seed=3)) == first
    second = draw(attrs.evolve(parallel.process_group(seed=3), rank=1))
    assert all(a != b for a, b in zip(first, second, strict=True))
    assert draw(parallel.process_group(seed=4)) == second
    assert draw(parallel.process_group()) != second  # left alone


def test_without_torchrun_there_is_one_rank_and_nothing_is_done(alone):
    model = testing.tiny_model("llama")
    kind = type(model)
    world = parallel.process_group()

    with world as entered:
        assert entered is world
        assert not dist.is_initialized()
        assert (world.rank, world.world_size, world.is_first) == (0, 1, True)
        assert world.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
        assert type(parallel.shard(model)) is kind
        batch = Batch(torch.ones(1))
        assert parallel.scatter([[batch]], Batch) == [batch]
        assert parallel.all_sum(3).item() == 3
        assert parallel.all_sum(torch.ones(2, requires_grad=True)).requires_grad is False


def test_one_rank_gets_its_batches_on_its_device(alone):
    sample = make_sample(kind=TrainingSample, advantages=np.zeros(7))
    packed = packing.pack([sample], max_tokens=8, ranks=1)

    (batch,) = parallel.scatter(packed, packing.PackedBatch, device=torch.device("meta"))

    assert batch.token_ids.device.type == "meta"
    with pytest.raises(ValueError, match=r"int has no|int is not an attrs class"):
        parallel.scatter([[]], int, device=torch.device("meta"))


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_one_rank_computes_in_16_bits_with_gradients_in_32(alone, kind):
    token_ids = torch.randint(2, 60, (40,), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(25), torch.arange(15)])

    def run(dtype):
        model = parallel.shard(testing.tiny_model(kind), dtype=dtype)
        logprobs = loss.model_logprobs(model, token_ids, positions, token_ids.roll(-1))
        logprobs.sum().backward()
        return logprobs.detach(), [parameter.grad for parameter in model.parameters()]

    exact, gradients = run(torch.float32)
    rounded, rough = run(torch.bfloat16)

    assert 1e-6 < (exact - rounded).abs().max() < 0.05
    assert rounded.dtype == torch.float32
    assert {gradient.dtype for gradient in rough} == {torch.float32}
    norms = [torch.cat([g.ravel() for g in one]).norm().item() for one in (gradients, rough)]
    assert norms[1] == pytest.approx(norms[0], rel=0.05)


def test_an_error_passes_through_a_world_of_one(alone):
    with pytest.raises(KeyError), parallel.process_group():
        raise KeyError


def test_torchrun_with_one_rank_needs_no_group(alone):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        alone.setenv(name, value)
    with parallel.process_group():
        assert not dist.is_initialized()


def test_an_incomplete_environment_is_refused(alone):
    alone.setenv("RANK", "1")

    with pytest.raises(ValueError, match="WORLD_SIZE is None, expected a number"):
        parallel.process_group()


@pytest.mark.parametrize(
    ("local_rank", "gpus", "device"),
    [(0, 0, "cpu"), (7, 0, "cpu"), (0, 1, "cuda:0"), (1, 2, "cuda:1"), (7, 8, "cuda:7")],
)
def test_each_rank_of_a_host_has_its_own_gpu_or_the_cpu(local_rank, gpus, device):
    assert rank_device(local_rank, gpus=gpus) == torch.device(device)


def test_more_ranks_than_gpus_are_refused_with_what_to_do(alone):
    alone.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"2 ranks .* 1 GPU, .* --nproc-per-node 1, or set CUDA_V"):
        rank_device(1, gpus=1)


def test_ranks_that_ask_for_the_cpu_get_it_beside_a_gpu(alone):
    """More ranks than GPUs are then no error."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        alone.setenv(name, value)
    alone.setattr(torch.cuda, "is_available", lambda: True)
    alone.setattr(torch.cuda, "device_count", lambda: 1)

    assert parallel.process_group(device="cpu").device == torch.device("cpu")
    with pytest.raises(ValueError, match="2 ranks|at least 2 ranks"):
        parallel.process_group()
    alone.setenv("LOCAL_RANK", "0")
    assert parallel.process_group().device == torch.device("cuda", 0)


def test_a_mesh_is_where_its_group_is(alone):
    """The ranks of a group of CPU tensors shard on the CPU, even beside a GPU."""
    alone.setattr(torch.cuda, "is_available", lambda: True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert mesh_device() == "cpu"
    finally:
        dist.destroy_process_group()


def test_a_timeout_of_zero_is_refused():
    with pytest.raises(ValueError, match="timeout_s is 0"):
        parallel.process_group(timeout_s=0)


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (None, "rank 0 passes no batches"),
        ([[], []], "batches has 2 lists, expected 1"),
    ],
)
def test_errors_of_scatter(batches, message):
    with pytest.raises(ValueError, match=message):
        parallel.scatter(batches, Batch)


def test_only_attrs_classes_are_scattered():
    with pytest.raises(ValueError, match="dict is not an attrs class"):
        parallel.scatter([[{}]], dict)


def test_a_field_that_cannot_be_sent_is_named():
    from primerl.parallel.host_values import _fields

    with pytest.raises(ValueError, match="Batch.values is a list; expected a tensor"):
        _fields(Batch([1, 2]))
