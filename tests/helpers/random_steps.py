"""Training steps on random data, for tests that only need changed weights."""

import torch


def trained(model, *, seed, lr):
    """Take one AdamW step on random data; every tensor changes by about the learning rate."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(2, 60, (4, 32), generator=generator)
    logprobs = model(rows).logits[:, :-1].log_softmax(-1).gather(2, rows[:, 1:, None])
    (logprobs[..., 0] * torch.randn(4, 31, generator=generator)).mean().backward()
    torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0).step()
    model.zero_grad()
