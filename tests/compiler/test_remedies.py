"""What is done so that one graph serves every size: each remedy by its name, its numbers and its undo."""

from __future__ import annotations

import gc
import importlib
import threading
from collections.abc import Mapping
from types import SimpleNamespace

import pytest
import torch
import transformers
from packaging.version import Version
from torch import nn
from torch._dynamo.variables.torch import tracing_state_functions
from transformers import masking_utils
from transformers.utils import logging

import hf_compile
from hf_compile.census.cases import build, cases, draws
from hf_compile.report import KEPT_MASKS

from .tiny import Counting, clip

TRANSFORMERS = Version(transformers.__version__)
REAL = cases()


def real(name):
    if Version("5.24") > TRANSFORMERS:
        pytest.skip(f"{name} of Transformers 5.24")
    return build(REAL[name])


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    members = value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else ()
    return [tensor for member in members for tensor in tensors(member)]


@torch.no_grad()
def check(model, calls, *, graphs=1, atol=0.0, **options):
    """Compile, and return the regions by name: each made its graphs in the first call, and numbers are eager's."""
    backend = Counting()
    want = [tensors(model(**call)) for call in calls]
    hf_compile.compile_mm_encoder(model, compilation_config={"backend": backend, **options})
    counts = []
    for call, expected in zip(calls, want, strict=True):
        got = tensors(model(**call))
        assert len(got) == len(expected)
        for left, right in zip(got, expected, strict=True):
            torch.testing.assert_close(left, right, rtol=0, atol=atol, equal_nan=True)
        counts.append(backend.graphs)
    (encoder,) = hf_compile.status(model).encoders
    for region in encoder.regions:
        assert (region.state, region.eager_calls, region.graphs) == ("compiled", 0, graphs), region.reason
    assert backend.graphs == graphs * len(encoder.regions)
    if graphs == 1:
        assert counts == [counts[0]] * len(calls)
    return SimpleNamespace(**{region.class_name: region for region in encoder.regions}, encoder=encoder)


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


# ---- a shortcut for images of the native size


def pictures(*shapes):
    return [{"pixel_values": numbers(batch, 3, *size)} for batch, *size in shapes]


NATIVE_FIRST = ((1, 32, 32), (3, 48, 64), (1, 16, 40), (5, 32, 32), (2, 64, 64), (1, 64, 16))
IS_TRACING = "torch.jit.is_tracing is true while tracing: the code leaves out its shortcut for one size"


@pytest.mark.smoke
def test_shortcut_of_the_native_size():
    calls = [{**call, "interpolate_pos_encoding": True} for call in pictures(*NATIVE_FIRST)]
    found = check(clip(), calls)
    assert IS_TRACING in found.CLIPVisionEmbeddings.remedies
    assert IS_TRACING not in found.CLIPEncoderLayer.remedies


@pytest.mark.smoke
def test_torch_alone_takes_the_shortcut_into_its_graph():
    """The count above can fail."""
    embeddings = next(each for each in clip().modules() if type(each).__name__ == "CLIPVisionEmbeddings")
    backend = Counting()
    compiled = torch.compile(embeddings, backend=backend, dynamic=True)
    with torch.no_grad():
        for call in pictures(*NATIVE_FIRST):
            compiled(call["pixel_values"], interpolate_pos_encoding=True)
    torch.compiler.reset()
    assert backend.graphs > 1


def test_shortcut_where_the_first_image_is_not_native():
    """Step-3: crops come first, the whole image, which has the native size of 64, later."""
    found = check(real("step3p7"), pictures((1, 40, 40), (3, 64, 64), (1, 40, 40), (2, 64, 64), (1, 64, 64)))
    assert IS_TRACING in found.Step3p7VisionEmbeddings.remedies


def test_is_tracing_answers_others_as_before():
    """Only our traces get another answer, and only Dynamo does: plain Python that runs meanwhile does not.

    One trace works, another fails.
    """
    answers = tracing_state_functions()
    before = dict(answers)
    seen: list[tuple[bool, bool]] = []

    def backend(graph_module, example_inputs):
        seen.append((torch.jit.is_tracing(), answers[torch.jit.is_tracing]))
        if len(seen) > 1:
            raise RuntimeError("no kernel for this graph")
        return graph_module.forward

    def asks(x):
        return x + 1 if torch.jit.is_tracing() else x - 1

    model = clip()
    hf_compile.compile_mm_encoder(model, compilation_config={"backend": backend})
    with torch.no_grad():
        model(**pictures((1, 32, 32))[0], interpolate_pos_encoding=True)
    assert any(answer for _, answer in seen)  # it was asked for
    assert not any(plain for plain, _ in seen)
    assert dict(answers) == before
    assert torch.equal(torch.compile(asks, backend="eager")(torch.ones(2)), torch.zeros(2))
    assert not torch.jit.is_tracing()


