"""What helpers return before a graph is what they return in eager, and what the batch is can be told on a copy."""

from __future__ import annotations

import importlib
import sys
import threading

import pytest
import torch
import transformers
from packaging.version import Version
from torch import nn

from hf_compile.attention import register_attention
from hf_compile.census.cases import build, cases
from hf_compile.inputs import leaf_tensors
from hf_compile.precompute import BatchProbe, Precompute, find_helpers

HAS_HELPERS = Version(transformers.__version__) >= Version("5.9")
needs_helpers = pytest.mark.skipif(not HAS_HELPERS, reason="this Transformers computes such things inside the encoder")


@pytest.fixture(scope="module", autouse=True)
def _attention():
    """As while a model is compiled: the copy names our attention, where an encoder is packed."""
    undo = register_attention()
    yield
    undo()


@pytest.fixture(scope="module")
def encoder(request):
    return build(cases()[request.param])


def encoders(*names):
    return pytest.mark.parametrize("encoder", names, indirect=True)


# ---- which helpers there are


@pytest.mark.parametrize(
    ("name", "helpers"),
    [
        (
            "qwen2_5_vl",
            {"get_vision_position_ids", "get_vision_attention_seqlens", "get_vision_window_index", "get_max_seqlen"},
        ),
        (
            "qwen3_vl",
            {
                "get_vision_position_ids",
                "get_vision_attention_seqlens",
                "get_vision_interpolation_indices_and_weights",
                "get_max_seqlen",
            },
        ),
        (
            "qwen2_5_omni.audio",
            {
                "chunk_and_pad_features",
                "get_audio_cu_seqlens",
                "get_max_seqlen",
                "get_pool_indices",
                "get_valid_indices",
            },
        ),
        ("clip", set()),
    ],
)
@pytest.mark.smoke
def test_helpers_are_found_in_the_code(name, helpers):
    found = find_helpers(build(cases()[name]))
    if not HAS_HELPERS:
        assert found == set()
    elif name == "qwen3_vl":  # get_max_seqlen belongs to the text model's side of the file in some versions
        assert helpers - {"get_max_seqlen"} <= found <= helpers
    else:
        assert found == helpers


def test_an_encoder_without_helpers_needs_no_copy():
    precompute = Precompute(build(cases()["clip"]))
    assert not precompute
    assert precompute.run((torch.zeros(1),), {"anything": 1}) == {}


# ---- what they return

GRIDS = {
    "square": [[1, 8, 8]],
    "wide": [[1, 4, 12]],
    "two images": [[1, 8, 4], [1, 12, 8]],
    "video": [[3, 4, 8]],
    "video and image": [[2, 8, 8], [1, 4, 4]],
    "many": [[1, 4, 4]] * 5,
}
grids = pytest.mark.parametrize("grid", [torch.tensor(grid) for grid in GRIDS.values()], ids=GRIDS)


def flat(grid):
    return torch.zeros(int(grid.prod(-1).sum()), 2 * 3 * 8 * 8)


def longest(borders):
    return int(borders.diff().max())


def expected_of_qwen2_5_vl(encoder, grid):
    from transformers import vision_utils

    window_index, windows = vision_utils.get_vision_window_index(grid, 2, 32, 8)
    segments = vision_utils.get_vision_cu_seqlens(grid)
    return {
        "position_ids": vision_utils.get_vision_position_ids(grid, 2),
        "cu_seqlens": segments,
        "max_seqlen": longest(segments),
        "window_index": window_index,
        "cu_window_seqlens": windows,
        "max_window_seqlen": longest(windows),
    }


def expected_of_qwen3_vl(encoder, grid):
    from transformers import vision_utils

    indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
        grid, 4, mode="bilinear", align_corners=True, spatial_merge_size=2
    )
    segments = vision_utils.get_vision_cu_seqlens(grid)
    return {
        "interp_indices": indices,
        "interp_weights": weights,
        "position_ids": vision_utils.get_vision_position_ids(grid, 2),
        "cu_seqlens": segments,
        "max_seqlen": longest(segments),
    }


EXPECTED = {"qwen2_5_vl": expected_of_qwen2_5_vl, "qwen3_vl": expected_of_qwen3_vl}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype, name
            assert torch.equal(found[name], value), name
        else:
            assert found[name] == value, name


