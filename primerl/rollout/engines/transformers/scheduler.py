"""Plans forward passes: chooses the requests, and the pages for their keys and values."""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future

import attrs

from primerl.rollout.engines.transformers.pages import (
    PAGE_TOKENS,
    Page,
    PageTable,
    Prefix,
    pages_of_span,
)
from primerl.rollout.engines.transformers.routing import RequestRoutes
from primerl.rollout.engines.transformers.snapshots import (
    StateRows,
    StateSnapshot,
    next_cut,
    snapshot_point,
)
from primerl.types import SamplingParams


@attrs.define(eq=False)
class BatchedRequest:
    """A request, its tokens so far, and its pages.

    Args:
        tokens: prompt and completion.
        prompt_length: how many of the tokens are the prompt.
        randomness: the key of the request's random numbers.
        done: what the caller waits for; its result is the finish reason.
    """

    tokens: list[int]
    prompt_length: int
    params: SamplingParams
    randomness: bytes
    done: "Future[str]" = attrs.Factory(Future)
    logprobs: list[float] = attrs.Factory(list)
    versions: list[int] = attrs.Factory(list)
    pages: list[Page] = attrs.Factory(list)
    places: list[Page] = attrs.Factory(list)
    """For each page, the page under which pages after it are listed."""
    window_start: int = 0
    """The number of the first page that is still seen in layers with windows."""
    epoch: int = 0
    """The epoch of the page table when the pages were assigned."""
    computed: int = 0
    """How many tokens have keys and values."""
    state: int | None = None
    """If the model has recurrent states: the row of those after the tokens computed so far."""
    routes: RequestRoutes | None = None

    @property
    def remaining(self) -> int:
        """How many tokens have no keys and values yet."""
        return len(self.tokens) - self.computed

    def slot(self, position: int) -> int:
        """Return where in the cache the key and value of a token are."""
        return self.pages[position // PAGE_TOKENS].index * PAGE_TOKENS + position % PAGE_TOKENS

    def window_slot(self, position: int) -> int:
        """Return where the key and value of a token are in layers with windows."""
        page = self.pages[position // PAGE_TOKENS]
        return page.window_index * PAGE_TOKENS + position % PAGE_TOKENS

    def table(self, pages: int) -> list[int]:
        """Return the indices of the request's pages, filled up with the empty page 0."""
        return [page.index for page in self.pages] + [0] * (pages - len(self.pages))

    def window_table(self, first: int, pages: int) -> list[int]:
        """Return the indices, in layers with windows, of so many pages from number ``first`` on.

        Page 0, which is empty, takes the place of pages that are not seen any more, or not there.
        """
        unseen = min(pages, max(0, self.window_start - first))
        seen = [page.window_index for page in self.pages[first + unseen : first + pages]]
        return [0] * unseen + seen + [0] * (pages - unseen - len(seen))


@attrs.frozen(eq=False)
class Chunk:
    """The next ``count`` tokens of a request, to be processed in one forward pass."""

    request: BatchedRequest
    count: int

    @property
    def is_last(self) -> bool:
        """Whether the next token is sampled after this chunk."""
        return self.count == self.request.remaining


@attrs.frozen(eq=False)
class PageCopy:
    """The first ``tokens`` of a page, to be copied before the forward pass."""

    source: Page
    target: Page
    tokens: int


@attrs.frozen(eq=False)
class NextStep:
    """The tokens that the next forward pass processes.

    Args:
        decoding: requests with one token each, whose earlier tokens are all in the cache.
        chunks: parts of prompts.
        reallocated: pages to be erased first, by index.
        reallocated_windows: the same in layers with windows.
        copies: pages to be copied next.
        state_copies: rows of recurrent states to be copied, in order: ``(source, target)``.
    """

    decoding: list[BatchedRequest]
    chunks: list[Chunk]
    reallocated: list[int]
    reallocated_windows: list[int]
    copies: list[PageCopy]
    state_copies: list[tuple[int, int]]

    @property
    def all_chunks(self) -> list[Chunk]:
        """Everything that is processed, in order."""
        return [Chunk(request, 1) for request in self.decoding] + self.chunks


class Scheduler:
    """Queues requests, gives them pages, and plans each step.

    Earlier requests go first: if the cache is full, the latest one gives up its pages and is
    computed again later.

    Args:
        pages: the pages of the cache.
        max_concurrent: how many requests run at a time.
        max_step_tokens: how many tokens a step processes.
        states: the rows of recurrent states, if the model has such states.
    """

    def __init__(
        self,
        pages: PageTable,
        *,
        max_concurrent: int,
        max_step_tokens: int,
        states: StateRows | None = None,
    ) -> None:
        self.pages = pages
        self._states = states
        self.waiting: deque[BatchedRequest] = deque()
        self.running: list[BatchedRequest] = []
        self.reused_tokens = 0
        """How many tokens were found in the cache when requests were started."""
        self.queried_tokens = 0
        """How many tokens requests had when they were started: also again, after a preemption."""
        self.preemptions = 0
        self._max_concurrent = max_concurrent
        self._max_step_tokens = max_step_tokens
        self._step_pages = pages_of_span(max_step_tokens)

    def plan(self) -> NextStep:
        """Plan the next step; pages are assigned and marked as filled."""
        decoding = self._grow([request for request in self.running if request.remaining == 1])
        budget = self._max_step_tokens - len(decoding)
        chunks: list[Chunk] = []
        for request in list(self.running):
            if budget > 0 and request.pages and request.remaining > 1:
                budget -= self._extend(request, budget, chunks)
        decoding = [request for request in decoding if request.pages]
        copies: list[PageCopy] = []
        self._admit(budget, decoding, chunks, copies)
        reallocated, reallocated_windows = (pool.take_reallocated() for pool in self.pages.pools)
        state_copies: list[tuple[int, int]] = []
        if self._states is not None:
            state_copies, self._states.copies = self._states.copies, []
        return NextStep(decoding, chunks, reallocated, reallocated_windows, copies, state_copies)

    def release_sources(self, plan: NextStep) -> None:
        """Release the pages that ``plan`` copies from, after they have been copied."""
        sources = [copy.source for copy in plan.copies]
        self.pages.release_windows(sources, sources)
        self.pages.release(sources)

    def advance(self, plan: NextStep) -> None:
        """Note that the forward pass of ``plan`` has computed its tokens."""
        for chunk in plan.all_chunks:
            request = chunk.request
            first = request.computed // PAGE_TOKENS
            request.computed += chunk.count
            for number in range(first, -(-request.computed // PAGE_TOKENS)):
                page = request.pages[number]
                page.computed = min(PAGE_TOKENS, request.computed - number * PAGE_TOKENS)
                whole = page.computed == PAGE_TOKENS
                if whole and (number + 1) * PAGE_TOKENS > request.prompt_length:
                    self._list(request, number)
            if request.computed == snapshot_point(request.prompt_length):
                self._keep_state(request, copy=True)
            self._give_up_unseen(request)

    def finish(self, request: BatchedRequest, *, keep: bool = True) -> None:
        """Remove a request; keep its pages for others, if ``keep`` is set.

        A request that waits is left where it is: it is skipped when its turn comes.
        """
        if request in self.running:
            self.running.remove(request)
        if keep and request.computed:
            last = (request.computed - 1) // PAGE_TOKENS
            self._list(request, last)
            self._keep_state(request, copy=False)
        self._release(request, keep=keep)

    def forget_prefixes(self) -> None:
        """Share no page that exists by now; running requests keep theirs."""
        self.pages.forget()

    def recompute_all(self) -> None:
        """Forget all keys and values; the running requests are computed again, first of all."""
        self.waiting.extendleft(reversed(self.running))
        for request in self.waiting:
            if request.routes is not None and not request.logprobs:
                request.routes = RequestRoutes()  # nothing was sampled from those so far
            self._release(request, keep=False)
        self.running.clear()
        self.pages.forget()

    def _grow(self, decoding: list[BatchedRequest]) -> list[BatchedRequest]:
        """Give each request room for its next token; the latest ones give up theirs if needed."""
        grown = [
            # One without pages gave them up for an earlier one.
            request
            for request in decoding
            if request.pages and self._make_room(request, 1)
        ]
        return [request for request in grown if request.pages]

    def _make_room(self, request: BatchedRequest, count: int) -> bool:
        """Give a request's next tokens room; the latest requests give up theirs if needed.

        The pages are marked as filled. Return False if the request itself gave up its pages.
        """
        end = request.computed + count
        first, last = request.computed // PAGE_TOKENS, -(-end // PAGE_TOKENS)
        in_windows = 0
        if self.pages.window is not None:
            there = sum(page.window_index > 0 for page in request.pages[first:last])
            in_windows = last - first - there
        while not self.pages.fits(last - len(request.pages), in_windows):
            if self._preempt() is request:
                return False
        for number in range(first, last):
            if number == len(request.pages):
                self._append(request, self.pages.allocate())
            page = request.pages[number]
            self.pages.allocate_window(page)
            page.filled = min(PAGE_TOKENS, end - number * PAGE_TOKENS)
        return True

    def _preempt(self) -> BatchedRequest:
        self.preemptions += 1
        request = self.running.pop()
        self._release(request, keep=True)
        self.waiting.appendleft(request)
        return request

    def _extend(self, request: BatchedRequest, budget: int, chunks: list[Chunk]) -> int:
        count = min(budget, request.remaining)
        if self._states is not None:
            cut = next_cut(request.computed, len(request.tokens), request.prompt_length)
            count = cut - request.computed
            if count > budget:
                return 0  # segments are computed whole
        if not self._make_room(request, count):
            return 0
        chunks.append(Chunk(request, count))
        return count

    def _admit(
        self,
        budget: int,
        decoding: list[BatchedRequest],
        chunks: list[Chunk],
        copies: list[PageCopy],
    ) -> None:
        """Start waiting requests, in order, while there is room.

        A request that begins like one whose tokens are just being computed waits for them.
        """
        passed: list[BatchedRequest] = []
        while self.waiting and budget > 0 and len(self.running) < self._max_concurrent:
            if len(passed) == self._max_concurrent:
                break
            request = self.waiting.popleft()
            if request.done.done():
                continue
            prefix, snapshot = self._find(request)
            if prefix.pending:
                passed.append(request)
                continue
            assigned = self._assign(request, prefix, snapshot, copies)
            if not assigned and prefix.partial is not None:  # its room may be what is missing
                pages = prefix.pages if self._states is None else []
                prefix = self.pages.shorten(Prefix(pages))
                assigned = self._assign(request, prefix, None, copies)
            if not assigned:
                passed.append(request)
                break
            self.running.append(request)
            begun = all(page.computed == PAGE_TOKENS for page in prefix.pages)
            if request.remaining == 1 and begun:
                self._make_room(request, 1)
                decoding.append(request)
                budget -= 1
            else:
                budget -= self._extend(request, budget, chunks)
        self.waiting.extendleft(reversed(passed))

    def _find(self, request: BatchedRequest) -> tuple[Prefix, StateSnapshot | None]:
        """Find from where a request can go on: what its next token sees is in the cache."""
        prefix = self.pages.shorten(self.pages.find(request.tokens))
        if self._states is None:
            return prefix, None
        prefix, snapshot = self._states.find(prefix, request.prompt_length)
        while (shorter := self.pages.shorten(prefix)) is not prefix:
            prefix, snapshot = self._states.find(shorter, request.prompt_length)
        return prefix, snapshot

    def _assign(
        self,
        request: BatchedRequest,
        prefix: Prefix,
        snapshot: StateSnapshot | None,
        copies: list[PageCopy],
    ) -> bool:
        """Give a request pages for all its tokens; return whether there are enough."""
        computed = len(prefix.pages) * PAGE_TOKENS + prefix.tokens
        window_start = self.pages.first_seen(computed)
        found = [*prefix.pages, *([] if prefix.partial is None else [prefix.partial])]
        for page in found:
            self.pages.share(page)
        for page in found[window_start:]:
            self.pages.share_window(page)
        needed = -(-len(request.tokens) // PAGE_TOKENS) - len(prefix.pages)
        spare = 1 if self.running else 0  # for the next tokens of those that run
        # Those of layers with windows are needed for the first chunk only.
        if not self.pages.fits(needed + spare, min(needed, self._step_pages) + spare):
            self.pages.release_windows(found[window_start:], found[window_start:])
            self.pages.release(found)
            return False
        request.epoch, request.window_start = self.pages.epoch, window_start
        for page in prefix.pages:
            self._append(request, page)
        for _ in range(needed):
            self._append(request, self.pages.allocate())
            self._list(request, len(request.pages) - 1)
        request.computed = computed
        if prefix.partial is not None:
            target = request.pages[len(prefix.pages)]
            self.pages.allocate_window(target)
            copies.append(PageCopy(prefix.partial, target, prefix.tokens))
            target.filled = target.computed = prefix.tokens
        if self._states is not None:
            rows = self._states
            request.state = rows.take() if snapshot is None else rows.resume(snapshot)
        self.queried_tokens += len(request.tokens)
        self.reused_tokens += request.computed
        return True

    def _keep_state(self, request: BatchedRequest, *, copy: bool) -> None:
        """Make a request's state a snapshot: a copy, or the state itself, which it then lacks."""
        if self._states is None or request.state is None or not self._can_share(request):
            return
        last = (request.computed - 1) // PAGE_TOKENS
        page, tokens = request.places[last], request.computed - last * PAGE_TOKENS
        if copy:
            self._states.keep_copy(request.state, page, tokens)
        else:
            self._states.keep(request.state, page, tokens)
            request.state = None

    def _can_share(self, request: BatchedRequest) -> bool:
        """Whether a request's keys, values and state are of one version only, the current one."""
        return request.epoch == self.pages.epoch

    def _append(self, request: BatchedRequest, page: Page) -> None:
        request.pages.append(page)
        request.places.append(page)

    def _list(self, request: BatchedRequest, number: int) -> None:
        """Make one of a request's pages findable by the tokens that it has by now.

        After an update that kept the cache, its keys and values belong to no single version.
        """
        if not self._can_share(request):
            return
        parent = request.places[number - 1] if number else None
        start = number * PAGE_TOKENS
        known = len(request.tokens) if request.computed <= start else None
        end = min(start + PAGE_TOKENS, known or request.computed)
        tokens: Sequence[int] = request.tokens[start:end]
        request.places[number] = self.pages.list_under(parent, request.pages[number], tokens)

    def _give_up_unseen(self, request: BatchedRequest) -> None:
        """Give up pages, in layers with windows, that no coming token of a request sees."""
        if self.pages.window is None:
            return
        last = self.pages.first_seen(request.computed)
        for number in range(request.window_start, last):
            # Groups share a prompt up to its end; few requests go on from elsewhere.
            end = request.prompt_length - 1
            likely = self.pages.first_seen(end) <= number <= end // PAGE_TOKENS
            self.pages.release_windows(
                [request.pages[number]], [request.places[number]], likely=likely
            )
        request.window_start = max(request.window_start, last)

    def _release(self, request: BatchedRequest, *, keep: bool) -> None:
        first = request.window_start
        self.pages.release_windows(request.pages[first:], request.places[first:], keep=keep)
        self.pages.release(request.pages, keep=keep)
        request.pages, request.places, request.computed = [], [], 0
        request.window_start = 0
        if request.state is not None and self._states is not None:
            self._states.give_back(request.state)
            request.state = None
