"""A plan decides everything, refuses what does not fit, and changes nothing."""

import copy
import importlib

import pytest
import torch
from torch import nn

from hf_compile import (
    BackendError,
    CompilationConfig,
    ConfigurationError,
    EncoderNotFoundError,
    UnsupportedModelError,
    ignore_torch_compile,
    support_torch_compile,
)
from hf_compile.inputs import make_inputs
from hf_compile.plan import make_plan

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
ENCODERS = {
    "siglip": ("SiglipVisionModel", {**SMALL, "image_size": 16, "patch_size": 8}),
    "clip": ("CLIPVisionModel", {**SMALL, "image_size": 16, "patch_size": 8}),
    "qwen2_5_vl": (
        "Qwen2_5_VisionTransformerPretrainedModel",
        {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": 16,
            "patch_size": 4,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
    ),
    "whisper": (
        "WhisperEncoder",
        {
            "d_model": 32,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 48,
            "num_mel_bins": 8,
            "max_source_positions": 20,
        },
    ),
}


def build(model):
    name, options = ENCODERS[model]
    cls = getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), name)
    config = cls.config_class(**options)
    config._attn_implementation = "sdpa"
    return cls(config)


def plan(encoder, *, where=None, **options):
    return make_plan(encoder, CompilationConfig(**options), encoder=where)


def regions(model_plan):
    return {region.class_name: region for encoder in model_plan.encoders for region in encoder.regions}


def state(module):
    """Everything that planning must leave alone, of every module."""
    return {
        path: (
            type(each),
            {
                name: copy.copy(value) if isinstance(value, (dict, set, list)) else value
                for name, value in vars(each).items()
            },
            list(vars(each)),
        )
        for path, each in module.named_modules()
    }


# ---- what is decided


@pytest.mark.smoke
def test_plan_of_a_packed_encoder():
    decided = plan(build("qwen2_5_vl"))
    assert (decided.model_class, decided.platform) == ("Qwen2_5_VisionTransformerPretrainedModel", "cpu")
    (encoder,) = decided.encoders
    assert (encoder.granularity, encoder.granularity_reason, encoder.coverage) == ("block", "2 layers repeat", 1.0)
    assert {name: (len(r.modules), r.role, r.ragged) for name, r in regions(decided).items()} == {
        "Qwen2_5_VisionPatchEmbed": (1, "part", False),
        "Qwen2_5_VLVisionBlock": (2, "block", True),
        "Qwen2_5_VLPatchMerger": (1, "part", False),
    }
    block = regions(decided)["Qwen2_5_VLVisionBlock"]
    assert block.cache_prefix == "Qwen2_5_VLVisionBlock"
    assert block.arguments[:2] == ("hidden_states", "cu_seqlens")
    assert block.accepts_keywords
    verdicts = {verdict.name: (verdict.verdict, verdict.dims, verdict.reason) for verdict in block.inputs}
    assert verdicts["hidden_states"] == ("dynamic", (0,), "annotated as Tensor: dim 0 varies")
    assert verdicts["position_embeddings"][2] == "annotated as tuple[Tensor, Tensor] | None: dim 0 varies"
    assert verdicts["*kwargs"][0] == "pending"


def test_an_attention_chosen_on_purpose_is_kept():
    encoder = build("qwen2_5_vl")
    encoder.config._attn_implementation = "flex_attention"
    assert not regions(plan(encoder))["Qwen2_5_VLVisionBlock"].ragged


def test_coverage_is_the_share_of_parameters_in_regions():
    encoder = build("siglip")
    (decided,) = plan(encoder).encoders
    outside = sum(p.numel() for name, p in encoder.named_parameters() if "post_layernorm" in name)
    assert decided.coverage == pytest.approx(1 - outside / sum(p.numel() for p in encoder.parameters()))
    assert 0.9 < decided.coverage < 1


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, mask=None, scale: float = 1.0, open_to_all: object = None):
        return self.linear(x)


class Tower(nn.Module):
    def __init__(self, layer=Layer):
        super().__init__()
        self.layers = nn.ModuleList([layer(), layer()])

    def forward(self, pixel_values):
        for layer in self.layers:
            pixel_values = layer(pixel_values)
        return pixel_values


class Model(nn.Module):
    def __init__(self, **children):
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, input_ids, pixel_values):
        return input_ids


def test_every_argument_that_may_be_a_tensor_has_a_verdict():
    verdicts = [(each.name, each.verdict, each.reason) for each in regions(plan(Tower()))["Layer"].inputs]
    ask = "the first call tells whether it is a tensor and which dims vary"
    assert verdicts == [
        ("x", "dynamic", "annotated as Tensor: dim 0 varies"),
        ("mask", "pending", f"has no annotation; {ask}"),
        ("open_to_all", "pending", f"annotated as object; {ask}"),
    ]


