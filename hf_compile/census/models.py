"""Every model of the installed Transformers that takes pixels or sound, read from Transformers' own mappings."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ..errors import UnsupportedModelError
from ..signature import unwrapped_forward

__all__ = ["build_on_meta", "media_models"]

# Tasks from media to text or labels, the fullest class of a model first: whoever is named here takes media.
_FROM_MEDIA = ("MULTIMODAL_LM", "IMAGE_TEXT_TO_TEXT", "SPEECH_SEQ_2_SEQ", "CTC", "RNNT", "TDT", "AUDIO_CLASSIFICATION")
# Tasks that a text model has too: a class named here counts when its forward takes media and text.
_WITH_TEXT = (
    "SEQ_TO_SEQ_CAUSAL_LM",
    "CAUSAL_LM",
    "VISUAL_QUESTION_ANSWERING",
    "DOCUMENT_QUESTION_ANSWERING",
    "QUESTION_ANSWERING",
    "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "ZERO_SHOT_OBJECT_DETECTION",
    "RETRIEVAL",
    "TEXT_TO_WAVEFORM",
    "PRETRAINING",
    "MASKED_LM",
)
# What some default configs lack: the model cannot be built without it, or is built without its encoders.
_MOE = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8}
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_LACKING: dict[str, dict[str, Any]] = {
    "aya_vision": {"vision_config": {"model_type": "siglip_vision_model"}},
    "chameleon": {"vocabulary_map": {"<image>": 4}},
    "cohere_compass": {"text_config": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}}},
    "deepseek_ocr2": {"text_config": {"num_hidden_layers": 2, "mlp_layer_types": ["dense", "dense"]}},
    "diffusion_gemma": {"text_config": _MOE},
    "embedding_gemma2": {"vision_config": {}, "audio_config": {}},
    "emu3": {"vocabulary_map": {"<image>": 4}},
    "fast_vlm": {"vision_config": {"model_type": "vit"}},  # instead of one of timm
    "gemma4": {"vision_config": {}, "audio_config": {}},
    "granite4_vision": {"deepstack_layer_map": [[0, 0]], "downsample_rate": "1/2"},
    "hunyuan_vl": {"text_config": {"head_dim": 128}},
    "moonshine_streaming": {"num_key_value_heads": 8},
    "qwen3_omni_moe": {"enable_audio_output": False},
    "wav2vec2-bert": {"vocab_size": 32},
    "wav2vec2-conformer": {"vocab_size": 32},
}
_MEDIA_WORDS = {"image", "pixel", "visual", "videos", "audio", "features", "values", "flattened"}


def media_models() -> list[tuple[str, type[nn.Module], type[Any]]]:
    """Return (model type, model class, config class) of each model that takes an image, a video or sound.

    One class a model type: the fullest, which is the first of the tasks from media to text, else one that takes media
    and text. Vision models without text (classifiers, detectors) and parts of other models (the text and vision
    configs of a model have types of their own) are left out. Every modeling file is imported, which takes seconds.
    """
    return list(_media_models())


def build_on_meta(model_type: str) -> nn.Module:
    """Build a model of `media_models` from its default config, without memory for its weights.

    A default config that lacks what its model needs gets it from a table.

    Raises:
        UnsupportedModelError: there is no such model, or it cannot be built; the message says why.
    """
    classes = {name: (cls, config_class) for name, cls, config_class in _media_models()}
    if model_type not in classes:
        raise UnsupportedModelError(f"{model_type!r} is none of media_models(): {', '.join(classes)}")
    cls, config_class = classes[model_type]
    try:
        with torch.device("meta"):
            model: nn.Module = cls(config_class(**_LACKING.get(model_type, {})))
    except (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UnsupportedModelError(
            f"{cls.__name__} cannot be built from a default {config_class.__name__}: {type(error).__name__}: {reason}"
        ) from error
    return model


@functools.cache
def _media_models() -> tuple[tuple[str, type[nn.Module], type[Any]], ...]:
    parts = _part_types()
    found: dict[str, tuple[str, type[nn.Module], type[Any]]] = {}
    for mapping in (
        *(f"MODEL_FOR_{task}_MAPPING_NAMES" for task in (*_FROM_MEDIA, *_WITH_TEXT)),
        "MODEL_MAPPING_NAMES",
    ):
        from_media = any(task in mapping for task in _FROM_MEDIA)
        names: dict[str, Any] = getattr(modeling_auto, mapping, {})  # some mappings are newer than Transformers 5.0
        for model_type, listed in names.items():
            if model_type in found or model_type in parts:
                continue
            for name in [listed] if isinstance(listed, str) else listed:
                cls = _class(name)
                if isinstance(cls, type) and issubclass(cls, nn.Module) and _belongs(cls, from_media):
                    found[model_type] = (model_type, cls, CONFIG_MAPPING[model_type])
                    break
    return tuple(found[model_type] for model_type in sorted(found))


def _class(name: str) -> Any:
    try:
        return getattr(transformers, name, None)
    except ImportError:  # its file needs a package that is not installed (torchvision)
        return None


def _part_types() -> set[str]:
    """Return the model types that are sub-configs of another."""
    sub_configs = [sub for config in CONFIG_MAPPING.values() for sub in getattr(config, "sub_configs", {}).values()]
    return {getattr(sub, "model_type", "") for sub in sub_configs}


def _belongs(cls: type[nn.Module], from_media: bool) -> bool:
    arguments = list(inspect.signature(unwrapped_forward(cls)).parameters)[1:]
    words = {word for name in arguments if name != "past_key_values" for word in name.split("_")}
    if from_media:
        declared = getattr(cls, "input_modalities", ())  # a forward may take everything by keyword
        return bool(words & _MEDIA_WORDS or {"image", "video", "audio"} & {*declared})
    return bool(words & _MEDIA_WORDS) and ("input_ids" in arguments)
