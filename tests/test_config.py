"""Options: what is legal, what the refusals say, who wins, and what goes to a file and comes back."""

import copy
import dataclasses
import json
import pickle
import re

import pytest
import torch

from hf_compile import (
    MAX_INT32,
    CompilationConfig,
    CompilationMode,
    CompileRange,
    ConfigurationError,
    DynamicShapesType,
    HfCompileError,
    should_torch_compile_mm_encoder,
)
from hf_compile.config import CONFIG_NAME, environment_backend, normalize_dims, resolve_switch

OPTIONS = [field.name for field in dataclasses.fields(CompilationConfig)]
MODES = "choose one of 0 (NONE), 1 (STOCK_TORCH_COMPILE), 2 (ONE_GRAPH), 3 (REGIONS)"
EVERYTHING = {
    "compile_mm_encoder": True,
    "mode": 2,
    "backend": "eager",
    "options": {"max_autotune": True},
    "granularity": "block",
    "dynamic_shapes": "unbacked",
    "dynamic_arg_dims": {"x": 0, "Block.y": (0, -1), "z": {0: "length", 1: "width"}},
    "compile_ranges": [CompileRange(9, 12), (1, 8)],
    "out_of_range": "eager",
    "compile_sizes": {"x.0": 4, "z.-1": [2, 3]},
    "execution_modes": {"train": "compile"},
    "strict": True,
    "fail_on_recompile": True,
    "recompile_limit": 3,
    "verify": True,
    "include_projector": True,
    "encoders": {
        "model.visual": {"compile_ranges": [(1, 4)], "dynamic_arg_dims": {"x": {0: "rows"}}, "mode": "regions"}
    },
}


@pytest.fixture(autouse=True)
def _no_ambient_options(monkeypatch):
    for name in ("HF_COMPILE_MM_ENCODER", "HF_COMPILE_CONFIG", "HF_COMPILE_BACKEND"):
        monkeypatch.delenv(name, raising=False)


def refusal(action, *args, **kwargs):
    with pytest.raises(ConfigurationError) as caught:
        action(*args, **kwargs)
    assert isinstance(caught.value, HfCompileError)
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


# ---- what is legal


@pytest.mark.smoke
def test_defaults():
    config = CompilationConfig()
    assert (config.compile_mm_encoder, config.mode, config.backend) == (False, CompilationMode.REGIONS, None)
    assert config.compile_ranges == (CompileRange(1, MAX_INT32),)
    assert config.dynamic_shapes is DynamicShapesType.BACKED_SIZE_OBLIVIOUS
    assert config.execution_modes["train"] == "eager"
    assert set(config.execution_modes.values()) == {"compile", "eager"}


def test_integers_and_names_are_those_of_the_field():
    assert [mode.value for mode in CompilationMode] == [0, 1, 2, 3]
    assert [mode.name for mode in CompilationMode][:2] == ["NONE", "STOCK_TORCH_COMPILE"]
    assert [kind.value for kind in DynamicShapesType] == ["backed", "unbacked", "backed_size_oblivious"]


