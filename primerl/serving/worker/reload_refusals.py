"""Check for servers whose weights vLLM 0.32 can't update correctly."""

from collections.abc import Sequence
from typing import Any

# Connectors that move a prompt once, or store for one server and forget all at an update, or know
# which weights computed what they store.
_RELOADABLE_CONNECTORS = (
    "FolderConnector",
    "MoRIIOConnector",
    "MooncakeConnector",
    "MultiConnector",
    "NixlConnector",
    "OffloadingConnector",
    "SimpleCPUOffloadConnector",
)


def reload_refusal(
    *,
    parallel_config: Any,
    most_rank: int,
    padded_experts: int = 0,
    connectors: Sequence[str] = (),
) -> str:
    """Return why a server would not compute with the weights that it is sent; "" if it would.

    Args:
        parallel_config: vLLM's ``ParallelConfig``.
        most_rank: the largest rank of adapters that the server can load, 0 for none.
        padded_experts: the intermediate size of the experts that the server has padded, 0 for none.
        connectors: the names of the server's KV connectors.
    """
    if most_rank:
        return (
            "a server that was started with enable_lora can't reload its base model (vLLM "
            "0.32): publish adapters to it, or start it without enable_lora"
        )
    if parallel_config.enable_eplb:
        return (
            "a server that was started with enable_eplb can't be sent weights (vLLM 0.32): it "
            "moves experts between devices, and an update could load some of them into the places "
            "of others; start it without enable_eplb"
        )
    if padded_experts:
        return (
            f"a server on a CPU that has padded its experts of {padded_experts} intermediate "
            "dimensions can't be sent weights (vLLM 0.32): use a model whose "
            "moe_intermediate_size is a multiple of 32, or a GPU"
        )
    unsafe = [name for name in connectors if name not in _RELOADABLE_CONNECTORS]
    if unsafe:
        return (
            f"a server with the KV connector {unsafe[0]} can't be sent weights (vLLM 0.32): it "
            "could load keys and values that other weights computed. Share them with "
            "kv_transfer_config=serving.kv_folder(folder), or keep them in host memory with "
            "OffloadingConnector"
        )
    return ""