@needs_helpers
@grids
@pytest.mark.parametrize(("encoder", "name"), [(name, name) for name in EXPECTED], indirect=["encoder"], ids=EXPECTED)
def test_results_are_those_of_the_helpers(encoder, name, grid):
    found = Precompute(encoder).run((flat(grid),), {"grid_thw": grid})
    assert_same(found, EXPECTED[name](encoder, grid))
    assert_same(Precompute(encoder).run((), {"hidden_states": flat(grid), "grid_thw": grid}), found)


@needs_helpers
@encoders("qwen2_5_omni.audio")
@pytest.mark.parametrize("lengths", [[20], [33, 150, 20], [150]], ids=str)
def test_results_of_an_audio_encoder_with_its_numbers(encoder, lengths):
    """`padded_feature` is made of sound, which the copy has no numbers of: the helper is given the real one."""
    audio = sys.modules[type(encoder).__module__]
    lengths = torch.tensor(lengths)
    sound = torch.randn(16, int(lengths.sum()), generator=torch.Generator().manual_seed(0))
    padded, chunks = audio.chunk_and_pad_features(sound, lengths, encoder.n_window)
    segments = audio.get_audio_cu_seqlens(chunks)
    found = Precompute(encoder).run((), {"input_features": sound, "feature_lens": lengths})
    expected = {
        "padded_feature": padded,
        "chunk_lengths": chunks,
        "valid_indices": audio.get_valid_indices(chunks),
        "pool_indices": audio.get_pool_indices(lengths),
        "cu_seqlens": segments,
        "max_seqlen": longest(segments),
    }
    assert_same(found, expected)


@needs_helpers
@encoders("qwen2_5_vl")
def test_one_precompute_serves_call_after_call(encoder):
    """The second call stops at the last helper of the first one; nothing of it comes from there."""
    precompute = Precompute(encoder)
    for grid in map(torch.tensor, (*GRIDS.values(), *reversed(GRIDS.values()))):
        found = precompute.run((), {"hidden_states": flat(grid), "grid_thw": grid})
        assert_same(found, expected_of_qwen2_5_vl(encoder, grid))


@needs_helpers
@encoders("qwen2_5_vl")
@pytest.mark.parametrize("key", ["position_ids", "cu_seqlens", "max_window_seqlen"])
def test_what_the_user_gives_is_not_computed(encoder, key):
    grid = torch.tensor(GRIDS["two images"])
    plain = expected_of_qwen2_5_vl(encoder, grid)
    own = plain[key] + 1 if key == "max_window_seqlen" else plain[key].clone()
    kwargs = {"hidden_states": flat(grid), "grid_thw": grid, key: own}
    precompute = Precompute(encoder)
    for _ in range(2):
        found = precompute.run((), kwargs)
        assert_same(found, {name: value for name, value in plain.items() if name != key})
        assert list(kwargs) == ["hidden_states", "grid_thw", key]  # helpers pop from a dict of their own
        assert kwargs[key] is own
    assert_same(precompute.run((), {"hidden_states": flat(grid), "grid_thw": grid}), plain)


@needs_helpers
@encoders("qwen2_5_vl")
def test_half_of_a_pair_is_computed_with_the_other_half(encoder):
    """The window helper takes both of its keys or none."""
    grid = torch.tensor(GRIDS["square"])
    plain = expected_of_qwen2_5_vl(encoder, grid)
    given = {"hidden_states": flat(grid), "grid_thw": grid, "window_index": plain["window_index"]}
    found = Precompute(encoder).run((), given)
    complete = {**plain, **found, **given}
    assert_same({name: complete[name] for name in plain}, plain)


# ---- what is left alone