@pytest.mark.parametrize("mode", [1, "1", "stock_torch_compile", "STOCK_TORCH_COMPILE", CompilationMode(1)])
def test_mode_is_an_integer_or_a_name(mode):
    assert CompilationConfig(mode=mode).mode is CompilationMode.STOCK_TORCH_COMPILE


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"compile_mm_encoder": 1}, "compile_mm_encoder=1 is not legal; choose True or False"),
        ({"strict": "yes"}, "strict='yes' is not legal; choose True or False"),
        ({"fail_on_recompile": None}, "fail_on_recompile=None is not legal; choose True or False"),
        ({"verify": 0}, "verify=0 is not legal; choose True or False"),
        ({"include_projector": "yes"}, "include_projector='yes' is not legal; choose True or False"),
        ({"mode": 4}, f"mode=4 is not legal; {MODES}"),
        ({"mode": -1}, f"mode=-1 is not legal; {MODES}"),
        ({"mode": 1.5}, f"mode=1.5 is not legal; {MODES}"),
        ({"mode": True}, f"mode=True is not legal; {MODES}"),
        ({"mode": None}, f"mode=None is not legal; {MODES}"),
        ({"mode": "fast"}, f"mode='fast' is not legal; {MODES}"),
        (
            {"mode": 0, "compile_mm_encoder": True},
            "mode=0 (NONE) contradicts compile_mm_encoder=True; set mode to 1, 2 or 3, or leave the switch off",
        ),
        ({"backend": ""}, "backend='' is not legal; it must be a name or a callable"),
        ({"backend": 3}, "backend=3 is not legal; it must be a name or a callable"),
        ({"options": ["a"]}, "options=['a'] is not legal; it must be a mapping whose keys are strings"),
        ({"granularity": "layer"}, "granularity='layer' is not legal; choose one of 'auto', 'block', 'encoder'"),
        (
            {"dynamic_shapes": "yes"},
            "dynamic_shapes='yes' is not legal; choose one of 'backed', 'unbacked', 'backed_size_oblivious'",
        ),
        ({"out_of_range": "pad"}, "out_of_range='pad' is not legal; choose one of 'error', 'eager'"),
        ({"recompile_limit": 0}, "recompile_limit=0 is not legal; it must be an int >= 1"),
        ({"recompile_limit": True}, "recompile_limit=True is not legal; it must be an int >= 1"),
        ({"recompile_limit": 2.0}, "recompile_limit=2.0 is not legal; it must be an int >= 1"),
        ({"compile_ranges": []}, "compile_ranges=[] is not legal; give at least one (start, end)"),
        ({"compile_ranges": "1-4"}, "compile_ranges='1-4' is not legal; give at least one (start, end)"),
        ({"compile_ranges": (1, 4)}, "compile_ranges: 1 is not a (start, end)"),
        ({"compile_ranges": [(1, 8), (8, 9)]}, "compile_ranges overlap: 1..8 and 8..9"),
        ({"compile_ranges": [(5, MAX_INT32), (1, 9)]}, "compile_ranges overlap: 1..9 and 5..MAX_INT32"),
        ({"compile_ranges": [(4, 3)]}, "CompileRange(4, 3) is empty; start must be at most end"),
        ({"compile_ranges": [(0, 3)]}, "CompileRange(0, 3) must lie within 1 ... 2147483647"),
        ({"compile_ranges": [(1, 2**31)]}, "CompileRange(1, 2147483648) must lie within 1 ... 2147483647"),
        ({"compile_ranges": [(1, 2.0)]}, "CompileRange.end must be an int, not 2.0"),
        ({"compile_ranges": [(True, 2)]}, "CompileRange.start must be an int, not True"),
        ({"compile_sizes": {"x": 3}}, "compile_sizes key 'x' must be 'argument.dim', such as 'hidden_states.0'"),
        (
            {"compile_sizes": {"x.--1": 3}},
            "compile_sizes key 'x.--1' must be 'argument.dim', such as 'hidden_states.0'",
        ),
        ({"compile_sizes": {"x.0": []}}, "compile_sizes['x.0']=[] must be sizes >= 1"),
        ({"compile_sizes": {"x.0": [0]}}, "compile_sizes['x.0']=[0] must be sizes >= 1"),
        ({"compile_sizes": {"x.0": "12"}}, "compile_sizes['x.0']='12' must be sizes >= 1"),
        ({"compile_sizes": {0: 3}}, "compile_sizes={0: 3} is not legal; it must be a mapping whose keys are strings"),
        (
            {"execution_modes": {"eval": "eager"}},
            "execution_modes key='eval' is not legal; "
            "choose one of 'inference', 'no_grad', 'grad', 'train', 'autocast'",
        ),
        (
            {"execution_modes": {"train": "off"}},
            "execution_modes['train']='off' is not legal; choose one of 'compile', 'eager'",
        ),
        (
            {"dynamic_arg_dims": {0: 0}},
            "dynamic_arg_dims={0: 0} is not legal; it must be a mapping whose keys are strings",
        ),
        (
            {"encoders": {"vision": {"encoders": {}}}},
            "encoders['vision']={'encoders': {}} is not legal; it must map option names (other than "
            "'compile_mm_encoder', 'encoders', 'include_projector', 'function_patches', 'compile_sampling') to values",
        ),
        ({"encoders": {"vision": {"mode": 9}}}, f"encoders['vision']: mode=9 is not legal; {MODES}"),
        (
            {"encoders": {"vision": {"depth": 1}}},
            f"encoders['vision']: unknown option 'depth'; legal options are {', '.join(OPTIONS)}",
        ),
    ],
)
def test_illegal_option(options, sentence):
    assert refusal(CompilationConfig, **options) == sentence
    assert refusal(CompilationConfig.from_dict, options) == sentence


