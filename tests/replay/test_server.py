import contextlib
import http.client
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from conftest import make_sample

from primerl.replay import RouteShape, file_server, references
from primerl.replay.file_server import content_path, open_member, remove
from primerl.replay.references import discard, read
from primerl.replay.server_process import SpanServer
from primerl.replay.store import BadRoutes, Store

SHAPE = RouteShape(layers=(0, 1), decoder_layers=2, experts=256, k=4)
KEY = "the-key-of-this-test"
DEADLINE_S = 60.0


def rows_of(tokens, *, seed=0):
    rng = np.random.default_rng(seed)
    return np.argsort(rng.random((tokens, 2, 256)), axis=-1)[..., :4]


def put(store, tokens=6, *, start=0, seed=0, shared=0):
    rows = rows_of(tokens, seed=seed)
    return store.put(rows, start=start, versions=np.zeros(tokens, int), shared=shared)


@pytest.fixture(scope="module")
def served():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRIMERL_API_KEY", KEY)
        with Store(SHAPE, max_bytes=1 << 24, host="127.0.0.1") as store:
            yield store


@pytest.fixture(autouse=True)
def with_key_and_files(monkeypatch, served):
    monkeypatch.setattr("primerl.replay.references.INLINE_BYTES", 0)
    monkeypatch.setenv("PRIMERL_API_KEY", KEY)


def request(store, method, path, *, key=KEY, **headers):
    host, _, port = store._address.removeprefix("http://").partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=DEADLINE_S)
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    connection.request(method, path, headers=headers)
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response, body


def name_of(reference):
    return reference.rpartition("/")[2].partition(".")[0]


def wait_until(condition):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_running(pid):
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
            != "Z"
        )
    except FileNotFoundError:
        return False


def test_what_is_put_is_read_from_the_server(served):
    rows = np.sort(rows_of(3000), axis=-1)
    (reference,) = put(served, 3000, start=5)
    assert reference.startswith(f"{served._address}/")
    assert read(reference).rows.tolist() == rows.tolist()
    for span in ((0, 9), (2000, 2003), (0, 5), (3005, 3009), (7, 7)):
        found = read(reference, span=span)
        expected = rows[max(0, span[0] - 5) : max(0, span[1] - 5)]
        assert found.rows.tolist() == expected.tolist()


def test_only_the_bytes_of_a_span_are_asked_for(served, monkeypatch):
    monkeypatch.setattr("primerl.replay.codec._CHUNK_BYTES", 100 * 8)
    (reference,) = put(served, 30_000)
    path = served._path / name_of(reference)
    total = path.stat().st_size
    asked = []
    get = references._RouteConnection._get

    def recorded(self, begin, end):
        asked.append((begin, end))
        return get(self, begin, end)

    monkeypatch.setattr(references._RouteConnection, "_get", recorded)
    read(reference, span=(25_000, 25_100))
    assert asked[0] == (0, 1 << 16)
    assert total * 0.8 < asked[1][0] < asked[1][1] < total * 0.85
    assert asked[1][1] - asked[1][0] < total / 200
    assert len(asked) == 2


def test_a_head_that_is_longer_than_what_is_read_first(served, monkeypatch):
    monkeypatch.setattr("primerl.replay.codec._CHUNK_BYTES", 8)
    monkeypatch.setattr("primerl.replay.references.READ_AT_ONCE", 1 << 12)
    (reference,) = put(served, 500)  # a chunk for each token: 12 bytes of head
    assert read(reference, span=(400, 402)).rows.tolist() == (
        np.sort(rows_of(500)[400:402], axis=-1).tolist()
    )


def test_samples_of_a_served_store_are_checked_and_discarded(served):
    of_others = set(served._path.glob("*.shared"))
    routes = [put(served, 6, shared=4, seed=i % 2) for i in range(6)]
    samples = [make_sample(prompt=4, completion=3, routes=pair) for pair in routes]
    copy = pickle.loads(pickle.dumps(served))
    for sample in samples:
        copy.check(sample)
    assert discard(samples) == 12
    assert discard(samples) == 0
    with pytest.raises(BadRoutes, match="discarded"):
        served.check(samples[0])
    with pytest.raises(FileNotFoundError, match="no longer has these routes"):
        read(routes[0][0])
    assert set(served._path.glob("*.shared")) == of_others


@pytest.mark.parametrize("method", ["GET", "DELETE"])
@pytest.mark.parametrize("key", [None, "", "another", KEY + "x", KEY[:-1], "\xe9"])
def test_requests_without_the_key(served, method, key):
    (reference,) = put(served)
    response, body = request(served, method, f"/{name_of(reference)}", key=key, Range="bytes=0-1")
    assert response.status == 401
    assert body == b""
    assert (served._path / name_of(reference)).exists()


