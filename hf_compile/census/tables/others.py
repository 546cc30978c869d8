"""What remains: video encoders, image tokenisers, Q-Formers, resamplers, and backbones of detectors."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from transformers import (
    Blip2QFormerConfig,
    InstructBlipQFormerConfig,
    InstructBlipVideoQFormerConfig,
    PeVideoEncoderConfig,
    ViTConfig,
)

from ..cases import Case, Draw, Recipe
from .images import INTERPOLATED, any_size, images
from .packed import FLAT, WIDE, grids, packed

__all__ = ["OTHERS"]


def clips(
    frames: tuple[int, int] = (4, 4), *, step: int = 1, side: int = 32, any_side: int = 0, name: str = "pixel_values"
) -> Recipe:
    """Batches of clips (batch, frames, 3, height, width); height and width are multiples of `any_side` where given."""

    def recipe(encoder: nn.Module, draw: Draw) -> dict[str, Any]:
        first = draw.index == 0
        long = frames[0] if first else draw.size(*frames, step)
        height, width = (
            (draw.size(16, 64, any_side), draw.size(16, 64, any_side)) if any_side and not first else (side, side)
        )
        return {name: draw.normal(draw.batch(4), long, 3, height, width)}

    return recipe


def masked_clips(encoder: nn.Module, draw: Draw) -> dict[str, Any]:
    """Batches of clips of different length, as PE's processor pads them: a mask only where a clip is padded.

    `pixel_values_videos` (batch, frames, 3, 32, 32) and `padding_mask_videos` (batch, frames).
    """
    lengths = _lengths(draw, draw.batch(4), 4, 12)
    inputs = {"pixel_values_videos": draw.normal(len(lengths), max(lengths), 3, 32, 32)}
    return inputs if len(set(lengths)) == 1 else {**inputs, "padding_mask_videos": _mask(lengths)}


def clips_with_sound(encoder: nn.Module, draw: Draw) -> dict[str, Any]:
    """What `masked_clips` gives, and the sound of each clip, 100 samples a frame.

    `input_values` (batch, 1, samples) and, where a clip is padded, `padding_mask` (batch, samples).
    """
    lengths = _lengths(draw, draw.batch(4), 4, 12)
    inputs = {
        "pixel_values_videos": draw.normal(len(lengths), max(lengths), 3, 32, 32),
        "input_values": draw.normal(len(lengths), 1, 100 * max(lengths)),
    }
    if len(set(lengths)) == 1:
        return inputs
    samples = _mask([100 * each for each in lengths])
    return {**inputs, "padding_mask_videos": _mask(lengths), "padding_mask": samples}


def flat_frames(frames: int, *, any_side: int = 0) -> Recipe:
    """Clips of a fixed number of frames, flattened to images: (batch x frames, 3, height, width)."""
    recipe = clips((frames, frames), any_side=any_side)

    def flat(encoder: nn.Module, draw: Draw) -> dict[str, Any]:
        return {"pixel_values": recipe(encoder, draw)["pixel_values"].flatten(0, 1)}

    return flat


def hidden_patches(encoder: nn.Module, draw: Draw) -> dict[str, Any]:
    """Clips (batch, 4, 3, 32, 32) and the patches that pretraining hides, equally many in each: (batch, 32)."""
    pixels = draw.normal(draw.batch(4), 4, 3, 32, 32)
    hidden = torch.zeros(len(pixels), 32, dtype=torch.bool)
    count = draw.size(8, 28)
    for row in hidden:
        row[torch.randperm(32, generator=draw.generator)[:count]] = True
    return {"pixel_values": pixels, "bool_masked_pos": hidden}


def tokens(low: int, high: int, width: int = 32, *, name: str = "hidden_states") -> Recipe:
    """Batches of features of any length: (batch, length, width)."""

    def recipe(encoder: nn.Module, draw: Draw) -> dict[str, Any]:
        return {name: draw.normal(draw.batch(), low if draw.index == 0 else draw.size(low, high), width)}

    return recipe


def queries(encoder: nn.Module, draw: Draw) -> dict[str, Any]:
    """Learned queries (batch, 4, 32), expanded as the models do it, over image features (batch, patches, 32).

    The mask (batch, patches) is all ones: a Q-Former sees whole images.
    """
    features = draw.normal(draw.batch(), 17 if draw.index == 0 else draw.size(17, 65), 32)
    return {
        "query_embeds": draw.normal(1, 4, 32).expand(len(features), -1, -1),
        "encoder_hidden_states": features,
        "encoder_attention_mask": torch.ones(features.shape[:-1], dtype=torch.long),
    }


def queries_and_text(encoder: nn.Module, draw: Draw) -> dict[str, Any]:
    """What `queries` gives, and the instruction: `input_ids` (batch, text) and `attention_mask` (batch, 4 + text)."""
    inputs = queries(encoder, draw)
    lengths = _lengths(draw, len(inputs["query_embeds"]), 5, 12)
    text = _mask(lengths).long()
    seen = torch.cat([torch.ones(len(text), 4, dtype=torch.long), text], dim=1)
    return {**inputs, "input_ids": 1 + draw.integers(60, *text.shape), "attention_mask": seen}


def latents(encoder: nn.Module, draw: Draw) -> dict[str, Any]:
    """Features of images padded to the longest, and their mask: `context` (batch, patches, 32)."""
    lengths = _lengths(draw, draw.batch(), 9, 40)
    mask = _mask(lengths)
    return {"context": draw.normal(*mask.shape, 32), "attention_mask": mask}


def connected(encoder: nn.Module, draw: Draw) -> dict[str, Any]:
    """What `latents` gives, under the names of Idefics2's connector."""
    inputs = latents(encoder, draw)
    return {"image_hidden_states": inputs["context"], "attention_mask": inputs["attention_mask"]}


