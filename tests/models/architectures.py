"""One row for each MoE architecture of transformers, and from a row a tiny, unmodified model with random weights.

A row says only what is its own: `SIZES` fills in every field that a config has under a common name. Rows with
``decorated=False`` have experts in a form of their own.
"""
from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn

Fields = Mapping[str, Any]

SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
    # experts
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "moe_num_experts": 8, "num_experts_per_tok": 2,
    "moe_topk": 2, "moe_k": 2, "top_k_experts": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 64,
    "shared_intermediate_size": 64, "n_shared_experts": 1, "num_shared_experts": 1,
    # linear attention, state spaces
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_head_dim": 16, "linear_num_heads": 4,
    # towers for images and sound, and the tokens that stand for them, which are not among the ids of `token_ids`
    "depth": 1, "num_heads": 4, "encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 32, "d_model": 32,
    "patch_size": 4, "image_size": 16, "out_hidden_size": 64, "text_hidden_size": 64, "output_dim": 64,
    "max_image_size": 16, "projector_hidden_size": 32, "projection_hidden_dim": 32, "projection_intermediate_size":
    32, "num_mel_bins": 16, "n_mel_bins": 16, "downsample_hidden_size": 8, "output_channels": 16, "mlp_dim": 32,
    "num_position_embeddings": 16, "position_embedding_size": 16, "output_proj_dims": 64, "image_token_id": 1,
    "image_token_index": 1, "video_token_id": 1, "video_token_index": 1, "audio_token_id": 1,
}
"""Value of each config field of that name."""

LATENT: dict[str, Any] = {
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "num_key_value_heads": 4,
}
"""Latent attention; every head has keys of its own."""
GROUPS: dict[str, Any] = {"n_group": 2, "topk_group": 1}
"""Experts are chosen from the better of two groups."""
INDEXER: dict[str, Any] = {"index_topk": 4, "index_head_dim": 16, "index_n_heads": 2, "head_dim": 8}
"""Sparse attention to the 4 best positions."""
LAST_LAYER: dict[str, Any] = {"mlp_layer_types": ["dense", "sparse"]}
"""The first layer is dense."""


@dataclass(frozen=True)
class Architecture:
    """One row.

    Args:
        family: folder of the family in ``transformers.models``.
        model: class of the model.
        config: class of its config.
        moe_layers: how often experts run in one forward; those of a layer that runs twice count twice.
        fields: fields of the config; those of a part of it (``text_config``) under the part's name.
        aux: the model takes ``output_router_logits`` and returns an auxiliary loss.
        inputs: which inputs the model takes: ids (``causal``: with labels), or as told in `inputs_of`.
        decorated: its experts carry ``use_experts_implementation``.
        variant: tells rows of one family apart.
        refused: what the error names, for a forward that no graph can carry.
        dynamic: sizes stay free in the matrix; False where unrolled loops over chunks make that slow (14 s for 1 s).
        remark: for the table in the docs.
    """

    family: str
    model: str
    config: str
    moe_layers: int
    fields: Fields = field(default_factory=dict)
    aux: bool = False
    inputs: Literal["causal", "ids", "embeds", "canvas", "seq2seq", "image"] = "causal"
    decorated: bool = True
    variant: str = ""
    refused: str = ""
    dynamic: bool = True
    remark: str = ""

    @property
    def name(self) -> str:
        """Name of the row."""
        return f"{self.family}_{self.variant}" if self.variant else self.family


def build(row: Architecture, *, seed: int = 0, **overrides: Any) -> nn.Module:
    """The model of `row` in train mode, the same random weights in every process.

    Args:
        row: what to build.
        seed: seed of the weights; the global generator is left as it was.
        overrides: fields of the config.
    """
    module = importlib.import_module(f"transformers.models.{row.family}.modeling_{row.family}")
    configs = importlib.import_module(f"transformers.models.{row.family}.configuration_{row.family}")
    config = tiny_config(getattr(configs, row.config), {**row.fields, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = getattr(module, row.model)(config)
    randomise(model, seed + 1)
    return model.train()


def tiny_config(cls: Any, fields: Fields, defaults: Fields = MappingProxyType({})) -> Any:
    """A config of class `cls`: `fields`, and `SIZES` for what they leave out, in its parts too.

    Args:
        defaults: what is not in `SIZES` either.
    """
    known = {f.name for f in dataclasses.fields(cls)}
    values = {name: value for name, value in SIZES.items() if name in known}
    for part, default in cls.sub_configs_defaults.items():
        values[part] = fields.get(part, {})
        if values[part] is not None:
            part_class = default.get_config_class(default.model_type)
            values[part] = tiny_config(part_class, values[part], default.init_kwargs)
    return cls(**{**defaults, **values, **{n: v for n, v in fields.items() if n not in cls.sub_configs_defaults}})


def randomise(model: nn.Module, seed: int) -> None:
    """Random values where the initialisation leaves zeros or ones: every gradient and every bias must show.

    Matrices become random; vectors and buffers of zeros (biases that correct the choice of experts) get noise; tables
    of zeros (the experts of each token id) get different experts in each row.
    """
    generator = torch.Generator().manual_seed(seed)

    def noise(tensor: Tensor, scale: float) -> Tensor:
        return (torch.randn(tensor.shape, generator=generator) * scale).to(tensor.dtype)

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.copy_(noise(parameter, 0.08))
            else:
                parameter.add_(noise(parameter, 0.15))
        for buffer in model.buffers():
            if buffer.any() or not buffer.numel():
                continue
            if buffer.is_floating_point():
                buffer.copy_(noise(buffer, 0.05))
            elif buffer.dtype is torch.int64 and buffer.dim() == 2:
                order = torch.rand(buffer.shape[0], SIZES["num_experts"], generator=generator).argsort(dim=1)
                buffer.copy_(order[:, : buffer.shape[1]])


def inputs_of(row: Architecture, rank: int, batch: int = 2, length: int = 8) -> dict[str, Any]:
    """Keyword arguments of the model of `row` for the batch of one rank."""
    ids = token_ids(rank, batch, length)
    kwargs: dict[str, Any] = {"input_ids": ids}
    if row.inputs == "causal":
        kwargs["labels"] = ids.clone()
    if row.inputs == "embeds":
        table = torch.randn(int(ids.max()) + 1, SIZES["hidden_size"], generator=torch.Generator().manual_seed(11))
        kwargs = {"inputs_embeds": table[ids], "labels": ids}
    if row.inputs == "canvas":
        kwargs["decoder_input_ids"] = token_ids(rank + 100, batch, length)
    if row.inputs == "seq2seq":
        kwargs["labels"] = token_ids(rank + 100, batch, length)
    if row.inputs == "image":
        generator = torch.Generator().manual_seed(2000 + rank)
        kwargs = {"pixel_values": torch.randn(batch, 3, 32, 32, generator=generator)}
        kwargs["dataset_index"] = torch.arange(batch) % 2
    if row.aux:
        kwargs["output_router_logits"] = True
    return kwargs


def token_ids(rank: int, batch: int = 2, length: int = 8, vocabulary: int = 128) -> Tensor:
    """The batch of one rank: ids without padding, different on every rank, the same in every run."""
    generator = torch.Generator().manual_seed(2000 + rank)
    return torch.randint(3, vocabulary, (batch, length), generator=generator)
