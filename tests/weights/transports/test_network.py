"""Publications that stay in the memory of the trainer's hosts, and are read from there by TCP."""

import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from publishing import Replica, Replicas, same_bits, train
from waiting import until

from primerl import models, testing, weights
from primerl._common.checkpoint_tensors import TensorLayout
from primerl.weights.transports.publications import publisher, remote_file
from primerl.weights.transports.publications.folder_reader import FolderReader
from primerl.weights.transports.publications.manifests import FileSource, read_manifest
from primerl.weights.transports.publications.publisher import Publisher
from primerl.weights.transports.publications.remote_file import RemoteFile
from primerl.weights.transports.publications.server import PublicationServer

NAMES = "abcd"
SIZE = 100_000  # bytes of each tensor
FULL = "00000001.full.safetensors"


def tensors_of(version):
    """Four tensors of different bytes; each version changes a few of each."""
    tensors = {
        name: torch.arange(SIZE, dtype=torch.int64).mul(n + 3).to(torch.uint8)
        for n, name in enumerate(NAMES)
    }
    for tensor in tensors.values():
        tensor[:version] = 100 + version
    return tensors


def expected(names, version):
    tensors = tensors_of(version)
    return {name: tensors[name] for name in names}


class Host:
    """A host of the trainer: a publisher, whose files are in a folder that readers don't use."""

    def __init__(self, folder, memory, **settings):
        memory.mkdir()
        self.folder, self.memory = folder, memory
        self.server = PublicationServer(memory, "127.0.0.1")
        self.publisher = Publisher(
            folder, files=memory, source=self.server.source, **{"encoding": "delta"} | settings
        )

    def publish(self, *versions):
        for version in versions:
            tensors = tensors_of(version)
            layout = {name: TensorLayout(t.dtype, tuple(t.shape)) for name, t in tensors.items()}
            self.publisher.prepare(version, layout, tensors.items())
            self.publisher.commit()


@pytest.fixture
def host(tmp_path):
    with contextlib.ExitStack() as stack:
        one = Host(tmp_path / "shared", tmp_path / "memory")
        stack.callback(lambda: one.server.close())
        one.publish(1)
        yield one


@pytest.fixture
def readers(tmp_path):
    made = []

    def reader(names=NAMES):
        folder = tmp_path / "shared"
        made.append(FolderReader(folder, needs=lambda name: name in names, timeout_s=60.0))
        return made[-1]

    yield reader
    for one in made:
        one.close()


def read(reader, version):
    """Fetch a version; return copies of the tensors that are not on the meta device."""
    reader.fetch(version)
    _, tensors = reader.open(version)
    copies = {name: tensor.clone() for name, tensor in tensors.items() if not tensor.is_meta}
    reader.release()
    return copies


# ---- receivers ----


def test_a_receiver_reads_only_what_it_needs_from_the_trainers_memory(host, readers, tmp_path):
    sent = recorded(host.server)
    assert same_bits(read(readers("bd"), 1), expected("bd", 1))
    size = (tmp_path / "memory" / FULL).stat().st_size
    assert 2 * SIZE < sum(sent) < size - SIZE
    assert [path.name for path in host.folder.iterdir()] == ["00000001.json"]


def recorded(server):
    """A list of the sizes of all answers."""
    sizes = []
    real = server._server.RequestHandlerClass

    class Recording(real):
        def _send(self, file, start, end, deadline):
            sizes.append(end - start)
            super()._send(file, start, end, deadline)

    server._server.RequestHandlerClass = Recording
    return sizes


def test_deltas_are_fetched_checked_and_not_kept(host, readers):
    reader = readers()
    read(reader, 1)
    sent = recorded(host.server)
    host.publish(2)
    assert same_bits(read(reader, 2), expected(NAMES, 2))
    (delta,) = host.memory.glob("*.delta.*")
    assert sum(sent) == delta.stat().st_size < SIZE
    (part,) = reader._copy._parts.values()
    assert not (part.path.parent / "fetched").exists()


def test_a_late_receiver_reads_the_full_version_and_the_deltas_after_it(host, readers):
    host.publish(2, 3)
    late = readers("a")
    assert same_bits(read(late, 3), expected("a", 3))
    assert same_bits(read(readers("ac"), 3), expected("ac", 3)), "added to the host's copy"
    host.publish(4)
    assert same_bits(read(late, 4), expected("a", 4))


