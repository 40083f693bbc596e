import errno
import os
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path

import attrs
import cloudpickle
import numpy as np
import pytest
from conftest import make_sample

from primerl._common import shared_folder
from primerl._common.shared_folder import SharedFolder, shared_memory
from primerl.replay import RouteShape, file_server
from primerl.replay import store as stores
from primerl.replay.file_server import NAME
from primerl.replay.recordings import runs_of
from primerl.replay.references import discard, read
from primerl.replay.store import BadRoutes, Store

SHAPE = RouteShape(layers=(1, 3), decoder_layers=4, experts=8, k=2)
PAGE = 4096  # bytes, which a file in shared memory takes at least


def rows_of(tokens, *, seed=0, layers=2):
    rng = np.random.default_rng(seed)
    return np.argsort(rng.random((tokens, layers, 8)), axis=-1)[..., :2].astype(np.uint8)


def versions_of(tokens, version=0):
    return np.full(tokens, version, np.int32)


def put(store, tokens=6, *, start=0, seed=0, shared=0, version=0):
    rows = rows_of(tokens, seed=seed)
    return store.put(rows, start=start, versions=versions_of(tokens, version), shared=shared)


def files_of(store):
    return sorted(path for path in store._path.iterdir() if NAME.fullmatch(path.name))


def file_of(store, reference):
    return store._path / reference.rpartition("/")[2].partition(".")[0]


def sizes_of(store):
    """The size of each file that isn't another's name."""
    return {p.stat().st_ino: p.stat().st_size for p in store._path.iterdir() if p.name[0] != "."}


@pytest.fixture(autouse=True)
def files_for_all(monkeypatch):
    """Files for all routes: those of these tests are few enough to travel in references."""
    monkeypatch.setattr("primerl.replay.references.INLINE_BYTES", 0)


@pytest.fixture
def store():
    with Store(SHAPE, max_bytes=1 << 20) as store:
        yield store


def test_what_is_put_is_read(store):
    rows = rows_of(6)
    versions = np.array([2, 2, 3, 3, 3, 5], np.int32)
    (reference,) = store.put(rows, start=10, versions=versions)
    assert reference.startswith("shm:")
    found = read(reference)
    assert found.start == 10
    assert found.rows.tolist() == np.sort(rows, axis=-1).tolist()
    assert found.rows.dtype == np.int16
    assert found.versions.tolist() == [2, 2, 3, 3, 3, 5]
    assert found.versions.dtype == np.int32


@pytest.mark.parametrize("first", range(8, 18, 3))
@pytest.mark.parametrize("last", range(8, 19, 2))
def test_spans_are_clipped(store, first, last):
    rows = np.sort(rows_of(6), axis=-1)
    versions = np.arange(6)
    (reference,) = store.put(rows, start=10, versions=versions)
    found = read(reference, span=(first, last))
    inside = [token for token in range(first, last) if 10 <= token < 16]
    assert found.rows.tolist() == rows[[token - 10 for token in inside]].tolist()
    assert found.versions.tolist() == [token - 10 for token in inside]
    if inside:
        assert found.start == inside[0]


@pytest.mark.parametrize("layers", [(2,), (1, 2), (1, 3), (0, 1, 3), (0, 1, 2, 3)])
@pytest.mark.parametrize("shared", [0, 2])
def test_layers_with_experts_are_picked(layers, shared):
    shape = attrs.evolve(SHAPE, layers=layers)
    with Store(shape, max_bytes=1 << 20) as store:
        rows = rows_of(5, layers=4)
        references = store.put(
            rows.astype(np.uint16), start=0, versions=versions_of(5), shared=shared
        )
        found = np.concatenate([read(reference).rows for reference in references])
        assert found.tolist() == np.sort(rows[:, list(layers)], axis=-1).tolist()


def test_no_rows_have_no_references(store):
    assert put(store, 0) == ()
    assert files_of(store) == []


