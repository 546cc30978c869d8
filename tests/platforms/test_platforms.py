"""Which platform a device has, which backend that means, and what a platform that cannot do everything gets."""

from __future__ import annotations

import sys
import types

import pytest
import torch
import transformers
from compiler.tiny import Counting, clip, images, regions
from torch import nn

import hf_compile
from hf_compile import BackendError, ConfigurationError, Platform, current_platform, register_platform
from hf_compile.platforms import resolve_device
from hf_compile.platforms.builtin import BUILTIN


@pytest.fixture(autouse=True)
def _no_ambient_options(monkeypatch):
    for name in ("HF_COMPILE_MM_ENCODER", "HF_COMPILE_CONFIG", "HF_COMPILE_BACKEND"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def platform():
    """Return a function that registers a platform of the device type "cpu" for one test."""
    undos = []

    def register(**attributes):
        cls = type("Acme", (Platform,), {"name": "acme", "device_type": "cpu", **attributes})
        undos.append(register_platform(cls))

    yield register
    for undo in reversed(undos):
        undo()


# ---- which platform


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("cpu", "cpu"),
        ("mps", "mps"),
        ("xpu:1", "xpu"),
        ("hpu", "hpu"),
        ("npu:0", "npu"),
        ("meta", "meta"),
        ("neuron:3", "torch_neuron"),
        (torch.device("cpu"), "cpu"),
        (torch.device("meta"), "meta"),
        ("vendor:0", "vendor"),
    ],
    ids=str,
)
def test_by_device(device, name):
    """A name that torch does not know (npu, vendor) is never made a `torch.device`."""
    found = current_platform(device)
    assert (found.name, found.device_type) == (name, str(device).partition(":")[0])


def test_built_in_names_are_all_different():
    assert len({each.name for each in BUILTIN}) == len(BUILTIN)
    assert {"cpu", "cuda", "rocm", "xpu", "mps", "tpu", "neuron", "hpu", "npu", "meta"} <= {
        each.name for each in BUILTIN
    }


@pytest.mark.parametrize(("version", "name"), [(None, "cuda"), ("7.1", "rocm")])
def test_rocm_says_cuda(monkeypatch, version, name):
    monkeypatch.setattr(torch.version, "hip", version)
    assert current_platform("cuda:0").name == name


@pytest.mark.parametrize(
    ("modules", "name"),
    [
        ({"torch_xla.runtime": {"device_type": lambda: "TPU"}}, "tpu"),
        ({"torch_xla.runtime": {"device_type": lambda: "NEURON"}}, "neuron"),
        ({"torch_neuronx": {}}, "neuron"),
        ({}, "tpu"),
    ],
    ids=["tpu", "neuron", "package", "nothing loaded"],
)
def test_tpu_and_neuron_say_xla(monkeypatch, modules, name):
    for module, content in modules.items():
        monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(**content))
    assert current_platform("xla:0").name == name


def test_without_a_device_what_is_loaded_decides(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert current_platform().name == "cpu"
    monkeypatch.setitem(sys.modules, "torch_xla", types.SimpleNamespace())
    assert current_platform().name == "tpu"
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    assert current_platform().name == "xpu"


def test_a_model_has_the_platform_of_its_weights():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2))
    assert current_platform(model).name == "meta"
    assert resolve_device(nn.Module()) == "cpu"
    model[0]._hf_hook = types.SimpleNamespace(execution_device="xpu:1")  # accelerate brings the weights there
    assert current_platform(model).name == "xpu"
    model[0]._hf_hook = types.SimpleNamespace(execution_device=torch.device("cpu"))
    assert resolve_device(model) == "cpu"


# ---- registration


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"name": "cpu", "device_type": "acme"},
            "the platform name 'cpu' is taken by hf_compile.platforms.builtin.Cpu",
        ),
        ({"name": "", "device_type": "acme"}, "Bad needs a name"),
        ({"name": "acme", "device_type": None}, "Bad needs a device_type"),
    ],
    ids=["clash", "no name", "no device type"],
)
def test_refused(given, sentence):
    with pytest.raises(ConfigurationError, match=sentence):
        register_platform(type("Bad", (Platform,), given))
    assert current_platform("acme").simple_compile_backend == "inductor"


