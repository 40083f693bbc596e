"""Servers whose weights vLLM 0.32 can't replace."""

from typing import Any


def refuse_reload(*, parallel_config: Any, most_rank: int) -> None:
    """Refuse servers that would compute with other weights than those they are sent.

    Args:
        parallel_config: vLLM's ``ParallelConfig``.
        most_rank: the largest rank of an adapter that the server takes, 0 for none.

    Raises:
        RuntimeError: the server takes adapters, or moves experts between devices.
    """
    if most_rank:
        raise RuntimeError(
            "a server that was started with enable_lora can't reload its base model (vLLM "
            "0.32): publish adapters to it, or start it without enable_lora"
        )
    if parallel_config.enable_eplb:
        raise RuntimeError(
            "a server that was started with enable_eplb can't be sent weights (vLLM 0.32): it "
            "moves experts between devices, and an update could load some of them into the places "
            "of others; start it without enable_eplb"
        )
