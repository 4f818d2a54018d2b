"""The jobs as TorchTitan's configs, down to the model on the meta device."""

import os
import subprocess
import sys

import pytest
import torch
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common.attention import FlexAttention
from torchtitan.tools import utils as torchtitan_utils

from integration.ground.errors import UserError
from integration.ground.paths import REPO
from integration.jobs import catalog
from integration.patchset import overlay
from integration.ranks import attention, config_registry, trainer_config
from integration.ranks.moe import model_spec

BILLION = 1e9


def test_every_job_is_a_config_by_its_name():
    for name in catalog.CATALOG:
        assert callable(getattr(config_registry, name))


def test_no_job_autotunes_its_attention(monkeypatch):
    """The region that an outer compiler takes out has the same options, so the dict is kept."""
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda function, options: compiled.append(options))
    monkeypatch.setattr(FlexAttention, "_compiled_flex_attn", None)
    options = FlexAttention.inductor_configs
    monkeypatch.setitem(options, "max_autotune", True)
    trainer_config.trainer_config(catalog.SLICE)
    assert FlexAttention.inductor_configs is options
    assert not options["max_autotune"] and not options["coordinate_descent_tuning"]
    assert compiled == [options]


def test_flash_attention_replaces_kernels_and_keeps_other_options(monkeypatch):
    monkeypatch.setattr(attention, "find_spec", lambda name: name)
    monkeypatch.setattr(torchtitan_utils, "has_cuda_capability", lambda major, minor: True)
    flash = attention.flash_attention(FlexAttention.Config(kernel_options={"PRESCALE_QK": True}))
    assert flash == FlexAttention.Config(
        block_size=(256, 128), kernel_options={"PRESCALE_QK": True, "BACKEND": "FLASH"}
    )


@pytest.mark.parametrize(
    ("installed", "says"),
    [((), "flash-attn-4"), (("flash_attn",), "flash-attn-4"), (None, "Hopper")],
)
def test_flash_attention_says_what_is_missing(monkeypatch, installed, says):
    """Of flash_attn, older packages have no ``cute``; with all there, no GPU is the reason."""
    monkeypatch.setattr(
        attention,
        "find_spec",
        lambda name: name if installed is None or name in installed else None,
    )
    monkeypatch.setattr(torchtitan_utils, "has_cuda_capability", lambda major, minor: False)
    with pytest.raises(UserError, match=says):
        attention.flash_attention(FlexAttention.Config())


@pytest.mark.parametrize(
    ("job", "params", "active"),
    # The published run has 951.9 B and 32.8 B; its attention shape is not known.
    [(catalog.JUPITER_1T, 951.80, 32.77), (catalog.LEONARDO_1T, 1097, None)],
)
def test_the_built_model_has_the_parameters_that_are_counted(job, params, active):
    with torch.device("meta"):
        model = model_spec(job.name, job.shape).model.build()
    built = {name: parameter.numel() for name, parameter in model.named_parameters()}
    assert sum(built.values()) == job.shape.params
    assert job.shape.params / BILLION == pytest.approx(params, rel=5e-4)
    if active is not None:
        experts = sum(n for name, n in built.items() if ".routed_experts." in name)
        idle = experts - experts * job.shape.top_k // job.shape.experts
        assert (sum(built.values()) - idle) / BILLION == pytest.approx(active, rel=5e-4)
        assert job.shape.active_params == sum(built.values()) - idle


def test_the_1t_job_is_configured_as_published(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "384")
    config = config_registry.jupiter_1t()
    assert config.training.seq_len == 65_536
    assert config.training.local_batch_size == 1
    assert config.training.enable_cpu_offload
    assert config.parallelism.expert_parallel_degree == 4
    assert isinstance(config.activation_checkpoint, FullAC.Config)
    assert config_registry.jupiter_1t_hsdp().parallelism.data_parallel_replicate_degree == 4


def test_the_slice_is_cut_by_the_launcher(monkeypatch):
    monkeypatch.setenv("INTEGRATION_LAYERS", "2")
    monkeypatch.setenv("INTEGRATION_EXPERTS", "8")
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = config_registry.slice()
    assert config.model_spec is not None
    assert len(config.model_spec.model.layers) == 2  # pyrefly: ignore[missing-attribute]
    assert config.parallelism.expert_parallel_degree == 2


GPU_TABLE = """
import torch
from torchtitan.components.optimizer.param_groups import format_param_groups
from integration.jobs import catalog
from integration.ranks import contributed
from integration.ranks.moe import model_spec

contributed.device_type = "cuda"
spec = model_spec("mini", catalog.MINI.shape)
config = contributed.muon(spec, lr=1e-3)
print(config.optimizer_factory_kwargs_by_name["Muon"]["newton_schulz"])
with torch.device("meta"):
    print(format_param_groups(config, spec.model.build()))
"""


def test_the_muon_of_a_gpu_fits_the_table_of_parameters():
    """Printed at every start of the full set. On a GPU Muon has one argument more."""
    env = {**os.environ, "PYTHONPATH": overlay.build().pythonpath(str(REPO))}
    command = [sys.executable, "-c", GPU_TABLE]
    ran = subprocess.run(command, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    method, _, table = ran.stdout.partition("\n")
    assert method == "gram"
    assert "experts.w1_EFD" in table


def test_leonardo_checkpoints_selectively():
    config = config_registry.leonardo_1t()
    assert isinstance(config.activation_checkpoint, SelectiveAC.Config)
    assert config.parallelism.tensor_parallel_degree == 4


def test_fp8_is_refused_where_the_gpu_has_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A100")
    with pytest.raises(UserError, match=r"A100 has 8\.0; train leonardo_1t instead"):
        config_registry.leonardo_1t_fp8()


def test_fp8_is_titans_converters_where_the_gpu_has_it(monkeypatch):
    seen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(
        trainer_config, "model_spec", lambda name, shape, converters: seen.extend(converters)
    )
    monkeypatch.setattr(trainer_config, "_optimizer", lambda job, spec: None)
    trainer_config.trainer_config(catalog.LEONARDO_1T_FP8)
    assert [type(c).__qualname__ for c in seen] == [
        "Float8LinearConverter.Config",
        "Float8GroupedExpertsConverter.Config",
    ]
