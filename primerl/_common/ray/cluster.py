"""The connection of this process to a Ray cluster, and a local Ray that it starts and ends."""

import contextlib
import importlib.util
import logging
import math
import os
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from primerl._common.optional import install_command, require

CONNECT_S = 10.0  # for the address to answer
LOCAL_OBJECTS_BYTES = 256 << 20  # of the object store of a local Ray, which holds messages only
_LONGEST_FOLDER = 40  # the names of Ray's sockets below it may have 107 characters in all

# Ray protects the ports of a local Ray, which listen on every interface, by a token. It would write
# one into the home folder, and a process keeps the first one that it used.
_LOCAL = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
_SET_BY_RAY = ("PYTHONBREAKPOINT", "RAY_AUTH_MODE", "RAY_CLIENT_MODE")

# A head speaks gRPC: the first bytes of a client, and the type of the server's first frame.
# Ray itself waits for minutes for a server of another kind.
_SETTINGS = b"\4"
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + _SETTINGS + b"\0" * 5

_lock = threading.Lock()
_users = 0
_folder: str | None = None
_ours = False


def check(
    *, actors: int, resources: Mapping[str, float], address: str | None, start_timeout_s: float
) -> None:
    """Check what a user asks of a cluster, without connecting to it.

    Raises:
        ImportError: Ray is not installed.
        ValueError: a number is out of range, or the address is malformed.
    """
    if actors < 1:
        raise ValueError(f"actors is {actors}, expected at least 1")
    if not start_timeout_s > 0:
        raise ValueError(f"start_timeout_s is {start_timeout_s}, expected a positive time")
    if not resources or not all(amount > 0 for amount in resources.values()):
        raise ValueError(f"resources are {resources}, expected names with positive amounts")
    if address not in (None, "auto") and not address.rpartition(":")[2].isdecimal():
        raise ValueError(f"address is {address!r}, expected 'auto' or 'host:port'")
    if importlib.util.find_spec("ray") is None:
        raise ImportError(f"ray is not installed; {install_command('ray')}", name="ray")


def connect(address: str | None, *, resources: Mapping[str, float], actors: int) -> None:
    """Connect this process to the cluster at ``address``; with None, start a local Ray first.

    A connection that exists, ours or the script's own, is used. This blocks for seconds.

    Raises:
        ImportError: Ray is not installed.
        RuntimeError: no cluster answers at the address, or it has other versions of Ray or Python.
    """
    global _users, _ours
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", address)
    if address not in (None, "auto"):
        _require_answer(address)
    with _lock, _variables(_LOCAL if address is None else {}):
        ray = require("ray", extra="ray")
        if not ray.is_initialized():
            _ours = True
            try:
                if address is None:
                    _start(ray, resources=resources, actors=actors)
                else:
                    _join(ray, address)
            except BaseException:
                _leave(ray)
                raise
        _users += 1


def disconnect() -> None:
    """Leave the cluster once as often as connected; end a local Ray."""
    global _users
    with _lock:
        _users -= 1
        if _users == 0 and _ours:
            _leave(require("ray", extra="ray"))


def offered() -> str:
    """Describe the resources that the nodes of the cluster have, one entry for each kind."""
    nodes = [node["Resources"] for node in require("ray", extra="ray").nodes() if node["Alive"]]
    kinds: dict[str, int] = {}
    for node in nodes:
        named = {key: value for key, value in node.items() if _is_asked_for(key)}
        text = ", ".join(f"{key}: {value:g}" for key, value in sorted(named.items()))
        kinds[text] = kinds.get(text, 0) + 1
    return "; ".join(f"{count} with {text or 'nothing'}" for text, count in kinds.items())


def draining() -> dict[str, float]:
    """Return the ids of nodes that are to leave, each with the seconds that it still has.

    They are ``inf`` without a deadline. Ray's autoscaler, ``ray drain-node`` and clouds that
    preempt a node say so. This blocks for milliseconds.
    """
    # Ray has no public call for this; its autoscaler, Serve and Train use the same one.
    state = require("ray._private.state", extra="ray").state
    deadlines = state.get_draining_nodes()
    now = time.time()
    return {node: at / 1000 - now if at else math.inf for node, at in deadlines.items()}


def _is_asked_for(resource: str) -> bool:
    return not resource.startswith(("node:", "object_store_memory", "memory", "accelerator_type:"))


def _leave(ray: Any) -> None:
    global _ours, _folder
    ray.shutdown()
    _ours = False
    if _folder is not None:
        shutil.rmtree(_folder, ignore_errors=True)
        _folder = None


def _start(ray: Any, *, resources: Mapping[str, float], actors: int) -> None:
    global _folder
    _folder = _short_folder()
    custom = {name: amount * actors for name, amount in resources.items() if name != "CPU"}
    ray.init(
        address="local",
        num_cpus=max(1, int(resources.get("CPU", 1) * actors)),
        num_gpus=0,
        resources=custom,
        object_store_memory=LOCAL_OBJECTS_BYTES,
        include_dashboard=False,
        configure_logging=False,
        logging_level=logging.WARNING,
        _node_ip_address="127.0.0.1",
        _temp_dir=_folder,
    )


def _require_answer(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_S) as sock:
            sock.sendall(_HELLO)
            if sock.recv(4, socket.MSG_WAITALL)[3:] != _SETTINGS:
                raise OSError("another kind of server does")
    except OSError as error:
        raise RuntimeError(
            f"no Ray cluster answers at {address} ({error}); start one with `ray start --head`"
        ) from None


def _join(ray: Any, address: str) -> None:
    try:
        ray.init(address=address, configure_logging=False, logging_level=logging.WARNING)
    except (RuntimeError, ConnectionError, ValueError, ray.exceptions.RayError) as error:
        first = str(error).strip().partition("\n")[0]
        raise RuntimeError(
            f"this host can't join the Ray cluster at {address!r}: {first}; run `ray start "
            "--address=HEAD:6379` on it, with the Python and the Ray of the head"
        ) from error


@contextlib.contextmanager
def _variables(settings: Mapping[str, str]) -> Iterator[None]:
    """Set variables that children inherit, unless they are set; restore all of them afterwards."""
    before = dict(os.environ)
    os.environ.update({**settings, **before})
    try:
        yield
    finally:
        for name in (*settings, *_SET_BY_RAY):
            if name in before:
                os.environ[name] = before[name]
            else:
                os.environ.pop(name, None)


def _short_folder() -> str:
    """Make a folder for a local Ray below the temporary folder, or below /tmp if that is long."""
    within = tempfile.gettempdir()
    name = f"{within}/ray-12345678"
    return tempfile.mkdtemp(prefix="ray-", dir=within if len(name) < _LONGEST_FOLDER else "/tmp")
