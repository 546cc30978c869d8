"""Encoders of sound: spectrograms and waveforms."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from ..cases import Case, Draw, Recipe

__all__ = ["AUDIO"]


def clips(draw: Draw, longest: int, *, most: int = 7, shortest: int = 1, window: bool = False) -> torch.Tensor:
    """Return the lengths of the clips of one call: (batch,), none above `longest`.

    In the first and fourth call, and in about half of those after, all clips are `longest`; in the others the first
    is, as a processor pads to the longest. With `window` it pads to a fixed length, which no clip has to reach.
    """
    batch = draw.batch(most)
    if draw.index in (0, 3) or (draw.index > 3 and draw.random.random() < 0.5):
        return torch.full((batch,), longest)
    lengths = [draw.size(shortest, longest) for _ in range(batch)]
    return torch.tensor(lengths if window else [longest, *lengths[1:]])


def valid(lengths: torch.Tensor, longest: int) -> torch.Tensor:
    """Return True where a clip has sound: (batch, longest)."""
    return torch.arange(longest)[None, :] < lengths[:, None]


def mel(bins: int = 80, frames: int = 3000, *, name: str = "input_features", mask: str = "") -> Recipe:
    """Spectrograms of fixed length: (batch, bins, frames), and (batch, frames) for the mask, if it has one."""

    def recipe(encoder: nn.Module, draw: Draw) -> dict[str, Any]:
        if not mask:
            return {name: draw.normal(draw.batch(), bins, frames)}
        sound = valid(clips(draw, frames, shortest=8, window=True), frames)
        return {name: draw.normal(len(sound), bins, frames) * sound[:, None], mask: sound.int()}

    return recipe


def frames(
    bins: int,
    low: int = 40,
    high: int = 200,
    *,
    step: int = 1,
    most: int = 7,
    name: str = "input_features",
    mask: str = "attention_mask",
    dtype: torch.dtype = torch.bool,
    of_padding: bool = False,
    alone: bool = True,
) -> Recipe:
    """Spectrograms of any length: (batch, frames, bins), and (batch, frames) for the mask, if it has one.

    Args:
        bins: of one frame.
        low: fewest frames of the longest clip, which the first call has.
        high: most frames.
        step: the processor pads to a multiple of it.
        most: clips in a call.
        name: keyword of the spectrograms.
        mask: keyword of the mask.
        dtype: of the mask.
        of_padding: the mask is True where there is no sound.
        alone: whether a single clip has a mask too; else it is None.
    """

    def recipe(encoder: nn.Module, draw: Draw) -> dict[str, Any]:
        longest = low if draw.index == 0 else draw.size(low, high)
        lengths = clips(draw, longest, most=most, shortest=low // 2)
        padded = -(-longest // step) * step
        sound = valid(lengths, padded)
        inputs: dict[str, Any] = {name: draw.normal(len(sound), padded, bins) * sound[:, :, None]}
        if mask and (alone or len(sound) > 1):
            inputs[mask] = (~sound if of_padding else sound).to(dtype)
        elif mask:
            inputs[mask] = None
        return inputs

    return recipe


def mel_of_any_length(
    bins: int, low: int = 40, high: int = 200, *, step: int = 1, name: str = "input_features", mask: str = ""
) -> Recipe:
    """Spectrograms of any length, time last: (batch, bins, frames), and (batch, frames) for the mask, if any."""
    turned = frames(bins, low, high, step=step, name=name, mask=mask, dtype=torch.long)

    def recipe(encoder: nn.Module, draw: Draw) -> dict[str, Any]:
        inputs = turned(encoder, draw)
        return inputs | {name: inputs[name].transpose(1, 2).contiguous()}

    return recipe


def waveforms(
    low: int = 2000,
    high: int = 8000,
    *,
    step: int = 1,
    mask: str = "",
    dtype: torch.dtype = torch.int32,
    channel: bool = False,
) -> Recipe:
    """Waveforms of any length: (batch, samples) or with a channel (batch, 1, samples); mask (batch, samples)."""
    padded = frames(1, low, high, step=step, name="input_values", mask=mask, dtype=dtype)

    def recipe(encoder: nn.Module, draw: Draw) -> dict[str, Any]:
        inputs = padded(encoder, draw)
        sound = inputs["input_values"]
        return inputs | {"input_values": sound.transpose(1, 2) if channel else sound.squeeze(-1)}

    return recipe


def codec_waveforms(low: int = 400, high: int = 2000, *, step: int = 1) -> Recipe:
    """Waveforms with a channel (batch, 1, samples) for the first argument of a codec's encoder, whatever its name."""
    padded = waveforms(low, high, step=step, channel=True)

    def recipe(encoder: nn.Module, draw: Draw) -> dict[str, Any]:
        return {next(iter(inspect.signature(encoder.forward).parameters)): padded(encoder, draw)["input_values"]}

    return recipe


