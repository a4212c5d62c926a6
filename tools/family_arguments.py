"""Small values for the configuration fields of mlx-lm's model families, and what single families need besides.

A family's own arguments class picks the fields it knows, so most families need no entry of their own.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "COMMON",
    "FAMILIES",
    "POSITIONS",
    "SEEDS",
    "SPECIAL_WEIGHTS",
    "UNBUILDABLE",
    "VARIANTS",
    "VOCABULARY",
    "WINDOW",
]

VOCABULARY = 160
WINDOW = 32
"""Tokens of a sliding window, and of a chunk of chunked attention: several of them fit in a test's prompt."""

POSITIONS = 320
"""Beyond them a dynamic rope rotates by the length at which a piece ends; a test's second turn is."""

_LAYERS = 4
_HIDDEN = 128
_HEADS = 4
_HEAD_DIM = 32
_EXPERTS = 4

COMMON: dict[str, Any] = {
    # sizes, under the names that families use for them
    "vocab_size": VOCABULARY,
    "num_vocab": VOCABULARY,
    "embedding_size": VOCABULARY,
    "hidden_size": _HIDDEN,
    "hidden_dim": _HIDDEN,
    "d_model": _HIDDEN,
    "n_embd": _HIDDEN,
    "model_dim": _HIDDEN,
    "num_hidden_layers": _LAYERS,
    "num_layers": _LAYERS,
    "n_layers": _LAYERS,
    "n_layer": _LAYERS,
    "num_transformer_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "num_heads": _HEADS,
    "n_heads": _HEADS,
    "n_head": _HEADS,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "n_kv_heads": 2,
    "head_dim": _HEAD_DIM,
    "kv_channels": _HEAD_DIM,
    "hidden_size_per_head": _HEAD_DIM,
    "intermediate_size": 96,
    "ff_intermediate_size": 96,
    "ffn_hidden_size": 96,
    "mlp_hidden_size": 96,
    "n_inner": 96,
    "dense_intermediate_size": 96,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "n_ctx": 4096,
    "n_positions": 4096,
    "model_max_length": 4096,
    "block_size": 4096,
    # attention
    "sliding_window": WINDOW,
    "window_size": WINDOW,
    "sliding_window_size": WINDOW,
    "attention_window_size": WINDOW,
    "attention_chunk_size": WINDOW,
    "loop_window_size": WINDOW,
    "sliding_window_pattern": 2,
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "use_qkv_bias": False,
    "use_qk_norm": True,
    "qk_norm": True,
    "qk_layernorm": True,
    "query_pre_attn_scalar": _HEAD_DIM,
    "attention_multiplier": 0.25,
    "partial_rotary_factor": 0.5,
    "rotary_pct": 0.5,
    "rotary_dim": 8,
    "rotary_emb_base": 10000,
    "rope_theta": 10000.0,
    "rope_local_base_freq": 10000.0,
    # latent attention, and the indexers that pick its rows; --kv-bits wants sizes that 32 divides
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "index_head_dim": 32,
    "index_n_heads": 2,
    "index_topk": 48,
    # experts
    "num_experts": _EXPERTS,
    "num_local_experts": _EXPERTS,
    "n_routed_experts": _EXPERTS,
    "moe_num_experts": _EXPERTS,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "moe_top_k": 2,
    "top_k_experts": 2,
    "num_shared_experts": 1,
    "n_shared_experts": 1,
    "num_shared_expert": 1,
    "moe_num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "shared_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "share_expert_dim": 32,
    "moe_shared_expert_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    # recurrence: state space models and linear attention
    "state_size": 16,
    "ssm_state_size": 16,
    "conv_kernel": 4,
    "n_groups": 1,
    "time_step_rank": 4,
    "time_step_limit": [0.001, 100.0],
    "use_conv_bias": True,
    "conv_bias": True,
    "conv_L_cache": 3,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_d_head": 16,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_proj_bias": False,
    "mamba_conv_bias": True,
    "mamba_d_ssm": 128,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "layer_group_size": 2,
    "group_norm_size": 2,
    "full_attention_interval": 2,
    # a head of its own, so that a random model does not repeat its last token
    "tie_word_embeddings": False,
    "weight_tying": False,
    "share_input_output_layers": False,
    # factors
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "layernorm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "norm_epsilon": 1e-5,
    "logits_scaling": 1.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "scale_depth": 1.4,
    "scale_emb": 1.0,
    "dim_model_base": _HIDDEN,
}
"""Fields that mean the same in every family that has them."""

