"""What a worker hashes and reports when it loads published tensors. vLLM's part: tests/vllm."""

import itertools
import threading

import pytest
import torch
from resident_pages import AROUND, resident_pages

from primerl._common.checkpoint_tensors import TensorLayout
from primerl._common.digests import HashedTensor, digest_of, digest_of_all
from primerl._common.tensor_files import map_tensors, write_tensors
from primerl._common.threads import BoundedThreads
from primerl.serving.worker import checked_loading
from primerl.serving.worker.checked_loading import load_checked

NAMES = [f"layers.{i}.weight" for i in range(12)]


def published():
    return {name: torch.full((300, i + 1), float(i)).bfloat16() for i, name in enumerate(NAMES)}


def digests_of(tensors):
    return {name: digest_of(tensor) for name, tensor in tensors.items()}


EXPECTED = digests_of(published())
DIGEST = digest_of_all(EXPECTED)


class Worker:
    """A worker's model that copies the tensors that it uses, at once or when all have come."""

    def __init__(self, uses=lambda name: True, *, late=False):
        self.uses, self.late, self.held = uses, late, {}

    def load(self, tensors):
        for name, tensor in list(tensors) if self.late else tensors:
            view = tensor.unsqueeze(0).unbind()[0]
            if self.uses(name):
                self.held[name] = view.clone()
        return set(self.held)

    def receipt(self, tensors, *, expected=EXPECTED, threads=3, needs=lambda name: True):
        loaded = load_checked(
            self.load, tensors.items(), expected=expected, threads=threads, needs=needs
        )
        assert loaded.returned == set(self.held)
        return {**loaded.compare(expected), "ignored": loaded.ignored}


def even(name):
    return NAMES.index(name) % 2 == 0


def odd(name):
    return not even(name)


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("uses", [even, odd, lambda name: True, lambda name: False])
def test_the_digest_is_the_trainers_whatever_part_a_worker_uses(uses, late, threads):
    worker = Worker(uses, late=late)
    receipt = worker.receipt(published(), threads=threads)
    assert receipt == {
        "digest": DIGEST,
        "tensors": 12,
        "missing": [],
        "unexpected": [],
        "differing": [],
        "ignored": sorted(name for name in NAMES if not uses(name)),
    }
    assert digests_of(worker.held) == {n: d for n, d in EXPECTED.items() if uses(n)}


def test_only_the_needed_tensors_are_hashed(monkeypatch):
    hashed = []

    def spy(tensor):
        hashed.append(tuple(tensor.shape))
        return digest_of(tensor)

    monkeypatch.setattr(checked_loading, "digest_of", spy)
    Worker(odd).receipt(published(), needs=odd)
    assert sorted(hashed) == [(300, i + 1) for i in range(1, 12, 2)]


def test_the_bytes_of_a_tensor_that_is_not_needed_are_never_touched(tmp_path):
    """Tensors of 4 MiB: the kernel maps the pages around a page that is read, up to 64 KiB."""
    tensors = {name: torch.full((1 << 22,), i, dtype=torch.uint8) for i, name in enumerate(NAMES)}
    layout = {name: TensorLayout(t.dtype, tuple(t.shape)) for name, t in tensors.items()}
    write_tensors(tmp_path / "t.safetensors", layout, tensors.items())
    mapped = map_tensors(tmp_path / "t.safetensors")
    expected = digests_of(tensors)

    receipt = Worker(even).receipt(mapped, expected=expected, needs=even)

    assert receipt["digest"] == digest_of_all(expected)
    for name, tensor in mapped.items():
        pages = resident_pages(tensor)
        assert pages > 1000 if even(name) else pages <= AROUND


def altered(*names):
    tensors = published()
    for name in names:
        tensors[name][-1, -1] += 1
    return tensors


def test_an_altered_tensor_is_named_by_the_workers_that_need_it_and_by_no_other():
    tensors = altered(NAMES[5])
    assert Worker(even).receipt(tensors, needs=even)["differing"] == []
    assert Worker(even).receipt(tensors)["differing"] == [NAMES[5]]
    found = Worker(odd).receipt(tensors, needs=odd)
    assert found["differing"] == [NAMES[5]]
    assert found["digest"] != DIGEST