# ---- padding masks


def masked(*calls):
    """Images for Idefics: batch, rows and columns in patches, and "none", "full" or "padded"."""
    made = []
    for batch, rows, columns, kind in calls:
        mask = torch.ones(batch, rows, columns, dtype=torch.bool)
        if kind == "padded":
            mask[-1, -1, :] = False
            mask[-1, :, -1] = False
        call = {"pixel_values": numbers(batch, 3, 8 * rows, 8 * columns)}
        made.append(call if kind == "none" else {**call, "patch_attention_mask": mask})
    return made


MASKED = {
    "without first": ((1, 4, 4, "none"), (3, 4, 6, "padded"), (2, 8, 3, "full"), (1, 2, 5, "padded")),
    "padded first": ((2, 4, 4, "padded"), (1, 8, 8, "full"), (1, 3, 4, "none"), (4, 2, 7, "padded")),
}


@pytest.fixture
def _plain_masks():
    gc.collect()  # models of other tests that were not undone
    assert not hasattr(masking_utils._ignore_bidirectional_mask_sdpa, "hf_compile_original")


@pytest.mark.smoke
@pytest.mark.usefixtures("_plain_masks")
@pytest.mark.parametrize("kinds", MASKED.values(), ids=MASKED)
def test_padded_and_unpadded_calls_share_a_graph(kinds):
    original = masking_utils._ignore_bidirectional_mask_sdpa
    model = build(REAL["idefics3"])
    found = check(model, masked(*kinds))
    assert found.encoder.remedies == (KEPT_MASKS,)
    assert masking_utils._ignore_bidirectional_mask_sdpa is not original
    hf_compile.uncompile_mm_encoder(model)
    assert masking_utils._ignore_bidirectional_mask_sdpa is original


def test_packed_patches_with_masks():
    model = real("siglip2")
    found = check(model, list(draws(REAL["siglip2"], model, sizes=4)))
    assert found.encoder.remedies == (KEPT_MASKS,)


def test_dropped_masks_are_two_graphs(monkeypatch):
    """The counts above can fail."""
    monkeypatch.setattr("hf_compile.plan.MASK_MAKERS", ())
    model = build(REAL["idefics3"])
    with pytest.raises(AssertionError, match="graph 1 was made for"):
        check(model, masked(*MASKED["padded first"]))


def masks_of(model):
    """Return a list that gets the mask of each call of the first layer, and the undo."""
    layer = next(each for each in model.modules() if type(each).__name__ == "Idefics3EncoderLayer")
    seen: list[object] = []

    def look(_, args, kwargs):
        seen.append(kwargs.get("attention_mask", args[1] if len(args) > 1 else None))

    return seen, layer.register_forward_pre_hook(look, with_kwargs=True)


@pytest.mark.smoke
def test_other_threads_and_models_see_transformers_itself():
    """While a compiled model is in the midst of a call, an eager one of its class runs in another thread."""
    compiled, eager = build(REAL["idefics3"]), build(REAL["idefics3"])
    (call,) = masked((2, 4, 4, "full"))
    ours, _ = masks_of(compiled)
    theirs, _ = masks_of(eager)
    layer = next(each for each in compiled.modules() if type(each).__name__ == "Idefics3EncoderLayer")

    def meanwhile(*_):
        with torch.no_grad():  # a thread has a grad mode of its own
            thread = threading.Thread(target=lambda: eager(**call))
            thread.start()
            thread.join()

    handle = layer.register_forward_pre_hook(meanwhile)
    hf_compile.compile_mm_encoder(compiled, compilation_config={"backend": "eager"})
    with torch.no_grad():
        compiled(**call)
        handle.remove()
        eager(**call)  # the same thread, between calls
        compiled(**call)
    assert all(isinstance(mask, torch.Tensor) for mask in ours)
    assert (len(ours), theirs) == (2, [None, None])


