"""Supervised training of tiny policies, as a starting point for reinforcement learning."""

from collections.abc import Iterable, Sequence
from typing import Any


def imitate(
    model: Any,
    tokenizer: Any,
    lessons: Iterable[Sequence[tuple[str, str]]],
    *,
    lr: float = 3e-3,
) -> None:
    """Train a model on continuations of texts, with the packed forward pass of ``loss``.

    Args:
        model: a causal language model.
        tokenizer: the model's tokenizer; each continuation ends with its end-of-sequence token.
        lessons: one batch of ``(text, continuation)`` per step of AdamW.
        lr: the learning rate.
    """
    import torch  # here, so that scripted engines don't load torch

    from primerl import loss

    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    for lesson in lessons:
        given = [tokenizer.encode(text, add_special_tokens=False) for text, _ in lesson]
        wanted = [tokenizer.encode(text, add_special_tokens=False) for _, text in lesson]
        documents = [[*a, *b, tokenizer.eos_token_id] for a, b in zip(given, wanted, strict=True)]
        token_ids = torch.tensor([token for document in documents for token in document])
        position_ids = torch.cat([torch.arange(len(document)) for document in documents])
        logprobs = loss.model_logprobs(model, token_ids, position_ids, token_ids.roll(-1))
        # A continuation's first token is predicted by the row of the token before it.
        rows = torch.cat(
            [torch.arange(len(d)) >= len(a) - 1 for a, d in zip(given, documents, strict=True)]
        )
        rows &= position_ids.roll(-1) != 0
        mean = loss.token_mean(-logprobs, rows, denom=int(rows.sum()))
        mean.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
