"""This worker's connector that shares keys and values with other servers, if it has one.

Runs inside vLLM's processes; written against vLLM 0.32.
"""

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

from primerl.serving.worker.folder_connector import FolderConnector


def shared_keys() -> FolderConnector | None:
    """Return the connector by which this worker shares keys and values, if it is primerl's."""
    connector = get_kv_transfer_group() if has_kv_transfer_group() else None
    return connector if isinstance(connector, FolderConnector) else None


def label_shared_keys(label: str | None, place: str) -> None:
    """Share keys and values under ``label``, in the folder ``place``; with None, share none."""
    if (connector := shared_keys()) is not None:
        connector.weights_are(label, place)