def residues(encoder: nn.Module, draw: Draw) -> dict[str, Any]:
    """Protein sequences padded to the longest: `input_ids` (batch, residues), ones where padded, and the mask."""
    mask = _mask(_lengths(draw, draw.batch(), 9, 40))
    return {"input_ids": (5 + draw.integers(50, *mask.shape)).where(mask, 1), "attention_mask": mask.long()}


def resampled_grids(encoder: nn.Module, draw: Draw) -> dict[str, Any]:
    """Features of packed patches (patches, 32) with `grid_thw`."""
    grid = grids(draw, 2, video=True)
    return {"hidden_states": draw.normal(int(grid.prod(-1).sum()), 32), "grid_thw": grid}


def features_of_sizes(encoder: nn.Module, draw: Draw) -> dict[str, Any]:
    """Features of images of any size in one row (patches, 32), and their sizes in pixels (images, 2)."""
    grid = grids(draw, 2, video=False)
    return {"image_features": draw.normal(int(grid.prod(-1).sum()), 32), "image_sizes": 8 * grid[:, 1:]}


def pooled_crops(encoder: nn.Module, draw: Draw) -> dict[str, Any]:
    """Features of crops (crops, 16, 64) and the patches that each token pools (tokens, 4), -1 where there is none."""
    crops = draw.batch(5)
    index = draw.integers(16 * crops, draw.size(4, 4 * crops), 4)
    index[-1, 2:] = -1
    return {"image_features": draw.normal(crops, 16, 64), "pooled_patches_idx": index}


def either_length(encoder: nn.Module, draw: Draw) -> dict[str, Any]:
    """Features of images of one of the two sizes that Aria knows: (batch, 16 or 64, 32), padding hidden."""
    patches = 16 if draw.index == 0 else draw.random.choice((16, 64))
    batch = draw.batch()
    hidden = torch.zeros(batch, patches, dtype=torch.bool)
    if draw.index % 2:
        hidden[-1, patches - draw.size(1, 8) :] = True
    return {"key_value_states": draw.normal(batch, patches, 32), "attn_mask": hidden}


