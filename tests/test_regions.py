"""Which modules become regions, and which of them share one graph. Nothing runs here: all is on the meta device."""

import importlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hf_compile import CompilationConfig, ignore_torch_compile, support_torch_compile
from hf_compile.regions import choose_regions, reads_cu_seqlens


@pytest.fixture(autouse=True)
def _on_the_meta_device():
    with torch.device("meta"):
        yield


def build(model, name, **options):
    cls = getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), name)
    return cls(cls.config_class(**options))


def groups(encoder, **options):
    granularity, _, chosen = choose_regions(encoder, CompilationConfig(**options))
    return granularity, [(group.class_name, group.role, len(group.modules)) for group in chosen]


@pytest.mark.parametrize(
    ("model", "name", "expected"),
    [
        pytest.param(
            "siglip",
            "SiglipVisionModel",
            [
                ("SiglipVisionEmbeddings", "part", 1),
                ("SiglipEncoderLayer", "block", 12),
                ("SiglipMultiheadAttentionPoolingHead", "part", 1),
            ],
            marks=pytest.mark.smoke,
        ),
        pytest.param(
            "qwen2_5_vl",
            "Qwen2_5_VisionTransformerPretrainedModel",
            [
                ("Qwen2_5_VisionPatchEmbed", "part", 1),
                ("Qwen2_5_VLVisionBlock", "block", 32),
                ("Qwen2_5_VLPatchMerger", "part", 1),
            ],
            marks=pytest.mark.smoke,
        ),
        # one group of plain layers, one of gated
        (
            "mllama",
            "MllamaVisionModel",
            [("MllamaVisionEncoderLayer", "block", 32), ("MllamaVisionEncoderLayer", "block", 8)],
        ),
        # the mergers of deepstack norm after the shuffle, the last one before it
        (
            "qwen3_vl",
            "Qwen3VLVisionModel",
            [
                ("Qwen3VLVisionPatchEmbed", "part", 1),
                ("Qwen3VLVisionBlock", "block", 27),
                ("Qwen3VLVisionPatchMerger", "part", 1),
                ("Qwen3VLVisionPatchMerger", "block", 3),
            ],
        ),
        ("whisper", "WhisperEncoder", [("WhisperEncoderLayer", "block", 4)]),
        # windows in eight layers, global attention in four
        (
            "sam",
            "SamVisionModel",
            [
                ("SamPatchEmbeddings", "part", 1),
                ("SamVisionLayer", "block", 8),
                ("SamVisionLayer", "block", 4),
                ("SamVisionNeck", "part", 1),
            ],
        ),
        # four stages of different width: the layers in them repeat, not the stages
        (
            "convnext",
            "ConvNextModel",
            [("ConvNextEmbeddings", "part", 1), *(("ConvNextLayer", "block", count) for count in (3, 3, 9, 3))],
        ),
    ],
)
def test_encoder_of_transformers(model, name, expected):
    assert groups(build(model, name)) == ("block", expected)


def test_stages_are_looked_into():
    swin = build("swin", "SwinModel", depths=[2, 4], num_heads=[2, 4], embed_dim=16, drop_path_rate=0.0)
    granularity, found = groups(swin)
    layers = [count for name, _, count in found if name == "SwinLayer"]
    assert (granularity, layers) == ("block", [1, 1, 2, 2])  # two widths, each with and without a shift
    assert not any(name == "SwinStage" for name, _, _ in found)


def test_paths_and_modules_belong_together():
    encoder = build("mllama", "MllamaVisionModel")
    _, _, chosen = choose_regions(encoder, CompilationConfig())
    assert all(encoder.get_submodule(path) is module for group in chosen for path, module in group.modules.items())
    assert list(chosen[0].modules)[:2] == ["transformer.layers.0", "transformer.layers.1"]
    assert not set(chosen[0].modules) & set(chosen[1].modules)


# ---- a stranger's model


