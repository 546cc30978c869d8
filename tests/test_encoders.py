"""Encoders are found where they are, in real models (on the meta device) and in models that answer wrongly."""

import importlib

import pytest
import torch
import transformers
from packaging import version
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


# ---- models of Transformers, with small text models where the default one is large

FEW = {"num_hidden_layers": 1}
VOCABULARY = {"vocabulary_map": {"<image>": 4}}
MOE = {"num_hidden_layers": 2, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8}
TOWERS = {"vision_config": {}, "audio_config": {}}
THINKER = {"thinker_config": {"text_config": FEW}, "enable_audio_output": False}
ENCODERS = {
    # ordinary ones
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", {"text_config": FEW}, {"model.visual": BOTH}),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", {"text_config": FEW}, {"model.visual": BOTH}),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", {"text_config": FEW}, {"model.visual": BOTH}),
    "llava": ("LlavaForConditionalGeneration", {}, {"model.vision_tower": IMAGE}),
    "llava_onevision": ("LlavaOnevisionForConditionalGeneration", {}, {"model.vision_tower": BOTH}),
    "gemma3": ("Gemma3ForConditionalGeneration", {}, {"model.vision_tower": IMAGE}),
    "internvl": ("InternVLForConditionalGeneration", {}, {"model.vision_tower": BOTH}),
    "mistral3": ("Mistral3ForConditionalGeneration", {}, {"model.vision_tower": IMAGE}),
    "idefics2": ("Idefics2ForConditionalGeneration", {}, {"model.vision_model": IMAGE}),
    "idefics3": ("Idefics3ForConditionalGeneration", {"pad_token_id": 0}, {"model.vision_model": IMAGE}),
    "smolvlm": ("SmolVLMForConditionalGeneration", {"pad_token_id": 0}, {"model.vision_model": IMAGE}),
    "mllama": ("MllamaForConditionalGeneration", {}, {"model.vision_model": IMAGE}),
    "llama4": ("Llama4ForConditionalGeneration", {"text_config": FEW}, {"vision_model": IMAGE}),
    "qwen2_audio": ("Qwen2AudioForConditionalGeneration", {}, {"model.audio_tower": AUDIO}),
    "instructblipvideo": ("InstructBlipVideoForConditionalGeneration", {}, {"vision_model": VIDEO}),
    "clip": ("CLIPModel", {}, {"vision_model": IMAGE}),
    "siglip": ("SiglipModel", {}, {"vision_model": IMAGE}),
    # get_encoder(modality) gives the model itself, nothing, or only one of them
    "qwen2_5_omni": (
        "Qwen2_5OmniForConditionalGeneration",
        THINKER,
        {"thinker.model.audio_tower": AUDIO, "thinker.model.visual": BOTH},
    ),
    "qwen3_omni_moe": (
        "Qwen3OmniMoeForConditionalGeneration",
        THINKER,
        {"thinker.model.audio_tower": AUDIO, "thinker.model.visual": BOTH},
    ),
    "qwen2_5_omni_thinker": (
        "Qwen2_5OmniThinkerForConditionalGeneration",
        {"text_config": FEW},
        {"model.audio_tower": AUDIO, "model.visual": BOTH},
    ),
    "phi4_multimodal": (
        "Phi4MultimodalForCausalLM",
        FEW,
        {
            "model.embed_tokens_extend.image_embed.img_processor": IMAGE,
            "model.embed_tokens_extend.audio_embed.encoder": AUDIO,
        },
    ),
    "git": ("GitForCausalLM", {}, {"git.image_encoder": IMAGE}),
    "pi0": ("PI0ForConditionalGeneration", {}, {"model.vlm.vision_tower": IMAGE}),
    "chameleon": ("ChameleonForConditionalGeneration", {**VOCABULARY, **FEW}, {"model.vqmodel": IMAGE}),
    "emu3": ("Emu3ForConditionalGeneration", {**VOCABULARY, "text_config": FEW}, {"model.vqmodel": IMAGE}),
    "janus": (
        "JanusForConditionalGeneration",
        {"text_config": FEW},
        {"model.vision_model": IMAGE, "model.vqmodel": IMAGE},
    ),
    "apertus1p5": (
        "Apertus1p5ForConditionalGeneration",
        {"text_config": FEW},
        {"model.vision_tokenizer": IMAGE, "model.audio_tokenizer": AUDIO},
    ),
    "pix2struct": ("Pix2StructForConditionalGeneration", {}, {"encoder": IMAGE}),
    "vibevoice_asr": (
        "VibeVoiceAsrForConditionalGeneration",
        {"text_config": {"model_type": "qwen2", **FEW}},
        {"model.acoustic_tokenizer_encoder": AUDIO, "model.semantic_tokenizer_encoder": AUDIO},
    ),
    "vibevoice": (
        "VibeVoiceForConditionalGeneration",
        {"text_config": {"model_type": "qwen2", **FEW}},
        {"model.audio_tower": AUDIO, "model.semantic_tokenizer_encoder": AUDIO},
    ),
    "granite_speech": ("GraniteSpeechForConditionalGeneration", {}, {"model.encoder": AUDIO}),
    "granite_speech_plus": ("GraniteSpeechPlusForConditionalGeneration", {}, {"model.encoder": AUDIO}),
    "granite_speech5_ctc": ("GraniteSpeech5ForCTC", {}, {"encoder": AUDIO}),
    "whisper": ("WhisperForConditionalGeneration", {}, {"model.encoder": AUDIO}),
    "canary": ("CanaryForConditionalGeneration", {}, {"model.encoder": AUDIO}),
    "cohere_asr": ("CohereAsrForConditionalGeneration", {}, {"model.encoder": AUDIO}),
    "moonshine": ("MoonshineForConditionalGeneration", {}, {"model.encoder": AUDIO}),
    "speech_to_text": ("Speech2TextForConditionalGeneration", {}, {"model.encoder": AUDIO}),
    "parakeet_ctc": ("ParakeetForCTC", {}, {"encoder": AUDIO}),
    "parakeet_tdt": ("ParakeetForTDT", {}, {"encoder": AUDIO}),
    "parakeet_rnnt": ("ParakeetForRNNT", {}, {"encoder": AUDIO}),
    "lasr_ctc": ("LasrForCTC", {}, {"encoder": AUDIO}),
    "nemotron_asr_streaming": ("NemotronAsrStreamingForRNNT", {}, {"encoder": AUDIO}),
    "nemotron3_5_asr": ("Nemotron3_5AsrForRNNT", {}, {"encoder": AUDIO}),
    "nemo_speechlm": ("Nemotron3_5TranscribeForConditionalGeneration", {}, {"model.audio_tower": AUDIO}),
    "nemotron_h_omni": ("NemotronH_Omni_Reasoning_V3", {}, {"vision_model": BOTH}),
    # the head takes the same input; its base is the encoder
    "wav2vec2": ("Wav2Vec2ForCTC", {}, {"wav2vec2": AUDIO}),
    "wav2vec2-bert": ("Wav2Vec2BertForCTC", {"vocab_size": 32}, {"wav2vec2_bert": AUDIO}),
    "wav2vec2-conformer": ("Wav2Vec2ConformerForCTC", {"vocab_size": 32}, {"wav2vec2_conformer": AUDIO}),
    "hubert": ("HubertForCTC", {}, {"hubert": AUDIO}),
    "wavlm": ("WavLMForCTC", {}, {"wavlm": AUDIO}),
    "sew": ("SEWForCTC", {}, {"sew": AUDIO}),
    "unispeech": ("UniSpeechForCTC", {}, {"unispeech": AUDIO}),
    "data2vec-audio": ("Data2VecAudioForCTC", {}, {"data2vec_audio": AUDIO}),
    "audio-spectrogram-transformer": ("ASTForAudioClassification", {}, {"audio_spectrogram_transformer": AUDIO}),
    "vit": ("ViTForImageClassification", {}, {"vit": IMAGE}),
    "flava": ("FlavaModel", {}, {"image_model": IMAGE}),
    "clap": ("ClapModel", {}, {"audio_model": AUDIO}),
    "videoprism": ("VideoPrismClipModel", {}, {"video_model": VIDEO}),
    "pe_audio": ("PeAudioModel", {}, {"audio_encoder": AUDIO}),
    "kyutai_speech_to_text": ("KyutaiSpeechToTextForConditionalGeneration", FEW, {"codec_model.encoder": AUDIO}),
    "csm": ("CsmForConditionalGeneration", FEW, {"codec_model.encoder": AUDIO}),
    "evolla": ("EvollaForProteinText2Text", FEW, {"model.protein_encoder": ("protein",)}),
    # get_encoder(modality) gives the wrong one
    "video_llava": (
        "VideoLlavaForConditionalGeneration",
        {},
        {"model.video_tower": VIDEO, "model.image_tower": IMAGE},
    ),
    "seamless_m4t": ("SeamlessM4TModel", {}, {"speech_encoder": AUDIO}),
    "seamless_m4t_v2": ("SeamlessM4Tv2Model", {}, {"speech_encoder": AUDIO}),
    "diffusion_gemma": ("DiffusionGemmaForBlockDiffusion", {"text_config": MOE}, {"model.encoder.vision_tower": BOTH}),
    "t5gemma2": ("T5Gemma2ForConditionalGeneration", {}, {"model.encoder.vision_tower": IMAGE}),
    "deepseek_vl_hybrid": (
        "DeepseekVLHybridForConditionalGeneration",
        {},
        {"model.high_res_vision_model": IMAGE, "model.vision_model": IMAGE},
    ),
    # one module holds two encoders, one after the other
    "deepseek_ocr2": (
        "DeepseekOcr2ForConditionalGeneration",
        {"text_config": {**FEW, "mlp_layer_types": ["dense"]}},
        {"model.vision_tower": IMAGE},
    ),
    "unlimited_ocr": ("UnlimitedOcrForConditionalGeneration", {}, {"model.vision_tower": IMAGE}),
    "blip-2": ("Blip2ForConditionalGeneration", {}, {"vision_model": IMAGE}),
    # no module takes its input: the model embeds it
    "pop2piano": ("Pop2PianoForConditionalGeneration", {}, {"encoder": AUDIO}),
    # it streams: it takes a cache, and embeddings, but no text
    "voxtral_realtime": ("VoxtralRealtimeForConditionalGeneration", {}, {"model.audio_tower": AUDIO}),
    "gemma4": ("Gemma4ForConditionalGeneration", TOWERS, {"model.vision_tower": BOTH, "model.audio_tower": AUDIO}),
    "embedding_gemma2": ("EmbeddingGemma2Model", TOWERS, {"vision_tower": BOTH, "audio_tower": AUDIO}),
    # its arguments are named like those of any layer; only get_encoder tells
    "florence2": ("Florence2ForConditionalGeneration", {}, {"model.vision_tower": IMAGE}),
    # its decoder takes sound too
    "speecht5": ("SpeechT5ForSpeechToText", {}, {"speecht5.encoder": AUDIO}),
}
# Where Transformers 5.0 builds the same model otherwise
OLDER = {
    "granite_speech": {"encoder": AUDIO},
    "qwen2_audio": {"audio_tower": AUDIO},
    "qwen2_5_omni": {"thinker.audio_tower": AUDIO, "thinker.visual": BOTH},
    "qwen2_5_omni_thinker": {"audio_tower": AUDIO, "visual": BOTH},
    "kyutai_speech_to_text": {"codec_model": AUDIO},  # the encoder of the codec has no name of its own for its input
    "csm": {"codec_model": AUDIO},
}
SMOKE = ("qwen2_5_vl", "llava", "phi4_multimodal", "granite_speech", "parakeet_ctc", "csm", "video_llava", "wav2vec2")


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=[pytest.mark.smoke] * (name in SMOKE)) for name in ENCODERS]
)
def test_model(model_type):
    name, options, expected = ENCODERS[model_type]
    if version.parse(transformers.__version__) < version.parse("5.24"):
        expected = OLDER.get(model_type, expected)
    found = {info.path: info.modalities for info in find_encoders(build_or_skip(name, options))}
    assert found == expected
    assert list(found) == list(expected)  # in the order of the model's modules


