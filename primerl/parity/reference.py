"""The parity reference: training in plain torch and transformers, in one process.

Each document is computed alone by an unmodified model, and every formula is written out. Nothing of
this package is imported here, so that no mistake can be on both sides.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import attrs
import torch
from torch import Tensor, nn

ENTROPY_BONUS = (0.05, 0.0, 0.05)
"""For each step; there are as many steps."""
CLIP = 0.2
LR = 3e-3
WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.999)
EPS = 1e-3
"""Of AdamW: large, so that a gradient of 0 up to rounding makes no large step."""
MOMENTUM = 0.95
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)

ALONE = (7, 5, 16, 31, 1, 9)
"""Lengths of documents that share nothing."""
PROMPT, ANSWERS = 17, (5, 3, 8)
"""Length of a prompt that some documents share, and of what follows in each."""
TURNS = (20, 8, 3)
"""The last documents: each is the one before, untrained, followed by so many more tokens."""
TEMPERATURES = (1.0, 0.7, 1.3)

MUON_FAMILIES = ("llama", "qwen3", "qwen3_moe", "glm4_moe", "deepseek_v3", "minimax_m2")
"""Families whose matrices are those that ``MATRIX`` names."""
MATRIX = re.compile(
    r"\.self_attn\.(q|k|v|o|q_a|q_b|kv_b)_proj\.weight$"
    r"|\.self_attn\.kv_a_proj_with_mqa\.weight$"
    r"|\.mlp\.(shared_experts\.)?(gate|up|down)_proj\.weight$"
    r"|\.mlp\.experts\.(gate_up|down)_proj$"
)


@attrs.frozen(kw_only=True, eq=False)
class Document:
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
    """Of each step."""
    norms: list[float]
    """Gradient norms of each step, before clipping."""
    logprobs: Tensor
    """Of the first step, ``[tokens]``; NaN where a token is not trained, or not on this rank.

    Infinite where it is trained more than once."""
    entropies: Tensor
    """Of the distributions that trained tokens were drawn from; NaN and infinite as logprobs."""
    gradients: dict[str, Tensor]
    """Of the first step, before clipping, unsharded."""
    clipped: dict[str, Tensor]
    """The same after clipping."""
    choices: dict[str, Tensor]
    """The experts that predicted each token, by layer: ``[steps, tokens, k]``, sorted; or -1."""
    updates: dict[str, Tensor]
    """Changes of parameters over all steps, unsharded."""
    max_norm: float
    """The norm to which gradients were clipped."""


def documents(vocabulary: int, *, special: Sequence[int] = ()) -> list[Document]:
    """Documents of random tokens: short and long, with a common prompt, and of several turns."""
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


def _document(token_ids: list[int], begin: int, number: int) -> Document:
    """Trained from a token on, except every seventh, as if a tool had written it."""
    places = range(len(token_ids))
    return Document(
        token_ids=token_ids,
        trained=[place >= begin and (place - begin) % 7 != 3 for place in places],
        advantages=[(1.0, -0.5, 0.25)[(number + place) % 3] for place in places],
        behavior_logprobs=[0.0 for _ in places],
        temperature=TEMPERATURES[number % len(TEMPERATURES)],
    )


def sampled(model: Any, drawn: Sequence[Document]) -> list[Document]:
    """The documents with behavior logprobs: the model's, changed so that some are clipped."""
    done = []
    with torch.no_grad():
        for document in drawn:
            logprobs, _ = score(model, document)
            off = torch.tensor([(0.4, -0.1, -0.4, 0.1)[t % 4] for t in range(len(logprobs))])
            behavior = (logprobs + off).to(torch.float32).tolist()
            done.append(attrs.evolve(document, behavior_logprobs=[0.0, *behavior]))
    return done


def score(model: Any, document: Document) -> tuple[Tensor, Tensor]:
    """The logprob of each token but the first, and the entropy of softmax(logits / temperature)."""
    ids = torch.tensor(document.token_ids)
    logits = model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0, :-1]
    log_p = (logits.double() / document.temperature).log_softmax(-1)
    logprobs = log_p.gather(1, ids[1:].unsqueeze(1)).squeeze(1)
    return logprobs, -(log_p.exp() * log_p).sum(-1)


def objective(document: Document, logprobs: Tensor, entropies: Tensor, bonus: float) -> Tensor:
    """The sum over trained tokens of ``-min(r A, clip(r) A) - bonus * entropy``."""
    behavior = torch.tensor(document.behavior_logprobs[1:], dtype=torch.float64)
    advantages = torch.tensor(document.advantages[1:], dtype=torch.float64)
    ratio = (logprobs - behavior).exp()
    bounded = ratio.clamp(1 - CLIP, 1 + CLIP)
    per_token = -torch.minimum(ratio * advantages, bounded * advantages) - bonus * entropies
    return per_token[torch.tensor(document.trained[1:], dtype=torch.bool)].sum()


def train(
    model: Any, sequences: Sequence[Document], *, optimizer: Literal["adamw", "muon"] = "adamw"
) -> Training:
    """A few steps on the mean over all trained tokens; gradients are clipped to half their norm.

    Args:
        model: an unmodified one of transformers.
        sequences: returned by ``sampled``.
        optimizer: ``"adamw"``, or ``"muon"`` for one of ``MUON_FAMILIES``.
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
    """``B <- m B + (1 - m) G``, ``W <- W - lr (decay W + 0.2 sqrt(max(r, c)) orth(next B))``."""
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
    """The rows of each matrix that a parameter holds."""
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
    """Five steps of the quintic Newton-Schulz iteration of Muon, in float64."""
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
    """Logprobs, entropies and expert choices of each token."""

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
        """Add a forward pass, of whose rows those in the mask ``rows`` predict ``tokens``."""
        if step == 0:
            self.logprobs[tokens] = logprobs.detach().double()
            self.entropies[tokens] = entropies.detach().double()
            self._seen.index_add_(0, tokens, torch.ones_like(tokens))
            self.logprobs[self._seen > 1] = torch.inf
        for name, parts in choices.items():
            # The last: a model that needs its logits runs a second time.
            ids = torch.cat(parts)[-len(rows) :][rows].sort(-1).values
            shape = (len(ENTROPY_BONUS), len(self.logprobs), ids.shape[1])
            self.choices.setdefault(name, torch.full(shape, -1))[step, tokens] = ids.long()


@contextmanager
def recorded(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """The experts that each layer's router chose, while the model runs forward."""
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
