"""``kv_folder``, the argument of ``serve_vllm`` with which servers share keys and values."""

import os
from pathlib import Path
from typing import Any, Literal

from primerl.serving.names import FOLDER_CONNECTOR, FOLDER_CONNECTOR_MODULE

ROLES = {"prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both"}


def kv_folder(
    folder: str | os.PathLike[str],
    *,
    role: Literal["prefill", "decode", "both"] = "both",
    chunk_tokens: int = 128,
) -> dict[str, Any]:
    """Return a ``kv_transfer_config`` with which vLLM servers share keys and values by a folder.

        store = "/dev/shm/keys-and-values"
        serve_vllm(model, kv_transfer_config=serving.kv_folder(store, role="prefill"))

    Servers share the keys and values of whole chunks of prompts, with servers that have the same
    model and weights, the same dtype and block size of the cache, and the same
    ``tensor_parallel_size``. They share those of weights that this run published or adopted. After
    an update, none of older weights are loaded, and those of the second last version are removed.

    Args:
        folder: an absolute path, which all servers see; on one host, in ``/dev/shm``. Its size is
            not limited. Remove it after the run.
        role: ``"prefill"`` stores, ``"decode"`` loads, and ``"both"`` does both.
        chunk_tokens: the number of tokens of a file, rounded up to whole blocks of the cache.

    Raises:
        ValueError: the path is relative, the role is unknown, or ``chunk_tokens`` is less than 1.
    """
    path = Path(folder)
    if not path.is_absolute():
        raise ValueError(f"the folder {str(folder)!r} is relative; expected an absolute path")
    if role not in ROLES:
        raise ValueError(f"role={role!r}; expected one of {', '.join(ROLES)}")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens}, expected at least 1")
    return {
        "kv_connector": FOLDER_CONNECTOR,
        "kv_connector_module_path": FOLDER_CONNECTOR_MODULE,
        "kv_role": ROLES[role],
        "kv_connector_extra_config": {"folder": str(path), "chunk_tokens": chunk_tokens},
    }
