"""Unmodified Hugging Face MoE models, tiny, built from their configs; the same random weights on every rank."""
from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

_COMMON: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "num_experts_per_tok": 2, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}
_DEEPSEEK_V3: dict[str, Any] = {
    "n_routed_experts": 8, "n_shared_experts": 1, "moe_intermediate_size": 48, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "num_key_value_heads": 4,
}
_QWEN2_MOE = {
    "num_experts": 8, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 64, "decoder_sparse_step": 1,
}
_ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 8}),
    "qwen2_moe": ("Qwen2Moe", _QWEN2_MOE),
    "qwen3_moe": (
        "Qwen3Moe", {"num_experts": 8, "moe_intermediate_size": 48, "head_dim": 16, "decoder_sparse_step": 1}
    ),
    "deepseek_v3": ("DeepseekV3", _DEEPSEEK_V3),
    "olmoe": ("Olmoe", {"num_experts": 8}),
    "gpt_oss": ("GptOss", {"num_local_experts": 8, "head_dim": 16, "sliding_window": 8}),
    "granitemoe": ("GraniteMoe", {"num_local_experts": 8}),
}
ARCHITECTURES = tuple(_ARCHITECTURES)


def tiny_hf(arch: str, *, seed: int = 0, **overrides: Any) -> nn.Module:
    """The causal language model of `arch`, in train mode.

    Args:
        arch: one of `ARCHITECTURES`.
        seed: seed of the weights; the global generator is left as it was.
        overrides: fields of the config.
    """
    family, fields = _ARCHITECTURES[arch]
    config = getattr(transformers, f"{family}Config")(**{**_COMMON, **fields, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    _randomise(model, seed + 1)
    return model.train()


def _randomise(model: nn.Module, seed: int) -> None:
    """Random matrices everywhere: Hugging Face's own initialisation leaves some routers and biases at zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.08)


def hf_ids(rank: int, batch: int = 2, length: int = 8, vocabulary: int = 128) -> Tensor:
    """The batch of one rank: ids without padding, different on every rank, the same in every run."""
    generator = torch.Generator().manual_seed(2000 + rank)
    return torch.randint(3, vocabulary, (batch, length), generator=generator)
