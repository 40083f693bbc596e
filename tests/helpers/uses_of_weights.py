"""Tracing of how a model's forward pass uses each weight.

The tracer relies on no names or classes. A weight is any parameter in a matrix product. Each output
of a weight is followed through copies until it is used. Outputs belong to one matrix if they are
added, reduced together, or multiplied with something together. Outputs that scale one another
belong to different matrices.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
PRODUCTS = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm)
CHOICES = (aten.topk, aten.sort, aten.argmax, aten.max, aten.kthvalue)
REDUCTIONS = (aten.mean, aten.sum, aten.var, aten.amax, aten.linalg_vector_norm)
COPIES = (aten.cat, aten.stack, aten.index, aten.index_select, aten.repeat, aten.flip, aten.roll)
EMPTY = (aten.new_empty, aten.new_zeros, aten.empty_like, aten.zeros_like)


class Uses(TorchDispatchMode):
    """A context in which a model's forward pass is traced.

    ``multiplied`` has the names of the weights in matrix products. ``choosing`` has those whose
    outputs reach a choice of the largest without another product in between. ``looked_up`` has
    those in table lookups.
    """

    def __init__(self, model):
        super().__init__()
        self.names = {p.untyped_storage().data_ptr(): n for n, p in model.named_parameters()}
        self.multiplied, self.choosing, self.looked_up = set(), set(), set()
        self._leaders = {}  # union-find over the outputs of each weight
        self._memory = {}  # address -> storage, {weight: which of its outputs each element is}

    def matrices(self, name):
        """Return the matrix of each output of a weight, numbered by first appearance."""
        numbers = {}
        roots = [self._root(name, n) for n in range(len(self._leaders[name]))]
        return [numbers.setdefault(root, len(numbers)) for root in roots]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = list(_tensors(args))
        followed = [outputs for x in given if (outputs := self._read(x))]
        result = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if packet is aten.embedding:
            self.looked_up.add(self._name(args[0]))
        if packet in CHOICES:
            self.choosing.update(name for outputs in followed for name in outputs)
        if packet in PRODUCTS:
            self._use(followed)
            for name in filter(None, (self._name(x) for x in given if x.ndim > 1)):
                self._begin(name, result)
        elif packet is aten.convolution and args[8] == args[0].shape[1]:  # each channel alone
            for name, outputs in self._read(args[0]).items():
                self._write(result, name, outputs[..., :1].expand(result.shape))
        elif packet in REDUCTIONS and len(args) > 1:
            self._reduce(followed[0] if followed else {}, args[1], result)
        elif followed and packet not in EMPTY and not _is_view(func, given, result):
            self._follow(func, packet, args, kwargs or {}, followed, result)
        return result

    def _name(self, x):
        return self.names.get(x.untyped_storage().data_ptr())

    def _read(self, x):
        """Return, by weight, which of its outputs each element of a tensor is (-1: none)."""
        _, known = self._memory.get(x.untyped_storage().data_ptr(), (None, {}))
        real = torch.view_as_real(x) if x.is_complex() else x
        found = {}
        for name, flat in known.items():
            outputs = flat.as_strided(real.shape, real.stride(), real.storage_offset())
            if x.is_complex():
                self._join_pairs(name, outputs[..., 0], outputs[..., 1])
                outputs = outputs[..., 0]
            if (outputs >= 0).any():
                found[name] = outputs.clone()
        return found

    def _write(self, x, name, outputs):
        if x.is_complex():
            x, outputs = torch.view_as_real(x), outputs.unsqueeze(-1).expand(*x.shape, 2)
        storage = x.untyped_storage()
        _, known = self._memory.setdefault(storage.data_ptr(), (storage, {}))  # kept alive
        length = storage.nbytes() // x.element_size()
        flat = known.setdefault(name, torch.full((length,), -1))
        flat.as_strided(x.shape, x.stride(), x.storage_offset()).copy_(outputs)

    def _begin(self, name, result):
        self.multiplied.add(name)
        count = result.shape[-1]
        assert len(self._leaders.setdefault(name, list(range(count)))) == count
        self._write(result, name, torch.arange(count).expand(result.shape))

    def _follow(self, func, packet, args, kwargs, followed, result):
        names = {name for outputs in followed for name in outputs}
        if packet in COPIES:
            for name in names:
                self._write(result, name, func(*_mapped(args, name, self._read), **kwargs))
        elif packet is aten.copy_:
            for name, outputs in self._read(args[1]).items():
                self._write(result, name, outputs.expand(result.shape))
        elif isinstance(result, torch.Tensor) and all(
            _spreads(one, result) for outputs in followed for one in outputs.values()
        ):
            for name in names:
                self._combine(name, packet, [o[name] for o in followed if name in o], result)
        else:
            self._use(followed)

    def _combine(self, name, packet, each, result):
        """Join outputs element by element; outputs multiplied by others are different matrices."""
        each = [one.expand(result.shape) for one in each]
        if packet in (aten.mul, aten.div) and any(not torch.equal(one, each[0]) for one in each):
            self._use([{name: one} for one in each])
            return
        for one in each[1:]:
            self._join_pairs(name, one, each[0])
        self._write(result, name, each[0])

    def _reduce(self, followed, dimensions, result):
        dimensions = [dimensions] if isinstance(dimensions, int) else list(dimensions)
        for name, outputs in followed.items():
            reduced = [d % outputs.ndim for d in dimensions] or list(range(outputs.ndim))
            kept = [d for d in range(outputs.ndim) if d not in reduced]
            rows = outputs.permute(*kept, *reduced).flatten(len(kept)).flatten(0, -2)
            for row in rows.unique(dim=0).tolist():
                self._join(name, *row)
            if (rows == rows[:, :1]).all():  # for example, the same output of several experts
                self._write(result, name, rows[:, 0].reshape(result.shape))

    def _use(self, followed):
        for each in followed:
            for name, outputs in each.items():
                self._join(name, *outputs.unique().tolist())

    def _join_pairs(self, name, one, other):
        for pair in torch.stack([one.flatten(), other.flatten()]).unique(dim=1).T.tolist():
            self._join(name, *pair)

    def _join(self, name, *outputs):
        roots = {self._root(name, n) for n in outputs if n >= 0}
        for root in roots:
            self._leaders[name][root] = min(roots)

    def _root(self, name, n):
        while self._leaders[name][n] != n:
            n = self._leaders[name][n]
        return n


def _tensors(args):
    for arg in args:
        if isinstance(arg, torch.Tensor) and arg.numel():
            yield arg
        elif isinstance(arg, tuple | list):
            yield from _tensors(arg)


def _mapped(args, name, read):
    """Replace tensors of real or complex numbers in the arguments with the outputs they hold."""
    if isinstance(args, torch.Tensor):
        numbers = args.is_floating_point() or args.is_complex()
        unknown = torch.full(args.shape, -1)
        return (read(args).get(name, unknown) if args.numel() else unknown) if numbers else args
    if isinstance(args, tuple | list):
        return type(args)(_mapped(one, name, read) for one in args)
    return args


def _is_view(func, given, result):
    if func._schema.is_mutable:
        return False
    if isinstance(result, torch.Tensor) and not result.numel():
        return True  # a slice of no rows, for an expert without tokens
    addresses = {x.untyped_storage().data_ptr() for x in given}
    return any(one.untyped_storage().data_ptr() in addresses for one in _tensors([result]))


def _spreads(outputs, result):
    try:
        return torch.broadcast_shapes(outputs.shape, result.shape) == result.shape
    except RuntimeError:
        return False