@pytest.mark.parametrize("build", [lambda options: CompilationConfig(**options), CompilationConfig.from_dict])
@pytest.mark.parametrize(
    "reserved",
    [
        "cudagraph_mm_encoder",
        "encoder_cudagraph_token_budgets",
        "encoder_cudagraph_max_vision_items_per_batch",
        "encoder_cudagraph_max_frames_per_batch",
    ],
)
def test_reserved_and_unknown_options(build, reserved):
    assert refusal(build, {reserved: True}) == f"option {reserved!r} is not available yet; leave it out"
    assert refusal(build, {"colour": 1}) == f"unknown option 'colour'; legal options are {', '.join(OPTIONS)}"


@pytest.mark.parametrize(
    ("dims", "normal"),
    [
        (0, {0: None}),
        (-1, {-1: None}),
        ([0, 2], {0: None, 2: None}),
        ((1,), {1: None}),
        ({0: "s", 1: None}, {0: "s", 1: None}),
    ],
)
def test_normalize_dims(dims, normal):
    assert normalize_dims("x", dims) == normal
    assert normalize_dims("x", CompilationConfig(dynamic_arg_dims={"x": dims}).dynamic_arg_dims["x"]) == normal


@pytest.mark.parametrize("dims", [True, 1.0, "0", None, ["0"], {"0": "s"}, {0: 1}])
def test_dims_of_another_kind(dims):
    assert refusal(CompilationConfig, dynamic_arg_dims={"x": dims}) == (
        f"dynamic_arg_dims['x']={dims!r} is not legal; give a dim (int), a list of dims, or a dict dim -> shape id"
    )


@pytest.mark.parametrize("dims", [[], {}, [0, 0]])
def test_dims_that_name_none_or_one_twice(dims):
    assert refusal(CompilationConfig, dynamic_arg_dims={"x": dims}) == (
        f"dynamic_arg_dims['x']={dims!r} is not legal; name at least one dim, and each only once"
    )


def test_ranges_are_sorted_and_hold_sizes():
    config = CompilationConfig(compile_ranges=[(9, MAX_INT32), CompileRange(1, 4)])
    assert list(map(str, config.compile_ranges)) == ["1..4", "9..MAX_INT32"]
    assert [size in config.compile_ranges[0] for size in (0, 1, 4, 5, "1")] == [False, True, True, False, False]


# ---- a value: equal, copied, unchanged by what it was made from


def test_equal_configs():
    first, second = CompilationConfig(**EVERYTHING), CompilationConfig(**copy.deepcopy(EVERYTHING))
    assert first == second
    assert hash(first) == hash(second)
    assert len({first, second, CompilationConfig()}) == 2
    assert first != dataclasses.replace(first, strict=False)
    assert copy.deepcopy(first) == first
    assert pickle.loads(pickle.dumps(first)) == first


def test_a_config_keeps_no_reference_to_what_it_was_made_from():
    source = copy.deepcopy(EVERYTHING)
    config = CompilationConfig(**source)
    source["options"]["max_autotune"] = False
    source["dynamic_arg_dims"]["z"][1] = "other"
    source["dynamic_arg_dims"]["new"] = 0
    source["compile_sizes"]["z.-1"].append(5)
    source["execution_modes"]["train"] = "eager"
    source["compile_ranges"].append((20, 30))
    source["encoders"]["model.visual"]["mode"] = 1
    source["encoders"]["model.visual"]["dynamic_arg_dims"]["x"][0] = "columns"
    assert config == CompilationConfig(**EVERYTHING)


def test_what_to_dict_returns_is_the_callers_own():
    config = CompilationConfig(**EVERYTHING)
    content = config.to_dict()
    for value in (*content.values(), *content["dynamic_arg_dims"].values(), content["encoders"]["model.visual"]):
        if isinstance(value, (dict, list)):
            value.clear()
    assert config == CompilationConfig(**EVERYTHING)


