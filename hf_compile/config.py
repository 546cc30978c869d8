"""The options of hf_compile: validated once, frozen, and the only place where environment variables are read."""

from __future__ import annotations

import copy
import dataclasses
import enum
import hashlib
import itertools
import json
import os
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union

from .errors import ConfigurationError

__all__ = [
    "CONFIG_NAME",
    "MAX_INT32",
    "CompilationConfig",
    "CompilationMode",
    "CompileRange",
    "DimSpec",
    "DynamicShapesType",
    "Switch",
    "normalize_dims",
    "resolve_switch",
    "should_torch_compile_mm_encoder",
]

MAX_INT32 = 2**31 - 1
"""The end of the last compile range of an encoder: its sizes cannot be inferred from the model."""

CONFIG_NAME = "compilation_config.json"
"""File name used by `CompilationConfig.save_pretrained`."""

DimSpec = Union[int, "list[int]", "tuple[int, ...]", "Mapping[int, str]"]
"""One dim, several, or dim -> shape id (dims with equal ids have equal sizes). A negative dim counts from the end."""

_INTEGER = re.compile(r"-?[0-9]+")

ENV_SWITCH = "HF_COMPILE_MM_ENCODER"
ENV_CONFIG = "HF_COMPILE_CONFIG"
ENV_BACKEND = "HF_COMPILE_BACKEND"
ENV_COMPILER = "CXX"


class CompilationMode(enum.IntEnum):
    """How an encoder is compiled; the integers are those of vLLM's `CompilationMode`."""

    NONE = 0
    """Eager."""
    STOCK_TORCH_COMPILE = 1
    """Plain `encoder.compile()`: the baseline, with torch's own recompiles and graph breaks."""
    ONE_GRAPH = 2
    """Regions, but never a second graph: a call that would need one runs eager (or raises under `strict`)."""
    REGIONS = 3
    """Regions with guards; a new dtype, grad mode or a mask that was None is a counted further graph."""


class DynamicShapesType(str, enum.Enum):
    """How a dim that varies is told to the compiler; the names are vLLM's."""

    BACKED = "backed"
    """Symbols with a hint; sizes 0 and 1 are compiled apart."""
    UNBACKED = "unbacked"
    """Dim 0 without a hint, so nothing can be specialised on it; other dims backed."""
    BACKED_SIZE_OBLIVIOUS = "backed_size_oblivious"
    """Symbols with a hint, and 1 is a size like any other."""


