"""The ragged attention operator and its registration with Transformers."""

import inspect
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo
import torch.fx.experimental._config as fx_config
import torch.nn.functional as F
from torch import nn

import hf_compile
from hf_compile import attention
from hf_compile.attention import (
    ATTENTION_NAME,
    choose_kernel,
    ragged_attention,
    ragged_attention_forward,
    register_attention,
)

LENGTHS = {
    "one": [7],
    "uniform": [4, 4, 4],
    "runs": [4, 4, 2, 3, 3],
    "scattered": [5, 2, 5, 2, 5],
    "empty segments": [0, 3, 0, 3, 5, 0],
    "ones": [1, 1, 2],
}
any_lengths = pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
both_causal = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])


def borders(lengths, dtype=torch.int32):
    return torch.tensor([0, *lengths], dtype=dtype).cumsum(0, dtype=dtype)


def packed(total, heads=4, key_heads=4, dim=8, value_dim=8, dtype=torch.float32, requires_grad=False, key_total=None):
    """Query, key and value in the layout of the models: (total, heads, dim) seen as (1, heads, total, dim)."""
    key_total = total if key_total is None else key_total
    shapes = [(total, heads, dim), (key_total, key_heads, dim), (key_total, key_heads, value_dim)]
    tensors = [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]
    return [t.transpose(0, 1).unsqueeze(0).requires_grad_(requires_grad) for t in tensors]


