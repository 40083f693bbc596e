"""Compilation of a model's layers, with a cache that outlives the process."""

import hashlib
import os
import platform
import stat
from pathlib import Path
from typing import Any

import torch
from torch import nn

from primerl._common.progress import report
from primerl.attention.admission import language_model

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def compile_layers(model: Any) -> None:
    """Compile each layer of a Hugging Face model's decoder, for packs of any lengths.

    Call it last: recompute -> shard -> compile. The first step takes longer.
    Compiled code is kept in ``~/.cache/primerl/compiled`` (below ``XDG_CACHE_HOME``, if that is
    set), so that the first steps of resumed runs, and of other runs of equal layers, are short. The
    folder has a part for each version of torch and kind of machine. ``TORCHINDUCTOR_CACHE_DIR``
    chooses another folder. Its files are pickles, which run code when they are loaded: choose a
    folder that nobody else can write to.

    Args:
        model: the model; modified in place.

    Raises:
        ValueError: the model has no list of its decoder's layers.
    """
    layers = _layers(model)
    folder = choose_cache() or "torch's default folder"
    report("compile", f"the first step compiles layers, or finds them in {folder}")
    for layer in layers:
        layer.compile(dynamic=True)


def _layers(model: Any) -> nn.ModuleList:
    """Return the list of the layers of a model's decoder, whose name differs by family."""
    depth = model.config.get_text_config(decoder=True).num_hidden_layers
    for part in language_model(model).modules():
        if isinstance(part, nn.ModuleList) and len(part) == depth:
            return part
    raise ValueError(
        f"{type(model).__name__} has no list of {depth} layers to compile; call compile() on "
        "its modules yourself"
    )


def choose_cache() -> str | None:
    """Make torch keep compiled code in this user's folder, unless another one has been chosen.

    Returns the folder; None if torch chooses it.
    """
    if VARIABLE not in os.environ:
        folder = cache_folder()
        if folder is None:
            return None
        os.environ[VARIABLE] = str(folder)
    return os.environ[VARIABLE]


def cache_folder() -> Path | None:
    """Return this user's folder for compiled code, and create it.

    None if it can't be created, if other users can write to it, or if its path has spaces, which
    torch does not quote in the commands of its C++ compiler.
    """
    home = os.environ.get("XDG_CACHE_HOME", "")
    try:
        # Relative paths are invalid there (XDG base directory specification).
        base = Path(home) if Path(home).is_absolute() else Path.home() / ".cache"
        folder = base / "primerl" / "compiled" / machine_kind()
        if any(character.isspace() for character in str(folder)):
            return None
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except (OSError, RuntimeError):  # the home folder is unknown, or can't be written
        return None
    own = found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return folder if own and os.access(folder, os.W_OK) else None


def machine_kind() -> str:
    """Return a name that differs for each version of torch, and each type of CPU and GPU."""
    parts: list[Any] = [platform.machine(), sorted(torch.cpu.get_capabilities().items())]
    if torch.cuda.is_available():
        parts += [torch.version.cuda, torch.cuda.get_device_name()]
        parts += [torch.cuda.get_device_capability()]
    return f"torch-{torch.__version__}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:12]}"
