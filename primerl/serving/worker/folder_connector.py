"""vLLM's KV connector that shares keys and values of prompts between servers, by a folder.

Written against vLLM 0.32. ``serving.kv_folder`` makes the argument of ``serve_vllm`` that loads it.

Keys and values are stored in a folder of the weights that computed them, and are loaded only by a
server with these weights, for a request that was made for them: its ``cache_salt`` is their label.
So after an update nothing old is loaded, whichever server is updated first.
"""

import json
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from primerl.rollout.errors import summary
from primerl.serving.worker.chunk_files import (
    ChunkFiles,
    WeightsLabel,
    copy_blocks,
    write_blocks,
)

# The scheduler learns of a failed load after it has scheduled up to one more step. In these steps,
# requests may compute from blocks that were not loaded, so nothing is stored.
_DAMAGED_STEPS = 2

log = logging.getLogger(__name__)


@attrs.define
class ChunkCopy:
    """A chunk to be copied between its file and blocks of the server's cache.

    ``place`` is the folder of the weights, and ``skipped`` the number of the chunk's first blocks
    that the server has already.
    """

    place: str
    name: str
    blocks: list[int]
    skipped: int = 0


@attrs.define(eq=False)
class StepCopies(KVConnectorMetadata):
    """The copies of one step of the engine, as the scheduler tells the workers."""

    loads: list[ChunkCopy] = attrs.field(factory=list)
    saves: list[ChunkCopy] = attrs.field(factory=list)


@attrs.define(eq=False)
class _SharedPrompt:
    """A request's prompt, as the scheduler knows it."""

    salt: str
    tokens: int
    place: str = ""
    """The folder of the weights that the server had when it looked for stored tokens."""
    names: list[str] = attrs.field(factory=list)
    """The names of its chunks; none if nothing of it may be shared."""
    missing: list[int] = attrs.field(factory=list)
    """The chunks that are not stored, and are not being stored."""
    held: int = 0
    """The first tokens that the server had when it looked for stored ones."""
    loaded: int = 0
    """The first tokens that the server has once it has loaded stored ones; 0 if it loads none."""


