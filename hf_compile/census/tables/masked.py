"""Encoders of images of different size in one batch: padded and masked, or packed with a table of sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..cases import Case, Draw, Recipe
from .packed import FLAT, WIDE

__all__ = ["MASKED"]

PATCH = 8


def shapes(draw: Draw, height: int, width: int, *, padded: bool) -> torch.Tensor:
    """Return height and width of each image of a batch, in patches: (batch, 2).

    The first image has the size given. If padded, the second is smaller and the others at most as large; else all are
    equal.
    """
    batch = draw.batch()
    if not padded:
        return torch.tensor([[height, width]] * batch)
    sizes = [[height, width], [height - 1, draw.size(1, width)]]
    sizes += [[draw.size(1, height), draw.size(1, width)] for _ in range(batch - 2)]
    return torch.tensor(sizes[:batch])


def series(draw: Draw, *, pad: bool, fixed: bool = False) -> torch.Tensor:
    """Return the `shapes` of one call: the first is one square image, every second call is padded if it may be."""
    side = draw.index > 0 and not fixed
    height, width = (draw.size(2, 8), draw.size(2, 8)) if side else (4, 4)
    return shapes(draw, height, width, padded=pad and draw.index % 2 == 1)


def inside(sizes: torch.Tensor) -> torch.Tensor:
    """Return which patches of a batch are of an image, and not padding below or beside it: (batch, height, width)."""
    height, width = sizes.amax(0).tolist()
    return (torch.arange(height)[:, None] < sizes[:, :1, None]) & (torch.arange(width) < sizes[:, 1:, None])


def masked_images(*, pad: bool = True, fixed: bool = False) -> Recipe:
    """Images (batch, 3, height, width), padded with zeros, and `patch_attention_mask` (batch, rows, columns)."""

    def recipe(encoder: nn.Module, draw: Draw) -> dict[str, Any]:
        mask = inside(series(draw, pad=pad, fixed=fixed))
        pixels = mask.repeat_interleave(PATCH, 1).repeat_interleave(PATCH, 2)[:, None]
        return {"pixel_values": draw.normal(len(mask), 3, *pixels.shape[2:]) * pixels, "patch_attention_mask": mask}

    return recipe


def sized_images(encoder: nn.Module, draw: Draw) -> dict[str, Any]:
    """Images (batch, 3, height, width), padded with zeros, and `image_sizes` in pixels (batch, 2)."""
    sizes = series(draw, pad=True)
    pixels = inside(sizes).repeat_interleave(PATCH, 1).repeat_interleave(PATCH, 2)[:, None]
    return {"pixel_values": draw.normal(len(sizes), 3, *pixels.shape[2:]) * pixels, "image_sizes": sizes * PATCH}


def masked_patches(encoder: nn.Module, draw: Draw) -> dict[str, Any]:
    """Flat patches (batch, patches, 192), padded at the end, their mask (batch, patches), and shapes (batch, 2)."""
    sizes = series(draw, pad=True)
    counts = sizes.prod(-1)
    mask = torch.arange(int(counts.max())) < counts[:, None]
    return {
        "pixel_values": draw.normal(*mask.shape, FLAT) * mask[..., None],
        "pixel_attention_mask": mask.int(),
        "spatial_shapes": sizes,
    }


def placed_patches(encoder: nn.Module, draw: Draw) -> dict[str, Any]:
    """Patches (batch, patches, 2 + 192), row and column first, counted from 1, and `attention_mask` in floats."""
    sizes = series(draw, pad=True)
    counts = sizes.prod(-1)
    order = torch.arange(int(counts.max()))
    mask = (order < counts[:, None]).float()
    places = torch.stack([order // sizes[:, 1:] + 1, order % sizes[:, 1:] + 1], dim=-1)
    patches = torch.cat([places, draw.normal(*mask.shape, FLAT)], dim=-1)
    return {"flattened_patches": patches * mask[..., None], "attention_mask": mask}


def pooled_patches(encoder: nn.Module, draw: Draw) -> dict[str, Any]:
    """Patches between 0 and 1 (batch, patches, 192), and their places as x and y (batch, patches, 2), -1 for padding.

    Every image is a whole number of pools of 3 x 3 patches.
    """
    sizes = series(draw, pad=True).clamp(max=4) * 3
    counts = sizes.prod(-1)
    order = torch.arange(int(counts.max()))
    mask = (order < counts[:, None])[..., None]
    places = torch.stack([order % sizes[:, 1:], order // sizes[:, 1:]], dim=-1)
    patches = draw.normal(len(sizes), len(order), FLAT).sigmoid() * mask
    return {"pixel_values": patches, "pixel_position_ids": torch.where(mask, places, -1)}


def strip(encoder: nn.Module, draw: Draw) -> dict[str, Any]:
    """All images of a call as one strip, (1, 3, 8, 8 x patches), and their `target_sizes` in patches (images, 2).

    Height and width are multiples of 4, as two mergers of 2 x 2 need.
    """
    sizes = 4 * torch.tensor([[draw.size(1, 4), draw.size(1, 4)] for _ in range(draw.batch(4))])
    if draw.index == 0:
        sizes[:] = 4
    patches = int(sizes.prod(-1).sum())
    return {"pixel_values": draw.normal(1, 3, PATCH, PATCH * patches), "target_sizes": sizes.int()}


def tiles(encoder: nn.Module, draw: Draw) -> dict[str, Any]:
    """Tiles (batch, images, 4, 3, 24, 24), `aspect_ratio_ids` (batch, images), `aspect_ratio_mask` (..., 4).

    A text has fewer images than the others of its batch, and an image has fewer tiles than 4: both are filled with
    zeros. The first call is one image of one tile; in every second one after it nothing is filled up.
    """
    ratios = [(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1), (4, 1)]
    batch, most = draw.batch(4), 1 if draw.index == 0 else draw.size(1, 3)
    ids = torch.zeros(batch, most, dtype=torch.long)
    mask = torch.zeros(batch, most, 4, dtype=torch.long)
    mask[..., 0] = 1
    for row in range(batch):
        full = draw.index % 2 == 0 and draw.index > 0
        for column in range(most if full or row == 0 else draw.size(1, most)):
            chosen = draw.random.choice([3, 5, 7]) if full else 0 if draw.index == 0 else draw.size(0, 7)
            ids[row, column] = chosen + 1
            mask[row, column, : ratios[chosen][0] * ratios[chosen][1]] = 1
    real = mask * (ids > 0)[..., None]
    pixels = draw.normal(batch, most, 4, 3, 24, 24) * real[..., None, None, None]
    return {"pixel_values": pixels, "aspect_ratio_ids": ids, "aspect_ratio_mask": mask}


IMAGE = {**WIDE, "image_size": 64}
MINICPM = {**IMAGE, "num_hidden_layers": 3, "insert_layer_id": 1}
PADDED, UNPADDED = masked_images(), masked_images(pad=False)

MASKED: dict[str, Case] = {
    "phi4_mm.vision": Case(
        "phi4_multimodal.Phi4MultimodalVisionModel",
        masked_images(fixed=True),
        WIDE,
        note="crops of one size; the attention is causal where nothing is padded",
    ),
    "idefics2": Case("idefics2.Idefics2VisionTransformer", PADDED, IMAGE),
    "idefics2[nopad]": Case("idefics2.Idefics2VisionTransformer", UNPADDED, IMAGE),
    "idefics3": Case("idefics3.Idefics3VisionTransformer", PADDED, IMAGE),
    "idefics3[nopad]": Case("idefics3.Idefics3VisionTransformer", UNPADDED, IMAGE),
    "smolvlm": Case("smolvlm.SmolVLMVisionTransformer", PADDED, IMAGE),
    "smolvlm[nopad]": Case("smolvlm.SmolVLMVisionTransformer", UNPADDED, IMAGE),
    "siglip2": Case("siglip2.Siglip2VisionModel", masked_patches, {**WIDE, "num_patches": 16}),
    "pixtral(mistral3,lighton_ocr)": Case("pixtral.PixtralVisionModel", sized_images, IMAGE),
    "minicpmv4_6": Case("minicpmv4_6.MiniCPMV4_6VisionModel", strip, MINICPM),
    "minicpmv4_7": Case("minicpmv4_7.MiniCPMV4_7VisionModel", strip, MINICPM),
    "minicpm_ocr": Case("minicpm_ocr.MiniCPMOcrVisionModel", strip, MINICPM),
    "mllama": Case(
        "mllama.MllamaVisionModel",
        tiles,
        {**WIDE, "attention_heads": 2, "num_global_layers": 2, "image_size": 24}
        | {"intermediate_layers_indices": [0, 1], "vision_output_dim": 96},
    ),
    "pix2struct": Case(
        "pix2struct.Pix2StructVisionModel",
        placed_patches,
        {**WIDE, "patch_embed_hidden_size": FLAT, "seq_len": 16, "d_kv": 16, "d_ff": 64},
    ),
    "gemma4.vision": Case(
        "gemma4.Gemma4VisionModel",
        pooled_patches,
        {**WIDE, "num_key_value_heads": 1, "head_dim": 16, "position_embedding_size": 16}
        | {"use_clipped_linears": True, "standardize": True},
    ),
    "kosmos2_5": Case(
        "kosmos2_5.Kosmos2_5VisionModel",
        placed_patches,
        {**WIDE, "patch_embed_hidden_size": FLAT, "max_num_patches": 16, "head_dim": 16},
    ),
}
