"""The rows: every family of transformers with decorated experts, then the families with experts of another form."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.models.architectures import GROUPS, INDEXER, LAST_LAYER, LATENT, Architecture

_DENSE_FIRST: dict[str, Any] = {"first_k_dense_replace": 1}
_INKLING: dict[str, Any] = {
    "vocab_size": 136, "unpadded_vocab_size": 128, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2,
    "swa_head_dim": 16, "sliding_window_size": 4, "d_rel": 4, "rel_extent": 16,
}
_INDEXED = ["linear_attention", "indexed_attention"]
_BLOCKS: dict[str, Any] = {
    "index_n_heads": 2, "index_head_dim": 16, "index_block_size": 2, "index_topk_blocks": 2, "rotary_dim": 8,
    "dense_intermediate_size": 96,
}


def _causal(family: str, prefix: str, moe_layers: int = 2, aux: bool = False, **fields: Any) -> Architecture:
    return Architecture(family, f"{prefix}ForCausalLM", f"{prefix}Config", moe_layers, fields, aux)


def _text(family: str, prefix: str, moe_layers: int = 2, aux: bool = False, **fields: Any) -> Architecture:
    """The causal language model inside a wrapper for more than text."""
    return Architecture(family, f"{prefix}ForCausalLM", f"{prefix}TextConfig", moe_layers, fields, aux)


def _wrapper(
    family: str, prefix: str, moe_layers: int = 2, aux: bool = False, inputs: Any = "causal", variant: str = "",
    **fields: Any,
) -> Architecture:
    """A wrapper for more than text, of which the text model is trained."""
    model = f"{prefix}ForConditionalGeneration"
    return Architecture(family, model, f"{prefix}Config", moe_layers, fields, aux, inputs, variant=variant)


def _other(family: str, model: str, config: str, inputs: Any = "causal", **fields: Any) -> Architecture:
    return Architecture(family, model, config, 0, fields, inputs=inputs, decorated=False)


def _sections(*sizes: int) -> dict[str, Any]:
    """Rotary dimensions for time, height and width."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sizes)}}


