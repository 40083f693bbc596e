"""Loading of published tensors into a model, with digests of the tensors that a worker needs."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import attrs
from torch import Tensor

from primerl._common.digests import (
    HashedTensor,
    TensorDigest,
    described,
    digest_of,
    digest_of_all,
)
from primerl._common.threads import BoundedThreads
from primerl.serving.worker.tracked_tensors import TrackedTensors

_AHEAD_PER_THREAD = 2

_Staged = tuple[TensorDigest, Tensor]
"""The digest of a tensor, and the tensor that the loader is given."""
_Submitted = tuple[str, Tensor, Future[_Staged] | None]
"""Name, tensor, and its staging; None if the tensor is on a GPU."""


@attrs.frozen(kw_only=True, eq=False)
class LoadedTensors:
    """The tensors that a worker loaded."""

    digests: dict[str, TensorDigest]
    """The digests of all tensors that came. Of a tensor that the worker does not need, only dtype
    and shape are its own, and the digest of the bytes is the expected one."""
    ignored: list[str]
    """The names of the tensors that the loader was given and did not use."""
    returned: Any
    """What the loader returned."""

    def compare(self, expected: Mapping[str, TensorDigest] | None) -> dict[str, Any]:
        """Return the part of a receipt that compares the tensors with the published ones."""
        taken = self.digests
        expected = taken if expected is None else expected
        return {
            "digest": digest_of_all(taken),
            "tensors": len(taken),
            "missing": sorted(expected.keys() - taken.keys()),
            "unexpected": sorted(taken.keys() - expected.keys()),
            "differing": sorted(n for n in taken.keys() & expected if taken[n] != expected[n]),
        }


def load_checked(
    load: Callable[[Iterable[tuple[str, Tensor]]], Any],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    expected: Mapping[str, TensorDigest] | None,
    threads: int,
    needs: Callable[[str], bool] = lambda _: True,
    hashed: Mapping[int, HashedTensor] | None = None,
    pin: bool = False,
) -> LoadedTensors:
    """Call a loader with the tensors that it needs, each hashed before the loader gets it.

    Threads prepare the next tensors meanwhile. The bytes of tensors that are not needed are not
    read, so they take no time if they are memory-mapped.

    Args:
        load: the loader, such as the ``load_weights`` of a model; it may change the tensors.
            ``TrackedTensors`` describes what counts as a use.
        tensors: the tensors by name; nothing else may change them while they are loaded.
        expected: the published digests. A tensor that is not in it is hashed in any case; None
            stands for no digests.
        threads: how many threads hash.
        needs: whether this worker needs a tensor, by its name; the loader is given no others.
        hashed: tensors that were hashed before, by ``id``. They are not hashed again, unless they
            have been changed.
        pin: whether tensors on the host are copied to pinned memory, from which a GPU copies them
            several times as fast.
    """
    known = hashed or {}
    digests: dict[str, TensorDigest] = {}
    on_device: dict[str, Future[TensorDigest]] = {}

    def staged(tensor: Tensor) -> _Staged:
        before = known.get(id(tensor))
        digest = before.digest if before and before.is_of(tensor) else digest_of(tensor)
        return digest, tensor.pin_memory() if pin else tensor

    with BoundedThreads(threads) as pool:

        def submitted() -> Iterator[_Submitted]:
            for name, tensor in tensors:
                if expected is not None and name in expected and not needs(name):
                    digests[name] = described(tensor, expected[name].digest)
                elif _on_host(tensor):
                    yield name, tensor, pool.submit(staged, tensor)
                else:
                    # Copied from a GPU here, because other threads have other CUDA streams.
                    on_device[name] = pool.submit(digest_of, tensor.detach().cpu())
                    yield name, tensor, None

        def arriving() -> Iterator[tuple[str, Tensor]]:
            for name, tensor, stage in _lagging(submitted(), by=_AHEAD_PER_THREAD * threads):
                given = tensor
                if stage is not None:  # wait, because the loader may change the bytes
                    digests[name], given = stage.result()
                if needs(name):
                    yield name, given

        with TrackedTensors(arriving()) as tracked:
            returned = load(tracked)
    digests |= {name: digest.result() for name, digest in on_device.items()}
    return LoadedTensors(digests=digests, ignored=tracked.ignored, returned=returned)


def _lagging(submitted: Iterable[_Submitted], *, by: int) -> Iterator[_Submitted]:
    """Yield tensors in order while up to ``by`` later ones are hashed; on a GPU, hold none back."""
    held: deque[_Submitted] = deque()
    for one in submitted:
        held.append(one)
        while len(held) > (by if one[2] is not None else 0):
            yield held.popleft()
    yield from held


def _on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"
