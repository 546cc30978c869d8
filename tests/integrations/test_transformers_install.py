"""`install` and `uninstall`: the keyword in Transformers' own doors, and classes that are as before afterwards."""

import inspect
import subprocess
import sys
import threading
import types

import pytest
import torch
import transformers
from checkpoints import requests
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BertConfig,
    BertLMHeadModel,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    VisionEncoderDecoderModel,
    ViTConfig,
    ViTModel,
)
from transformers.models.auto import modeling_auto

import hf_compile
from hf_compile import ConfigurationError, EncoderNotFoundError, HfCompileError

ON = {"compile_mm_encoder": True, "compilation_config": {"backend": "eager"}}
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
PROCESSORS = ["AutoFeatureExtractor", "AutoImageProcessor", "AutoProcessor", "AutoTokenizer", "AutoVideoProcessor"]


@pytest.fixture(autouse=True)
def nothing_left_behind(monkeypatch):
    """Each test starts without an ambient switch, and ends with every class as it was."""
    for name in ("HF_COMPILE_MM_ENCODER", "HF_COMPILE_CONFIG", "HF_COMPILE_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    before = snapshot()
    finders = list(sys.meta_path)
    yield
    assert snapshot() == before
    assert sys.meta_path == finders


@pytest.fixture(scope="module")
def text_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    Qwen2ForCausalLM(Qwen2Config(**SMALL, num_key_value_heads=2, vocab_size=64)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def composite(tmp_path_factory):
    """Folders of an image encoder and of a text decoder."""
    folder = tmp_path_factory.mktemp("parts")
    ViTModel(ViTConfig(**SMALL, image_size=16, patch_size=8)).save_pretrained(folder / "image")
    decoder = BertConfig(**SMALL, vocab_size=64, is_decoder=True, add_cross_attention=True)
    BertLMHeadModel(decoder).save_pretrained(folder / "text")
    return folder


def classes():
    auto_models = [value for value in vars(modeling_auto).values() if isinstance(value, type)]
    others = [getattr(transformers, name) for name in ("AutoConfig", *PROCESSORS)]
    return [PreTrainedModel, LlavaForConditionalGeneration, *auto_models, *others]


def snapshot():
    """The very object that each class that may be touched has of its own, or None."""
    return {owner: vars(owner).get("from_pretrained") for owner in classes()}


def paths(model):
    return [encoder.path for encoder in hf_compile.status(model).encoders]


@pytest.mark.smoke
def test_auto_and_concrete_classes_understand_the_keyword(checkpoint):
    folder = checkpoint("llava")
    with hf_compile.install():
        for loaded_by in (AutoModelForImageTextToText, LlavaForConditionalGeneration):
            model = loaded_by.from_pretrained(folder, **ON)
            assert type(model) is LlavaForConditionalGeneration
            assert paths(model) == ["model.vision_tower"]
            for plain in ({}, {"compile_mm_encoder": None}, {"compile_mm_encoder": False}):
                assert paths(loaded_by.from_pretrained(folder, **plain)) == []
        model, info = AutoModel.from_pretrained(folder, output_loading_info=True, **ON)
        assert paths(model) == ["vision_tower"]
        assert "missing_keys" in info
    with pytest.raises(TypeError, match="compile_mm_encoder"):
        LlavaForConditionalGeneration.from_pretrained(folder, compile_mm_encoder=True)


@pytest.mark.smoke
def test_the_classes_look_as_before_while_it_is_installed():
    before = {owner: function for owner, function in snapshot().items() if function is not None}
    signatures = {owner: inspect.signature(owner.from_pretrained) for owner in before}
    attributes = {owner: list(vars(owner)) for owner in before}
    with hf_compile.install():
        assert {owner for owner, function in snapshot().items() if function is not None} == set(before)
        for owner, function in before.items():
            assert vars(owner)["from_pretrained"] is not function
            assert list(vars(owner)) == attributes[owner]
            assert inspect.signature(owner.from_pretrained) == signatures[owner]
            assert owner.from_pretrained.__doc__ == function.__func__.__doc__
            assert owner.from_pretrained.__self__ is owner
    assert {owner: list(vars(owner)) for owner in before} == attributes


def test_installs_are_counted(checkpoint):
    def understood():
        try:
            return bool(paths(LlavaForConditionalGeneration.from_pretrained(checkpoint("llava"), **ON)))
        except TypeError:
            return False

    first, second = hf_compile.install(), hf_compile.install()
    first.uninstall()
    first.uninstall()  # twice is once
    assert understood()
    hf_compile.uninstall()
    assert not understood()
    second.uninstall()
    hf_compile.uninstall()  # there is nothing left to undo
    with hf_compile.install(), hf_compile.install():
        assert understood()
    assert not understood()


def test_an_install_that_fails_halfway_leaves_nothing(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.models.auto.video_processing_auto", types.ModuleType("half"))
    with pytest.raises(AttributeError, match="AutoVideoProcessor"):
        hf_compile.install()
    assert not hasattr(PreTrainedModel.from_pretrained, "__wrapped__")


def test_a_patch_of_somebody_else_on_top_survives(checkpoint):
    original = vars(PreTrainedModel)["from_pretrained"]
    seen = []
    installation = hf_compile.install()
    ours = vars(PreTrainedModel)["from_pretrained"]

    def theirs(cls, *args, **kwargs):
        seen.append(cls)
        return ours.__func__(cls, *args, **kwargs)

    try:
        PreTrainedModel.from_pretrained = classmethod(theirs)
        assert paths(LlavaForConditionalGeneration.from_pretrained(checkpoint("llava"), **ON))
        installation.uninstall()
        assert vars(PreTrainedModel)["from_pretrained"].__func__ is theirs
        assert not paths(LlavaForConditionalGeneration.from_pretrained(checkpoint("llava")))
        with pytest.raises(TypeError, match="compile_mm_encoder"):
            LlavaForConditionalGeneration.from_pretrained(checkpoint("llava"), **ON)
        with hf_compile.install():
            assert paths(LlavaForConditionalGeneration.from_pretrained(checkpoint("llava"), **ON))
    finally:
        PreTrainedModel.from_pretrained = original
    assert len(seen) == 4


@pytest.mark.parametrize("loaded_by", [AutoModelForImageTextToText, LlavaForConditionalGeneration])
@pytest.mark.parametrize(
    "options",
    [{"compile_mm_encoder": 1}, {"compilation_config": {"mode": 9}}, {"compilation_config": "/no/such.json"}],
)
def test_bad_options_are_refused_before_any_file_is_read(loaded_by, options):
    with hf_compile.install(), pytest.raises(ConfigurationError):
        loaded_by.from_pretrained("/no/such/checkpoint", **options)


@pytest.mark.smoke
def test_a_model_without_an_encoder(text_model, monkeypatch):
    with hf_compile.install():
        with pytest.raises(EncoderNotFoundError):
            AutoModelForCausalLM.from_pretrained(text_model, compile_mm_encoder=True)
        monkeypatch.setenv("HF_COMPILE_MM_ENCODER", "1")
        assert paths(AutoModelForCausalLM.from_pretrained(text_model)) == []


def test_an_ambient_switch_needs_no_keyword_and_yields_to_one(checkpoint, monkeypatch):
    monkeypatch.setenv("HF_COMPILE_MM_ENCODER", "1")
    folder = checkpoint("llava")
    assert paths(LlavaForConditionalGeneration.from_pretrained(folder)) == []
    with hf_compile.install():
        assert paths(LlavaForConditionalGeneration.from_pretrained(folder)) == ["model.vision_tower"]
        assert paths(LlavaForConditionalGeneration.from_pretrained(folder, compile_mm_encoder=False)) == []
        assert paths(hf_compile.from_pretrained(folder, compile_mm_encoder=False)) == []


def test_only_the_outermost_model_is_compiled(composite, tmp_path):
    model = VisionEncoderDecoderModel.from_encoder_decoder_pretrained(composite / "image", composite / "text")
    model.save_pretrained(tmp_path)

    class Wrapped(VisionEncoderDecoderModel):
        """Loads a part of its own, as composite models do."""

        @classmethod
        def from_pretrained(cls, *args, **kwargs):
            model = super().from_pretrained(*args, **kwargs)
            model.loaded_outside = ViTModel.from_pretrained(composite / "image")
            return model

        def save_pretrained(self, *args, **kwargs):
            raise NotImplementedError

    with hf_compile.install():
        model = VisionEncoderDecoderModel.from_pretrained(tmp_path, **ON)
        assert paths(model) == ["encoder"]
        assert paths(model.encoder) == []
        model = Wrapped.from_pretrained(tmp_path, **ON)
        assert paths(model) == ["encoder"]
        assert paths(model.loaded_outside) == []
        part = VisionEncoderDecoderModel.from_encoder_decoder_pretrained(
            composite / "image", composite / "text", encoder_compile_mm_encoder=True
        )
        assert paths(part.encoder) == [""]


def test_a_load_in_another_thread_is_outermost_there(checkpoint):
    found = []

    def load():
        found.append(paths(LlavaForConditionalGeneration.from_pretrained(checkpoint("llava"), **ON)))

    with hf_compile.install():
        threads = [threading.Thread(target=load) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [["model.vision_tower"]] * 2


# --- pipelines -------------------------------------------------------------------------------------------------------


def test_a_pipeline_compiles_its_model_and_nothing_else_hears_of_it(checkpoint, tmp_path):
    folder = checkpoint("llava")
    options = {"compile_mm_encoder": True, "compilation_config": hf_compile.CompilationConfig(backend="eager")}
    with hf_compile.install():
        pipe = transformers.pipeline("image-text-to-text", model=str(folder), model_kwargs=options)
    assert paths(pipe) == ["model.vision_tower"]
    for request in requests("llava", folder)[:2]:
        with torch.no_grad():
            pipe.model(**request)
    assert {region.state for region in hf_compile.status(pipe).encoders[0].regions} == {"compiled"}
    for tokenizer in filter(None, (pipe.tokenizer, pipe.processor.tokenizer)):
        assert not {"compile_mm_encoder", "compilation_config"} & set(tokenizer.init_kwargs)
        tokenizer.save_pretrained(tmp_path)
    assert "compil" not in (tmp_path / "tokenizer_config.json").read_text()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"compile_mm_encoder": "yes"}, ConfigurationError, "compile_mm_encoder='yes'"),
        ({**ON, "compilation_config": {"no_such": 1}}, ConfigurationError, "unknown option 'no_such'"),
        ({**ON, "compilation_config": {"dynamic_arg_dims": {"no_such": 0}}}, HfCompileError, "no_such"),
    ],
)
def test_a_pipeline_shows_our_error_and_does_not_try_further(checkpoint, monkeypatch, options, error, words):
    loads = []
    build = LlavaForConditionalGeneration.__init__
    monkeypatch.setattr(
        LlavaForConditionalGeneration, "__init__", lambda *a, **k: (loads.append(a), build(*a, **k))[1]
    )
    with hf_compile.install(), pytest.raises(error, match=words) as raised:
        transformers.pipeline("image-text-to-text", model=str(checkpoint("llava")), model_kwargs=options)
    assert "Traceback" not in str(raised.value)
    assert len(loads) == (error is HfCompileError)


