"""Encoders are found where they are, in real models (on the meta device) and in models that answer wrongly."""

import importlib

import pytest
import torch
import transformers
from torch import nn

from hf_compile import EncoderNotFoundError, find_encoders, support_torch_compile

IMAGE, VIDEO, AUDIO = ("image",), ("video",), ("audio",)
BOTH = ("image", "video")


def build(name, model=None, **options):
    home = importlib.import_module(f"transformers.models.{model}.modeling_{model}") if model else transformers
    cls = getattr(home, name)
    with torch.device("meta"):
        return cls(cls.config_class(**options))


def summary(infos):
    return [(info.path, type(info.module).__name__, info.modalities) for info in infos]


# ---- models of Transformers, with the configs that they have by default


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qwen2VLForConditionalGeneration", [("model.visual", "Qwen2VisionTransformerPretrainedModel", BOTH)]),
        pytest.param(
            "Qwen2_5_VLForConditionalGeneration",
            [("model.visual", "Qwen2_5_VisionTransformerPretrainedModel", BOTH)],
            marks=pytest.mark.smoke,
        ),
        ("Qwen3VLForConditionalGeneration", [("model.visual", "Qwen3VLVisionModel", BOTH)]),
        pytest.param(
            "LlavaForConditionalGeneration",
            [("model.vision_tower", "CLIPVisionModel", IMAGE)],
            marks=pytest.mark.smoke,
        ),
        ("LlavaOnevisionForConditionalGeneration", [("model.vision_tower", "SiglipVisionModel", BOTH)]),
        ("Gemma3ForConditionalGeneration", [("model.vision_tower", "SiglipVisionModel", IMAGE)]),
        ("InternVLForConditionalGeneration", [("model.vision_tower", "InternVLVisionModel", BOTH)]),
        ("Mistral3ForConditionalGeneration", [("model.vision_tower", "PixtralVisionModel", IMAGE)]),
        ("Idefics3ForConditionalGeneration", [("model.vision_model", "Idefics3VisionTransformer", IMAGE)]),
        ("SmolVLMForConditionalGeneration", [("model.vision_model", "SmolVLMVisionTransformer", IMAGE)]),
        ("MllamaForConditionalGeneration", [("model.vision_model", "MllamaVisionModel", IMAGE)]),
        ("Llama4ForConditionalGeneration", [("vision_model", "Llama4VisionModel", IMAGE)]),
        ("WhisperForConditionalGeneration", [("model.encoder", "WhisperEncoder", AUDIO)]),
        ("Qwen2AudioForConditionalGeneration", [("model.audio_tower", "Qwen2AudioEncoder", AUDIO)]),
        (
            "Qwen2_5OmniThinkerForConditionalGeneration",
            [
                ("model.audio_tower", "Qwen2_5OmniAudioEncoder", AUDIO),
                ("model.visual", "Qwen2_5OmniVisionEncoder", BOTH),
            ],
        ),
        # get_encoder("video") gives the image tower
        (
            "VideoLlavaForConditionalGeneration",
            [("model.video_tower", "CLIPVisionModel", VIDEO), ("model.image_tower", "CLIPVisionModel", IMAGE)],
        ),
        # get_encoder never gives the tower for high resolution
        (
            "DeepseekVLHybridForConditionalGeneration",
            [
                ("model.high_res_vision_model", "SamVisionModel", IMAGE),
                ("model.vision_model", "SiglipVisionModel", IMAGE),
            ],
        ),
        ("CLIPModel", [("vision_model", "CLIPVisionModel", IMAGE)]),
        ("SiglipModel", [("vision_model", "SiglipVisionModel", IMAGE)]),
        ("Blip2ForConditionalGeneration", [("vision_model", "Blip2VisionModel", IMAGE)]),
        ("InstructBlipVideoForConditionalGeneration", [("vision_model", "InstructBlipVideoVisionModel", VIDEO)]),
        ("GitForCausalLM", [("git.image_encoder", "GitVisionModel", IMAGE)]),
        ("PI0ForConditionalGeneration", [("model.vlm.vision_tower", "SiglipVisionModel", IMAGE)]),
        ("Speech2TextForConditionalGeneration", [("model.encoder", "Speech2TextEncoder", AUDIO)]),
        # get_encoder gives the speech encoder whatever the modality
        ("SeamlessM4TModel", [("speech_encoder", "SeamlessM4TSpeechEncoder", AUDIO)]),
        # get_encoder gives the text encoder
        ("T5Gemma2ForConditionalGeneration", [("model.encoder.vision_tower", "SiglipVisionModel", IMAGE)]),
        # its arguments are named like those of any layer; only get_encoder tells
        ("Florence2ForConditionalGeneration", [("model.vision_tower", "Florence2VisionBackbone", IMAGE)]),
        # its decoder takes sound too
        ("SpeechT5ForSpeechToText", [("speecht5.encoder", "SpeechT5EncoderWithSpeechPrenet", AUDIO)]),
        # the head takes the same input; its base is the encoder
        ("Wav2Vec2ForCTC", [("wav2vec2", "Wav2Vec2Model", AUDIO)]),
    ],
)
def test_model(name, expected):
    assert summary(find_encoders(build(name))) == expected


