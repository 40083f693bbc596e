"""A pretended GPU: tensors that say they are on one, checked as a GPU would check them."""

import contextlib

import torch
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

GPU = torch.device("cuda", 0)
aten = torch.ops.aten
# Operators whose results' shapes or Python values come from the device.
WAITING = {
    aten._local_scalar_dense: "item",
    aten.nonzero: "nonzero",
    aten.masked_select: "masked_select",
    aten.equal: "equal",
    aten.bincount: "bincount",
    aten._unique2: "unique",
    aten.unique_consecutive: "unique",
}
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}


class OnGPU(torch.Tensor):
    """A tensor in host memory that pretends to be on a GPU; torch sees the ``meta`` device."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device="meta",
        )

    def __init__(self, inner):
        self.inner = inner

    device = property(lambda self: GPU)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)
    is_meta = property(lambda self: False)

    def tolist(self):
        return self.cpu().tolist()

    def numpy(self):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def __getitem__(self, index):
        if isinstance(index, list):
            index = torch.tensor(index, device=GPU)
        return super().__getitem__(index)

    def __deepcopy__(self, memo):
        return self.detach().clone()

    def record_stream(self, stream):
        stream.gpu.recorded.add((_storage(self.inner), stream))

    def __repr__(self):
        return f"OnGPU({self.inner!r})"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise RuntimeError(f"{function} runs outside of `with PretendedGPU():`")


class PretendedStream:
    """A stream, by what it has waited for: a count of operations for each other stream."""

    def __init__(self, gpu):
        self.gpu, self.seen = gpu, {}

    def wait_stream(self, other):
        self.wait(other.seen)

    def wait(self, seen):
        for stream, count in seen.items():
            self.seen[stream] = max(count, self.seen.get(stream, 0))

    def synchronize(self):
        self.gpu.waits.append("synchronize")
        self.gpu.host.wait(self.seen)


class PretendedEvent:
    """What its stream had done when the event was recorded."""

    def __init__(self, gpu):
        self.gpu, self.seen = gpu, {}

    def record(self):
        self.seen = dict(self.gpu.stream.seen)

    def synchronize(self):
        self.gpu.waits.append("synchronize")
        self.gpu.host.wait(self.seen)


class PretendedGPU(TorchDispatchMode):
    """Within it, tensors can be created on, and copied to, a device that says it is a GPU.

    Values are computed in host memory. As on a GPU, operators refuse tensors of two devices.
    ``waits`` lists where the host waits for the device. An operator on one stream that uses what
    another stream writes, without having waited for it, raises an error; so does the host.
    """

    # torch then does not look for a real GPU when a factory function gets a device.
    _mode_key = torch._C._TorchDispatchModeKey.FAKE

    def __init__(self):
        super().__init__()
        self.waits = []
        self.host, self.stream = PretendedStream(self), PretendedStream(self)
        self.recorded, self._allocated, self._used = set(), {}, set()
        self._writes, self._reads, self._alive, self._pinned = {}, {}, [], set()

    def __enter__(self):
        self._lift = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        return super().__enter__()

    def __exit__(self, *error):
        torch._C._set_only_lift_cpu_tensors(self._lift)
        super().__exit__(*error)
        if error[0] is None:
            assert self._used <= self.recorded, "memory is used on a stream that is not recorded"

    def replace_streams(self, monkeypatch):
        """Replace the streams of ``torch.cuda`` by pretended ones."""

        @contextlib.contextmanager
        def entered(stream):
            before, self.stream = self.stream, self.stream if stream is None else stream
            yield
            self.stream = before

        def current_stream(device=None):
            if device is not None and torch.device(device).type != "cuda":
                raise ValueError(f"Expected a cuda device, but got: {device}")
            return self.stream

        class Stream(PretendedStream):
            def __init__(stream, device=None):
                super().__init__(self)

        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "Event", lambda: PretendedEvent(self))
        monkeypatch.setattr(torch.cuda, "stream", entered)
        monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
        monkeypatch.setattr(torch.cuda, "synchronize", self.stream.synchronize)

    def on_gpu(self, tensor):
        """Copy a tensor to the GPU; ``tensor.cuda()`` and ``to("cuda")`` need a real one."""
        return tensor.to(GPU)

    def is_pinned(self, tensor):
        return _storage(tensor) in self._pinned

    def _place(self, x):
        """Return what identifies the memory of a tensor: tensors may share a pinned block."""
        storage = _storage(x)
        return (storage, x.data_ptr()) if storage in self._pinned else storage

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        packet = function.overloadpacket
        target = kwargs.pop("device", None)
        pinned = kwargs.pop("pin_memory", None) or packet is aten._pin_memory
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        on_gpu = [isinstance(x, OnGPU) for x in given]
        copies = packet in (aten._to_copy, aten.copy_)
        to_gpu = any(on_gpu) if target is None else torch.device(target).type != "cpu"
        if packet is aten.copy_:
            to_gpu = on_gpu[0]
        if not copies and any(on_gpu) and function.namespace == "aten":
            self._require_one_device(function, args, given)
        inner = lambda x: x.inner if isinstance(x, OnGPU) else x  # noqa: E731
        real_args, real_kwargs = tree_map(inner, (args, kwargs))
        copied = packet is aten._pin_memory
        out = args[0].clone() if copied else function(*real_args, **real_kwargs)
        stream = self.stream if to_gpu or (copies and any(on_gpu)) else self.host
        across = copies and {to_gpu} != set(on_gpu[-1:])
        self._order(function, real_args, real_kwargs, out, stream)
        if across:
            host_side = real_args[packet is aten.copy_] if to_gpu else out
            asynchronous = kwargs.get("non_blocking") or (
                packet is aten.copy_ and args[2:] == (True,)
            )
            if not (asynchronous and self.is_pinned(host_side)):
                self._wait("copy to the GPU" if to_gpu else "copy from the GPU")
        elif any(on_gpu) and self._reads_values(packet, args):
            self._wait(WAITING.get(packet, "index"))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                if pinned:
                    self._pinned.add(_storage(x))
                if to_gpu:
                    self._allocated.setdefault(_storage(x), self.stream)
        if to_gpu:
            out = tree_map(lambda x: OnGPU(x) if isinstance(x, torch.Tensor) else x, out)
        if across or target is not None or pinned:
            return args[0] if packet is aten.copy_ else out
        return return_and_correct_aliasing(function, args, kwargs, out)

    def _require_one_device(self, function, args, given):
        """Refuse two devices; as in torch, a number may be on the CPU, and so may indices."""
        if function.overloadpacket in INDEXING:
            given = [args[0], *args[2:3]]
        devices = {x.device.type for x in given if x.ndim}
        if len(devices) > 1:
            raise RuntimeError(f"{function}: expected all tensors to be on the same device")

    def _reads_values(self, packet, args):
        if packet in INDEXING:
            indices = [x for x in args[1] if x is not None]
            return any(x.dtype in (torch.bool, torch.uint8) or not x.is_cuda for x in indices)
        return packet in WAITING or (packet is aten.repeat_interleave and args[1:] in ((), (None,)))

    def _wait(self, why):
        self.waits.append(why)
        self.host.wait(self.stream.seen)

    def _order(self, function, args, kwargs, out, stream):
        """Check that a stream has waited for the streams whose results it reads or overwrites."""
        schema = function._schema
        if function.overloadpacket is aten.set_ or any(
            x.alias_info is not None and not x.alias_info.is_write for x in schema.returns
        ):
            return  # no value is read or written
        stream.wait(self.host.seen)  # the host launches operations in its order
        stream.seen[stream] = now = stream.seen.get(stream, 0) + 1
        name = function.overloadpacket.__name__
        if name.endswith("_like") or name.startswith("new_"):
            args, kwargs = (), {}  # only the shape is read
        values = [*args, *(kwargs.get(x.name) for x in schema.arguments[len(args) :])]
        for argument, value in zip(schema.arguments, values, strict=True):
            written = argument.alias_info is not None and argument.alias_info.is_write
            for x in tree_leaves(value):
                if isinstance(x, torch.Tensor):
                    self._touch(function, x, stream, now, written=written)
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self._touch(function, x, stream, now, written=True)

    def _touch(self, function, x, stream, now, *, written):
        place = self._place(x)
        self._alive.append(x)  # so that no other tensor gets its memory
        before = [self._writes.get(place)] + (list(self._reads.get(place, {}).items()) * written)
        for other, count in filter(None, before):
            assert stream.seen.get(other, 0) >= count, f"{function} does not wait: {list(x.shape)}"
        if written:
            self._writes[place], self._reads[place] = (stream, now), {}
        else:
            self._reads.setdefault(place, {})[stream] = now
        if self._allocated.get(place, stream) is not stream and stream is not self.host:
            self._used.add((place, stream))


def _storage(x):
    return x.untyped_storage().data_ptr()