def test_shared_rows_are_stored_once(store):
    rows = rows_of(50, seed=1)
    references = [
        store.put(
            np.concatenate([rows, rows_of(4, seed=10 + i)]),
            start=0,
            versions=versions_of(54),
            shared=50,
        )
        for i in range(5)
    ]
    assert len({reference for pair in references for reference in pair}) == 10
    assert len(sizes_of(store)) == 6
    for i, (prompt, reply) in enumerate(references):
        assert read(prompt).rows.tolist() == np.sort(rows, axis=-1).tolist()
        assert read(reply).start == 50
        assert read(reply).rows.tolist() == np.sort(rows_of(4, seed=10 + i), axis=-1).tolist()
    for i, pair in enumerate(references):
        sample = make_sample(prompt=50, completion=5, routes=pair)
        store.check(sample)
        assert discard([sample]) == 2
        assert discard([sample]) == 0
        assert len(sizes_of(store)) == (5 - i if i < 4 else 0)
        with pytest.raises(FileNotFoundError):
            read(pair[0])


@pytest.mark.parametrize("change", ["version", "start", "seed", "dtype"])
def test_other_content_is_not_shared(store, change):
    put(store, shared=6)
    if change == "dtype":  # an id of 64 bits could be that of another expert in fewer
        store.put(rows_of(6).astype(np.int64), start=0, versions=versions_of(6), shared=6)
    else:
        put(store, shared=6, **{change: 7})
    assert len(sizes_of(store)) == 2