def loop(query, key, value, lengths, scale, is_causal, key_lengths=None):
    """What the models do without flash attention: one SDPA per segment."""
    key, value = (t.repeat_interleave(query.shape[1] // key.shape[1], 1) for t in (key, value))
    key_lengths = lengths if key_lengths is None else key_lengths
    segments = zip(query.split(lengths, 2), key.split(key_lengths, 2), value.split(key_lengths, 2), strict=True)
    outs = [F.scaled_dot_product_attention(*qkv, scale=scale, is_causal=is_causal) for qkv in segments]
    return torch.cat(outs, 2).transpose(1, 2)


def relative(got, want):
    got, want = got.detach(), want.detach()
    return float((got - want).abs().max() / want.abs().max())


@pytest.fixture(autouse=True)
def _fixed_and_fresh():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are tiny: waiting for a second thread is what would take the time
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
    torch._dynamo.reset()


@pytest.fixture
def sdpa_calls(monkeypatch):
    """The query shape of every SDPA call."""
    shapes = []
    original = F.scaled_dot_product_attention

    def counting(query, *args, **kwargs):
        shapes.append(tuple(query.shape))
        return original(query, *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counting)
    return shapes


# ---- numbers


@any_lengths
@both_causal
@pytest.mark.parametrize(("key_heads", "value_dim"), [(4, 8), (2, 8), (1, 12)], ids=["mha", "gqa", "mqa, wide value"])
def test_it_equals_one_sdpa_per_segment(lengths, is_causal, key_heads, value_dim):
    qkv = packed(sum(lengths), key_heads=key_heads, value_dim=value_dim, requires_grad=True)
    got = ragged_attention(*qkv, borders(lengths), 0.3, is_causal)
    want = loop(*qkv, lengths, 0.3, is_causal)
    assert got.shape == (1, sum(lengths), 4, value_dim)
    assert got.is_contiguous()
    assert relative(got, want) <= 2e-6
    weight = torch.randn_like(want)
    got_grads, want_grads = (torch.autograd.grad(out, qkv, weight) for out in (got, want))
    for got_grad, want_grad in zip(got_grads, want_grads, strict=True):
        assert float((got_grad - want_grad).abs().max()) <= 2e-6 * max(1.0, float(want_grad.abs().max()))


@any_lengths
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_other_dtypes_round_as_sdpa_does(lengths, dtype):
    qkv = packed(sum(lengths), key_heads=2, dtype=dtype)
    got = ragged_attention(*qkv, borders(lengths, torch.int64), 0.3, False)
    assert got.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(got, loop(*qkv, lengths, 0.3, False), rtol=2 * eps, atol=eps)
    exact = loop(*(t.double() for t in qkv), lengths, 0.3, False)
    assert relative(got.double(), exact) <= 4 * eps


def test_a_segment_does_not_see_its_neighbours():
    lengths = [3, 4, 5]
    query, key, value = packed(12)
    before = ragged_attention(query, key, value, borders(lengths), 0.3, False)
    key[:, :, :3], value[:, :, 7:] = 50.0, float("nan")
    after = ragged_attention(query, key, value, borders(lengths), 0.3, False)
    assert torch.equal(before[:, 3:7], after[:, 3:7])
    assert not torch.equal(before[:, :3], after[:, :3])
    # ... which one call over everything would
    whole = F.scaled_dot_product_attention(query, key, value, scale=0.3)
    assert whole[:, :, 3:7].isnan().all()


@pytest.mark.parametrize("layout", ["heads outside", "slice of qkv", "reversed dims"])
def test_any_strides_will_do(layout):
    lengths = [5, 2, 5]
    if layout == "slice of qkv":
        qkv = torch.randn(12, 3, 4, 8).permute(1, 2, 0, 3).unsqueeze(1).unbind(0)
    elif layout == "heads outside":
        qkv = [torch.randn(1, 4, 12, 8) for _ in range(3)]
    else:
        qkv = [torch.randn(1, 4, 8, 12).transpose(2, 3) for _ in range(3)]
    assert relative(ragged_attention(*qkv, borders(lengths), 0.3, False), loop(*qkv, lengths, 0.3, False)) <= 2e-6


@pytest.mark.parametrize("cu_seqlens", [[0], [0, 0, 0]])
def test_nothing_packed_is_legal(cu_seqlens):
    qkv = packed(0, key_heads=2, value_dim=12, requires_grad=True)
    out = ragged_attention(*qkv, torch.tensor(cu_seqlens), 0.3, False)
    assert out.shape == (1, 0, 4, 12)
    assert [g.shape for g in torch.autograd.grad(out.sum(), qkv)] == [t.shape for t in qkv]


def test_key_segments_may_have_lengths_of_their_own():
    lengths, key_lengths = [3, 3, 0, 2, 4], [5, 5, 2, 5, 0]
    qkv = packed(12, key_heads=2, value_dim=12, key_total=17, requires_grad=True)
    got = ragged_attention(*qkv, borders(lengths), 0.3, False, borders(key_lengths))
    want = loop(*qkv, lengths, 0.3, False, key_lengths)
    assert relative(got, want) <= 2e-6
    assert not got[:, -4:].any()  # nothing to attend to
    got_grads, want_grads = (torch.autograd.grad(out.sum(), qkv) for out in (got, want))
    for got_grad, want_grad in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(got_grad, want_grad, rtol=0, atol=2e-6)


# ---- how many calls


@pytest.mark.parametrize(
    ("lengths", "heads", "calls"),
    [
        ([300], 16, [(1, 16, 300, 80)]),
        ([64] * 5, 16, [(5, 16, 64, 80)]),
        ([64, 64, 32] * 2, 16, [(2, 16, 64, 80), (1, 16, 32, 80)] * 2),  # copying these costs more than a call
        ([8, 8, 4] * 3, 4, [(6, 4, 8, 80), (3, 4, 4, 80)]),
        ([64, 8] * 3, 16, [(1, 16, 64, 80), (3, 16, 8, 80)] + [(1, 16, 64, 80)] * 2),
    ],
    ids=["single", "uniform", "large, by run", "small, by length", "mixed"],
)
def test_equal_segments_share_a_call(sdpa_calls, lengths, heads, calls):
    qkv = packed(sum(lengths), heads=heads, key_heads=heads, dim=80, value_dim=80)
    got = ragged_attention(*qkv, borders(lengths), 0.1, False)
    assert sdpa_calls == calls
    sdpa_calls.clear()
    want = loop(*qkv, lengths, 0.1, False)
    assert len(sdpa_calls) == len(lengths)
    assert relative(got, want) <= 2e-6


@any_lengths
@pytest.mark.parametrize("limit", [0, 1 << 30], ids=["never copy", "always copy"])
def test_sharing_does_not_change_numbers(monkeypatch, lengths, limit):
    monkeypatch.setattr(attention, "_COPY_LIMIT", limit)
    qkv = packed(sum(lengths), requires_grad=True)
    got, want = ragged_attention(*qkv, borders(lengths), 0.3, True), loop(*qkv, lengths, 0.3, True)
    assert relative(got, want) <= 2e-6
    got_grads, want_grads = (torch.autograd.grad(out.sum(), qkv) for out in (got, want))
    for got_grad, want_grad in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(got_grad, want_grad, rtol=0, atol=2e-6)


# ---- gradients, and torch's own checks of an operator


@pytest.mark.parametrize(
    ("lengths", "key_heads", "is_causal", "key_lengths"),
    [([3], 2, False, None), ([2, 2], 1, True, None), ([2, 0, 3, 2], 2, False, None), ([2, 1], 1, False, [1, 3])],
)
def test_gradcheck(lengths, key_heads, is_causal, key_lengths):
    sizes = {"heads": 2, "key_heads": key_heads, "dim": 3, "value_dim": 4, "key_total": sum(key_lengths or lengths)}
    qkv = packed(sum(lengths), dtype=torch.float64, requires_grad=True, **sizes)
    key_borders = None if key_lengths is None else borders(key_lengths)
    assert torch.autograd.gradcheck(
        lambda *qkv: ragged_attention(*qkv, borders(lengths), 0.7, is_causal, key_borders), qkv
    )


@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
def test_opcheck(cross):
    cu_seqlens = borders([3, 4, 0, 3])
    last = (borders([2, 2, 3, 3]),) if cross else ()
    qkv = packed(10, key_heads=2, value_dim=12, requires_grad=True)
    torch.library.opcheck(ragged_attention, (*qkv, cu_seqlens, 0.3, not cross, *last))
    grad, qkv = torch.randn(1, 10, 4, 12), [t.detach() for t in qkv]
    torch.library.opcheck(attention._ragged_attention_backward, (grad, *qkv, cu_seqlens, 0.3, not cross, *last))


def test_some_inputs_may_need_no_gradient():
    lengths = [3, 4, 3]
    query, key, value = packed(10)
    value.requires_grad_()
    (got,) = torch.autograd.grad(ragged_attention(query, key, value, borders(lengths), 0.3, False).sum(), value)
    (want,) = torch.autograd.grad(loop(query, key, value, lengths, 0.3, False).sum(), value)
    torch.testing.assert_close(got, want, rtol=0, atol=2e-6)


def test_a_second_derivative_is_refused():
    qkv = packed(5, requires_grad=True)
    out = ragged_attention(*qkv, borders([2, 3]), 0.3, False)
    (first,) = torch.autograd.grad(out.square().sum(), qkv[0], create_graph=True)
    with pytest.raises(NotImplementedError, match=r"no second derivative; .* 'eager'"):
        first.sum().backward()


# ---- errors


def bad(what):
    query, key, value = packed(6)
    cu_seqlens, last, is_causal = borders([2, 4]), (), False
    if what == "batch":
        query, key, value = (t.expand(2, -1, -1, -1) for t in (query, key, value))
    elif what == "heads":
        key, value = key[:, :3], value[:, :3]
    elif what == "dims":
        key = key[..., :4]
    elif what == "dtypes":
        value = value.bfloat16()
    elif what == "borders dtype":
        cu_seqlens = cu_seqlens.float()
    elif what == "borders shape":
        cu_seqlens = cu_seqlens[None]
    elif what == "end":
        cu_seqlens = borders([2, 3])
    elif what == "start":
        cu_seqlens = torch.tensor([1, 6])
    elif what == "falling":
        cu_seqlens = torch.tensor([0, 4, 2, 6])
    elif what == "no borders":
        cu_seqlens = cu_seqlens[:0]
    elif what == "key end":
        last = (borders([2, 3]),)
    elif what == "segments":
        last = (borders([6]),)
    elif what == "causal cross":
        last, is_causal = (borders([3, 3]),), True
    return query, key, value, cu_seqlens, 0.3, is_causal, *last


@pytest.mark.parametrize(
    ("what", "error", "sentence"),
    [
        ("batch", ValueError, r"\(1, heads, total, dim\); pack the batch along the token axis. Got .*\(2, 4, 6, 8\)"),
        ("heads", ValueError, r"heads of key must divide the heads of query; repeat"),
        ("dims", ValueError, r"query and key equal dims; check the projections"),
        ("dtypes", ValueError, r"must have one dtype; cast them alike .* Got .*bfloat16"),
        ("borders dtype", ValueError, r"must be int32 or int64 of shape \(segments \+ 1,\)"),
        ("borders shape", ValueError, r"must be int32 or int64 of shape \(segments \+ 1,\)"),
        (
            "end",
            ValueError,
            r"cu_seqlens \(the borders of query\) must start at 0, never fall and end at the 6 packed",
        ),
        ("start", ValueError, r"must start at 0.*got tensor\(\[1, 6\]\); pass the borders"),
        ("falling", ValueError, r"never fall"),
        ("no borders", ValueError, r"must start at 0"),
        ("key end", ValueError, r"cu_seqlens_k \(the borders of key"),
        ("segments", ValueError, r"cu_seqlens has 2 segments and cu_seqlens_k 1"),
        ("causal cross", NotImplementedError, r"no causal attention between query and key segments of different"),
    ],
)
def test_what_does_not_fit_is_refused(what, error, sentence):
    ragged_attention(*bad("nothing"))
    with pytest.raises(error, match=f"hf_compile::ragged_attention: .*{sentence}"):
        ragged_attention(*bad(what))


# ---- CUDA's kernels, by stand-in


@pytest.mark.parametrize(
    ("device_type", "dtype", "head_dim", "value_dim", "available", "kernel"),
    [
        ("cuda", torch.bfloat16, 80, 80, ("torch_varlen", "flash_attn"), "torch_varlen"),
        ("cuda", torch.float16, 64, 64, ("flash_attn", "torch_varlen"), "torch_varlen"),
        ("cuda", torch.float16, 64, 64, ("flash_attn",), "flash_attn"),
        ("cuda", torch.float16, 64, 64, (), "batched"),
        ("cuda", torch.float32, 64, 64, ("torch_varlen", "flash_attn"), "batched"),
        ("cuda", torch.bfloat16, 64, 96, ("torch_varlen", "flash_attn"), "batched"),
        ("cuda", torch.bfloat16, 20, 20, ("torch_varlen", "flash_attn"), "batched"),
        ("cuda", torch.bfloat16, 320, 320, ("torch_varlen", "flash_attn"), "batched"),
        ("cpu", torch.bfloat16, 64, 64, ("torch_varlen", "flash_attn"), "batched"),
        ("xpu", torch.bfloat16, 64, 64, ("torch_varlen", "flash_attn"), "batched"),
    ],
)
def test_the_kernel_follows_from_device_dtype_and_dims(device_type, dtype, head_dim, value_dim, available, kernel):
    assert choose_kernel(device_type, dtype, head_dim, value_dim, available) == kernel


def test_a_cpu_has_no_variable_length_kernel():
    assert attention._fused_kernels(torch.device("cpu")) == {}


def by_rows(query, key, value, cu_q, cu_k, scale, is_causal):
    """A differentiable stand-in's inside: rows (total, heads, dim) in and out, as the kernels have it."""
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert all(t.dim() == 3 and t.stride(-1) == 1 for t in (query, key, value))
    query, key, value = (t.transpose(0, 1).unsqueeze(0) for t in (query, key, value))
    lengths, key_lengths = (torch.diff(c).tolist() for c in (cu_q, cu_k))
    return loop(query, key, value, lengths, scale, is_causal, key_lengths)[0]


def varlen_attn(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    return_aux=None,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
    seqused_k=None,
    block_table=None,
    num_splits=None,
):
    assert return_aux is seqused_k is block_table is num_splits is None
    assert window_size in {(-1, -1), (-1, 0)}
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert max_q >= int(torch.diff(cu_seq_q).max())
    assert max_k >= int(torch.diff(cu_seq_k).max())
    return by_rows(query, key, value, cu_seq_q, cu_seq_k, scale, window_size == (-1, 0))


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    """The signature of flash_attn 2.8."""
    assert dropout_p == 0.0
    assert window_size == (-1, -1)
    assert max_seqlen_q >= int(torch.diff(cu_seqlens_q).max())
    assert max_seqlen_k >= int(torch.diff(cu_seqlens_k).max())
    return by_rows(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal)


STAND_INS = {"torch_varlen": varlen_attn, "flash_attn": flash_attn_varlen_func}


def test_the_stand_in_has_the_signature_of_torch():
    real = pytest.importorskip("torch.nn.attention.varlen").varlen_attn

    def shape(function):
        return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]

    assert shape(varlen_attn) == shape(real)


@pytest.mark.parametrize("name", STAND_INS)
@both_causal
@pytest.mark.parametrize("key_heads", [4, 2], ids=["mha", "gqa"])
def test_a_fused_kernel_gets_the_right_arguments(monkeypatch, name, is_causal, key_heads):
    used = []
    monkeypatch.setattr(attention, "_fused_kernels", lambda device: {name: STAND_INS[name]})
    monkeypatch.setattr(attention, "choose_kernel", lambda *args: used.append(args) or name)
    monkeypatch.setattr(attention, "_lengths", lambda *args: pytest.fail("lengths were read from the device"))
    lengths = [5, 2, 0, 5]
    qkv = [torch.randn(1, heads, 8, 12).transpose(2, 3).requires_grad_() for heads in (4, key_heads, key_heads)]
    got = ragged_attention(*qkv, borders(lengths, torch.int64), 0.3, is_causal)
    want = loop(*qkv, lengths, 0.3, is_causal)
    assert used == [("cpu", torch.float32, 8, 8, {name: STAND_INS[name]})]
    assert got.is_contiguous()
    assert relative(got, want) <= 2e-6
    got_grads, want_grads = (torch.autograd.grad(out.sum(), qkv) for out in (got, want))
    for got_grad, want_grad in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(got_grad, want_grad, rtol=0, atol=2e-6)


def test_what_a_fused_kernel_cannot_do_goes_to_sdpa(monkeypatch):
    monkeypatch.setattr(attention, "_fused_kernels", lambda device: {"torch_varlen": None})
    monkeypatch.setattr(attention, "choose_kernel", lambda *args: "torch_varlen")
    cu_seqlens = borders([2, 3])
    assert ragged_attention(*packed(0), borders([0]), 0.3, False).shape == (1, 0, 4, 8)
    qkv = packed(5)
    got = ragged_attention(*qkv, cu_seqlens, 0.3, True, cu_seqlens.clone())  # equal, but that takes reading to know
    assert relative(got, loop(*qkv, [2, 3], 0.3, True)) <= 2e-6


# ---- the attention function


class Layer(nn.Module):
    """A packed attention layer as in Qwen2.5-VL."""

    def __init__(self, heads=4, dim=8, is_causal=False):
        super().__init__()
        self.heads, self.scaling, self.is_causal, self.num_key_value_groups = heads, dim**-0.5, is_causal, 1
        self.qkv = nn.Linear(heads * dim, 3 * heads * dim)

    def rows(self, hidden):
        qkv = self.qkv(hidden).unflatten(1, (3, self.heads, -1)).permute(1, 0, 2, 3).unbind(0)
        return [t.transpose(0, 1).unsqueeze(0) for t in qkv]

    def forward(self, hidden, cu_seqlens, cu_seqlens_k=None):
        options = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens if cu_seqlens_k is None else cu_seqlens_k}
        out, weights = ragged_attention_forward(
            self, *self.rows(hidden), attention_mask=None, scaling=self.scaling, max_length_q=7, **options
        )
        assert weights is None
        return out.flatten(2).squeeze(0)

    def loop(self, hidden, cu_seqlens):
        out = loop(*self.rows(hidden), torch.diff(cu_seqlens).tolist(), self.scaling, self.is_causal)
        return out.flatten(2).squeeze(0)


