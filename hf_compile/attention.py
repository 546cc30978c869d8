"""Attention over packed sequences as one operator that a full graph can hold.

Packed encoders lay images, windows or audio chunks end to end on one token axis and give the borders as `cu_seqlens`.
Without flash attention they loop over the lengths in Python, a graph break per block. `hf_compile::ragged_attention`
keeps the lengths out of the graph; `register_attention` makes it known to Transformers.
"""

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "ATTENTION_NAME",
    "RAGGED_REPLACES",
    "choose_kernel",
    "ragged_attention",
    "ragged_attention_forward",
    "register_attention",
]

ATTENTION_NAME = "hf_compile_flash_ragged"  # models take their own cu_seqlens branch when the name contains "flash"
RAGGED_REPLACES = ("sdpa", "eager", None)
"""Attention implementations that loop over packed segments; any other was chosen on purpose and stays."""

# Equal segments that do not touch share a call only if they are small, since that copies them: on a CPU (2 cores,
# torch 2.13) a call costs as much as copying 64 KiB of query with its key, value and result. On an accelerator it
# costs a launch and the copies are cheap, so there they always share.
_COPY_LIMIT = 1 << 16

Run = tuple[int, int, int]  # adjacent equal segments: their number, the query tokens of each, the key tokens of each
Kernel = Callable[..., Any]


def choose_kernel(
    device_type: str, dtype: torch.dtype, head_dim: int, value_dim: int, available: Collection[str]
) -> str:
    """Return `"torch_varlen"` or `"flash_attn"` where `available` has it and it takes such heads, else `"batched"`."""
    half_on_cuda = device_type == "cuda" and dtype in (torch.float16, torch.bfloat16)
    if half_on_cuda and head_dim == value_dim and head_dim % 8 == 0 and head_dim <= 256:
        return next((name for name in ("torch_varlen", "flash_attn") if name in available), "batched")
    return "batched"


@functools.cache
def _fused_kernels(device: torch.device) -> dict[str, Kernel]:
    kernels: dict[str, Kernel] = {}
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
        with contextlib.suppress(ImportError):
            from torch.nn.attention.varlen import varlen_attn

            kernels["torch_varlen"] = varlen_attn
        with contextlib.suppress(ImportError):
            from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found,unused-ignore]

            kernels["flash_attn"] = flash_attn_varlen_func
    return kernels


def _attend_fused(
    query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float, is_causal: bool
) -> Tensor | None:
    """Return what a variable-length kernel computes, or None where none serves these tensors."""
    kernels = _fused_kernels(query.device)
    name = choose_kernel(query.device.type, query.dtype, query.shape[3], value.shape[3], kernels)
    if name not in kernels or not (query.shape[2] and key.shape[2]) or (is_causal and cu_k is not cu_q):
        return None
    if name == "torch_varlen":
        window, grouped = (-1, 0 if is_causal else -1), query.shape[1] != key.shape[1]
        options = {"scale": scale, "window_size": window, "enable_gqa": grouped}
    else:
        options = {"softmax_scale": scale, "causal": is_causal}
    rows = [t[0].transpose(0, 1) for t in (query, key, value)]
    rows = [t if t.stride(2) == 1 else t.contiguous() for t in rows]
    borders = [c.to(query.device, torch.int32) for c in (cu_q, cu_k)]
    # The longest length only sizes the launch. All tokens are a safe bound; reading the true one would make the host
    # wait for the device in every layer.
    out: Tensor = kernels[name](*rows, *borders, query.shape[2], key.shape[2], **options)
    return out.unsqueeze(0)


def _sdpa(query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool) -> Tensor:
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=scale, enable_gqa=grouped)


def _lengths(cu_seqlens: Tensor, total: int, name: str) -> list[int]:
    bounds = cu_seqlens.tolist()
    lengths = [end - start for start, end in itertools.pairwise(bounds)]
    if not bounds or bounds[0] != 0 or bounds[-1] != total or min(lengths, default=0) < 0:
        raise ValueError(
            f"hf_compile::ragged_attention: {name} must start at 0, never fall and end at the {total} packed tokens, "
            f"got {cu_seqlens}; pass the borders of exactly the segments that were packed."
        )
    return lengths


