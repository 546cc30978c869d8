"""Models that nobody here has seen: found, compiled as one graph per class, or explained; no hint is given."""

from __future__ import annotations

import inspect
import linecache

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hf_compile

from .test_remedies import Counting

WIDTH = 16


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = Attention(), nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x):
        x = x + self.attention(self.before(x))
        return x + self.mlp(self.after(x))


class Mixer(nn.Module):
    """No attention: convolutions over a map of features."""

    def __init__(self):
        super().__init__()
        self.depthwise = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
        self.pointwise = nn.Conv2d(WIDTH, WIDTH, 1)

    def forward(self, features):
        return features + self.pointwise(F.gelu(self.depthwise(features)))


class Eyes(nn.Module):
    """A stack in a ModuleList."""

    block: type[nn.Module] = Block

    def __init__(self):
        super().__init__()
        self.cut = nn.Conv2d(3, WIDTH, 4, 4)
        self.depths = nn.ModuleList(self.block() for _ in range(3))
        self.polish = nn.LayerNorm(WIDTH)

    def forward(self, pixel_values):
        x = self.cut(pixel_values).flatten(2).transpose(1, 2)
        for block in self.depths:
            x = block(x)
        return self.polish(x)


class Retina(nn.Module):
    """A stack in a Sequential, under a name that no table holds."""

    def __init__(self):
        super().__init__()
        self.lens = nn.Conv2d(3, WIDTH, 4, 4)
        self.rods_and_cones = nn.Sequential(Mixer(), Mixer(), Mixer(), Mixer())

    def forward(self, pixel_values):
        return self.rods_and_cones(self.lens(pixel_values)).flatten(2).transpose(1, 2)


class Ear(nn.Module):
    def __init__(self):
        super().__init__()
        self.drum = nn.Conv1d(8, WIDTH, 3, 2, 1)
        self.cochlea = nn.ModuleList(Block() for _ in range(2))

    def forward(self, input_features):
        x = F.gelu(self.drum(input_features)).transpose(1, 2)
        positions = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)
        x = x + torch.sin(positions)[None, :, None]
        for block in self.cochlea:
            x = block(x)
        return x


class Chatter(nn.Module):
    """Text layers, and a tower whose features stand before the words."""

    def __init__(self, tower):
        super().__init__()
        self.words = nn.Embedding(10, WIDTH)
        self.glimpse = tower
        self.thoughts = nn.ModuleList(Block() for _ in range(2))

    def forward(self, input_ids, pixel_values=None, input_features=None):
        x = self.words(input_ids)
        media = pixel_values if pixel_values is not None else input_features
        x = torch.cat([self.glimpse(media), x], dim=1)
        for block in self.thoughts:
            x = block(x)
        return x


def calls(name, *shapes):
    made = []
    for shape in shapes:
        generator = torch.Generator().manual_seed(sum(shape))
        media = {name: torch.randn(*shape, generator=generator)}
        made.append({"input_ids": torch.randint(10, (shape[0], 5), generator=generator), **media})
    return made


PICTURES = calls("pixel_values", (1, 3, 16, 16), (3, 3, 8, 24), (2, 3, 20, 12))
SOUNDS = calls("input_features", (1, 8, 40), (3, 8, 56), (2, 8, 33))


@torch.no_grad()
def compiled(tower, inputs):
    """Return the report of the tower and the graphs after each call; numbers are eager's."""
    torch.manual_seed(0)
    model, backend = Chatter(tower()).eval(), Counting()
    want = [model(**each) for each in inputs]
    hf_compile.compile_mm_encoder(model, compilation_config={"backend": backend})
    counts = []
    for each, expected in zip(inputs, want, strict=True):
        assert torch.equal(model(**each), expected)
        counts.append(backend.graphs)
    (report,) = hf_compile.status(model).encoders
    assert report.path == "glimpse"
    return report, counts


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("tower", "inputs", "layer", "layers"),
    [(Eyes, PICTURES, "Block", 3), (Retina, PICTURES, "Mixer", 4), (Ear, SOUNDS, "Block", 2)],
    ids=["ModuleList", "Sequential", "audio"],
)
def test_one_graph_over_all_sizes(tower, inputs, layer, layers):
    report, counts = compiled(tower, inputs)
    assert report.modalities == (("audio",) if tower is Ear else ("image",))
    (region,) = report.regions
    assert (region.class_name, region.instances, region.graphs, region.state) == (layer, layers, 1, "compiled")
    assert (region.calls, region.eager_calls) == (layers * len(inputs), 0)
    assert counts == [1, 1, 1]