@pytest.fixture
def registered():
    undo = register_attention()
    yield
    undo()


@pytest.fixture
def sdpa(registered):
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward


@pytest.mark.parametrize("scaling", [None, 0.2])
@pytest.mark.parametrize(
    ("argument", "attribute", "causal"), [(None, True, True), (None, False, False), (False, True, 0)]
)
def test_scale_and_causality_follow_flash_attention(scaling, argument, attribute, causal):
    qkv = packed(9)
    options = {"scaling": scaling, "is_causal": argument, "cu_seq_lens_q": borders([4, 5])}
    got, _ = ragged_attention_forward(SimpleNamespace(is_causal=attribute), *qkv, None, **options)
    assert relative(got, loop(*qkv, [4, 5], 8**-0.5 if scaling is None else scaling, bool(causal))) <= 2e-6


def test_a_layer_must_say_whether_it_is_causal():
    with pytest.raises(AttributeError, match="is_causal"):
        ragged_attention_forward(SimpleNamespace(), *packed(3), None, cu_seq_lens_q=borders([3]))


@pytest.mark.smoke
@pytest.mark.parametrize("case", ["plain", "causal", "gqa", "mask", "mask and borders", "position bias"])
def test_what_is_not_packed_is_sdpa(sdpa, case):
    layer = SimpleNamespace(is_causal=case == "causal", num_key_value_groups=2 if case == "gqa" else 1)
    key_heads = 2 if case == "gqa" else 4
    qkv = [torch.randn(2, heads, 6, 8) for heads in (4, key_heads, key_heads)]
    mask = torch.rand(2, 1, 6, 6) > 0.2 if "mask" in case else None
    options = {"cu_seq_lens_q": borders([2, 4])} if "borders" in case else {}
    if case == "position bias":
        if "position_bias" not in inspect.signature(sdpa).parameters:
            pytest.skip("this Transformers has no position_bias")
        options["position_bias"] = torch.randn(1, 4, 6, 6)
    got, weights = ragged_attention_forward(layer, *qkv, mask, scaling=0.2, **options)
    assert weights is None
    assert torch.equal(got, sdpa(layer, *qkv, mask, scaling=0.2, **options)[0])


