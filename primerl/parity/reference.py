"""The parity reference: training in plain torch and transformers, in one process.

Each document is computed alone by an unmodified model, and every formula is written out. This
module imports nothing of primerl, so that the two sides can't share a mistake.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import attrs
import torch
from torch import Tensor, nn

ENTROPY_BONUS = (0.05, 0.0, 0.05)
"""Coefficient of the entropy bonus in each step; its length is the number of steps."""
CLIP = 0.2
LR = 3e-3
WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.999)
EPS = 1e-3
"""AdamW's epsilon, large so that gradients of 0 up to rounding make no large steps."""
MOMENTUM = 0.95
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)

ALONE = (7, 5, 16, 31, 1, 9)
"""Lengths of documents without shared prefixes."""
PROMPT, ANSWERS = 17, (5, 3, 8)
"""Length of a prompt that some documents share, and of the answer in each of them."""
TURNS = (20, 8, 3)
"""Numbers of tokens that each of the last documents appends to the previous one, which is not
trained again."""
TEMPERATURES = (1.0, 0.7, 1.3)

MUON_FAMILIES = ("llama", "qwen3", "qwen3_moe", "glm4_moe", "deepseek_v3", "minimax_m2")
"""Families for which ``MATRIX`` matches exactly the matrices."""
MATRIX = re.compile(
    r"\.self_attn\.(q|k|v|o|q_a|q_b|kv_b)_proj\.weight$"
    r"|\.self_attn\.kv_a_proj_with_mqa\.weight$"
    r"|\.mlp\.(shared_experts\.)?(gate|up|down)_proj\.weight$"
    r"|\.mlp\.experts\.(gate_up|down)_proj$"
)


@attrs.frozen(kw_only=True, eq=False)
class ReferenceDocument:
    """One sequence; entry t of each list describes token t."""

    token_ids: list[int]
    trained: list[bool]
    advantages: list[float]
    behavior_logprobs: list[float]
    temperature: float


@attrs.frozen(kw_only=True, eq=False)
class Training:
    """The results of a few training steps. Tokens are numbered over all documents."""

    losses: list[float]
    """Loss of each step."""
    norms: list[float]
    """Gradient norm of each step, before clipping."""
    logprobs: Tensor
    """Logprobs in the first step, ``[tokens]``; NaN if not trained, or not on this rank.

    Infinite if a token is trained more than once."""
    entropies: Tensor
    """Entropies of the distributions of trained tokens; NaN and infinite as for logprobs."""
    gradients: dict[str, Tensor]
    """Gradients of the first step, before clipping, unsharded."""
    clipped: dict[str, Tensor]
    """Gradients of the first step, after clipping, unsharded."""
    choices: dict[str, Tensor]
    """Experts that predicted each token, by layer: ``[steps, tokens, k]``, sorted; -1 if none."""
    updates: dict[str, Tensor]
    """Changes of parameters over all steps, unsharded."""
    max_norm: float
    """The norm to which gradients were clipped."""