@pytest.mark.smoke
@pytest.mark.usefixtures("_plain_masks")
def test_masks_are_kept_until_the_last_model_is_undone():
    original = masking_utils._ignore_bidirectional_mask_sdpa
    models = [build(REAL["idefics3"]) for _ in range(2)]
    for model in models:
        hf_compile.compile_mm_encoder(model, compilation_config={"backend": "eager"})
    hf_compile.uncompile_mm_encoder(models[0])
    assert masking_utils._ignore_bidirectional_mask_sdpa is not original
    hf_compile.uncompile_mm_encoder(models[1])
    assert masking_utils._ignore_bidirectional_mask_sdpa is original


def test_a_call_that_raises_leaves_no_mask_kept():
    compiled, eager = build(REAL["idefics3"]), build(REAL["idefics3"])
    hf_compile.compile_mm_encoder(compiled, compilation_config={"backend": "eager"})
    (call,) = masked((2, 4, 4, "full"))
    with torch.no_grad():
        with pytest.raises((RuntimeError, ValueError, IndexError)):
            compiled(pixel_values=call["pixel_values"], patch_attention_mask=torch.ones(2, 3, 9, dtype=torch.bool))
        seen, _ = masks_of(eager)
        eager(**call)
    assert seen == [None]


# ---- attention that is causal where nothing is padded

PHI = ((1, 4, 4, "none"), (3, 4, 4, "padded"), (2, 4, 4, "full"), (1, 4, 4, "padded"), (5, 4, 4, "none"))


def test_causal_where_nothing_is_padded():
    """Kept masks would make it full; the patch gives the causal mask that None stands for."""
    model = real("phi4_mm.vision")
    calls = masked(*PHI)
    with torch.no_grad():
        want = [model(**call).last_hidden_state for call in calls]
        padding = torch.ones(1, 4, 4, dtype=torch.bool)
        padding[0, -1, -1] = False
        full = model(**{**calls[0], "patch_attention_mask": padding}).last_hidden_state
    assert (want[0] - full)[:, :8].abs().max() > 1e-3  # else nothing here is tested
    found = check(model, calls)
    assert found.encoder.remedies == ()
    assert [patch.partition(":")[0] for patch in found.encoder.patches] == ["phi4_multimodal_vision"]
    hf_compile.uncompile_mm_encoder(model)
    assert not any(module._forward_pre_hooks for module in model.modules())
    with torch.no_grad():
        assert all(torch.equal(model(**call).last_hidden_state, w) for call, w in zip(calls, want, strict=True))


# ---- attention that pads to whole blocks where the length needs it


@pytest.mark.parametrize("mask", [True, False], ids=["mask", "no mask"])
def test_padding_to_whole_blocks(mask):
    """Lengths that are whole blocks and others, batch 1 first: what is padded in addition reaches no frame."""
    model = real("granite_speech5")
    calls = []
    for batch, length in ((1, 40), (3, 43), (2, 64), (1, 9), (4, 16)):
        call = {"input_features": numbers(batch, length, 64)}
        if mask:
            call["attention_mask"] = torch.arange(length)[None] < torch.tensor([length] + [5] * (batch - 1))[:, None]
        calls.append(call)
    found = check(model, calls, atol=5e-6)  # the last product has more rows, and may be added up in another order
    assert [patch.partition(":")[0] for patch in found.encoder.patches] == ["granite_speech5_encoder"]
    hf_compile.uncompile_mm_encoder(model)
    original = importlib.import_module(type(model).__module__).GraniteSpeech5EncoderAttention
    assert {type(layer.self_attn) for layer in model.layers} == {original}


# ---- what is passed to a layer beside the hidden states


class Layer(nn.Module):
    def __init__(self, index=0):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.layer_idx = index

    def forward(self, hidden):
        return hidden + self.linear(hidden)


class Tower(nn.Module):
    """Hands each layer what `given` makes of the pixels."""

    def __init__(self, layer, given=lambda pixels: {}):
        super().__init__()
        torch.manual_seed(0)
        self.given = given
        self.layers = nn.ModuleList(layer(index) for index in range(3))
        self.eval()

    def forward(self, pixel_values):
        hidden = pixel_values
        for layer in self.layers:
            hidden = layer(hidden, **self.given(pixel_values))
        return hidden


def tokens(*shapes):
    return [{"pixel_values": numbers(*shape, 8)} for shape in shapes]


SIZES = tokens((1, 6), (3, 10), (1, 12), (5, 4), (2, 8))


