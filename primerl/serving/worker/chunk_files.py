"""Files with the keys and values of chunks of prompts, which vLLM servers share in a folder.

A chunk is a fixed number of tokens. Its file is named after a digest of all tokens up to its end,
and lies in a folder named after the weights that computed it.
"""

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

_DIGEST_BYTES = 20
_PLACES = "????????-*"  # the folders that ``Updates`` names


class ChunkFiles:
    """The files of one worker, or the names of the files for a scheduler.

    Args:
        folder: the folder that the servers share.
        tokens: the number of tokens of a chunk.
        identity: whatever else decides keys and values, such as the model's configuration.
        ranks: the number of tensor-parallel workers, each of which has a file for each chunk.
        rank: the number of this worker.
    """

    def __init__(
        self, folder: Path, *, tokens: int, identity: str, ranks: int = 1, rank: int = 0
    ) -> None:
        self.folder = folder
        self.tokens = tokens
        self._seed = hashlib.blake2b(f"{identity}\0{tokens}\0{ranks}".encode()).digest()
        self._ranks = ranks
        self._rank = rank

    def names(self, token_ids: Sequence[int]) -> list[str]:
        """Return the name of each whole chunk."""
        names: list[str] = []
        last = self._seed
        for start in range(0, len(token_ids), self.tokens):
            chunk = token_ids[start : start + self.tokens]
            if len(chunk) < self.tokens:
                break
            content = np.asarray(chunk, dtype="<i8").tobytes()
            last = hashlib.blake2b(last + content, digest_size=_DIGEST_BYTES).digest()
            names.append(last.hex())
        return names

    def missing(self, place: str, names: Iterable[str]) -> list[int]:
        """Return the indexes of the chunks that some worker has not stored."""
        ranks = range(self._ranks)
        return [
            index
            for index, name in enumerate(names)
            if not all(self._path(place, name, rank).exists() for rank in ranks)
        ]

    def save(self, place: str, name: str, layers: dict[str, Tensor]) -> None:
        """Store a chunk's keys and values by layer, unless they are stored.

        Raises:
            OSError: the file can't be written.
        """
        path = self._path(place, name, self._rank)
        if path.exists():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=path.parent, prefix=".")
        os.close(handle)
        try:
            save_file(layers, partial)
            os.replace(partial, path)
        except BaseException as error:
            Path(partial).unlink(missing_ok=True)
            if isinstance(error, SafetensorError):  # its errors of writing are no OSError
                raise OSError(f"{path} can't be written: {error}") from error
            raise

    def load(self, place: str, name: str) -> dict[str, Tensor]:
        """Return a chunk's keys and values by layer.

        Raises:
            OSError: the file is missing or damaged.
        """
        path = self._path(place, name, self._rank)
        try:
            return load_file(path)
        except SafetensorError as error:
            raise OSError(f"{path} is damaged: {error}") from error

    def remove(self, place: str, name: str) -> None:
        """Remove a chunk that can't be loaded, so that it is computed and stored again."""
        with contextlib.suppress(OSError):
            self._path(place, name, self._rank).unlink()

    def remove_others(self, place: str) -> None:
        """Remove what other weights stored, but for the version before ``place``.

        Servers that are not updated yet still share that version. If a removed file was about to
        be loaded, its request fails and is sent again.
        """
        run, _, newest = place.rpartition("-")
        kept = {place}
        older = []
        for folder in self.folder.iterdir() if self.folder.exists() else ():
            name, _, version = folder.name.rpartition("-")
            if name == run and version.isdecimal() and int(version) < int(newest):
                older.append(int(version))
        if older:
            kept.add(f"{run}-{max(older)}")
        for folder in self.folder.glob(_PLACES):
            if folder.name not in kept:
                shutil.rmtree(folder, ignore_errors=True)  # another server removes it, too

    def _path(self, place: str, name: str, rank: int) -> Path:
        # Two letters of the name, so that no folder has too many entries.
        return self.folder / place / name[:2] / f"{name}.{rank}"


class WeightsLabel:
    """The label of a server's weights, which its worker tells its scheduler by a file.

    Both run on one host, mostly in two processes. The label is changed only while the server is
    paused. Until it is set, and while weights are loaded, it is None.
    """

    def __init__(self, server: str) -> None:
        name = hashlib.blake2b(server.encode(), digest_size=12).hexdigest()
        self._path = Path(tempfile.gettempdir()) / f"primerl-weights-{os.getuid()}-{name}"

    def get(self) -> tuple[str | None, str]:
        """Return the label, and the folder of the weights in which servers share."""
        try:
            label, _, place = self._path.read_text(encoding="utf-8").partition("\n")
        except FileNotFoundError:
            return None, ""
        return label, place

    def set(self, label: str | None, place: str) -> None:
        """Change the label and the folder."""
        if label is None:
            self._path.unlink(missing_ok=True)
            return
        handle, partial = tempfile.mkstemp(dir=self._path.parent, prefix=self._path.name)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(f"{label}\n{place}")
        os.replace(partial, self._path)


def copy_blocks(cache: Tensor, blocks: Sequence[int]) -> Tensor:
    """Return a copy, on the host, of some blocks of a layer's cache."""
    index = torch.tensor(blocks, device=cache.device)
    return cache.index_select(0, index).cpu().contiguous()


def write_blocks(cache: Tensor, blocks: Sequence[int], content: Tensor) -> None:
    """Write ``content`` into some blocks of a layer's cache.

    Raises:
        OSError: the content is not of this cache.
    """
    if content.dtype != cache.dtype or content.shape != (len(blocks), *cache.shape[1:]):
        raise OSError(
            f"the stored keys and values are {content.dtype}{list(content.shape)}, expected "
            f"{cache.dtype}{[len(blocks), *cache.shape[1:]]}"
        )
    index = torch.tensor(blocks, device=cache.device)
    cache.index_copy_(0, index, content.to(cache.device))