def test_full_versions_without_deltas_are_read_while_others_overwrite_them(tmp_path, readers):
    one = Host(tmp_path / "shared", tmp_path / "memory", encoding="full", in_memory=True)
    reader = readers("ab")
    for version in (1, 2, 3, 4):
        one.publish(version)
        one.publisher.forget_before_snapshot()
        assert same_bits(read(reader, version), expected("ab", version))
    assert len(list(one.memory.iterdir())) == 2, "the last one, and the spare one"
    one.server.close()


def test_many_streams_read_one_file(host, tmp_path, monkeypatch):
    monkeypatch.setattr(remote_file, "_PIECE", 1000)
    sent = recorded(host.server)
    remote(host, threads=8).copy(tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == (host.memory / FULL).read_bytes()
    assert len(sent) > 400
    assert max(sent) == 1000


def remote(host, *, threads=2, **changed):
    """The file of version 1, or of what a manifest with other values describes."""
    manifest = read_manifest(host.folder, 1)
    for name, value in changed.items():
        object.__setattr__(manifest, name, value)
    return RemoteFile(host.folder, manifest, threads=threads)


# ---- faults of the trainer's host ----


def test_a_trainer_that_ended_is_named_and_the_old_version_stays(host, readers):
    reader = readers()
    read(reader, 1)
    host.publish(2)
    host.server.close()

    place = f"00000002.delta.safetensors in {host.folder} of {host.server.source}"
    with pytest.raises(RuntimeError, match=f"{place} could not be read: no connection"):
        reader.fetch(2)
    assert same_bits(read(reader, 1), expected(NAMES, 1))

    resumed = Host(host.folder, host.memory.with_name("resumed"))
    resumed.publish(2)
    assert read_manifest(host.folder, 2).kind == "full"
    assert same_bits(read(reader, 2), expected(NAMES, 2))
    resumed.server.close()


def test_a_connection_that_breaks_in_the_middle(host, readers, tmp_path):
    """Half of a piece arrives; nothing is left of it, and the version before can be opened."""
    reader = readers()
    read(reader, 1)
    host.publish(2)
    whole = (host.memory / "00000002.delta.safetensors").read_bytes()
    with answering(b"\0" + whole[: len(whole) // 2]) as port:
        redirect(host.folder / "00000002.json", port=port)
        with pytest.raises(RuntimeError, match="00000002.*its host ended the connection"):
            reader.fetch(2)
    assert same_bits(read(reader, 1), expected(NAMES, 1))
    redirect(host.folder / "00000002.json", port=host.server.source.port)
    assert same_bits(read(reader, 2), expected(NAMES, 2))


def test_a_host_that_speaks_another_protocol(host, tmp_path):
    with answering(b"HTTP/1.1 400 Bad Request") as port:
        other = FileSource("127.0.0.1", port, host.server.source.token)
        with pytest.raises(RuntimeError, match="does not speak this protocol"):
            remote(host, source=other).copy(tmp_path / "copy")


def test_a_host_that_sends_nothing_more_is_given_up(host, tmp_path, monkeypatch):
    """It died without closing its connections, or was stopped: only time tells."""
    monkeypatch.setattr(remote_file, "_SILENT_S", 0.5)
    monkeypatch.setattr(remote_file, "timeout_of", lambda size: 60.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:  # the kernel accepts
        silent = FileSource("127.0.0.1", listener.getsockname()[1], host.server.source.token)
        with pytest.raises(RuntimeError, match="its host sent nothing for 0.5 s"):
            remote(host, source=silent).copy(tmp_path / "copy")


@contextlib.contextmanager
def answering(answer):
    """A port at which each connection gets the same answer, and is closed."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.recv(1000)
                        connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(60)


def redirect(path, **changed):
    manifest = json.loads(path.read_text())
    manifest["source"] |= changed
    path.write_text(json.dumps(manifest))


def test_altered_bytes_of_a_full_version_are_found(host, readers):
    with (host.memory / FULL).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    with pytest.raises(ValueError, match="copy of version 1 is wrong: d differ"):
        readers().fetch(1)


def test_an_altered_delta_is_refused(host, readers):
    reader = readers()
    read(reader, 1)
    host.publish(2)
    with (host.memory / "00000002.delta.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    with pytest.raises(ValueError, match="00000002.delta.safetensors .* is altered"):
        reader.fetch(2)
    assert same_bits(read(reader, 1), expected(NAMES, 1))


def test_a_host_without_room_for_the_copy(host, readers, monkeypatch):
    def full(descriptor, data, place):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(remote_file.os, "pwrite", full)
    with pytest.raises(RuntimeError, match=r"could not be copied into .*No space left"):
        readers().fetch(1)
    monkeypatch.undo()
    assert same_bits(read(readers(), 1), expected(NAMES, 1))


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"token": "short"}, "the token"),
        ({"host": "a..b"}, "'a..b' does not appear to be an IPv4"),
        ({"host": "127.0.0.1\0.elsewhere"}, "'127.0.0.1.*' does not appear to be an IPv4"),
        ({"host": 2130706433}, "the host of its source is 2130706433, expected an IP address"),
    ],
)
def test_a_source_that_is_no_address_is_refused(host, changed, why):
    redirect(host.folder / "00000001.json", **changed)
    with pytest.raises(ValueError, match=f"00000001.json .* is not a valid manifest: {why}"):
        read_manifest(host.folder, 1)


def test_only_the_trainers_account_can_read_the_token(host, monkeypatch):
    assert (host.folder / "00000001.json").stat().st_mode & 0o777 == 0o600

    def forbidden(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", forbidden)  # root may read everything
    with pytest.raises(ValueError, match=r"00000001.json .* run the server under the trainer's"):
        read_manifest(host.folder, 1)


def test_a_header_nested_too_deep_is_refused(host, readers):
    path = host.memory / FULL
    text = b"[" * 200_000
    header = len(text).to_bytes(8, "little") + text
    path.write_bytes(header.ljust(path.stat().st_size))
    with pytest.raises(ValueError, match="has a broken header"):
        readers().fetch(1)


# ---- what the server refuses ----


def request(host, *, token=None, name=FULL, start=0, size=1):
    source = host.server.source
    token = bytes.fromhex(source.token) if token is None else token
    return struct.pack("!32s64sQQ", token, name.encode(), start, size)


@contextlib.contextmanager
def connected(host):
    source = host.server.source
    with socket.create_connection((source.host, source.port), timeout=60.0) as connection:
        yield connection


def answer(host, asked):
    """All that the server answers until it ends the connection."""
    with connected(host) as connection:
        connection.sendall(asked)
        with contextlib.suppress(OSError):  # the server has ended it already
            connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


@pytest.mark.parametrize(
    ("asked", "refusal"),
    [
        ({"token": bytes(32)}, 1),
        ({"name": "00000009.full.safetensors"}, 2),
        ({"name": "../shared/00000001.json"}, 2),
        ({"name": "secret"}, 2),
        ({"name": "/etc/passwd"}, 2),
        ({"name": ""}, 2),
        ({"size": 10**9}, 3),
        ({"start": 2**64 - 1, "size": 2**64 - 1}, 3),
    ],
)
def test_refused_requests_get_one_byte(host, asked, refusal, caplog):
    (host.memory / "secret").write_text("not a publication")
    with caplog.at_level(logging.DEBUG):
        assert answer(host, request(host, **asked)) == bytes([refusal])
    assert "127.0.0.1 was refused" in caplog.text
    assert host.server.source.token not in caplog.text + repr(host.server.source)


def test_a_link_is_not_followed(host):
    (host.memory / "00000005.full.safetensors").symlink_to(host.folder / "00000001.json")
    assert answer(host, request(host, name="00000005.full.safetensors")) == b"\2"


def test_a_receiver_learns_why_it_was_refused(host, tmp_path):
    source = host.server.source
    for changed, why in (
        ({"source": FileSource(source.host, source.port, "0" * 64)}, "not that of the trainer's"),
        ({"file": "00000009.full.safetensors"}, "no longer has the file"),
        ({"file_size": 10**6}, "shorter than its manifest says"),
    ):
        with pytest.raises(RuntimeError, match=why):
            remote(host, **changed).copy(tmp_path / "copy")
    assert not list(tmp_path.glob("*copy*"))


def test_requests_follow_each_other_and_a_short_one_ends_the_connection(host):
    whole = (host.memory / FULL).read_bytes()
    asked = request(host, size=10) + request(host, start=5, size=7) + request(host, size=0)
    assert answer(host, asked + b"short") == b"\0" + whole[:10] + b"\0" + whole[5:12] + b"\0"
    assert answer(host, b"") == b""


def test_a_reader_that_asks_for_nothing_is_disconnected(host, tmp_path):
    host.server.close()
    host.server = PublicationServer(host.memory, "127.0.0.1", ask_s=0.1)
    with connected(host) as connection:
        connection.sendall(request(host)[:50])
        assert connection.recv(1) == b""


def test_a_slow_reader_is_disconnected(host, tmp_path):
    with (host.memory / FULL).open("ab") as file:
        file.truncate(1 << 28)  # more than buffers of sockets hold
    host.server.close()
    host.server = PublicationServer(host.memory, "127.0.0.1", timeout_s=0.2)
    with connected(host) as connection:
        connection.sendall(request(host, size=1 << 28))
        assert connection.recv(1) == b"\0"
        until(lambda: not host.server._server._connections)
        received = sum(iter(lambda: len(connection.recv(1 << 20)), 0))
    assert 0 < received < 1 << 28


def test_too_many_readers(host, tmp_path):
    host.server.close()
    host.server = PublicationServer(host.memory, "127.0.0.1", most_connections=1)
    with connected(host) as connection:
        connection.sendall(request(host))
        assert connection.recv(1) == b"\0"
        with pytest.raises(RuntimeError, match=r"ended the connection|reset by peer|Broken pipe"):
            remote(host, source=host.server.source).copy(tmp_path / "copy")
    until(lambda: not host.server._server._connections)
    remote(host, source=host.server.source, threads=1).copy(tmp_path / "copy")


def test_a_closed_server_ends_its_connections(host):
    with connected(host) as connection:
        connection.sendall(request(host))
        assert connection.recv(2)[:1] == b"\0"
        host.server.close()
        assert connection.recv(2)[-1:] in (b"", (host.memory / FULL).read_bytes()[:1])


def test_a_file_that_is_shortened_while_it_is_sent_ends_the_connection(host):
    """Its bytes never come, so waiting for them would only take the trainer's CPU."""
    path = host.memory / FULL
    with path.open("ab") as file:
        file.truncate(1 << 28)  # more than buffers of sockets hold
    with connected(host) as connection:
        connection.sendall(request(host, size=1 << 28))
        assert connection.recv(1) == b"\0"
        os.truncate(path, 1000)
        assert sum(iter(lambda: len(connection.recv(1 << 20)), 0)) < 1 << 28


def test_a_forked_process_leaves_the_server_to_its_parent(host, tmp_path):
    child = os.fork()
    if not child:
        try:
            host.server.close()
            os._exit(0)
        finally:
            os._exit(1)
    ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
    try:
        until(lambda: os.waitid(os.P_PID, child, ended) is not None)
    finally:
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    remote(host).copy(tmp_path / "copy")


def test_a_forked_process_does_not_keep_the_port_open(host):
    child = os.fork()
    if not child:
        time.sleep(600)
        os._exit(0)
    try:
        host.server.close()
        with pytest.raises(ConnectionRefusedError), connected(host):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_garbage_collection_may_close_the_server_in_its_own_thread(host):
    host.server._server.service_actions = host.server.close
    host.server._thread.join(60)
    assert not host.server._thread.is_alive()
    with pytest.raises(ConnectionRefusedError), connected(host):
        pass


# ---- the transport ----


def sent(model):
    return dict(models.checkpoint_tensors(model))


@pytest.mark.parametrize("encoding", ["full", "delta"])
def test_the_bytes_are_those_of_disk(tmp_path, encoding):
    """Of versions in full and as deltas, to a server whose workers need different tensors."""
    model = testing.tiny_model("qwen3_moe")
    folders = {weights.Disk: tmp_path / "disk", weights.Network: tmp_path / "network"}
    halves = [lambda name: "experts" in name, lambda name: "experts" not in name]
    taken, kinds, found = {}, {}, {}
    for kind, folder in folders.items():
        servers = Workers(halves)
        model = testing.tiny_model("qwen3_moe", seed=0)
        with kind(model, servers, folder=folder, encoding=encoding) as transport:
            receipts = []
            for version in (1, 2, 3):
                train(model, seed=version)
                receipts.append(transport.publish(version))
            train(model, seed=4)
            pending = transport.start(4)
            published = sent(model)
            pending_receipt = pending.wait()
            taken[kind] = servers.tensors
            kinds[kind] = [one.kind for one in (*receipts, pending_receipt)]
            found[kind] = pending_receipt.digest
        servers.close()
        assert same_bits(taken[kind], published)
    assert found[weights.Disk] == found[weights.Network]
    assert kinds[weights.Disk] == kinds[weights.Network]
    assert len(set(kinds[weights.Disk])) == (2 if encoding == "delta" else 1)
    assert not list(folders[weights.Network].rglob("*.safetensors"))
    assert list(folders[weights.Disk].rglob("*.safetensors"))


class Workers:
    """A server of several workers, each of which needs some of the tensors."""

    def __init__(self, needs):
        self.workers = [Replica(one) for one in needs]

    def load_weights(self, update, *, version, timeout_s=600.0, send=None):
        for worker in self.workers:
            worker.prepare(update)
        for worker in self.workers:
            worker.load(update)
        return {"http://here": [worker.receipt for worker in self.workers]}

    @property
    def tensors(self):
        parts = [
            {name: one for name, one in worker.tensors.items() if worker.needs(name)}
            for worker in self.workers
        ]
        return {name: tensor for part in parts for name, tensor in part.items()}

    def close(self):
        for worker in self.workers:
            worker.close()


class Tampering(Replicas):
    """Servers before which the trainer loses the last delta from its memory."""

    memory = None

    def load_weights(self, update, *, version, timeout_s=600.0, send=None):
        for path in self.memory.glob("*.delta.*"):
            path.unlink()
        return super().load_weights(update, version=version)


def test_a_delta_that_cannot_be_read_is_followed_by_the_full_version(tmp_path):
    model, servers = testing.tiny_model("llama"), Tampering()
    with weights.Network(model, servers, folder=tmp_path, encoding="delta") as transport:
        servers.memory = transport._parts.publisher.files
        assert transport.publish(1).fallback is None
        train(model)
        receipt = transport.publish(2)
        assert "the trainer no longer has the file" in receipt.fallback
        assert [receipt.version, receipt.kind] == [2, "full"]
        assert same_bits(servers.workers["http://replica0"].tensors, sent(model))
    servers.close()


def test_the_memory_is_freed_at_the_end_and_with_the_transport(tmp_path):
    model, servers = testing.tiny_model("llama"), Replicas()
    transport = weights.Network(model, servers, folder=tmp_path)
    transport.publish(1)
    files, source = transport._parts.publisher.files, read_manifest(tmp_path, 1).source
    assert (files.stat().st_mode & 0o777, source.host) == (0o700, "127.0.0.1")
    transport._close()
    assert not files.exists()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((source.host, source.port))
    again = weights.Network(model, servers, folder=tmp_path)
    files = again._parts.publisher.files
    del again
    assert not files.exists()
    servers.close()


def test_towards_must_be_a_host_with_a_route(tmp_path):
    with pytest.raises(OSError, match=r"no route to the server at nowhere\.invalid .*towards="):
        weights.Network(
            testing.tiny_model("llama"), Replicas(), folder=tmp_path, towards="nowhere.invalid"
        )


def test_the_folder_is_free_after_a_wrong_address(tmp_path):
    model, servers = testing.tiny_model("llama"), Replicas()
    with pytest.raises(OSError, match="no route") as error:  # which keeps the transport alive
        weights.Network(model, servers, folder=tmp_path, towards="nowhere.invalid")
    with weights.Network(model, servers, folder=tmp_path) as transport:
        transport.publish(1)
    assert error.tb is not None
    servers.close()


def test_memory_without_room_for_the_full_version_after_a_delta(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    model, servers = testing.tiny_model("llama"), Tampering()
    with weights.Network(model, servers, folder=tmp_path, encoding="delta") as transport:
        servers.memory = transport._parts.publisher.files
        transport.publish(1)
        train(model)
        monkeypatch.setattr(publisher.Publisher, "_write_full", full)
        with pytest.raises(RuntimeError, match="version 2 could not be written into .* No space"):
            transport.publish(2)
    servers.close()


def test_transport_to_with_towards(tmp_path):
    model, servers = testing.tiny_model("llama"), Replicas()
    named = {"folder": tmp_path, "towards": "localhost"}
    with weights.transport_to(model, servers, **named) as transport:
        assert isinstance(transport, weights.Network)
    with pytest.raises(ValueError, match="towards='localhost' needs folder="):
        weights.transport_to(model, servers, towards="localhost")


@pytest.mark.thorough
def test_a_server_on_another_network(root, tmp_path):
    """It shares the folder with the trainer, and reaches only the address towards it."""
    alone = ["unshare", "--user", "--map-root-user", "--net"]
    if any(shutil.which(one) is None for one in ("unshare", "ip")):
        pytest.skip("unshare or ip is missing")
    if subprocess.run([*alone, "true"], check=False, capture_output=True, timeout=60).returncode:
        pytest.skip("this host allows no user namespaces")
    program = root / "tests/ranks/network_hosts.py"
    done = subprocess.run(
        [*alone, sys.executable, program, tmp_path],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found == {"kinds": ["full", "delta"], "host": "10.77.0.1", "near": True}
