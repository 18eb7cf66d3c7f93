"""Twenty architectures of Hugging Face's transformers, two layers of width 16 each.

None of them was looked at when amp_patch was made faster: they tell what `host_models` cannot, how
a model fares that nobody has chosen. Knows no mixed precision.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from benchmarks.host_models import HostModel
from torch import Tensor, nn

#: What most configurations call the sizes of a model, and what those of T5's kind do.
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
TWO_STACKS = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
}
WORDS: dict[str, Any] = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def made(config_type: str, model_type: str, batch: dict[str, Any], **options: Any) -> HostModel:
    """Return a model whose forward computes its loss.

    Args:
        config_type, model_type: names in transformers.
        batch: what the forward is called with; floating tensors in the model's dtype where it is
            in half.
        options: of the configuration.
    """
    import transformers

    config = getattr(transformers, config_type)(**options)
    model = getattr(transformers, model_type)(config).train()

    def loss(model: nn.Module) -> Tensor:
        return model(**batch).loss

    def bare_loss(half: nn.Module) -> Tensor:
        dtype = next(half.parameters()).dtype
        return half(**{key: _cast(value, dtype) for key, value in batch.items()}).loss.float()

    return HostModel(model, loss, bare_loss)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    is_floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype) if is_floating else value


def words(name: str, model: str = "ForCausalLM", **options: Any) -> HostModel:
    """Return a model of words, called with a batch of 2 x 8 of them, which are its labels, too."""
    tokens = torch.arange(3, 19).view(2, 8)
    batch = {"input_ids": tokens, "labels": tokens}
    return made(f"{name}Config", f"{name}{model}", batch, **{**WORDS, **options})


def images(name: str, size: int, **options: Any) -> HostModel:
    """Return a classifier, called with two images of ``size`` x ``size`` pixels."""
    batch = {"pixel_values": torch.randn(2, 3, size, size), "labels": torch.tensor([0, 1])}
    model = f"{name}ForImageClassification"
    return made(f"{name}Config", model, batch, num_labels=4, **options)


def clip() -> HostModel:
    tokens = torch.arange(3, 19).view(2, 8)
    pixels = torch.randn(2, 3, 8, 8)
    batch = {"input_ids": tokens, "pixel_values": pixels, "return_loss": True}
    text = {"max_position_embeddings": 16, **WORDS, **SIZES}
    vision = {"image_size": 8, "patch_size": 4, **SIZES}
    return made(
        "CLIPConfig", "CLIPModel", batch, text_config=text, vision_config=vision, projection_dim=8
    )


def whisper() -> HostModel:
    batch = {"input_features": torch.randn(2, 8, 20), "labels": torch.arange(3, 19).view(2, 8)}
    lengths = {"num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 16}
    return made(
        "WhisperConfig", "WhisperForConditionalGeneration", batch,
        decoder_start_token_id=1, **lengths, **WORDS, **TWO_STACKS,
    )  # fmt: skip


_HEADS = {"head_dim": 8, "num_key_value_heads": 1}
_LABELLED = {"max_position_embeddings": 16, **SIZES}
_OF_T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}

MODELS = {
    "GPT-2": partial(words, "GPT2", "LMHeadModel", n_embd=16, n_layer=2, n_head=2, n_positions=16),
    "GPT-NeoX": partial(words, "GPTNeoX", **SIZES),
    "Bloom": partial(words, "Bloom", hidden_size=16, n_layer=2, n_head=2),
    "Llama": partial(words, "Llama", **SIZES),
    "Qwen 3": partial(words, "Qwen3", **SIZES, **_HEADS),
    "Gemma 2": partial(words, "Gemma2", **SIZES, **_HEADS),
    "Mixtral, 4 experts": partial(
        words, "Mixtral", num_key_value_heads=1, num_local_experts=4, **SIZES
    ),
    "Mamba": partial(words, "Mamba", state_size=4, hidden_size=16, num_hidden_layers=2),
    "DistilBERT": partial(
        words, "DistilBert", "ForMaskedLM",
        dim=16, n_layers=2, n_heads=2, hidden_dim=32, max_position_embeddings=16,
    ),
    "RoBERTa": partial(words, "Roberta", "ForMaskedLM", **_LABELLED),
    "ELECTRA": partial(words, "Electra", "ForMaskedLM", embedding_size=16, **_LABELLED),
    "T5": partial(
        words, "T5", "ForConditionalGeneration", decoder_start_token_id=0, **_OF_T5
    ),
    "BART": partial(
        words, "Bart", "ForConditionalGeneration", max_position_embeddings=16, **TWO_STACKS
    ),
    "Whisper": whisper,
    "CLIP": clip,
    "ViT": partial(images, "ViT", 8, image_size=8, patch_size=4, **SIZES),
    "Swin": partial(
        images, "Swin", 16,
        image_size=16, patch_size=2, embed_dim=8, depths=[1, 1], num_heads=[1, 2], window_size=2,
    ),
    "ConvNeXt": partial(images, "ConvNext", 16, hidden_sizes=[8, 16], depths=[1, 1], num_stages=2),
    "ResNet": partial(
        images, "ResNet", 32, embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2]
    ),
    "MobileNet V2": partial(images, "MobileNetV2", 32, image_size=32, depth_multiplier=0.35),
}  # fmt: skip
