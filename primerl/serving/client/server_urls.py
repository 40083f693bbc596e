"""The list of an engine's server urls, shared with its copies in other processes by a file."""

import os
import tempfile
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


class ServerUrls:
    """The urls of an engine's servers, given as a list or as a file with one url per line.

    The file is read again when it changes. A list is written to a private file as soon as this
    object is pickled or changed, so that the copies see later changes.

    Args:
        servers: one or several urls or ``VLLMServer`` objects, or the path of the file.

    Raises:
        ValueError: there is no url, a url is listed twice or does not begin with http:// or
            https://, or the file can't be read.
    """

    def __init__(self, servers: Any) -> None:
        self._path: Path | None = None
        self._remove: weakref.finalize[..., Any] | None = None
        self._seen: tuple[int, int, int] | None = None
        if isinstance(servers, os.PathLike) or (isinstance(servers, str) and "://" not in servers):
            self._path = Path(servers).absolute()
            self.urls = self._load()
            self._seen = self._stamp()
            return
        self.urls = [url_of(one) for one in _several(servers)]
        if not self.urls:
            raise ValueError("the list of servers is empty; pass at least one server")
        if len(set(self.urls)) < len(self.urls):
            raise ValueError(f"a server is listed twice: {', '.join(self.urls)}")

    def changed(self) -> bool:
        """Read the file again if it was written since the last reading; return whether it was."""
        if self._path is None or (stamp := self._stamp()) is None or stamp == self._seen:
            return False
        self._seen = stamp
        self.urls = self._load()
        return True

    def write(self, urls: Iterable[str]) -> None:
        """Replace the urls in this object and all copies."""
        self.urls = [tidy(url) for url in urls]
        if self._path is None:
            handle, name = tempfile.mkstemp(prefix="primerl-servers-", suffix=".txt")
            os.close(handle)
            self._path = Path(name)
            self._remove = weakref.finalize(self, self._path.unlink, missing_ok=True)
        # Other users may write to the folder, so the new file is private and its name random.
        handle, partial = tempfile.mkstemp(dir=self._path.parent, prefix=f".{self._path.name}.")
        try:
            with os.fdopen(handle, "w") as file:
                file.write("".join(f"{url}\n" for url in self.urls))
            os.replace(partial, self._path)
        except BaseException:
            os.unlink(partial)
            raise

    def close(self) -> None:
        """Remove the private file; copies keep the urls that they read last."""
        if self._remove is not None:
            self._remove()

    def __getstate__(self) -> dict[str, object]:
        if self._path is None:
            self.write(self.urls)
        return {**self.__dict__, "_remove": None, "_seen": None}

    def _stamp(self) -> tuple[int, int, int] | None:
        assert self._path is not None
        try:
            stat = self._path.stat()
        except OSError:
            return None  # the owner removed the file, or its file system is gone: keep the urls
        return stat.st_ino, stat.st_mtime_ns, stat.st_size

    def _load(self) -> list[str]:
        assert self._path is not None
        try:
            lines = self._path.read_text().split()
        except OSError as error:
            raise ValueError(
                f"the servers' urls can't be read from {self._path}: {error.strerror}; pass "
                "urls (http://...), or a file with one url per line"
            ) from error
        return list(dict.fromkeys(tidy(url) for url in lines))


def tidy(url: str) -> str:
    """Return a url without its trailing slash.

    Raises:
        ValueError: the url does not begin with http:// or https://.
    """
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url!r} is not the url of a server; expected http://host:port")
    return url.rstrip("/")


def url_of(server: Any) -> str:
    """Return the url of a server, which may be given as a url or as a ``VLLMServer``."""
    return tidy(server.url if hasattr(server, "url") else server)


def key_of(*servers: Any) -> str | None:
    """Return the API key of ``VLLMServer`` objects, or None for urls.

    Raises:
        ValueError: the servers have different keys.
    """
    several = [one for some in servers for one in _several(some)]
    keys = {getattr(one, "api_key", None) for one in several} - {None}
    if len(keys) > 1:
        raise ValueError(
            "the servers have different API keys; start them with the same one: "
            "serve_vllm(..., api_key=)"
        )
    return next(iter(keys), None)


def _several(servers: Any) -> Sequence[Any]:
    return (
        [servers] if isinstance(servers, str | os.PathLike) or hasattr(servers, "url") else servers
    )