ROWS: tuple[Architecture, ...] = (
    # softmax over the experts, then the best k
    _causal("mixtral", "Mixtral", aux=True),
    _causal("qwen2_moe", "Qwen2Moe", aux=True),
    _causal("qwen3_moe", "Qwen3Moe", aux=True),
    _causal("olmoe", "Olmoe", aux=True),
    _causal("flex_olmo", "FlexOlmo", aux=True),
    _causal("gpt_oss", "GptOss", aux=True, sliding_window=8),
    _causal("granitemoe", "GraniteMoe", aux=True),
    _causal("granitemoeshared", "GraniteMoeShared", aux=True),
    _causal("granitemoe_swa", "GraniteMoeSWA", aux=True, sliding_window=4),
    _causal("granitemoehybrid", "GraniteMoeHybrid", aux=True, layer_types=["mamba", "attention"], mamba_n_heads=8,
            mamba_d_state=16, mamba_d_head=16, mamba_chunk_size=4),
    _causal("hunyuan_v1_moe", "HunYuanMoEV1"),
    _causal("phimoe", "Phimoe", aux=True, router_jitter_noise=0.0),
    _causal("minimax", "MiniMax", aux=True, block_size=4),
    _causal("minimax_m2", "MiniMaxM2", aux=True),
    _causal("jamba", "Jamba", aux=True, moe_layers=1, num_hidden_layers=4, attn_layer_period=2, attn_layer_offset=1,
            expert_layer_period=4, expert_layer_offset=1),
    _causal("mellum", "Mellum", aux=True, layer_types=["full_attention", "sliding_attention"], sliding_window=4),
    _causal("flint", "Flint", aux=True, sliding_window=4, mlp_only_layers=[],
            layer_types=["full_attention", "sliding_attention"]),
    _causal("kolibri1", "Kolibri1", sliding_window=4),
    _causal("laguna", "Laguna", aux=True, moe_layers=1, sliding_window=4),
    _causal("lara_mini", "LaraMini", aux=True, num_hidden_layers=3, moe_layers=3, sliding_window=4,
            layer_types=["linear_attention", "sliding_attention", "full_attention"]),
    _causal("lfm2_moe", "Lfm2Moe", moe_layers=1, num_dense_layers=1, layer_types=["conv", "full_attention"]),
    _causal("cohere2_moe", "Cohere2Moe", sliding_window=4, sliding_window_pattern=2),
    _causal("afmoe", "Afmoe", moe_layers=1, sliding_window=4),
    _causal("zaya", "Zaya", num_experts_per_tok=1),
    _causal("qwen3_next", "Qwen3Next", aux=True, layer_types=["linear_attention", "full_attention"]),
    _causal("ernie4_5_moe", "Ernie4_5_Moe", aux=True, moe_layers=1),
    # sigmoid scores, a correction bias, groups
    _causal("deepseek_v2", "DeepseekV2", first_k_dense_replace=1, moe_layers=1, **LATENT),
    _causal("deepseek_v3", "DeepseekV3", moe_layers=1, **LATENT, **GROUPS, **_DENSE_FIRST),
    _causal("deepseek_v32", "DeepseekV32", moe_layers=1, **LATENT, **GROUPS, **INDEXER, **LAST_LAYER),
    _causal("deepseek_v4", "DeepseekV4", q_lora_rank=32, num_key_value_heads=1, num_hidden_layers=3,
            layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
            mlp_layer_types=["hash_moe", "moe", "moe"], moe_layers=3, sliding_window=4, o_groups=2, o_lora_rank=16,
            index_n_heads=2, index_head_dim=16, index_topk=2, hc_mult=4, hc_sinkhorn_iters=2,
            compress_rates={"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}),
    _causal("axk1", "AXK1", moe_layers=1, **LATENT, **GROUPS, **LAST_LAYER),
    _causal("axk2", "AXK2", moe_layers=1, **LATENT, **GROUPS, **INDEXER, **LAST_LAYER),
    _causal("bailing_hybrid", "BailingHybrid", moe_layers=1, **LATENT, **GROUPS, **_DENSE_FIRST, layer_group_size=2),
    _causal("beam", "Beam", moe_layers=1, sliding_window=4, **GROUPS, **LAST_LAYER),
    _causal("dots1", "Dots1", moe_layers=1, **_DENSE_FIRST),
    _causal("exaone_moe", "ExaoneMoe", moe_layers=1, sliding_window=4),
    _causal("glm4_moe", "Glm4Moe", moe_layers=1, **GROUPS),
    _causal("glm4_moe_lite", "Glm4MoeLite", moe_layers=1, **LATENT, **LAST_LAYER),
    _causal("glm_moe_dsa", "GlmMoeDsa", moe_layers=1, **LATENT, **INDEXER, **LAST_LAYER),
    _causal("hy_v3", "HYV3", moe_layers=1, **LAST_LAYER),
    _causal("hy_v4", "HYV4", moe_layers=1, **LATENT, **INDEXER, **LAST_LAYER, hc_mult=4),
    _causal("kimi_linear", "KimiLinear", moe_layers=1, **LATENT, layer_types=["linear_attention", "full_attention"]),
    _causal("mimo_v2_flash", "MiMoV2Flash", moe_layers=1, v_head_dim=16, sliding_window=4),
    _causal("mistral4", "Mistral4", **LATENT),
    _causal("nemotron_h", "NemotronH", moe_layers=1, layers_block_type=["mamba", "moe", "attention"],
            num_hidden_layers=3, mamba_num_heads=8, mamba_head_dim=16, ssm_state_size=16, n_groups=2, chunk_size=4,
            moe_shared_expert_intermediate_size=48),
    _causal("solar_open", "SolarOpen"),
    # the language model of a wrapper
    Architecture("aria", "AriaTextForCausalLM", "AriaTextConfig", 2, {"moe_num_shared_experts": 1}),
    _text("gemma4", "Gemma4", enable_moe_block=True, sliding_window=4, vocab_size_per_layer_input=128,
          hidden_size_per_layer_input=8, global_head_dim=16),
    _text("inkling", "Inkling", moe_layers=1, mlp_layer_types=["dense", "sparse"], **_INKLING),
    _text("inkling2", "Inkling2", n_layers_per_attn_res_block=1, **_INKLING),
    _text("inkling2_loop", "Inkling2Loop", num_hidden_layers=3, moe_layers=4, n_layers_per_attn_res_block=1,
          loop_layer_index_start=1, loop_layer_index_end=2, loop_num_passes=2, loop_gate_rank=8, **_INKLING),
    _text("minimax_m3_vl", "MiniMaxM3VL", aux=True, layer_types=["full_attention", "minimax_m3_sparse"], **_BLOCKS),
    _text("qwen3_5_moe", "Qwen3_5Moe", aux=True, layer_types=["linear_attention", "full_attention"]),
    _text("qwen4_exp", "Qwen4Exp", aux=True, layer_types=["linear_attention"] * 2, hc_lowrank=8,
          use_cache=False),
    # wrappers
    _wrapper("aria", "Aria", variant="wrapper", text_config={"moe_num_shared_experts": 1}),
    _wrapper("deepseek_ocr2", "DeepseekOcr2", moe_layers=1, text_config=LAST_LAYER),
    _wrapper("dots3_note", "Dots3Note", moe_layers=1,
             text_config={**LATENT, **INDEXER, **LAST_LAYER, "head_dim": 24, "sliding_window": 4},
             vision_config={"mlp_layer_types": ["dense", "sparse"], "adapter_in_dim": 64, "adapter_out_dim": 64},
             audio_config={"adapter_input_size": 64, "adapter_out_dim": 64}),
    _wrapper("ernie4_5_vl_moe", "Ernie4_5_VLMoe", moe_layers=1,
             text_config={"moe_intermediate_size": [48, 32], **_sections(3, 3, 2)}),
    _wrapper("glm4v_moe", "Glm4vMoe", moe_layers=1, text_config=_sections(1, 1, 2)),
    _wrapper("glm5_next", "Glm5Next", moe_layers=1,
             text_config={**LATENT, **LAST_LAYER, "qk_rope_head_dim": 0, "hc_mult": 4, "hc_sinkhorn_iters": 2,
                          "index_topk": 4, "index_kpool": 2, "index_n_heads": 2, "index_head_dim": 16,
                          "indexer_types": ["full", "full"], "layer_types": ["linear_attention"] * 2,
                          "use_cache": False}),
    _wrapper("hy_v4_vl", "HYV4VL", moe_layers=1,
             text_config={**LATENT, **INDEXER, **LAST_LAYER, "hc_mult": 4, **_sections(2, 1, 1)}),
    _wrapper("mistral_large4", "MistralLarge4", moe_layers=1, text_config={**LATENT, **INDEXER, **LAST_LAYER}),
    _wrapper("muse_spark", "MuseSpark", text_config={"moe_hidden_size": 32, "sliding_window": 4},
             audio_config={"patch_sizes": (4, 2), "hidden_sizes": (8, 16), "depths": (1, 1)}),
    _wrapper("qwen3_omni_moe", "Qwen3OmniMoeThinker"),
    _wrapper("qwen3_omni_moe", "Qwen3OmniMoeTalker", variant="talker", aux=True, inputs="embeds",
             thinker_hidden_size=64, spatial_merge_size=2, vocab_size=128,
             text_config={"shared_expert_intermediate_size": 64}),
    _wrapper("qwen3_vl_moe", "Qwen3VLMoe", vision_config={"deepstack_visual_indexes": [0]}),
    _wrapper("unlimited_ocr", "UnlimitedOcr", moe_layers=1, text_config=LAST_LAYER),
    # without labels
    Architecture("diffusion_gemma", "DiffusionGemmaForBlockDiffusion", "DiffusionGemmaConfig", 4,
                 {"canvas_length": 8, "text_config": {"sliding_window": 4, "global_head_dim": 16}}, inputs="canvas"),
    Architecture("openai_privacy_filter", "OpenAIPrivacyFilterModel", "OpenAIPrivacyFilterConfig", 2, inputs="ids"),
)


_CHUNKED = {
    "bailing_hybrid", "deepseek_v4", "glm5_next", "granitemoehybrid", "jamba", "kimi_linear", "lara_mini", "nemotron_h",
    "qwen3_5_moe", "qwen3_next", "qwen4_exp",
}
"""Families with unrolled loops over chunks of a sequence."""
_REMARKS = {
    "diffusion_gemma": "encoder and decoder share their experts: four modules, two sets of weights",
    "dots3_note": "the experts of the image tower are not run by text",
    "ernie4_5_vl_moe": "the experts for images are not run by text",
    "gpt_oss": "interleaved gate, limits",
    "glm5_next": "without its layers of sparse attention, see below",
    "inkling2_loop": "one layer runs twice a forward",
    "muse_spark": "a norm after each expert",
    "qwen4_exp": "without its layers of sparse attention, see below",
    "zaya": "the router's state goes from layer to layer; one class of the router means no expert",
}
ROWS = tuple(
    replace(row, dynamic=row.family not in _CHUNKED, remark=_REMARKS.get(row.family, "")) for row in ROWS
)


def _row(family: str) -> Architecture:
    return next(architecture for architecture in ROWS if architecture.family == family)


def _variant(family: str, variant: str, refused: str, **fields: Any) -> Architecture:
    row = _row(family)
    return replace(row, variant=variant, refused=refused, fields={**row.fields, **fields}, dynamic=True)


UNDECORATED: tuple[Architecture, ...] = (
    _other("llama4", "Llama4ForCausalLM", "Llama4TextConfig", intermediate_size_mlp=96, attention_chunk_size=4),
    _other("dbrx", "DbrxForCausalLM", "DbrxConfig", n_layers=2, n_heads=4, d_model=64, max_seq_len=256,
           attn_config={"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
           ffn_config={"ffn_hidden_size": 96, "moe_top_k": 2}),
    _other("doge", "DogeForCausalLM", "DogeConfig", is_moe=True, num_experts=16),
    _other("jetmoe", "JetMoeForCausalLM", "JetMoeConfig", kv_channels=16),
    _other("longcat_flash", "LongcatFlashForCausalLM", "LongcatFlashConfig", num_layers=1, ffn_hidden_size=96,
           expert_ffn_hidden_size=48, zero_expert_num=4, **LATENT, head_dim=8),
    _other("nllb_moe", "NllbMoeForConditionalGeneration", "NllbMoeConfig", inputs="seq2seq", encoder_layers=2,
           decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=96, encoder_sparse_step=2,
           decoder_sparse_step=2, dropout=0.0, encoder_layerdrop=0.0, decoder_layerdrop=0.0, moe_token_dropout=0.0),
    _other("step3p7", "Step3p7ForConditionalGeneration", "Step3p7Config",
           text_config={"share_expert_dim": 48, "sliding_window": 4, **LAST_LAYER}),
    _other("switch_transformers", "SwitchTransformersForConditionalGeneration", "SwitchTransformersConfig",
           inputs="seq2seq", d_model=64, d_kv=16, d_ff=96, num_layers=2, num_decoder_layers=2, num_heads=4,
           num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, dropout_rate=0.0, router_jitter_noise=0.0,
           decoder_start_token_id=0),
    _other("vitpose_backbone", "VitPoseBackbone", "VitPoseBackboneConfig", inputs="image", num_experts=2,
           part_features=16, image_size=[32, 32], patch_size=[16, 16], out_features=["stage2"]),
)
"""Families whose experts have a form of their own; how many of their layers are experts is not told."""

REFUSED: tuple[Architecture, ...] = (
    _variant("qwen4_exp", "indexed", "model.layers.1.self_attn.indexer", layer_types=_INDEXED, indexer_n_heads=2,
             indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=4, indexer_compress_ratio=2),
    _variant("glm5_next", "indexed", "model.language_model.layers.1.self_attn.indexer",
             text_config={**_row("glm5_next").fields["text_config"], "layer_types": _INDEXED}),
)
"""Layers whose forward branches on the values of tensors outside the experts; the row of the family is without them."""

_BY_NAME = {architecture.name: architecture for architecture in (*ROWS, *UNDECORATED, *REFUSED)}


def row(name: str) -> Architecture:
    """The row of that name."""
    return _BY_NAME[name]