@dataclasses.dataclass(frozen=True, order=True)
class CompileRange:
    """Sizes `start <= size <= end` served by one graph.

    Raises:
        ConfigurationError: the range is empty, or goes beyond 1 ... `MAX_INT32`.

    ```python
    >>> from hf_compile import CompileRange
    >>> 4096 in CompileRange(1, 1024), str(CompileRange(1025))
    (False, '1025..MAX_INT32')

    ```
    """

    start: int = 1
    end: int = MAX_INT32

    def __post_init__(self) -> None:
        for name, value in (("start", self.start), ("end", self.end)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigurationError(f"CompileRange.{name} must be an int, not {value!r}")
        if not 1 <= self.start <= MAX_INT32 or self.end > MAX_INT32:
            raise ConfigurationError(f"CompileRange({self.start}, {self.end}) must lie within 1 ... {MAX_INT32}")
        if self.start > self.end:
            raise ConfigurationError(f"CompileRange({self.start}, {self.end}) is empty; start must be at most end")

    def __contains__(self, size: object) -> bool:
        return isinstance(size, int) and self.start <= size <= self.end

    def __str__(self) -> str:
        return f"{self.start}..{'MAX_INT32' if self.end == MAX_INT32 else self.end}"


def normalize_dims(name: str, dims: DimSpec) -> dict[int, str | None]:
    """Return dim -> shape id (or None), whichever way the dims were given.

    Raises:
        ConfigurationError: the value is none of the legal forms, or names a dim twice.
    """
    items: list[tuple[Any, Any]]
    if isinstance(dims, Mapping):
        items = list(dims.items())
    elif isinstance(dims, (list, tuple)):
        items = [(dim, None) for dim in dims]
    else:
        items = [(dims, None)]
    for dim, shape_id in items:
        if isinstance(dim, bool) or not isinstance(dim, int) or not (shape_id is None or isinstance(shape_id, str)):
            raise ConfigurationError(
                f"dynamic_arg_dims[{name!r}]={dims!r} is not legal; give a dim (int), a list of dims, or a dict "
                "dim -> shape id"
            )
    if not items or len({dim for dim, _ in items}) != len(items):
        raise ConfigurationError(
            f"dynamic_arg_dims[{name!r}]={dims!r} is not legal; name at least one dim, and each only once"
        )
    return dict(items)


_MODES_OF_EXECUTION = {
    "inference": "compile",
    "no_grad": "compile",
    "grad": "compile",
    "train": "eager",
    "autocast": "compile",
}
_NOT_YET = {
    "cudagraph_mm_encoder",
    "encoder_cudagraph_token_budgets",
    "encoder_cudagraph_max_vision_items_per_batch",
    "encoder_cudagraph_max_frames_per_batch",
}


def _choice(name: str, value: Any, legal: tuple[Any, ...]) -> None:
    if value not in legal:
        raise ConfigurationError(f"{name}={value!r} is not legal; choose one of {', '.join(map(repr, legal))}")


def _flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ConfigurationError(f"{name}={value!r} is not legal; choose True or False")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompilationConfig:
    """Say how the encoders of a model are compiled.

    Args:
        compile_mm_encoder: the switch, for configs read from a file or passed to `from_pretrained`. The function
            `compile_mm_encoder` is a switch by itself.
        mode: see `CompilationMode`; an integer or a name is accepted.
        backend: a name known to torch, or a callable; default: the platform's.
        options: options of the backend, passed on untouched; `torch._inductor.list_options()` lists Inductor's.
        granularity: `"block"` compiles the repeated layers, `"encoder"` the whole encoder as one graph, `"auto"`
            blocks where layers repeat and the whole encoder elsewhere.
        dynamic_shapes: see `DynamicShapesType`.
        dynamic_arg_dims: dims of named arguments of a region's `forward` that vary, instead of what is inferred.
            The key is an argument name, or `"ClassName.argument"`.
        compile_ranges: sizes of dim 0 of a region's first tensor, one graph each; default: all of 1 ... `MAX_INT32`.
        out_of_range: `"error"` or `"eager"`, for a size outside every range.
        compile_sizes: sizes that get a graph of their own in which that one dim is fixed:
            `{"hidden_states.0": (256, 1024)}`, keyed by argument name and dim.
        execution_modes: `"compile"` or `"eager"` for each of inference, no_grad, grad, train and autocast. Training
            is eager by default, since dropout draws other numbers when compiled.
        strict: raise instead of running eager when a region cannot be compiled.
        fail_on_recompile: after the first graph of a region, a call that would need another one raises.
        recompile_limit: the most graphs of one region (and range).
        verify: compare the first call of every new graph with eager; a difference raises `VerificationError` under
            `strict`, and makes that call run eager otherwise.
        include_projector: also compile what lies between an encoder and the text model (projector, connector,
            Q-Former, resampler), each as a further encoder. A merger inside the encoder is compiled anyway.
        function_patches: compile functions of the model too that its family's patches name.
        compile_sampling: compile the warpers of `generate` (top-k, top-p, min-p); random draws stay as they are.
        encoders: module path -> options that differ for that encoder.

    Raises:
        ConfigurationError: an option is unknown, illegal, contradictory or not available yet.

    ```python
    >>> from hf_compile import CompilationConfig
    >>> CompilationConfig(mode=3, compile_ranges=[(1, 1024), (1025, 4096)]).compile_ranges[1].end
    4096

    ```
    """

    compile_mm_encoder: bool = False
    mode: CompilationMode | int | str = CompilationMode.REGIONS
    backend: str | Callable[..., Any] | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    granularity: Literal["auto", "block", "encoder"] = "auto"
    dynamic_shapes: DynamicShapesType | str = DynamicShapesType.BACKED_SIZE_OBLIVIOUS
    dynamic_arg_dims: Mapping[str, DimSpec] = dataclasses.field(default_factory=dict)
    compile_ranges: tuple[CompileRange, ...] = (CompileRange(),)
    out_of_range: Literal["error", "eager"] = "error"
    compile_sizes: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    execution_modes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    strict: bool = False
    fail_on_recompile: bool = False
    recompile_limit: int = 8
    verify: bool = False
    include_projector: bool = False
    function_patches: bool = True
    compile_sampling: bool = False
    encoders: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)

    def __new__(cls, **options: Any) -> CompilationConfig:
        """Refuse an unknown option in our words, before Python does."""
        _known_options(options)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        for field in dataclasses.fields(self):
            if isinstance(field.default, bool):
                _flag(field.name, getattr(self, field.name))
        for name in ("options", "dynamic_arg_dims", "compile_sizes", "execution_modes", "encoders"):
            value = getattr(self, name)
            if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
                raise ConfigurationError(f"{name}={value!r} is not legal; it must be a mapping whose keys are strings")
        put("mode", _parse_mode(self.mode))
        if self.compile_mm_encoder and self.mode == CompilationMode.NONE:
            raise ConfigurationError(
                "mode=0 (NONE) contradicts compile_mm_encoder=True; set mode to 1, 2 or 3, or leave the switch off"
            )
        if not (self.backend is None or callable(self.backend) or (isinstance(self.backend, str) and self.backend)):
            raise ConfigurationError(f"backend={self.backend!r} is not legal; it must be a name or a callable")
        _choice("granularity", self.granularity, ("auto", "block", "encoder"))
        _choice("out_of_range", self.out_of_range, ("error", "eager"))
        _choice("dynamic_shapes", self.dynamic_shapes, tuple(kind.value for kind in DynamicShapesType))
        put("dynamic_shapes", DynamicShapesType(self.dynamic_shapes))
        limit = self.recompile_limit
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise ConfigurationError(f"recompile_limit={limit!r} is not legal; it must be an int >= 1")
        put("compile_ranges", _parse_ranges(self.compile_ranges))
        # every mapping is copied, so that what the caller does with his own later changes nothing here
        put("options", dict(self.options))
        put("dynamic_arg_dims", {name: _parse_dims(name, dims) for name, dims in self.dynamic_arg_dims.items()})
        put("compile_sizes", {key: _parse_sizes(key, sizes) for key, sizes in self.compile_sizes.items()})
        for name, policy in self.execution_modes.items():
            _choice("execution_modes key", name, tuple(_MODES_OF_EXECUTION))
            _choice(f"execution_modes[{name!r}]", policy, ("compile", "eager"))
        put("execution_modes", {**_MODES_OF_EXECUTION, **self.execution_modes})
        put("encoders", {path: self._parse_overrides(path, options) for path, options in self.encoders.items()})

    def __hash__(self) -> int:  # the mappings have none; equal configs agree on these
        return hash((self.mode, self.backend, self.granularity, self.dynamic_shapes, self.compile_ranges))

    def _parse_overrides(self, path: str, options: Any) -> dict[str, Any]:
        of_the_model = ("compile_mm_encoder", "encoders", "include_projector", "function_patches", "compile_sampling")
        if not isinstance(options, Mapping) or set(of_the_model) & set(options):
            raise ConfigurationError(
                f"encoders[{path!r}]={options!r} is not legal; it must map option names (other than "
                f"{', '.join(map(repr, of_the_model))}) to values"
            )
        try:
            own = dataclasses.replace(self, **{"encoders": {}, **_known_options(options)})
        except ConfigurationError as error:
            raise ConfigurationError(f"encoders[{path!r}]: {error}") from None
        return {name: getattr(own, name) for name in options}

    def for_encoder(self, path: str) -> CompilationConfig:
        """Return the config of the encoder at this module path, with its overrides applied."""
        return dataclasses.replace(self, **{"encoders": {}, **self.encoders.get(path, {})})

    def to_dict(self) -> dict[str, Any]:
        """Return the options as JSON types.

        Raises:
            ConfigurationError: the backend is a callable, or one of its options is something that JSON cannot hold.
        """
        if self.backend is not None and not isinstance(self.backend, str):
            raise ConfigurationError(
                f"backend={self.backend!r} cannot be written to JSON; register it with torch by name"
            )
        try:
            json.dumps(self.options)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"options={self.options!r} cannot be written to JSON: {error}") from error
        return {
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)},
            "mode": int(self.mode),
            "dynamic_shapes": DynamicShapesType(self.dynamic_shapes).value,
            "compile_ranges": [[r.start, r.end] for r in self.compile_ranges],
            "compile_sizes": {key: list(sizes) for key, sizes in self.compile_sizes.items()},
            "dynamic_arg_dims": {
                name: {str(k): v for k, v in dims.items()} if isinstance(dims, Mapping) else copy.copy(dims)
                for name, dims in self.dynamic_arg_dims.items()
            },
            "options": dict(self.options),
            "execution_modes": dict(self.execution_modes),
            "encoders": {path: self._overrides_to_dict(path) for path in self.encoders},
        }

    def _overrides_to_dict(self, path: str) -> dict[str, Any]:
        own = self.for_encoder(path).to_dict()
        return {name: own[name] for name in self.encoders[path]}

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> CompilationConfig:
        """Build a config from JSON types; vLLM's own `{"mode": 0, "compile_mm_encoder": false}` is legal.

        Raises:
            ConfigurationError: an option is unknown or illegal.
        """
        if not isinstance(options, Mapping):
            raise ConfigurationError(f"a compilation config must be a JSON object, not {options!r}")
        return cls(**_with_integer_dims(_known_options(options)))

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the config as `compilation_config.json` into the folder, which is created."""
        path = pathlib.Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        (path / CONFIG_NAME).write_text(json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n", encoding="utf-8")

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str]) -> CompilationConfig:
        """Read a config from a JSON file, or from the `compilation_config.json` of a folder.

        Raises:
            ConfigurationError: there is no such file, or it holds no legal config.
        """
        file = pathlib.Path(path)
        if file.is_dir():
            file = file / CONFIG_NAME
        try:
            options = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigurationError(f"no compilation config at {file}: {error}") from error
        except ValueError as error:
            raise ConfigurationError(f"{file} is not JSON: {error}") from error
        return cls.from_dict(options)

    def compute_hash(self) -> str:
        """Return a hash of all that can change the compiled code; with the switch off nothing of it can."""
        if not self.compile_mm_encoder:
            return hashlib.sha256(b"off").hexdigest()
        factors = {**self.to_dict(), "strict": None, "fail_on_recompile": None, "verify": None, "out_of_range": None}
        return hashlib.sha256(json.dumps(factors, sort_keys=True).encode()).hexdigest()


def _known_options(options: Mapping[str, Any]) -> dict[str, Any]:
    legal = [field.name for field in dataclasses.fields(CompilationConfig)]
    for name in options:
        if name in _NOT_YET:
            raise ConfigurationError(f"option {name!r} is not available yet; leave it out")
        if name not in legal:
            raise ConfigurationError(f"unknown option {name!r}; legal options are {', '.join(legal)}")
    return dict(options)


def _with_integer_dims(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options read from JSON, which has no integer keys, with the dims of `dynamic_arg_dims` as integers."""
    known = dict(options)
    if isinstance(known.get("dynamic_arg_dims"), Mapping):
        known["dynamic_arg_dims"] = {
            name: {_integer(dim): shape_id for dim, shape_id in dims.items()} if isinstance(dims, Mapping) else dims
            for name, dims in known["dynamic_arg_dims"].items()
        }
    if isinstance(known.get("encoders"), Mapping):
        known["encoders"] = {
            path: _with_integer_dims(own) if isinstance(own, Mapping) else own
            for path, own in known["encoders"].items()
        }
    return known