def test_two_authorizations_are_none(served):
    host, _, port = served._address.removeprefix("http://").partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=DEADLINE_S)
    connection.putrequest("GET", f"/{name_of(put(served)[0])}")
    for key in ("another", KEY):
        connection.putheader("Authorization", f"Bearer {key}")
    connection.endheaders()
    assert connection.getresponse().status == 401
    connection.close()


def test_ranges(served):
    name = name_of(put(served, 100)[0])
    data = (served._path / name).read_bytes()
    size = len(data)
    for first, last in ((0, 0), (0, 9), (5, size - 1), (5, size + 100), (size - 1, size - 1)):
        response, body = request(served, "GET", f"/{name}", Range=f"bytes={first}-{last}")
        assert response.status == 206
        assert body == data[first : last + 1]
        end = min(last, size - 1)
        assert response.getheader("Content-Range") == f"bytes {first}-{end}/{size}"
    for wrong in (f"bytes={size}-{size}", "bytes=5-4", "bytes=-5", "bytes=0-", "0-1", ""):
        response, body = request(served, "GET", f"/{name}", Range=wrong)
        assert (response.status, body) == (416, b"")


def test_names_of_no_reference(served):
    (reference,) = put(served, shared=6)
    name = name_of(reference)
    folder = served._path.name
    (served._path / ("b" * 32)).symlink_to(served._path / name)
    for path in (
        *("/", "/.users", "/etc/passwd", "/" + "a" * 32, "/" + "b" * 32, f"/{name[:32]}.shared"),
        *(f"/../{folder}/{name}", f"/%2e%2e/{folder}/{name}", f"/{name}/", f"/{name}?x"),
    ):
        for method in ("GET", "DELETE"):
            if path.endswith("b" * 32) and method == "DELETE":
                continue
            response, _ = request(served, method, path, Range="bytes=0-1")
            assert response.status == 404, path
    assert (served._path / name).exists()
    response, _ = request(served, "POST", f"/{name}")
    assert response.status == 501


def test_the_key_is_sent_to_no_other_server(served, monkeypatch):
    (reference,) = put(served)
    with socket.create_server(("127.0.0.1", 0)) as thief:
        thief.settimeout(0.0)
        port = thief.getsockname()[1]
        own = served._address.rpartition(":")[2]
        name, _, code = reference.rpartition("/")[2].partition(".")
        for wrong in (
            reference.replace(f":{own}/", f":{port}/"),
            reference.replace("127.0.0.1", "localhost"),
            reference.replace(name, "c" * 32),
            f"http://127.0.0.1:{port}/{name}.{'0' * 32}",
            f"http://127.0.0.1:{port}/{name}.{code}",
        ):
            with pytest.raises(ValueError, match="not made by a store") as caught:
                read(wrong)
            assert KEY not in str(caught.value)
            with pytest.raises(ValueError, match="not made by a store"):
                discard([make_sample(routes=[wrong])])
        for wrong in (
            f"http://user@127.0.0.1:{port}/{name}.{code}",
            f"http://127.0.0.1/{name}.{code}",
            f"http://127.0.0.1:{port}/x/{name}.{code}",
            f"http://127.0.0.1:99999/{name}.{code}",
            f"https://127.0.0.1:{port}/{name}.{code}",
            f"http://127.0.0.1:{port}/{name}.{code}\r\nx: y",
        ):
            with pytest.raises(ValueError, match="not an address|not a reference"):
                read(wrong)
        with pytest.raises(BlockingIOError):
            thief.accept()
    monkeypatch.setenv("PRIMERL_API_KEY", "another")
    with pytest.raises(ValueError, match="not made by a store"):
        read(reference)
    monkeypatch.delenv("PRIMERL_API_KEY")
    with pytest.raises(ValueError, match="set PRIMERL_API_KEY"):
        read(reference)
    with pytest.raises(ValueError, match="set PRIMERL_API_KEY"):
        Store(SHAPE, host="127.0.0.1")