def test_all_altered_tensors_are_named_whichever_thread_hashed_them():
    wrong = [NAMES[i] for i in (0, 3, 4, 11)]
    assert Worker().receipt(altered(*wrong), threads=4)["differing"] == sorted(wrong)


def test_swapped_lost_and_additional_tensors_are_named():
    tensors = published()
    del tensors[NAMES[0]]
    tensors["extra"] = torch.zeros(3)
    tensors[NAMES[1]], tensors[NAMES[2]] = tensors[NAMES[2]], tensors[NAMES[1]]
    found = Worker().receipt(tensors)
    assert found["missing"] == [NAMES[0]]
    assert found["unexpected"] == ["extra"]
    assert found["differing"] == sorted(NAMES[1:3])


@pytest.mark.parametrize("change", [lambda t: t.float(), lambda t: t.reshape(-1)])
@pytest.mark.parametrize("needs", [even, lambda name: True])
def test_an_unused_tensor_of_another_dtype_or_shape_is_named(change, needs):
    tensors = published()
    tensors[NAMES[1]] = change(tensors[NAMES[1]])
    assert Worker(even).receipt(tensors, needs=needs)["differing"] == [NAMES[1]]


def test_without_expected_digests_all_tensors_are_hashed():
    """As after a broadcast, where the trainer compares the digest."""
    assert Worker(even).receipt(published(), expected=None)["digest"] == DIGEST
    found = Worker(even).receipt(altered(NAMES[5]), expected=None)
    assert found["differing"] == []
    assert found["digest"] != DIGEST


def test_the_loader_is_not_given_what_other_workers_need():
    given = []

    def load(tensors):
        for name, tensor in tensors:
            given.append(name)
            tensor.clone()

    loaded = load_checked(load, altered(NAMES[5]).items(), expected=EXPECTED, threads=2, needs=even)
    assert given == [name for name in NAMES if even(name)]
    assert loaded.ignored == []
    assert loaded.compare(EXPECTED)["digest"] == DIGEST


def scaled_in_place(tensor):
    tensor.mul_(2)


def changed_through_numpy(tensor):
    tensor.view(torch.uint8).numpy()[:] += 1
    tensor.clone()


@pytest.mark.parametrize("change", [scaled_in_place, changed_through_numpy])
@pytest.mark.parametrize("threads", [1, 4])
def test_a_loader_may_change_the_tensors_that_it_is_given(change, threads):
    """The digest is of the bytes that came, not of those that the loader left."""

    def load(tensors):
        for _, tensor in tensors:
            change(tensor)

    loaded = load_checked(load, published().items(), expected=EXPECTED, threads=threads)
    assert loaded.ignored == []
    assert loaded.compare(EXPECTED)["differing"] == []


def test_tensors_may_be_read_after_the_load():
    """As by vLLM, which loads layers with padding at the end; it has counted the reads before."""
    kept = {}

    def load(tensors):
        for name, tensor in tensors:
            kept[name] = tensor
            if even(name):
                tensor.to("meta")

    loaded = load_checked(load, published().items(), expected=EXPECTED, threads=2)
    assert loaded.ignored == sorted(filter(odd, NAMES))
    assert digests_of({name: tensor.clone() for name, tensor in kept.items()}) == EXPECTED


def test_a_loader_that_stops_early_did_not_get_the_tensors_that_were_hashed_ahead():
    def load(tensors):
        for _, tensor in itertools.islice(tensors, 2):
            tensor.clone()

    loaded = load_checked(load, published().items(), expected=EXPECTED, threads=4)
    assert loaded.compare(EXPECTED)["missing"] == sorted(NAMES[2:])


def threads_beside():
    return [t.name for t in threading.enumerate() if t.name.startswith("primerl-beside")]


def test_a_loader_that_fails_leaves_no_thread():
    def load(tensors):
        for count, (_, tensor) in enumerate(tensors):
            tensor.clone()
            if count == 7:
                raise OSError("the file is gone")

    with pytest.raises(OSError, match="the file is gone"):
        load_checked(load, published().items(), expected=EXPECTED, threads=4)
    assert threads_beside() == []