_MIXED = ["sliding_attention", "full_attention"] * 2
_YARN = {"type": "yarn", "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
_BY_TYPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e4},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
}
_LLAMA_4_SCALING = {**_YARN, "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0}
_DELTA_ATTENTION = {"kda_layers": [1, 3], "num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4}
_FEW_POSITIONS = {"max_position_embeddings": POSITIONS}
_NO_POSITION = {"attention": {"no_op": True}, "ffn": {"ffn_mult": 0.5}}
_GROUPED = {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 0.5}}
_GEMMA_4 = {
    "layer_types": _MIXED,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCABULARY,
    "global_head_dim": 32,
    "final_logit_softcapping": 30.0,
}
_LFM_2 = {
    "layer_types": ["conv", "full_attention"] * 2,
    "block_dim": _HIDDEN,
    "block_multiple_of": 8,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
}
_QWEN_3_5 = {"rope_parameters": {"type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}

FAMILIES: dict[str, dict[str, Any]] = {
    "afm7": {"num_kv_reuse_layers": 2},
    "afmoe": {"layer_types": _MIXED},
    "apertus": {"post_norm": True},
    "baichuan_m1": {"sliding_window_layers": [1, 3], "conv_window": 2},
    "cohere2": {"logit_scale": 1.0},
    "cohere": {"logit_scale": 1.0},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": _EXPERTS, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
    },
    "deepseek_v2": {"rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    "deepseek_v41": {
        "head_dim": 32,
        "qk_rope_head_dim": 8,
        "o_groups": 2,
        "o_lora_rank": 16,
        "compress_ratios": (0, 4, 4, 4),
        "kv_source_layer_ids": (1,),
        "index_source_layer_ids": (1, 3),
        "candidate_source_layer_id": 1,
        "candidate_topk_blocks": 4,
        "candidate_block_size": 4,
        "index_topk": 12,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 4,
    },
    "exaone4": {"rope_scaling": None, "sliding_window_pattern": "LG"},
    "exaone_moe": {"layer_types": _MIXED, "is_moe_layer": [False, True, True, True]},
    "gear": {"layer_types": ["conv_mixer", "sliding_attention", "full_attention", "conv_mixer"]},
    "gemma3": {"text_config": {}},
    "gemma3n": {
        "text_config": {
            "layer_types": _MIXED,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 16,
            "final_logit_softcapping": 30.0,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
            "altup_num_inputs": 2,
            "altup_coef_clip": 120.0,
            "altup_correct_scale": True,
            "altup_active_idx": 0,
            "laurel_rank": 16,
        }
    },
    "gemma4": {"text_config": {**_GEMMA_4, "enable_moe_block": True}},
    "gemma4_text": _GEMMA_4,
    "glm4_moe": {"rope_scaling": None},
    "glm_moe_dsa": {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "gpt_oss": {"layer_types": _MIXED},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "hunyuan": {
        "use_mixed_mlp_moe": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
    },
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2},
    "kimi_k25": {"text_config": {}},
    "kimi_k3": {"text_config": {"linear_attn_config": _DELTA_ATTENTION, "attn_res_block_size": 2}},
    "kimi_linear": {"linear_attn_config": _DELTA_ATTENTION},
    "kimi_vl": {"text_config": {}},
    "laguna": {"layer_types": _MIXED},
    "lfm2": _LFM_2,
    "lfm2-vl": {"text_config": _LFM_2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "use_expert_bias": True},
    "llama4": {
        "text_config": {
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 96,
            "rope_scaling": None,
            "num_experts_per_tok": 1,
        },
    },
    "llama4_text": {"intermediate_size_mlp": 96, "no_rope_layers": [1, 1, 1, 0]},
    "longcat_flash": {
        "num_layers": 2,
        "attention_method": "MLA",
        "zero_expert_type": "identity",
        "zero_expert_num": 2,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
    },
    "longcat_flash_ngram": {
        "num_layers": 2,
        "zero_expert_num": 2,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "ngram_vocab_size_ratio": 2,
        "emb_neighbor_num": 3,
        "emb_split_num": 2,
    },
    "mellum": {"layer_types": _MIXED, "rope_parameters": _BY_TYPE},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "swa_rope_theta": 5e3,
        "swa_num_attention_heads": _HEADS,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": _HEAD_DIM,
        "swa_v_head_dim": 8,
        "v_head_dim": 8,
        "attention_value_scale": 0.7,
    },
    "minicpm3": {
        "rope_scaling": {
            "original_max_position_embeddings": 4096,
            "short_factor": [1.0] * (_HEAD_DIM // 2),
            "long_factor": [1.0] * (_HEAD_DIM // 2),
        }
    },
    "minimax_m3_vl": {
        "text_config": {
            "moe_layer_freq": [0, 1, 1, 1],
            "sparse_attention_freq": [0, 1, 0, 1],
            "index_block_size": 16,
            "index_topk_blocks": 4,
            "index_head_dim": 16,
        }
    },
    "ministral3": {"rope_parameters": _LLAMA_4_SCALING},
    "mistral3": {"text_config": {"model_type": "ministral3", "rope_parameters": _LLAMA_4_SCALING}},
    "mistral4": {"rope_parameters": _LLAMA_4_SCALING},
    "muse_glimmer": {"layer_types": _MIXED},
    "muse_spark": {
        "text_config": {
            "post_norm_eps": 1e-8,
            "rope_parameters": {"rope_theta": 1e4},
            "layer_rope_theta": [1e4, 0, 1e4, 0],
            "layer_types": _MIXED,
            "final_logit_softcapping": 20.0,
            "output_multiplier": 0.5,
            "moe_hidden_size": 64,
            "num_shared_experts": 0,
        }
    },
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {"block_configs": [_GROUPED, _NO_POSITION, _GROUPED, _GROUPED]},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "mlp", "moe", "mamba"]},
    "olmo3": {"layer_types": _MIXED},
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"] * 2, "linear_allow_neg_eigval": True},
    "openelm": {
        "num_query_heads": [4, 4, 4, 4],
        "num_kv_heads": [2, 2, 4, 4],
        "ffn_multipliers": [1.0, 1.5, 1.5, 2.0],
        "ffn_dim_divisor": 8,
    },
    "phi3small": {
        "vocab_size": 100_352,  # it writes to the logits of tokens just below
        "dense_attention_every_n_layers": 2,
        "gegelu_limit": 20.0,
        "blocksparse_block_size": 32,
    },
    "phimoe": {
        "rope_scaling": {
            "short_factor": [1.0] * (_HEAD_DIM // 2),
            "long_factor": [1.0] * (_HEAD_DIM // 2),
            "short_mscale": 1.2,
            "long_mscale": 1.2,
            "original_max_position_embeddings": 4096,
        }
    },
    "phixtral": {},
    "pixtral": {"text_config": {"model_type": "llama"}},
    "plamo": {"n_shared_head": 2},
    "plamo2": {"full_attention_idx": [1, 3]},
    "prism_hadamard_qwen35": {
        "schema_version": 1,
        "tensor_namespace": "mlx-lm-text",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [
            {"path": "model.layers.0.mlp.gate_proj", "embedding": False, "dtype": "float16", "block": 0},
            {"path": "model.layers.1.mlp.down_proj", "embedding": False, "dtype": "float16", "block": 512},
        ],
        "text_config": {**_QWEN_3_5, "hidden_size": 128, "intermediate_size": 512, "num_experts": 0},
    },
    "qwen2_vl": {"text_config": {"model_type": "qwen2"}},
    "qwen3_5": {"text_config": {**_QWEN_3_5, "num_experts": 0}},
    "qwen3_5_moe": {"text_config": _QWEN_3_5},
    "qwen3_vl": {"text_config": {"model_type": "qwen3"}},
    "qwen3_vl_moe": {"text_config": {"model_type": "qwen3_moe"}},
    "recurrent_gemma": {
        "block_types": ["recurrent", "attention"],
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
    },
    "rwkv7": {"a_low_rank_dim": 16, "v_low_rank_dim": 16, "gate_low_rank_dim": 16, "decay_low_rank_dim": 16},
    "spark2_5": {"layer_types": _MIXED, "rope_parameters": _BY_TYPE},
    "step3p5": {"layer_types": _MIXED, "num_attention_groups": 2, "moe_layers_enum": "1,2,3"},
}
"""What a family needs besides; "text_config" holds the fields of the language model where they lie in one."""

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "internlm2, dynamic": ("internlm2", {**_FEW_POSITIONS, "rope_scaling": {"type": "dynamic", "factor": 4.0}}),
    "internlm3, dynamic": ("internlm3", {**_FEW_POSITIONS, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
    "llama, sliding": ("llama", {"layer_types": _MIXED}),
    "ministral3, sliding": ("ministral3", {"layer_types": _MIXED, "rope_parameters": _LLAMA_4_SCALING}),
    "mamba, norms": ("mamba", {"use_bcdt_rms": True}),
    "qwen3_5, moe": ("qwen3_5", {"text_config": _QWEN_3_5}),
    "nanbeige, looped": ("nanbeige", {"num_loops": 2}),
}
"""Further rows: a family's other layer kinds, or a second layout of its caches."""

SPECIAL_WEIGHTS: dict[str, dict[str, tuple[float, float]]] = {
    "bailing_moe_v3": {"A_log": (0.0, 0.1), "dt_bias": (-8.0, 0.1)},
    "gemma3n": {"correct_output_scale": (1.0, 0.1), "embed_tokens.weight": (0.0, 0.02)},
    "jamba": {"dt_proj.bias": (-1.0, 0.1)},
    "mamba": {"dt_proj.bias": (-1.0, 0.1)},
    "recurrent_gemma": {"recurrent_param": (-5.0, 0.1)},
    "rwkv7": {"w_lora.lora.2.bias": (-5.0, 0.1)},
    "talkie": {"_g": (1.0, 0.1)},
}
"""Mean and deviation of parameters by the end of their names: mostly what sets how long a recurrent state remembers."""

SEEDS: dict[str, int] = {
    "gemma3n": 10,
    "olmo3": 7,
    "phi": 3,
    **dict.fromkeys(("cohere", "mamba2", "nanochat", "openelm", "phi3small", "starcoder2"), 5),
}
"""Weights other than the usual ones for families whose greedy output would repeat a few tokens."""

UNBUILDABLE: dict[str, str] = {
    "olmo": "mlx-lm's own module adds the name of its mask to the scores: no prompt of more than one token runs",
}
"""Families that are not in the table, with the reason."""
