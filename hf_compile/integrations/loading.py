"""Load a model and compile its encoders, or plan it from its config alone."""

from __future__ import annotations

import contextvars
import copy
import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import transformers
from torch import nn
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.utils import logging
from transformers.utils.peft_utils import find_adapter_config_file

from ..api import compile_mm_encoder as compile_model
from ..api import plan_model
from ..config import CompilationConfig, CompilationMode, Switch, resolve_switch
from ..encoders import find_encoders
from ..errors import ConfigurationError, EncoderNotFoundError, HfCompileError, UnsupportedModelError
from ..platforms import check_backend
from ..report import StatusReport, report
from .transformers import KEYWORDS

__all__ = ["check_keywords", "from_pretrained", "inspect_mm_encoder", "load_with_keywords"]

logger = logging.get_logger("transformers.hf_compile")

Path = str | os.PathLike[str]
Config = CompilationConfig | Mapping[str, Any] | str | os.PathLike[str] | None
Encoder = str | Iterable[str] | None

# Keywords that decide which config is read, and from where.
_HUB_KEYWORDS = (
    "cache_dir",
    "code_revision",
    "force_download",
    "gguf_file",
    "local_files_only",
    "proxies",
    "revision",
    "subfolder",
    "token",
    "trust_remote_code",
)
# Keywords with the name of a config attribute that leave the modules of a model as they are.
_HARMLESS_OVERRIDES = ("attn_implementation", "dtype", "experts_implementation", "torch_dtype")
# For a checkpoint that names no class: these first, since the rest drop the language model or the decoder.
_FIRST_AUTO_CLASSES = (
    "AutoModelForMultimodalLM",
    "AutoModelForImageTextToText",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForCTC",
    "AutoModel",
)

_inside_load = contextvars.ContextVar("hf_compile_inside_load", default=False)


def from_pretrained(
    id_or_path: Path | None,
    *,
    compile_mm_encoder: bool | None = None,
    compilation_config: Config = None,
    auto_class: type | str | None = None,
    encoder: Encoder = None,
    **kwargs: Any,
) -> Any:
    """Load a model as Transformers does, and compile its vision, video and audio encoders when asked to.

    The switch is the keyword, else `HF_COMPILE_MM_ENCODER`, else the `compile_mm_encoder` of the config, else off.
    With the switch off the model is exactly what Transformers returns, and `compilation_config` and `encoder` have no
    effect. An argument that asks for a compiled encoder insists on it; an environment variable, or a JSON file named
    by `HF_COMPILE_CONFIG`, leaves a model without an encoder alone, with one info line.

    Args:
        id_or_path: a repository id, or a folder written by `save_pretrained`.
        compile_mm_encoder: the switch.
        compilation_config: a `CompilationConfig`, its options, or the path of a JSON file.
        auto_class: a class, or its name in Transformers, to load with. Default: the one that the checkpoint's
            `architectures` names, else the Auto class that fits its config.
        encoder: module path of the encoder, or several, instead of the search; such as `"model.vision_tower"`.
        **kwargs: everything else goes to Transformers untouched (`dtype`, `device_map`, `revision`, ...).

    Returns:
        The model; with `output_loading_info=True` the model and that information.

    Raises:
        ConfigurationError: an option is illegal (before any file is read), or does not fit this model.
        EncoderNotFoundError: an argument asked for a compiled encoder, and the model has none.
        UnsupportedModelError: no class of Transformers fits the checkpoint.

    ```python
    >>> import tempfile, hf_compile
    >>> from transformers import SiglipVisionConfig, SiglipVisionModel
    >>> size = dict(hidden_size=32, intermediate_size=64, num_attention_heads=2, image_size=32, patch_size=8)
    >>> folder = tempfile.mkdtemp()
    >>> SiglipVisionModel(SiglipVisionConfig(num_hidden_layers=2, **size)).save_pretrained(folder)
    >>> model = hf_compile.from_pretrained(folder, compile_mm_encoder=True, dtype="float32")
    >>> [region["state"] for region in hf_compile.status(model).to_dict()["encoders"][0]["regions"]][1]
    'pending'

    ```
    """
    switch = _checked_switch(compile_mm_encoder, compilation_config)
    paths = _paths(encoder)
    if auto_class is not None:
        chosen = _named_class(auto_class)
    else:
        config = _read_config(id_or_path, kwargs)
        chosen = _class_for(config, kwargs.get("trust_remote_code"))
        if switch.enabled and switch.explicit and not _overrides(config, kwargs):
            _refuse_early(chosen, config, paths)
    if not _is_auto(chosen):
        kwargs.pop("code_revision", None)  # only Auto classes know it, and only remote code has one
    return _load(lambda: chosen.from_pretrained(id_or_path, **kwargs), switch, paths)


