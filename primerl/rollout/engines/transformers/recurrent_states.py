"""The states that mixers carry from token to token, for many requests in one forward pass.

Mixers are linear attention, state-space layers, recurrent units and short convolutions. They are
the model's own, called with a cache of transformers for the tokens of one request, or for the
newest tokens of all requests that decode. Between forward passes, each request's states are in one
row of a table.
"""

import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import attrs
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from primerl.attention.admission import named_mixers
from primerl.attention.mixers import combined_module
from primerl.rollout.engines.transformers.attention_scores import LEAST_ROWS
from primerl.rollout.engines.transformers.kv_cache import allocate_zeros
from primerl.rollout.engines.transformers.scheduler import Chunk
from primerl.rollout.engines.transformers.transfers import to_device

States = list[Tensor]
"""The states of one mixer for n requests, tensors ``[n, ...]``; empty before the first token."""
MixRows = Callable[[Tensor, Tensor, States], tuple[Tensor, States]]
"""A function ``(hidden[n, t, h], places[n, t], states) -> (mixed[n, t, h], states)``.

``places`` are the indices of the tokens in the forward pass.
"""


class StateTable:
    """The states of all mixers, one row for each request or snapshot.

    Args:
        examples: for each mixer, its states for one request, whose shapes and dtypes are taken.
        rows: the number of rows.

    Raises:
        MemoryError: they don't fit into the memory.
    """

    def __init__(self, examples: Sequence[States], *, rows: int) -> None:
        self.rows = rows
        self.mixers = [
            [allocate_zeros((rows, *one.shape[1:]), one.dtype, one.device) for one in states]
            for states in examples
        ]
        """For each mixer, its states ``[rows, ...]``."""

    def read(self, mixer: int, rows: Int[Tensor, " n"]) -> States:
        """Copy the states of some rows."""
        return [states.index_select(0, rows) for states in self.mixers[mixer]]

    def write(self, mixer: int, rows: Int[Tensor, " n"], states: States) -> None:
        """Store the states of some rows."""
        for stored, new in zip(self.mixers[mixer], states, strict=True):
            stored.index_copy_(0, rows, new.to(stored.dtype))

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy rows ``(source, target)``, one after another."""
        for source, target in copies:
            for states in self.mixers:
                for one in states:
                    one[target] = one[source]


def state_bytes(examples: Sequence[States]) -> int:
    """Return how many bytes one row of a ``StateTable`` takes."""
    return sum(one.nbytes for states in examples for one in states)


@attrs.define(eq=False)
class StateStep:
    """A forward pass, as mixers need to know it.

    Args:
        table: the states.
        chunks: the tokens of the forward pass, in order. More tokens may follow, of nobody.
    """

    table: StateTable
    chunks: Sequence[Chunk]
    _calls: "list[tuple[Tensor, Tensor, int, bool]] | None" = attrs.field(init=False, default=None)

    def mix(
        self, mixer: int, hidden: Float[Tensor, "1 t h"], run: MixRows
    ) -> Float[Tensor, "1 t h"]:
        """Run a mixer on each request's tokens, from its states on, and store its new states."""
        if self._calls is None:  # they are the same for all mixers
            self._calls = self._divide(hidden.device)
        mixed = torch.zeros_like(hidden)
        for places, rows, count, resumes in self._calls:
            states = self.table.read(mixer, rows) if resumes else []
            outputs, states = run(hidden[0, places], places, states)
            mixed[0].index_copy_(0, places[:count].flatten(), outputs[:count].flatten(0, 1))
            self.table.write(mixer, rows[:count], [one[:count] for one in states])
        return mixed

    def _divide(self, device: torch.device) -> list[tuple[Tensor, Tensor, int, bool]]:
        """Return for each call the tokens' places ``[n, t]``, rows, requests, and if it resumes.

        Single tokens after others share a call. Its last row is repeated where there are few, so
        that products of matrices round alike.
        """
        calls, singles, start = [], [], 0
        for chunk in self.chunks:
            row, resumes = chunk.request.state, chunk.request.computed > 0
            assert row is not None
            if resumes and chunk.count == 1:
                singles.append((start, row))
            else:
                places = torch.arange(start, start + chunk.count, device=device).unsqueeze(0)
                calls.append((places, to_device([row], torch.int64, device), 1, resumes))
            start += chunk.count
        if singles:
            padded = singles + singles[-1:] * (LEAST_ROWS - len(singles))
            places, rows = to_device(padded, torch.int64, device).unbind(1)
            calls.append((places.unsqueeze(1), rows, len(singles), True))
        return calls


@runtime_checkable
class MixingPass(Protocol):
    """A forward pass that runs mixers: an ``AttentionStep``, or a ``ShapeProbe``."""

    def mix(self, mixer: int, hidden: Tensor, run: MixRows) -> Tensor:
        """Run the mixer of this number on the tokens ``hidden``, ``[1, t, h]``."""
        ...


