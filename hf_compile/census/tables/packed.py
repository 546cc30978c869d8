"""Encoders that take all images of a call packed into one row of patches, with a table of their grids."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from ..cases import Case, Draw, Recipe

__all__ = ["PACKED", "WIDE"]

WIDE = {"initializer_range": 0.2}
"""Weights that keep a width of 32 alive: with the usual 0.02 attention is uniform, and wrong positions go unseen."""

FLAT = 3 * 8 * 8
"""Numbers in one flat patch; a patch that spans two frames has twice as many."""


def grids(draw: Draw, merge: int = 2, *, video: bool = True) -> torch.Tensor:
    """Return the grid of each image or video of one call: (images, 3), as time, height and width in patches.

    One square image, one that is not, two of different size, a video, an image and a video; then any.
    """

    def image(frames: int = 1) -> list[int]:
        return [frames, draw.size(2 * merge, 8 * merge, merge), draw.size(2 * merge, 8 * merge, merge)]

    kinds = [
        [[1, 4 * merge, 4 * merge]],
        [image()],
        [image(), image()],
        [image(3 if video else 1)],
        [image(), image(2 if video else 1)],
    ]
    if draw.index < len(kinds):
        return torch.tensor(kinds[draw.index])
    return torch.tensor([image(draw.size(1, 3 if video else 1)) for _ in range(draw.size(1, 4))])


def packed(
    name: str = "hidden_states",
    *row: int,
    grid_name: str = "grid_thw",
    merge: int = 2,
    video: bool = True,
    apart: bool = False,
) -> Recipe:
    """Rows of patches and their grids: `name` as (patches, *row), `grid_name` as (images, 3).

    Args:
        name: keyword of the patches.
        row: shape of one patch.
        grid_name: keyword of the grids.
        merge: every height and width is a multiple of it.
        video: whether the encoder takes more than one frame.
        apart: whether the model hands each frame of a video over as an image of its own.
    """

    def recipe(encoder: nn.Module, draw: Draw) -> dict[str, Any]:
        grid = grids(draw, merge, video=video)
        if apart:
            grid = torch.repeat_interleave(grid, grid[:, 0], dim=0)
            grid[:, 0] = 1
        return {name: draw.normal(int(grid.prod(-1).sum()), *row), grid_name: grid}

    return recipe


def batch_of_one(encoder: nn.Module, draw: Draw) -> dict[str, Any]:
    """Images only, as (1, patches, 3, 8, 8) with their grids; Transformers 5.0 wants the borders of the images too."""
    grid = grids(draw, video=False)
    patches = draw.normal(1, int(grid.prod(-1).sum()), 3, 8, 8)
    if "cu_seqlens" not in inspect.signature(encoder.forward).parameters:
        return {"pixel_values": patches, "grid_thw": grid}
    borders = nn.functional.pad(grid.prod(-1).cumsum(0), (1, 0)).int()
    return {"pixel_values": patches, "image_grid_thw": grid, "cu_seqlens": borders}


def downsampled(encoder: nn.Module, draw: Draw) -> dict[str, Any]:
    """Either images, which keep their patches, or videos, which keep a quarter: `merge_sizes` is (images,)."""
    videos = draw.index % 5 >= 3
    grid = grids(draw, 2 if videos else 1, video=videos)
    patches = draw.normal(int(grid.prod(-1).sum()), FLAT)
    return {"pixel_values": patches, "grid_thw": grid, "merge_sizes": torch.full((len(grid),), 2 if videos else 1)}


QWEN = {**WIDE, "depth": 3, "out_hidden_size": 48}
WINDOWS = {**QWEN, "fullatt_block_indexes": [1], "window_size": 32}
POSITIONS = {**QWEN, "num_position_embeddings": 16}
DEEPSTACK = {**POSITIONS, "deepstack_visual_indexes": [0, 1]}
MUSE = {**WIDE, "num_hidden_layers": 3, "pos_emb_height": 4, "pos_emb_width": 4}
HUNYUAN = {**WIDE, "max_image_size": 32, "out_hidden_size": 48}
EXPERTS = {"mlp_layer_types": ["dense", "sparse", "sparse"], "pyramid_num_routed": [-1, 4, 8]}

SPANS = packed("hidden_states", 2 * FLAT)
"""Patches that span two frames."""
GLM = packed("hidden_states", 2 * FLAT, apart=True)

PACKED: dict[str, Case] = {
    "qwen2_vl": Case("qwen2_vl.Qwen2VisionTransformerPretrainedModel", SPANS, {**WIDE, "hidden_size": 48}),
    "qwen2_5_vl": Case("qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel", SPANS, WINDOWS),
    "qwen3_vl": Case("qwen3_vl.Qwen3VLVisionModel", SPANS, DEEPSTACK),
    "qwen3_vl_moe": Case("qwen3_vl_moe.Qwen3VLMoeVisionModel", SPANS, DEEPSTACK),
    "qwen3_5": Case("qwen3_5.Qwen3_5VisionModel", SPANS, POSITIONS),
    "qwen3_5_moe": Case("qwen3_5_moe.Qwen3_5MoeVisionModel", SPANS, POSITIONS),
    "qwen4_exp": Case("qwen4_exp.Qwen4ExpVisionModel", SPANS, POSITIONS),
    "qwen3_omni.vision": Case("qwen3_omni_moe.Qwen3OmniMoeVisionEncoder", SPANS, DEEPSTACK),
    "qwen2_5_omni.vision": Case("qwen2_5_omni.Qwen2_5OmniVisionEncoder", SPANS, WINDOWS),
    "glm4v": Case("glm4v.Glm4vVisionModel", GLM, QWEN),
    "glm4v_moe": Case("glm4v_moe.Glm4vMoeVisionModel", GLM, QWEN),
    "glm_ocr": Case("glm_ocr.GlmOcrVisionModel", GLM, QWEN),
    "glm5_next": Case("glm5_next.Glm5NextVisionModel", GLM, {**QWEN, "projection_intermediate_size": 96}),
    "ernie4_5_vl_moe": Case(
        "ernie4_5_vl_moe.Ernie4_5_VLMoeVisionTransformerPretrainedModel", packed("hidden_states", FLAT), WIDE
    ),
    "paddleocr_vl": Case("paddleocr_vl.PaddleOCRVisionModel", batch_of_one, WIDE),
    "lfm3_vl": Case(
        "lfm3_vl.Lfm3VlVisionModel",
        packed("pixel_values", 2 * FLAT),
        {**WIDE, "num_hidden_layers": 4, "num_key_value_heads": 1},
        note="layers conv, conv, attention, conv",
    ),
    "muse_glimmer": Case("muse_glimmer.MuseGlimmerVisionModel", packed("pixel_values", 2 * FLAT), MUSE),
    "muse_spark.vision": Case("muse_spark.MuseSparkVisionModel", packed("pixel_values", 2 * FLAT), MUSE),
    "dots3_note.vision": Case(
        "dots3_note.Dots3NoteVisionModel",
        packed("pixel_values", FLAT),
        {**WIDE, **EXPERTS, "num_hidden_layers": 3, "moe_intermediate_size": 32}
        | {"adapter_in_dim": 32, "adapter_out_dim": 48},
        note="one dense layer, then experts, whose number grows with depth",
    ),
    "cosmos3_edge": Case(
        "cosmos3_edge.Cosmos3EdgeVisionModel", packed("pixel_values", FLAT), {**WIDE, "num_patches": 16}
    ),
    "hunyuan_vl": Case(
        "hunyuan_vl.HunYuanVLVisionTransformer",
        packed("pixel_values", FLAT, video=False),
        {**HUNYUAN, "text_hidden_size": 48},
    ),
    "hy_v4_vl": Case("hy_v4_vl.HYV4VLVisionModel", packed("pixel_values", FLAT), HUNYUAN),
    "inkling2": Case(
        "inkling2.Inkling2VisionModel",
        packed("pixel_values", 16, 16, 3, grid_name="image_grid_thw", merge=1, video=False),
        {**WIDE, "posemb_grid_size": 4, "projection_hidden_dim": 64, "text_hidden_size": 48},
    ),
    "kimi_k25": Case(
        "kimi_k25.Kimi_K25VisionModel",
        packed("pixel_values", 3, 8, 8),
        {**WIDE, "pos_emb_height": 4, "pos_emb_width": 4},
    ),
    "exaone4_5": Case("exaone4_5.Exaone4_5_VisionModel", SPANS, {**WINDOWS, "num_key_value_heads": 1}),
    "video_llama_3": Case("video_llama_3.VideoLlama3VisionModel", downsampled, WIDE),
    "minimax_m3_vl": Case("minimax_m3_vl.MiniMaxM3VLVisionModel", packed("pixel_values", 2 * FLAT), WIDE),
    "cohere_compass": Case(
        "cohere_compass.CohereCompassVisionModel", packed("hidden_states", 2 * FLAT, video=False), DEEPSTACK
    ),
}
