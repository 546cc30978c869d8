"""`from_pretrained` and `inspect_mm_encoder`: the first door, and the plan without weights."""

import inspect
import json
import logging
import shutil

import pytest
import torch
import transformers
from checkpoints import requests
from transformers import (
    LlavaForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    SiglipVisionConfig,
    SiglipVisionModel,
    VisionEncoderDecoderConfig,
    ViTConfig,
    WhisperConfig,
)

import hf_compile
from hf_compile import CompilationConfig, ConfigurationError, EncoderNotFoundError
from hf_compile.integrations import loading

ON = {"compile_mm_encoder": True, "compilation_config": {"backend": "eager"}}
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}


@pytest.fixture(autouse=True)
def no_ambient_switch(monkeypatch):
    for name in ("HF_COMPILE_MM_ENCODER", "HF_COMPILE_CONFIG", "HF_COMPILE_BACKEND"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def text_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    Qwen2ForCausalLM(Qwen2Config(**SMALL, num_key_value_heads=2, vocab_size=64)).save_pretrained(folder)
    return folder


@pytest.fixture
def log():
    """Messages of our logger, at any level."""
    messages = []
    logger = transformers.utils.logging.get_logger("transformers.hf_compile")
    handler = logging.Handler()
    handler.emit = lambda record: messages.append((record.levelname, record.getMessage()))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield messages
    logger.setLevel(level)
    logger.removeHandler(handler)


def paths(model):
    return [encoder.path for encoder in hf_compile.status(model).encoders]


def config_folder(folder, config, **changes):
    """Write a config.json alone, with what Transformers does not let one set."""
    config.save_pretrained(folder)
    content = json.loads((folder / "config.json").read_text())
    content.update(changes)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in content.items() if v is not None}))
    return folder


# --- the model -------------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_off_by_default_and_then_exactly_what_transformers_returns(checkpoint):
    model = hf_compile.from_pretrained(checkpoint("llava"))
    reference = LlavaForConditionalGeneration.from_pretrained(checkpoint("llava"))
    assert type(model) is LlavaForConditionalGeneration
    assert paths(model) == []
    assert vars(model).keys() == vars(reference).keys()
    weights = reference.state_dict()
    assert model.state_dict().keys() == weights.keys()
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


@pytest.mark.smoke
def test_one_line_compiles_the_encoder_and_gives_eager_tokens(checkpoint):
    folder = checkpoint("llava")
    model = hf_compile.from_pretrained(folder, **ON).eval()
    eager = hf_compile.from_pretrained(folder).eval()
    for request in requests("llava", folder)[:3]:
        options = {**request, "max_new_tokens": 3, "do_sample": False}
        assert torch.equal(model.generate(**options), eager.generate(**options))
    regions = hf_compile.status(model).to_dict()["encoders"][0]["regions"]
    assert [(region["state"], region["graphs"]) for region in regions] == [("compiled", 1)] * len(regions)


def test_other_keywords_reach_transformers_untouched(checkpoint, monkeypatch):
    given = {
        "dtype": torch.bfloat16,
        "device_map": {"": "cpu"},
        "attn_implementation": "eager",
        "revision": "main",
        "token": False,
        "quantization_config": object(),
        "trust_remote_code": False,
        "output_attentions": True,
        "a_keyword_of_tomorrow": [1],
    }
    seen = {}
    monkeypatch.setattr(LlavaForConditionalGeneration, "from_pretrained", lambda source, **kw: seen.update(kw))
    hf_compile.from_pretrained(checkpoint("llava"), **given)
    assert seen == given


def test_keywords_have_their_effect(checkpoint):
    model = hf_compile.from_pretrained(checkpoint("llava"), dtype="bfloat16", attn_implementation="eager", **ON)
    assert model.dtype is torch.bfloat16
    assert model.config._attn_implementation == "eager"
    model, info = hf_compile.from_pretrained(checkpoint("llava"), output_loading_info=True, **ON)
    assert not info["missing_keys"]
    assert paths(model) == ["model.vision_tower"]


# --- the switch ------------------------------------------------------------------------------------------------------

BAD_OPTIONS = [
    ({"compile_mm_encoder": "yes"}, "compile_mm_encoder='yes'"),
    ({"compile_mm_encoder": True, "compilation_config": {"no_such": 1}}, "unknown option 'no_such'"),
    ({"compilation_config": {"mode": 7}}, "mode=7"),
    ({"compile_mm_encoder": True, "compilation_config": {"mode": 0}}, "contradicts"),
    ({"compilation_config": {"compile_ranges": [(1, 9), (5, 12)]}}, "overlap"),
    ({"compilation_config": {"compile_ranges": [(9, 1)]}}, "empty"),
    ({"compilation_config": 3}, "compilation_config=3"),
    ({"encoder": 3}, "encoder=3"),
    ({"encoder": []}, r"encoder=\[\]"),
    ({"auto_class": "AutoNothing"}, "auto_class='AutoNothing'"),
    ({"auto_class": dict}, "auto_class"),
]