@needs_helpers
@encoders("qwen2_5_vl", "qwen3_vl", "qwen2_5_omni.audio")
def test_encoder_hooks_and_modeling_file_are_not_touched(encoder):
    called = []
    handles = [
        encoder.register_forward_pre_hook(lambda *_: called.append("pre")),
        next(encoder.children()).register_forward_hook(lambda *_: called.append("inner")),
    ]
    files = {cls.__module__: dict(vars(sys.modules[cls.__module__])) for cls in map(type, encoder.modules())}
    files["transformers.vision_utils"] = dict(vars(importlib.import_module("transformers.vision_utils")))
    before = {path: {**vars(module)} for path, module in encoder.named_modules()}
    classes = [type(module) for module in encoder.modules()]
    options, values = encoder.config.to_dict(), [value.clone() for value in encoder.state_dict().values()]
    try:
        precompute = Precompute(encoder)
        grid = torch.tensor(GRIDS["video"])
        lengths = torch.tensor([40])
        audio = {"input_features": torch.zeros(16, 40), "feature_lens": lengths}
        is_audio = hasattr(encoder, "n_window")
        given = audio if is_audio else {"hidden_states": flat(grid), "grid_thw": grid}
        assert precompute.run((), given)
        assert called == []
        assert {name: dict(vars(sys.modules[name])) for name in files} == files
        assert [type(module) for module in encoder.modules()] == classes
        assert {path: {**vars(module)} for path, module in encoder.named_modules()} == before
        assert encoder.config.to_dict() == options
        assert all(map(torch.equal, encoder.state_dict().values(), values))
        assert all(each.device.type == "cpu" for each in encoder.state_dict().values())
    finally:
        for handle in handles:
            handle.remove()


@needs_helpers
@encoders("qwen2_5_vl")
def test_threads_do_not_mix_their_results(encoder):
    """Several threads share one `Precompute`, each with grids of its own."""
    precompute = Precompute(encoder)
    wrong: list[object] = []
    start = threading.Barrier(4)

    def work(grid):
        grid = torch.tensor(grid)
        expected = expected_of_qwen2_5_vl(encoder, grid)
        start.wait()
        for _ in range(8):
            try:
                assert_same(precompute.run((), {"hidden_states": flat(grid), "grid_thw": grid}), expected)
            except Exception as error:  # noqa: BLE001  told by the assertion below
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(grid,)) for grid in list(GRIDS.values())[:4]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@needs_helpers
@encoders("qwen2_5_vl")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_results_are_on_the_device_of_the_grid(encoder):
    grid = torch.tensor(GRIDS["two images"], device="cuda")
    found = Precompute(encoder).run((), {"hidden_states": flat(grid).cuda(), "grid_thw": grid})
    wanted = expected_of_qwen2_5_vl(encoder, grid)
    tensors = {name: value for name, value in wanted.items() if isinstance(value, torch.Tensor)}
    assert {name: found[name].device for name in tensors} == {name: value.device for name, value in tensors.items()}


# ---- helpers of a stranger


def borders(lengths, kwargs=None):
    if kwargs is not None and (found := kwargs.pop("borders", None)) is not None:
        return found
    return torch.tensor([0, *lengths.tolist()]).cumsum(0)


def order(lengths, kwargs=None):
    if kwargs is not None and (found := kwargs.pop("order", None)) is not None:
        return found
    return torch.argsort(lengths)


def threshold(values, kwargs=None):
    if kwargs is not None and (found := kwargs.pop("threshold", None)) is not None:
        return found
    return values.max().item()


class Stranger(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, lengths, sort=False, layers_first=False, **kwargs):
        starts = borders(lengths, kwargs=kwargs)
        if layers_first:
            return x * threshold(self.linear(x), kwargs=kwargs)
        if sort:
            starts = starts[order(lengths, kwargs=kwargs)]
        return self.linear(x).sum() + starts.sum()


LENGTHS = torch.tensor([3, 1, 2])


def test_a_helper_of_layers_is_not_reached():
    """`threshold` reads what the layers compute, which the copy does not have; the one before it is known."""
    found = Precompute(Stranger()).run((torch.ones(6, 4), LENGTHS), {"layers_first": True})
    assert found.keys() == {"borders"}
    assert found["borders"].tolist() == [0, 3, 4, 6]


def test_a_call_that_reaches_more_helpers_than_the_first():
    precompute = Precompute(Stranger())
    assert precompute.run((torch.ones(6, 4), LENGTHS), {}).keys() == {"borders"}
    found = precompute.run((torch.ones(6, 4), LENGTHS), {"sort": True})
    assert found.keys() == {"borders", "order"}


class Raises(Stranger):
    def forward(self, x, lengths, **kwargs):
        borders(lengths, kwargs=kwargs)
        wanted = {}
        return wanted[self.linear(x).device.type == "cpu"]  # as a table of kernels by device