def documents(vocabulary: int, *, special: Sequence[int] = ()) -> list[ReferenceDocument]:
    """Draw documents of random tokens: short and long, with a common prompt, with many turns."""
    draws = torch.Generator().manual_seed(0)
    ordinary = torch.tensor([token for token in range(vocabulary) if token not in special])

    def tokens(count: int) -> list[int]:
        places = torch.randint(len(ordinary), (count,), generator=draws)
        return ordinary[places].tolist()

    made = [(tokens(length), 1 + length // 3) for length in ALONE]
    prompt = tokens(PROMPT)
    made += [(prompt + tokens(length), PROMPT) for length in ANSWERS]
    history: list[int] = []
    for length in TURNS:
        made.append((history + tokens(length), max(len(history), 1)))
        history = made[-1][0]
    return [_document(ids, begin, number) for number, (ids, begin) in enumerate(made)]


def _document(token_ids: list[int], begin: int, number: int) -> ReferenceDocument:
    """Make a document that is trained from token ``begin`` on.

    Every seventh of these tokens is left untrained, like the output of a tool.
    """
    places = range(len(token_ids))
    return ReferenceDocument(
        token_ids=token_ids,
        trained=[place >= begin and (place - begin) % 7 != 3 for place in places],
        advantages=[(1.0, -0.5, 0.25)[(number + place) % 3] for place in places],
        behavior_logprobs=[0.0 for _ in places],
        temperature=TEMPERATURES[number % len(TEMPERATURES)],
    )


def sampled(model: Any, drawn: Sequence[ReferenceDocument]) -> list[ReferenceDocument]:
    """Add behavior logprobs: the model's own, shifted so that some ratios are clipped."""
    done = []
    with torch.no_grad():
        for document in drawn:
            logprobs, _ = score(model, document)
            off = torch.tensor([(0.4, -0.1, -0.4, 0.1)[t % 4] for t in range(len(logprobs))])
            behavior = (logprobs + off).to(torch.float32).tolist()
            done.append(attrs.evolve(document, behavior_logprobs=[0.0, *behavior]))
    return done


def score(model: Any, document: ReferenceDocument) -> tuple[Tensor, Tensor]:
    """Compute logprobs of all tokens but the first, and entropies, of softmax(logits / T)."""
    ids = torch.tensor(document.token_ids)
    logits = model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0, :-1]
    log_p = (logits.double() / document.temperature).log_softmax(-1)
    logprobs = log_p.gather(1, ids[1:].unsqueeze(1)).squeeze(1)
    return logprobs, -(log_p.exp() * log_p).sum(-1)


def objective(
    document: ReferenceDocument, logprobs: Tensor, entropies: Tensor, bonus: float
) -> Tensor:
    """Return the sum of ``-min(r A, clip(r) A) - bonus * entropy`` over trained tokens."""
    behavior = torch.tensor(document.behavior_logprobs[1:], dtype=torch.float64)
    advantages = torch.tensor(document.advantages[1:], dtype=torch.float64)
    ratio = (logprobs - behavior).exp()
    bounded = ratio.clamp(1 - CLIP, 1 + CLIP)
    per_token = -torch.minimum(ratio * advantages, bounded * advantages) - bonus * entropies
    return per_token[torch.tensor(document.trained[1:], dtype=torch.bool)].sum()


def train(
    model: Any,
    sequences: Sequence[ReferenceDocument],
    *,
    optimizer: Literal["adamw", "muon"] = "adamw",
) -> Training:
    """Train a few steps on the mean over all trained tokens.

    Gradients are clipped to half of the first step's norm.

    Args:
        model: an unmodified model of transformers.
        sequences: documents that ``sampled`` returned.
        optimizer: ``"adamw"``, or ``"muon"`` for a family of ``MUON_FAMILIES``.
    """
    named: dict[str, nn.Parameter] = dict(model.named_parameters())
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    muon = {n: p for n, p in named.items() if optimizer == "muon" and MATRIX.search(n)}
    others = [parameter for name, parameter in named.items() if name not in muon]
    adamw = torch.optim.AdamW(others, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)
    momenta = {name: torch.zeros_like(parameter) for name, parameter in muon.items()}
    records = Records(sum(len(one.token_ids) for one in sequences))
    trained = sum(sum(one.trained) for one in sequences)
    losses, norms, gradients, clipped, max_norm = [], [], {}, {}, 0.0
    for step, bonus in enumerate(ENTROPY_BONUS):
        loss, begin = 0.0, 0
        for document in sequences:
            end = begin + len(document.token_ids)
            mask = torch.tensor(document.trained)
            with recorded(model) as choices:
                logprobs, entropies = score(model, document)
            tokens = torch.arange(begin, end)[mask]
            mine = mask[1:]
            records.add(step, tokens, logprobs[mine], entropies[mine], choices, mask.roll(-1))
            mean = objective(document, logprobs, entropies, bonus) / trained
            mean.backward()  # type: ignore[no-untyped-call]
            loss, begin = loss + mean.item(), end
        found = {n: p.grad for n, p in named.items() if p.grad is not None}
        norm = sum(g.double().square().sum().item() for g in found.values()) ** 0.5
        if step == 0:
            gradients = {name: gradient.clone() for name, gradient in found.items()}
            max_norm = norm / 2
        for gradient in found.values():
            gradient.mul_(min(1.0, max_norm / (norm + 1e-6)))
        if step == 0:
            clipped = {name: gradient.clone() for name, gradient in found.items()}
        losses.append(loss)
        norms.append(norm)
        adamw.step()
        for name, momentum in momenta.items():
            if muon[name].grad is not None:
                _muon_step(name, muon[name], momentum, model.config)
        model.zero_grad()
    updates = {name: named[name].detach() - old for name, old in before.items()}
    return Training(
        losses=losses,
        norms=norms,
        logprobs=records.logprobs,
        entropies=records.entropies,
        gradients=gradients,
        clipped=clipped,
        choices=records.choices,
        updates=updates,
        max_norm=max_norm,
    )


@torch.no_grad()
def _muon_step(name: str, parameter: nn.Parameter, momentum: Tensor, config: Any) -> None:
    """Make a step of Muon.

    ``B <- m B + (1 - m) G``, ``W <- W - lr (decay W + 0.2 sqrt(max(r, c)) orth(next B))``.
    """
    assert parameter.grad is not None
    momentum.mul_(MOMENTUM).add_(parameter.grad, alpha=1 - MOMENTUM)
    ahead = MOMENTUM * momentum + (1 - MOMENTUM) * parameter.grad
    parameter.mul_(1 - LR * WEIGHT_DECAY)
    stacks = [(parameter, ahead)] if parameter.ndim == 2 else zip(parameter, ahead, strict=True)
    for matrix, gradient in stacks:
        for rows in _matrix_rows(name, len(matrix), config):
            update = gradient[rows]
            size = 0.2 * max(update.shape) ** 0.5
            matrix.index_add_(0, rows, orthogonal(update), alpha=-LR * size)


def _matrix_rows(name: str, count: int, config: Any) -> list[Tensor]:
    """Return the rows of each of the matrices that a parameter consists of."""
    rows = torch.arange(count)
    if name.endswith("experts.gate_up_proj"):
        return list(rows.chunk(2))
    if name.endswith("kv_a_proj_with_mqa.weight"):
        return [rows[: config.kv_lora_rank], rows[config.kv_lora_rank :]]
    if name.endswith("kv_b_proj.weight"):
        is_key = rows % (config.qk_nope_head_dim + config.v_head_dim) < config.qk_nope_head_dim
        return [rows[is_key], rows[~is_key]]
    return [rows]


def orthogonal(matrix: Tensor) -> Tensor:
    """Orthogonalize by five steps of Muon's quintic Newton-Schulz iteration, in float64."""
    a, b, c = NEWTON_SCHULZ
    x = matrix.double()
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T if len(x) <= x.shape[1] else x.T @ x
        polynomial = b * gram + c * gram @ gram
        x = a * x + (polynomial @ x if len(x) <= x.shape[1] else x @ polynomial)
    result: Tensor = x.to(matrix.dtype)
    return result


class Records:
    """Recorded logprobs, entropies and expert choices of each token."""

    def __init__(self, tokens: int) -> None:
        self.logprobs = torch.full((tokens,), torch.nan, dtype=torch.float64)
        self.entropies = self.logprobs.clone()
        self._seen = torch.zeros(tokens, dtype=torch.int64)
        self.choices: dict[str, Tensor] = {}

    def add(
        self,
        step: int,
        tokens: Tensor,
        logprobs: Tensor,
        entropies: Tensor,
        choices: dict[str, list[Tensor]],
        rows: Tensor,
    ) -> None:
        """Add a forward pass; its rows in the mask ``rows`` predict ``tokens``."""
        if step == 0:
            self.logprobs[tokens] = logprobs.detach().double()
            self.entropies[tokens] = entropies.detach().double()
            self._seen.index_add_(0, tokens, torch.ones_like(tokens))
            self.logprobs[self._seen > 1] = torch.inf
        for name, parts in choices.items():
            # The last forward pass counts: a model that needs its logits runs a second time.
            ids = torch.cat(parts)[-len(rows) :][rows].sort(-1).values
            shape = (len(ENTROPY_BONUS), len(self.logprobs), ids.shape[1])
            self.choices.setdefault(name, torch.full(shape, -1))[step, tokens] = ids.long()


@contextmanager
def recorded(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Record the experts that each layer's router chooses, while the model runs in the body."""
    choices: dict[str, list[Tensor]] = {}

    def record(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            indices = next(x for x in tensors if x.ndim == 2 and not x.is_floating_point())
            choices.setdefault(name, []).append(indices.detach().clone())

        return hook

    hooks = [
        module.register_forward_pre_hook(record(name), with_kwargs=True)
        for name, module in model.named_modules()
        if hasattr(module, "is_transposed") and hasattr(module, "has_gate")
    ]
    try:
        yield choices
    finally:
        for hook in hooks:
            hook.remove()
