"""What the job changes of FlexAttention: no autotuning on a GPU; FlashAttention 4 where asked for;
on a CPU, which has no backward of it, masked scaled-dot-product attention."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import cast

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_mask, flex_attention
from torchtitan.config.override import derive, override
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.config_utils import get_attention_config
from torchtitan.protocols.module import Module

from integration.ground.errors import UserError


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


@override(target=FlexAttention.Config, description="kernels of FlashAttention 4 on Hopper or newer")
def flash_attention(config: FlexAttention.Config) -> FlexAttention.Config:
    """Replace the Triton kernels of every FlexAttention; name it in ``--override.imports``.

    Causal, 65,536 tokens, 48 and 16 heads of 128, on an H200: 642 TFLOP/s forward and 567 backward,
    where Triton's have 428 and 390 (flash-attn-4 4.0.0b36). Its backward is not deterministic.

    Raises:
        UserError: flash-attn-4 is not installed, or the GPU is older.
    """
    if find_spec("flash_attn") is None or find_spec("flash_attn.cute") is None:
        raise UserError(
            "expected the package flash-attn-4, got none, so there is no FlashAttention 4; "
            'install it with `pip install -e ".[flash-attention]"` or leave the override out'
        )
    try:
        flash = cast(FlexAttention.Config, get_attention_config("flex_flash"))
    except ValueError as error:
        raise UserError(f"{error}; leave the override out") from None
    options = config.kernel_options | flash.kernel_options
    return derive(config, type(config), block_size=flash.block_size, kernel_options=options)
