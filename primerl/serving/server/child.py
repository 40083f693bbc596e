"""``serve_vllm``, which runs vLLM's server in a child process that never outlives its parent."""

import contextlib
import functools
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from primerl._common.processes import launch, supervisor
from primerl._common.processes.brief_spinning import BriefSpinning
from primerl._common.progress import report
from primerl.serving.names import FOLDER_BACKEND
from primerl.serving.server.arguments import (
    argument_names,
    check_vllm_version,
    enables_adapters,
    first_node,
    returns_routes,
    server_command,
    server_environment,
)
from primerl.serving.server.readiness import (
    PortTaken,
    free_port,
    log_tail,
    wait_until_ready,
)
from primerl.serving.server.refusals import refuse_drafts_on_cpu

PORT_TRIES = 5
_ANY_HOST = ("0.0.0.0", "::")
GRACE_S = 10.0  # time between SIGTERM and SIGKILL
STOP_S = GRACE_S + supervisor.OUTER_GRACE_S + 2 * supervisor.SWEEP_S + 3.0
LONGEST_FOLDER = 40  # characters of the temporary folder's path; a Unix socket's may have 107


def serve_vllm(
    model: str | os.PathLike[str],
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    api_key: str | None = None,
    weight_transfer: str | None = FOLDER_BACKEND,
    log_path: str | os.PathLike[str] | None = None,
    start_timeout_s: float = 600.0,
    env: Mapping[str, str] | None = None,
    **engine_args: Any,
) -> "VLLMServer":
    """Return a vLLM server for ``model``, which ``with`` or ``start()`` starts.

        with serving.serve_vllm("Qwen/Qwen3-0.6B", max_model_len=4096) as server:
            engine = serving.VLLMEngine([server])

    The server is killed when this process exits, even if this process crashes. All endpoints
    except ``/health`` and ``/ping``, administrative ones included, require the API key. Beside a
    server on a CPU, torch's threads in this process sleep while they wait for each other, so that
    the server gets their cores.

    Args:
        model: a folder, or an id on the Hugging Face hub.
        host: the interface to listen on. Between machines, the key is sent unencrypted.
        port: the port to listen on; any free port by default.
        api_key: the key that clients must send; random by default.
        weight_transfer: vLLM's weight transfer backend: ``"primerl"`` or ``"primerl_nccl"`` (for
            the transports of ``primerl.weights``), one of vLLM's own, such as ``"nccl"``, or None.
        log_path: the file to which the server's output is appended. By default a private temporary
            file, which ``close()`` removes unless the server failed.
        start_timeout_s: the timeout of starting the server.
        env: environment variables of the server, in addition to this process's.
        engine_args: vLLM's arguments by their own names: ``max_model_len=4096``,
            ``enable_prefix_caching=True`` (``False`` becomes ``--no-...``),
            ``tensor_parallel_size``, ``kv_transfer_config={...}`` (becomes JSON),
            ``lora_modules=[...]`` (becomes several values). ``enable_return_routed_experts=True``
            also turns on prefix caching and Model Runner V2, which vLLM needs for it.

    Raises:
        ImportError: vLLM is not installed.
        RuntimeError: the system is not Linux, or vLLM's version is not supported. ``start()``: the
            server exited or was not ready in time; the message has the end of its log.
        ValueError: an argument is malformed; or it is refused, because it changes what is sampled,
            or moves experts between devices, which breaks weight updates (``enable_eplb``).
    """
    return VLLMServer(
        os.fspath(model),
        engine_args,
        host=host,
        port=port,
        api_key=api_key,
        weight_transfer=weight_transfer,
        log_path=Path(log_path) if log_path is not None else None,
        start_timeout_s=start_timeout_s,
        env=env,
    )


