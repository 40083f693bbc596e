"""Run by torchrun in tests/vllm/test_weights.py: two ranks broadcast to a vLLM server."""

import contextlib
import json
import sys
from pathlib import Path

from publishing import StoreMeeting

from primerl import models, parallel, serving, weights


def main(url, key, version, folder):
    store = StoreMeeting(folder)
    with parallel.process_group(timeout_s=60.0) as world, contextlib.ExitStack() as stack:
        engines = []
        if world.is_first:
            engines = [
                stack.enter_context(contextlib.closing(serving.VLLMEngine(url, api_key=key)))
            ]
        model, _ = models.load_pretrained(folder / "model")
        transport = weights.NCCL(
            parallel.shard(model), *engines, connect=store.connect, unique_id=store.unique_id
        )
        receipt = transport.publish(version)
        workers = [one["digest"] for server in receipt.servers.values() for one in server]
        told = {"digest": receipt.digest, "bytes": receipt.bytes, "workers": workers}
        for engine in engines:  # the only one that knows the label of this version
            tokens = json.loads((folder / "tokens.json").read_text())
            (answer,) = engine.probe([tokens], max_new_tokens=1).values()
            told["scores"] = [float(score) for score in answer[0]["scores"]]
        (folder / f"found-{world.rank}.json").write_text(json.dumps([told, store.sent]))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