def build_or_skip(name, options):
    """Build a model; the oldest supported Transformers have fewer models, and cannot build some from a default."""
    try:
        return build(name, **options)
    except (AttributeError, AssertionError, ImportError, TypeError) as error:
        if version.parse(transformers.__version__) >= version.parse("5.24"):
            raise
        pytest.skip(f"Transformers {transformers.__version__}: {error}")


def test_encoder_decoders_by_name():
    pairs = [
        ("VisionEncoderDecoder", transformers.ViTConfig(), IMAGE),
        ("SpeechEncoderDecoder", transformers.Wav2Vec2Config(), AUDIO),
    ]
    for name, encoder, modalities in pairs:
        config_class = getattr(transformers, f"{name}Config")
        config = config_class.from_encoder_decoder_configs(encoder, transformers.BertConfig(is_decoder=True))
        with torch.device("meta"):
            model = getattr(transformers, f"{name}Model")(config)
        assert [(info.path, info.modalities) for info in find_encoders(model)] == [("encoder", modalities)]


def test_an_encoder_whose_frames_go_through_timm(monkeypatch):
    """Of pe_video only the class of the frames' model is exchanged: timm need not be installed."""
    module = pytest.importorskip("transformers.models.pe_video.modeling_pe_video")
    vit = transformers.ViTForImageClassification
    stand_in = type("Auto", (), {"from_config": lambda *_, **__: vit(transformers.ViTConfig(num_labels=8))})
    monkeypatch.setattr(module, "AutoModelForImageClassification", stand_in)
    found = find_encoders(build_or_skip("PeVideoModel", {}))
    assert [(info.path, info.modalities) for info in found] == [("video_encoder", VIDEO)]