def test_dropout_reaches_sdpa_and_is_refused_over_packed_sequences(sdpa):
    layer, qkv = SimpleNamespace(is_causal=False), packed(6)
    got = []
    for function in (ragged_attention_forward, sdpa):
        torch.manual_seed(1)
        got.append(function(layer, *qkv, None, dropout=0.5)[0])
    assert torch.equal(*got)
    with pytest.raises(ValueError, match=r"SimpleNamespace: .* no dropout, got 0.5; set it to 0 .* encoder.eval\(\)"):
        ragged_attention_forward(layer, *qkv, None, dropout=0.5, cu_seq_lens_q=borders([6]))


@pytest.mark.parametrize("option", ["sliding_window", "softcap", "s_aux", "position_bias"])
def test_an_option_that_changes_numbers_is_refused(option):
    layer, qkv, cu_seqlens = SimpleNamespace(is_causal=False), packed(6), borders([6])
    ragged_attention_forward(layer, *qkv, None, cu_seq_lens_q=cu_seqlens, position_ids=None, **{option: None})
    with pytest.raises(NotImplementedError, match=f"has no {option}; choose another"):
        ragged_attention_forward(layer, *qkv, None, cu_seq_lens_q=cu_seqlens, **{option: 4})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_casts_what_sdpa_casts(dtype, low):
    layer, lengths = SimpleNamespace(is_causal=False), [3, 4, 3]
    qkv = packed(10, dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", low):
        got, _ = ragged_attention_forward(layer, *qkv, None, scaling=0.3, cu_seq_lens_q=borders(lengths))
        want = loop(*qkv, lengths, 0.3, False)
        got_grads, want_grads = (torch.autograd.grad(out.float().sum(), qkv) for out in (got, want))
        direct = ragged_attention(*qkv, borders(lengths), 0.3, False)
        direct_grads = torch.autograd.grad(direct.sum(), qkv)
    assert got.dtype == want.dtype == (low if dtype == torch.float32 else dtype)
    assert torch.equal(got, want)
    for got_grad, want_grad in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(got_grad, want_grad, rtol=0, atol=4 * torch.finfo(got.dtype).eps)
    # The operator itself keeps what it gets, as its fake implementation says.
    plain = loop(*qkv, lengths, 0.3, False)
    for got, want in zip((direct, *direct_grads), (plain, *torch.autograd.grad(plain.sum(), qkv)), strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got, want, rtol=0, atol=2e-6)


# ---- one graph


def count_graphs(function, calls, backend="eager", fullgraph=True, check=None):
    """Compile with every varying dim marked, call, and return the number of graphs."""
    graphs = []
    inner = torch._dynamo.lookup_backend(backend)

    def counting(graph_module, example_inputs):
        graphs.append(graph_module)
        return inner(graph_module, example_inputs)

    compiled = torch.compile(function, backend=counting, fullgraph=fullgraph)
    with fx_config.patch(backed_size_oblivious=True, use_duck_shape=False):
        for args in calls:
            for tensor in args:
                torch._dynamo.mark_dynamic(tensor, 0)
            out = compiled(*args)
            if check is not None:
                check(out, *args)
    return len(graphs)


SIZES = [[5], [4, 4], [3, 4, 4, 2], [2, 0, 3], [16, 16, 8, 16, 16, 8], [1]]


@pytest.mark.parametrize("mode", ["inference", "autocast", "copied borders"])
def test_one_graph_serves_every_number_and_length_of_segments(mode):
    layer = Layer(is_causal=True)
    calls = [(torch.randn(sum(lengths), 32), borders(lengths)) for lengths in SIZES]
    if mode == "copied borders":
        calls = [(*args, args[1].clone()) for args in calls]

    def check(out, hidden, cu_seqlens, *_):
        torch.testing.assert_close(out, layer.loop(hidden, cu_seqlens), rtol=0, atol=2e-6)

    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        assert count_graphs(layer, calls, check=check) == 1
        if mode == "inference":  # where the models' own loop needs many
            assert count_graphs(layer.loop, calls[:3], fullgraph=False) > 3


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_graph_also_trains(backend):
    layer = Layer()
    calls = [(torch.randn(sum(lengths), 32, requires_grad=True), borders(lengths)) for lengths in SIZES[:-1]]

    def check(out, hidden, cu_seqlens):
        want = layer.loop(hidden, cu_seqlens)
        torch.testing.assert_close(out, want, rtol=0, atol=2e-6)
        weight = torch.randn_like(out)
        sources = (hidden, *layer.parameters())
        got_grads, want_grads = (torch.autograd.grad(result, sources, weight) for result in (out, want))
        for got_grad, want_grad in zip(got_grads, want_grads, strict=True):
            torch.testing.assert_close(got_grad, want_grad, rtol=1e-5, atol=1e-5)

    assert count_graphs(layer, calls, backend=backend, check=check) == 1


def test_an_error_of_the_operator_comes_out_of_a_compiled_graph():
    layer = Layer()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    with torch.inference_mode(), pytest.raises(ValueError, match="end at the 7 packed tokens"):
        compiled(torch.randn(7, 32), borders([3, 3]))


# ---- registration


@pytest.fixture
def alone():
    """Set aside the registrations of models that other tests left compiled."""
    others = set(attention._holders)
    attention._holders.clear()
    attention._undo.close()
    yield
    if others:
        register_attention()
        attention._holders.clear()
        attention._holders.update(others)


def mappings():
    from transformers import AttentionInterface, AttentionMaskInterface

    return [dict(interface._global_mapping) for interface in (AttentionInterface, AttentionMaskInterface)]


@pytest.mark.smoke
@pytest.mark.usefixtures("alone")
def test_the_last_undo_restores_the_mappings():
    before = mappings()
    first = register_attention()
    during = mappings()
    assert during[0] == {**before[0], ATTENTION_NAME: ragged_attention_forward}
    assert during[1] == {**before[1], ATTENTION_NAME: before[1]["sdpa"]}
    second = register_attention()
    first()
    first()  # counts once
    assert mappings() == during
    second()
    assert mappings() == before


@pytest.mark.usefixtures("alone")
def test_an_entry_that_was_there_comes_back(monkeypatch):
    from transformers import AttentionInterface

    monkeypatch.setitem(AttentionInterface._global_mapping, ATTENTION_NAME, len)
    before = mappings()
    undo = register_attention()
    assert mappings() != before
    undo()
    assert mappings() == before


@pytest.mark.usefixtures("alone")
def test_threads_may_register_at_once():
    before, seen = mappings(), []
    barrier = threading.Barrier(8)

    def work():
        barrier.wait()
        for _ in range(50):
            undo = register_attention()
            seen.append(ATTENTION_NAME in mappings()[0])
            undo()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 400
    assert mappings() == before


@pytest.mark.smoke
def test_padding_of_a_layer_that_is_not_packed_is_kept(registered):
    from transformers import CLIPVisionConfig
    from transformers.masking_utils import create_bidirectional_mask

    config, embeds = CLIPVisionConfig(), torch.randn(2, 5, 8)
    padding = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    masks = {}
    for name in ("sdpa", ATTENTION_NAME, "unknown_flash"):
        config._attn_implementation = name
        masks[name] = create_bidirectional_mask(config, embeds, padding)
    assert torch.equal(masks[ATTENTION_NAME], masks["sdpa"])
    assert masks["unknown_flash"] is None  # what a name without masks gets


def qwen2_5_vl():
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel as Encoder

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 32}
    config = Encoder.config_class(depth=2, fullatt_block_indexes=[1], **sizes)
    grid = torch.tensor([[1, 8, 12], [2, 4, 6]])
    return Encoder(config), (torch.randn(int(grid.prod(-1).sum()), 3 * 2 * 14 * 14),), {"grid_thw": grid}


