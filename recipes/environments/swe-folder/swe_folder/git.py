"""Commits and patches, read by git itself, without running any program that a repository names.

Commits are checked out from a temporary repository that only shares the objects of the original
one. So git never reads the configuration, hooks and filters of the original repository, of the user
or of the system for a checkout.
"""

import functools
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from primerl.sandbox import Executable, SymbolicLink

File = bytes | Executable | SymbolicLink
Files = dict[str, File]

MOST_BYTES = 64 << 20  # per repository
TIMEOUT_S = 60.0
_POINTER = b"version https://git-lfs.github.com/spec/"
_LONGEST_POINTER = 1024  # bytes, by its specification
_SUBMODULE = "160000"
_SETTINGS = {
    # The owner of the repository is of no importance, since nothing of it is executed.
    "safe.directory": "*",
    "core.hooksPath": os.devnull,
    "core.fsmonitor": "false",
    "core.attributesFile": os.devnull,
    "core.excludesFile": os.devnull,
}


def committed(folder: str, commit: str, *patches: str) -> Files:
    """Return the files of a commit as git checks them out, with patches applied.

    ``folder`` is a repository, a worktree or a bare repository. Attributes count as in a checkout:
    line endings and encodings are converted, and nothing is left out.

    Raises:
        ValueError: the commit does not exist, a patch does not apply, or the repository has
            submodules, Git LFS pointers or too many bytes.
    """
    with tempfile.TemporaryDirectory(prefix="swe-folder-") as temporary:
        place = Path(temporary)
        try:
            _copy_commit(folder, commit, place)
        except ValueError as error:
            raise ValueError(f"{folder} at {commit}: {error}") from None
        for patch in patches:
            if patch.strip():
                _apply(place, patch)
        _refuse_submodules(place, f"{folder} at {commit}")
        tree = _said(place, "write-tree")
        _run(["read-tree", "--reset", "-u", tree], place)
        return _files(place / "work", f"{folder} at {commit}")


def names(patch: str) -> list[tuple[str, str]]:
    """Return the old and the new name of each file that a patch changes, in the patch's order.

    Raises:
        ValueError: git can't read the patch.
    """
    if not patch.strip():
        return []
    content = _encoded(patch)
    # git names only one side of each change, so the second reading is of the reversed patch.
    old = _listed(content, reverse=True)
    new = _listed(content)
    return list(zip(old[::-1] if _lists_backwards() else old, new, strict=True))


def is_repository(folder: Path) -> bool:
    """Check whether a folder is a git repository, a worktree or a bare repository."""
    bare = (folder / "HEAD").is_file() and (folder / "objects").is_dir()
    return (folder / ".git").exists() or bare


def _copy_commit(folder: str, commit: str, place: Path) -> None:
    """Make a temporary repository at ``place``, with the commit's files in its index."""
    if commit.startswith("-"):
        raise ValueError("a commit's name does not begin with '-'")
    above = {"GIT_CEILING_DIRECTORIES": str(Path(folder).resolve().parent)}

    def ask(*command: str) -> str:
        done = _run(["-C", folder, "rev-parse", *command], place, variables=above)
        return os.fsdecode(done).rstrip("\n")

    tree = ask("--verify", "--quiet", "--end-of-options", f"{commit}^{{tree}}")
    objects = Path(folder, ask("--git-path", "objects")).resolve()
    form = ask("--show-object-format")
    for name in ("git", "work"):
        (place / name).mkdir()
    _run(["init", "--quiet", "--template=", f"--object-format={form}"], place)
    alternates = place / "git/objects/info/alternates"
    alternates.parent.mkdir(parents=True, exist_ok=True)
    alternates.write_bytes(os.fsencode(objects) + b"\n")
    _run(["read-tree", tree], place)


def _apply(place: Path, patch: str) -> None:
    try:
        _run(["apply", "--cached", "--whitespace=nowarn", "-"], place, _encoded(patch))
    except ValueError as error:
        raise ValueError(f"the patch does not apply: {error}") from None


