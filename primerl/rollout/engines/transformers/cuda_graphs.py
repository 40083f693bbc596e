"""Decoding steps as CUDA graphs: the kernels of a forward pass, launched at once.

A graph repeats what was launched while it was captured, on the same memory. So the inputs of a step
are copied into one tensor that stays, and there is a graph for each size of this tensor.
"""

import copy
import logging
from collections.abc import Callable, Iterator, Sequence

import attrs
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from primerl.rollout.engines.transformers.attention_step import AttentionStep, DecodingInPages
from primerl.rollout.engines.transformers.kv_cache import PagedCache
from primerl.rollout.engines.transformers.model_attention import attending
from primerl.rollout.engines.transformers.scheduler import BatchedRequest
from primerl.rollout.engines.transformers.sparse_keys import PagedIndexer
from primerl.rollout.engines.transformers.transfers import to_device

log = logging.getLogger(__name__)

# The first columns of a step's inputs, before those of pages.
HEADER = 5

Launch = Callable[[], Tensor]
Capture = Callable[[Launch], Callable[[], object]]
"""Runs a function, and returns one that repeats its kernels on the same memory."""


class CaptureFailed(RuntimeError):
    """Raised when CUDA, or a library that the model uses, can't capture a step."""


@attrs.frozen(eq=False)
class DecodingGraph:
    """A captured step: ``replay`` computes ``logits`` from ``inputs``."""

    inputs: Int[Tensor, "n width"]
    logits: Float[Tensor, "n vocab"]
    replay: Callable[[], object]


class DecodingGraphs:
    """The graphs of one model for several numbers of requests and of their pages.

    Args:
        model: see ``NextTokenLogits``.
        cache: the pages.
        capture: how a step is captured.
    """

    def __init__(
        self, model: nn.Module, cache: PagedCache, *, capture: "Capture | None" = None
    ) -> None:
        self._step = DecodingStep(model)
        self._cache = cache
        self._capture = CudaCapture() if capture is None else capture
        self._graphs: dict[tuple[int, int], DecodingGraph] = {}
        self._addresses = list(_addresses(model))

    def obstacle(self) -> str | None:
        """Return why a step can't be captured, or None: no kernel may depend on values.

        The step is computed with tensors that have no values, which takes no time on the device.
        """
        if any(isinstance(module, PagedIndexer) for module in self._step.modules()):
            return "its sparse attention chooses keys for one request at a time"
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            named = [*self._step.named_parameters(), *self._step.named_buffers()]
            tensors: dict[str, Tensor] = {name: fake.from_tensor(value) for name, value in named}
            cache = copy.copy(self._cache)
            cache.layers = [fake.from_tensor(layer) for layer in self._cache.layers]
            width = HEADER + 2 + min(2, cache.window_pages)
            inputs = torch.zeros(2, width, dtype=torch.int64, device=cache.device)
            try:
                torch.func.functional_call(self._step, tensors, (inputs, cache, 2))
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                return f"it waits for values of tensors ({error})"
            except RuntimeError as error:
                return f"its forward pass can't be checked ({error})"
        return None

    def logits(self, requests: Sequence[BatchedRequest]) -> Float[Tensor, "n vocab"]:
        """Return the logits after the newest token of each request; the next call changes them.

        Raises:
            CaptureFailed: a step of this size could not be captured.
        """
        pages = _round_up(max(len(request.pages) for request in requests))
        rows = [_inputs_of(self._cache, request, pages) for request in requests]
        # Further rows repeat the last one, and store the same keys and values again.
        rows += rows[-1:] * (_round_up(len(rows)) - len(rows))
        inputs = to_device(rows, torch.int64, self._cache.device)
        size = (len(rows), pages)
        graph = self._graphs.get(size)
        if graph is None:
            graph = self._graphs[size] = self._captured(inputs, pages)
        else:
            graph.inputs.copy_(inputs)
            graph.replay()
        return graph.logits[: len(requests)]

    def forget_moved(self) -> None:
        """Drop the graphs if weights are at other addresses than when they were captured."""
        addresses = list(_addresses(self._step))
        if addresses != self._addresses:
            self._graphs.clear()
            self._addresses = addresses

    def _captured(self, inputs: Tensor, pages: int) -> DecodingGraph:
        results: list[Tensor] = []

        def launch() -> Tensor:
            results[:] = [self._step(inputs, self._cache, pages)]
            return results[0]

        try:
            replay = self._capture(launch)
        except RuntimeError as error:
            raise CaptureFailed(f"a decoding step could not be captured: {error}") from error
        graph = DecodingGraph(inputs=inputs, logits=results[0], replay=replay)
        graph.replay()
        return graph


class DecodingStep(nn.Module):
    """A forward pass over the newest token of each request, whose inputs are one tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Int[Tensor, "n width"], cache: PagedCache, pages: int) -> Tensor:
        """Return the logits.

        Args:
            inputs: in each row a token, its position, its slot, its slot in layers with windows,
                the position at which the window's pages begin, all pages, and those of the window.
            cache: the pages.
            pages: how many of the columns are all pages.
        """
        columns = [inputs[:, column].contiguous() for column in range(HEADER)]
        tokens, positions, slots, window_slots, window_starts = columns
        part = DecodingInPages(
            cache,
            table=inputs[:, HEADER : HEADER + pages].contiguous(),
            positions=positions,
            window_table=inputs[:, HEADER + pages :].contiguous(),
            window_starts=window_starts,
        )
        wanted = torch.arange(len(inputs), device=inputs.device)
        with attending(AttentionStep(cache, slots, window_slots, [part])):
            logits: Tensor = self.model(tokens.unsqueeze(0), positions.unsqueeze(0), wanted)
            return logits


class CudaCapture:
    """Captures CUDA graphs, which share their memory, since only one of them runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, launch: Launch) -> Callable[[], object]:
        """Launch once for libraries that initialize themselves, and once to capture."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            launch()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            launch()
        return graph.replay


def _inputs_of(cache: PagedCache, request: BatchedRequest, pages: int) -> list[int]:
    position = request.computed
    window_start, window_table = DecodingInPages.window_of(cache, request, pages)
    slots = (request.slot(position), request.window_slot(position))
    header = [request.tokens[position], position, *slots, window_start]
    return [*header, *request.table(pages), *window_table]


def _round_up(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _addresses(model: nn.Module) -> Iterator[int]:
    return (tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers()))