class Impostor:
    """Listens at an address with a true code, and answers with given bytes."""

    def __init__(self, answer, *, pause_s=0.0):
        self._answer = answer
        self._pause_s = pause_s
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve)
        self.reference = references.served_reference(
            f"http://127.0.0.1:{self._socket.getsockname()[1]}", "a" * 32, KEY
        )

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._thread.join(DEADLINE_S)

    def _serve(self):
        connection, _ = self._socket.accept()
        self._socket.close()
        with connection:
            connection.settimeout(DEADLINE_S)
            connection.recv(1 << 16)
            connection.sendall(self._answer)
            time.sleep(self._pause_s)


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (b"", ConnectionError, "closed"),
        (b"nonsense\r\n\r\n", ConnectionError, "nonsense"),
        (b"HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n", ConnectionError, "not accept the key"),
        (b"HTTP/1.1 302 Go\r\nLocation: http://127.0.0.1:1/\r\n\r\n", ValueError, "no bytes"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nxy", ValueError, "no bytes"),
        (
            b"HTTP/1.1 206 P\r\nContent-Range: bytes 1-2/9\r\n\r\nxy",
            ValueError,
            "requested: 1-2 of 9",
        ),
        (
            b"HTTP/1.1 206 P\r\nContent-Range: bytes 0-99/9\r\n\r\nxy",
            ValueError,
            "requested: 0-99 of",
        ),
        (b"HTTP/1.1 206 P\r\nContent-Range: bytes 0-8/9\r\n\r\nxy", ConnectionError, "closed"),
        (
            b"HTTP/1.1 206 P\r\nContent-Range: bytes 0-1/99999999999\r\n\r\nxy",
            ConnectionError,
            "routes at",
        ),
    ],
)
def test_answers_of_no_server_of_routes(answer, error, message):
    with Impostor(answer) as impostor, pytest.raises(error, match=message) as caught:
        read(impostor.reference)
    assert KEY not in str(caught.value)


def test_a_server_that_does_not_answer():
    with Impostor(b"", pause_s=0.5) as impostor, pytest.raises(TimeoutError, match="in time"):
        read(impostor.reference, timeout_s=0.1)


def test_a_port_that_is_taken(served):
    port = int(served._address.rpartition(":")[2])
    with pytest.raises(RuntimeError, match=f"the server of routes on 127.0.0.1:{port}.*in use"):
        Store(SHAPE, host="127.0.0.1", port=port).__enter__()


def test_the_key_is_in_no_command_line_environment_or_name(served):
    pid = served_pid()
    assert KEY.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert KEY.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
    assert KEY not in repr(served)
    assert KEY not in put(served)[0]
    assert KEY not in repr(references.parse_reference(put(served)[0]))


def served_pid(owner=None):
    """The process of the server, below its two supervisors."""
    for process in psutil.Process(owner).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.cmdline()[3:4] == [file_server.__file__]:
                return process.pid
    raise AssertionError("no server is running")


OWNER = """
import time
from primerl.replay import RouteShape
from primerl.replay.store import Store
shape = RouteShape(layers=(0, 1), decoder_layers=2, experts=256, k=4)
with Store(shape, max_bytes=1000, host="127.0.0.1") as store:
    print("open", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_the_server_ends_with_its_owner(how):
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, encoding="utf-8"
    ) as owner:
        assert owner.stdout.readline() == "open\n"
        server = served_pid(owner.pid)
        owner.send_signal(how)
    wait_until(lambda: not is_running(server))


def test_the_server_ends_when_it_is_closed(tmp_path):
    with SpanServer(tmp_path, host="127.0.0.1", port=0, key=KEY) as server:
        port = int(server.address.rpartition(":")[2])
        socket.create_connection(("127.0.0.1", port)).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_addresses_by_which_other_hosts_find_it(tmp_path):
    for host, expected in (("0.0.0.0", socket.gethostname()), ("::1", r"[::1]")):
        server = SpanServer(tmp_path, host=host, port=1234, key=KEY)
        assert server.address == f"http://{expected}:1234"
        reference = references.served_reference(server.address, "a" * 32, KEY)
        place = references.parse_reference(reference)
        assert (place.host, place.port) == (expected.strip("[]"), 1234)


def test_a_server_without_a_key_does_not_start(tmp_path):
    done = subprocess.run(
        [sys.executable, "-I", "-S", file_server.__file__, tmp_path, "127.0.0.1", "0"],
        input=b"\n",
        capture_output=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 1
    assert b"no key" in done.stderr


def test_members_of_a_folder(tmp_path):
    name = "a" * 32
    with pytest.raises(FileNotFoundError):
        open_member(tmp_path, name)
    (tmp_path / name).write_bytes(b"routes")
    descriptor = open_member(tmp_path, name)
    assert os.read(descriptor, 9) == b"routes"
    os.close(descriptor)
    with pytest.raises(FileNotFoundError):
        open_member(tmp_path, f"../{tmp_path.name}/{name}")
    with pytest.raises(FileNotFoundError):
        remove(tmp_path, f"../{tmp_path.name}/{name}")
    assert remove(tmp_path, name)
    assert not remove(tmp_path, name)


def test_shared_content_goes_with_its_last_name(tmp_path):
    content = content_path(tmp_path, "d" * 32)
    content.write_bytes(b"routes")
    names = [f"{'d' * 32}-{letter * 32}" for letter in "ab"]
    for name in names:
        os.link(content, tmp_path / name)
    assert remove(tmp_path, names[0])
    assert content.exists()
    assert remove(tmp_path, names[1])
    assert not content.exists()