@pytest.mark.parametrize(("options", "words"), BAD_OPTIONS)
def test_bad_options_are_refused_before_any_file_is_read(options, words):
    with pytest.raises(ConfigurationError, match=words):
        hf_compile.from_pretrained("/no/such/checkpoint", **options)


def test_without_a_bad_option_that_path_is_what_fails():
    with pytest.raises((OSError, ValueError), match="no/such"):
        hf_compile.from_pretrained("/no/such/checkpoint", **ON)


@pytest.mark.parametrize(
    ("argument", "environment", "file", "compiled"),
    [
        (None, None, None, False),
        (None, None, True, True),
        (None, "0", True, False),
        (None, "1", None, True),
        (None, "1", False, True),
        (False, "1", True, False),
        (True, "0", False, True),
    ],
)
def test_argument_above_environment_above_file_above_default(
    tmp_path, monkeypatch, argument, environment, file, compiled
):
    SiglipVisionModel(SiglipVisionConfig(**SMALL, image_size=16, patch_size=8)).save_pretrained(tmp_path)
    if environment is not None:
        monkeypatch.setenv("HF_COMPILE_MM_ENCODER", environment)
    if file is not None:
        (tmp_path / "options.json").write_text(json.dumps({"compile_mm_encoder": file}))
        monkeypatch.setenv("HF_COMPILE_CONFIG", str(tmp_path / "options.json"))
    model = hf_compile.from_pretrained(tmp_path, compile_mm_encoder=argument)
    assert bool(paths(model)) is compiled


def test_a_file_given_as_argument_is_a_switch(checkpoint, tmp_path):
    CompilationConfig(compile_mm_encoder=True, backend="eager").save_pretrained(tmp_path)
    assert paths(hf_compile.from_pretrained(checkpoint("llava"), compilation_config=tmp_path))


# --- models without an encoder ---------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_an_argument_insists_before_the_weights_are_read(text_model, tmp_path):
    shutil.copy(text_model / "config.json", tmp_path)
    for options in (ON, {"compilation_config": {"compile_mm_encoder": True}}):
        with pytest.raises(EncoderNotFoundError, match=r"Qwen2ForCausalLM has no .* encoder"):
            hf_compile.from_pretrained(tmp_path, **options)


@pytest.mark.parametrize("how", ["environment", "file"])
def test_an_ambient_switch_leaves_it_alone_with_one_line(text_model, tmp_path, monkeypatch, log, how):
    if how == "environment":
        monkeypatch.setenv("HF_COMPILE_MM_ENCODER", "1")
    else:
        monkeypatch.setenv("HF_COMPILE_CONFIG", json.dumps({"compile_mm_encoder": True}))
    model = hf_compile.from_pretrained(text_model)
    assert paths(model) == []
    assert [level for level, _ in log] == ["INFO"]
    assert "Qwen2ForCausalLM is left as it is" in log[0][1]


def test_a_named_encoder_insists_too(text_model, checkpoint, monkeypatch):
    monkeypatch.setenv("HF_COMPILE_MM_ENCODER", "1")
    with pytest.raises(EncoderNotFoundError, match=r"has no module 'model.vision'"):
        hf_compile.from_pretrained(text_model, encoder="model.vision")
    model = hf_compile.from_pretrained(checkpoint("llava"), encoder=iter(["model.vision_tower"]))
    assert paths(model) == ["model.vision_tower"]


def test_a_named_encoder_does_not_switch(text_model):
    assert paths(hf_compile.from_pretrained(text_model, encoder="model.vision")) == []


def test_a_check_that_fails_by_itself_stops_nothing(checkpoint, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("cannot be built on meta")

    monkeypatch.setattr(loading, "_skeleton", broken)
    assert paths(hf_compile.from_pretrained(checkpoint("llava"), **ON)) == ["model.vision_tower"]


# --- the class -------------------------------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("config", "class_name"),
    [
        (SiglipVisionConfig(**SMALL), "SiglipVisionModel"),
        (WhisperConfig(d_model=36, encoder_layers=2, decoder_layers=1), "WhisperForConditionalGeneration"),
        (
            VisionEncoderDecoderConfig.from_encoder_decoder_configs(
                ViTConfig(**SMALL), transformers.BertConfig(**SMALL, vocab_size=64)
            ),
            "VisionEncoderDecoderModel",
        ),
    ],
)
def test_without_architectures_the_auto_class_that_fits(tmp_path, config, class_name):
    config_folder(tmp_path, config, architectures=None)
    assert hf_compile.inspect_mm_encoder(tmp_path).model_class == class_name


def test_architectures_of_another_config_or_library_are_passed_over(checkpoint, tmp_path):
    config = transformers.AutoConfig.from_pretrained(checkpoint("llava"))
    for architectures in (["FlaxLlava", "LlavaForConditionalGeneration"], ["BertModel"]):
        config_folder(tmp_path, config, architectures=architectures)
        assert hf_compile.inspect_mm_encoder(tmp_path).model_class == "LlavaForConditionalGeneration"