def test_overrides_of_one_encoder():
    config = CompilationConfig(mode=2, encoders={"a": {"mode": 3, "strict": True}})
    assert (config.for_encoder("a").mode, config.for_encoder("a").strict) == (CompilationMode.REGIONS, True)
    assert (config.for_encoder("b").mode, config.for_encoder("b").strict) == (CompilationMode.ONE_GRAPH, False)
    assert config.for_encoder("a").encoders == {}


# ---- to JSON and back


@pytest.mark.smoke
@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_round_trip(options, tmp_path):
    config = CompilationConfig(**options)
    content = config.to_dict()
    assert list(content) == OPTIONS
    assert json.loads(json.dumps(content)) == content
    assert CompilationConfig.from_dict(content) == config
    config.save_pretrained(tmp_path / "new")
    assert CompilationConfig.from_pretrained(tmp_path / "new") == config
    assert CompilationConfig.from_pretrained(tmp_path / "new" / CONFIG_NAME) == config


def test_the_fields_own_json():
    config = CompilationConfig.from_dict(json.loads('{"mode": 0, "compile_mm_encoder": false}'))
    assert config == CompilationConfig(mode=CompilationMode.NONE)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"backend": print},
            "backend=<built-in function print> cannot be written to JSON; register it with torch by name",
        ),
        ({"encoders": {"a": {"backend": print}}}, "backend=<built-in function print> cannot be written to JSON"),
        ({"options": {"type": torch.float16}}, "options={'type': torch.float16} cannot be written to JSON"),
    ],
)
def test_what_json_cannot_hold(options, sentence, tmp_path):
    config = CompilationConfig(**options)
    assert refusal(config.to_dict).startswith(sentence)
    assert refusal(config.save_pretrained, tmp_path / "new").startswith(sentence)


def test_files_that_hold_no_config(tmp_path):
    assert refusal(CompilationConfig.from_pretrained, tmp_path).startswith(f"no compilation config at {tmp_path}")
    file = tmp_path / "options.json"
    file.write_text("mode: 3")
    assert refusal(CompilationConfig.from_pretrained, file).startswith(f"{file} is not JSON: ")
    file.write_text("[3]")
    assert refusal(CompilationConfig.from_pretrained, file) == "a compilation config must be a JSON object, not [3]"


# ---- the hash that names compiled code


def test_hash_covers_the_rest_only_when_the_switch_is_on():
    off = {CompilationConfig(**options).compute_hash() for options in ({}, {"mode": 1}, {"granularity": "block"})}
    on = {CompilationConfig(compile_mm_encoder=True, **o).compute_hash() for o in ({}, {"mode": 1})}
    assert (len(off), len(on), len(off | on)) == (1, 2, 3)


@pytest.mark.parametrize(
    "options",
    [
        {"mode": 1},
        {"backend": "eager"},
        {"options": {"max_autotune": True}},
        {"granularity": "block"},
        {"dynamic_shapes": "backed"},
        {"dynamic_arg_dims": {"x": 0}},
        {"compile_ranges": [(1, 8)]},
        {"compile_sizes": {"x.0": 4}},
        {"include_projector": True},
        {"encoders": {"a": {"mode": 1}}},
    ],
    ids=lambda options: next(iter(options)),
)
def test_hash_sees_what_changes_the_code(options):
    on = CompilationConfig(compile_mm_encoder=True)
    assert dataclasses.replace(on, **options).compute_hash() != on.compute_hash()
    assert dataclasses.replace(on, **options).compute_hash() == dataclasses.replace(on, **options).compute_hash()


@pytest.mark.parametrize("name", ["strict", "fail_on_recompile", "verify", "out_of_range"])
def test_hash_does_not_see_what_leaves_the_code_alone(name):
    on = CompilationConfig(compile_mm_encoder=True)
    assert dataclasses.replace(on, **{name: EVERYTHING[name]}).compute_hash() == on.compute_hash()


# ---- who wins