def test_an_error_of_the_copy_alone_is_not_the_users():
    """Eager would get "cpu" here; the copy has no data, and the table has no entry for that."""
    assert Precompute(Raises()).run((torch.ones(6, 4), LENGTHS), {}).keys() == {"borders"}


# ---- what the batch is


def inputs_of_layer(encoder, path, arguments, given):
    seen = {}
    handle = encoder.get_submodule(path).register_forward_pre_hook(
        lambda _, args, kwargs: seen.update(leaf_tensors(arguments, args, kwargs)), with_kwargs=True
    )
    with torch.no_grad():
        encoder(**given)
    handle.remove()
    return seen


PROBED = {
    # what doubles with the batch, as name -> dim; the tables of positions stay
    "moonshine": (
        "layers.0",
        ("hidden_states", "attention_mask", "position_ids", "cache", "use_cache", "position_embeddings"),
        lambda batch: {"input_values": torch.randn(batch, 4000)},
        {"hidden_states": 0},
    ),
    "glmasr": (
        "layers.0",
        ("hidden_states", "position_embeddings"),
        lambda batch: {"input_features": torch.randn(batch, 16, 40)},
        {"hidden_states": 0},
    ),
    # sequence first
    "bridgetower": (
        "visual.transformer.resblocks.0",
        ("hidden_state", "attention_mask"),
        lambda batch: {"image": torch.randn(batch, 3, 32, 32)},
        {"hidden_state": 1},
    ),
    "clip": (
        "encoder.layers.0",
        ("hidden_states", "attention_mask"),
        lambda batch: {"pixel_values": torch.randn(batch, 3, 32, 32)},
        {"hidden_states": 0},
    ),
}


@pytest.mark.smoke
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", PROBED)
def test_what_grows_with_the_batch(name, batch):
    path, arguments, make, grows = PROBED[name]
    encoder = build(cases()[name])
    if name == "clip" and not hasattr(encoder, "encoder"):  # Transformers 5.0 has it one level down
        path = f"vision_model.{path}"
    seen = inputs_of_layer(encoder, path, arguments, make(batch))
    probe = BatchProbe(encoder)
    for given in ((make(batch), {}), ({}, make(batch))):  # by keyword, by position
        args, kwargs = tuple(given[0].values()), given[1]
        doubled = probe.run(args, kwargs, path, arguments)
        assert doubled.keys() == seen.keys()
        for argument, tensor in seen.items():
            wanted = [2 * size if dim == grows.get(argument) else size for dim, size in enumerate(tensor.shape)]
            assert list(doubled[argument].shape) == wanted, argument
    if name in ("moonshine", "glmasr"):  # at batch 1 dim 0 of the table and of what grows look alike
        assert seen["position_embeddings[0]"].shape[0] == 1


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        return self.second(x * float(x.max()))


def test_nothing_where_the_copy_cannot_tell():
    module = Reads()
    probe, x = BatchProbe(module), torch.ones(2, 4)
    assert {name: tuple(each.shape) for name, each in probe.run((x,), {}, "first", ("x",)).items()} == {"x": (4, 4)}
    assert probe.run((x,), {}, "second", ("x",)) == {}  # behind a value that is read
    assert probe.run((), {"x": None}, "first", ("x",)) == {}  # no tensor
    assert probe.run((torch.tensor(1.0),), {}, "first", ("x",)) == {}  # nothing that could be a batch
    assert not module.first._forward_pre_hooks


def test_nothing_once_the_encoder_is_gone_or_cannot_be_copied():
    module = Reads()
    probe = BatchProbe(module)
    del module
    assert probe.run((torch.ones(2, 4),), {}, "first", ("x",)) == {}
    module = Reads()
    module.lock = threading.Lock()  # cannot be copied
    assert BatchProbe(module).run((torch.ones(2, 4),), {}, "first", ("x",)) == {}


def test_the_probe_leaves_the_encoder_alone():
    encoder = build(cases()["bridgetower"])
    path, arguments, make, _ = PROBED["bridgetower"]
    called = []
    handle = encoder.get_submodule(path).register_forward_pre_hook(lambda *_: called.append("hook"))
    before = {path: {**vars(module)} for path, module in encoder.named_modules()}
    assert BatchProbe(encoder).run((), make(1), path, arguments)
    assert called == []
    assert {path: {**vars(module)} for path, module in encoder.named_modules()} == before
    handle.remove()
