"""The urls of an engine's replicas, in a file that its copies in other processes follow."""

import os
import tempfile
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

MODE = 0o600


class Members:
    """A list of urls, or the path of a file with one a line, which is read again as it changes.

    A list is written to a private file when a copy in another process, or a change, needs one.

    Raises:
        ValueError: there is no url, one is there twice or does not begin with http:// or https://,
            or the file can't be read.
    """

    def __init__(self, urls: Sequence[str] | os.PathLike[str] | str) -> None:
        self._path: Path | None = None
        self._remove: weakref.finalize[..., Any] | None = None
        self._seen: tuple[int, int, int] | None = None
        if isinstance(urls, str) and "://" in urls:
            urls = [urls]
        if isinstance(urls, str | os.PathLike):
            self._path = Path(urls).absolute()
            self.urls = self._load()
            self._seen = self._stamp()
        else:
            self.urls = [tidy(url) for url in urls]
            if not self.urls:
                raise ValueError("there are no urls; pass at least one server")
            if len(set(self.urls)) < len(self.urls):
                raise ValueError(f"a server is given twice: {', '.join(self.urls)}")

    def changed(self) -> bool:
        """Read the file again if it was written since; whether it was."""
        if self._path is None or (stamp := self._stamp()) is None or stamp == self._seen:
            return False
        self._seen = stamp
        self.urls = self._load()
        return True

    def write(self, urls: Iterable[str]) -> None:
        """Replace the urls, for all copies."""
        self.urls = [tidy(url) for url in urls]
        if self._path is None:
            handle, name = tempfile.mkstemp(prefix="primerl-replicas-", suffix=".txt")
            os.close(handle)
            self._path = Path(name)
            self._remove = weakref.finalize(self, self._path.unlink, missing_ok=True)
        # The folder may be shared: a new file, under a name that nobody can have prepared.
        handle, partial = tempfile.mkstemp(dir=self._path.parent, prefix=f".{self._path.name}.")
        try:
            with os.fdopen(handle, "w") as file:
                file.write("".join(f"{url}\n" for url in self.urls))
            os.chmod(partial, MODE)
            os.replace(partial, self._path)
        except BaseException:
            os.unlink(partial)
            raise

    def close(self) -> None:
        """Remove the private file; copies keep the urls that they know."""
        if self._remove is not None:
            self._remove()

    def __getstate__(self) -> dict[str, object]:
        if self._path is None:
            self.write(self.urls)
        return {**self.__dict__, "_remove": None, "_seen": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)

    def _stamp(self) -> tuple[int, int, int] | None:
        assert self._path is not None
        try:
            stat = self._path.stat()
        except OSError:
            return None  # its owner is gone, or its file system: the urls stay as they are
        return stat.st_ino, stat.st_mtime_ns, stat.st_size

    def _load(self) -> list[str]:
        assert self._path is not None
        try:
            lines = self._path.read_text().split()
        except OSError as error:
            raise ValueError(
                f"the urls of replicas can't be read from {self._path}: {error.strerror}; pass "
                "urls (http://...), or a file with one a line"
            ) from error
        return list(dict.fromkeys(tidy(url) for url in lines))


def tidy(url: str) -> str:
    """A url without a slash at its end.

    Raises:
        ValueError: it is no url of a server.
    """
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url!r} is no url of a server; expected http://host:port")
    return url.rstrip("/")
