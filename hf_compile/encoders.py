"""Find the modules of a model that turn pixels or sound into features."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Iterable, Iterator, Mapping

from torch import nn

from .decorators import find_mark
from .errors import EncoderNotFoundError
from .signature import unwrapped_forward

__all__ = ["EncoderInfo", "find_encoders"]

# Names that Transformers gives to the media inputs of a forward, and what they carry.
_MEDIA_ARGUMENTS = {
    "pixel_values": "image",
    "pixel_values_images": "image",
    "images": "image",
    "image": "image",
    "flattened_patches": "image",
    "grid_thw": "image",
    "image_grid_thw": "image",
    "pixel_values_videos": "video",
    "pixel_values_video": "video",
    "videos": "video",
    "video_grid_thw": "video",
    "input_features": "audio",
    "input_values": "audio",
    "audio_values": "audio",
    "audio_features": "audio",
    "audio": "audio",
    "feature_lens": "audio",
}
# What only a text side or a decoder takes: a module with one of these is more than an encoder.
_TEXT_ARGUMENTS = {
    "input_ids",
    "inputs_embeds",
    "decoder_input_ids",
    "decoder_input_values",
    "encoder_hidden_states",
    "past_key_values",
}
_MODALITIES = ("image", "video", "audio")
_SIGHT = {"image", "video"}


@dataclasses.dataclass(frozen=True)
class EncoderInfo:
    """An encoder of a model.

    Args:
        path: module path inside the model; `""` when the model itself is the encoder.
        module: the module at that path.
        modalities: what it encodes, of image, video and audio.
        found_by: how it was found, in words.
    """

    path: str
    module: nn.Module
    modalities: tuple[str, ...]
    found_by: str


def find_encoders(model: nn.Module, *, encoder: str | Iterable[str] | None = None) -> list[EncoderInfo]:
    """Find the encoders of a model, each once, in the order of the model's modules.

    A module counts when its `forward` takes a media input and no text. The model's own `get_encoder(modality)` is
    asked too, and never believed blindly, since it may answer with the model itself, None, the text side or the tower
    of another modality.

    Args:
        model: a Transformers model, or any module.
        encoder: a module path, or several, instead of the search.

    Raises:
        EncoderNotFoundError: nothing was found, or a path does not exist.

    ```python
    >>> import torch, transformers
    >>> from hf_compile import find_encoders
    >>> with torch.device("meta"):
    ...     model = transformers.CLIPModel(transformers.CLIPConfig())
    >>> [(info.path, info.modalities) for info in find_encoders(model)]
    [('vision_model', ('image',))]

    ```
    """
    if encoder is not None:
        named: dict[int, EncoderInfo] = {}
        for info in (_named(model, path) for path in _paths(encoder)):
            named.setdefault(id(info.module), info)
        return list(named.values())

    found: dict[int, EncoderInfo] = {}
    for path, module in _outermost(model, ""):
        first = found.get(id(module), EncoderInfo(path, module, (), _words(module, path)))
        found[id(module)] = _with_modalities(first, _modalities(module, path))
    answers = _ask(model)
    paths = {id(module): path for path, module in model.named_modules()}
    for modality, answer in answers.items():
        path, words = paths[id(answer)], f"get_encoder({modality!r})"
        seen = found.get(id(answer))
        if seen is None:
            if _believable(model, answer, path, modality, answers) and not _related(path, found.values()):
                found[id(answer)] = EncoderInfo(path, answer, (modality,), words)
        elif modality in seen.modalities:
            if not seen.found_by.startswith("get_encoder"):
                found[id(answer)] = dataclasses.replace(seen, found_by=words)
        # another modality only when the model takes it and no encoder has it, and never across sight and sound
        elif (
            _takes(model, modality)
            and not any(modality in other.modalities for other in found.values())
            and ("audio" in seen.modalities) == (modality == "audio")
        ):
            found[id(answer)] = _with_modalities(seen, (modality,))
    if not found:
        raise EncoderNotFoundError(_not_found(model, answers))
    order = {id(module): position for position, module in enumerate(model.modules())}
    return sorted(found.values(), key=lambda info: order[id(info.module)])


def _paths(encoder: str | Iterable[str]) -> list[str]:
    paths = [encoder] if isinstance(encoder, str) else list(encoder) if isinstance(encoder, Iterable) else []
    if not paths or not all(isinstance(path, str) for path in paths):
        raise EncoderNotFoundError(
            f"encoder={encoder!r}: expected a module path such as 'model.vision_tower', or several of them"
        )
    return paths


def _named(model: nn.Module, path: str) -> EncoderInfo:
    modules = dict(model.named_modules(remove_duplicate=False))
    if path not in modules:
        close = [name for name in modules if name and name.rpartition(".")[2] == path.rpartition(".")[2]]
        close = close or difflib.get_close_matches(path, modules, n=3)
        children = [name for name, _ in model.named_children()]
        hint = f"did you mean {', '.join(close[:3])}?" if close else f"its children are {', '.join(children)}"
        raise EncoderNotFoundError(f"{type(model).__name__} has no module {path!r}; {hint}")
    module = modules[path]
    return EncoderInfo(path, module, _modalities(module, path) or ("image",), f"encoder={path!r}")


def _with_modalities(info: EncoderInfo, modalities: Iterable[str]) -> EncoderInfo:
    carried = {*info.modalities, *modalities}
    return dataclasses.replace(info, modalities=tuple(each for each in _MODALITIES if each in carried))


def _arguments(module: nn.Module) -> list[str]:
    try:
        return list(inspect.signature(unwrapped_forward(module)).parameters)[1:]
    except (TypeError, ValueError):  # a forward without a Python signature
        return []


def _takes_text(module: nn.Module) -> bool:
    return bool(_TEXT_ARGUMENTS & set(_arguments(module)))


def _is_encoder(module: nn.Module) -> bool:
    mark = find_mark(type(module))
    if mark is not None and mark.is_encoder:
        return True
    arguments = set(_arguments(module))
    return bool(arguments & set(_MEDIA_ARGUMENTS)) and not arguments & _TEXT_ARGUMENTS and _has_stack(module)


def _has_stack(module: nn.Module) -> bool:
    """Say whether a module holds layers; a patch embedding alone is no encoder."""
    return any(
        isinstance(child, (nn.ModuleList, nn.Sequential)) and next(child.parameters(), None) is not None
        for child in module.modules()
    )


def _outermost(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the topmost modules that encode; a head model that only adds a head is looked through to its base."""
    if _is_encoder(module):
        base_name = getattr(module, "base_model_prefix", "")
        base = getattr(module, base_name, None) if base_name else None
        if isinstance(base, nn.Module) and base is not module and _is_encoder(base):
            yield from _outermost(base, f"{path}.{base_name}".lstrip("."))
        else:
            yield path, module
        return
    for name, child in module.named_children():
        yield from _outermost(child, f"{path}.{name}".lstrip("."))