class Layer(nn.Module):
    def __init__(self, width=4, **flags):
        super().__init__()
        self.linear = nn.Linear(width, width)
        vars(self).update({"scale": 1.0, "shape": (1, 2), "unread": 0, **flags})

    def forward(self, x):
        return F.relu(self.linear(x)).reshape(*self.shape, -1) * self.scale


class OtherLayer(Layer):
    def forward(self, x):
        return self.linear(x) + x


class Stranger(nn.Module):
    def __init__(self, **stacks):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 2)
        for name, stack in stacks.items():
            self.add_module(name, stack)
        self.last_norm = nn.LayerNorm(4)

    def forward(self, pixel_values):
        return pixel_values


@pytest.mark.smoke
@pytest.mark.parametrize("container", [nn.ModuleList, lambda layers: nn.Sequential(*layers)])
def test_layers_are_found_under_any_name(container):
    assert groups(Stranger(zoo=container([Layer(), Layer(), Layer()]))) == ("block", [("Layer", "block", 3)])


def test_two_stacks_share_what_is_equal():
    encoder = Stranger(zoo=nn.ModuleList([Layer(), Layer()]), attic=nn.Sequential(OtherLayer(), Layer()))
    assert groups(encoder)[1] == [("Layer", "block", 3), ("OtherLayer", "block", 1)]


@pytest.mark.parametrize(
    ("other", "shared"),
    [
        (lambda: Layer(), True),
        (lambda: Layer(unread=1), True),
        (lambda: OtherLayer(), False),
        (lambda: Layer(width=5), False),
        (lambda: Layer().to(torch.float16), False),
        (lambda: Layer(scale=2.0), False),
        (lambda: Layer(scale=None), False),
        (lambda: Layer(shape=(2, 1)), False),
        (lambda: with_buffer(1), False),
    ],
    ids=["equal", "a flag nobody reads", "class", "width", "dtype", "number", "None", "tuple", "buffer"],
)
def test_what_must_be_equal_to_share_a_graph(other, shared):
    found = groups(Stranger(zoo=nn.ModuleList([Layer(), other()])))[1]
    assert [count for _, _, count in found] == ([2] if shared else [1, 1])


def with_buffer(size):
    layer = Layer()
    layer.register_buffer("table", torch.zeros(size), persistent=False)
    return layer


def test_buffers_of_equal_shape_share():
    assert groups(Stranger(zoo=nn.ModuleList([with_buffer(3), with_buffer(3)])))[1] == [("Layer", "block", 2)]
    assert len(groups(Stranger(zoo=nn.ModuleList([with_buffer(3), with_buffer(4)])))[1]) == 2