def _refuse_submodules(place: Path, what: str) -> None:
    entries = os.fsdecode(_run(["ls-files", "--stage", "-z"], place)).split("\0")
    paths = [entry.partition("\t")[2] for entry in entries if entry.startswith(_SUBMODULE)]
    if paths:
        raise ValueError(
            f"{what} has submodules, which are not supported: {', '.join(paths)}; commit their "
            "files to the repository itself, for example with git subtree"
        )


def _files(folder: Path, what: str) -> Files:
    """Read a checkout, without following links."""
    found: Files = {}
    left = MOST_BYTES
    for path in sorted(_walk(folder)):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            found[name] = SymbolicLink(os.readlink(path))
            continue
        left -= path.stat().st_size
        if left < 0:
            raise ValueError(f"{what} has more than {MOST_BYTES >> 20} MiB of files")
        content = path.read_bytes()
        if content.startswith(_POINTER) and len(content) < _LONGEST_POINTER:
            raise ValueError(
                f"{what} has the Git LFS pointer {name} instead of a file; commit the file itself, "
                "or remove it if the tests don't need it"
            )
        found[name] = Executable(content) if path.stat().st_mode & 0o100 else content
    return found


def _walk(folder: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        yield from (Path(place, name) for name in files)
        yield from (Path(place, name) for name in folders if Path(place, name).is_symlink())


def _encoded(patch: str) -> bytes:
    content = patch.encode(errors="surrogateescape")
    return content if content.endswith(b"\n") else content + b"\n"


def _listed(patch: bytes, *, reverse: bool = False) -> list[str]:
    """Return one name of each file that a patch changes: the new one, or the old one in reverse."""
    options = ["-R"] if reverse else []
    with tempfile.TemporaryDirectory(prefix="swe-folder-") as temporary:
        said = _run(["apply", "--numstat", "-z", *options, "-"], Path(temporary), patch)
    return [row.split("\t", 2)[2] for row in os.fsdecode(said).split("\0")[:-1]]


@functools.cache
def _lists_backwards() -> bool:
    """Check whether this version of git lists a reversed patch from its end."""
    part = b"--- a/{0}\n+++ b/{0}\n@@ -1 +1 @@\n-a\n+b\n"
    patch = part.replace(b"{0}", b"first") + part.replace(b"{0}", b"second")
    return _listed(patch, reverse=True)[0] == "second"


def _said(place: Path, *command: str) -> str:
    return os.fsdecode(_run(list(command), place)).strip()


def _run(
    command: Sequence[str],
    place: Path,
    content: bytes = b"",
    variables: dict[str, str] | None = None,
) -> bytes:
    """Run git in the temporary repository at ``place``, and return what it wrote to stdout.

    Raises:
        ValueError: git fails, is missing or takes too long; the message is git's own.
    """
    settings = [f"{name}={value}" for name, value in _SETTINGS.items()]
    options = [part for setting in settings for part in ("-c", setting)]
    repository = {"GIT_DIR": str(place / "git"), "GIT_WORK_TREE": str(place / "work")}
    if not (place / "git").exists():  # git must not find a repository around the folder either
        repository = {"GIT_CEILING_DIRECTORIES": str(place.resolve().parent)}
    try:
        done = subprocess.run(
            ["git", *options, *command],
            cwd=place,
            env={**_variables(), **repository, **(variables or {})},
            input=content,
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        raise ValueError("git is not installed: swe-folder reads repositories with it") from None
    except subprocess.TimeoutExpired:
        raise ValueError(f"git {command[0]} took more than {TIMEOUT_S:.0f} s") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        raise ValueError(said or "git finds no such commit")
    return done.stdout


def _variables() -> dict[str, str]:
    """Return git's environment: no configuration of the user or the system, and no network."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return kept | {
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_SYSTEM": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_ALLOW_PROTOCOL": "none",
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_TERMINAL_PROMPT": "0",
        "LC_ALL": "C.UTF-8",
    }
