"""The operator of kernels for GPUs: what kernels get and return, by stand-ins, and on a GPU."""

import ast
import contextlib
import functools
import gc
import importlib.metadata
import inspect
import itertools
import types
import weakref
from collections import Counter

import attention_stand_ins as stand_ins
import pytest
import torch
from drawn_spans import parts_of_documents
from hypothesis import given, settings
from hypothesis import strategies as st
from masked_attention import by_mask
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from primerl.attention import Document, attend, choose_kernel, kernel_table, kernels, lay_out
from primerl.attention.end_to_end import choice, cudnn, flash4, operators, trials, varlen
from primerl.attention.end_to_end.interface import SpanInputs
from primerl.attention.end_to_end.layouts import layout_of
from primerl.parallel import activation

PARTS = parts_of_documents(most=4, longest=9, most_before=4)
KERNELS = ["flash4", "varlen", "cudnn"]


@contextlib.contextmanager
def standing_in(name):
    """Let the operator take a kernel for GPUs, whose functions are stand-ins."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash4, "_library", lambda: stand_ins.FlashAttention4)
        patch.setattr(varlen, "_KERNEL", stand_ins.flash_attention_forward)
        patch.setattr(varlen, "_KERNEL_GRADIENT", stand_ins.flash_attention_backward)
        patch.setattr(cudnn, "_KERNEL", stand_ins.cudnn_attention)
        patch.setattr(cudnn, "_KERNEL_GRADIENT", stand_ins.cudnn_attention_backward)
        patch.setattr(operators, "kernel_for_pack", lambda *_, **__: name)
        patch.setattr(kernels, "_kernel_for", lambda *_, **__: name)
        patch.setattr(kernel_table, "DENSE_MULTIPLE", 4)
        patch.setattr(kernel_table, "LONGEST_TOGETHER", 4)
        patch.setattr(kernel_table, "MOST_TOGETHER", 2)
        stand_ins.CALLS.clear()
        yield patch


def tensors(rows, keys, *, heads=4, kv_heads=2, width=8, value_width=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(rows + 100 * keys)
    shapes = [(rows, heads, width), (keys, kv_heads, width), (keys, kv_heads, value_width)]
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in [*shapes, (heads,)]
    ]


def whole_documents(lengths):
    ends = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    return tuple(Document(*pair) for pair in itertools.pairwise(ends))


def compare(ours, expected, inputs, **bounds):
    torch.testing.assert_close(ours, expected, **bounds)
    weight = torch.linspace(-1, 1, ours.numel(), dtype=ours.dtype).view_as(ours)
    for mine, other in zip(
        torch.autograd.grad((ours * weight).sum(), inputs),
        torch.autograd.grad((expected * weight).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(mine, other, **bounds)


@pytest.mark.parametrize("name", ["flash4", "varlen", "spans"])
@settings(max_examples=15)
@given(
    case=PARTS,
    window=st.sampled_from([None, 1, 3, 100]),
    chunk=st.sampled_from([None, 3]),
    softcap=st.sampled_from([None, 0.7]),
    has_sinks=st.booleans(),
    value_width=st.sampled_from([4, 8, 12]),
)
def test_spans_attend_as_under_a_mask(name, case, window, chunk, softcap, has_sinks, value_width):
    some, keys = case
    softcap = None if name == "varlen" else softcap
    q, k, v, sinks = tensors(some[-1].end, keys, value_width=value_width)
    sinks = sinks if has_sinks else None
    limits = {"window": window, "chunk": chunk, "softcap": softcap, "scaling": 0.9}

    with standing_in(name):
        if name == "spans":  # as on a CPU
            plan = lay_out(some).plan
            options = (0.9, window or 0, chunk or 0, softcap or 0.0, "")
            ours, _ = operators.attend_end_to_end(q, k, v, sinks, plan, *options)
        else:
            ours = attend(q, k, v, lay_out(some), sinks=sinks, **limits)
        expected = by_mask(q, k, v, sinks, some, **limits)
        compare(ours, expected, [x for x in (q, k, v, sinks) if x is not None])


@pytest.mark.parametrize("dimensions", [3, 4])
@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    has_sinks=st.booleans(),
    value_width=st.sampled_from([4, 8]),
)
def test_dense_calls_compute_documents(dimensions, lengths, has_sinks, value_width):
    some = whole_documents(lengths)
    q, k, v, sinks = tensors(sum(lengths), sum(lengths), value_width=value_width)
    sinks = sinks if has_sinks else None
    with standing_in("cudnn") as patch:
        patch.setattr(stand_ins.Statistics, "dimensions", dimensions)
        ours = attend(q, k, v, lay_out(some), sinks=sinks, scaling=0.9)
        expected = by_mask(q, k, v, sinks, some, scaling=0.9)
        compare(ours, expected, [x for x in (q, k, v, sinks) if x is not None])
        numbers = Counter(kernel_table.padded_length(n) for n in lengths)
        calls = [kernel_table.dense_calls(number, n) for n, number in numbers.items()]
        shapes = [(call["shape"][0], call["shape"][2]) for _, call in stand_ins.CALLS]
        expected = zip(calls, numbers, strict=True)
        assert shapes == [(size, n) for sizes, n in expected for size in sizes]


def test_documents_end_to_end_are_not_copied():
    q, k, v, _ = tensors(12, 12)
    with standing_in("cudnn"):
        attend(q, k, v, lay_out(whole_documents([4, 4, 4])))
        calls = [(call["shape"], call["query"]) for _, call in stand_ins.CALLS]
        assert calls == [((2, 4, 4, 8), q.data_ptr()), ((1, 4, 4, 8), q[8:].data_ptr())]
    with standing_in("varlen"):
        attend(q, k, v, lay_out(whole_documents([5, 1, 6])))
        assert stand_ins.CALLS == [("varlen", {"key": k.data_ptr()})]


@pytest.mark.parametrize("name", KERNELS)
def test_keys_that_no_span_sees_have_no_gradient(name):
    q, k, v, _ = tensors(6, 9)
    with standing_in(name):
        ours = attend(q, k, v, lay_out(whole_documents([4, 2])))
        of_k, of_v = torch.autograd.grad(ours.sum(), (k, v))

    assert of_k[6:].eq(0).all()
    assert of_v[6:].eq(0).all()
    assert of_v[:6].ne(0).all()


@pytest.mark.parametrize("name", KERNELS)
def test_there_may_be_no_queries(name):
    q, k, v, _ = tensors(0, 5)
    with standing_in(name):
        ours = attend(q, k, v, lay_out(()))

        assert ours.shape == (0, 4, 8)
        assert torch.autograd.grad(ours.sum(), k)[0].eq(0).all()
    assert not stand_ins.CALLS


@pytest.mark.parametrize("results", [3, 5])
def test_betas_of_flash_attention_may_return_fewer_or_more_results(results):
    q, k, v, _ = tensors(6, 6)
    some = whole_documents([4, 2])
    with standing_in("flash4") as patch:
        patch.setattr(stand_ins.FlashAttention4, "results", results)
        compare(
            attend(q, k, v, lay_out(some), scaling=0.9),
            by_mask(q, k, v, None, some, scaling=0.9),
            [q, k, v],
        )


@pytest.mark.parametrize(("kv_heads", "padded"), [(2, False), (1, True)])
def test_heads_of_192_and_128_numbers_are_padded_where_queries_share_keys(kv_heads, padded):
    q, k, v, _ = tensors(6, 6, heads=2, kv_heads=kv_heads, width=192, value_width=128)
    some = whole_documents([4, 2])
    with standing_in("flash4"):
        compare(
            attend(q, k, v, lay_out(some), scaling=0.1),
            by_mask(q, k, v, None, some, scaling=0.1),
            [q, k, v],
        )
        ((_, call),) = stand_ins.CALLS
    assert call["sizes"][2] == (6, kv_heads, 192 if padded else 128)


def arguments(rows=9, *, sinks=True, shared=True):
    """Arguments of the operator, with documents that share tokens."""
    q, k, v, column = tensors(rows, rows, value_width=4)
    last = Document(6, rows, ((0, 3),)) if shared else Document(6, rows)
    plan = lay_out((Document(0, 6), last)).plan
    return q, k, v, column if sinks else None, plan, 0.9, 3, 4, 0.7, ""


@pytest.mark.parametrize("sinks", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_a_compiler_can_trace_the_operator(sinks):
    torch.library.opcheck(
        torch.ops.primerl.attend_end_to_end.default, arguments(sinks=sinks, shared=sinks)
    )


def test_a_compiler_can_trace_the_gradient():
    q, k, v, sinks, *others = (
        x.detach() if isinstance(x, torch.Tensor) else x for x in arguments()
    )
    found = operators.attend_end_to_end(q, k, v, sinks, *others)

    torch.library.opcheck(
        torch.ops.primerl.attend_end_to_end_backward.default,
        (torch.ones_like(found[0]), q, k, v, *found, *others, True),
    )


@pytest.mark.filterwarnings("default")  # torch emits warnings while it traces
def test_chunks_do_not_break_the_graph():
    q, k, v, _ = tensors(9, 9)
    some = (Document(0, 6), Document(6, 9, ((0, 3),)))
    with standing_in("varlen"):
        unchecked = inspect.unwrap(attend)  # a compiler can't trace checks of shapes
        compiled = torch.compile(unchecked, backend="aot_eager", fullgraph=True)
        compare(
            compiled(q, k, v, lay_out(some), scaling=0.9, chunk=2),
            by_mask(q, k, v, None, some, scaling=0.9, chunk=2),
            [q, k, v],
        )


@given(case=PARTS)
def test_an_operator_reads_the_layout_from_the_plan(case):
    some, _ = case
    expected = lay_out(some)
    found = layout_of(expected.plan, 0, expected.plan.device)

    for name in ("plan", "query_ends", "key_ends", "gathered", "max_keys", "max_queries"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert ours.equal(theirs) if isinstance(ours, torch.Tensor) else ours == theirs
    assert layout_of(expected.plan, 0, expected.plan.device) is found


@pytest.mark.parametrize("name", [*KERNELS, "spans"])
def test_what_is_known_of_a_plan_does_not_keep_it_alive(name):
    q, k, v, _ = tensors(9, 9)
    layout = lay_out(whole_documents([4, 5]))
    plan = weakref.ref(layout.plan)
    with standing_in(name):
        for chunk in (None, 3):
            attend(q, k, v, layout, chunk=chunk).sum().backward()
    del layout
    gc.collect()
    assert plan() is None


def fails(*_, **__):
    raise RuntimeError("no kernel for sm_90")


def with_nan(*given_arguments, **options):
    out, logsumexp, *_ = stand_ins.FlashAttention4.flash_attn_varlen_func(
        *given_arguments, **options
    )
    return out * torch.nan, logsumexp


def without_window(*given_arguments, **options):
    options["window_size"] = (None, None)
    return stand_ins.FlashAttention4.flash_attn_varlen_func(*given_arguments, **options)


def without_prefixes(q, k, v, **options):
    """As if the first query of a span saw its first key, not the last query its last."""
    k = torch.cat([k[:130], k[160:], k[130:160]])
    return stand_ins.FlashAttention4.flash_attn_varlen_func(q, k, v, **options)


def half_gradients(*given_arguments, **options):
    of_q, of_k, *rest = stand_ins.FlashAttention4._flash_attn_bwd(*given_arguments, **options)
    return of_q, of_k / 2, *rest


TRIAL = (torch.device("cpu"), torch.float32, (4, 2), (16, 8))


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_that_computes_a_small_call_right_is_used(name):
    with standing_in(name):
        assert trials._trial_failure(name, *TRIAL, False, 0.0) is None
        assert stand_ins.CALLS
        if name == "flash4":
            assert trials._trial_failure(name, *TRIAL, True, 0.7) is None


@pytest.mark.parametrize(
    ("function", "fault", "reason"),
    [
        (flash4.FORWARD_NAME, fails, "a small call raised RuntimeError: no kernel for sm_90"),
        (flash4.BACKWARD_NAME, fails, "a small call raised RuntimeError"),
        (flash4.FORWARD_NAME, with_nan, "the output has a relative error of nan"),
        (flash4.FORWARD_NAME, without_window, "the output has a relative error of"),
        (flash4.FORWARD_NAME, without_prefixes, "the output has a relative error of"),
        (
            flash4.BACKWARD_NAME,
            half_gradients,
            "the gradient of k has a relative error of 0.5",
        ),
    ],
)
def test_a_kernel_that_fails_in_a_small_call_is_refused(function, fault, reason):
    functions = {
        name: getattr(stand_ins.FlashAttention4, name)
        for name in (flash4.FORWARD_NAME, flash4.BACKWARD_NAME)
    }
    with standing_in("flash4") as patch:
        library = types.SimpleNamespace(**functions | {function: fault})
        patch.setattr(flash4, "_library", lambda: library)
        assert reason in trials._trial_failure("flash4", *TRIAL, True, 0.0)


@pytest.fixture
def tried(monkeypatch):
    """Trials on a pretended Hopper GPU, in which FlashAttention 4 fails."""
    names = []

    def failure(name, *_):
        names.append(name)
        return "a small call raised RuntimeError: sm_90" if name == "flash4" else None

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(choice, "_unusable", dict)
    monkeypatch.setattr(trials, "_trial_failure", failure)
    trials.trial_failure.cache_clear()
    yield names
    trials.trial_failure.cache_clear()


HOPPER = (torch.device("cuda", 0), torch.bfloat16, (64, 64))


def test_the_next_kernel_is_taken_after_a_trial_that_failed(tried, caplog):
    given_lengths = {"groups": ((1, 16_384, 16_384),), "numbers": (4, 2)}
    for _ in range(2):
        name, reason = choice.choose_for(*HOPPER, **given_lengths)
        assert name == "cudnn"
        assert "not flash4: a small call raised RuntimeError: sm_90" in reason
    assert tried == ["flash4", "cudnn"]  # once in a process
    (message,) = [one.getMessage() for one in caplog.records]
    assert message == (
        "the attention kernel flash4 is not used on cuda:0: a small call raised RuntimeError: sm_90"
    )
    capped = choice.choose_for(*HOPPER, **given_lengths, softcap=30.0)
    assert capped[0] == "spans"

    with pytest.raises(ValueError, match=r"flash4 can't be used: a small call raised .* sm_90"):
        choice.choose_for(*HOPPER, **given_lengths, kernel="flash4")


def test_spans_are_taken_inside_the_operator_if_all_trials_fail(monkeypatch, tried):
    monkeypatch.setattr(trials, "_trial_failure", lambda *_: "it fails")
    layout = lay_out((Document(0, 9),))
    with FakeTensorMode():
        q = torch.empty(9, 4, 64, dtype=torch.bfloat16, device="cuda:0")

    assert choice.choose_for(*HOPPER, numbers=(4, 4))[0] == "sdpa"
    x = SpanInputs(q=q, k=q, v=q, layout=layout, scaling=0.125, window=0, cap=0.0)
    assert choice.kernel_for_pack(x, sinks=False, kernel="") == "spans"


def test_nothing_is_tried_while_a_model_is_traced(tried):
    """When the numbers of heads are not asked for yet."""
    assert choice.choose_for(*HOPPER)[0] == "flash4"
    assert not tried


def layer(x, *others):
    """What surrounds attention in a layer: a product before, and one after."""
    q, k, v, sinks, *rest = others
    attended, _ = torch.ops.primerl.attend_end_to_end(q * x, k, v, sinks, *rest)
    return torch.sin(attended.flatten(1) @ attended.flatten(1).T)


def policy(_context, operation, *_arguments, **_options):
    kept = activation._is_kept(operation)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


FOR_COMPILERS = functools.partial(create_selective_checkpoint_contexts, policy)


def recomputed(x, *others):
    compiling = torch.compiler.is_compiling()
    contexts = FOR_COMPILERS if compiling else activation._selective_contexts
    return checkpoint(layer, x, *others, use_reentrant=False, context_fn=contexts)


@pytest.mark.filterwarnings("default")  # torch emits warnings while it traces
@pytest.mark.parametrize(
    "name",
    [
        "flash4",
        "cudnn",
        *(pytest.param(x, marks=pytest.mark.thorough) for x in ("varlen", "spans")),
    ],
)
def test_compiled_and_selectively_recomputed_layers_compute_the_same(name):
    """Without a break of the graph, and attention is computed once in every case."""
    given_arguments = list(arguments(shared=name != "cudnn"))
    inputs = given_arguments[:4]
    if name in ("cudnn", "varlen"):
        given_arguments[-2] = 0.0
    if name == "cudnn":
        given_arguments[-4] = 0
    x = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    compilers = {
        "eager": lambda function: function,
        "compiled": functools.partial(torch.compile, backend="aot_eager", fullgraph=True),
    }
    found = {}
    with standing_in(name):
        for way, compiler in compilers.items():
            for function in (layer, recomputed):
                torch.compiler.reset()
                stand_ins.CALLS.clear()
                value = compiler(function)(x, *given_arguments)
                gradients = torch.autograd.grad(value.sum(), [x, *inputs])
                found[way, function.__name__] = [value, *gradients]
                assert len(stand_ins.CALLS) == (0 if name == "spans" else len_of_runs(name))

    expected = found.pop(("eager", "layer"))
    for others in found.values():
        for mine, other in zip(others, expected, strict=True):
            torch.testing.assert_close(mine, other, atol=1e-12, rtol=1e-12)


def len_of_runs(name):
    return 2 if name == "cudnn" else 1  # chunks of 4, 2 and 3 tokens, padded to 4: two and one


def test_stand_ins_have_the_signatures_of_torch():
    aten = torch.ops.aten
    for stand_in, operator in [
        (stand_ins.flash_attention_forward, aten._flash_attention_forward),
        (stand_ins.flash_attention_backward, aten._flash_attention_backward),
        (stand_ins.cudnn_attention, aten._scaled_dot_product_cudnn_attention),
        (stand_ins.cudnn_attention_backward, aten._scaled_dot_product_cudnn_attention_backward),
    ]:
        schema = operator.default._schema
        ours = inspect.signature(stand_in).parameters
        theirs = {one.name: one.kwarg_only for one in schema.arguments}
        later = {"block_table", "num_splits"}  # not in torch 2.11
        assert [name for name in ours if name in theirs or name not in later] == list(theirs)
        for name, only_by_name in theirs.items():
            assert (ours[name].kind is inspect.Parameter.KEYWORD_ONLY) == only_by_name


@pytest.mark.parametrize("name", [flash4.FORWARD_NAME, flash4.BACKWARD_NAME])
def test_stand_ins_have_the_signatures_of_flash_attention_4(name):
    """Read from the source: the package can only be imported where CUDA is."""
    try:
        files = importlib.metadata.files("flash-attn-4")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("flash-attn-4 is not installed")
    (path,) = [one for one in files if str(one).endswith("flash_attn/cute/interface.py")]
    tree = ast.parse(path.locate().read_text(encoding="utf-8"))
    (function,) = [
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    assert not function.args.kwonlyargs
    defaults = [ast.literal_eval(one) for one in function.args.defaults]
    theirs = [one.arg for one in function.args.args]
    ours = inspect.signature(getattr(stand_ins.FlashAttention4, name)).parameters
    assert list(ours) == theirs
    assert [
        one.default for one in ours.values() if one.default is not inspect.Parameter.empty
    ] == defaults


def test_a_package_with_other_functions_is_refused():
    ours = stand_ins.FlashAttention4
    assert flash4.signature_refusal(ours, "4.0") is None

    def without_windows(q, k, v, **_):
        raise AssertionError

    def in_another_order(k, q, v, **_):
        raise AssertionError

    for function, message in [
        (None, "flash-attn-4 4.1 has no flash_attn_varlen_func"),
        (without_windows, "does not take causal, cu_seqlens_k, cu_seqlens_q, deterministic,"),
        (in_another_order, "does not take q, k, v first"),
    ]:
        other = types.SimpleNamespace(
            flash_attn_varlen_func=function, _flash_attn_bwd=ours._flash_attn_bwd
        )
        assert message in flash4.signature_refusal(other, "4.1")


@pytest.mark.parametrize("error", [ImportError("libs-core"), OSError("undefined symbol")])
def test_a_package_that_cannot_be_loaded_is_named(error, monkeypatch):
    def load():
        raise error

    monkeypatch.setattr(flash4, "_library", load)
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "4.0.0b36")

    assert flash4.refusal.__wrapped__() == (
        f"flash-attn-4 4.0.0b36 can't be loaded: {type(error).__name__}: {error}"
    )


# FlashAttention 4 compiles each combination when it is first called, so there are few.
ON_A_GPU = [
    {"width": 64, "value_width": 64},
    {"width": 128, "value_width": 128, "kv_heads": 4},
    {"width": 128, "value_width": 128, "dtype": torch.float16},
    {"width": 192, "value_width": 128, "kv_heads": 4},
    {"width": 128, "value_width": 128, "shared": True},
    {"width": 128, "value_width": 128, "has_sinks": True},
    {"width": 64, "value_width": 64, "shared": True, "has_sinks": True, "window": 100},
    {"width": 64, "value_width": 64, "window": 100, "softcap": 5.0},
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_A_GPU, ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_a_gpu_computes_what_a_cpu_does(name, case):
    sizes, has_sinks = dict(case), case.get("has_sinks", False)
    dtype = sizes.pop("dtype", torch.bfloat16)
    limits = {key: sizes.pop(key) for key in ("window", "softcap") if key in sizes}
    shared = sizes.pop("shared", False)
    sizes.pop("has_sinks", None)
    last = Document(300, 420, ((0, 150),)) if shared else Document(300, 420)
    some = (Document(0, 299), Document(299, 300), last)
    exact = tensors(420, 420, **sizes)
    rounded = [x.detach().to("cuda", dtype).requires_grad_() for x in exact]
    on_gpu = lay_out(some, "cuda")
    options = {
        "layout": on_gpu,
        "sinks": has_sinks,
        "window": limits.get("window"),
        "softcap": limits.get("softcap"),
    }
    try:
        choose_kernel(rounded[0], rounded[2], kernel=name, **options)
    except ValueError as refused:
        pytest.skip(str(refused))

    *qkv, sinks = rounded
    ours = attend(*qkv, on_gpu, kernel=name, sinks=sinks if has_sinks else None, **limits)
    expected = attend(*exact[:3], lay_out(some), sinks=exact[3] if has_sinks else None, **limits)
    expected.sum().backward()
    ours.sum().backward()

    torch.testing.assert_close(ours.cpu().double(), expected, atol=2e-2, rtol=2e-2)
    for mine, other in zip(rounded[: 3 + has_sinks], exact[: 3 + has_sinks], strict=True):
        torch.testing.assert_close(mine.grad.cpu().double(), other.grad, atol=5e-2, rtol=5e-2)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("lengths", [[2048, 2048], [3000, 1500]])
def test_layers_on_a_gpu_compute_the_same_compiled_and_recomputed(name, lengths):
    """Documents long enough for dense calls, without padding and with it."""
    rows = sum(lengths)
    q, k, v, _ = (
        x.detach().to("cuda").requires_grad_()
        for x in tensors(rows, rows, width=64, value_width=64, dtype=torch.bfloat16)
    )
    layout = lay_out(whole_documents(lengths), "cuda")
    try:
        choose_kernel(q, v, layout=layout, kernel=name)
    except ValueError as refused:
        pytest.skip(str(refused))
    x = torch.tensor(1.5, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    found = []
    for function in (layer, recomputed, torch.compile(layer), torch.compile(recomputed)):
        value = function(x, q, k, v, None, layout.plan, 0.125, 0, 0, 0.0, name)
        found.append([value, *torch.autograd.grad(value.float().square().mean(), [x, q, k, v])])

    for others in found[1:]:
        for mine, other in zip(others, found[0], strict=True):
            scale = other.abs().max().item()
            torch.testing.assert_close(mine / scale, other / scale, atol=3e-2, rtol=3e-2)
