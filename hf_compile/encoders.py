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

__all__ = ["EncoderInfo", "find_encoders", "find_projectors"]

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
    "audio_mel": "audio",
    "audio_input_ids": "audio",
    "feature_lens": "audio",
}
# Some models put a word before: image_pixel_values, high_res_pixel_values, audio_input_features.
_MEDIA_ENDINGS = {
    "_pixel_values": "image",
    "_pixel_values_videos": "video",
    "_input_features": "audio",
    "_input_values": "audio",
}
# What only a text side or a decoder takes: a module with one of these is more than an encoder. Not among them are
# `inputs_embeds` and a cache, which a streaming encoder takes too.
_TEXT_ARGUMENTS = {
    "input_ids",
    "decoder_input_ids",
    "decoder_input_values",
    "decoder_inputs_embeds",
    "encoder_hidden_states",
}
# What an encoder is never given: the answers of a head, the codes that a codec decodes.
_OUTER_ARGUMENTS = {"labels", "audio_codes"}
_MODALITIES = ("image", "video", "audio")
_SIGHT = {"image", "video"}


@dataclasses.dataclass(frozen=True)
class EncoderInfo:
    """An encoder of a model.

    Args:
        path: module path inside the model; `""` when the model itself is the encoder.
        module: the module at that path.
        modalities: what it encodes: image, video, audio, or what else the model puts beside text ("protein").
        found_by: how it was found, in words.
    """

    path: str
    module: nn.Module
    modalities: tuple[str, ...]
    found_by: str


def find_encoders(model: nn.Module, *, encoder: str | Iterable[str] | None = None) -> list[EncoderInfo]:
    """Find the encoders of a model, each once, in the order of the model's modules.

    A module counts when it holds layers, and its `forward` (or, where it has none, its `encode`) takes a media input
    and no text. So does a Transformers class that declares media as its only input. A head or a codec around an
    encoder is looked through. The model's own `get_encoder(modality)` is asked too, and never believed blindly, since
    it may answer with the model itself, None, the text side or the tower of another modality.

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
    for info in _other_modalities(model):
        found.setdefault(id(info.module), info)
    if not found:
        for info in _fed_with_embeddings(model):
            found[id(info.module)] = info
    if not found:
        raise EncoderNotFoundError(_not_found(model, answers))
    order = {id(module): position for position, module in enumerate(model.modules())}
    return sorted(found.values(), key=lambda info: order[id(info.module)])


def find_projectors(model: nn.Module, encoders: Iterable[EncoderInfo]) -> list[EncoderInfo]:
    """Find the modules between the encoders of a model and its text model: projectors, connectors, Q-Formers.

    They stand beside an encoder and a text model in a module that takes `inputs_embeds`, hold matrix products, and are
    used on the way of the features: by that module's `forward`, or by what it calls. A single layer of torch is none,
    since it gains nothing from a graph. A merger inside the encoder is part of it.

    Args:
        model: the model.
        encoders: what `find_encoders` returned for it.
    """
    encoders = list(encoders)
    inside = {id(module): info for info in encoders for module in info.module.modules()}
    found: dict[int, EncoderInfo] = {}
    for owner_path, owner in model.named_modules():
        if id(owner) in inside or "inputs_embeds" not in _arguments(owner):
            continue
        texts, media, rest = [], [], {}
        for name, child in owner.named_children():
            below = {inside[id(module)].path for module in child.modules() if id(module) in inside}
            if below and not any(map(_is_text_model, child.modules())):
                media += sorted(below)
            elif not below and _is_text_model(child):
                texts.append(f"{owner_path}.{name}".lstrip("."))
            elif not below:
                rest[name] = child
        if not texts or not media:
            continue
        used = _used_names(owner)
        words = f"it is a projector between {' and '.join(media)} and the text model {texts[0]}"
        modalities = {modality for info in encoders if info.path in media for modality in info.modalities}
        between = [
            (path, module)
            for name, child in rest.items()
            if name in used
            for path, module in _multipliers(child, f"{owner_path}.{name}".lstrip("."))
        ]
        if any(_takes_text(module) and "query_embeds" not in _arguments(module) for _, module in between):
            continue  # layers that mix both streams: the features never enter the text model
        for path, module in between:
            found.setdefault(id(module), _with_modalities(EncoderInfo(path, module, (), words), modalities))
    return list(found.values())


def _is_text_model(module: nn.Module) -> bool:
    return {"input_ids", "inputs_embeds"} <= set(_arguments(module)) and _has_stack(module)


def _used_names(module: nn.Module) -> set[str]:
    """Return the names in the code of a module's `forward` and of the methods of its own that this calls."""
    names: set[str] = set()
    methods = ["forward"]
    while methods:
        function = inspect.unwrap(getattr(type(module), methods.pop()))
        new = set(function.__code__.co_names) - names if inspect.isfunction(function) else set()
        names |= new
        methods += [name for name in new if inspect.isroutine(getattr(type(module), name, None))]
    return names