def inspect_mm_encoder(
    model_or_id: Any,
    *,
    compilation_config: Config = None,
    encoder: Encoder = None,
    auto_class: type | str | None = None,
    **hub_kwargs: Any,
) -> StatusReport:
    """Return what would be compiled, and how, without changing anything; of an id or a folder only the config is read.

    Args:
        model_or_id: a repository id, a folder, a model or a pipeline.
        compilation_config: a `CompilationConfig`, its options, or the path of a JSON file.
        encoder: module path of the encoder, or several, instead of the search.
        auto_class: as for `from_pretrained`.
        **hub_kwargs: where the config is, such as `revision`; `attn_implementation` counts too, and what else
            `from_pretrained` takes changes nothing here.

    Returns:
        A report in which every region is "pending".

    Raises:
        ConfigurationError: an option is illegal, or does not fit this model.
        EncoderNotFoundError: there is no encoder, or not at that path.
        UnsupportedModelError: the object is no model, or no class of Transformers fits the checkpoint.
    """
    config = resolve_switch(None, compilation_config).config
    paths = _paths(encoder)
    model, note = model_or_id, ""
    if isinstance(model_or_id, (str, os.PathLike)):
        chosen = _named_class(auto_class) if auto_class is not None else None
        model_config = _read_config(model_or_id, hub_kwargs)
        chosen = chosen or _class_for(model_config, hub_kwargs.get("trust_remote_code"))
        counted = ("attn_implementation", "trust_remote_code") if _is_auto(chosen) else ("attn_implementation",)
        options = {name: hub_kwargs[name] for name in counted if name in hub_kwargs}
        try:
            model = _skeleton(chosen, model_config, **options)
        except (ImportError, OSError, ValueError):  # in the words of Transformers: a package is missing, ...
            raise
        except Exception as error:
            raise UnsupportedModelError(
                f"{chosen.__name__} cannot be built from its config without weights, which fails with "
                f"{type(error).__name__}: {error}; load it, and inspect the model"
            ) from error
        note = "planned from the config alone, without weights"
    if config.mode == CompilationMode.NONE:
        note = "; ".join(filter(None, (note, "mode 0 (NONE): nothing of this would be compiled")))
    return dataclasses.replace(report(plan_model(model, config, paths)), note=note)