def _integer(text: Any) -> Any:
    return int(text) if isinstance(text, str) and _INTEGER.fullmatch(text) else text


def _parse_dims(name: str, dims: DimSpec) -> DimSpec:
    normalize_dims(name, dims)
    return dict(dims) if isinstance(dims, Mapping) else dims if isinstance(dims, int) else list(dims)


def _parse_mode(mode: Any) -> CompilationMode:
    legal = ", ".join(f"{m.value} ({m.name})" for m in CompilationMode)
    try:
        if isinstance(mode, str) and not mode.isdigit():
            return CompilationMode[mode.upper()]
        if isinstance(mode, (bool, float)):
            raise ValueError
        return CompilationMode(int(mode))
    except (KeyError, ValueError, TypeError):
        raise ConfigurationError(f"mode={mode!r} is not legal; choose one of {legal}") from None


def _parse_ranges(ranges: Any) -> tuple[CompileRange, ...]:
    if not isinstance(ranges, (list, tuple)) or not ranges:
        raise ConfigurationError(f"compile_ranges={ranges!r} is not legal; give at least one (start, end)")
    parsed = []
    for item in ranges:
        if not isinstance(item, CompileRange):
            if not isinstance(item, (list, tuple)) or len(item) != 2:
                raise ConfigurationError(f"compile_ranges: {item!r} is not a (start, end)")
            item = CompileRange(*item)
        parsed.append(item)
    parsed.sort()
    for left, right in itertools.pairwise(parsed):
        if right.start <= left.end:
            raise ConfigurationError(f"compile_ranges overlap: {left} and {right}")
    return tuple(parsed)