def _runs(query: Tensor, key: Tensor, cu_q: Tensor, cu_k: Tensor, is_causal: bool) -> list[Run]:
    lengths_q = _lengths(cu_q, query.shape[2], "cu_seqlens (the borders of query)")
    lengths_k = _lengths(cu_k, key.shape[2], "cu_seqlens_k (the borders of key; if not given, cu_seqlens)")
    if len(lengths_q) != len(lengths_k):
        raise ValueError(
            f"hf_compile::ragged_attention: cu_seqlens has {len(lengths_q)} segments and cu_seqlens_k "
            f"{len(lengths_k)}; give every query segment its key segment, an empty one if need be."
        )
    if is_causal and lengths_q != lengths_k:
        raise NotImplementedError(
            "hf_compile::ragged_attention: no causal attention between query and key segments of different lengths; "
            "use another attention implementation for this layer."
        )
    pairs = (pair for pair in zip(lengths_q, lengths_k, strict=True) if pair != (0, 0))
    return [(len(list(equal)), *pair) for pair, equal in itertools.groupby(pairs)]


def _over_batches(
    attend: Callable[..., tuple[Tensor, ...]], by_query: list[Tensor], by_key: list[Tensor], runs: list[Run]
) -> list[Tensor]:
    """Call `attend` on batches of equal segments and lay its results out again.

    Tensors come in as (1, heads, total, dim), reach and leave `attend` as (segments, heads, length, dim), and are
    returned as (1, total, heads, dim), contiguous.
    """
    sides = [1] * len(by_query) + [2] * len(by_key)  # where in a run the length of each tensor stands
    pieces = [
        tensor[0].transpose(0, 1).split_with_sizes([run[0] * run[side] for run in runs])
        for tensor, side in zip(by_query + by_key, sides, strict=True)
    ]
    first = by_query[0]
    row_bytes = first.shape[1] * first.shape[3] * first.element_size()
    batches: dict[Any, list[int]] = {}
    for index, (count, *lengths) in enumerate(runs):
        alone = first.device.type == "cpu" and count * lengths[0] * row_bytes > _COPY_LIMIT
        batches.setdefault((*lengths, index if alone else None), []).append(index)

    results: list[tuple[Tensor, ...]] = [()] * len(runs)
    for batch in batches.values():
        count = sum(runs[index][0] for index in batch)
        inputs = []
        for piece, side in zip(pieces, sides, strict=True):
            rows = piece[batch[0]] if len(batch) == 1 else torch.cat([piece[index] for index in batch])
            inputs.append(rows.view(count, runs[batch[0]][side], *rows.shape[1:]).transpose(1, 2))
        parts = [
            out.transpose(1, 2).flatten(0, 1).split_with_sizes([runs[index][0] * out.shape[2] for index in batch])
            for out in attend(*inputs)
        ]
        for index, result in zip(batch, zip(*parts, strict=True), strict=True):
            results[index] = result
    whole = [part[0] if len(part) == 1 else torch.cat(part) for part in zip(*results, strict=True)]
    return [rows.unsqueeze(0).contiguous() for rows in whole]


def _no_autocast(device_type: str) -> contextlib.AbstractContextManager[Any]:
    """Keep results in the dtype of the inputs, as the fake implementations promise."""
    enabled = torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if enabled else contextlib.nullcontext()


def _check(query: Tensor, key: Tensor, value: Tensor, *borders: Tensor) -> None:
    if any(t.dim() != 4 or t.shape[0] != 1 for t in (query, key, value)):
        problem = "query, key and value must be (1, heads, total, dim); pack the batch along the token axis"
    elif not key.shape[1] or query.shape[1] % key.shape[1]:
        problem = "the heads of key must divide the heads of query; repeat them before the call"
    elif key.shape[:3] != value.shape[:3] or query.shape[3] != key.shape[3]:
        problem = "key and value need equal heads and tokens, query and key equal dims; check the projections"
    elif len({query.dtype, key.dtype, value.dtype}) > 1:
        problem = "query, key and value must have one dtype; cast them alike (rotary embeddings often upcast two)"
    elif any(c.dim() != 1 or c.dtype not in (torch.int32, torch.int64) for c in borders):
        problem = "cu_seqlens must be int32 or int64 of shape (segments + 1,); cast or flatten it"
    else:
        return
    got = ", ".join(f"{t.dtype} {tuple(t.shape)}" for t in (query, key, value, *borders))
    raise ValueError(f"hf_compile::ragged_attention: {problem}. Got {got}.")


