"""Check for servers whose weights vLLM 0.32 can't update correctly."""

from typing import Any


def reload_refusal(*, parallel_config: Any, most_rank: int, padded_experts: int = 0) -> str:
    """Return why a server would not compute with the weights that it is sent; "" if it would.

    Args:
        parallel_config: vLLM's ``ParallelConfig``.
        most_rank: the largest rank of adapters that the server can load, 0 for none.
        padded_experts: the intermediate size of the experts that the server has padded, 0 for none.
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
    return ""
