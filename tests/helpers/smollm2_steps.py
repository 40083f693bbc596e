"""Real policy-gradient steps of SmolLM2 on a CPU, to measure how a step changes weights."""

import torch

from primerl import models

PROMPTS = [
    "Write a short sentence about cats.",
    "Count from one to ten.",
    "What is 12 + 7?",
    "Name three fruits.",
    "Say hello politely.",
    "What color is the sky?",
]
GROUP, TOKENS = 4, 24


def reward(text):
    return 0.1 * text.count(" ") - 0.005 * len(text) + (1.0 if "." in text else 0.0)


def bf16_rounded(folder):
    """Load SmolLM2 in float32 with weights that bfloat16 represents, like a checkpoint's."""
    model, tokenizer = models.load_pretrained(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model, tokenizer


def rollouts(model, tokenizer, prompt):
    """Return the token ids of a group, its prompt length, and normalized advantages."""
    chat = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    ids = ids["input_ids"] if hasattr(ids, "keys") else ids
    with torch.no_grad():
        sampled = model.generate(
            ids.expand(GROUP, -1),
            attention_mask=torch.ones(GROUP, ids.shape[1], dtype=torch.long),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            max_new_tokens=TOKENS,
            pad_token_id=tokenizer.eos_token_id,
        )
    start = ids.shape[1]
    rewards = torch.tensor([reward(tokenizer.decode(row[start:])) for row in sampled])
    return sampled, start, (rewards - rewards.mean()) / (rewards.std() + 1e-4)


def steps(model, tokenizer, *, count, lr=1e-6, seed=0):
    """Train float32 weights with AdamW; yield the number of each step after the step."""
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    for step in range(1, count + 1):
        groups = [
            rollouts(model, tokenizer, PROMPTS[(3 * step + i) % len(PROMPTS)]) for i in range(3)
        ]
        trained = sum(ids[:, start:].numel() for ids, start, _ in groups)
        for ids, start, advantages in groups:
            logits = model(input_ids=ids, use_cache=False).logits[:, start - 1 : -1].float()
            logprobs = logits.log_softmax(-1).gather(-1, ids[:, start:, None])[..., 0]
            (-(logprobs * advantages[:, None]).sum() / trained).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield step
