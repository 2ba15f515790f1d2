"""The programs of `predictions.py`: models of other libraries, small, with random weights.

Each model is built by its library's own code: openai-whisper, transformers, torchvision, timm and torch.
`SUITE` maps a name to a function that returns the module and its inputs. The sizes are small because they
do not change which operators a program has.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..speed.third_party import Decoder

# torchvision from PyPI is built for a torch with CUDA. With another torch, its own operators are missing.
# No model here calls them, but torchvision cannot be imported, also by transformers, unless they exist.
DECLARED = torch.library.Library("torchvision", "DEF")
POOLING = ("roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d")
for _name in ("nms", "qnms", "qroi_align", *POOLING, *(f"_{name}_backward" for name in POOLING)):
    DECLARED.define(f"{_name}(Tensor x) -> Tensor")

import transformers  # noqa: E402

Case = tuple[nn.Module, tuple[Any, ...]]

WIDTH, HEADS, VOCABULARY, FRAMES = 32, 2, 120, 50
WHISPER_LAYERS, LAYERS = 2, 1
SIZES = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 2 * WIDTH,
}
TEXT = {**SIZES, "vocab_size": VOCABULARY, "max_position_embeddings": 64}
IMAGE = {**SIZES, "image_size": 32, "patch_size": 8}
SPEECH = {
    **SIZES,
    "conv_dim": (16, 16, 16),
    "conv_kernel": (10, 3, 3),
    "conv_stride": (5, 2, 2),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_length": 2,
}


class Named(nn.Module):
    """Calls a model of transformers with named tensors, and returns one result or several."""

    def __init__(self, model: nn.Module, inputs: str, outputs: str, **fixed: Any) -> None:
        super().__init__()
        self.model, self.fixed = model, fixed
        self.inputs, self.outputs = inputs.split(), outputs.split()

    def forward(self, *tensors: Tensor) -> Any:
        found = self.model(**dict(zip(self.inputs, tensors, strict=True)), **self.fixed)
        return tuple(getattr(found, name) for name in self.outputs)


class CachedDecoder(nn.Module):
    """A decoder of transformers for one token; the cache of its self-attention is given and returned."""

    def __init__(self, model: Any, layers: int) -> None:
        super().__init__()
        self.decoder, self.projection, self.layers = model.model.decoder, model.proj_out, layers

    def forward(self, token: Tensor, features: Tensor, *caches: Tensor) -> Any:
        own = transformers.DynamicCache()
        for layer in range(self.layers):
            own.update(caches[2 * layer], caches[2 * layer + 1], layer)
        cache = transformers.EncoderDecoderCache(own, transformers.DynamicCache())
        found = self.decoder(
            input_ids=token,
            encoder_hidden_states=features,
            past_key_values=cache,
            position_ids=torch.full((1, 1), 8),
            use_cache=True,
        )
        kept = [one for layer in own.layers for one in (layer.keys, layer.values)]
        return (self.projection(found.last_hidden_state), *kept)


class StaticDecoder(nn.Module):
    """A decoder of transformers with a StaticCache, whose keys and values are inputs."""

    def __init__(self, model: Any, config: Any) -> None:
        super().__init__()
        self.decoder, self.projection, self.config = model.model.decoder, model.proj_out, config

    def forward(self, token: Tensor, features: Tensor, position: Tensor, *caches: Tensor) -> Any:
        own = transformers.StaticCache(self.config, max_cache_len=16)
        own.early_initialization(1, HEADS, WIDTH // HEADS, torch.float32, torch.device("cpu"))
        for layer, one in enumerate(own.layers):
            one.keys, one.values = caches[2 * layer], caches[2 * layer + 1]
        cache = transformers.EncoderDecoderCache(own, transformers.DynamicCache())
        found = self.decoder(
            input_ids=token,
            encoder_hidden_states=features,
            past_key_values=cache,
            position_ids=position[None],
            use_cache=True,
        )
        return self.projection(found.last_hidden_state)


class Unbound(nn.Module):
    """Calls a method of a model."""

    def __init__(self, model: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.call = model, call

    def forward(self, *tensors: Tensor) -> Any:
        return self.call(self.model, *tensors)


def tokens(count: int = 12) -> Tensor:
    return torch.randint(1, VOCABULARY, (1, count))


def features() -> Tensor:
    return torch.randn(1, FRAMES, WIDTH)


def openai_whisper() -> Any:
    from whisper.model import ModelDimensions, Whisper

    model = Whisper(ModelDimensions(80, FRAMES, WIDTH, HEADS, 2, VOCABULARY, 64, WIDTH, HEADS, 2))
    nn.init.normal_(model.decoder.positional_embedding, std=0.05)
    return model


def hf_whisper(attention: str = "sdpa", layers: tuple[int, int] = (2, 2)) -> Any:
    sizes: dict[str, Any] = {"d_model": WIDTH, "vocab_size": VOCABULARY}
    sizes |= {"max_source_positions": FRAMES, "max_target_positions": 64}
    for side, count in zip(("encoder", "decoder"), layers, strict=True):
        sizes |= {f"{side}_layers": count, f"{side}_attention_heads": HEADS}
        sizes |= {f"{side}_ffn_dim": 2 * WIDTH}
    ids = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 2)
    config = transformers.WhisperConfig(**sizes, **ids, decoder_start_token_id=3)
    config._attn_implementation = attention
    return transformers.WhisperForConditionalGeneration(config)


def hf_encoder(attention: str = "sdpa", layers: tuple[int, int] = (2, 2)) -> Case:
    model = hf_whisper(attention, layers).model.encoder
    mel = torch.randn(1, 80, 2 * FRAMES)
    return Named(model, "input_features", "last_hidden_state"), (mel,)


def hf_decoder(attention: str = "sdpa", layers: tuple[int, int] = (2, 2)) -> Case:
    return Decoder(hf_whisper(attention, layers)), (tokens(), features())


def hf_cached() -> Case:
    caches = [torch.randn(1, HEADS, 8, WIDTH // HEADS) for _ in range(2 * WHISPER_LAYERS)]
    return CachedDecoder(hf_whisper(), WHISPER_LAYERS), (tokens(1), features(), *caches)


def hf_static() -> Case:
    model = hf_whisper()
    caches = [torch.randn(1, HEADS, 16, WIDTH // HEADS) for _ in range(2 * WHISPER_LAYERS)]
    position = torch.tensor([8])
    return StaticDecoder(model, model.config), (tokens(1), features(), position, *caches)


def hf_complete(layers: tuple[int, int] = (2, 2)) -> Case:
    model = Named(
        hf_whisper(layers=layers), "input_features decoder_input_ids", "logits", use_cache=False
    )
    return model, (torch.randn(1, 80, 2 * FRAMES), tokens())


def openai_encoder() -> Case:
    return openai_whisper().encoder, (torch.randn(1, 80, 2 * FRAMES),)


def openai_decoder() -> Case:
    return openai_whisper().decoder, (tokens(), features())


def of_audio(kind: str, **more: Any) -> Case:
    config = getattr(transformers, f"{kind}Config")(**{**SPEECH, **more})
    model = getattr(transformers, f"{kind}Model")(config)
    return Named(model, "input_values", "last_hidden_state"), (torch.randn(1, 1600),)


def moonshine() -> Any:
    named = {
        f"{side}_num_{what}": count
        for side in ("encoder", "decoder")
        for what, count in (("hidden_layers", LAYERS), ("attention_heads", HEADS))
    }
    named |= {f"{side}_num_key_value_heads": HEADS for side in ("encoder", "decoder")}
    config = transformers.MoonshineConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=2 * WIDTH, **named
    )
    return transformers.MoonshineForConditionalGeneration(config)


def moonshine_encoder() -> Case:
    model = moonshine().model.encoder
    return Named(model, "input_values", "last_hidden_state"), (torch.randn(1, 16000),)


def moonshine_decoder() -> Case:
    model = moonshine().model.decoder
    named = Named(model, "input_ids encoder_hidden_states", "last_hidden_state", use_cache=False)
    return named, (tokens(), features())


def t5(side: str) -> Case:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=WIDTH, d_kv=16, d_ff=64, num_layers=LAYERS, num_heads=HEADS
    )
    model = transformers.T5Model(config)
    if side == "encoder":
        return Named(model.encoder, "input_ids", "last_hidden_state"), (tokens(),)
    named = Named(
        model.decoder, "input_ids encoder_hidden_states", "last_hidden_state", use_cache=False
    )
    return named, (tokens(), features())


def of_text(kind: str, model: str = "Model", **sizes: Any) -> Case:
    config = getattr(transformers, f"{kind}Config")(**(sizes or TEXT))
    cached = {"use_cache": False} if hasattr(config, "use_cache") else {}
    built = getattr(transformers, f"{kind}{model}")(config)
    result = "logits" if model != "Model" else "last_hidden_state"
    return Named(built, "input_ids", result, **cached), (tokens(),)


def of_image(kind: str, size: int = 32, model: str = "Model", **sizes: Any) -> Case:
    config = getattr(transformers, f"{kind}Config")(**sizes)
    built = getattr(transformers, f"{kind}{model}")(config)
    return Named(built, "pixel_values", "last_hidden_state"), (torch.randn(1, 3, size, size),)


def of_torchvision(name: str, size: int = 64, **more: Any) -> Case:
    from torchvision import models

    return getattr(models, name)(num_classes=10, **more), (torch.randn(1, 3, size, size),)


def of_timm(name: str, size: int = 64, **more: Any) -> Case:
    import timm

    model = timm.create_model(name, num_classes=10, pretrained=False, **more)
    return model, (torch.randn(1, 3, size, size),)


def recurrent(kind: str, **more: Any) -> Case:
    return getattr(nn, kind)(WIDTH, WIDTH, batch_first=True, **more), (torch.randn(1, 5, WIDTH),)


def hifigan() -> Case:
    config = transformers.SpeechT5HifiGanConfig(
        model_in_dim=20,
        upsample_initial_channel=32,
        upsample_rates=[4, 4],
        upsample_kernel_sizes=[8, 8],
        resblock_kernel_sizes=[3, 7],
        resblock_dilation_sizes=[[1, 3], [1, 3]],
    )
    return transformers.SpeechT5HifiGan(config), (torch.randn(10, 20),)


def vits() -> Any:
    sizes = {**TEXT, "ffn_dim": 64, "flow_size": WIDTH, "spectrogram_bins": 33}
    sizes |= {"upsample_initial_channel": 32, "upsample_rates": [4, 4], "wavenet_dilation_rate": 1}
    sizes |= {"upsample_kernel_sizes": [8, 8], "resblock_kernel_sizes": [3]}
    sizes |= {"resblock_dilation_sizes": [[1, 3]], "prior_encoder_num_flows": 1}
    return transformers.VitsModel(transformers.VitsConfig(**sizes))


def vits_decoder() -> Case:
    return vits().decoder, (torch.randn(1, WIDTH, 10),)


def vits_flow() -> Case:
    call = Unbound(vits().flow, lambda flow, x, mask: flow(x, mask, None, reverse=True))
    return call, (torch.randn(1, WIDTH, 10), torch.ones(1, 1, 10))


def ast() -> Case:
    config = transformers.ASTConfig(**SIZES, max_length=64, num_mel_bins=32, patch_size=16)
    model = Named(transformers.ASTModel(config), "input_values", "last_hidden_state")
    return model, (torch.randn(1, 64, 32),)


def parakeet() -> Case:
    config = transformers.ParakeetEncoderConfig(
        **SIZES, num_mel_bins=32, subsampling_conv_channels=16, conv_kernel_size=9
    )
    model = Named(transformers.ParakeetEncoder(config), "input_features", "last_hidden_state")
    return model, (torch.randn(1, 64, 32),)


def speech2text() -> Case:
    config = transformers.Speech2TextConfig(
        d_model=WIDTH,
        vocab_size=VOCABULARY,
        input_feat_per_channel=32,
        conv_channels=64,
        **{f"{s}_layers": LAYERS for s in ("encoder", "decoder")},
        **{f"{s}_attention_heads": HEADS for s in ("encoder", "decoder")},
        **{f"{s}_ffn_dim": 64 for s in ("encoder", "decoder")},
    )
    model = transformers.Speech2TextModel(config).encoder
    return Named(model, "input_features", "last_hidden_state"), (torch.randn(1, 64, 32),)


def torch_transformer() -> Case:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, batch_first=True)
    return nn.TransformerEncoder(layer, LAYERS), (features(),)


SUITE: dict[str, Callable[[], Case]] = {
    "openai-whisper encoder": openai_encoder,
    "openai-whisper decoder": openai_decoder,
    "Whisper encoder, fused attention": hf_encoder,
    "Whisper encoder, eager attention": lambda: hf_encoder("eager"),
    "Whisper decoder, fused attention": hf_decoder,
    "Whisper decoder, eager attention": lambda: hf_decoder("eager"),
    "Whisper decoder, DynamicCache": hf_cached,
    "Whisper decoder, StaticCache": hf_static,
    "Whisper, encoder and decoder": hf_complete,
    "Distil-Whisper, encoder and decoder": lambda: hf_complete(layers=(4, 1)),
    "Moonshine encoder": moonshine_encoder,
    "Moonshine decoder": moonshine_decoder,
    "wav2vec 2.0": lambda: of_audio("Wav2Vec2"),
    "wav2vec 2.0, stable layer norm": lambda: of_audio(
        "Wav2Vec2", do_stable_layer_norm=True, feat_extract_norm="layer"
    ),
    "HuBERT": lambda: of_audio("Hubert"),
    "wav2vec 2.0 Conformer": lambda: of_audio("Wav2Vec2Conformer", conv_depthwise_kernel_size=7),
    "T5 encoder": lambda: t5("encoder"),
    "T5 decoder": lambda: t5("decoder"),
    "BERT": lambda: of_text("Bert"),
    "GPT-2": lambda: of_text(
        "GPT2", "LMHeadModel", n_embd=WIDTH, n_layer=1, n_head=2, vocab_size=120, n_positions=64
    ),
    "Llama": lambda: of_text("Llama", "ForCausalLM", num_key_value_heads=1, **TEXT),
    "ViT": lambda: of_image("ViT", **IMAGE),
    "ResNet-18": lambda: of_torchvision("resnet18"),
    "MobileNetV2": lambda: of_torchvision("mobilenet_v2"),
    "MobileNetV3": lambda: of_torchvision("mobilenet_v3_small"),
    "SqueezeNet": lambda: of_torchvision("squeezenet1_1"),
    "BART decoder": lambda: of_text(
        "Bart",
        d_model=WIDTH,
        vocab_size=120,
        max_position_embeddings=64,
        **{f"{s}_layers": LAYERS for s in ("encoder", "decoder")},
        **{f"{s}_attention_heads": HEADS for s in ("encoder", "decoder")},
        **{f"{s}_ffn_dim": 64 for s in ("encoder", "decoder")},
    ),
    "LSTM": lambda: recurrent("LSTM"),
    "GRU": lambda: recurrent("GRU", bidirectional=True),
    "HiFi-GAN": hifigan,
    "VITS decoder": vits_decoder,
    "VITS flow": vits_flow,
    "SegFormer": lambda: of_image(
        "Segformer",
        hidden_sizes=[16, 32],
        depths=[1, 1],
        num_encoder_blocks=2,
        num_attention_heads=[1, 2],
        sr_ratios=[2, 1],
        patch_sizes=[7, 3],
        strides=[4, 2],
        mlp_ratios=[2, 2],
    ),
    "Audio Spectrogram Transformer": ast,
    "ConvNeXt": lambda: of_image(
        "ConvNext", num_stages=2, hidden_sizes=[16, 32], depths=[1, 1], num_channels=3
    ),
    "Swin": lambda: of_image(
        "Swin",
        image_size=32,
        patch_size=4,
        embed_dim=16,
        depths=[2, 1],
        num_heads=[2, 2],
        window_size=4,
    ),
    "DistilBERT": lambda: of_text(
        "DistilBert", dim=WIDTH, n_layers=1, n_heads=2, hidden_dim=64, vocab_size=120
    ),
    "data2vec audio": lambda: of_audio("Data2VecAudio"),
    "WavLM": lambda: of_audio("WavLM"),
    "EfficientNet": lambda: of_timm("efficientnet_b0"),
    "RegNet": lambda: of_torchvision("regnet_y_400mf"),
    "ShuffleNet": lambda: of_torchvision("shufflenet_v2_x0_5"),
    "Parakeet encoder": parakeet,
    "Speech2Text encoder": speech2text,
    "Qwen2": lambda: of_text("Qwen2", "ForCausalLM", num_key_value_heads=1, **TEXT),
    "ALBERT": lambda: of_text("Albert", embedding_size=16, **TEXT),
    "ELECTRA": lambda: of_text("Electra", embedding_size=16, **TEXT),
    "DINOv2": lambda: of_image("Dinov2", **{**IMAGE, "mlp_ratio": 2}),
    "CLIP vision": lambda: of_image("CLIPVision", **IMAGE),
    "DenseNet": lambda: of_torchvision("densenet121"),
    "MNASNet": lambda: of_torchvision("mnasnet0_5"),
    "GhostNet": lambda: of_timm("ghostnet_050"),
    "MLP-Mixer": lambda: of_timm("mixer_s32_224", size=224),
}
# Not seen while rules were corrected: measured afterwards, and reported separately as well.
HELD_OUT: dict[str, Callable[[], Case]] = {
    "SEW": lambda: of_audio("SEW", squeeze_factor=2),
    "UniSpeech-SAT": lambda: of_audio("UniSpeechSat"),
    "ModernBERT": lambda: of_text("ModernBert", pad_token_id=0, **TEXT),
    "Gemma": lambda: of_text("Gemma", "ForCausalLM", num_key_value_heads=1, head_dim=16, **TEXT),
    "BEiT": lambda: of_image("Beit", **IMAGE),
    "PoolFormer": lambda: of_image(
        "PoolFormer", num_encoder_blocks=2, depths=[1, 1], hidden_sizes=[16, 32]
    ),
    "GoogLeNet": lambda: of_torchvision("googlenet", aux_logits=False, init_weights=True),
    "VGG-11, batch norm": lambda: of_torchvision("vgg11_bn"),
    "torch's Transformer encoder": torch_transformer,
    "RNN": lambda: recurrent("RNN"),
}