def test_concurrent_puts_of_shared_rows(store):
    ready = threading.Barrier(8)
    found = []

    def put_one(seed):
        ready.wait(60)
        for _ in range(5):
            found.append(put(store, shared=6))
            found.append(put(store, seed=seed))

    threads = [threading.Thread(target=put_one, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len({reference for (reference,) in found}) == 80
    assert len(sizes_of(store)) == 1 + 40
    for (reference,) in found:
        assert len(read(reference).rows) == 6


def test_links_may_be_impossible(store, monkeypatch):
    def refused(*paths):
        raise PermissionError("no links here")

    monkeypatch.setattr(stores.os, "link", refused)
    first, second = put(store, shared=6)[0], put(store, shared=6)[0]
    assert read(first).rows.tolist() == read(second).rows.tolist()
    assert len(sizes_of(store)) == 2


def test_the_oldest_make_room():
    with Store(SHAPE, max_bytes=5 * PAGE + PAGE // 2) as small:
        references = []
        for i in range(5):
            references += put(small, seed=1, shared=6) if i == 1 else put(small, seed=i)
            os.utime(file_of(small, references[-1]), (1000 + i, 1000 + i))
        assert len(sizes_of(small)) == 5
        references += put(small, seed=1, shared=6)  # which makes the shared one new again
        references += put(small, seed=9)
        references += put(small, seed=10)
        gone = [i for i, r in enumerate(references) if not file_of(small, r).exists()]
        assert gone == [0, 2]
        with pytest.raises(BadRoutes, match="discarded, or removed to make room"):
            small.check(make_sample(routes=[references[0]]))


def test_all_names_of_an_evicted_file_go_with_it():
    with Store(SHAPE, max_bytes=PAGE + PAGE // 2) as store:
        put(store, shared=6)
        put(store, shared=6)
        os.utime(files_of(store)[0], (1000, 1000))
        put(store, seed=1)
        assert len(files_of(store)) == 1


def test_what_a_killed_process_was_writing_is_evicted_too():
    with Store(SHAPE, max_bytes=PAGE + PAGE // 2) as store:
        left = store._path / f".{'a' * 32}.partial"
        left.write_bytes(bytes(990))
        os.utime(left, (1000, 1000))
        put(store)
        assert not left.exists()
        assert len(files_of(store)) == 1


def test_a_full_store_is_not_looked_through_for_each_file(monkeypatch):
    looked = []
    evict = stores._evict
    monkeypatch.setattr(stores, "_evict", lambda *args: looked.append(1) or evict(*args))
    with Store(SHAPE, max_bytes=64 * PAGE) as store:
        for seed in range(192):
            put(store, seed=seed)
        assert 60 - 1 <= len(files_of(store)) <= 64
    assert len(looked) <= 192 // 4 + 1


def test_files_count_with_the_pages_that_they_take():
    with Store(SHAPE, max_bytes=8 * PAGE) as store:
        for seed in range(20):
            put(store, seed=seed)
        taken = sum(512 * path.stat().st_blocks for path in files_of(store))
        assert 0 < taken <= 8 * PAGE


def test_a_file_that_cannot_be_opened_was_not_discarded(store, monkeypatch):
    (reference,) = put(store)

    def refuse(*_args, **_kwargs):
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(file_server.os, "open", refuse)
    with pytest.raises(OSError, match="too many open files"):
        read(reference)
    with pytest.raises(OSError, match="too many open files"):
        store.check(make_sample(routes=[reference]))


def test_integers_of_numpy_are_integers():
    shape = RouteShape(layers=np.array([1, 3]), decoder_layers=4, experts=8, k=2)
    with Store(shape) as store:
        (reference,) = put(store, start=np.int64(2))
        assert read(reference).start == 2


def test_a_put_during_the_removal_leaves_nothing(monkeypatch):
    """A copy in another process puts while the owner closes."""
    late = []
    with Store(SHAPE) as store:
        put(store)
        copy = pickle.loads(pickle.dumps(store))
        rmtree = shared_folder.shutil.rmtree

        def slow(path, **options):
            with pytest.raises(RuntimeError, match="the store of routes was closed"):
                put(copy)
            late.append(path)
            rmtree(path, **options)

        monkeypatch.setattr(shared_folder.shutil, "rmtree", slow)
    assert len(late) == 1
    assert not late[0].exists()


def test_what_is_left_of_a_removal_goes_with_the_next_one(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_folder.shutil, "rmtree", lambda *_args, **_options: None)
    with Store(SHAPE, folder=tmp_path) as store:
        put(store)
    assert len(list(tmp_path.iterdir())) == 1
    monkeypatch.undo()
    with Store(SHAPE, folder=tmp_path):
        pass
    assert not list(tmp_path.iterdir())


def test_a_host_whose_name_begins_like_another_removes_nothing_of_it(tmp_path, monkeypatch):
    """Locks may not be seen by other hosts."""
    monkeypatch.setattr(shared_folder.socket, "gethostname", lambda: "gpu-2")
    with Store(SHAPE, folder=tmp_path) as store:
        (reference,) = put(store)
        monkeypatch.setattr(shared_folder.fcntl, "flock", lambda *_args: None)
        monkeypatch.setattr(shared_folder.socket, "gethostname", lambda: "gpu")
        with Store(SHAPE, folder=tmp_path):
            assert len(read(reference).rows) == 6


def test_a_full_filesystem(store, monkeypatch):
    def full(descriptor, data):
        os.write(descriptor, data[:3])
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(stores, "_write_all", full)
    with pytest.raises(RuntimeError, match="no space for .* lower max_bytes"):
        put(store, shared=6)
    assert [path.name for path in store._path.iterdir()] == [".users"]


def test_routes_larger_than_the_store():
    with Store(SHAPE, max_bytes=100) as store:
        with pytest.raises(RuntimeError, match="more than max_bytes=100"):
            put(store, 100)
        assert files_of(store) == []


@pytest.mark.parametrize("kind", [pickle, cloudpickle])
def test_a_copy_puts_and_checks_but_owns_nothing(store, kind):
    with pickle.loads(kind.dumps(store)) as copy:
        (reference,) = put(copy)
        sample = make_sample(prompt=3, completion=4, routes=[reference])
        copy.check(sample)
        store.check(sample)
    copy.close()
    assert len(read(reference).rows) == 6
    store.close()
    with pytest.raises(RuntimeError, match="was closed"):
        put(copy)
    with pytest.raises(BadRoutes, match="discarded"):
        copy.check(sample)
    assert not copy._path.exists()


def test_a_closed_store_cannot_be_used(store):
    folder = store._path
    put(store)
    store.close()
    assert not folder.exists()
    for use in (lambda: put(store), lambda: pickle.dumps(store)):
        with pytest.raises(RuntimeError, match="not open"):
            use()
    with pytest.raises(RuntimeError, match="not open"):
        put(Store(SHAPE))


def test_a_folder_that_hosts_share(tmp_path):
    with Store(SHAPE, folder=tmp_path, max_bytes=1 << 20) as store:
        (reference,) = put(store)
        assert reference.startswith(f"file:{tmp_path}/primerl-")
        assert len(read(reference).rows) == 6
        store.check(make_sample(routes=[reference]))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="not a folder"):
        Store(SHAPE, folder=tmp_path / "none")


def test_the_default_bound_is_half_of_the_free_space(tmp_path):
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    with Store(SHAPE, folder=tmp_path) as store:
        assert 0.25 * free < store._max_bytes < 0.75 * free


CHILD = """
import pathlib, sys, time
import cloudpickle
import numpy as np
from primerl.replay import RouteShape, references
from primerl.replay.store import Store

references.INLINE_BYTES = 0

def put(store):
    return store.put(np.array([[[0, 1], [2, 3]]]), start=0, versions=np.zeros(1, int))

if len(sys.argv) > 2:
    store = cloudpickle.loads(pathlib.Path(sys.argv[2]).read_bytes())
else:
    shape = RouteShape(layers=(1, 3), decoder_layers=4, experts=8, k=2)
    store = Store(shape, folder=sys.argv[1] or None).__enter__()
print(put(store)[0], flush=True)
time.sleep(600)
"""


def killed_after_putting(*arguments):
    """Starts a process that puts; returns what it put, and kills it."""
    command = [sys.executable, "-c", CHILD, *(str(argument) for argument in arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8") as child:
        reference = child.stdout.readline().strip()
        child.send_signal(signal.SIGKILL)
    return reference


@pytest.mark.parametrize("shared", [False, True])
def test_what_a_killed_owner_leaves_is_removed_by_the_next_store(tmp_path, shared):
    folder = tmp_path if shared else None
    reference = killed_after_putting(folder or "")
    left = Path(reference.removeprefix("file:")).parent
    if shared:
        with Store(SHAPE, max_bytes=1000):
            pass  # one elsewhere leaves it
        assert left.exists()
    else:  # which other processes of this user may have removed already
        left = shared_memory() / reference.removeprefix("shm:").partition("/")[0]
    with Store(SHAPE, folder=folder, max_bytes=1000):
        assert not left.exists()


def test_a_killed_copy_leaves_what_it_put_to_the_owner(tmp_path):
    with Store(SHAPE, max_bytes=1 << 20) as store:
        (tmp_path / "store").write_bytes(cloudpickle.dumps(store))
        reference = killed_after_putting("", tmp_path / "store")
        SharedFolder("another").close()
        assert read(reference).rows.tolist() == [[[0, 1], [2, 3]]]
        folder = store._path
    assert not folder.exists()


def test_runs():
    assert runs_of(np.array([4, 4, 2, 4])) == [(2, 4), (1, 2), (1, 4)]
    assert runs_of(np.zeros(0, int)) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": np.zeros((6, 2), int)}, r"expected integers \[t, 2 or 4, 2\]"),
        ({"rows": np.zeros((6, 3, 2), int)}, r"expected integers \[t, 2 or 4, 2\]"),
        ({"rows": np.zeros((6, 2, 2))}, r"expected integers \[t, 2 or 4, 2\]"),
        ({"rows": np.zeros((6, 2, 3), int)}, "3 experts per token, expected 2"),
        ({"rows": np.full((6, 2, 2), 8)}, "layer 1 of token 20 has expert 8"),
        ({"rows": np.zeros((6, 2, 2), int)}, "layer 1 of token 20 has an expert twice"),
        ({"versions": np.zeros(5, int)}, r"expected integers \(6,\)"),
        ({"versions": np.zeros(6)}, r"expected integers \(6,\)"),
        ({"versions": np.full(6, -1)}, "version is negative"),
        ({"versions": np.full(6, 2**31)}, "more than 32 bits"),
        ({"start": -1}, "start=-1"),
        ({"shared": 7}, "shared=7"),
        ({"shared": -1}, "shared=-1"),
    ],
)
@pytest.mark.parametrize("shared", [0, 6])
def test_faults_of_what_is_put(store, change, message, shared):
    good = {"rows": rows_of(6), "start": 20, "versions": versions_of(6), "shared": shared}
    with pytest.raises(ValueError, match=message):
        store.put(**good | change)
    assert sizes_of(store) == {}


def test_a_fault_in_a_layer_behind_others(store):
    rows = rows_of(6, layers=4).astype(int)
    rows[4, 3] = -1, 2
    with pytest.raises(ValueError, match="layer 3 of token 14 has -1 in only some places"):
        store.put(rows, start=10, versions=versions_of(6))
    rows[4, 3], rows[4, 2] = [1, 2], [99, 99]  # layer 2 has no experts
    store.put(rows, start=10, versions=versions_of(6))


class TestCheck:
    def sample(self, routes, **changes):
        return make_sample(prompt=4, completion=4, routes=routes, **changes)

    def test_rows_before_trained_tokens_suffice(self, store):
        # Tokens 4 to 7 are trained: rows 3 to 6 led to them.
        store.check(self.sample(put(store, 4, start=3)))
        store.check(self.sample([*put(store, 3, start=3), *put(store, 2, start=6)]))
        store.check(self.sample(put(store, 8)))

    def test_missing_rows(self, store):
        for tokens, start, missing in ((3, 4, 3), (3, 3, 6), (2, 1, 3)):
            with pytest.raises(BadRoutes, match=f"the token {missing} before it has no"):
                store.check(self.sample(put(store, tokens, start=start)))
        with pytest.raises(BadRoutes, match="the token 5 before it has no"):
            store.check(self.sample([*put(store, 5), *put(store, 2, start=6)]))

    def test_rows_of_another_version_are_those_of_another_request(self, store):
        sample = self.sample(put(store, 8, version=3), version=7)
        with pytest.raises(BadRoutes, match="token 4 was sampled by version 7, but .* version 3"):
            store.check(sample)

    def test_the_first_recorded_row_has_the_version(self, store):
        routes = [*put(store, 6, version=3), *put(store, 8, version=4)]
        versions = np.array([-1, -1, -1, -1, 3, 3, 3, 4])
        store.check(attrs.evolve(self.sample(routes), versions=versions))
        with pytest.raises(BadRoutes, match="token 4 was sampled by version 4, but"):
            store.check(attrs.evolve(self.sample(routes), versions=np.minimum(versions + 1, 4)))

    def test_rows_beyond_the_sample(self, store):
        for tokens, start in ((9, 0), (1, 8), (3, 7)):
            with pytest.raises(BadRoutes, match="the sample has 8 tokens"):
                store.check(self.sample(put(store, tokens, start=start)))

    def test_no_references(self, store):
        with pytest.raises(BadRoutes, match="no routes"):
            store.check(self.sample([]))

    @pytest.mark.parametrize(
        ("field", "value"),
        [("layers", (0, 3)), ("decoder_layers", 5), ("experts", 9), ("k", 1)],
    )
    def test_routes_of_another_model(self, store, field, value):
        other = pickle.loads(pickle.dumps(store))
        other.shape = attrs.evolve(SHAPE, **{field: value})
        with pytest.raises(BadRoutes, match=f"{field} is"):
            other.check(self.sample(put(store, 8)))

    def test_damage(self, store):
        (reference,) = put(store, 8)
        path = file_of(store, reference)
        good = path.read_bytes()
        head = len(good) - 8 * 2 * 2 // 8  # at least so many bytes are chunks
        for length in (0, 5, 30, head // 2, len(good) - 1):
            path.write_bytes(good[:length])
            with pytest.raises(BadRoutes, match="cut off"):
                store.check(self.sample([reference]))
            with pytest.raises(ValueError, match="cut off"):
                read(reference)
        for place in (0, 10, 15, 25, 60, head // 2):
            path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
            with pytest.raises(BadRoutes, match="damaged|cut off|not a file of recorded"):
                store.check(self.sample([reference]))
        path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        store.check(self.sample([reference]))  # only the head is read
        with pytest.raises(
            ValueError, match="tokens 0 to 7, layers 1 to 3: .* of chunk 0 is wrong"
        ):
            read(reference)
        with pytest.raises(
            ValueError, match="tokens 2 to 4, layers 1 to 3: .* of chunk 0 is wrong"
        ):
            read(reference, span=(2, 5))

    def test_references_that_are_not_the_stores(self, store):
        (reference,) = put(store, 8)
        with Store(SHAPE, max_bytes=1 << 20) as other:
            with pytest.raises(BadRoutes, match="not from this store"):
                store.check(self.sample(put(other, 8)))
        name = reference.rpartition("/")[2]
        for wrong in (
            f"file:{store._path}/{name}",
            f"shm:../{name}",
            name,
            "",
            f"{reference}/../x",
        ):
            with pytest.raises(BadRoutes, match="not from this store"):
                store.check(self.sample([wrong]))


class TestHostileReferences:
    def test_names_that_lead_elsewhere(self, store, tmp_path):
        (reference,) = put(store)
        folder, _, name = reference.removeprefix("shm:").partition("/")
        secret = tmp_path / name
        secret.write_bytes(b"secret")
        for wrong in (
            f"shm:{folder}/../{folder}/{name}",
            f"shm:../{tmp_path.name}/{name}",
            f"shm:{folder}/.users",
            f"shm:{name}",
            f"shm:/{name}",
            f"file:{tmp_path}/{name}",
            f"file:relative/{folder}/{name}",
            "file:/etc/passwd",
            "file:/etc/passwd\0",
            f"ftp:{folder}/{name}",
            f"http://localhost:1/{name}",
            "",
        ):
            with pytest.raises(ValueError, match="not a reference|not a file|not an address"):
                read(wrong)
            with pytest.raises(ValueError, match="not a reference|not a file|not an address"):
                discard([make_sample(routes=[wrong])])
        assert secret.exists()

    def test_links_and_other_files(self, store, tmp_path):
        (reference,) = put(store)
        path = file_of(store, reference)
        elsewhere = tmp_path / path.name
        elsewhere.write_bytes(path.read_bytes())
        path.unlink()
        path.symlink_to(elsewhere)
        with pytest.raises(FileNotFoundError):
            read(reference)
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(FileNotFoundError):
            read(reference)
        path.unlink()
        path.mkdir()
        with pytest.raises(FileNotFoundError):
            read(reference)
        path.rmdir()

    def test_folders_of_others(self, tmp_path):
        with Store(SHAPE, folder=tmp_path, max_bytes=1 << 20) as store:
            (reference,) = put(store)
            store._path.chmod(0o755)
            with pytest.raises(ValueError, match="not a private folder"):
                read(reference)
            store._path.chmod(0o700)
            moved = store._path.with_name("moved")
            store._path.rename(moved)
            store._path.symlink_to(moved)
            with pytest.raises(ValueError, match="not a private folder"):
                read(reference)
            store._path.unlink()
            moved.rename(store._path)
            assert len(read(reference).rows) == 6


def test_a_store_removes_the_routes_of_references(tmp_path):
    with Store(SHAPE) as store, Store(SHAPE) as other:
        (kept,), (gone,), (foreign,) = put(store), put(store, seed=1), put(other)
        copy = pickle.loads(pickle.dumps(store))

        assert copy.discard([gone, gone, foreign, "inline:x", f"{kept}0"]) == 1
        assert files_of(store) == [file_of(store, kept)]
        assert files_of(other) == [file_of(other, foreign)]
        assert store.discard([gone]) == 0
