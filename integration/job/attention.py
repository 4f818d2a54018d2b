"""What the job changes of FlexAttention: no autotuning on a GPU; on a CPU, which has no backward of
it, masked scaled-dot-product attention."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_mask, flex_attention
from torchtitan.config.override import derive, override
from torchtitan.models.common.attention import FlexAttention
from torchtitan.protocols.module import Module


def compile_without_autotuning() -> None:
    """Let FlexAttention take its default blocks, as TorchTitan does for deterministic runs.

    At 65,536 tokens tuning had not ended after 100 s of the first step; each rank tunes, and again
    after each restart. On an H200 none of six other block sizes, warps and stages was 2 per cent
    faster, forward or backward.
    """
    FlexAttention.inductor_configs |= {"max_autotune": False, "coordinate_descent_tuning": False}
    FlexAttention._compiled_flex_attn = torch.compile(
        flex_attention, options={**FlexAttention.inductor_configs}
    )


class MaskedSDPA(Module):
    """Attention over a dense boolean mask, evaluated from the mask function of a ``BlockMask``.

    Memory is quadratic in the sequence (one byte a query and key), as attention on a CPU is
    anyway. Tensors are (batch, sequence, heads, head size), as for every inner attention.
    """

    # A subclass of FlexAttention's config: the trainer builds a mask only for that type.
    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: BlockMask,
        scale: float | None = None,
        enable_gqa: bool = False,
        **kwargs,
    ) -> torch.Tensor:
        batch, _, q_len, kv_len = attention_masks.shape
        mask_B1LL = create_mask(
            attention_masks.mask_mod, batch, 1, q_len, kv_len, device=q_BLNH.device
        )
        out_BNLH = F.scaled_dot_product_attention(
            q_BLNH.transpose(1, 2),
            k_BLNH.transpose(1, 2),
            v_BLNH.transpose(1, 2),
            attn_mask=mask_B1LL,
            scale=scale,
            enable_gqa=enable_gqa,
        )
        return out_BNLH.transpose(1, 2)


@override(target=FlexAttention.Config, description="masked SDPA, which trains on a CPU")
def masked_sdpa(config: FlexAttention.Config) -> MaskedSDPA.Config:
    """Replace every FlexAttention; name it in ``--override.imports``."""
    return derive(config, MaskedSDPA.Config)
