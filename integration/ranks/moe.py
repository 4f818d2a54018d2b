"""The 1T model's architecture from TorchTitan's building blocks; a config only picks the sizes.

A decoder whose every layer is: grouped-query attention with RoPE, then a mixture of experts with
sigmoid routing, auxiliary-loss-free balancing (arXiv 2408.15664) and, in most, a shared expert;
embeddings untied. Blocks, sharding and parallelisation are TorchTitan's Qwen3-MoE ones, which this
architecture fits once the query and key norms are left out and a shared expert is put in.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch.nn as nn
from torchtitan.components.optimizer import register_moe_load_balancing_hook
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common import CosSinRoPE, Embedding, Linear
from torchtitan.models.common.config_utils import (
    get_attention_config,
    make_ffn_config,
    make_gqa_config,
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
)
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.models.qwen3.parallelize import parallelize_qwen3
from torchtitan.protocols.model import ModelConfigConverter
from torchtitan.protocols.model_spec import ModelSpec

from integration.jobs.shapes import MoEShape

# Balancing step of the expert bias: the value of DeepSeek-V3 (arXiv 2412.19437, section 4.2).
LOAD_BALANCE_COEFF = 1e-3
INIT_STD = 0.02


def model_spec(
    flavor: str, shape: MoEShape, converters: Sequence[ModelConfigConverter.Config] = ()
) -> ModelSpec:
    """Bundle a model of ``shape`` with TorchTitan's parallelisation, pipelining and balancing.

    ``converters`` are TorchTitan's, which put quantised layers in the place of plain ones.
    """
    model: Any = _model_config(shape)
    for converter in converters:
        model = converter.build().convert(model)
    return ModelSpec(
        name="moe",
        flavor=flavor,
        model=model,
        parallelize_fn=parallelize_qwen3,
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=register_moe_load_balancing_hook,
        state_dict_adapter=None,
    )


def _model_config(shape: MoEShape) -> Qwen3Model.Config:
    return Qwen3Model.Config(
        dim=shape.hidden,
        vocab_size=shape.vocab,
        tok_embeddings=Embedding.Config(
            num_embeddings=shape.vocab, embedding_dim=shape.hidden, param_init=_init(INIT_STD)
        ),
        norm=_norm(shape.hidden),
        lm_head=Linear.Config(
            in_features=shape.hidden, out_features=shape.vocab, param_init=_init(INIT_STD)
        ),
        layers=[_layer(shape) for _ in range(shape.layers)],
    )


def _layer(shape: MoEShape) -> Qwen3TransformerBlock.Config:
    # Projections into the residual stream are scaled by the number of residual additions, as in
    # GPT-2 (section 2.3): the variance of the stream does not grow with depth.
    into_residual = INIT_STD / (2 * shape.layers) ** 0.5
    weights = _init(INIT_STD)
    return Qwen3TransformerBlock.Config(
        attention_norm=_norm(shape.hidden),
        ffn_norm=_norm(shape.hidden),
        attention=make_gqa_config(
            dim=shape.hidden,
            n_heads=shape.heads,
            n_kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            wqkv_param_init=weights,
            wo_param_init=_init(into_residual),
            inner_attention=get_attention_config("flex"),
            rope=CosSinRoPE.Config(
                dim=shape.head_dim, max_seq_len=shape.max_seq_len, theta=shape.theta
            ),
            fuse_qkv=True,
        ),
        moe=make_moe_config(
            num_experts=shape.experts,
            load_balance_coeff=LOAD_BALANCE_COEFF,
            router=make_router_config(
                dim=shape.hidden,
                num_experts=shape.experts,
                top_k=shape.top_k,
                gate_param_init=weights,
                score_func="sigmoid",
                route_norm=True,
            ),
            routed_experts=make_routed_experts_config(
                dim=shape.hidden,
                hidden_dim=shape.expert_hidden,
                num_experts=shape.experts,
                top_k=shape.top_k,
                param_init={
                    "w1_EFD": weights["weight"],
                    "w2_EDF": _init(into_residual)["weight"],
                    "w3_EFD": weights["weight"],
                },
                comm_backend="standard",
            ),
            shared_experts=make_ffn_config(
                dim=shape.hidden,
                hidden_dim=shape.expert_hidden * shape.shared_experts,
                w1_param_init=weights,
                w2w3_param_init=weights,
            )
            if shape.shared_experts
            else None,
        ),
    )


def _init(std: float) -> dict:
    return {"weight": partial(nn.init.trunc_normal_, std=std), "bias": nn.init.zeros_}


def _norm(dim: int) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=dim, eps=1e-6, param_init={"weight": nn.init.ones_})