def pixtral():
    from transformers import PixtralVisionConfig, PixtralVisionModel

    if "cu_seq_lens_q" not in inspect.getsource(PixtralVisionModel.forward):
        pytest.skip("this Transformers gives Pixtral's attention no borders")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    encoder = PixtralVisionModel(PixtralVisionConfig(image_size=64, patch_size=16, **sizes))
    return encoder, (torch.randn(2, 3, 64, 64),), {"image_sizes": torch.tensor([[64, 32], [48, 64]])}


@pytest.mark.smoke
@pytest.mark.parametrize("family", [qwen2_5_vl, pixtral])
def test_encoders_give_the_same_numbers_as_with_sdpa(registered, family):
    encoder, args, kwargs = family()
    encoder.eval()
    outs, calls = {}, {}
    with torch.inference_mode():
        for name in ("sdpa", ATTENTION_NAME):
            encoder.config._attn_implementation = name
            with torch.profiler.profile() as profile:
                outs[name] = encoder(*args, **kwargs)
            calls[name] = sum(e.count for e in profile.key_averages() if e.key == "hf_compile::ragged_attention")
    assert calls == {"sdpa": 0, ATTENTION_NAME: 2}
    first = {name: out if isinstance(out, torch.Tensor) else out[0] for name, out in outs.items()}
    assert relative(first[ATTENTION_NAME], first["sdpa"]) <= 2e-6