def cubes(encoder: nn.Module, draw: Draw) -> dict[str, Any]:
    """Patches of all images of a call: (patches, 2, 8, 8, 3)."""
    return {"pixel_values": draw.normal(4 if draw.index == 0 else draw.size(1, 60), 2, 8, 8, 3)}


def padded_images(step: int = 32, high: int = 128) -> Recipe:
    """Images padded to the largest of a call: (batch, 3, height, width), and `pixel_mask`, zero where padded."""

    def recipe(encoder: nn.Module, draw: Draw) -> dict[str, Any]:
        first = draw.index == 0
        sizes = [(64, 64) if first else (draw.size(40, high), draw.size(40, high)) for _ in range(draw.batch(4))]
        if draw.index % 2:
            sizes = [sizes[0]] * len(sizes)
        height, width = (-(-max(each) // step) * step for each in zip(*sizes, strict=True))
        mask = torch.zeros(len(sizes), height, width, dtype=torch.long)
        for row, (rows, columns) in zip(mask, sizes, strict=True):
            row[:rows, :columns] = 1
        return {"pixel_values": draw.normal(len(sizes), 3, height, width) * mask[:, None], "pixel_mask": mask}

    return recipe


def feature_map(encoder: nn.Module, draw: Draw) -> dict[str, Any]:
    """One flat map of a backbone's features with its positions (batch, places, 32), and a mask where it is padded."""
    mask = _mask(_lengths(draw, draw.batch(4), 12, 60))
    known = inspect.signature(encoder.forward).parameters
    positions = "object_queries" if "object_queries" in known else "spatial_position_embeddings"
    return {"attention_mask": mask, **{name: draw.normal(*mask.shape, 32) for name in ("inputs_embeds", positions)}}


def feature_levels(encoder: nn.Module, draw: Draw) -> dict[str, Any]:
    """Maps of two levels, flat and one after the other (batch, places, 32), with their shapes and places."""
    height, width = (4, 4) if draw.index == 0 else (2 * draw.size(1, 5), 2 * draw.size(1, 5))
    shapes = [(height, width), (height // 2, width // 2)]
    count, batch = height * width + height * width // 4, draw.batch(4)
    ratios = torch.ones(batch, 2, 2)
    mask = torch.ones(batch, count, dtype=torch.bool)
    if draw.index % 2:
        ratios[-1] = 0.75
        mask[-1, -1] = False
    return {
        "inputs_embeds": draw.normal(batch, count, 32),
        "spatial_position_embeddings": draw.normal(batch, count, 32),
        "attention_mask": mask,
        "spatial_shapes": torch.tensor(shapes),
        "spatial_shapes_list": shapes,
        "level_start_index": torch.tensor([0, height * width]),
        "valid_ratios": ratios,
    }


def levels_and_text(encoder: nn.Module, draw: Draw) -> dict[str, Any]:
    """What `feature_levels` gives, under Grounding DINO's names, and the features of the text (batch, text, 32)."""
    inputs = feature_levels(encoder, draw)
    renamed = {
        "inputs_embeds": "vision_features",
        "spatial_position_embeddings": "vision_position_embedding",
        "attention_mask": "vision_attention_mask",
    }
    inputs = {renamed.get(name, name): value for name, value in inputs.items()}
    inputs["vision_attention_mask"] = ~inputs["vision_attention_mask"]
    mask = _mask(_lengths(draw, len(inputs["vision_features"]), 4, 9))
    return {
        **inputs,
        "text_features": draw.normal(*mask.shape, 32),
        "text_attention_mask": ~mask,
        "text_self_attention_masks": ~(mask[:, None] & mask[:, :, None]),
        "text_position_ids": torch.arange(mask.shape[1]).expand(*mask.shape),
    }


def pyramid(encoder: nn.Module, draw: Draw) -> dict[str, Any]:
    """Maps of three levels, each half as large as the one before: (batch, 32, height, width)."""
    batch = draw.batch(4)
    height, width = (8, 8) if draw.index == 0 else (4 * draw.size(1, 4), 4 * draw.size(1, 4))
    return {"inputs_embeds": [draw.normal(batch, 32, height >> level, width >> level) for level in range(3)]}


def _lengths(draw: Draw, count: int, low: int, high: int) -> list[int]:
    """Return the length of each of `count` inputs: the shortest first, then all equal or all drawn, in turns."""
    if draw.index == 0:
        return [low] * count
    return [draw.size(low, high)] * count if draw.index % 2 else [draw.size(low, high) for _ in range(count)]


def _mask(lengths: list[int]) -> torch.Tensor:
    """Return true where there is an input: (inputs, longest)."""
    return torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]


SMALL: dict[str, Any] = {
    **WIDE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
VIDEOS = "pixel_values_videos"
VIDEOPRISM = {
    **WIDE,
    "tubelet_size": [1, 8, 8],
    "num_frames": 4,
    "num_spatial_layers": 3,
    "num_temporal_layers": 2,
}
VJEPA = {
    **WIDE,
    "hidden_size": 48,
    "crop_size": 32,
    "frames_per_clip": 8,
    "num_hidden_layers": 3,
    "pred_hidden_size": 24,
    "pred_num_attention_heads": 2,
    "pred_num_hidden_layers": 2,
    "pred_num_mask_tokens": 2,
    "num_pooler_layers": 1,
}
FRAMES = {**WIDE, "num_frames": 4}
VIT = ViTConfig(**{**SMALL, "image_size": 32, "patch_size": 8, "num_labels": 32})
PE_VIDEO = {
    **WIDE,
    "head_dim": 16,
    "vision_config": {
        "model_type": "timm_wrapper",
        "architecture": "vit_pe_core_tiny_patch16_384",
        "model_args": {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2},
        "num_classes": 32,
    },
}
XCLIP = {
    "num_frames": 4,
    "mit_hidden_size": 32,
    "mit_intermediate_size": 64,
    "mit_num_attention_heads": 2,
}
VQ = {
    "embed_dim": 32,
    "latent_channels": 32,
    "base_channels": 32,
    "channel_multiplier": [1, 1, 2],
    "num_res_blocks": 1,
}
QFORMER = {**WIDE, "encoder_hidden_size": 32, "num_hidden_layers": 4, "max_position_embeddings": 32}
RESAMPLER = {
    **WIDE,
    "resampler_n_latents": 4,
    "resampler_depth": 3,
    "resampler_n_heads": 4,
    "resampler_head_dim": 8,
    "num_key_value_heads": 2,
}
GRANITE4 = {
    "vision_config": {
        "model_type": "clip_vision_model",
        **SMALL,
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "image_size": 32,
        "patch_size": 8,
    },
    "text_config": {**SMALL, "num_hidden_layers": 1, "vocab_size": 64, "num_key_value_heads": 1},
    "qformer_config": {"model_type": "blip_2_qformer", "intermediate_size": 64, "num_hidden_layers": 2},
    "downsample_rate": "1/2",
    "deepstack_layer_map": [[-2, 0], [-1, 1]],
    "spatial_target_layers": [0, 1],
}
RESNET = {
    "model_type": "resnet",
    "embedding_size": 16,
    "hidden_sizes": [16, 32, 48],
    "depths": [1, 2, 1],
    "layer_type": "basic",
    "out_features": ["stage2", "stage3"],
}
SWIN = {
    **WIDE,
    "model_type": "swin",
    "image_size": 64,
    "patch_size": 4,
    "window_size": 4,
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 2],
    "out_indices": [1, 2],
}
NO_TIMM: dict[str, Any] = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}
"""Transformers 5.0 asks for these beside a backbone config."""
DETR = {"decoder_layers": 1}
LEVELS = {"num_feature_levels": 2, "encoder_n_points": 2, "decoder_n_points": 2}
SAM2 = {
    "backbone_config": {
        "model_type": "sam2_hiera_det_model",
        **WIDE,
        "hidden_size": 16,
        "num_attention_heads": 1,
        "image_size": [64, 64],
        "window_positional_embedding_background_size": [4, 4],
        "num_query_pool_stages": 2,
        "blocks_per_stage": [1, 2, 2],
        "embed_dim_per_stage": [16, 32, 64],
        "num_attention_heads_per_stage": [1, 2, 4],
        "window_size_per_stage": [4, 2, 4],
        "global_attention_blocks": [4],
    },
    "backbone_channel_list": [64, 32, 16],
    "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
    "fpn_hidden_size": 32,
    "fpn_top_down_levels": [1, 2],
    "num_feature_levels": 2,
}
SEGFORMER = {
    **WIDE,
    "num_encoder_blocks": 2,
    "depths": [2, 2],
    "sr_ratios": [4, 2],
    "hidden_sizes": [16, 32],
    "patch_sizes": [7, 3],
    "strides": [4, 2],
    "num_attention_heads": [1, 2],
    "mlp_ratios": [2, 2],
}
CONVNEXT = {"patch_size": 4, "num_stages": 3, "hidden_sizes": [16, 32, 48], "depths": [1, 2, 1]}

OTHERS: dict[str, Case] = {
    # video
    "videoprism": Case("videoprism.VideoPrismVisionModel", clips(name=VIDEOS), VIDEOPRISM),
    "videoprism[interp]": Case(
        "videoprism.VideoPrismVisionModel", clips((2, 9), any_side=8, name=VIDEOS), VIDEOPRISM, INTERPOLATED
    ),
    "videoprism_pooled": Case("videoprism.VideoPrismVideoModel", clips(name=VIDEOS), VIDEOPRISM),
    "videoprism_pooled[interp]": Case(
        "videoprism.VideoPrismVideoModel", clips((2, 9), any_side=8, name=VIDEOS), VIDEOPRISM, INTERPOLATED
    ),
    "vjepa2": Case("vjepa2.VJEPA2Model", clips((2, 12), step=2, name=VIDEOS), VJEPA),
    "vjepa2[features]": Case(
        "vjepa2.VJEPA2Model", clips((2, 12), step=2, name=VIDEOS), VJEPA, {"skip_predictor": True}
    ),
    "vjepa2[image]": Case("vjepa2.VJEPA2Model", clips((1, 1), name=VIDEOS), VJEPA, {"skip_predictor": True}),
    "xclip": Case("x_clip.XCLIPVisionModel", flat_frames(4), XCLIP),
    "xclip[interp]": Case("x_clip.XCLIPVisionModel", flat_frames(4, any_side=8), XCLIP, INTERPOLATED),
    "timesformer": Case("timesformer.TimesformerModel", clips(), FRAMES),
    "timesformer[joint]": Case(
        "timesformer.TimesformerModel",
        clips((2, 6), any_side=8),
        {**FRAMES, "attention_type": "joint_space_time"},
    ),
    "videomae": Case("videomae.VideoMAEModel", clips(), FRAMES),
    "videomae[masked]": Case("videomae.VideoMAEModel", hidden_patches, FRAMES),
    "vivit": Case("vivit.VivitModel", clips(), {**FRAMES, "tubelet_size": [2, 8, 8]}),
    "pe_video": Case("pe_video.PeVideoEncoder", masked_clips, PE_VIDEO),
    "pe_video[vit]": Case(
        "pe_video.PeVideoEncoder",
        masked_clips,
        {**PE_VIDEO, "vision_config": VIT},
        note="a ViT in place of timm's",
    ),
    "pe_audio_video": Case(
        "pe_audio_video.PeAudioVideoEncoder",
        clips_with_sound,
        {
            **WIDE,
            "head_dim": 16,
            "audio_config": {
                "model_type": "pe_audio_encoder",
                **SMALL,
                "head_dim": 16,
                "dac_config": {"encoder_hidden_size": 8, "downsampling_ratios": [2, 5], "codebook_dim": 16},
            },
            "video_config": PeVideoEncoderConfig(**{**SMALL, **PE_VIDEO, "vision_config": VIT}),
        },
        note="a ViT in place of timm's",
    ),
    # image tokenisers
    "chameleon": Case(
        "chameleon.ChameleonVQVAE",
        images(),
        {**VQ, "resolution": 32, "attn_resolutions": [16], "num_embeddings": 64},
        part="encoder",
    ),
    "chameleon[any]": Case(
        "chameleon.ChameleonVQVAE",
        any_size(16),
        {**VQ, "resolution": 32, "attn_resolutions": [16], "num_embeddings": 64},
        part="encoder",
    ),
    "emu3": Case(
        "emu3.Emu3VQVAE",
        clips((4, 8), step=4, any_side=16),
        {
            **VQ,
            "latent_channels": 4,
            "embed_dim": 4,
            "attn_resolutions": [2],
            "codebook_size": 64,
            "hidden_size": 64,
            "num_attention_heads": 1,
        },
        part="encoder",
    ),
    "janus_vq": Case("janus.JanusVQVAE", images(), {**VQ, "num_embeddings": 64, "num_patches": 8}, part="encoder"),
    # Q-Formers, resamplers and connectors
    "blip2_qformer": Case("blip_2.Blip2QFormerModel", queries, {"config_class": Blip2QFormerConfig, **QFORMER}),
    "instructblip_qformer": Case(
        "instructblip.InstructBlipQFormerModel",
        queries_and_text,
        {"config_class": InstructBlipQFormerConfig, **QFORMER},
    ),
    "instructblipvideo_qformer": Case(
        "instructblipvideo.InstructBlipVideoQFormerModel",
        queries_and_text,
        {"config_class": InstructBlipVideoQFormerConfig, **QFORMER},
    ),
    "granite_speech_projector": Case(
        "granite_speech.GraniteSpeechEncoderProjector",
        tokens(7, 60),
        {
            "window_size": 6,
            "downsample_rate": 2,
            "projector_config": {"model_type": "blip_2_qformer", **SMALL, **QFORMER},
            "text_config": {"model_type": "llama", **SMALL},
        },
    ),
    "granite4_vision_projector": Case(
        "granite4_vision.Granite4VisionModel",
        tokens(16, 16, 64, name="image_features"),
        GRANITE4,
        part="layerwise_projectors.0",
    ),
    "granite4_vision_projector[spatial]": Case(
        "granite4_vision.Granite4VisionModel",
        tokens(16, 16, 64, name="image_features"),
        GRANITE4,
        part="spatial_projectors.1",
    ),
    "idefics2_resampler": Case("idefics2.Idefics2PerceiverResampler", latents, RESAMPLER),
    "idefics2_connector": Case(
        "idefics2.Idefics2Model",
        connected,
        {
            "vision_config": {**SMALL, "image_size": 32, "patch_size": 8},
            "text_config": {"model_type": "mistral", **SMALL},
            "perceiver_config": {**RESAMPLER, "hidden_size": 32},
        },
        part="connector",
    ),
    "idefics_resampler": Case(
        "idefics.IdeficsModel",
        tokens(17, 65, name="context"),
        {
            "use_resampler": True,
            "perceiver_config": {
                "use_resampler": True,
                "resampler_n_latents": 4,
                "resampler_depth": 2,
                "resampler_n_heads": 2,
                "resampler_head_dim": 16,
                "qk_layer_norms_perceiver": True,
            },
            "vision_config": {"embed_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32},
        },
        part="perceiver_resampler",
    ),
    "kosmos2_projection": Case(
        "kosmos2.Kosmos2ImageToTextProjection",
        tokens(17, 65, name="features"),
        {
            "latent_query_num": 4,
            "vision_config": SMALL,
            "text_config": {"embed_dim": 32, "layers": 1, "ffn_dim": 64, "attention_heads": 2, "vocab_size": 64},
        },
    ),
    "aria_projector": Case(
        "aria.AriaProjector",
        either_length,
        {
            "projector_patch_to_query_dict": {16: 4, 64: 8},
            "vision_config": {"model_type": "idefics3_vision", **SMALL},
            "text_config": {"model_type": "aria_text", **SMALL},
        },
    ),
    "ernie4_5_vl_moe_resampler": Case(
        "ernie4_5_vl_moe.Ernie4_5_VLMoeVariableResolutionResamplerModel",
        resampled_grids,
        {"vision_config": {"hidden_size": 32, "intermediate_size": 64}, "text_config": SMALL},
    ),
    "mistral3_projector": Case(
        "mistral3.Mistral3MultiModalProjector",
        features_of_sizes,
        {
            "vision_config": {"model_type": "pixtral", **SMALL, "patch_size": 8},
            "text_config": {"model_type": "mistral", **SMALL},
        },
    ),
    "molmo2_adapter": Case(
        "molmo2.Molmo2Adapter",
        pooled_crops,
        {"vision_feature_layer": [-2, -1], "text_hidden_size": 32, "head_dim": 16, "num_key_value_heads": 2},
    ),
    "evolla": Case(
        "evolla.EvollaProteinEncoder",
        residues,
        {
            "protein_encoder_config": {**SMALL, "vocab_size": 64, "mask_token_id": 4, "max_position_embeddings": 64},
            "resampler_depth": 2,
            "resampler_dim_head": 16,
            "resampler_heads": 2,
            "resampler_num_latents": 4,
        },
    ),
    # more tokenisers and towers of multimodal models
    "glm_image": Case("glm_image.GlmImageVisionModel", packed("pixel_values", FLAT, merge=1, video=False)),
    "apertus1p5": Case(
        "apertus1p5.Apertus1p5VisionTokenizerModel",
        any_size(16),
        {**VQ, "resolution": 32, "attn_resolutions": [16], "codebook_size": 64},
        part="encoder",
    ),
    "flava_codebook": Case(
        "flava.FlavaImageCodebook", images(), {"hidden_size": 16, "num_blocks_per_group": 2, "vocab_size": 64}
    ),
    "inkling.vision": Case("inkling.InklingVisionModel", cubes, {"text_hidden_size": 32, "num_hidden_layers": 3}),
    # backbones and encoders of detectors
    "detr": Case("detr.DetrModel", padded_images(), {**DETR, **NO_TIMM, "backbone_config": RESNET}, part="backbone"),
    "detr_encoder": Case("detr.DetrEncoder", feature_map, DETR),
    "conditional_detr_encoder": Case("conditional_detr.ConditionalDetrEncoder", feature_map, DETR),
    "table_transformer_encoder": Case("table_transformer.TableTransformerEncoder", feature_map, DETR),
    "deformable_detr_encoder": Case("deformable_detr.DeformableDetrEncoder", feature_levels, LEVELS),
    "grounding_dino": Case(
        "grounding_dino.GroundingDinoModel",
        padded_images(16, 80),
        DINO := {**LEVELS, "backbone_config": SWIN, "text_config": {"model_type": "bert", **SMALL, "vocab_size": 64}},
        part="backbone",
    ),
    "mm_grounding_dino": Case("mm_grounding_dino.MMGroundingDinoModel", padded_images(16, 80), DINO, part="backbone"),
    "grounding_dino_encoder": Case("grounding_dino.GroundingDinoEncoder", levels_and_text, LEVELS),
    "mm_grounding_dino_encoder": Case("mm_grounding_dino.MMGroundingDinoEncoder", levels_and_text, LEVELS),
    "omdet": Case(
        "omdet_turbo.OmDetTurboVisionBackbone",
        any_size(16, native=32, low=32, high=80),
        {
            **NO_TIMM,
            "backbone_config": SWIN,
            "encoder_in_channels": [16, 32],
            "apply_layernorm_after_vision_backbone": False,
        },
    ),
    "rt_detr_encoder": Case(
        "rt_detr.RTDetrHybridEncoder",
        pyramid,
        {
            "encoder_hidden_dim": 32,
            "encoder_in_channels": [32, 32, 32],
            "encoder_ffn_dim": 64,
            "encoder_attention_heads": 2,
            "hidden_expansion": 0.5,
        },
    ),
    "sam2": Case("sam2.Sam2VisionModel", images(64, 64), SAM2),
    "sam2[any]": Case("sam2.Sam2VisionModel", any_size(32, native=64, low=64, high=128), SAM2),
    "sam_hq": Case(
        "sam_hq.SamHQVisionModel",
        images(),
        {**WIDE, "output_channels": 32, "window_size": 2, "global_attn_indexes": [1], "num_hidden_layers": 3}
        | {"num_pos_feats": 16, "mlp_dim": 64},
    ),
    "dpt": Case("dpt.DPTModel", any_size(), {**WIDE, "backbone_out_indices": [0, 1]}),
    "mgp_str": Case("mgp_str.MgpstrModel", images(32, 64), {**WIDE, "image_size": [32, 64]}),
    # backbones that no multimodal model has, for breadth
    "yolos": Case("yolos.YolosModel", any_size(), {**WIDE, "image_size": [32, 32], "num_detection_tokens": 4}),
    "segformer": Case("segformer.SegformerModel", any_size(32, native=64, low=64, high=128), SEGFORMER),
    "pvt": Case(
        "pvt.PvtModel",
        images(64, 64),
        {
            **WIDE,
            "image_size": 64,
            "num_encoder_blocks": 2,
            "depths": [2, 2],
            "sequence_reduction_ratios": [4, 1],
            "hidden_sizes": [16, 32],
            "patch_sizes": [4, 2],
            "strides": [4, 2],
            "num_attention_heads": [1, 2],
            "mlp_ratios": [2, 2],
        },
    ),
    "focalnet": Case(
        "focalnet.FocalNetModel",
        any_size(),
        {"embed_dim": 16, "patch_size": 4, "hidden_sizes": [16, 32], "depths": [2, 2]}
        | {"focal_levels": [2, 2], "focal_windows": [3, 3], "encoder_stride": 8},
    ),
    "vit_msn": Case("vit_msn.ViTMSNModel", images(), WIDE),
    "vit_msn[interp]": Case("vit_msn.ViTMSNModel", any_size(), WIDE, INTERPOLATED),
    "vitdet": Case(
        "vitdet.VitDetModel",
        any_size(),
        {**WIDE, "num_hidden_layers": 3, "pretrain_image_size": 32, "window_block_indices": [0, 1], "window_size": 2},
    ),
    "pixio": Case("pixio.PixioModel", images(), {**WIDE, "n_cls_tokens": 2}),
    "pixio[any]": Case("pixio.PixioModel", any_size(), {**WIDE, "n_cls_tokens": 2}),
    "sapiens2": Case(
        "sapiens2.Sapiens2Model",
        any_size(),
        {**WIDE, "num_hidden_layers": 3, "num_register_tokens": 2, "num_attention_heads": 4}
        | {
            "num_key_value_attention_heads": 2,
            "num_first_full_attention_layers": 1,
            "num_last_full_attention_layers": 1,
        },
    ),
    "convnextv2": Case("convnextv2.ConvNextV2Model", any_size(), CONVNEXT),
}