# --- what is not imported yet ----------------------------------------------------------------------------------------

LATE = """
import sys
import hf_compile
installation = hf_compile.install()
assert not {"torch", "transformers"} & set(sys.modules), "install imports nothing for the sake of a patch"
from transformers import AutoModelForImageTextToText
model = AutoModelForImageTextToText.from_pretrained(sys.argv[1], compile_mm_encoder=True)
print(hf_compile.status(model).to_dict()["encoders"][0]["path"])
finders = len(sys.meta_path)
installation.uninstall()
from transformers import AutoVideoProcessor, PreTrainedModel
assert vars(PreTrainedModel)["from_pretrained"].__func__.__module__ == "transformers.modeling_utils"
assert not hasattr(PreTrainedModel.from_pretrained, "__wrapped__")
assert not any(type(finder).__module__.startswith("hf_compile") for finder in sys.meta_path)
"""


@pytest.mark.smoke
def test_what_is_imported_later_is_patched_then(checkpoint):
    done = subprocess.run(
        [sys.executable, "-c", LATE, str(checkpoint("llava"))], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["model.vision_tower"]


def test_when_imported_calls_back_once_and_can_be_cancelled(tmp_path, monkeypatch):
    from hf_compile.integrations.transformers import when_imported

    (tmp_path / "late_module.py").write_text("value = 1\n")
    (tmp_path / "other_module.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    seen = []
    when_imported("late_module", lambda module: seen.append(module.value))
    when_imported("other_module", seen.append)()
    import late_module
    import other_module  # noqa: F401

    assert seen == [1]
    when_imported("late_module", lambda module: seen.append(module))()
    assert seen == [1, late_module]
    del sys.modules["late_module"], sys.modules["other_module"]
