"""Small random models of the families that people expand, made by the library that they come from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SMALL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 300, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_FEW = {name: value for name, value in SMALL.items() if name != "num_key_value_heads"}


def _causal(name: str, **more: Any) -> Callable[[], Any]:
    def make() -> Any:
        import transformers

        config = getattr(transformers, f"{name}Config")(**{**SMALL, **more})
        return getattr(transformers, f"{name}ForCausalLM")(config)

    return make


def _of(config: str, model: str, **given: Any) -> Callable[[], Any]:
    def make() -> Any:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**given))

    return make


_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "decoder_sparse_step": 1}
_WHISPER = {
    "d_model": 64, "encoder_layers": 4, "decoder_layers": 4, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "vocab_size": 300, "num_mel_bins": 16,
    "max_source_positions": 16, "max_target_positions": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1,
}  # fmt: skip
FAMILIES: dict[str, Callable[[], Any]] = {
    "Llama": _causal("Llama"),
    "Llama, tied": _causal("Llama", tie_word_embeddings=True),
    "Qwen2": _causal("Qwen2"),
    "Qwen3": _causal("Qwen3", head_dim=16),
    "Qwen3-MoE": _causal("Qwen3Moe", head_dim=16, **_EXPERTS),
    "Mistral": _causal("Mistral"),
    "Mixtral": _causal("Mixtral", num_local_experts=6),
    "Gemma 2": _causal("Gemma2", head_dim=16),
    "Gemma 3": _of("Gemma3TextConfig", "Gemma3ForCausalLM", **{**SMALL, "num_hidden_layers": 7}, head_dim=16),
    "Phi-3": _causal("Phi3"),
    "GPT-2": _of(
        "GPT2Config", "GPT2LMHeadModel", n_embd=64, n_layer=4, n_head=4, vocab_size=300, n_positions=64, bos_token_id=1, eos_token_id=2
    ),
    "GPT-NeoX": _of("GPTNeoXConfig", "GPTNeoXForCausalLM", **_FEW),
    "Falcon": _of("FalconConfig", "FalconForCausalLM", **_FEW),
    "OLMo-2": _causal("Olmo2"),
    "StableLM": _causal("StableLm"),
    "Bloom": _of("BloomConfig", "BloomForCausalLM", hidden_size=64, n_layer=4, n_head=4, vocab_size=300),
    "OPT": _of(
        "OPTConfig", "OPTForCausalLM", hidden_size=64, ffn_dim=96, num_hidden_layers=4, num_attention_heads=4, vocab_size=300,
        max_position_embeddings=64, word_embed_proj_dim=64,
    ),
    "Granite": _causal("Granite"),
    "ModernBERT": _of(
        "ModernBertConfig", "ModernBertForMaskedLM", **{**_FEW, "num_hidden_layers": 6}, cls_token_id=1, sep_token_id=2, local_attention=16
    ),
    "ViT": _of(
        "ViTConfig", "ViTForImageClassification", hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        image_size=32, patch_size=8,
    ),
    "Whisper": _of("WhisperConfig", "WhisperForConditionalGeneration", **_WHISPER),
    "T5": _of(
        "T5Config", "T5ForConditionalGeneration", d_model=64, d_kv=16, d_ff=96, num_layers=4, num_heads=4, vocab_size=300,
        decoder_start_token_id=0,
    ),
}  # fmt: skip
# Of families with several stacks of blocks all, the first of them being the default.
STACKS: dict[str, tuple[str, ...]] = {
    "Whisper": ("model.encoder.layers", "model.decoder.layers"),
    "T5": ("encoder.block", "decoder.block"),
}