@pytest.mark.parametrize("given", [None, "acme", object, 3], ids=str)
def test_no_platform(given):
    with pytest.raises(ConfigurationError, match=r"is no subclass of hf_compile\.Platform"):
        register_platform(given)


def test_the_same_name_twice(platform):
    platform()
    with pytest.raises(ConfigurationError, match="the platform name 'acme' is taken"):
        platform(device_type="other")


def test_the_latest_is_asked_first(platform):
    platform(name="first")
    platform(name="second")
    platform(name="elsewhere", is_current=lambda self: False)
    assert current_platform("cpu").name == "second"


# ---- which backend


def test_order_of_backends(platform, monkeypatch, tmp_path):
    """Argument, environment, file, platform."""
    platform(simple_compile_backend="aot_eager")
    file = tmp_path / "compilation_config.json"
    file.write_text('{"backend": "eager"}')

    def backend(**options):
        model = hf_compile.compile_mm_encoder(clip(), **options)
        return hf_compile.status(model).backend

    assert backend() == "aot_eager"
    assert backend(compilation_config=str(file)) == "eager"
    monkeypatch.setenv("HF_COMPILE_BACKEND", "cudagraphs")
    assert backend(compilation_config=str(file)) == "cudagraphs"
    assert backend(compilation_config={"backend": "eager"}) == "eager"


@pytest.mark.parametrize("missing", [None, ""])
def test_a_platform_without_a_backend(platform, missing):
    platform(simple_compile_backend=missing)
    model = clip()
    before = dict(vars(model))
    with pytest.raises(
        BackendError, match=r"^platform acme: this platform names no backend .* torch knows .*inductor"
    ):
        hf_compile.compile_mm_encoder(model)
    assert vars(model) == before
    hf_compile.compile_mm_encoder(model, compilation_config={"backend": "eager"})  # named by the user


def test_a_backend_that_torch_does_not_know(platform):
    platform(simple_compile_backend="acme_graphs", package="acme-runtime")
    with pytest.raises(BackendError, match="'acme_graphs', which acme-runtime brings, is not known to torch"):
        hf_compile.compile_mm_encoder(clip())


def test_options_of_the_platform(platform):
    seen = []

    def backend(graph_module, example_inputs, options=None):
        seen.append(options)
        return graph_module.forward

    platform(simple_compile_backend=backend, options={"tiles": 4, "level": 1})
    model = hf_compile.compile_mm_encoder(clip(), compilation_config={"options": {"level": 2}})
    with torch.no_grad():
        model(**images(1))
    assert seen == [{"tiles": 4, "level": 2}] * 2
    seen.clear()
    model = hf_compile.compile_mm_encoder(clip(), compilation_config={"backend": Counting()})
    with torch.no_grad():
        model(**images(1))  # they are not those of another backend


def test_a_missing_toolchain_is_said_when_the_model_is_loaded(platform, caplog):
    platform(simple_compile_backend="eager", missing_toolchain=lambda self: "no assembler is found: install asm")
    with pytest.raises(BackendError, match=r"^acme: no assembler is found: install asm; or choose another backend"):
        hf_compile.compile_mm_encoder(clip(), compilation_config={"strict": True})
    hf_compile.compile_mm_encoder(clip(), compilation_config={"strict": True, "backend": "aot_eager"})  # needs none
    hf_compile.compile_mm_encoder(clip())


def test_the_compiler_that_cxx_names(monkeypatch):
    (cpu,) = [each for each in BUILTIN if each.name == "cpu"]
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "the compiler that CXX names, no-such-compiler, is not found" in cpu.missing_toolchain()
    monkeypatch.setenv("CXX", sys.executable)
    assert cpu.missing_toolchain() is None


# ---- what a platform cannot do