@torch.library.custom_op("hf_compile::ragged_attention", mutates_args=())
def ragged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    is_causal: bool,
    cu_seqlens_k: Tensor | None = None,
) -> Tensor:
    """Attend within each segment of packed sequences.

    Half precision on CUDA goes to a variable-length flash kernel and nothing is read back from the device, so borders
    that do not fit the tokens go unnoticed there. All else goes to SDPA, one call per run of equal segments.

    Args:
        query: (1, heads, total, dim).
        key: (1, key heads, key total, dim); key heads divide heads.
        value: (1, key heads, key total, value dim).
        cu_seqlens: (segments + 1,), int32 or int64: borders in tokens, from 0 to total. A segment may be empty.
        scale: factor on the scores before the softmax.
        is_causal: let a token see only itself and those before it in its segment.
        cu_seqlens_k: the borders in key and value where they are others (cross attention).

    Returns:
        (1, total, heads, value dim), contiguous, in the dtype of query.

    Raises:
        ValueError: shapes, dtypes or borders do not fit each other.
        NotImplementedError: causal attention between segments of different lengths; or a second derivative.
    """
    cu_k = cu_seqlens if cu_seqlens_k is None else cu_seqlens_k
    _check(query, key, value, cu_seqlens, cu_k)
    with _no_autocast(query.device.type):
        fused = _attend_fused(query, key, value, cu_seqlens, cu_k, scale, is_causal)
        if fused is not None:
            return fused.contiguous()
        runs = _runs(query, key, cu_seqlens, cu_k, is_causal)
        if not runs:
            return query.new_empty(1, 0, query.shape[1], value.shape[3])
        return _over_batches(lambda q, k, v: (_sdpa(q, k, v, scale, is_causal),), [query], [key, value], runs)[0]


@ragged_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


