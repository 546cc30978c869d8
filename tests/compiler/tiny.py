"""Tiny encoders and inputs that the tests of the compiler share."""

from __future__ import annotations

import torch
from transformers import CLIPVisionConfig, CLIPVisionModel, SiglipVisionConfig, SiglipVisionModel
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

EAGER = {"backend": "eager"}
SIZE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
    "image_size": 32,
    "patch_size": 8,
}


class Counting:
    """A backend of the test's own that counts graphs and runs them as they are."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph_module, example_inputs):
        self.graphs += 1
        return graph_module.forward


def clip(**options):
    torch.manual_seed(0)
    return CLIPVisionModel(CLIPVisionConfig(**{**SIZE, **options})).eval()


def siglip(**options):
    torch.manual_seed(0)
    return SiglipVisionModel(SiglipVisionConfig(**{**SIZE, **options})).eval()


def qwen(config=None):
    torch.manual_seed(0)
    config = config or Qwen2_5_VisionTransformerPretrainedModel.config_class(
        depth=4, hidden_size=32, intermediate_size=64, num_heads=2, out_hidden_size=32, fullatt_block_indexes=[3]
    )
    config._attn_implementation = "sdpa"
    return Qwen2_5_VisionTransformerPretrainedModel(config).eval()


GRIDS = ([[1, 8, 8]], [[1, 10, 14]], [[1, 8, 8], [1, 12, 10]], [[2, 6, 6]], [[1, 4, 8]], [[2, 4, 4], [3, 2, 2]])


def patches(grid):
    grid = torch.tensor(grid)
    generator = torch.Generator().manual_seed(int(grid.sum()))
    return {
        "hidden_states": torch.randn(int(grid.prod(-1).sum()), 3 * 2 * 14 * 14, generator=generator),
        "grid_thw": grid,
    }


def images(batch, size=32):
    return {"pixel_values": torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(batch))}


def snapshot(model):
    """Everything that undo must bring back: attributes, hooks, classes, keys."""
    modules = {
        path: {name: dict(value) if isinstance(value, dict) else value for name, value in vars(module).items()}
        for path, module in model.named_modules()
    }
    classes = [(type(module), dict(vars(type(module)))) for module in model.modules()]
    return modules, classes, list(model.state_dict()), model.config.to_dict(), model.config._attn_implementation


def regions(model):
    import hf_compile

    return {region.class_name: region for encoder in hf_compile.status(model).encoders for region in encoder.regions}
