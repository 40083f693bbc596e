"""Compare packed logprobs of trained weights with those of each document alone, also with faults.

    python tools/trained_faults.py FOLDER_OR_GGUF docs/packing.md docs/vllm.md ...

Each text file is cut to one document; the model should have a sliding window. The output is a row
of the tables in docs/verified.md for the packed model and for each fault.
"""

import argparse
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from primerl import loss
from primerl.attention import packed

LENGTHS = (1600, 900, 300, 40)
FAULTS = {
    "none": 0,
    "a window one longer": 1,
    "a window one shorter": -1,
}


def alone(model: Any, document: Tensor) -> Tensor:
    """Return the logprobs of a document's tokens but the first, in plain ``transformers`` code."""
    logprobs = model(input_ids=document[None], use_cache=False).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, document[1:, None])[:, 0]


def packed_together(model: Any, documents: list[Tensor], change: int) -> Tensor:
    """Return the same logprobs of all documents in one pack, with a window that is changed."""
    real = packed.attend

    def changed(*tensors: Tensor, **options: Any) -> Tensor:
        window = options["window"]
        return real(*tensors, **{**options, "window": window and window + change})

    with mock.patch.object(packed, "attend", changed):
        found = loss.model_logprobs(
            model,
            torch.cat(documents),
            torch.cat([torch.arange(len(one)) for one in documents]),
            torch.cat([one.roll(-1) for one in documents]),
        )
    return torch.cat([part[:-1] for part in found.split([len(one) for one in documents])])


@torch.no_grad()
def main() -> None:
    """Print the differences."""
    import transformers

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a model folder, or a GGUF file")
    parser.add_argument("texts", type=Path, nargs="+", help="text files, one per document")
    args = parser.parse_args()
    of_file = {"gguf_file": args.model.name} if args.model.is_file() else {}
    folder = args.model.parent if of_file else args.model
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **of_file)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa", **of_file
    ).eval()
    documents = [
        torch.tensor(tokenizer(path.read_text(encoding="utf-8")).input_ids[:length])
        for path, length in zip(args.texts, LENGTHS, strict=False)
    ]
    expected = torch.cat([alone(model, one) for one in documents])
    print(f"window {model.config.sliding_window}, lengths {[len(one) for one in documents]}, ")
    print(f"mean logprob {expected.mean():.2f}")
    for fault, change in FAULTS.items():
        apart = (packed_together(model, documents, change) - expected).abs()
        changed = (apart > 1e-3).double().mean()
        print(f"| {fault} | {changed:.1%} | {apart.median():.0e} | {apart.max():.0e} |")


if __name__ == "__main__":
    main()