def qwen3_omni_audio():
    from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as modeling

    config = modeling.Qwen3OmniMoeAudioEncoderConfig(
        d_model=32,
        encoder_layers=2,
        encoder_attention_heads=2,
        encoder_ffn_dim=64,
        num_mel_bins=16,
        n_window=50,  # the code knows no other
        n_window_infer=200,
        downsample_hidden_size=8,
        output_dim=16,
    )
    return modeling.Qwen3OmniMoeAudioEncoder(config).eval()


@pytest.mark.smoke
def test_segments_are_only_what_the_eager_code_takes_for_segments():
    """In some releases the audio encoder computes borders, and attends across them unless flash attention is on."""
    encoder = qwen3_omni_audio()
    calls = [(torch.randn(16, sum(lengths)), torch.tensor(lengths)) for lengths in ([60], [70, 416, 233], [428, 80])]
    with torch.no_grad():
        want = [encoder(sound, feature_lens=lengths).last_hidden_state for sound, lengths in calls]
        hf_compile.compile_mm_encoder(encoder, compilation_config={"backend": "eager"})
        got = [encoder(sound, feature_lens=lengths).last_hidden_state for sound, lengths in calls]
    assert all(map(torch.equal, got, want))


def test_importing_it_is_light():
    code = "import sys, hf_compile.attention\nprint({'torch._dynamo', 'transformers'} & set(sys.modules))"
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=300)
    assert (done.stdout.strip(), done.returncode) == ("set()", 0), done.stderr


def test_a_dense_call_before_registration_says_what_to_do(monkeypatch):
    monkeypatch.setattr(attention, "_sdpa_attention_forward", None)
    with pytest.raises(RuntimeError, match=r"is not registered; call hf_compile.attention.register_attention\(\)"):
        ragged_attention_forward(SimpleNamespace(is_causal=False), *packed(3), None)