def test_a_tower_that_the_config_leaves_out():
    model = build_or_skip("Gemma4ForConditionalGeneration", {})
    with pytest.raises(EncoderNotFoundError) as error:
        find_encoders(model)
    assert "Its config says None for vision_config and audio_config, so that none was built." in str(error.value)


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
        ("Gemma4UnifiedForConditionalGeneration", "model (Gemma4UnifiedModel), lm_head (Linear)"),
        (
            "ViltModel",
            "embeddings (ViltEmbeddings), encoder (ViltEncoder), layernorm (LayerNorm), pooler (ViltPooler)",
        ),
        ("LayoutLMv3Model", "embeddings (LayoutLMv3TextEmbeddings), patch_embed (LayoutLMv3PatchEmbeddings), "),
        (
            "UdopForConditionalGeneration",
            "shared (Embedding), patch_embed (UdopPatchEmbeddings), encoder (UdopStack), ",
        ),
        ("VisualBertModel", "embeddings (VisualBertEmbeddings), "),
        ("LxmertModel", "embeddings (LxmertEmbeddings), encoder (LxmertEncoder), "),
        ("ClvpModelForConditionalGeneration", "conditioning_encoder (ClvpConditioningEncoder), "),
    ],
)
def test_model_without_an_encoder(name, looked_at):
    model = build_or_skip(name, {})
    with pytest.raises(EncoderNotFoundError) as error:
        find_encoders(model)
    assert str(error.value).startswith(f"{name} has no separable vision, video or audio encoder: no module below it ")
    assert f"looked into {looked_at}" in str(error.value)
    assert str(error.value).endswith("name it: encoder='path.of.the.module'")


@pytest.mark.parametrize(
    "name",
    [
        "LlamaForCausalLM",
        "GPT2LMHeadModel",
        "BertModel",
        "T5ForConditionalGeneration",
        "LayoutLMModel",  # words and where they stand
        "BrosModel",
        "DiaForConditionalGeneration",  # it speaks, and hears nothing
    ],
)
def test_model_without_media(name):
    with pytest.raises(EncoderNotFoundError) as error:
        find_encoders(build(name))
    assert str(error.value) == (
        f"{name} has no separable vision, video or audio encoder: it takes no image, video or sound, only text. Load "
        "it without compile_mm_encoder, or compile it by itself with model.compile(). If one of its modules is the "
        "encoder, name it: encoder='path.of.the.module'"
    )


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