def _modalities(module: nn.Module, path: str) -> tuple[str, ...]:
    carried = _carried(module)
    declared = _declared(module)
    if not carried:
        carried = declared
    elif carried & _SIGHT and declared & _SIGHT:  # video may come as pixel_values
        carried = carried - _SIGHT | declared & _SIGHT
    if carried == {"image"} and "video" in path.rpartition(".")[2]:
        carried = {"video"}
    return tuple(modality for modality in _MODALITIES if modality in carried)


def _carried(module: nn.Module) -> set[str]:
    """Return what the names of a module's arguments say that it takes."""
    return {_MEDIA_ARGUMENTS[name] for name in _arguments(module) if name in _MEDIA_ARGUMENTS}


def _declared(module: nn.Module) -> set[str]:
    """Return what Transformers says that a class takes; `input_modalities` is "text" where nobody wrote it down."""
    declared = getattr(module, "input_modalities", ())
    return set(_MODALITIES) & ({declared} if isinstance(declared, str) else set(declared))


def _takes(model: nn.Module, modality: str) -> bool:
    return modality in _modalities(model, "") or modality in _declared(model)


def _words(module: nn.Module, path: str) -> str:
    mark = find_mark(type(module))
    if mark is not None and mark.is_encoder:
        return "support_torch_compile(is_encoder=True)"
    names = [name for name in _arguments(module) if name in _MEDIA_ARGUMENTS]
    return f"its forward takes {', '.join(names)} and no text" + ("" if path else "; the model itself is the encoder")


def _ask(model: nn.Module) -> dict[str, nn.Module]:
    """Return the answers of `get_encoder(modality)` that are modules below the model."""
    answers: dict[str, nn.Module] = {}
    get_encoder = getattr(model, "get_encoder", None)
    if get_encoder is None or "modality" not in inspect.signature(get_encoder).parameters:
        return answers
    inside = {id(module) for module in model.modules()} - {id(model)}
    for modality in _MODALITIES:
        try:
            answer = get_encoder(modality=modality)
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):  # a model without such a side
            continue
        if isinstance(answer, nn.Module) and id(answer) in inside:
            answers[modality] = answer
    return answers


def _believable(
    model: nn.Module, answer: nn.Module, path: str, modality: str, answers: Mapping[str, nn.Module]
) -> bool:
    """Say whether an answer whose arguments tell nothing may be an encoder."""
    both = any((other == "audio") != (modality == "audio") and answers[other] is answer for other in answers)
    parents = [model.get_submodule(path[:end]) for end, letter in enumerate(path) if letter == "."]
    in_text_side = any(_takes_text(parent) and not _carried(parent) for parent in parents)
    return not (both or in_text_side or _takes_text(answer)) and _has_stack(answer)


def _related(path: str, infos: Iterable[EncoderInfo]) -> bool:
    """Say whether a path is at, above or below an encoder that was found already."""
    return any(
        path == info.path or path.startswith(info.path + ".") or info.path.startswith(path + ".") or not info.path
        for info in infos
    )


def _not_found(model: nn.Module, answers: Mapping[str, nn.Module]) -> str:
    looked_at = [f"{name} ({type(child).__name__})" for name, child in model.named_children()]
    asked = ", ".join(f"{modality}: {type(answer).__name__}" for modality, answer in answers.items()) or "nothing"
    return (
        f"{type(model).__name__} has no separable vision, video or audio encoder: no module below it takes a media "
        f"input without text. get_encoder(modality) answers {asked}; looked into {', '.join(looked_at) or 'no child'}."
        " If one of its modules is the encoder, name it: encoder='path.of.the.module'"
    )