class Rows(Layer):
    def forward(self, hidden, rows, scale=1, size=(1, 1)):
        batch, length, width = hidden.shape
        grid = hidden.reshape(batch, rows, length // rows, width)
        return (grid + self.linear(grid).mean(1, keepdim=True) * scale).flatten(1, 2) * (size[0] + size[1])


def test_integers_that_vary():
    def given(pixels):
        length = pixels.shape[1]
        return {"rows": 2 if length in (6, 8) else length // 2, "scale": length, "size": (length, 2 * length)}

    check(Tower(Rows, given), SIZES)


@pytest.mark.parametrize("first", [0, 1])
def test_small_integers_do_not_specialise(first):
    """Torch fixes 0 and 1 where it may."""
    by_length = {6: first, 10: 7, 12: 1 - first, 4: 3, 8: first}

    class Shifted(Layer):
        def forward(self, hidden, by):
            return self.linear(hidden) * (by + 1)

    check(Tower(Shifted, lambda pixels: {"by": by_length[pixels.shape[1]]}), SIZES)


def test_integers_of_hunyuan():
    """Its merger is given height and width of an image as Python integers."""
    grids = ([[1, 8, 8]], [[1, 4, 12]], [[1, 8, 4], [1, 12, 8]], [[1, 4, 4], [1, 16, 6], [1, 6, 10]])
    calls = []
    for grid in map(torch.tensor, grids):
        calls.append({"pixel_values": numbers(int(grid.prod(-1).sum()), 192), "grid_thw": grid})
    check(real("hunyuan_vl"), calls)


class Rotary(Layer):
    def forward(self, hidden, position_embeddings):
        cos, sin = position_embeddings
        return hidden * cos + self.linear(hidden) * sin


def test_tables_for_every_row_of_the_batch():
    """At batch 1 a table (1, length, width) looks like hidden states; it stays 1 where those grow."""

    def given(pixels):
        positions = torch.arange(pixels.shape[1], dtype=pixels.dtype, device=pixels.device)
        table = positions[None, :, None].expand(1, -1, 8).contiguous()
        return {"position_embeddings": (table.cos(), table.sin())}

    found = check(Tower(Rotary, given), SIZES)
    remedy = "dim 0 stays 1 at any batch: position_embeddings[0], position_embeddings[1]"
    assert remedy in found.Rotary.remedies


@pytest.mark.parametrize("name", ["glmasr", "moonshine"])
def test_rotary_tables_of_real_encoders(name):
    model = real(name)
    key, shapes = {
        "glmasr": ("input_features", ((1, 16, 40), (3, 16, 60), (1, 16, 44), (5, 16, 40))),
        "moonshine": ("input_values", ((1, 4000), (3, 9000), (1, 5000), (5, 4000))),
    }[name]
    found = check(model, [{key: numbers(*shape)} for shape in shapes])
    assert found.encoder.regions[0].instances == len(model.layers)  # `layer_idx` splits none of them


class Cached(Layer):
    def forward(self, hidden, cache=None):
        if cache is not None:
            hidden = cache.update(hidden, self.layer_idx)
        return hidden + self.linear(hidden)


class Deeper(Layer):
    def forward(self, hidden):
        return hidden + self.linear(hidden) * (self.layer_idx + 1)


def test_a_place_in_a_cache_splits_no_layers():
    found = check(Tower(Cached), SIZES)
    assert found.Cached.instances == 3
    found = check(Tower(Deeper), SIZES[:2])  # here it is a number that counts
    assert (len(found.encoder.regions), found.Deeper.instances) == (3, 1)


logger = logging.get_logger("transformers.a_stranger")


class Warns(Layer):
    def forward(self, hidden, old=None):
        if old is not None:
            logger.warning_once("`old` is deprecated")
        logger.warning("this layer is new")
        logger.info(f"called with {hidden.shape}")
        return self.linear(hidden)


def test_warnings_in_traced_code():
    check(Tower(Warns, lambda pixels: {"old": pixels.clone()}), SIZES)


class Scaled(Layer):
    def forward(self, hidden, scale):
        return self.linear(hidden) * scale


@pytest.mark.parametrize("odd", [(10, 4), (6, 12)], ids=["later", "first"])
def test_strides_of_dims_of_size_one(odd):
    """Torch calls (batch, 1, width) contiguous whatever the stride of its middle dim says; a guard would not."""

    def given(pixels):
        scale = torch.ones(pixels.shape[0], 1, 8)
        if pixels.shape[1] in odd:
            scale = torch.as_strided(scale.clone(), scale.shape, (8, 64, 1))
            assert scale.is_contiguous()
        return {"scale": scale}

    check(Tower(Scaled, given), SIZES)


@pytest.mark.parametrize("odd", [(10, 4), (6, 12)], ids=["later", "first"])
def test_views_and_slices(odd):
    def given(pixels):
        batch, length, _ = pixels.shape
        if length in odd:
            return {"scale": torch.ones(batch, length + 1, 16)[:, 1:, ::2]}
        return {"scale": torch.ones(batch, length, 8)}

    check(Tower(Scaled, given), SIZES)


@pytest.mark.parametrize("name", ["aimv2", "ovis2", "convnext", "omniasr"])
def test_the_order_of_dims_in_memory_stays(name):
    """Inputs that were transposed: a contiguous copy would be added up in another order, and the last bits differ."""
    model = real(name)
    found = check(model, [dict(each) for each in draws(REAL[name], model, sizes=4)])
    remedies = {remedy for region in found.encoder.regions for remedy in region.remedies}
    assert not any("copied" in remedy for remedy in remedies)


def test_a_transposed_input_after_a_dense_one():
    """It is brought into the order of the first graph: no further one."""

    def given(pixels):
        batch, length, _ = pixels.shape
        scale = torch.full((batch, length, 8), 2.0)
        return {"scale": scale.transpose(1, 2).contiguous().transpose(1, 2) if length in (10, 4) else scale}

    check(Tower(Scaled, given), SIZES)


class Careless(Layer):
    def forward(self, hidden, **kwargs):
        return hidden + self.linear(hidden)


class Careful(Layer):
    def forward(self, hidden, sizes=(), **kwargs):
        return self.linear(hidden) * sum(sizes)


def lists(pixels):
    return {"sizes": list(range(pixels.shape[1])), "names": ["a"] * pixels.shape[0]}


def test_lists_that_are_never_read():
    check(Tower(Careless, lists), SIZES)


def test_lists_that_are_never_read_beside_a_keyword_of_transformers():
    check(Tower(Careless, lambda pixels: {**lists(pixels), "output_attentions": False}), SIZES)


def test_lists_that_come_later_cost_no_graph():
    """A layer with a hook takes the same path; the region has its graph, and keeps it."""
    tower = Tower(Careless, lambda pixels: lists(pixels) if pixels.shape[1] > 6 else {})
    for layer in tower.layers:
        layer.register_forward_hook(lambda *_: None)
    check(tower, SIZES)


def test_lists_that_are_read_arrive():
    """The count above can fail: here each length is a graph."""
    model = Tower(Careful, lambda pixels: {"sizes": list(range(pixels.shape[1]))})
    with torch.no_grad():
        want = [model(**call) for call in SIZES]
        hf_compile.compile_mm_encoder(model, compilation_config={"backend": "eager"})
        assert all(torch.equal(model(**call), expected) for call, expected in zip(SIZES, want, strict=True))
    (region,) = hf_compile.status(model).encoders[0].regions
    assert region.graphs > 1 or region.eager_calls


# ---- the whole encoder as one graph

GRIDS = (
    [[1, 8, 8]],
    [[1, 4, 12]],
    [[1, 8, 4], [1, 12, 8]],
    [[3, 4, 8]],
    [[2, 8, 8], [1, 4, 4]],
    [[1, 4, 4]] * 4,
    [[1, 16, 6]],
    [[1, 8, 8]],
)


@pytest.mark.parametrize(
    ("name", "key", "row"),
    [
        ("qwen2_5_vl", "hidden_states", (384,)),
        ("qwen3_vl", "hidden_states", (384,)),
        ("kimi_k25", "pixel_values", (3, 8, 8)),
    ],
)
def test_whole_encoder(name, key, row):
    calls = []
    for grid in map(torch.tensor, GRIDS):
        calls.append({key: numbers(int(grid.prod(-1).sum()), *row), "grid_thw": grid})
    found = check(real(name), calls, granularity="encoder")
    (region,) = found.encoder.regions
    (remedy,) = [each for each in region.remedies if each.startswith("computed before the graph")]
    assert "cu_seqlens" in remedy
    assert "position_ids" in remedy


def test_whole_encoder_given_half_of_a_pair():
    """Eager computes the pair anew where one of it is missing."""
    from transformers.vision_utils import get_vision_window_index

    calls = []
    for grid in map(torch.tensor, GRIDS[:1]):
        window_index, _ = get_vision_window_index(grid, 2, 32, 8)
        patches = numbers(int(grid.prod(-1).sum()), 384)
        calls.append({"hidden_states": patches, "grid_thw": grid, "window_index": window_index})
    check(real("qwen2_5_vl"), calls, granularity="encoder")