def _parse_sizes(key: str, sizes: Any) -> tuple[int, ...]:
    name, _, dim = str(key).rpartition(".")
    sizes = (sizes,) if isinstance(sizes, int) else sizes
    if not name or not _INTEGER.fullmatch(dim):
        raise ConfigurationError(f"compile_sizes key {key!r} must be 'argument.dim', such as 'hidden_states.0'")
    if (
        not isinstance(sizes, (list, tuple))
        or not sizes
        or not all(isinstance(size, int) and not isinstance(size, bool) and size >= 1 for size in sizes)
    ):
        raise ConfigurationError(f"compile_sizes[{key!r}]={sizes!r} must be sizes >= 1")
    return tuple(sizes)


@dataclasses.dataclass(frozen=True)
class Switch:
    """The answer to "compile the encoder?", and who gave it."""

    enabled: bool
    config: CompilationConfig
    explicit: bool
    """Asked for by an argument; an ambient switch (environment, file) leaves a model without an encoder alone."""


def resolve_switch(
    compile_mm_encoder: bool | None = None,
    compilation_config: CompilationConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
) -> Switch:
    """Resolve the switch: argument, then `HF_COMPILE_MM_ENCODER`, then the config (argument or `HF_COMPILE_CONFIG`).

    Args:
        compile_mm_encoder: the keyword of a call, None when it was not given.
        compilation_config: a config, its options, or the path of a JSON file.

    Raises:
        ConfigurationError: an option or an environment variable is illegal.
    """
    if compile_mm_encoder is not None:
        _flag("compile_mm_encoder", compile_mm_encoder)
    config = _parse_config(compilation_config)
    from_environment = _environment_switch()
    if compile_mm_encoder is not None:
        enabled, explicit = compile_mm_encoder, True
    elif from_environment is not None:
        enabled, explicit = from_environment, False
    else:
        enabled, explicit = config.compile_mm_encoder, compilation_config is not None
    if enabled and config.mode == CompilationMode.NONE:
        raise ConfigurationError(
            "mode=0 (NONE) contradicts compile_mm_encoder=True; set mode to 1, 2 or 3, or leave the switch off"
        )
    return Switch(enabled, dataclasses.replace(config, compile_mm_encoder=enabled), explicit)