def test_parts_pay_for_their_graph():
    class Stem(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution = nn.Conv2d(3, 4, 2)

    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(4, 4)

    encoder = Stranger(patches=Stem(), positions=Positions(), zoo=nn.ModuleList([Layer(), Layer()]))
    assert groups(encoder)[1] == [("Stem", "part", 1), ("Layer", "block", 2)]


def test_without_layers_the_encoder_is_the_region():
    encoder = Stranger()
    granularity, reason, chosen = choose_regions(encoder, CompilationConfig())
    assert (granularity, reason) == ("encoder", "no layer repeats in it")
    assert [(group.role, group.modules) for group in chosen] == [("encoder", {"": encoder})]


@pytest.mark.parametrize(
    ("granularity", "reason", "expected"),
    [
        ("auto", "2 layers repeat", ("block", [("Layer", "block", 2)])),
        ("block", "asked for", ("block", [("Layer", "block", 2)])),
        ("encoder", "asked for", ("encoder", [("Stranger", "encoder", 1)])),
    ],
)
def test_granularity(granularity, reason, expected):
    encoder = Stranger(zoo=nn.ModuleList([Layer(), Layer()]))
    assert groups(encoder, granularity=granularity) == expected
    assert choose_regions(encoder, CompilationConfig(granularity=granularity))[1] == reason


# ---- marks


def marked(decorator):
    @decorator
    class Marked(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.ModuleList([Layer(), Layer()])

        def forward(self, x):
            return x

    return Marked


def test_an_ignored_class_is_looked_through():
    encoder = Stranger(zoo=nn.ModuleList([marked(ignore_torch_compile)(), Layer()]))
    assert groups(encoder)[1] == [("Layer", "block", 3)]
    assert groups(Stranger(zoo=nn.ModuleList([marked(lambda cls: cls)(), Layer()])))[1] == [
        ("Marked", "block", 1),
        ("Layer", "block", 1),
    ]


def test_an_ignored_part_is_looked_through():
    class Stem(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution = nn.Conv2d(3, 4, 2)
            self.mixer = Layer()

    layers = nn.ModuleList([OtherLayer(), OtherLayer()])
    assert groups(Stranger(patches=Stem(), zoo=layers))[1] == [("Stem", "part", 1), ("OtherLayer", "block", 2)]
    ignored = ignore_torch_compile(Stem)
    assert groups(Stranger(patches=ignored(), zoo=layers))[1] == [("Layer", "part", 1), ("OtherLayer", "block", 2)]


def test_no_graph_holds_an_ignored_class():
    @ignore_torch_compile
    class Rotary(nn.Module):
        pass

    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.rotary = Rotary()
            self.attention = Layer()

    encoder = Stranger(zoo=nn.ModuleList([Holder(), Holder()]))
    reason = "no layer repeats in it, and Rotary in it is marked by ignore_torch_compile"
    granularity, words, (group,) = choose_regions(encoder, CompilationConfig())
    assert (granularity, words, group.class_name, group.role) == ("block", reason, "Layer", "part")
    assert list(group.modules) == ["zoo.0.attention", "zoo.1.attention"]
    reason = "asked for, but Rotary in it is marked by ignore_torch_compile"
    assert choose_regions(encoder, CompilationConfig(granularity="encoder")) == ("encoder", reason, [])


def test_an_ignored_encoder_stays_eager_and_its_parts_do_not():
    encoder = type("Ignored", (Stranger,), {})
    ignore_torch_compile(encoder)
    assert groups(encoder()) == ("block", [])
    assert groups(encoder(zoo=nn.ModuleList([Layer(), Layer()]))) == ("block", [("Layer", "block", 2)])


def test_a_marked_class_is_a_region_wherever_it_stands():
    encoder = Stranger(single=marked(support_torch_compile)(), zoo=nn.ModuleList([Layer(), Layer()]))
    assert groups(encoder)[1] == [("Marked", "block", 1), ("Layer", "block", 2)]


@pytest.mark.parametrize(("mode", "expected"), [(3, [("Marked", "block", 1)]), (1, [("Layer", "block", 2)])])
def test_enable_if(mode, expected):
    cls = marked(support_torch_compile(enable_if=lambda config: config.mode == 3))
    assert groups(Stranger(single=cls()), mode=mode)[1] == expected


# ---- packed segments


@pytest.mark.parametrize(
    ("model", "name", "packed"),
    [
        ("qwen2_5_vl", "Qwen2_5_VisionTransformerPretrainedModel", {"Qwen2_5_VLVisionBlock"}),
        ("qwen3_vl", "Qwen3VLVisionModel", {"Qwen3VLVisionBlock"}),
        ("qwen2_5_omni", "Qwen2_5OmniAudioEncoder", {"Qwen2_5OmniAudioEncoderLayer"}),
        ("siglip", "SiglipVisionModel", set()),
        ("whisper", "WhisperEncoder", set()),
    ],
)
def test_reads_cu_seqlens(model, name, packed):
    _, _, chosen = choose_regions(build(model, name), CompilationConfig())
    assert {group.class_name for group in chosen if all(map(reads_cu_seqlens, group.modules.values()))} == packed