def test_no_dynamic_compile(platform):
    backend = Counting()
    platform(simple_compile_backend=backend, supports_dynamic_compile=False)
    eager, model = clip(), clip()
    hf_compile.compile_mm_encoder(model)
    reason = "platform acme compiles no graph that serves many sizes"
    assert {each.state for each in hf_compile.status(model).encoders[0].regions} == {"eager"}
    with torch.no_grad():
        for batch in (1, 3, 2):
            assert torch.equal(model(**images(batch)).last_hidden_state, eager(**images(batch)).last_hidden_state)
    assert backend.graphs == 0
    for region in hf_compile.status(model).encoders[0].regions:
        assert (region.state, region.graphs) == ("eager", 0)
        assert reason in region.reason
        assert region.eager_calls == 3 * region.instances


def test_no_dynamic_compile_but_named_sizes(platform):
    backend = Counting()
    platform(simple_compile_backend=backend, supports_dynamic_compile=False)
    eager, model = clip(), clip()
    hf_compile.compile_mm_encoder(
        model, compilation_config={"compile_sizes": {"CLIPEncoderLayer.hidden_states.0": (2, 4)}}
    )
    with torch.no_grad():
        for batch in (1, 2, 3, 4, 2):
            assert torch.equal(model(**images(batch)).last_hidden_state, eager(**images(batch)).last_hidden_state)
    layer = regions(model)["CLIPEncoderLayer"]
    assert (backend.graphs, layer.graphs, layer.calls, layer.eager_calls) == (2, 2, 3 * 3, 2 * 3)
    assert {verdict.name: verdict.verdict for verdict in layer.inputs}["hidden_states"] == "static"


def test_no_dynamic_compile_of_functions(platform):
    backend = Counting()
    platform(simple_compile_backend=backend, supports_dynamic_compile=False)
    if not hasattr(transformers, "ParakeetFeatureExtractor"):
        pytest.skip("ParakeetFeatureExtractor")
    extractor = hf_compile.compile_processor(transformers.ParakeetFeatureExtractor())
    sound = [torch.rand(5000)]
    want = transformers.ParakeetFeatureExtractor()(sound, sampling_rate=16000).input_features
    assert torch.equal(extractor(sound, sampling_rate=16000).input_features, want)
    assert backend.graphs == 0
    for function in hf_compile.status(extractor).functions:
        assert function.state == "eager"
        assert "platform acme compiles no graph that serves many sizes" in function.reason


def test_a_backend_that_fails_at_the_first_compile(platform):
    def broken(graph_module, example_inputs):
        raise RuntimeError("the accelerator is on fire")

    platform(simple_compile_backend=broken)
    eager, model = clip(), clip()
    hf_compile.compile_mm_encoder(model)
    with torch.no_grad():
        assert torch.equal(model(**images(2)).last_hidden_state, eager(**images(2)).last_hidden_state)
    for region in hf_compile.status(model).encoders[0].regions:
        assert region.state == "eager"
        assert "the accelerator is on fire" in region.reason


class Breaks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.first(hidden)
        torch._dynamo.graph_break()
        return self.second(hidden)


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Breaks() for _ in range(2))

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            pixel_values = layer(pixel_values)
        return pixel_values


@pytest.mark.parametrize("supported", [True, False])
def test_full_graphs_where_the_platform_takes_them(platform, supported):
    platform(simple_compile_backend="eager", supports_fullgraph=supported)
    torch.manual_seed(0)
    model = hf_compile.compile_mm_encoder(Tower().eval())
    with torch.no_grad():
        model(torch.randn(2, 8))
    layer = regions(model)["Breaks"]
    assert layer.state == ("eager" if supported else "compiled")
    assert (layer.graphs > 0) is not supported


def test_the_backend_reaches_every_compile(platform, monkeypatch):
    """Encoder and functions; Inductor is not asked once."""

    def inductor(*args, **kwargs):
        raise AssertionError("Inductor was asked")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", inductor)
    backend = Counting()
    platform(simple_compile_backend=backend)
    model = hf_compile.compile_mm_encoder(clip())
    with torch.no_grad():
        model(**images(2))
    assert backend.graphs == 2
    if hasattr(transformers, "ParakeetFeatureExtractor"):
        extractor = hf_compile.compile_processor(transformers.ParakeetFeatureExtractor())
        extractor([torch.rand(5000)], sampling_rate=16000)
        assert all(each.state in ("compiled", "absent") for each in hf_compile.status(extractor).functions)