def _parse_config(config: Any) -> CompilationConfig:
    if isinstance(config, CompilationConfig):
        return config
    if isinstance(config, Mapping):
        return CompilationConfig.from_dict(config)
    if config is not None and not isinstance(config, (str, os.PathLike)):
        raise ConfigurationError(f"compilation_config={config!r} is not a CompilationConfig, a mapping or a path")
    source = os.environ.get(ENV_CONFIG, "").strip() if config is None else config
    if isinstance(source, str) and source.startswith("{"):
        try:
            parsed = CompilationConfig.from_dict(json.loads(source))
        except json.JSONDecodeError as error:
            name = ENV_CONFIG if config is None else "compilation_config"
            raise ConfigurationError(f"{name}={source!r} is not JSON: {error}") from error
    else:
        parsed = CompilationConfig.from_pretrained(source) if source else CompilationConfig()
    backend = environment_backend()  # the environment stands above a file, and below an argument
    return parsed if backend is None else dataclasses.replace(parsed, backend=backend)


def _environment_switch() -> bool | None:
    text = os.environ.get(ENV_SWITCH, "").strip().lower()
    if not text:
        return None
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off"):
        return False
    raise ConfigurationError(f"{ENV_SWITCH}={text!r} is not legal; use 1 or 0")


def environment_backend() -> str | None:
    """Return the backend named by `HF_COMPILE_BACKEND`, or None.

    Raises:
        ConfigurationError: the variable is set to nothing.
    """
    backend = os.environ.get(ENV_BACKEND)
    if backend is not None and not backend.strip():
        raise ConfigurationError(f"{ENV_BACKEND} is set but empty; name a backend or unset it")
    return None if backend is None else backend.strip()


def environment_compiler() -> str | None:
    """Return the C++ compiler that `CXX` names, which is Inductor's own variable, or None."""
    return os.environ.get(ENV_COMPILER, "").strip() or None


def should_torch_compile_mm_encoder(config: CompilationConfig) -> bool:
    """Say whether the config asks for a compiled encoder; made to be the `enable_if` of `support_torch_compile`.

    ```python
    >>> from hf_compile import CompilationConfig, should_torch_compile_mm_encoder
    >>> should_torch_compile_mm_encoder(CompilationConfig(compile_mm_encoder=True))
    True

    ```
    """
    return config.compile_mm_encoder and config.mode != CompilationMode.NONE