def test_a_digest_that_fails_is_an_error(monkeypatch):
    def failing(tensor):
        if tensor.shape[1] == 6:
            raise MemoryError("no room")
        return digest_of(tensor)

    monkeypatch.setattr(checked_loading, "digest_of", failing)
    with pytest.raises(MemoryError, match="no room"):
        Worker().receipt(published())
    assert threads_beside() == []


def test_few_tasks_are_in_flight():
    """The fifth of two threads' tasks waits until one of them has ended."""
    go, begun = threading.Event(), []
    with BoundedThreads(2) as threads:
        for _ in range(4):
            threads.submit(go.wait, 60)
        submitting = threading.Thread(target=lambda: begun.append(threads.submit(len, "abc")))
        submitting.start()
        submitting.join(0.1)
        assert not begun
        go.set()
        submitting.join(60)
    assert begun[0].result() == 3
    assert threads_beside() == []


def test_an_error_cancels_the_tasks_that_have_not_begun():
    go, running, tasks = threading.Event(), threading.Event(), []

    def first():
        running.set()
        go.wait(60)

    def fail():
        with BoundedThreads(1) as threads:
            tasks.extend([threads.submit(first), threads.submit(len, "abc")])
            running.wait(60)
            threading.Timer(0.05, go.set).start()
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        fail()
    assert [task.cancelled() for task in tasks] == [False, True]
    assert threads_beside() == []


# ---- tensors that were hashed before the pause ----


def prepared(tensors):
    return {id(tensor): HashedTensor.of(tensor) for tensor in tensors.values()}


@pytest.fixture
def hashes(monkeypatch):
    """How often tensors are hashed in the pause."""
    count = []

    def counted(tensor):
        count.append(tensor)
        return digest_of(tensor)

    monkeypatch.setattr(checked_loading, "digest_of", counted)
    return count


def loaded_after(tensors, hashed):
    worker = Worker()
    found = load_checked(worker.load, tensors.items(), expected=EXPECTED, threads=2, hashed=hashed)
    return found.compare(EXPECTED), worker.held


def test_prepared_tensors_are_not_hashed_again(hashes):
    tensors = published()
    found, held = loaded_after(tensors, prepared(tensors))

    assert found["digest"] == DIGEST
    assert hashes == []
    assert digests_of(held) == EXPECTED


def test_prepared_tensors_that_changed_or_were_replaced_are_hashed_again(hashes):
    tensors = published()
    hashed = prepared(tensors)
    tensors[NAMES[3]][0, 0] += 1
    tensors[NAMES[5]] = tensors[NAMES[5]].clone()
    found, _ = loaded_after(tensors, hashed)

    assert found["differing"] == [NAMES[3]]
    assert len(hashes) == 2


def test_prepared_tensors_that_are_exchanged_are_reported(hashes):
    tensors = published()
    hashed = prepared(tensors)
    one, two = NAMES[:2]
    tensors[one], tensors[two] = tensors[two], tensors[one]
    found, _ = loaded_after(tensors, hashed)

    assert found["differing"] == [one, two]
    assert hashes == []


def test_tensors_that_do_not_count_their_changes_are_hashed_again(hashes):
    with torch.inference_mode():
        tensors = published()
        hashed = prepared(tensors)
        found, _ = loaded_after(tensors, hashed)

    assert found["digest"] == DIGEST
    assert len(hashes) == len(NAMES)


def test_for_a_gpu_tensors_come_in_pinned_memory(monkeypatch):
    """A stand-in for pinned memory: it needs a GPU."""
    pinned = []

    def pin_memory(tensor):
        pinned.append(tensor.clone())
        return pinned[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    given = []

    def load(tensors):
        for _, tensor in tensors:
            given.append(tensor.clone())

    loaded = load_checked(load, published().items(), expected=EXPECTED, threads=2, pin=True)
    assert loaded.compare(EXPECTED)["digest"] == DIGEST
    assert len(pinned) == len(given) == len(NAMES)
    assert loaded.ignored == []
