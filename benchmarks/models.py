"""The model that the benchmarks run: Mixtral with 4 layers of width 512 and 8 experts, 36.7 M parameters."""
from __future__ import annotations

import torch
from torch import Tensor, nn

BATCH, LENGTH, VOCABULARY = 2, 128, 8192


def mixtral(experts_implementation: str | None = None, layers: int = 4) -> nn.Module:
    """The model in train mode; the same random weights in every process.

    Args:
        experts_implementation: name in transformers' registry of experts functions; None: the default one.
        layers: number of layers.
    """
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=512, intermediate_size=512, num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=4,
        num_local_experts=8, num_experts_per_tok=2, vocab_size=VOCABULARY, max_position_embeddings=512,
        experts_implementation=experts_implementation,
    )
    torch.manual_seed(0)
    model: nn.Module = MixtralForCausalLM(config)
    return model.train()


def token_ids(rank: int) -> Tensor:
    """The batch of one rank, the same at every step."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=generator)
