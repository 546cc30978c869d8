"""Encoders of images that come as one batch of equal size."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from ..cases import Case, Draw, Recipe

__all__ = ["IMAGES", "any_size", "images"]


def images(height: int = 32, width: int = 32, *, name: str = "pixel_values") -> Recipe:
    """Batches of images of one size: (batch, 3, height, width)."""

    def recipe(encoder: nn.Module, draw: Draw) -> dict[str, Any]:
        return {name: draw.normal(draw.batch(), 3, height, width)}

    return recipe


def any_size(
    step: int = 8, *, native: int = 32, low: int = 16, high: int = 64, most: int = 7, name: str = "pixel_values"
) -> Recipe:
    """Batches of images whose height and width vary, the first one square: (batch, 3, height, width)."""

    def recipe(encoder: nn.Module, draw: Draw) -> dict[str, Any]:
        first = draw.index == 0
        height, width = (native, native) if first else (draw.size(low, high, step), draw.size(low, high, step))
        return {name: draw.normal(draw.batch(most), 3, height, width)}

    return recipe


def tiles(local: int, whole: int, *, most: int = 7) -> Recipe:
    """Square crops of an image, and by turns the image as a whole in another size: (batch, 3, side, side)."""

    def recipe(encoder: nn.Module, draw: Draw) -> dict[str, Any]:
        side = (
            (local, whole, local, local, whole, whole)[draw.index]
            if draw.index < 6
            else draw.random.choice((local, whole))
        )
        return {"pixel_values": draw.normal(draw.batch(most), 3, side, side)}

    return recipe


def coarse_or_fine(encoder: nn.Module, draw: Draw) -> dict[str, Any]:
    """Tiles for one of two connectors, which a keyword chooses: (tiles, 3, 32, 32)."""
    return {**images()(encoder, draw), "fine": draw.index % 3 == 1}


def masked(recipe: Recipe, name: str, patch: int = 8) -> Recipe:
    """Let `recipe` also hide patches, by a random mask or by noise that is sorted: (batch, patches)."""

    def with_mask(encoder: nn.Module, draw: Draw) -> dict[str, Any]:
        inputs = recipe(encoder, draw)
        batch, _, height, width = inputs["pixel_values"].shape
        noise = torch.rand(batch, (height // patch) * (width // patch), generator=draw.generator)
        return {**inputs, name: noise if name == "noise" else noise < 0.4}

    return with_mask


def patches(count: int, width: int) -> Recipe:
    """Images already cut into patches: (images, patches, values of a patch)."""

    def recipe(encoder: nn.Module, draw: Draw) -> dict[str, Any]:
        return {"pixel_values": draw.normal(draw.batch(), count, width)}

    return recipe


def frames(encoder: nn.Module, draw: Draw) -> dict[str, Any]:
    """Clips, in which the number of frames varies too: (batch, frames, 3, 64, 64)."""
    return {"pixel_values": draw.normal(draw.batch(3), draw.size(1 + bool(draw.index), 4), 3, 64, 64)}


def images_and_videos(encoder: nn.Module, draw: Draw) -> dict[str, Any]:
    """Images of different size, or a video whose frames are stacked in twos.

    Images are patches in one row, (patches, 3 x 4 x 4), with their grids, (images, 2); a video is (half its frames,
    2 x 3, height, width).
    """
    kinds = ("image", "image", "images", "video", "images", "video")
    kind = kinds[draw.index] if draw.index < len(kinds) else draw.random.choice(kinds)
    if kind == "video":
        return {"pixel_values": draw.normal(draw.batch(), 6, draw.size(16, 64, 8), draw.size(16, 64, 8))}
    count = draw.size(2, 4) if kind == "images" else 1
    grid = [(draw.size(2, 8, 2), draw.size(2, 8, 2)) if draw.index else (4, 4) for _ in range(count)]
    return {"pixel_values": draw.normal(sum(map(math.prod, grid)), 3 * 4 * 4), "image_grid_hw": torch.tensor(grid)}


INTERPOLATED = {"interpolate_pos_encoding": True}

# Each takes images of one size, or, with a keyword, images of any size.
_TWO_WAYS = {
    "clip": ("clip.CLIPVisionModel", {}),
    "siglip": ("siglip.SiglipVisionModel", {}),
    "altclip": ("altclip.AltCLIPVisionModel", {}),
    "blip": ("blip.BlipVisionModel", {}),
    "blip2": ("blip_2.Blip2VisionModel", {}),
    "instructblip": ("instructblip.InstructBlipVisionModel", {}),
    "instructblipvideo": ("instructblipvideo.InstructBlipVideoVisionModel", {}),
    "chinese_clip": ("chinese_clip.ChineseCLIPVisionModel", {}),
    "clipseg": ("clipseg.CLIPSegVisionModel", {}),
    "metaclip_2": ("metaclip_2.MetaClip2VisionModel", {}),
    "idefics": ("idefics.IdeficsVisionTransformer", {}),
    "janus": ("janus.JanusVisionModel", {"attention_bias": True}),
    "kosmos2": ("kosmos2.Kosmos2VisionModel", {}),
    "owlvit": ("owlvit.OwlViTVisionTransformer", {}),
    "owlv2": ("owlv2.Owlv2VisionTransformer", {}),
    "vit(vtde)": ("vit.ViTModel", {}),
    "git": ("git.GitVisionModel", {}),
    "flava.image": ("flava.FlavaImageModel", {}),
    "deit": ("deit.DeiTModel", {}),
    "ijepa": ("ijepa.IJepaModel", {}),
    "beit": ("beit.BeitModel", {"use_relative_position_bias": True, "use_absolute_position_embeddings": True}),
}

# Layers with windows that do not divide the grid of 8 x 8 patches, one layer without, position terms in all of them.
_SAM = {
    "num_hidden_layers": 3,
    "image_size": 64,
    "window_size": 3,
    "global_attn_indexes": [1],
    "output_channels": 32,
    "mlp_dim": 64,
    "initializer_range": 0.02,
}
# The same with two strided convolutions behind it; its tables of positions are resized.
_SAM_OF_TILES = {
    **_SAM,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "patch_size": 4,
    "image_size": 64,
    "window_size": 7,
    "downsample_channels": [32, 32],
}
# Two stages with shifted windows that do not always divide the grid, and a merge between them.
_SWIN = {"depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "image_size": 64, "patch_size": 4, "embed_dim": 32}
# Four stages, each of blocks with windows and blocks over channels.
_FLORENCE = {
    "depths": [1, 1, 2, 1],
    "embed_dim": [16, 16, 32, 32],
    "num_heads": [2, 2, 4, 4],
    "num_groups": [2, 2, 4, 4],
    "patch_size": [7, 3, 3, 3],
    "patch_stride": [4, 2, 2, 2],
    "patch_padding": [3, 1, 1, 1],
    "patch_prenorm": [False, True, True, True],
    "window_size": 3,
}
_EFFICIENT = {
    "width_coefficient": 0.1,
    "depth_coefficient": 1.0,
    "kernel_sizes": [3, 5, 3],
    "in_channels": [32, 80, 160],
    "out_channels": [80, 160, 240],
    "strides": [1, 2, 2],
    "num_block_repeats": [1, 2, 2],
    "expand_ratios": [1, 6, 6],
    "depthwise_padding": [2],
    "hidden_dim": 128,
}

IMAGES: dict[str, Case] = {
    **{name: Case(cls, images(), config) for name, (cls, config) in _TWO_WAYS.items()},
    **{
        f"{name}[interp]": Case(cls, any_size(), config, call=INTERPOLATED)
        for name, (cls, config) in _TWO_WAYS.items()
    },
    # encoders of vision-language models
    "bridgetower": Case("bridgetower.BridgeTowerVisionModel", images(name="image"), {"hidden_size": 128}),
    "bridgetower[interp]": Case(
        "bridgetower.BridgeTowerVisionModel", any_size(name="image"), {"hidden_size": 128}, call=INTERPOLATED
    ),
    "groupvit": Case(
        "groupvit.GroupViTVisionTransformer",
        images(),
        {"depths": [1, 2, 1], "num_group_tokens": [8, 4, 0], "num_output_groups": [8, 4, 4]},
    ),
    "internvl": Case(
        "internvl.InternVLVisionModel",
        tiles(32, 27),
        {"use_qk_norm": True},
        note="tiles of 32, frames of a video of 27",
    ),
    "qianfan_ocr": Case("qianfan_ocr.QianfanOCRVisionModel", images(), {"use_qk_norm": True}),
    "llama4": Case(
        "llama4.Llama4VisionModel",
        images(),
        {"intermediate_size": 128, "projector_input_dim": 32, "projector_output_dim": 32, "vision_output_dim": 32},
        note="as in real configs, intermediate_size = hidden_size / pixel_shuffle_ratio^2",
    ),
    "ovis2": Case("ovis2.Ovis2VisionModel", images(), {"hidden_stride": 2}),
    "florence2": Case("florence2.Florence2VisionBackbone", images(192, 192, name="hidden_states"), _FLORENCE),
    "florence2[sizes]": Case(
        "florence2.Florence2VisionBackbone",
        any_size(low=32, name="hidden_states"),
        {name: value[:2] if isinstance(value, list) else value for name, value in _FLORENCE.items()},
    ),
    "tipsv2": Case("tipsv2.Tipsv2VisionModel", any_size()),
    "step3p7": Case("step3p7.Step3p7VisionModel", tiles(40, 64), {"image_size": 64, "num_hidden_layers": 12}),
    "granite_docling": Case(
        "granite_docling.GraniteDoclingVisionModel",
        images(),
        {"patch_size": 4, "num_hidden_layers": 3, "deepstack_visual_indexes": [0, 1], "out_hidden_size": 32},
    ),
    "granite_docling[fine]": Case(
        "granite_docling.GraniteDoclingVisionModel",
        coarse_or_fine,
        {"patch_size": 4, "num_hidden_layers": 3, "deepstack_visual_indexes": [0, 1], "out_hidden_size": 32},
        note="a bool chooses one of two connectors",
    ),
    "molmo2": Case(
        "molmo2.Molmo2VisionModel",
        patches(16, 3 * 4 * 4),
        {
            "patch_size": 4,
            "image_size": [16, 16],
            "num_position_embeddings": 16,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "num_hidden_layers": 3,
        },
    ),
    "radio(nemotron_h_omni)": Case(
        "radio.RadioModel", any_size(4), {"patch_size": 4, "max_img_size": 32, "num_hidden_layers": 6}
    ),
    "radio(nemotron_h_omni)[packed]": Case(
        "nemotron_h_omni.NemotronH_Omni_Reasoning_V3",
        images_and_videos,
        {
            "vision_hidden_size": 32,
            "projector_hidden_size": 32,
            "vision_config": {
                "model_type": "radio",
                "hidden_size": 32,
                "num_hidden_layers": 6,
                "num_attention_heads": 2,
                "patch_size": 4,
                "max_img_size": 32,
                "video_temporal_patch_size": 2,
            },
            "text_config": {
                "model_type": "nemotron_h",
                "vocab_size": 64,
                "hidden_size": 32,
                "intermediate_size": 64,
                "layers_block_type": ["attention"],
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "head_dim": 16,
            },
        },
        part="vision_model",
    ),
    "pp_formulanet": Case(
        "pp_formulanet.PPFormulaNetVisionModel",
        images(64, 64),
        {
            **_SAM,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "patch_size": 8,
            "post_conv_in_channels": 32,
            "post_conv_mid_channels": 16,
            "post_conv_out_channels": 32,
            "decoder_hidden_size": 32,
        },
    ),
    "got_ocr2": Case(
        "got_ocr2.GotOcr2Model",
        images(64, 64),
        {
            "vision_config": {**_SAM, "hidden_size": 32, "num_attention_heads": 2, "patch_size": 8},
            "text_config": {
                "model_type": "qwen2",
                "vocab_size": 64,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
            },
        },
        part="vision_tower",
    ),
    "sam(deepseek_vl_hybrid)": Case("sam.SamVisionModel", images(64, 64), _SAM),
    "deepseek_ocr2": Case(
        "deepseek_ocr2.DeepseekOcr2VisionModel",
        tiles(64, 208, most=2),
        {
            "sam_config": _SAM_OF_TILES,
            "encoder_config": {
                "vocab_size": 64,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 4,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
            },
        },
        note="over 144 tokens it takes its other queries",
    ),
    "unlimited_ocr": Case(
        "unlimited_ocr.UnlimitedOcrVisionModel",
        tiles(40, 64),
        {
            "sam_config": _SAM_OF_TILES,
            "encoder_config": {
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 16,
                "patch_size": 4,
            },
        },
    ),
    "sam3": Case(
        "sam3.Sam3VisionModel",
        images(96, 96),
        {
            "fpn_hidden_size": 32,
            "backbone_config": {
                "model_type": "sam3_vit_model",
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 3,
                "num_attention_heads": 2,
                "image_size": 96,
                "pretrain_image_size": 32,
                "patch_size": 8,
                "window_size": 4,
                "global_attn_indexes": [1],
            },
        },
    ),
    "vision_enc_dec(donut)": Case(
        "vision_encoder_decoder.VisionEncoderDecoderModel",
        images(64, 48),
        {
            "encoder": {"model_type": "donut-swin", **_SWIN, "image_size": [64, 48]},
            "decoder": {
                "model_type": "mbart",
                "d_model": 64,
                "decoder_layers": 1,
                "decoder_attention_heads": 2,
                "decoder_ffn_dim": 64,
                "vocab_size": 64,
                "max_position_embeddings": 16,
                "is_decoder": True,
                "add_cross_attention": True,
            },
        },
        part="encoder",
    ),
    "tvp": Case(
        "tvp.TvpModel",
        frames,
        {
            "pad_token_id": 0,
            "max_img_size": 64,
            "visual_prompt_size": 4,
            "num_frames": 2,
            "backbone_config": {
                "model_type": "resnet",
                "embedding_size": 16,
                "hidden_sizes": [32, 32, 64],
                "depths": [1, 2, 1],
                "out_features": ["stage3"],
            },
        },
        part="vision_model",
    ),
    "align": Case("align.AlignVisionModel", any_size(low=32, native=64, high=96), _EFFICIENT),
    "timm(gemma3n)": Case(
        "timm_wrapper.TimmWrapperModel",
        any_size(32, native=64, low=64, high=128),
        {"architecture": "mobilenetv4_conv_small_035", "do_pooling": False},
        note="needs timm",
    ),
    "timm_vit(perception_lm)": Case(
        "timm_wrapper.TimmWrapperModel",
        images(),
        {
            "architecture": "vit_pe_core_large_patch14_336",
            "do_pooling": True,
            "model_args": {
                "img_size": [32, 32],
                "patch_size": 8,
                "embed_dim": 32,
                "depth": 2,
                "num_heads": 2,
                "ref_feat_shape": [4, 4],
                "global_pool": "",
                "use_post_transformer_norm": False,
                "init_values": 0.1,
            },
        },
        note="needs timm",
    ),
    # backbones
    "dinov2": Case("dinov2.Dinov2Model", any_size()),
    "dinov2[swiglu]": Case("dinov2.Dinov2Model", masked(any_size(), "bool_masked_pos"), {"use_swiglu_ffn": True}),
    "dinov2_with_registers": Case("dinov2_with_registers.Dinov2WithRegistersModel", any_size()),
    "dinov3_vit": Case("dinov3_vit.DINOv3ViTModel", any_size(), {"num_register_tokens": 4, "use_gated_mlp": True}),
    "beit[shared]": Case("beit.BeitModel", images(), {"use_shared_relative_position_bias": True}),
    "swin": Case("swin.SwinModel", images(64, 64), _SWIN),
    "swin[sizes]": Case("swin.SwinModel", any_size(4, native=64, low=32, high=96), _SWIN),
    "swinv2": Case("swinv2.Swinv2Model", images(64, 64), _SWIN),
    "swinv2[sizes]": Case("swinv2.Swinv2Model", any_size(4, native=64, low=32, high=96), _SWIN),
    "convnext": Case(
        "convnext.ConvNextModel",
        any_size(native=64, low=48, high=96),
        {"patch_size": 4, "num_stages": 3, "hidden_sizes": [16, 32, 64], "depths": [1, 2, 1]},
    ),
    "resnet": Case(
        "resnet.ResNetModel",
        any_size(low=32),
        {"embedding_size": 16, "hidden_sizes": [32, 32, 64], "depths": [1, 2, 1]},
    ),
    "aimv2": Case("aimv2.Aimv2VisionModel", images()),
    "aimv2[native]": Case("aimv2.Aimv2VisionModel", any_size(), {"is_native": True, "use_head": False}),
    "mlcd": Case("mlcd.MLCDVisionModel", any_size()),
    "pvt_v2": Case(
        "pvt_v2.PvtV2Model",
        any_size(low=32, native=64),
        {
            "num_encoder_blocks": 3,
            "depths": [1, 2, 1],
            "sr_ratios": [4, 2, 1],
            "hidden_sizes": [16, 32, 32],
            "patch_sizes": [7, 3, 3],
            "strides": [4, 2, 2],
            "num_attention_heads": [1, 2, 4],
            "mlp_ratios": [2, 2, 2],
        },
    ),
    "hiera": Case(
        "hiera.HieraModel",
        images(64, 64),
        {
            "embed_dim": 16,
            "depths": [1, 1, 2, 1],
            "image_size": [64, 64],
            "patch_size": [7, 7],
            "num_heads": [1, 2, 2, 4],
        },
    ),
    "vit_mae": Case("vit_mae.ViTMAEModel", masked(images(), "noise")),
    "vit_mae[interp]": Case("vit_mae.ViTMAEModel", masked(any_size(), "noise"), call=INTERPOLATED),
    "efficientnet": Case("efficientnet.EfficientNetModel", any_size(low=32, native=64, high=96), _EFFICIENT),
}