def _multipliers(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield a module that multiplies by matrices, or those in a list; none that is a single layer of torch."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        for name, child in module.named_children():
            yield from _multipliers(child, f"{path}.{name}")
        return
    matrices = sum(
        parameter.dim() >= 2
        for child in module.modules()
        if not isinstance(child, nn.Embedding)
        for parameter in child.parameters(recurse=False)
    )
    if matrices > type(module).__module__.startswith("torch.nn.") and _has_forward(module):
        yield path, module


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
    """Return the names of what a module is called with; one without a `forward` is called through its `encode`."""
    call = unwrapped_forward(module)
    if not _has_forward(module):
        call = inspect.unwrap(getattr(type(module), "encode", call))
    try:
        return list(inspect.signature(call).parameters)[1:]
    except (TypeError, ValueError):  # a forward without a Python signature
        return []


def _has_forward(module: nn.Module) -> bool:
    return unwrapped_forward(module) is not nn.Module.forward  # the placeholder that raises


def _medium(name: str) -> str | None:
    """Return what an argument carries, by its name."""
    if name in _TEXT_ARGUMENTS:
        return None
    endings = (medium for ending, medium in _MEDIA_ENDINGS.items() if name.endswith(ending))
    return _MEDIA_ARGUMENTS.get(name) or next(endings, None)


def _takes_text(module: nn.Module) -> bool:
    return bool(_TEXT_ARGUMENTS & set(_arguments(module)))


def _is_marked(module: nn.Module) -> bool:
    mark = find_mark(type(module))
    return mark is not None and mark.is_encoder


def _is_encoder(module: nn.Module) -> bool:
    if _is_marked(module):
        return True
    return not _takes_text(module) and bool(_carried(module) or _promised(module)) and _has_stack(module)


def _has_stack(module: nn.Module) -> bool:
    """Say whether a module holds layers; a patch embedding alone is no encoder."""
    return any(
        isinstance(child, (nn.ModuleList, nn.Sequential)) and next(child.parameters(), None) is not None
        for child in module.modules()
    )


def _outermost(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the topmost modules that encode; a head or a codec is looked through to the encoder in it, if any."""
    is_encoder = _is_encoder(module)
    if is_encoder and not _wraps_an_encoder(module):
        yield path, module
        return
    inside = [
        found for name, child in module.named_children() for found in _outermost(child, f"{path}.{name}".lstrip("."))
    ]
    if is_encoder:  # what is in it takes what it takes, else the names mean something else
        same = set(_modalities(module, path))
        inside = [found for found in inside if same & set(_modalities(found[1], found[0]))] or [(path, module)]
    yield from inside


def _wraps_an_encoder(module: nn.Module) -> bool:
    """Say whether a module only puts something around an encoder: a head, the decoder of a codec."""
    if _is_marked(module):
        return False
    if _OUTER_ARGUMENTS & set(_arguments(module)):
        return True
    base = getattr(module, getattr(module, "base_model_prefix", "") or " ", None)
    if not isinstance(base, nn.Module) or base is module or not _is_encoder(base):
        return False
    return not any(_has_stack(child) for child in module.children() if child is not base)


def _modalities(module: nn.Module, path: str) -> tuple[str, ...]:
    carried = _carried(module)
    declared = _declared(module)
    if not carried:
        carried = declared or _promised(module)
    elif carried & _SIGHT and declared & _SIGHT:  # video may come as pixel_values
        carried = carried - _SIGHT | declared & _SIGHT
    if carried == {"image"} and "video" in path.rpartition(".")[2]:
        carried = {"video"}
    return tuple(modality for modality in _MODALITIES if modality in carried)


def _carried(module: nn.Module) -> set[str]:
    """Return what the names of a module's arguments say that it takes."""
    return {medium for medium in map(_medium, _arguments(module)) if medium is not None}


def _declared(module: nn.Module) -> set[str]:
    """Return what Transformers says that a class takes; `input_modalities` is "text" where nobody wrote it down."""
    declared = getattr(module, "input_modalities", ())
    return set(_MODALITIES) & ({declared} if isinstance(declared, str) else set(declared))


def _promised(module: nn.Module) -> set[str]:
    """Return what a class declares to take when its argument, `hidden_states`, says nothing.

    It names media as its only input, or as its main one. A class whose main input is something else (the latents that
    a codec decodes) does not encode.
    """
    main = getattr(module, "main_input_name", None)
    if not isinstance(main, str) or not _is_called_with_hidden_states(module):
        return set()
    declared = getattr(module, "input_modalities", ())
    every = {declared} if isinstance(declared, str) else set(declared)
    if every <= set(_MODALITIES) and main == "input_ids":  # the default, where nobody wrote it down
        return every
    medium = _medium(main)
    return set() if medium is None else _declared(module) or {medium}


def _is_called_with_hidden_states(module: nn.Module) -> bool:
    """Say whether a module needs only `hidden_states` and masks; with a condition or a time step it decodes."""
    parameters = list(inspect.signature(unwrapped_forward(module)).parameters.values())[1:]
    needed = [each.name for each in parameters if each.default is each.empty and each.kind is not each.VAR_KEYWORD]
    return needed[:1] == ["hidden_states"] and all(name.endswith("mask") for name in needed[1:])


def _takes(model: nn.Module, modality: str) -> bool:
    return modality in _modalities(model, "") or modality in _declared(model)


def _words(module: nn.Module, path: str) -> str:
    if _is_marked(module):
        return "support_torch_compile(is_encoder=True)"
    names = [name for name in _arguments(module) if _medium(name)]
    call = "forward" if _has_forward(module) else "encode"
    words = (
        f"its {call} takes {', '.join(names)} and no text"
        if names
        else (f"its class declares {' and '.join(_modalities(module, path))} as its only input")
    )
    return words + ("" if path else "; the model itself is the encoder")


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


def _other_modalities(model: nn.Module) -> Iterator[EncoderInfo]:
    """Yield what encodes neither sight nor sound: for `protein_input_ids` there is a `protein_encoder`."""
    inputs = {name for name in _arguments(model) if name.endswith("_input_ids") and name not in _TEXT_ARGUMENTS}
    for path, module in model.named_modules():
        word, _, kind = path.rpartition(".")[2].rpartition("_")
        if kind == "encoder" and f"{word}_input_ids" in inputs and _has_stack(module):
            yield EncoderInfo(
                path, module, (word,), f"the model takes {word}_input_ids, and this is its {word} encoder"
            )


def _fed_with_embeddings(model: nn.Module) -> Iterator[EncoderInfo]:
    """Yield the encoder of a model with a decoder that embeds its media itself, so that no module takes them."""
    encoder = getattr(model, "encoder", None)
    if not isinstance(encoder, nn.Module) or not _has_stack(encoder):
        return
    takes = "decoder_input_ids" in _arguments(model) and _carried(model)
    if takes and not any(_carried(module) for module in model.modules() if module is not model):
        words = "the model embeds its media input itself, and hands it to this encoder as inputs_embeds"
        yield EncoderInfo("encoder", encoder, _modalities(model, ""), words)


def _not_found(model: nn.Module, answers: Mapping[str, nn.Module]) -> str:
    none = f"{type(model).__name__} has no separable vision, video or audio encoder: "
    by_hand = " If one of its modules is the encoder, name it: encoder='path.of.the.module'"
    everywhere = list(model.modules())
    if any(map(_takes_text, everywhere)) and not any(_carried(each) or _declared(each) for each in everywhere):
        return (
            f"{none}it takes no image, video or sound, only text. Load it without compile_mm_encoder, or compile it "
            f"by itself with model.compile().{by_hand}"
        )
    config = getattr(model, "config", None)
    absent = [name for name in ("vision_config", "audio_config") if getattr(config, name, name) is None]
    looked_at = [f"{path} ({type(child).__name__})" for path, child in model.named_children()]
    asked = ", ".join(f"{modality}: {type(answer).__name__}" for modality, answer in answers.items()) or "nothing"
    return (
        f"{none}no module below it takes a media input without text. get_encoder(modality) answers {asked}; looked "
        f"into {', '.join(looked_at) or 'no child'}."
        + (f" Its config says None for {' and '.join(absent)}, so that none was built." if absent else "")
        + by_hand
    )