@pytest.mark.parametrize(
    ("model", "name", "modalities"),
    [
        ("siglip", "SiglipVisionModel", IMAGE),
        ("clip", "CLIPVisionModel", IMAGE),
        pytest.param(
            "qwen2_5_vl", "Qwen2_5_VisionTransformerPretrainedModel", BOTH, marks=pytest.mark.smoke
        ),  # packed patches
        ("qwen3_vl", "Qwen3VLVisionModel", BOTH),
        ("whisper", "WhisperEncoder", AUDIO),
        ("wav2vec2", "Wav2Vec2Model", AUDIO),
    ],
)
def test_bare_encoder(model, name, modalities):
    (info,) = find_encoders(build(name, model))
    assert (info.path, type(info.module).__name__, info.modalities) == ("", name, modalities)
    assert info.found_by.endswith("; the model itself is the encoder")


@pytest.mark.parametrize(
    ("name", "looked_at"),
    [
        ("FuyuForCausalLM", "model (FuyuModel), lm_head (Linear)"),
        ("LlamaForCausalLM", "model (LlamaModel), lm_head (Linear)"),
        ("GPT2LMHeadModel", "transformer (GPT2Model), lm_head (Linear)"),
        ("BertModel", "embeddings (BertEmbeddings), encoder (BertEncoder), pooler (BertPooler)"),
        (
            "ViltModel",
            "embeddings (ViltEmbeddings), encoder (ViltEncoder), layernorm (LayerNorm), pooler (ViltPooler)",
        ),
        ("LayoutLMv3Model", "embeddings (LayoutLMv3TextEmbeddings), patch_embed (LayoutLMv3PatchEmbeddings), "),
        (
            "UdopForConditionalGeneration",
            "shared (Embedding), patch_embed (UdopPatchEmbeddings), encoder (UdopStack), ",
        ),
    ],
)
def test_model_without_an_encoder(name, looked_at):
    with pytest.raises(EncoderNotFoundError) as error:
        find_encoders(build(name))
    assert str(error.value).startswith(f"{name} has no separable vision, video or audio encoder: ")
    assert f"looked into {looked_at}" in str(error.value)
    assert str(error.value).endswith("name it: encoder='path.of.the.module'")


# ---- get_encoder is asked, and not believed blindly


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])


class Hidden(Stack):
    def forward(self, hidden_states):
        return hidden_states


class Sight(Stack):
    def forward(self, pixel_values):
        return pixel_values


class Sound(Stack):
    def forward(self, input_features):
        return input_features


class Text(Stack):
    def __init__(self):
        super().__init__()
        self.encoder = Hidden()

    def forward(self, input_ids):
        return input_ids


class Model(nn.Module):
    """Answers get_encoder(modality) with the child, value or error given for it."""

    def __init__(self, children, answers=()):
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)
        self.answers = dict(answers)

    def forward(self, input_ids, pixel_values=None, pixel_values_videos=None, input_features=None):
        return input_ids

    def get_encoder(self, modality=None):
        answer = self.answers.get(modality)
        if isinstance(answer, Exception):
            raise answer
        return self.get_submodule(answer) if isinstance(answer, str) else answer


def towers():
    return {"text": Text(), "eyes": Sight(), "ears": Sound(), "connector": nn.Linear(2, 2)}


EYES, EARS = ("eyes", "Sight", IMAGE), ("ears", "Sound", AUDIO)


@pytest.mark.smoke
@pytest.mark.parametrize(
    "answer",
    [
        "",
        None,
        "text",
        "text.encoder",
        "ears",
        "connector",
        7,
        Sight(),
        AttributeError("visual"),
        KeyError(),
        TypeError(),
    ],
    ids=["itself", "none", "text side", "inside text", "ears", "no layers", "no module", "stranger", "A", "K", "T"],
)
def test_a_wrong_answer(answer):
    model = Model(towers(), {"image": answer})
    infos = find_encoders(model)
    assert summary(infos) == [EYES, EARS]
    assert infos[0].found_by == "its forward takes pixel_values and no text"


