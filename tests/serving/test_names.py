import ast
from pathlib import Path

import primerl
from primerl.serving import names


def test_worker_extension_has_every_method_that_clients_call():
    # Read, not imported: the module needs vLLM.
    module, _, extension = names.WORKER_EXTENSION.rpartition(".")
    path = Path(primerl.__file__).parents[1].joinpath(*module.split(".")).with_suffix(".py")
    (receiver,) = (
        node for node in ast.parse(path.read_text()).body if getattr(node, "name", "") == extension
    )
    methods = {node.name for node in receiver.body if isinstance(node, ast.FunctionDef)}
    assert methods == {
        names.LABEL_SHARED_KEYS,
        names.PREPARE_ADAPTER,
        names.PREPARE_WEIGHTS,
        names.READ_ADAPTER,
        names.READ_WEIGHTS,
        names.RELOAD_REFUSAL,
        names.SERVED_CACHE_BLOCK,
        names.SERVED_DTYPE,
        names.SERVED_ROUTES,
        names.SERVED_VOCAB_SIZE,
        names.WEIGHT_RECEIPT,
    }
