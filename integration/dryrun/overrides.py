"""Parts of the model that need real values or a GPU, swapped by TorchTitan's ``override``.

Fake tensors hold no routing and FlexAttention no CPU kernel; shapes, dtypes, what autograd saves
and what goes over the network stay as on a GPU.
"""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from unittest.mock import patch

import spmd_types as spmd
import torch
from torchtitan.config.override import derive, override
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher
from torchtitan.protocols.module import Module

from integration.ranks import contributed

IMPORTS = [
    "integration.dryrun.overrides.balanced_dispatch",
    "integration.dryrun.overrides.shape_only_attention",
    "integration.dryrun.overrides.shape_only_norm",
]


class BalancedTokenDispatcher(AllToAllTokenDispatcher):
    """Sends each rank of ``ep`` the same number of tokens, whatever the router says.

    Tokens go by the list form of all-to-all, as on a GPU. ``cpu_device`` takes the single-tensor
    form on a CPU, which selective checkpointing saves: it would move less.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):
        pass

    def dispatch(self, x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E):
        self._copies = x_TD.shape[0] * self.top_k
        return super().dispatch(
            x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E
        )

    def _sync_token_count_exchange(
        self, num_local_tokens_per_expert_E, num_global_tokens_per_local_expert_EP_e, ep_size
    ):
        share, rest = divmod(self._copies, ep_size)
        if rest:
            raise ValueError(f"{self._copies} routed tokens are not balanced over ep {ep_size}")
        splits = [share] * ep_size
        return num_global_tokens_per_local_expert_EP_e.reshape(-1), splits, splits

    def _dispatch_token_exchange(self, routed_input_ND, pg, output_splits, input_splits):
        return _exchange(routed_input_ND, pg, output_splits, input_splits)

    def _combine_token_exchange(self, routed_output_RD, pg, input_splits, output_splits):
        return _exchange(routed_output_RD, pg, input_splits, output_splits)


def _exchange(x: torch.Tensor, pg, received: list[int], sent: list[int]) -> torch.Tensor:
    return spmd.all_to_all(
        x, pg, src=spmd.V, dst=spmd.V, output_split_sizes=received, input_split_sizes=sent
    )


@override(target=AllToAllTokenDispatcher.Config, description="balanced splits, for fake tensors")
def balanced_dispatch(config: AllToAllTokenDispatcher.Config) -> BalancedTokenDispatcher.Config:
    return derive(config, BalancedTokenDispatcher.Config)


class ShapeOnlyAttention(Module):
    """An attention kernel's shapes: saves q, k, v, output and log-sum-exp, as FlexAttention does.

    cuDNN's, as it is on selective checkpointing's list as well. It is never run: its fake kernel
    takes any device, and fewer key than query heads. Tensors are (batch, sequence, heads, size).
    """

    # Not one of FlexAttention's: for those the trainer builds a mask, dense under fake tensors.
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: None = None,
        **kwargs,
    ) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
        attend = torch.ops.aten._scaled_dot_product_cudnn_attention
        return attend(q, k, v, None, True, 0.0, True)[0].transpose(1, 2)


@override(target=FlexAttention.Config, description="attention's shapes alone, for fake tensors")
def shape_only_attention(config: FlexAttention.Config) -> ShapeOnlyAttention.Config:
    return ShapeOnlyAttention.Config(
        param_init=config.param_init, sharding_config=config.sharding_config
    )


class _NormShapes(torch.autograd.Function):
    """Saves the input and one fp32 factor a row, as the GPU's fused kernel does."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        factor = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, factor)
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class ShapeOnlyRMSNorm(RMSNorm):
    """The fused norm's shapes. A CPU takes the norm apart, and saves two fp32 tensors of them."""

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _NormShapes.apply(x, self.weight)


@override(target=RMSNorm.Config, description="the fused norm's shapes alone, for fake tensors")
def shape_only_norm(config: RMSNorm.Config) -> ShapeOnlyRMSNorm.Config:
    return derive(config, ShapeOnlyRMSNorm.Config)


@contextmanager
def first_chunks() -> Generator[None]:
    """Score the first chunks of routed tokens alone, of the 192 of each layer of ``jupiter_1t``.

    Chunks are of one size but for a row, and each leaves what the one before it left. While the
    second computes, the first one's tensors are still there: from then on memory is at its most.
    """
    scores = "torchtitan.models.common.moe_scores"  # of ``moe_combine_memory``
    chunks = contributed.find(scores, "_chunks_of_rows")
    if chunks is None:
        yield
        return

    def first(x: torch.Tensor) -> Iterator[slice]:
        return islice(chunks(x), 3)

    with patch(f"{scores}._chunks_of_rows", first):
        yield