def load_with_keywords(load: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    """Load with a `from_pretrained` of Transformers, after taking our keywords out of those it was given.

    Only the outermost model of a load is compiled: a part of a model is loaded as Transformers does.
    """
    given = {name: kwargs.pop(name, None) for name in KEYWORDS}
    if _inside_load.get():
        return load(**kwargs)
    try:
        return _load(lambda: load(**kwargs), _checked_switch(*given.values()), None)
    except HfCompileError as error:
        # A pipeline takes these for a class that does not fit, and goes on to load with another dtype and class.
        if "_from_pipeline" in kwargs and isinstance(error, (OSError, RuntimeError, TypeError, ValueError)):
            raise HfCompileError(str(error)) from error
        raise


def check_keywords(kwargs: Mapping[str, Any]) -> None:
    """Refuse what `load_with_keywords` would refuse, before anything is read.

    Raises:
        ConfigurationError: an option is illegal.
    """
    if not _inside_load.get():
        resolve_switch(*(kwargs.get(name) for name in KEYWORDS))


def _checked_switch(compile_mm_encoder: bool | None, compilation_config: Config) -> Switch:
    """Resolve the switch, and refuse a backend that torch does not know, before anything is loaded."""
    switch = resolve_switch(compile_mm_encoder, compilation_config)
    if switch.enabled:
        for config in (switch.config, *map(switch.config.for_encoder, switch.config.encoders)):
            check_backend(config)
    return switch


def _load(load: Callable[[], Any], switch: Switch, paths: tuple[str, ...] | None) -> Any:
    outermost = _inside_load.set(True)
    try:
        loaded = load()
    finally:
        _inside_load.reset(outermost)
    if switch.enabled:
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        try:
            compile_model(model, compilation_config=switch.config, encoder=paths)
        except (EncoderNotFoundError, UnsupportedModelError) as error:
            if switch.explicit or paths is not None:
                raise
            logger.info(f"{type(model).__name__} is left as it is: {error}")
    return loaded


def _paths(encoder: Encoder) -> tuple[str, ...] | None:
    if encoder is None:
        return None
    paths = (encoder,) if isinstance(encoder, str) else tuple(encoder) if isinstance(encoder, Iterable) else ()
    if not paths or not all(isinstance(path, str) for path in paths):
        raise ConfigurationError(f"encoder={encoder!r} is not legal; give a module path such as 'model.vision_tower'")
    return paths


def _read_config(id_or_path: Path | None, kwargs: Mapping[str, Any]) -> Any:
    """Return the model config that `from_pretrained` with these keywords starts from."""
    config = kwargs.get("config")
    if isinstance(config, transformers.PreTrainedConfig):
        return config
    hub = {name: kwargs[name] for name in _HUB_KEYWORDS if name in kwargs}
    source: Any = id_or_path if config is None else config
    try:
        return transformers.AutoConfig.from_pretrained(source, **hub)
    except (OSError, ValueError):  # a folder of an adapter has no model config, but names its base model
        base = _base_of_adapter(source, hub)
        if base is None:
            raise
        for name in ("code_revision", "revision", "subfolder"):  # they say where in the adapter's repository
            hub.pop(name, None)
        return transformers.AutoConfig.from_pretrained(base, **hub)


def _base_of_adapter(id_or_path: Any, hub: Mapping[str, Any]) -> str | None:
    names = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
    file = find_adapter_config_file(id_or_path, **{name: hub[name] for name in names if name in hub})
    if file is None:
        return None
    with open(file, encoding="utf-8") as stream:
        base: str | None = json.load(stream).get("base_model_name_or_path")
    return base


def _named_class(auto_class: type | str) -> Any:
    found = getattr(transformers, auto_class, None) if isinstance(auto_class, str) else auto_class
    if not isinstance(found, type) or not hasattr(found, "from_pretrained"):
        raise ConfigurationError(
            f"auto_class={auto_class!r} is not legal; give a class with from_pretrained, or its name in Transformers, "
            "such as 'AutoModelForImageTextToText'"
        )
    return found


def _class_for(config: Any, trust_remote_code: bool | None) -> Any:
    """Return the class a checkpoint names, else the Auto class that fits its config."""
    architectures = getattr(config, "architectures", None) or ()
    named = [getattr(transformers, name, None) for name in architectures]
    local = next((found for found in named if found is not None and _fits(found, config)), None)
    remote = getattr(config, "auto_map", None) or {}
    if local is not None and not (remote and trust_remote_code):
        return local
    others = (name for name in dir(transformers) if name.startswith("AutoModelFor"))
    auto_classes = {name: getattr(transformers, name, None) for name in (*_FIRST_AUTO_CLASSES, *others)}
    mapped = [name for name in auto_classes if name in remote and auto_classes[name] is not None]
    exact = [name for name in mapped if str(remote[name]).rpartition(".")[2] in architectures]
    if mapped:
        return auto_classes[(exact or mapped)[0]]
    for found in auto_classes.values():
        if found is not None and type(config) in found._model_mapping:
            return found
    raise UnsupportedModelError(
        f"no Auto class of Transformers {transformers.__version__} loads a {type(config).__name__}, and architectures "
        "names no class of Transformers; pass auto_class="
    )


def _fits(found: Any, config: Any) -> bool:
    wanted = getattr(found, "config_class", None)
    return isinstance(found, type) and (wanted is None or isinstance(config, wanted))


def _is_auto(chosen: Any) -> bool:
    return hasattr(chosen, "_model_mapping")


def _skeleton(chosen: Any, config: Any, **options: Any) -> nn.Module:
    """Return the model of a config on the meta device: its modules, without memory for weights."""
    build = chosen.from_config if _is_auto(chosen) else chosen._from_config
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model: nn.Module = build(copy.deepcopy(config), **options)
    return model.eval()


def _overrides(config: Any, kwargs: Mapping[str, Any]) -> bool:
    """Say whether keywords change the config, so that the skeleton of the config as it is tells nothing."""
    return any(hasattr(config, name) for name in kwargs if name not in _HARMLESS_OVERRIDES)


def _refuse_early(chosen: Any, config: Any, paths: tuple[str, ...] | None) -> None:
    """Refuse a model without an encoder before its weights are read.

    Raises:
        EncoderNotFoundError: there is none.
    """
    zero3 = is_deepspeed_zero3_enabled()  # type: ignore[no-untyped-call]
    if zero3 or (_is_auto(chosen) and getattr(config, "auto_map", None)):
        return  # ZeRO-3 shards whatever is built, and remote code is run once, by Transformers
    try:
        find_encoders(_skeleton(chosen, config), encoder=paths)
    except EncoderNotFoundError:
        raise
    except Exception as error:  # noqa: BLE001 - this only saves time, and must not stop a load that works
        logger.debug(f"{type(config).__name__} was not checked before its weights: {error}")