def test_torch_alone_needs_more():
    """The count above can fail: a first image that is square and alone ties batch, height and width."""
    backend = Counting()
    model = Chatter(Eyes()).eval()
    model.glimpse.compile(backend=backend)
    with torch.no_grad():
        for each in PICTURES:
            model(**each)
    torch.compiler.reset()
    assert backend.graphs > 1


class Picky(Block):
    def forward(self, x):
        loudest = x.abs().amax().item()  # this line is named
        return super().forward(x / loudest) if loudest > 1e6 else super().forward(x) * loudest


class PickyEyes(Eyes):
    block = Picky


@pytest.mark.smoke
def test_what_no_graph_can_hold_is_explained_by_file_and_line():
    report, counts = compiled(PickyEyes, PICTURES)
    (region,) = report.regions
    assert (region.class_name, region.state, region.graphs) == ("Picky", "eager", 0)
    assert region.eager_calls == 3 * len(PICTURES)
    assert counts == [0, 0, 0]
    source, first = inspect.getsourcelines(Picky.forward)
    named = [
        first + offset for offset, line in enumerate(source) if f"test_strangers.py:{first + offset} " in region.reason
    ]
    assert named, region.reason
    assert "loudest" in linecache.getline(__file__, named[0])
    assert "in forward" in region.reason


class Loops(Block):
    """Goes through the images of a call one by one."""

    def forward(self, images):
        done = []
        for image in images:
            image = image + self.attention(self.before(image))
            done.append(image + self.mlp(self.after(image)))
        return done


class LoopingEyes(Eyes):
    block = Loops

    def forward(self, pixel_values):
        images = [self.cut(image[None]).flatten(2).transpose(1, 2).contiguous() for image in pixel_values]
        for block in self.depths:
            images = block(images)
        return self.polish(torch.cat(images))


class LoopingStage(nn.Module):
    """Loops too, but the layers in it do not."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList([Block(), Block()])

    def forward(self, images):
        for block in self.inner:
            images = [block(image) for image in images]
        return images


class StagedEyes(LoopingEyes):
    block = LoopingStage


def test_layers_inside_one_that_loops_are_taken():
    """Image by image, a graph would serve one number of images; what is inside serves all."""
    report, counts = compiled(StagedEyes, PICTURES)
    (region,) = report.regions
    assert (region.class_name, region.instances, region.graphs, region.eager_calls) == ("Block", 6, 1, 0)
    assert region.calls == 6 * (1 + 3 + 2)
    assert counts == [1, 1, 1]


def test_a_layer_that_loops_is_one_graph_for_each_number_of_images():
    """Where nothing else repeats it is compiled as it is, and the report says what each graph was made for."""
    report, counts = compiled(LoopingEyes, [*PICTURES, *PICTURES])
    (region,) = report.regions
    assert (region.class_name, region.instances, region.state, region.eager_calls) == ("Loops", 3, "compiled", 0)
    assert counts == [1, 2, 3, 3, 3, 3]
    for graph, images in enumerate((1, 3, 2), start=1):
        words = region.reason.split("; ")[graph - 1]
        assert words.startswith(f"graph {graph} was made for")
        assert words.count("images[") == images


@pytest.mark.smoke
@pytest.mark.parametrize("tower", [Eyes, Retina, PickyEyes])
def test_undone(tower):
    torch.manual_seed(0)
    model = Chatter(tower()).eval()
    before = {path: dict(vars(module)) for path, module in model.named_modules()}
    with torch.no_grad():
        want = model(**PICTURES[1])
        hf_compile.compile_mm_encoder(model, compilation_config={"backend": "eager"})
        model(**PICTURES[1])
        hf_compile.uncompile_mm_encoder(model)
        assert {path: dict(vars(module)) for path, module in model.named_modules()} == before
        assert torch.equal(model(**PICTURES[1]), want)
