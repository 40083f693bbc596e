"""Readiness checks of a starting vLLM server, and the diagnosis of failed starts."""

import re
import socket
import time
from collections.abc import Callable, Collection
from pathlib import Path

from primerl.serving.names import HEALTH, WEIGHT_INFO

POLL_S = 0.1
PROBE_S = 5.0
STATUS_LINE_BYTES = 1024
TAIL_LINES = 40
# Patterns in the log of a server that exited, with the cause and its remedy.
_CAUSES = {
    r"torchvision::nms does not exist|libtorchaudio|libtorchcodec": (
        "torchvision, torchaudio or torchcodec was built for another torch; run: pip uninstall -y "
        "torchvision torchaudio torchcodec"
    ),
    r"No module named 'primerl": "primerl is not installed in the server's Python",
    r"larger than the available KV cache memory|No available memory for the cache blocks": (
        "the KV cache is too small: lower max_model_len, or raise gpu_memory_utilization, or, on a "
        "CPU, VLLM_CPU_KVCACHE_SPACE (GiB) in the environment"
    ),
    r"Free memory on device .{,200} is less than desired|CUDA out of memory|OutOfMemoryError": (
        "the device is out of memory: lower gpu_memory_utilization, or free memory"
    ),
    r"Model Runner V2 requires Triton\.": (  # not "...; using the V1 model runner instead"
        "expert routes need vLLM's Model Runner V2, which needs Triton, which vLLM's build for "
        "CPUs lacks: leave out enable_return_routed_experts, or serve on a GPU"
    ),
}
_STATUS_LINE = re.compile(rb"HTTP/1\.[01] ([0-9]{3})[ \r\n]")
_ANY_STATUS = range(100, 600)
_REFUSED = re.compile(r"error: (?:argument|unrecognized|the following|ambiguous|invalid).*")
_INVALID = re.compile(r"^.*\bValue error, (.+?)(?: \[type=.*)?$", re.MULTILINE)
# A run of names and dots, and the message. Matching from each name of the run, rather than from its
# beginning, would take quadratic time.
_RAISED = re.compile(r"(?<![\w.])([\w.]++)(?:(?<=\wError)|(?<=\wException)): (\S.*)")
_ADDRESS_IN_USE = "Address already in use"
# Texts of exceptions that only follow from another error, and of warnings.
_NOT_CAUSES = (
    "Engine core initialization failed",
    "See root cause above",
    "cancelled",
    "Consider increasing with ulimit",
)


class PortTaken(RuntimeError):
    """Another process listens on the server's port."""


def free_port(host: str, port: int | None = None) -> int:
    """Return ``port`` if the server can listen on it; if it is None, return any free port.

    Raises:
        RuntimeError: the server can't listen on ``host`` and ``port``, for example because another
            process does.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port or 0))
        except OSError as error:
            raise RuntimeError(
                f"cannot listen on {host}, port {port}: {error.strerror}; choose another port, or "
                "None for any free port"
            ) from None
        return int(probe.getsockname()[1])


def status_of(host: str, port: int, path: str, *, api_key: str | None = None) -> int | None:
    """Send a GET request; return its HTTP status, or None if there is none within ``PROBE_S``.

    Only the status line is read, because a foreign process on the port may send any data, at any
    pace.
    """
    name = f"[{host}]" if ":" in host else host
    request = [f"GET {path} HTTP/1.1", f"Host: {name}:{port}", "Connection: close"]
    request += [f"Authorization: Bearer {api_key}"] if api_key else []
    deadline = time.monotonic() + PROBE_S
    line = b""
    try:
        with socket.create_connection((host, port), timeout=PROBE_S) as connection:
            connection.sendall("\r\n".join([*request, "", ""]).encode())
            while b"\n" not in line and len(line) < STATUS_LINE_BYTES:
                connection.settimeout(max(deadline - time.monotonic(), 1e-3))
                received = connection.recv(STATUS_LINE_BYTES)
                if not received:
                    break
                line += received
    except OSError:
        return None  # not listening yet, or not answering
    status = _STATUS_LINE.match(line)
    return int(status[1]) if status else None


def wait_until_ready(
    host: str,
    port: int,
    *,
    api_key: str,
    exit_code: Callable[[], int | None],
    log_path: Path | None,
    log_start: int,
    timeout_s: float,
) -> None:
    """Wait until the server is ready and requires its key.

    The log of this start begins at byte ``log_start`` of ``log_path``.

    Raises:
        PortTaken: the server exited because another process listens on its port.
        RuntimeError: the server exited for another reason, was not ready within ``timeout_s``, or
            answers requests without the key.
    """
    deadline = time.monotonic() + timeout_s

    def answer(path: str, *, key: str | None, among: Collection[int]) -> int | None:
        """Poll ``path`` until its status is in ``among``; a busy server may not answer at first."""
        while (status := status_of(host, port, path, api_key=key)) not in among:
            code = exit_code()
            if code is not None:
                how = f"killed by signal {code - 128}" if code > 128 else f"exit code {code}"
                what = f"the vLLM server exited while starting ({how})"
                raise _failure(what, log_path, log_start)
            if time.monotonic() > deadline:
                what = f"the vLLM server did not answer within {timeout_s:.0f} s"
                raise _failure(what, log_path, log_start)
            time.sleep(POLL_S)
        return status

    answer(HEALTH, key=None, among=[200])
    refused = answer(WEIGHT_INFO, key=None, among=_ANY_STATUS)
    allowed = answer(WEIGHT_INFO, key=api_key, among=_ANY_STATUS)
    if refused != 401 or allowed != 200:
        raise _failure(
            f"the server on port {port} does not check its API key: {WEIGHT_INFO} answers "
            f"{refused} without the key (expected 401) and {allowed} with it (expected 200)",
            log_path,
            log_start,
        )


def _failure(what: str, log_path: Path | None, log_start: int) -> RuntimeError:
    if log_path is None:
        return RuntimeError(f"{what}; its output is above")
    log = log_tail(log_path, lines=400, start=log_start)
    cause = cause_of(log)
    tail = "\n".join(log.splitlines()[-TAIL_LINES:])
    message = what + (f": {cause}" if cause else "") + f"\nThe end of its log, {log_path}:\n{tail}"
    return PortTaken(message) if _ADDRESS_IN_USE in log else RuntimeError(message)


def cause_of(log: str) -> str | None:
    """Return the cause of a server's exit that its log shows, or None."""
    if _ADDRESS_IN_USE in log:
        return "another process listens on its port: choose another port, or None for any free port"
    for pattern, cause in _CAUSES.items():
        if re.search(pattern, log):
            return cause
    if refused := _REFUSED.search(log):
        return f"vLLM refuses an argument: {refused[0][len('error: ') :]}"
    if invalid := _INVALID.search(log):
        return f"vLLM refuses its arguments: {invalid[1]}"
    raised = exceptions_in(log)
    roots = [one for one in raised if not any(word in one for word in _NOT_CAUSES)]
    return roots[-1] if roots else None


def exceptions_in(log: str) -> list[str]:
    """Return the exceptions in a log, each as ``Name: message``."""
    return [
        f"{run.rpartition('..')[2].removeprefix('.')}: {text}" for run, text in _RAISED.findall(log)
    ]


def log_tail(log_path: Path, *, lines: int = TAIL_LINES, start: int = 0) -> str:
    """Return the last lines of a log after byte ``start``; empty if there is no log."""
    if not log_path.is_file():
        return ""
    with log_path.open("rb") as file:
        file.seek(max(start, log_path.stat().st_size - 400 * lines))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