@pytest.mark.parametrize("auto_class", ["AutoModel", transformers.LlavaModel])
def test_auto_class_overrides(checkpoint, auto_class):
    model = hf_compile.from_pretrained(checkpoint("llava"), auto_class=auto_class, **ON)
    assert type(model) is transformers.LlavaModel
    assert paths(model) == ["vision_tower"]
    assert hf_compile.inspect_mm_encoder(checkpoint("llava"), auto_class=auto_class).model_class == "LlavaModel"


CODE = """
import torch
from transformers import PreTrainedConfig, PreTrainedModel

class TinyConfig(PreTrainedConfig):
    model_type = "tiny_remote"

class TinyEncoder(PreTrainedModel):
    config_class = TinyConfig
    def __init__(self, config):
        super().__init__(config)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
        self.drawn = float(torch.rand(1, device="cpu"))
        self.post_init()
    def forward(self, pixel_values: torch.Tensor):
        for layer in self.layers:
            pixel_values = layer(pixel_values)
        return pixel_values
"""


def test_code_of_the_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "tiny_code.py").write_text(CODE)
    auto_map = {"AutoConfig": "tiny_code.TinyConfig", "AutoModel": "tiny_code.TinyEncoder"}
    content = {"model_type": "tiny_remote", "architectures": ["TinyEncoder"], "auto_map": auto_map}
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="trust_remote_code"):
        hf_compile.inspect_mm_encoder(folder, trust_remote_code=False)
    random_state = torch.get_rng_state()
    assert hf_compile.inspect_mm_encoder(folder, trust_remote_code=True).model_class == "TinyEncoder"
    assert torch.equal(torch.get_rng_state(), random_state)
    model = transformers.AutoModel.from_config(
        transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True), trust_remote_code=True
    )
    model.save_pretrained(folder)
    model = hf_compile.from_pretrained(folder, trust_remote_code=True, **ON)
    assert paths(model) == [""]


def test_an_adapter_is_read_as_its_base_model(checkpoint, tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(checkpoint("llava"))}))
    assert hf_compile.inspect_mm_encoder(tmp_path).model_class == "LlavaForConditionalGeneration"


# --- the plan --------------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_inspect_needs_no_weights(checkpoint, tmp_path):
    shutil.copy(checkpoint("qwen2_5_vl") / "config.json", tmp_path)
    report = hf_compile.inspect_mm_encoder(tmp_path, compilation_config={"granularity": "block"})
    (encoder,) = report.to_dict()["encoders"]
    assert encoder["path"] == "model.visual"
    assert [(r["class_name"], r["instances"], r["state"], r["reason"]) for r in encoder["regions"]] == [
        ("Qwen2_5_VisionPatchEmbed", 1, "pending", "planned"),
        ("Qwen2_5_VLVisionBlock", 4, "pending", "planned"),
        ("Qwen2_5_VLPatchMerger", 1, "pending", "planned"),
    ]
    assert all(region["inputs"] for region in encoder["regions"])
    assert "without weights" in str(report)


def test_inspect_of_an_object_leaves_it_alone(checkpoint):
    model = LlavaForConditionalGeneration.from_pretrained(checkpoint("llava"))
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    report = hf_compile.inspect_mm_encoder(model)
    assert [encoder.path for encoder in report.encoders] == ["model.vision_tower"]
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    hf_compile.compile_mm_encoder(model, compilation_config={"backend": "eager"})
    planned = hf_compile.inspect_mm_encoder(model, compilation_config={"backend": "eager"})
    assert {region.reason for region in planned.encoders[0].regions} == {"planned"}


def test_inspect_says_that_mode_none_compiles_nothing(checkpoint):
    report = hf_compile.inspect_mm_encoder(checkpoint("llava"), compilation_config={"mode": 0})
    assert "nothing of this would be compiled" in report.note


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"encoder": "model.vision"}, EncoderNotFoundError, "no module 'model.vision'"),
        ({"compilation_config": {"dynamic_arg_dims": {"no_such": 0}}}, ConfigurationError, "no_such"),
        ({"compilation_config": {"encoders": {"model.vision": {}}}}, ConfigurationError, "model.vision_tower"),
    ],
)
def test_what_does_not_fit_is_said_without_weights(checkpoint, options, error, words):
    with pytest.raises(error, match=words):
        hf_compile.inspect_mm_encoder(checkpoint("llava"), **options)


def test_a_model_that_cannot_be_built_without_weights_is_told_so(checkpoint, monkeypatch):
    def broken(self, config):
        raise AttributeError("no such field")

    monkeypatch.setattr(LlavaForConditionalGeneration, "__init__", broken)
    with pytest.raises(hf_compile.UnsupportedModelError, match=r"no such field; load it, and inspect the model"):
        hf_compile.inspect_mm_encoder(checkpoint("llava"))


def test_inspect_of_something_else():
    with pytest.raises(hf_compile.UnsupportedModelError, match="dict"):
        hf_compile.inspect_mm_encoder({})


def test_the_two_doors_have_the_signatures_that_were_promised():
    names = ["id_or_path", "compile_mm_encoder", "compilation_config", "auto_class", "encoder", "kwargs"]
    assert list(inspect.signature(hf_compile.from_pretrained).parameters) == names
