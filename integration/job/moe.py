"""The 1T model's architecture from TorchTitan's building blocks; a config only picks the sizes.

A decoder whose every layer is: grouped-query attention with RoPE, then a mixture of experts with
one shared expert, sigmoid routing and auxiliary-loss-free balancing (arXiv 2408.15664); embeddings
untied. Blocks, sharding and parallelisation are TorchTitan's Qwen3-MoE ones, which this
architecture fits once the query and key norms are left out and a shared expert is put in.
"""

from dataclasses import dataclass
from functools import partial

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
from torchtitan.protocols.model_spec import ModelSpec

# Balancing step of the expert bias: the value of DeepSeek-V3 (arXiv 2412.19437, section 4.2).
LOAD_BALANCE_COEFF = 1e-3
INIT_STD = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEShape:
    """Sizes of one model. All are counts; ``theta`` is the RoPE base.

    Raises:
        ValueError: a size is not positive, ``heads`` is no multiple of ``kv_heads``, or
            ``top_k`` exceeds ``experts``.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    expert_hidden: int
    shared_experts: int
    vocab: int
    max_seq_len: int
    theta: float = 1_000_000.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise ValueError(f"MoEShape.{name} must be positive, got {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"MoEShape.heads must be a multiple of kv_heads, got {self.heads}, {self.kv_heads}"
            )
        if self.top_k > self.experts:
            raise ValueError(
                f"MoEShape.top_k must not exceed experts, got {self.top_k} of {self.experts}"
            )


def model_spec(flavor: str, shape: MoEShape) -> ModelSpec:
    """Bundle a model of ``shape`` with TorchTitan's parallelisation, pipelining and balancing."""
    return ModelSpec(
        name="moe",
        flavor=flavor,
        model=_model_config(shape),
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
            ),
        ),
    )


def _init(std: float) -> dict:
    return {"weight": partial(nn.init.trunc_normal_, std=std), "bias": nn.init.zeros_}


def _norm(dim: int) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=dim, eps=1e-6, param_init={"weight": nn.init.ones_})