@pytest.mark.parametrize(
    ("declared", "dims"),
    [
        ({"x": 1}, {1: None}),
        ({"Layer.x": [0, 1]}, {0: None, 1: None}),
        ({"Layer.x": {0: "rows"}, "x": 1}, {0: "rows"}),
        ({"x": 1, "Layer.x": {0: "rows"}}, {0: "rows"}),  # the class's own wins in either order
    ],
)
def test_declared_dims(declared, dims):
    layer = regions(plan(Tower(), dynamic_arg_dims=declared))["Layer"]
    assert layer.dynamic_arg_dims == {"x": dims}
    assert layer.inputs[0].to_dict() == {
        "name": "x",
        "verdict": "dynamic",
        "dims": list(dims),
        "reason": "declared by dynamic_arg_dims",
    }


def test_marks_are_honoured_and_the_config_stands_above_them():
    marked = support_torch_compile(dynamic_arg_dims={"x": 1}, mark_unbacked_dims={"mask": 0})(type("M", (Layer,), {}))
    tower = Tower(marked)
    assert regions(plan(tower))["M"].dynamic_arg_dims == {"x": {1: None}}
    assert regions(plan(tower))["M"].unbacked_dims == {"mask": {0: None}}
    assert regions(plan(tower, dynamic_arg_dims={"x": 0}))["M"].dynamic_arg_dims == {"x": {0: None}}


def test_options_of_one_encoder():
    model = Model(first=Tower(), second=Tower())
    decided = plan(model, encoders={"second": {"granularity": "encoder", "backend": "eager"}}, backend="aot_eager")
    assert [(each.granularity, each.backend) for each in decided.encoders] == [
        ("block", "aot_eager"),
        ("encoder", "eager"),
    ]


def test_projectors_are_planned_when_asked_for():
    class Text(Tower):
        def forward(self, input_ids=None, inputs_embeds=None):
            return inputs_embeds

    class Reader(Model):
        def forward(self, input_ids, pixel_values, inputs_embeds=None):
            return self.text(inputs_embeds=self.connector(self.single(self.vision(pixel_values))))

    children = {"connector": Layer(), "single": nn.Linear(4, 4), "unused": Layer()}
    model = Reader(vision=Tower(), text=Text(), head=Layer(), **children)
    assert [each.info.path for each in plan(model).encoders] == ["vision"]
    vision, connector = plan(model, include_projector=True, dynamic_arg_dims={"x": 1}).encoders
    assert (vision.info.path, connector.info.path) == ("vision", "connector")
    assert connector.info.found_by == "it is a projector between vision and the text model text"
    assert connector.info.modalities == ("image",)
    assert (vision.regions[0].dynamic_arg_dims, connector.regions[0].dynamic_arg_dims) == ({"x": {1: None}}, {})


# ---- what is refused


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"dynamic_arg_dims": {"hidden": 0}},
            "dynamic_arg_dims['hidden']: no region of 'vision' has this argument; Layer: x, mask, scale, open_to_all",
        ),
        (
            {"dynamic_arg_dims": {"Block.x": 0}},
            "dynamic_arg_dims['Block.x']: no region of 'vision' has this argument; Layer: x, mask, scale, open_to_all",
        ),
        (
            {"compile_sizes": {"hidden.0": 4}},
            "compile_sizes['hidden.0']: no region of 'vision' has this argument; Layer: x, mask, scale, open_to_all",
        ),
        ({"encoders": {"visual": {"mode": 2}}}, "encoders['visual']: the encoders of this model are 'vision'"),
    ],
)
def test_what_does_not_fit_the_model(options, sentence):
    with pytest.raises(ConfigurationError) as error:
        plan(Model(vision=Tower()), **options)
    assert str(error.value) == sentence


def test_an_unknown_backend():
    with pytest.raises(BackendError, match=r"^backend 'inducktor' is not known to torch; it knows .*eager.*inductor"):
        plan(Tower(), backend="inducktor")


def test_backend_of_the_environment(monkeypatch):
    monkeypatch.setenv("HF_COMPILE_BACKEND", "aot_eager")
    assert plan(Tower()).encoders[0].backend == "aot_eager"
    assert plan(Tower(), backend="eager").encoders[0].backend == "eager"
    monkeypatch.delenv("HF_COMPILE_BACKEND")
    assert plan(Tower()).encoders[0].backend == "inductor"


@pytest.mark.parametrize("where", [["outer", "outer.inner"], ["outer.inner", "outer"], ["", "outer.inner"]])
def test_an_encoder_inside_another(where):
    outer = Tower()
    outer.inner = Tower()
    inside, around = max(where, key=len), min(where, key=len)
    with pytest.raises(ConfigurationError) as error:
        plan(Model(outer=outer), where=where)
    assert str(error.value) == f"encoder {inside!r} lies inside encoder {around!r}; name only one of them"


def test_paths_that_only_look_nested():
    model = Model(tower=Tower(), tower_2=Tower())
    assert [each.info.path for each in plan(model, where=["tower", "tower_2"]).encoders] == ["tower", "tower_2"]


def test_nothing_to_compile():
    ignored = ignore_torch_compile(type("Ignored", (Layer,), {}))
    reason = "no layer repeats in it, and Ignored in it is marked by ignore_torch_compile"
    with pytest.raises(UnsupportedModelError) as error:
        plan(Model(vision=Tower(ignored)))
    assert str(error.value) == f"vision: nothing to compile; {reason}"


