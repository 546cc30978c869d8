"""The encoders of Transformers, by the kind of their inputs."""

from .audio import AUDIO
from .images import IMAGES
from .masked import MASKED
from .others import OTHERS
from .packed import PACKED

__all__ = ["SAMPLE", "TABLES"]

TABLES = (PACKED, IMAGES, MASKED, AUDIO, OTHERS)

SAMPLE = (
    # packed, with helpers before the graph and the ragged operator; windows, deepstack, moe, per-image positions
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "glm_ocr", "ernie4_5_vl_moe", "paddleocr_vl", "muse_glimmer"),
    *("dots3_note.vision", "cosmos3_edge", "hunyuan_vl", "kimi_k25", "minimax_m3_vl", "inkling2", "minicpmv4_6"),
    # images of one size, and of any; pooling heads; batch in another dim; several stages
    *("clip", "clip[interp]", "siglip", "siglip[interp]", "blip2", "internvl", "llama4", "bridgetower", "groupvit"),
    *("got_ocr2", "step3p7", "sam3", "molmo2", "align", "vision_enc_dec(donut)", "dinov2"),
    # masks: kept, causal, several shapes
    *("idefics3", "siglip2", "phi4_mm.vision", "pixtral(mistral3,lighton_ocr)", "mllama", "gemma4.vision"),
    # sound: rotary tables, chunks, convolutions, relative positions
    *(
        "whisper",
        "qwen2_audio",
        "glmasr",
        "qwen2_5_omni.audio",
        "gemma4.audio",
        "seamless_m4t_v2",
        "wav2vec2",
        "wavlm",
    ),
    *("moonshine", "phi4_mm.audio", "granite_speech", "parakeet"),
    # video
    *("videoprism", "vjepa2", "timesformer"),
)
"""Encoders that stand for every remedy and every kind of region where a backend compiles, which takes long."""