@pytest.mark.parametrize(
    ("answers", "eyes"),
    [
        ({"image": "eyes"}, IMAGE),
        ({"image": "eyes", "video": "eyes"}, BOTH),  # one module, once
        ({"image": "eyes", "video": "eyes", "audio": "eyes"}, BOTH),  # never across sight and sound
    ],
)
def test_a_right_answer(answers, eyes):
    infos = find_encoders(Model(towers(), answers))
    assert summary(infos) == [("eyes", "Sight", eyes), EARS]
    assert infos[0].found_by == "get_encoder('image')"


def test_video_is_believed_only_of_a_model_that_takes_video():
    class OnlyImages(Model):
        def forward(self, input_ids, pixel_values=None):
            return input_ids

    answers = {"image": "eyes", "video": "eyes"}
    assert summary(find_encoders(OnlyImages(towers(), answers))) == [EYES, EARS]


def test_a_tower_of_its_own_keeps_its_modality():
    children = {**towers(), "video_tower": Sight()}
    infos = find_encoders(Model(children, {"image": "eyes", "video": "eyes"}))
    assert summary(infos) == [EYES, EARS, ("video_tower", "Sight", VIDEO)]


@pytest.mark.parametrize(
    ("path", "answers", "found"),
    [
        ("eyes", {"image": "eyes"}, True),
        ("eyes", {"image": "eyes", "video": "eyes"}, True),
        ("eyes", {"image": "eyes", "audio": "eyes"}, False),  # the modality is ignored
        ("text.encoder", {"image": "text.encoder"}, False),
    ],
)
def test_an_encoder_whose_arguments_tell_nothing(path, answers, found):
    model = Model({"text": Text(), "eyes": Hidden()}, answers)
    if found:
        (info,) = find_encoders(model)
        assert (info.path, info.modalities[0], info.found_by) == (path, "image", "get_encoder('image')")
    else:
        with pytest.raises(EncoderNotFoundError):
            find_encoders(model)


def test_get_encoder_of_the_old_kind_is_not_asked():
    class Old(Model):
        def get_encoder(self):
            raise AssertionError

    assert summary(find_encoders(Old(towers()))) == [EYES, EARS]


def test_a_marked_class_is_an_encoder():
    @support_torch_compile(is_encoder=True)
    class Odd(Hidden):
        pass

    (info,) = find_encoders(Model({"text": Text(), "odd": Odd()}))
    assert (info.path, info.found_by) == ("odd", "support_torch_compile(is_encoder=True)")


def test_one_module_under_two_names_is_one_encoder():
    eyes = Sight()
    model = Model({"image_tower": eyes, "inner": nn.ModuleDict({"video_tower": eyes})})
    assert summary(find_encoders(model)) == [("image_tower", "Sight", BOTH)]


# ---- named by hand


@pytest.mark.parametrize(
    ("encoder", "found"),
    [
        ("eyes", ["eyes"]),
        (["ears", "eyes"], ["ears", "eyes"]),
        (("ears", "eyes", "ears"), ["ears", "eyes"]),
        (["ears", "eyes", "other_name_of_eyes"], ["ears", "eyes"]),
        ("other_name_of_eyes", ["other_name_of_eyes"]),
        ("text.encoder", ["text.encoder"]),  # the user knows
        ("", [""]),
    ],
)
def test_named(encoder, found):
    children = towers()
    model = Model({**children, "other_name_of_eyes": children["eyes"]}, {"image": "ears"})
    infos = find_encoders(model, encoder=encoder)
    assert [info.path for info in infos] == found
    assert all(info.module is model.get_submodule(info.path) for info in infos)
    assert all(info.found_by == f"encoder={info.path!r}" for info in infos)


@pytest.mark.parametrize(
    ("encoder", "sentence"),
    [
        (
            "vision_tower",
            "LlavaForConditionalGeneration has no module 'vision_tower'; did you mean model.vision_tower?",
        ),
        (
            "model.vison_tower",
            "LlavaForConditionalGeneration has no module 'model.vison_tower'; did you mean model.vision_tower",
        ),
        ("zzz", "LlavaForConditionalGeneration has no module 'zzz'; its children are model, lm_head"),
        (
            ["model.vision_tower", "zzz"],
            "LlavaForConditionalGeneration has no module 'zzz'; its children are model, lm_head",
        ),
        ([], "encoder=[]: expected a module path such as 'model.vision_tower', or several of them"),
        (3, "encoder=3: expected a module path such as 'model.vision_tower', or several of them"),
        ([None], "encoder=[None]: expected a module path such as 'model.vision_tower', or several of them"),
    ],
)
def test_a_path_that_is_not_there(encoder, sentence):
    tiny = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    model = build(
        "LlavaForConditionalGeneration",
        vision_config={"model_type": "clip_vision_model", **tiny},
        text_config={"model_type": "llama", **tiny},
    )
    with pytest.raises(EncoderNotFoundError) as error:
        find_encoders(model, encoder=encoder)
    assert str(error.value).startswith(sentence)