class StatefulMixer(nn.Module):
    """A base of a model's mixer, which runs it on the tokens of each request.

    ``switch_to_states`` makes a class of it and of the model's own.
    """

    number: int
    """Which of the model's mixers this is."""
    find_pass: Callable[[], MixingPass]
    """Returns the current forward pass."""
    parts: ClassVar[dict[str, Any]] = {}
    """Bases of submodules, by their names."""

    def forward(self, hidden: Float[Tensor, "1 t h"] | None = None, **options: Any) -> Any:
        """Run the model's mixer on the tokens of each request."""
        mix: Any = super().forward
        # The name of the first argument differs by family.
        hidden = options.pop(next(iter(options))) if hidden is None else hidden
        assert hidden is not None
        options |= dict.fromkeys(_OF_ALL_TOKENS & options.keys())
        positions = options.get("position_ids")
        kinds: set[bool] = set()

        def run(rows: Tensor, places: Tensor, states: States) -> tuple[Tensor, States]:
            if positions is not None:
                options["position_ids"] = positions[0, places]
            mixed, states = self.mix_from(states, mix, rows, options)
            kinds.add(isinstance(mixed, tuple))
            return mixed[0] if isinstance(mixed, tuple) else mixed, states

        found = self.find_pass().mix(self.number, hidden, run)
        return (found, None) if True in kinds else found

    def mix_from(
        self, states: States, mix: Callable[..., Any], rows: Tensor, options: dict[str, Any]
    ) -> tuple[Any, States]:
        """Return ``mix(rows)``, computed from some states on, and the next states."""
        layer_index: Any = self.layer_idx
        caches = importlib.import_module("transformers.cache_utils")
        layer = caches.LinearAttentionLayer()
        cache = caches.Cache(layers=[layer] * (layer_index + 1))
        if states:
            cache.update_conv_state(states[0], layer_index)
            for state in states[1:]:  # a short convolution has none
                cache.update_recurrent_state(state, layer_index)
        mixed = mix(rows, **_with_cache(options, cache))
        both = (layer.conv_states[0], layer.recurrent_states[0])
        return mixed, [state for state in both if state is not None]


class TokenwiseMixer(StatefulMixer):
    """A base of Mamba 1, whose code has no initial state for more than one token."""

    def mix_from(
        self, states: States, mix: Callable[..., Any], rows: Tensor, options: dict[str, Any]
    ) -> tuple[Any, States]:
        """Return ``mix(rows)``, computed from some states on, and the next states."""
        if not states:
            return super().mix_from(states, mix, rows, options)
        mixed = []
        for token in torch.split(rows, 1, dim=1):
            one, states = super().mix_from(states, mix, token, options)
            mixed.append(one)
        return torch.cat(mixed, dim=1), states


class LightningMixer(StatefulMixer):
    """A base of MiniMax's linear attention, which has its own kind of cache."""

    def mix_from(
        self, states: States, mix: Callable[..., Any], rows: Tensor, options: dict[str, Any]
    ) -> tuple[Any, States]:
        """Return ``mix(rows)``, computed from some states on, and the next states."""
        layer_index: Any = self.layer_idx
        family = importlib.import_module("transformers.models.minimax.modeling_minimax")
        cache = family.MiniMaxCache()
        if states:
            cache.set_linear_cache(layer_index, states[0])
        mixed = mix(rows, **_with_cache(options, cache))
        return mixed, [cache.get_linear_cache(layer_index)]


class LimitedProjection(nn.Module):
    """A base of Mamba 2's projection, which limits time steps.

    The model's own code limits them for several tokens, but not for a single one.
    """

    mixer: Any
    """The mixer, which has the limits."""

    def forward(self, hidden: Float[Tensor, "n t h"]) -> Float[Tensor, "n t width"]:
        """Return the projection; its last columns are the time steps, before their bias."""
        projected: Tensor = super().forward(hidden)
        bias: Tensor = self.mixer.dt_bias
        least, most = (inverse_softplus(limit) for limit in self.mixer.time_step_limit)
        sizes = [projected.shape[2] - len(bias), len(bias)]
        other, steps = torch.split(projected, sizes, dim=2)
        return torch.cat([other, steps.clamp(min=least - bias, max=most - bias)], dim=2)


class LimitedMixer(StatefulMixer):
    """A base of Mamba 2, with limited time steps."""

    parts: ClassVar[dict[str, Any]] = {"in_proj": LimitedProjection}


class ResumedConvolution(nn.Conv1d):
    """A base of a causal convolution, which continues after earlier tokens."""

    state: Tensor | None = None
    """The earlier tokens that it reaches, ``[n, channels, width - 1]``; None if there are none."""

    def forward(self, rows: Float[Tensor, "n c t"]) -> Float[Tensor, "n c t"]:
        """Return the convolution at each token; ``state`` are the last tokens next."""
        width = self.kernel_size[0] - 1
        earlier = rows.new_zeros(*rows.shape[:2], width) if self.state is None else self.state
        extended = torch.cat([earlier, rows], dim=2)
        self.state = extended[:, :, rows.shape[2] :]
        return super().forward(extended)[:, :, width : extended.shape[2]]