class FolderConnector(KVConnectorBase_V1):
    """Connector of a scheduler, which chooses what is copied, or of a worker, which copies it."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any
    ) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        config = vllm_config.kv_transfer_config
        assert config is not None
        if len(kv_cache_config.kv_cache_groups) != 1:
            raise ValueError(
                "FolderConnector can't store the caches of a model whose layers have caches of "
                f"{len(kv_cache_config.kv_cache_groups)} kinds, such as windows; serve without it"
            )
        _refuse_split_caches(vllm_config.parallel_config)
        self._block = vllm_config.cache_config.block_size
        chunk = int(config.get_from_extra_config("chunk_tokens", 1))
        worker = role == KVConnectorRole.WORKER
        self._files = ChunkFiles(
            Path(config.get_from_extra_config("folder", "")),
            tokens=-(-chunk // self._block) * self._block,
            identity=_identity(vllm_config),
            ranks=vllm_config.parallel_config.tensor_parallel_size,
            rank=get_tensor_model_parallel_rank() if worker else 0,
        )
        self._label = WeightsLabel(str(config.engine_id))
        self._loads = config.is_kv_consumer
        self._saves = config.is_kv_producer
        if worker:
            self._label.set(None, "")  # of a server with the same engine_id that was killed
        self._prompts: dict[str, _SharedPrompt] = {}
        self._caches: dict[str, Tensor] = {}
        self._damaged: set[int] = set()
        self._damaged_steps = 0

    # ---- in the scheduler ----

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens after the computed ones can be loaded, and that loads are sync."""
        prompt = self._prompt_of(request)
        prompt.held, prompt.loaded = num_computed_tokens, 0
        label, place = self._label.get()
        if prompt.salt != label:
            prompt.names = []
        prompt.place = place
        prompt.missing = self._files.missing(place, prompt.names)
        if not self._loads:
            return 0, False
        chunks = prompt.missing[0] if prompt.missing else len(prompt.names)
        # The server computes the last token itself, since it samples from its logits.
        blocks = min(chunks * self._files.tokens, prompt.tokens - 1) // self._block
        return max(0, blocks * self._block - num_computed_tokens), False

    def _prompt_of(self, request: Any) -> _SharedPrompt:
        known = self._prompts.get(request.request_id)
        # A request with sampled tokens was interrupted, perhaps by an update, and is not shared.
        if known is not None and not request.num_output_tokens:
            return known
        prompt = _SharedPrompt(request.cache_salt or "", request.num_prompt_tokens)
        private = request.num_output_tokens or request.mm_features or request.lora_request
        if not private and request.prompt_token_ids is not None:
            prompt.names = self._files.names(request.prompt_token_ids)
        self._prompts[request.request_id] = prompt
        return prompt

    def update_state_after_alloc(
        self,
        request: Any,
        blocks: Any,  # noqa: ARG002
        num_external_tokens: int,
    ) -> None:
        """Note that the tokens which can be loaded have got their blocks."""
        prompt = self._prompts[request.request_id]
        prompt.loaded = prompt.held + num_external_tokens if num_external_tokens else 0

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Return the copies of a step: loads of new requests, saves of chunks that it completes."""
        copies = StepCopies()
        cached = scheduler_output.scheduled_cached_reqs
        computed = {
            one.req_id: one.num_computed_tokens for one in scheduler_output.scheduled_new_reqs
        }
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        _, place = self._label.get()
        for request_id, tokens in scheduler_output.num_scheduled_tokens.items():
            prompt = self._prompts.get(request_id)
            if prompt is None or not prompt.names:
                continue
            found = scheduler_output.kv_connector_block_state.get_block_ids(request_id)
            blocks = [] if found is None else found[0]
            if prompt.loaded:
                copies.loads += self._copies_to_load(prompt, blocks)
                prompt.loaded = 0
            ready = min(computed[request_id] + tokens, prompt.tokens) // self._files.tokens
            if not self._saves or prompt.place != place:  # the weights are others now
                continue
            while prompt.missing and prompt.missing[0] < ready:
                copies.saves.append(self._copy_of(prompt, prompt.missing.pop(0), blocks))
        return copies

    def _copies_to_load(self, prompt: _SharedPrompt, blocks: Sequence[int]) -> list[ChunkCopy]:
        first, last = prompt.held // self._files.tokens, -(-prompt.loaded // self._files.tokens)
        copies = [self._copy_of(prompt, one, blocks) for one in range(first, last)]
        copies[0].skipped = prompt.held % self._files.tokens // self._block
        beyond = last * self._files.tokens - prompt.loaded
        if beyond:
            copies[-1].blocks = copies[-1].blocks[: -(beyond // self._block)]
        return copies

    def _copy_of(self, prompt: _SharedPrompt, index: int, blocks: Sequence[int]) -> ChunkCopy:
        count = self._files.tokens // self._block
        taken = list(blocks[index * count : (index + 1) * count])
        return ChunkCopy(prompt.place, prompt.names[index], taken)

    def request_finished(
        self,
        request: Any,
        block_ids: list[int],  # noqa: ARG002
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request, whose blocks may be freed at once."""
        self._prompts.pop(request.request_id, None)
        return False, None

    def reset_cache(self) -> bool | None:
        """Do nothing: what other weights stored is never loaded."""
        return True

    # ---- in a worker ----

    def weights_are(self, label: str | None, place: str) -> None:
        """Store and load from now on for requests with the salt ``label``; for none if it is None.

        Called only while the server is paused.

        Args:
            label: the label of the server's weights.
            place: the folder of these weights; its name ends with their version.
        """
        self._label.set(label, place)
        if label is not None:
            threading.Thread(target=self._files.remove_others, args=(place,), daemon=True).start()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Load a step's chunks before its forward pass."""
        if not self._caches:
            layers = forward_context.no_compile_layers.items()
            caches = {name: getattr(layer, "kv_cache", None) for name, layer in layers}
            self._caches = {name: one for name, one in caches.items() if one is not None}
        for copy in self._step().loads:
            try:
                self._load(copy)
            except OSError as error:
                log.warning("keys and values could not be loaded: %s", summary(error))
                self._files.remove(copy.place, copy.name)  # the request is sent again
                self._damaged |= set(copy.blocks[copy.skipped :])
                self._damaged_steps = _DAMAGED_STEPS

    def _load(self, copy: ChunkCopy) -> None:
        stored = self._files.load(copy.place, copy.name)
        if stored.keys() != self._caches.keys():
            raise OSError(
                f"the stored layers are {sorted(stored)}, expected {sorted(self._caches)}"
            )
        for name, cache in self._caches.items():
            part = stored[name][copy.skipped : len(copy.blocks)]
            write_blocks(cache, copy.blocks[copy.skipped :], part)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: all layers were loaded before the forward pass."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: all layers are saved after the forward pass."""

    def wait_for_save(self) -> None:
        """Save the chunks that a step completed."""
        if self._damaged_steps:
            self._damaged_steps -= 1
            return
        for copy in self._step().saves:
            layers = {name: copy_blocks(cache, copy.blocks) for name, cache in self._caches.items()}
            try:
                self._files.save(copy.place, copy.name, layers)
            except OSError as error:  # other servers compute them, too
                log.warning("keys and values could not be stored: %s", summary(error))

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that could not be loaded since the last call."""
        damaged, self._damaged = self._damaged, set()
        return damaged

    def shutdown(self) -> None:
        """Remove the file with the label."""
        if self.role == KVConnectorRole.WORKER:
            self._label.set(None, "")

    def _step(self) -> StepCopies:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepCopies)
        return metadata


def _refuse_split_caches(parallel_config: Any) -> None:
    """Check that each worker has all layers and tokens of its heads.

    Raises:
        ValueError: the layers or the tokens are split over workers.
    """
    for name in (
        "pipeline_parallel_size",
        "prefill_context_parallel_size",
        "decode_context_parallel_size",
    ):
        if getattr(parallel_config, name) > 1:
            raise ValueError(
                f"FolderConnector can't store caches of {name}={getattr(parallel_config, name)}; "
                "serve with tensor_parallel_size, or without the connector"
            )


def _identity(vllm_config: VllmConfig) -> str:
    """Return what decides the keys and values of a prompt, apart from weights and tokens."""
    model = vllm_config.model_config
    fields = model.hf_text_config.to_dict()
    for name in ("_name_or_path", "transformers_version"):
        fields.pop(name, None)
    cache = vllm_config.cache_config
    parts = [fields, str(model.dtype), cache.cache_dtype, cache.block_size]
    return json.dumps(parts, sort_keys=True, default=str)
