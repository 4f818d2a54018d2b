"""Where the parameters are: one row a kind, layers collapsed."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.models.common.rope import RoPE

_WRAPPER = re.compile(r"_checkpoint_wrapped_module\.|_orig_mod\.")
_LAYER = re.compile(r"^layers\.\d+\.")


def named(parts: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters under the names that the unwrapped model gives them."""
    for part in parts:
        for name, parameter in part.named_parameters():
            yield _WRAPPER.sub("", name), parameter


def rows(parts: Sequence[nn.Module]) -> list[dict[str, Any]]:
    """Return name, count, mesh, placements, global and local shape of each kind of parameter."""
    found: Counter[tuple] = Counter()
    for name, parameter in named(parts):
        found[(_LAYER.sub("layers.*.", name), *_placed(parameter))] += 1
    keys = ("name", "mesh", "placements", "shape", "local_shape")
    return [dict(zip(keys, kind, strict=True)) | {"count": n} for kind, n in found.items()]


def _placed(parameter: torch.Tensor) -> tuple:
    if not isinstance(parameter, DTensor):
        return "", "", tuple(parameter.shape), tuple(parameter.shape)
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or ()
    axes = " x ".join(f"{n} {size}" for n, size in zip(names, mesh.shape, strict=True))
    placements = ", ".join(map(str, parameter.placements))
    return axes, placements, tuple(parameter.shape), tuple(parameter.to_local().shape)


def rope_caches(parts: Sequence[nn.Module]) -> list[torch.Tensor]:
    """Return the distinct RoPE caches of this rank."""
    caches = {}
    for part in parts:
        for module in part.modules():
            if isinstance(module, RoPE):
                for buffer in module.buffers(recurse=False):
                    caches[buffer.untyped_storage()._cdata] = buffer
    return list(caches.values())