@torch.library.custom_op("hf_compile::ragged_attention_backward", mutates_args=())
def _ragged_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    is_causal: bool,
    cu_seqlens_k: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value; attention is computed again rather than kept from the forward."""
    cu_k = cu_seqlens if cu_seqlens_k is None else cu_seqlens_k

    def attend(grad: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (t.detach().requires_grad_() for t in inputs)
        return torch.autograd.grad(_sdpa(q, k, v, scale, is_causal), (q, k, v), grad)

    # A kernel runs below autograd; leaving inference mode is torch's public way to get above it again.
    with _no_autocast(query.device.type), torch.inference_mode(False):
        q, k, v = (t.detach().requires_grad_() for t in (query, key, value))
        fused = _attend_fused(q, k, v, cu_seqlens, cu_k, scale, is_causal)
        if fused is not None:
            grads = [g.transpose(1, 2).contiguous() for g in torch.autograd.grad(fused, (q, k, v), grad.contiguous())]
        elif runs := _runs(query, key, cu_seqlens, cu_k, is_causal):
            q, k, v = (t.detach() for t in (query, key, value))
            grads = _over_batches(attend, [grad.transpose(1, 2), q], [k, v], runs)
        else:
            grads = [t.new_empty(1, 0, t.shape[1], t.shape[3]) for t in (query, key, value)]
    dq, dk, dv = (g.transpose(1, 2) for g in grads)
    return dq, dk, dv


@_ragged_attention_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (
        t.new_empty(t.shape[0], t.shape[2], t.shape[1], t.shape[3]).transpose(1, 2) for t in (query, key, value)
    )
    return dq, dk, dv


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    query, key, value, cu_seqlens, ctx.scale, ctx.is_causal, cu_seqlens_k = inputs
    ctx.save_for_backward(query, key, value, cu_seqlens, cu_seqlens_k)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, cu_seqlens_k = ctx.saved_tensors
    grads = _ragged_attention_backward(grad, *tensors, ctx.scale, ctx.is_causal, cu_seqlens_k)
    return (*grads, None, None, None, None)


def _refuse_second_backward(ctx: Any, *grads: Tensor) -> None:
    raise NotImplementedError(
        "hf_compile::ragged_attention has no second derivative; differentiate twice through the eager model, with "
        "the attention implementation 'eager'."
    )


ragged_attention.register_autograd(_backward, setup_context=_save_for_backward)
_ragged_attention_backward.register_autograd(_refuse_second_backward)


_sdpa_attention_forward: Callable[..., tuple[Tensor, None]] | None = None  # Transformers' own, known once registered
_lock = threading.RLock()
_holders: set[object] = set()  # registrations that are not undone
_undo = contextlib.ExitStack()


def ragged_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as an attention function of Transformers, packed sequences through `ragged_attention`.

    Without `cu_seq_lens_q`, or with a mask, this is Transformers' `sdpa`. Autocast casts what it would cast there.

    Args:
        module: the attention layer; its `is_causal` holds where the argument is None, as in flash attention.
        query: (1, heads, total, dim), with key and value as in `ragged_attention`.
        key: (1, key heads, key total, dim).
        value: (1, key heads, key total, value dim).
        attention_mask: any mask that `sdpa` takes.
        dropout: probability, 0 for packed sequences.
        scaling: factor on the scores; None is `dim ** -0.5`.
        is_causal: let a token see only itself and those before it in its segment.
        cu_seq_lens_q: (segments + 1,), borders in tokens.
        cu_seq_lens_k: those of key and value; None is `cu_seq_lens_q`.
        max_length_q: ignored, as is `max_length_k`, so that no graph depends on them.
        max_length_k: see `max_length_q`.
        **kwargs: options of other attention functions; refused where they would change a packed result.

    Returns:
        (1, total, heads, value dim), and None in place of attention weights.

    Raises:
        ValueError: dropout over packed sequences, or what `ragged_attention` raises.
        NotImplementedError: an option that packed sequences do not have here.
        RuntimeError: a call that is not packed, before `register_attention`.
    """
    if cu_seq_lens_q is None or attention_mask is not None:
        if _sdpa_attention_forward is None:
            raise RuntimeError(f"{ATTENTION_NAME} is not registered; call hf_compile.attention.register_attention().")
        kwargs |= {"dropout": dropout, "scaling": scaling, "is_causal": is_causal}
        return _sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    where = f"{type(module).__name__}: attention over packed sequences"
    if dropout:
        raise ValueError(f"{where} has no dropout, got {dropout}; set it to 0 in the config, or call encoder.eval().")
    asked = [name for name in ("sliding_window", "softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if asked:
        raise NotImplementedError(f"{where} has no {', '.join(asked)}; choose another attention implementation.")
    device_type = query.device.type
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)  # float64 stays, as wherever autocast lowers
        query, key, value = (t if t.dtype == torch.float64 else t.to(dtype) for t in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    causal = bool(module.is_causal if is_causal is None else is_causal)
    cu_seqlens_k = None if cu_seq_lens_k is cu_seq_lens_q else cu_seq_lens_k
    return ragged_attention(query, key, value, cu_seq_lens_q, scale, causal, cu_seqlens_k), None


def register_attention() -> Callable[[], None]:
    """Make `ATTENTION_NAME` an attention implementation of Transformers.

    It comes with the masks of `sdpa`: without any, Transformers drops the padding mask of layers that are not packed.

    Returns:
        The undo, good for one call. Registrations are counted: the last undo restores Transformers' mappings.
    """
    global _sdpa_attention_forward
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    entries = ((AttentionInterface, ragged_attention_forward), (AttentionMaskInterface, sdpa_mask))
    holder = object()
    with _lock:
        if not _holders:
            _sdpa_attention_forward = sdpa_attention_forward
            for interface, function in entries:
                mapping = interface._global_mapping  # there is a public way in, and none out
                before = {name: known for name, known in mapping.items() if name == ATTENTION_NAME}
                _undo.callback(mapping.update, before)
                _undo.callback(mapping.pop, ATTENTION_NAME, None)
                interface.register(ATTENTION_NAME, function)
        _holders.add(holder)

    def unregister() -> None:
        with _lock:
            if holder not in _holders:
                return
            _holders.remove(holder)
            if not _holders:
                _undo.close()

    return unregister