@pytest.mark.parametrize(
    ("argument", "environment", "in_file", "enabled", "explicit"),
    [
        (True, "0", False, True, True),
        (False, "1", True, False, True),
        (None, "1", False, True, False),
        (None, "off", True, False, False),
        (None, None, True, True, False),
        (None, "", False, False, False),
        (None, None, None, False, False),
    ],
)
def test_precedence_of_the_switch(argument, environment, in_file, enabled, explicit, monkeypatch, tmp_path):
    if environment is not None:
        monkeypatch.setenv("HF_COMPILE_MM_ENCODER", environment)
    if in_file is not None:
        CompilationConfig(compile_mm_encoder=in_file, recompile_limit=5).save_pretrained(tmp_path)
        monkeypatch.setenv("HF_COMPILE_CONFIG", str(tmp_path))
    switch = resolve_switch(argument)
    assert (switch.enabled, switch.explicit) == (enabled, explicit)
    assert switch.config.compile_mm_encoder is enabled
    assert switch.config.recompile_limit == (8 if in_file is None else 5)


@pytest.mark.parametrize("form", ["config", "dict", "path", "json"])
def test_a_config_given_as_an_argument_is_explicit(form, tmp_path):
    config = CompilationConfig(compile_mm_encoder=True, recompile_limit=5)
    config.save_pretrained(tmp_path)
    given = {"config": config, "dict": config.to_dict(), "path": tmp_path, "json": json.dumps(config.to_dict())}[form]
    switch = resolve_switch(None, given)
    assert (switch.enabled, switch.explicit, switch.config) == (True, True, config)


@pytest.mark.parametrize(
    ("argument", "environment", "in_file", "backend"),
    [
        ("eager", "aot_eager", "inductor", "eager"),
        (None, " aot_eager ", "inductor", "aot_eager"),
        (None, None, "inductor", "inductor"),
        (None, None, None, None),
    ],
)
def test_precedence_of_the_backend(argument, environment, in_file, backend, monkeypatch, tmp_path):
    if environment is not None:
        monkeypatch.setenv("HF_COMPILE_BACKEND", environment)
    CompilationConfig(backend=in_file).save_pretrained(tmp_path)
    monkeypatch.setenv("HF_COMPILE_CONFIG", str(tmp_path))
    given = None if argument is None else {"backend": argument}
    assert resolve_switch(True, given).config.backend == backend


@pytest.mark.parametrize(
    ("arguments", "environment", "sentence"),
    [
        ((1,), {}, "compile_mm_encoder=1 is not legal; choose True or False"),
        ((None,), {"HF_COMPILE_MM_ENCODER": "maybe"}, "HF_COMPILE_MM_ENCODER='maybe' is not legal; use 1 or 0"),
        ((True,), {"HF_COMPILE_BACKEND": " "}, "HF_COMPILE_BACKEND is set but empty; name a backend or unset it"),
        ((True,), {"HF_COMPILE_CONFIG": "{mode}"}, "HF_COMPILE_CONFIG='{mode}' is not JSON: "),
        ((True, "{mode}"), {}, "compilation_config='{mode}' is not JSON: "),
        ((True, 3), {}, "compilation_config=3 is not a CompilationConfig, a mapping or a path"),
        ((True, {"mode": 0}), {}, "mode=0 (NONE) contradicts compile_mm_encoder=True; "),
        ((None, {"mode": 0}), {"HF_COMPILE_MM_ENCODER": "1"}, "mode=0 (NONE) contradicts compile_mm_encoder=True; "),
        ((None, {"colour": 1}), {}, "unknown option 'colour'; legal options are compile_mm_encoder, mode, "),
        ((True, "/nowhere"), {}, "no compilation config at /nowhere: "),
    ],
)
def test_what_the_switch_refuses(arguments, environment, sentence, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert re.match(re.escape(sentence), refusal(resolve_switch, *arguments))


def test_environment_backend(monkeypatch):
    assert environment_backend() is None
    monkeypatch.setenv("HF_COMPILE_BACKEND", "eager")
    assert environment_backend() == "eager"


@pytest.mark.parametrize(
    ("options", "answer"), [({}, False), ({"compile_mm_encoder": True}, True), ({"mode": 0}, False)]
)
def test_should_torch_compile_mm_encoder(options, answer):
    assert should_torch_compile_mm_encoder(CompilationConfig(**options)) is answer