def end_to_end(bins: int, low: int, high: int, *, after_convolution: bool = False) -> Recipe:
    """Spectrograms of several clips in one row: (bins, frames of all) and `feature_lens` (clips,)."""

    def recipe(encoder: nn.Module, draw: Draw) -> dict[str, Any]:
        lengths = torch.tensor([low if draw.index == 0 else draw.size(low, high) for _ in range(draw.batch(4))])
        inputs = {"input_features": draw.normal(bins, int(lengths.sum())), "feature_lens": lengths}
        return inputs | ({"aftercnn_lens": (lengths - 1) // 2 + 1} if after_convolution else {})

    return recipe


def counted(bins: int, length: int, hop: int) -> Recipe:
    """Windows of a fixed length (windows, bins, length) and how many samples of each are sound (windows,)."""

    def recipe(encoder: nn.Module, draw: Draw) -> dict[str, Any]:
        lengths = clips(draw, length, shortest=8, window=True)
        sound = draw.normal(len(lengths), bins, length) * valid(lengths, length)[:, None]
        return {"input_features": sound, "chunk_sample_lengths": lengths * hop}

    return recipe


def codes(high: int, books: int, *, name: str) -> Recipe:
    """Batches of codes of several codebooks: (batch, length, books)."""

    def recipe(encoder: nn.Module, draw: Draw) -> dict[str, Any]:
        length = 8 if draw.index == 0 else draw.size(8, 40)
        return {name: draw.integers(high, draw.batch(), length, books)}

    return recipe


def padded_to(bins: int, length: int, *, parts: int = 1) -> Recipe:
    """Spectrograms of one length with a channel: (batch, 1, length, bins).

    Or with four: the whole and three parts of a clip, and whether it is long, which one clip of a call always is:
    (batch, 4, length, bins) and (batch, 1).
    """

    def recipe(encoder: nn.Module, draw: Draw) -> dict[str, Any]:
        batch = draw.batch()
        longer = draw.integers(2, batch, 1).bool()
        longer[draw.random.randrange(batch)] = True
        features = {"input_features": draw.normal(batch, parts, length, bins)}
        return features | ({"is_longer": longer} if parts > 1 else {})

    return recipe


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
# Deep enough that the convolutions are no larger a part than in real encoders: they are outside the layers.
DEEP = {"encoder_layers": 3, "encoder_ffn_dim": 128}
DEEP_TOO = {"num_hidden_layers": 3, "intermediate_size": 128}
WHISPER = {**DEEP, "num_mel_bins": 16, "max_source_positions": 32}
QWEN = {**DEEP, "num_mel_bins": 16, "max_source_positions": 16, "n_window": 8, "output_dim": 48}
QWEN_3 = {
    **QWEN,
    "n_window": 50,
    "n_window_infer": 200,
    "downsample_hidden_size": 8,
}  # the code knows n_window 50 only
FAST_CONFORMER = {"num_mel_bins": 16, "conv_kernel_size": 5, "subsampling_conv_channels": 16}
PARAKEET = {**FAST_CONFORMER, **SMALL}
GRANITE = {"input_dim": 16, "num_layers": 4, "hidden_dim": 32, "dim_head": 16, "output_dim": 12}
GRANITE_SPEECH = {**GRANITE, "feedforward_mult": 2, "context_size": 8, "max_pos_emb": 16, "conv_kernel_size": 5}
SEAMLESS = {
    "feature_projection_input_dim": 16,
    "speech_encoder_layers": 2,
    "speech_encoder_attention_heads": 2,
    "speech_encoder_intermediate_size": 64,
    "conv_depthwise_kernel_size": 7,
}
SEAMLESS_2 = {**SEAMLESS, "left_max_position_embeddings": 8, "right_max_position_embeddings": 2}
WAVE = {"conv_dim": (16,) * 7, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 8}
LARGE = {"feat_extract_norm": "layer", "do_stable_layer_norm": True, "conv_bias": True}
WITH_ADAPTER = {"add_adapter": True, "num_adapter_layers": 2, "adapter_attn_dim": 8}
CONFORMER = {"conv_depthwise_kernel_size": 7, "max_source_positions": 64}
BERT = {
    "feature_projection_input_dim": 16,
    **CONFORMER,
    "left_max_position_embeddings": 8,
    "right_max_position_embeddings": 2,
}
SQUEEZED = {"conv_dim": (16,) * 13, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 8}
CLAP = {
    "window_size": 4,
    "num_mel_bins": 16,
    "spec_size": 64,
    "depths": (2, 2, 2),
    "num_attention_heads": (2, 2, 4),
    "patch_embeds_hidden_size": 16,
    "hidden_size": 64,
    "num_hidden_layers": 3,
}
DAC = {
    "encoder_hidden_size": 4,
    "downsampling_ratios": (2, 4),
    "codebook_dim": 8,
    "codebook_size": 16,
    "n_codebooks": 2,
}
SEANET = {"num_filters": 4, "upsampling_ratios": [4, 2], "sampling_rate": 800, "hidden_size": 32}
CODEBOOK = {"codebook_size": 16, "codebook_dim": 16}
TRANSFORMER = {**SMALL, "num_key_value_heads": 2, "sliding_window": 8}
MIMI = {
    **SEANET,
    **CODEBOOK,
    **TRANSFORMER,
    "vector_quantization_hidden_dimension": 16,
    "num_quantizers": 4,
    "upsample_groups": 32,
    "frame_rate": 50.0,
}
HUBERT = {**WAVE, **SMALL, "model_type": "hubert"}
NEMOTRON = {**SMALL, "num_mel_bins": 16}
DIARIZATION = {
    "audio_config": NEMOTRON,
    "head_config": {"hidden_size": 16, "num_speakers": 4, "audio_hidden_size": 32},
    "streaming_config": {
        "fifo_length": 8,
        "speaker_cache_update_period": 6,
        "speaker_cache_length": 16,
        "num_speakers": 4,
    },
    "chunk_length": 8,
    "chunk_right_context": 2,
    "fifo_length": 4,
    "speaker_cache_update_period": 8,
}
DECODER = {**SMALL, "vocab_size": 64, "num_hidden_layers": 1}

SPECTROGRAMS: dict[str, Case] = {
    "whisper": Case("whisper.WhisperEncoder", mel(16, 64), WHISPER),
    "voxtral": Case("voxtral.VoxtralEncoder", mel(16, 64), {**WHISPER, "num_key_value_heads": 2}),
    "moss_transcribe_diarize": Case(
        "moss_transcribe_diarize.MossTranscribeDiarizeAudioModel",
        mel(16, 64),
        {**DEEP_TOO, "num_mel_bins": 16, "max_source_positions": 32},
    ),
    "qwen2_audio": Case("qwen2_audio.Qwen2AudioEncoder", mel(16, 64), WHISPER),
    "audioflamingo3": Case("audioflamingo3.AudioFlamingo3Encoder", mel(16, 64, mask="input_features_mask"), WHISPER),
    "glmasr": Case("glmasr.GlmAsrEncoder", mel_of_any_length(16), {**DEEP_TOO, "num_mel_bins": 16}),
    "granite_speech": Case(
        "granite_speech.GraniteSpeechCTCEncoder", frames(16, name="hidden_states", mask=""), GRANITE_SPEECH
    ),
    "granite_speech_plus": Case(
        "granite_speech_plus.GraniteSpeechPlusCTCEncoder",
        frames(16, name="hidden_states", mask=""),
        {**GRANITE_SPEECH, "cat_hidden_layers": [1, 3]},
    ),
    "granite_speech5": Case(
        "granite_speech5.GraniteSpeech5Encoder",
        frames(64),
        {
            "num_mel_bins": 16,
            "num_hidden_layers": 4,
            "max_position_embeddings": 16,
            "context_size": 8,
            "subsample_layers": [0, 2],
        },
    ),
    "parakeet": Case("parakeet.ParakeetEncoder", frames(16), FAST_CONFORMER),
    "canary": Case(
        "canary.CanaryModel",
        frames(16),
        {"encoder_config": PARAKEET, "decoder_config": DECODER, "vocab_size": 64},
        part="encoder",
    ),
    "cohere_asr": Case(
        "cohere_asr.CohereAsrModel", frames(16), {"encoder_config": PARAKEET, "num_hidden_layers": 1}, part="encoder"
    ),
    "lasr": Case("lasr.LasrEncoder", frames(16), FAST_CONFORMER),
    "fun_asr_nano": Case(
        "fun_asr_nano.FunAsrNanoEncoder",
        frames(32, 10, 60, mask="input_features_mask", dtype=torch.long),
        {
            "num_mel_bins": 8,
            "num_stacked_frames": 4,
            "num_hidden_layers": 4,
            "num_timestamp_prediction_layers": 2,
            "hidden_size": 48,
            "fsmn_kernel_size": 5,
            "max_position_embeddings": 64,
        },
    ),
    "nemotron_asr_streaming": Case(
        "nemotron_asr_streaming.NemotronAsrStreamingEncoder",
        frames(16),
        {**FAST_CONFORMER, "sliding_window": 8},
        {"num_lookahead_tokens": 2},
    ),
    "nemotron_asr_streaming[default]": Case(
        "nemotron_asr_streaming.NemotronAsrStreamingEncoder",
        frames(16),
        {**FAST_CONFORMER, "sliding_window": 8, "default_num_lookahead_tokens": 2},
        note="without the processor, which says how far to look ahead",
    ),
    "nemo_speechlm": Case(
        "nemotron3_5_transcribe.Nemotron3_5TranscribeAudioModel",
        frames(16, 40, 300, step=8, most=3, mask="input_features_mask", dtype=torch.long),
        {"asr_config": NEMOTRON, "diarization_config": DIARIZATION},
        note="two encoders side by side, both in chunks",
    ),
    "nemotron3_diarization": Case("nemotron3_diarization.Nemotron3DiarizationAudioModel", frames(16), NEMOTRON),
    "qwen2_5_omni.audio": Case(
        "qwen2_5_omni.Qwen2_5OmniAudioEncoder", end_to_end(16, 20, 150, after_convolution=True), QWEN
    ),
    "qwen3_omni.audio": Case("qwen3_omni_moe.Qwen3OmniMoeAudioEncoder", end_to_end(16, 60, 450), QWEN_3),
    "qwen3_omni.audio[parts]": Case(
        "qwen3_omni_moe.Qwen3OmniMoeAudioEncoder",
        end_to_end(16, 60, 450),
        {**QWEN_3, "conv_chunksize": 4},
        note="long sound goes through the convolutions in parts",
    ),
    "qwen3_asr": Case(
        "qwen3_asr.Qwen3ASREncoder",
        mel_of_any_length(16, 60, 450, step=100, mask="input_features_mask"),
        {**QWEN_3, "max_position_embeddings": 13},
    ),
    "gemma3n.audio": Case(
        "gemma3n.Gemma3nAudioEncoder",
        frames(16, name="audio_mel", mask="audio_mel_mask", of_padding=True),
        {
            "input_feat_size": 16,
            "conf_attention_chunk_size": 6,
            "conf_attention_context_left": 5,
            "conf_num_attention_heads": 2,
            "conf_num_hidden_layers": 2,
            "sscp_conv_channel_size": (16, 8),
        },
    ),
    "gemma4.audio": Case(
        "gemma4.Gemma4AudioModel",
        frames(16),
        {
            "subsampling_conv_channels": (16, 8),
            "attention_chunk_size": 6,
            "attention_context_left": 5,
            "output_proj_dims": 48,
        },
    ),
    "phi4_mm.audio": Case(
        "phi4_multimodal.Phi4MultimodalAudioModel",
        frames(16, name="hidden_states", mask="mask", alone=False),
        PHI_4 := {
            "num_blocks": 2,
            "input_size": 16,
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
            "bias_max_distance": 40,
            "nemo_conv_channels": 16,
        },
    ),
    "phi4_mm.audio[long]": Case(
        "phi4_multimodal.Phi4MultimodalAudioModel",
        frames(16, 4010, 9000, most=1, name="hidden_states", mask="mask", alone=False),
        PHI_4,
        note="above 500 positions, cut into rows of the batch: eager does that for one clip only",
    ),
    "voxtral_realtime": Case(
        "voxtral_realtime.VoxtralRealtimeEncoder",
        mel_of_any_length(16, step=8),
        {"num_mel_bins": 16, "head_dim": 16, "sliding_window": 8, "vocab_size": 64},
        note="keeps a cache, as its configuration says",
    ),
    "voxtral_realtime[uncached]": Case(
        "voxtral_realtime.VoxtralRealtimeEncoder",
        mel_of_any_length(16, step=8),
        {"num_mel_bins": 16, "head_dim": 16, "sliding_window": 8, "use_cache": False},
    ),
    "seamless_m4t": Case(
        "seamless_m4t.SeamlessM4TSpeechEncoder",
        frames(16, 20, 120, step=2, dtype=torch.int32),
        {**SEAMLESS, "max_source_positions": 128},
    ),
    "seamless_m4t[rotary]": Case(
        "seamless_m4t.SeamlessM4TSpeechEncoder",
        frames(16, 20, 120, step=2, dtype=torch.int32),
        {**SEAMLESS, "position_embeddings_type": "rotary"},
    ),
    "seamless_m4t_v2": Case(
        "seamless_m4t_v2.SeamlessM4Tv2SpeechEncoder",
        frames(16, 20, 120, step=2, dtype=torch.int32),
        {**SEAMLESS_2, "speech_encoder_chunk_size": 16, "speech_encoder_left_chunk_num": 1},
    ),
    "speech_to_text": Case(
        "speech_to_text.Speech2TextEncoder",
        frames(16, dtype=torch.int32),
        {**DEEP, "max_source_positions": 64, "conv_channels": 32, "input_feat_per_channel": 16},
    ),
    "clap.audio": Case("clap.ClapAudioModel", padded_to(16, 250), CLAP),
    "clap.audio[fused]": Case("clap.ClapAudioModel", padded_to(16, 250, parts=4), {**CLAP, "enable_fusion": True}),
    "dots3_note.audio": Case(
        "dots3_note.Dots3NoteAudioModel",
        counted(16, 128, 160),
        {**DEEP_TOO, "feature_size": 16, "downsample_hidden_size": 8, "adapter_input_size": 32, "adapter_out_dim": 48},
    ),
    "wav2vec2_bert": Case("wav2vec2_bert.Wav2Vec2BertModel", frames(16, 20, 120, step=2, dtype=torch.int32), BERT),
    "wav2vec2_bert[adapter]": Case(
        "wav2vec2_bert.Wav2Vec2BertModel",
        frames(16, 20, 120, step=2, dtype=torch.int32),
        {**BERT, "add_adapter": True, "use_intermediate_ffn_before_adapter": True},
    ),
    "audio_spectrogram_transformer": Case(
        "audio_spectrogram_transformer.ASTModel",
        mel(64, 16, name="input_values"),
        {"max_length": 64, "num_mel_bins": 16, "frequency_stride": 4, "time_stride": 4},
        note="bins last, and always 64 frames",
    ),
    "pop2piano": Case(
        "pop2piano.Pop2PianoForConditionalGeneration",
        frames(32, 20, 100, name="inputs_embeds", dtype=torch.long),
        {"d_kv": 16, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 1, "relative_attention_num_buckets": 8},
        part="encoder",
        note="gets its spectrogram as embeddings, so it looks like an encoder of text",
    ),
}

WAVEFORMS: dict[str, Case] = {
    "wav2vec2": Case("wav2vec2.Wav2Vec2Model", waveforms(), WAVE),
    "wav2vec2[mask]": Case("wav2vec2.Wav2Vec2Model", waveforms(mask="attention_mask"), {**WAVE, **LARGE}),
    "wav2vec2[adapter]": Case(
        "wav2vec2.Wav2Vec2Model", waveforms(mask="attention_mask"), {**WAVE, **LARGE, **WITH_ADAPTER}
    ),
    "wavlm": Case("wavlm.WavLMModel", waveforms(), {**WAVE, "num_buckets": 32, "max_bucket_distance": 80}),
    "wavlm[mask]": Case(
        "wavlm.WavLMModel",
        waveforms(mask="attention_mask"),
        {**WAVE, **LARGE, "num_buckets": 32, "max_bucket_distance": 80},
    ),
    "hubert": Case("hubert.HubertModel", waveforms(), WAVE),
    "hubert[mask]": Case("hubert.HubertModel", waveforms(mask="attention_mask"), {**WAVE, **LARGE}),
    "hubert[batch_norm]": Case("hubert.HubertModel", waveforms(), {**WAVE, "conv_pos_batch_norm": True}),
    "unispeech": Case("unispeech.UniSpeechModel", waveforms(), WAVE),
    "unispeech[mask]": Case("unispeech.UniSpeechModel", waveforms(mask="attention_mask"), {**WAVE, **LARGE}),
    "unispeech_sat": Case("unispeech_sat.UniSpeechSatModel", waveforms(), WAVE),
    "unispeech_sat[mask]": Case(
        "unispeech_sat.UniSpeechSatModel", waveforms(mask="attention_mask"), {**WAVE, **LARGE}
    ),
    "data2vec_audio": Case(
        "speech_encoder_decoder.SpeechEncoderDecoderModel",
        waveforms(mask="attention_mask"),
        {
            "encoder": {**HUBERT, "model_type": "data2vec-audio", "num_conv_pos_embeddings": 3},
            "decoder": {**DECODER, "model_type": "bert", "is_decoder": True, "add_cross_attention": True},
        },
        part="encoder",
    ),
    "sew": Case("sew.SEWModel", waveforms(), SQUEEZED),
    "sew[mask]": Case("sew.SEWModel", waveforms(mask="attention_mask"), {**SQUEEZED, "feat_extract_norm": "layer"}),
    "sew_d": Case("sew_d.SEWDModel", waveforms(), {**SQUEEZED, "position_buckets": 16, "max_position_embeddings": 32}),
    "sew_d[mask]": Case(
        "sew_d.SEWDModel",
        waveforms(mask="attention_mask"),
        {**SQUEEZED, "position_buckets": 16, "max_position_embeddings": 32, "feat_extract_norm": "layer"},
    ),
    "wav2vec2_conformer": Case(
        "wav2vec2_conformer.Wav2Vec2ConformerModel", waveforms(mask="attention_mask"), {**WAVE, **CONFORMER}
    ),
    "wav2vec2_conformer[rotary]": Case(
        "wav2vec2_conformer.Wav2Vec2ConformerModel",
        waveforms(mask="attention_mask"),
        {**WAVE, **CONFORMER, "position_embeddings_type": "rotary"},
    ),
    "speecht5": Case(
        "speecht5.SpeechT5EncoderWithSpeechPrenet",
        waveforms(mask="attention_mask"),
        {**WAVE, "max_speech_positions": 64, "encoder_max_relative_position": 16},
    ),
    "omniasr": Case("omniasr.OmniASRAudioModel", waveforms(mask="padding_mask", dtype=torch.bool, channel=True), WAVE),
    "omniasr_ctc": Case(
        "omniasr_ctc.OmniASRCTCModel",
        waveforms(mask="padding_mask", dtype=torch.bool, channel=True),
        {"audio_config": {"model_type": "omniasr_audio", **SMALL, **WAVE, "initializer_range": 0.2}},
    ),
    "wavtokenizer": Case(
        "wavtokenizer.WavTokenizerEncoderModel",
        waveforms(channel=True, mask="padding_mask"),
        {"num_filters": 8, "upsampling_ratios": [4, 2], "hidden_size": 32, "codebook_dim": 32, "codebook_size": 16},
    ),
    "moonshine": Case(
        "moonshine.MoonshineEncoder",
        waveforms(4000, 16000, mask="attention_mask"),
        MOONSHINE := {
            "hidden_size": 64,
            "intermediate_size": 256,
            "encoder_num_hidden_layers": 3,
            "encoder_num_attention_heads": 2,
            "decoder_num_attention_heads": 2,
        },
    ),
    "moonshine[unmasked]": Case("moonshine.MoonshineEncoder", waveforms(4000, 16000), MOONSHINE),
    "moonshine_streaming": Case(
        "moonshine_streaming.MoonshineStreamingEncoder",
        waveforms(4000, 16000, step=80, mask="attention_mask"),
        {"num_hidden_layers": 3, "num_key_value_heads": 2, "sliding_windows": ((4, 1), (4, 0), (4, 1))},
    ),
    "pe_audio": Case(
        "pe_audio.PeAudioEncoder",
        waveforms(300, 1200, step=8, mask="padding_mask", dtype=torch.bool, channel=True),
        {"dac_config": DAC, "head_dim": 16},
    ),
    "pe_audio[unmasked]": Case(
        "pe_audio.PeAudioEncoder", waveforms(300, 1200, step=8, channel=True), {"dac_config": DAC, "head_dim": 16}
    ),
    "muse_spark.audio": Case(
        "muse_spark.MuseSparkAudioModel",
        waveforms(400, 2000, step=24),
        {
            "patch_sizes": (4, 3, 2),
            "hidden_sizes": (16, 32, 48),
            "depths": (2, 2, 2),
            "num_hidden_layers": 3,
            "out_hidden_size": 64,
        },
    ),
    "vibevoice.codec": Case(
        "vibevoice_acoustic_tokenizer.VibeVoiceAcousticTokenizerModel",
        codec_waveforms(),
        {"num_filters": 4, "downsampling_ratios": (2, 2, 4), "depths": (1, 1, 2, 2), "layer_scale_init_value": 0.1},
        call={"sample": False},  # of the latents' noise
    ),
    "vibevoice.tok": Case(
        "vibevoice_acoustic_tokenizer.VibeVoiceAcousticTokenizerEncoderModel",
        codec_waveforms(),
        {"num_filters": 4, "downsampling_ratios": (2, 2, 4), "depths": (1, 1, 2, 2), "layer_scale_init_value": 0.1},
    ),
}

CODECS: dict[str, Case] = {
    "mimi": Case("mimi.MimiModel", codec_waveforms(), MIMI, part="encoder"),
    "kyutai_speech_to_text": Case(
        "kyutai_speech_to_text.KyutaiSpeechToTextForConditionalGeneration",
        codec_waveforms(),
        {
            "codec_config": {**MIMI, "model_type": "mimi"},
            "ffn_dim": 64,
            "num_codebooks": 2,
            "codebook_vocab_size": 16,
            "head_dim": 16,
            "audio_bos_token_id": 15,
            "audio_pad_token_id": 69,
        },
        part="codec_model.encoder",
    ),
    "csm": Case(
        "csm.CsmForConditionalGeneration",
        codec_waveforms(),
        {
            "codec_config": {**MIMI, "model_type": "mimi"},
            "num_codebooks": 2,
            "text_vocab_size": 64,
            "depth_decoder_config": {
                **DECODER,
                "num_codebooks": 2,
                "backbone_hidden_size": 32,
                "num_key_value_heads": 2,
            },
            "num_key_value_heads": 2,
        },
        part="codec_model.encoder",
    ),
    "pocket_tts": Case(
        "pocket_tts_audio_tokenizer.PocketTTSAudioTokenizerEncoderModel",
        codec_waveforms(),
        {**SEANET, **TRANSFORMER, "latent_stride": 2, "latent_dim": 16},
    ),
    "encodec": Case("encodec.EncodecModel", codec_waveforms(), {**SEANET, "codebook_size": 16}, part="encoder"),
    "dac": Case("dac.DacModel", codec_waveforms(step=8), DAC, part="encoder"),
    "xcodec": Case(
        "xcodec.XcodecModel",
        mel_of_any_length(32, 10, 60, name="hidden_state"),
        {"acoustic_model_config": DAC, "semantic_model_config": HUBERT, "codebook_size": 16},
        part="encoder_semantic",
    ),
    "xcodec2": Case(
        "xcodec2.Xcodec2Model",
        codec_waveforms(step=8),
        {
            "semantic_model_config": {**BERT, **SMALL, "model_type": "wav2vec2-bert"},
            "encoder_hidden_size": 4,
            "downsampling_ratios": (2, 4),
            "num_key_value_heads": 2,
            "head_dim": 16,
            "quantization_dim": 32,
            "quantization_levels": (4, 4),
        },
        part="acoustic_encoder",
    ),
    "inkling.audio": Case(
        "inkling.InklingAudioModel",
        codes(16, 8, name="audio_input_ids"),
        {"n_mel_bins": 8, "mel_vocab_size": 16, "text_hidden_size": 32},
        note="no layers: one table of embeddings",
    ),
}

AUDIO: dict[str, Case] = SPECTROGRAMS | WAVEFORMS | CODECS