def test_no_encoder():
    with pytest.raises(EncoderNotFoundError, match=r"^Linear has no separable vision, video or audio encoder: "):
        plan(nn.Linear(1, 1))


# ---- dims are tried on inputs made from the config


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("model", "options", "sentence"),
    [
        ("siglip", {"dynamic_arg_dims": {"hidden_states": 1}}, ""),
        (
            "siglip",
            {"dynamic_arg_dims": {"SiglipEncoderLayer.hidden_states": 3}},
            "dynamic_arg_dims['hidden_states']: dim 3 is out of range; in SiglipEncoderLayer that tensor has 3 dims",
        ),
        ("clip", {"dynamic_arg_dims": {"pixel_values": [0, -4]}}, ""),
        (
            "clip",
            {"dynamic_arg_dims": {"pixel_values": {0: "batch", -5: "x"}}},
            "dynamic_arg_dims['pixel_values']: dim -5 is out of range; in CLIPVisionEmbeddings that tensor has 4 dims",
        ),
        ("qwen2_5_vl", {"dynamic_arg_dims": {"cu_seqlens": 0, "position_embeddings": 1}}, ""),
        (
            "qwen2_5_vl",
            {"dynamic_arg_dims": {"cu_seqlens": 1}},
            "dynamic_arg_dims['cu_seqlens']: dim 1 is out of range; in Qwen2_5_VLVisionBlock that tensor has 1 dims",
        ),
        (
            "qwen2_5_vl",  # a tuple of tensors
            {"dynamic_arg_dims": {"position_embeddings": 2}},
            "dynamic_arg_dims['position_embeddings']: dim 2 is out of range; in Qwen2_5_VLVisionBlock that tensor has "
            "2 dims",
        ),
        ("whisper", {"compile_sizes": {"hidden_states.1": 20}}, ""),
        (
            "whisper",
            {"compile_sizes": {"hidden_states.3": 20}},
            "compile_sizes['hidden_states.3']: dim 3 is out of range; in WhisperEncoderLayer that tensor has 3 dims",
        ),
        (
            "whisper",
            {"dynamic_arg_dims": {"input_features": 3}, "granularity": "encoder"},
            "dynamic_arg_dims['input_features']: dim 3 is out of range; in WhisperEncoder that tensor has 3 dims",
        ),
    ],
)
def test_dims_out_of_range(model, options, sentence):
    encoder = build(model)
    assert make_inputs(encoder) is not None
    if sentence:
        with pytest.raises(ConfigurationError) as error:
            plan(encoder, **options)
        assert str(error.value) == sentence
    else:
        plan(encoder, **options)
    make_plan(encoder, CompilationConfig(**options), try_inputs=False)  # then only a call can tell


@pytest.mark.parametrize("model", ENCODERS)
def test_inputs_made_from_the_config_are_accepted(model):
    encoder = build(model).eval()
    with torch.no_grad():
        assert encoder(**make_inputs(encoder)) is not None


def test_no_inputs_without_a_config_or_weights():
    assert make_inputs(Tower()) is None
    with torch.device("meta"):
        assert make_inputs(build("siglip")) is None


# ---- nothing is changed


@pytest.mark.smoke
@pytest.mark.parametrize("training", ["all", "some", "none"])
@pytest.mark.parametrize("model", ["siglip", "qwen2_5_vl"])
@pytest.mark.parametrize("dim", [0, 9])
def test_planning_changes_nothing(model, training, dim):
    encoder = build(model).train(training != "none")
    if training == "some":
        next(encoder.children()).eval()
    config, before, keys = copy.deepcopy(encoder.config), state(encoder), list(encoder.state_dict())
    try:
        plan(encoder, dynamic_arg_dims={"hidden_states": dim})
    except ConfigurationError:
        assert dim == 9
    assert state(encoder) == before
    assert encoder.config.to_dict() == config.to_dict()
    assert list(encoder.state_dict()) == keys


def test_an_error_in_the_trial_changes_nothing():
    reached = []

    class Fails(Layer):
        def forward(self, x: torch.Tensor, *rest, **others):
            reached.append(x.dim())
            raise AssertionError("shape")

    encoder = build("siglip").train()
    encoder.encoder.layers[0] = Fails()
    before = state(encoder)
    plan(encoder, dynamic_arg_dims={"SiglipEncoderLayer.hidden_states": 9})  # not seen; the first call checks
    assert reached == [3]
    assert state(encoder) == before


def test_the_trial_compiles_nothing():
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph

    encoder = build("siglip")
    encoder.encoder.layers[0].compile(backend=backend)
    plan(encoder, dynamic_arg_dims={"hidden_states": 0})
    assert not compiled
    encoder(**make_inputs(encoder))
    assert compiled


def test_the_check_of_changes_can_fail():
    encoder = build("siglip")
    before = state(encoder)
    handle = encoder.register_forward_pre_hook(lambda *_: None)
    assert state(encoder) != before
    handle.remove()
    assert state(encoder) == before
    encoder.eval()
    assert state(encoder) != before
