"""``Network``, a transport from the memory of the trainer's hosts to engines on other hosts."""

import contextlib
import os
import socket
import uuid
import weakref
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from primerl._common.checkpoint_tensors import Quantizer, published_bytes
from primerl._common.ranks import on_first_rank
from primerl._common.shared_folder import SharedFolder
from primerl.weights.transports.broadcasts.rendezvous import address_towards
from primerl.weights.transports.disk import Disk
from primerl.weights.transports.publications.manifests import FileSource
from primerl.weights.transports.publications.server import PublicationServer
from primerl.weights.transports.receipts import Fetcher


class Network(Disk):
    """A transport like ``Disk``, but the tensors stay in memory, and engines read them by TCP.

        transport = weights.Network(
            model, engine, folder="/shared/run/weights", towards="server-0", encoding="delta"
        )
        receipt = transport.publish(version=1)

    The folder has only the manifests. Each rank keeps the tensors that it owns in its host's shared
    memory, and sends them to the engines' hosts, which read what their workers need. With deltas,
    that is up to two full versions and the deltas in between. When the transport is closed or this
    process ends, they are gone: engines keep their weights, but new ones can't get any.

    A manifest has the address of the rank that sends its file, and a secret that the rank asks for.
    So only the trainer's account can read the manifests, and servers must run under it. Nothing is
    encrypted: whoever can read what travels between the hosts can read the weights.

    Args:
        model: the trainer's model.
        engines: the engines that serve the model, on rank 0.
        folder: see ``Disk``.
        towards: the name or IPv4 address of a server's host. Each rank listens on the address from
            which the rank's host reaches it; by default only on the loopback address.
        encoding: see ``Disk``.
        dtype: see ``Disk``.
        quantize: see ``Disk``.
        snapshot_every: see ``Disk``.
        timeout_s: see ``Disk``.

    Raises:
        ValueError, RuntimeError: see ``Disk``.
        OSError: this host has no route to the host ``towards``, or only by IPv6.
    """

    def __init__(
        self,
        model: nn.Module,
        *engines: Fetcher,
        folder: str | os.PathLike[str] | None,
        towards: str = "127.0.0.1",
        encoding: Literal["full", "delta"] = "full",
        dtype: torch.dtype | None = None,
        quantize: Quantizer | None = None,
        snapshot_every: int = 16,
        timeout_s: float | None = None,
    ) -> None:
        self._towards = towards
        self._first_host = socket.gethostname()  # on rank 0; others learn it in ``_meet``
        self._opened = contextlib.ExitStack()
        weakref.finalize(self, self._opened.close)
        versions = 3 if encoding == "delta" else 2  # two in full, and the deltas in between
        ranks = [int(os.environ.get(name, "1")) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE")]
        self._room = versions * published_bytes(model, dtype, quantize) * ranks[0] // ranks[1]
        super().__init__(
            model,
            *engines,
            folder=folder,
            encoding=encoding,
            dtype=dtype,
            quantize=quantize,
            snapshot_every=snapshot_every,
            timeout_s=timeout_s,
        )

    def _place(self) -> tuple[Path | None, FileSource | None]:
        address = address_towards(self._towards, first_host=self._first_host, argument="towards")
        place = SharedFolder(f"publications-{uuid.uuid4().hex}", room=self._room)
        self._opened.callback(place.close)
        server = PublicationServer(place.path, address)
        self._opened.callback(server.close)
        return place.path, server.source

    def _meet(self) -> None:
        self._first_host = on_first_rank(socket.gethostname)
        super()._meet()

    def _close(self) -> None:
        super()._close()
        self._opened.close()