class ResumedUnit(nn.Module):
    """A base of RecurrentGemma's recurrent unit, which continues after earlier tokens."""

    state: Tensor | None = None
    """The unit's state after the earlier tokens, ``[n, channels]``; None if there are none."""
    recurrent_states: Tensor | None

    def forward(self, rows: Float[Tensor, "n t c"], position_ids: Int[Tensor, "n t"]) -> Tensor:
        """Return the unit's states after each token; ``state`` is the last one next."""
        run: Any = super().forward
        self.recurrent_states = self.state  # the block has just cleared it
        states: Tensor = run(rows, position_ids)
        self.state, self.recurrent_states = self.recurrent_states, None
        return states


class GatedRecurrentMixer(StatefulMixer):
    """A base of RecurrentGemma's block, whose convolution and recurrent unit have the states."""

    conv_1d: ResumedConvolution
    rg_lru: ResumedUnit
    parts: ClassVar[dict[str, Any]] = {"conv_1d": ResumedConvolution, "rg_lru": ResumedUnit}

    def mix_from(
        self, states: States, mix: Callable[..., Any], rows: Tensor, options: dict[str, Any]
    ) -> tuple[Any, States]:
        """Return ``mix(rows)``, computed from some states on, and the next states."""
        self.conv_1d.state, self.rg_lru.state = states or (None, None)
        mixed = mix(rows, **options | {"use_cache": False})
        assert self.conv_1d.state is not None
        assert self.rg_lru.state is not None
        return mixed, [self.conv_1d.state, self.rg_lru.state]


# The names of the mixers' argument for the cache, by family and version of transformers.
_CACHES = frozenset({"cache_params", "past_key_values", "cache"})
# Arguments for all tokens of a forward pass. They pad tokens, or say which belong together.
_OF_ALL_TOKENS = frozenset(
    {"attention_mask", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "position_embeddings"}
)
_BASES: dict[str, type[StatefulMixer]] = {
    "BambaMixer": LimitedMixer,
    "FalconH1Mixer": StatefulMixer,
    "GraniteMoeHybridMambaLayer": LimitedMixer,
    "JambaMambaMixer": TokenwiseMixer,
    "KimiLinearDeltaAttention": StatefulMixer,
    "Lfm2MoeShortConv": StatefulMixer,
    "Lfm2ShortConv": StatefulMixer,
    "MiniMaxLightningAttention": LightningMixer,
    "NemotronHMamba2Mixer": LimitedMixer,
    "OlmoHybridGatedDeltaNet": StatefulMixer,
    "Qwen3NextGatedDeltaNet": StatefulMixer,
    "Qwen3_5GatedDeltaNet": StatefulMixer,
    "Qwen3_5MoeGatedDeltaNet": StatefulMixer,
    "RecurrentGemmaRecurrentBlock": GatedRecurrentMixer,
}


def unserved_mixer(mixer: nn.Module) -> str | None:
    """Return why the states of a mixer can't be kept, or None."""
    name = type(mixer).__name__
    if name not in _BASES:
        return f"has {name} layers, which this engine does not support"
    limits = getattr(mixer, "time_step_limit", None)
    if limits is not None and tuple(limits) != (0, math.inf) and _BASES[name] is not LimitedMixer:
        return "limits time steps, which transformers does not do for single tokens"
    return None


def switch_to_states(model: nn.Module, find_pass: Callable[[], MixingPass]) -> None:
    """Replace a model's mixers by mixers that keep a state for each request.

    Args:
        model: the model, which is changed.
        find_pass: returns the current forward pass.
    """
    for number, (name, mixer) in enumerate(named_mixers(model)):
        base = _BASES[type(mixer).__name__]
        # The trainer may have made it a DocumentMixer, with the documents of its last pack.
        fields = {"number": number, "find_pass": find_pass, "handed_over": None}
        stateful = combined_module(base, mixer, **fields)
        for part, kind in base.parts.items():
            replaced = combined_module(kind, mixer.get_submodule(part), mixer=stateful)
            stateful.set_submodule(part, replaced)
        model.set_submodule(name, stateful)


def round_decays(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert the buffers of MiniMax's linear attention, whose code needs the weights' dtype."""
    for _, mixer in named_mixers(model):
        if isinstance(mixer, LightningMixer):
            for buffer in mixer.buffers(recurse=False):
                buffer.data = buffer.to(dtype)


def inverse_softplus(value: float) -> float:
    """Return the x of which ``log(1 + exp(x))`` is ``value``."""
    if value <= 0:
        return -math.inf
    return value + math.log(-math.expm1(-value))


def _with_cache(options: dict[str, Any], cache: Any) -> dict[str, Any]:
    return options | dict.fromkeys(_CACHES & options.keys(), cache)