class VLLMServer:
    """A vLLM server in a child process, created by ``serve_vllm``.

    Attributes:
        model: a folder, or an id on the Hugging Face hub.
        api_key: the key that clients must send, as ``Authorization: Bearer <api_key>``.
        log_path: the file of the server's output, once it is started.
    """

    def __init__(
        self,
        model: str,
        engine_args: Mapping[str, Any],
        *,
        flags: tuple[str, ...] = (),
        in_foreground: bool = False,
        host: str = "127.0.0.1",
        port: int | None = None,
        api_key: str | None = None,
        weight_transfer: str | None = FOLDER_BACKEND,
        log_path: Path | None = None,
        start_timeout_s: float = 600.0,
        env: Mapping[str, str] | None = None,
    ) -> None:
        if not sys.platform.startswith("linux"):
            raise RuntimeError(f"serve_vllm needs Linux; this system is {sys.platform}")
        if model.startswith(("/", ".", "~")) and not Path(model).is_dir():
            raise ValueError(f"model={model!r} is not a folder; expected one, or an id on the hub")
        on_cpu = check_vllm_version()
        self._on_cpu = on_cpu
        self.model = model
        self.api_key = secrets.token_urlsafe(32) if api_key is None else api_key
        if not (self.api_key.isascii() and self.api_key.isprintable() and self.api_key.strip()):
            raise ValueError("api_key must be printable ASCII, and not empty")
        self.log_path = log_path
        self._in_foreground = in_foreground
        self._first_node = first_node(engine_args, flags)
        if self._first_node is not None and port is None:
            raise ValueError("headless without port: pass the port on which the first node listens")
        self._host = self._first_node or host
        self._wanted_port = port
        self._port = port
        self._start_timeout_s = start_timeout_s
        self._command = functools.partial(
            server_command,
            model,
            host=host,
            weight_transfer=weight_transfer,
            engine_args=engine_args,
            flags_as_given=flags,
            on_cpu=on_cpu,
        )
        self._command(port=0)  # check the arguments now
        self._environment = server_environment(
            model,
            on_cpu=on_cpu,
            argument_names=argument_names(engine_args, flags),
            adapters=enables_adapters(engine_args, flags),
            routes=returns_routes(engine_args, flags),
            env=env,
        )
        # With Triton's interpreter, as in the tests, the kernels for GPUs verify drafts on a CPU.
        if on_cpu and self._environment.get("TRITON_INTERPRET") != "1":
            refuse_drafts_on_cpu(engine_args, flags)
        self._own_temporary = "TMPDIR" not in (env or {})
        self._folder: str | None = None
        self._temporary: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._spinning: BriefSpinning | None = None

    @property
    def url(self) -> str:
        """The server's url, with this host's name if the server listens on all interfaces.

        A server over several nodes has one url, that of its first node.

        Raises:
            RuntimeError: the server was never started, and has no fixed port.
        """
        if self._port is None:
            raise RuntimeError("the server has no url before start(), unless it has a fixed port")
        host = socket.gethostname() if self._host in _ANY_HOST else self._host
        return f"http://[{host}]:{self._port}" if ":" in host else f"http://{host}:{self._port}"

    @property
    def pid(self) -> int | None:
        """The process id of the outer supervisor, with which the server ends; None before start."""
        return self._process.pid if self._process else None

    @property
    def alive(self) -> bool:
        """Whether the server's processes run."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> "VLLMServer":
        """Start the server and wait until it is ready; do nothing if it is already running.

        Raises:
            RuntimeError: the server exited or was not ready in time. The message has the cause, if
                known, and the end of the log.
        """
        if self.alive:
            return self
        report("starting vLLM's server", "this takes a minute or more")
        for tries_left in reversed(range(PORT_TRIES)):
            try:
                self._start()
                return self
            except PortTaken:
                # Another process took the free port before vLLM could listen on it.
                if self._wanted_port is not None or not tries_left:
                    raise
                self._port = None
        return self

    def close(self) -> None:
        """Stop the server and every process that it started, if necessary with SIGKILL."""
        failed = self._process is not None and not self.alive
        self.wait(stop=True)
        self._remove_folder(keep_log=failed)

    def restart(self) -> "VLLMServer":
        """Stop the server and start it again, at the same url and with the same key."""
        self.wait(stop=True)
        return self.start()

    def wait(self, *, stop: bool = False) -> int:
        """Wait until the server exits (with ``stop``, stop it first); return its exit code.

        The exit code is 128 + the signal's number if a signal killed the server, and 0 if the
        server was never started.
        """
        process = self._process
        if process is None:
            return 0
        if stop:
            if self._spinning is not None:
                self._spinning.close()
                self._spinning = None
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
            process.kill()  # in case it hangs; the inner supervisor then stops the server
        code = process.wait()
        if self._folder is not None and self._temporary is not None:
            launch.wait_until_over(process, self._folder, timeout_s=STOP_S)
            supervisor.remove_folder(self._temporary)
        return code if code >= 0 else 128 - code

    def log_tail(self, lines: int = 40) -> str:
        """Return the last lines of the server's output."""
        return log_tail(self.log_path, lines=lines) if self.log_path is not None else ""

    def __enter__(self) -> "VLLMServer":
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        where = self.url if self._port is not None else "not started"
        return f"VLLMServer({self.model!r}, {where}, alive={self.alive})"

    def _remove_folder(self, *, keep_log: bool) -> None:
        holds_log = self.log_path is not None and self.log_path.parent == Path(self._folder or "/")
        if self._folder is not None and not (keep_log and holds_log):
            supervisor.remove_folder(self._folder)
            self._folder = None
            self.log_path = None if holds_log else self.log_path

    def _start(self) -> None:
        if self._first_node is None or self._port is None:
            self._port = free_port(self._host, self._port)
        assert self._port is not None, "a further node was given the first one's"
        if self._folder is None:
            short = len(tempfile.gettempdir()) <= LONGEST_FOLDER
            self._folder = launch.make_folder("primerl-", within=None if short else "/tmp")
        if self.log_path is None and not self._in_foreground:
            self.log_path = Path(self._folder) / "server.log"
        environment = dict(self._environment)
        if self._own_temporary:
            self._temporary = launch.make_folder("", within=self._folder)
            environment["TMPDIR"] = self._temporary
        with contextlib.ExitStack() as stack:
            log, log_start = None, 0
            if self.log_path is not None:
                self.log_path.parent.mkdir(parents=True, exist_ok=True)
                log = stack.enter_context(self.log_path.open("ab"))
                log_start = self.log_path.stat().st_size  # skip the output of earlier starts
            self._process = launch.start(
                self._command(port=self._port),
                folder=self._folder,
                grace_s=GRACE_S,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT if log else None,
                env=environment,
            )
        _send_key(self._process, self.api_key)
        try:
            wait_until_ready(
                "127.0.0.1" if self._host in _ANY_HOST else self._host,
                self._port,
                api_key=self.api_key,
                exit_code=self._process.poll,
                log_path=self.log_path,
                log_start=log_start,
                timeout_s=self._start_timeout_s,
            )
        except BaseException:  # also on Ctrl-C, leave no process behind
            self.wait(stop=True)
            self._remove_folder(keep_log=True)
            raise
        if self._on_cpu and self._spinning is None:
            self._spinning = BriefSpinning()


def _send_key(process: "subprocess.Popen[bytes]", api_key: str) -> None:
    """Send the key to the server through a pipe, which no other process can read."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:  # wait_until_ready reports an exit
        process.stdin.write(api_key.encode())
