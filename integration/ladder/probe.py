"""The job's trainer with a stopwatch: runs inside the ranks, one rung a process.

[Note: What is measured]
A step lasts from its batch to its logged loss, the device synchronised at both ends. Its phases:
*forward* is the call of the model, up to the last norm; *backward* the rest of TorchTitan's
``forward_backward_step``, so also the output head and the loss, which run forward and backward
chunk by chunk; *optimizer* is the optimizers' ``step``. What remains (batch, clipping, logging) is
in the step alone. On a GPU the ends of phases are events in the compute stream, which wait for
nothing; only the optimizer's end waits for all streams. Each time is that of the slowest rank.

Exposed communication and copies come from one more step under the profiler, on a GPU.

Where traces are asked for, rank 0 records its CUDA allocator's history in yet another step. That
slows each allocation and takes memory of the host, so all figures are those before this step.
"""

import faulthandler
import pickle
import signal
import time
from collections import defaultdict
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torchtitan.tools.utils import device_type

from integration.ground import files
from integration.ground.machine import peak_resident_set
from integration.ladder.trace import RESULT_FILE, SNAPSHOT_FILE, TRACE_FILE, exposed
from integration.ranks.contributed import find
from integration.ranks.trainer import JobTrainer

PHASES = ("forward_s", "backward_s", "optimizer_s")
# Of some kB of the host's memory each. A step has some ten thousand; older ones would be dropped.
MAX_ALLOCATOR_EVENTS = 500_000


class HostClock:
    """Time marks of a CPU, which has done what was asked of it when a call returns."""

    def mark(self) -> Any:
        return time.perf_counter()

    def seconds(self, begin: Any, end: Any) -> float:
        return end - begin

    def synchronize(self) -> None:
        pass


class DeviceClock(HostClock):
    """Time marks in a GPU's current stream; read after ``synchronize``."""

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) / 1e3

    def synchronize(self) -> None:
        torch.cuda.synchronize()


class MeasuredTrainer(JobTrainer):
    """``JobTrainer`` that leaves ``measured.json`` in the run's folder after its last step."""

    @dataclass(kw_only=True, slots=True)
    class Config(JobTrainer.Config):
        warmup: int = 1
        """Steps before the measured ones"""

        profiled: int = 0
        """Steps after the measured ones, under the profiler, on a GPU"""

        recorded: int = 0
        """Steps after training.steps, with rank 0's allocator history recorded, on a GPU"""

        newton_schulz_on_cpu: bool = False
        """Leave all of Muon's work on offloaded weights to the CPU: one rank only"""

    def __init__(self, config: Config) -> None:
        # The launcher asks a rank that hangs where it is.
        faulthandler.register(signal.SIGUSR2)
        _fix_update_split(config)
        if config.newton_schulz_on_cpu:
            _leave_newton_schulz_to_the_cpu()
        super().__init__(config)
        self._gpu = device_type == "cuda"
        self._warmup = config.warmup
        self._last_measured = config.training.steps - config.profiled
        self._last = config.training.steps + config.recorded
        self._clock = DeviceClock() if self._gpu else HostClock()
        self._open: dict[str, Any] = {}
        self._spans: dict[str, list[tuple[Any, Any]]] = defaultdict(list)
        self._times: dict[str, list[float]] = defaultdict(list)
        self._losses: list[float] = []
        self._grad_norms: list[float] = []
        self._peaks: list[tuple[int, int]] = []
        self._pools: dict[str, dict[str, int]] = {}
        self._first_step_at = 0.0
        self._figures: dict[str, Any] = {}
        self.model_parts[0].register_forward_hook(self._after_forward)
        self.optimizers.register_step_pre_hook(lambda *_: self._begin("optimizer_s"))
        self.optimizers.register_step_post_hook(self._after_optimizer)
        self._log = self.metrics_processor.log
        self.metrics_processor.log = self._read_and_log

    def forward_backward_step(self, **arguments: Any) -> torch.Tensor:
        self._begin("forward_s")
        loss = super().forward_backward_step(**arguments)
        self._end("backward_s")
        return loss

    def _after_forward(self, *_: Any) -> None:
        self._end("forward_s")
        self._begin("backward_s")

    def _after_optimizer(self, *_: Any) -> None:
        self._clock.synchronize()
        self._end("optimizer_s")

    def _begin(self, phase: str) -> None:
        self._open[phase] = self._clock.mark()

    def _end(self, phase: str) -> None:
        self._spans[phase].append((self._open.pop(phase), self._clock.mark()))

    def _read_and_log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Take what TorchTitan logs, before it forgets the peaks of the step."""
        self._losses.append(global_avg_loss)
        self._grad_norms.append(grad_norm)
        if self._gpu and self._kind == "measured":
            peak = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            self._peaks.append(peak)
        self._log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)

    @property
    def _kind(self) -> str:
        if self.step <= self._warmup:
            return "warmup"
        if self.step <= self._last_measured:
            return "measured"
        return "profiled" if self.step <= self.config.training.steps else "recorded"

    def should_continue_training(self) -> bool:
        if super().should_continue_training():
            return True
        return self.config.training.steps <= self.step < self._last

    def train_step(self, data_iterator: Iterator) -> None:
        self._first_step_at = self._first_step_at or time.time()
        self._spans.clear()
        self._clock.synchronize()
        with self._around():
            begin = time.perf_counter()
            super().train_step(data_iterator)
            self._clock.synchronize()
            seconds = time.perf_counter() - begin
        if self._kind == "measured":
            self._times["step_s"].append(seconds)
            for phase in PHASES:
                spans = self._spans[phase]
                self._times[phase].append(sum(self._clock.seconds(*span) for span in spans))
            if self._gpu and self.step == self._last_measured:
                self._pools = pools(self.model_parts[0])
        if self.step == self.config.training.steps:
            self._figures = self._put_together()
        if self.step == self._last and dist.get_rank() == 0:
            file = Path(self.config.dump_folder) / RESULT_FILE
            files.write_json(file, self._figures)

    def _around(self) -> AbstractContextManager:
        if self._kind == "profiled":
            return self._profiler()
        if self._kind == "recorded":
            # The schedule ends with training.steps, and may have no learning rate beyond.
            self.lr_schedulers.step = lambda: None
            if dist.get_rank() == 0:
                file = Path(self.config.dump_folder) / SNAPSHOT_FILE.format(rank=0)
                return recorded(file, self.model_parts[0])
        return nullcontext()

    @contextmanager
    def _profiler(self) -> Generator[None]:
        activities = [torch.profiler.ProfilerActivity.CUDA]
        trace = Path(self.config.dump_folder) / TRACE_FILE.format(rank=dist.get_rank())
        with torch.profiler.profile(activities=activities) as profile:
            yield
        profile.export_chrome_trace(str(trace))
        communication, copies = exposed(trace)
        self._times["exposed_communication_s"].append(communication)
        self._times["exposed_copies_s"].append(copies)

    def _put_together(self) -> dict[str, Any]:
        """Return the figures of all ranks."""
        training = self.config.training
        tokens = training.local_batch_size * training.seq_len * self.gradient_accumulation_steps
        mine = {
            "times": dict(self._times),
            "peaks": self._peaks,
            "retries": torch.cuda.memory_stats().get("num_alloc_retries", 0) if self._gpu else None,
            "peak_host": peak_resident_set(),
        }
        ranks: list[dict] = [mine] * dist.get_world_size()
        dist.all_gather_object(ranks, mine, group=self._control)
        batch = self.parallel_dims.get_optional_mesh("batch")
        slowest = {
            name: [max(values) for values in zip(*(r["times"][name] for r in ranks), strict=True)]
            for name in self._times
        }
        return {
            "loss": list(self._losses),
            "grad_norm": list(self._grad_norms),
            "step_s": slowest.pop("step_s"),
            "phases": {"exposed_communication_s": None, "exposed_copies_s": None, **slowest},
            "peak_allocated": max((p[0] for r in ranks for p in r["peaks"]), default=None),
            "peak_reserved": max((p[1] for r in ranks for p in r["peaks"]), default=None),
            "alloc_retries": sum(r["retries"] for r in ranks) if self._gpu else None,
            "pools": self._pools,
            "peak_host": max(r["peak_host"] for r in ranks),
            "first_step_at": self._first_step_at,
            "tokens_a_step": tokens * (batch.size() if batch is not None else 1),
        }


@contextmanager
def recorded(file: Path, model: torch.nn.Module) -> Generator[None]:
    """Write the allocator's history of what runs inside, as ``snapshot.py`` reads it."""
    memory = torch.cuda.memory
    memory._record_memory_history(
        "all", context="alloc", stacks="python", max_entries=MAX_ALLOCATOR_EVENTS
    )
    try:
        yield
        snapshot = {**memory._snapshot(), "stream_names": _stream_names(model)}
    finally:
        memory._record_memory_history(None)
    file.write_bytes(pickle.dumps(snapshot))


def pools(model: torch.nn.Module) -> dict[str, dict[str, int]]:
    """Return stream -> bytes live and cached in its pool: memory freed in one serves no other.

    FSDP2's streams have names; others are numbered in the order of their size.
    """
    sizes: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    for segment in torch.cuda.memory_snapshot():
        live, total = segment["allocated_size"], segment["total_size"]
        sizes[segment["stream"]][0] += live
        sizes[segment["stream"]][1] += total - live
    names = _stream_names(model)
    found = {}
    for stream, (live, cached) in sorted(sizes.items(), key=lambda item: -sum(item[1])):
        number = sum(name.startswith("stream ") for name in found) + 1
        found[names.get(stream, f"stream {number}")] = {"live": live, "cached": cached}
    return found


def _stream_names(model: torch.nn.Module) -> dict[int, str]:
    return {0: "default stream", **_fsdp_streams(model)}


def _fsdp_streams(model: torch.nn.Module) -> dict[int, str]:
    """Return the handles of FSDP2's streams, which it keeps to itself, with their names."""
    if not isinstance(model, FSDPModule):
        return {}
    context = model._get_fsdp_state()._comm_ctx
    names = ("all_gather_copy_in", "all_gather", "reduce_scatter", "all_reduce")
    streams = {name: getattr(context, f"{name}_stream", None) for name in names}
    return {
        stream.cuda_stream: f"{name.replace('_', '-')} stream"
        for name, stream in streams.items()
        if stream is not None
    }


def _leave_newton_schulz_to_the_cpu() -> None:
    """Give Muon's pipeline (``muon_gpu_newton_schulz``) the CPU for the device that computes.

    It then does one thing after the other, with all cores.
    """
    module = import_module("torchtitan.distributed.flex_shard.dist_muon")
    offload = module._MuonHostOffload
    on_cpu = partial(offload, torch.device("cpu"))
    setattr(module, offload.__name__, lambda _, **rest: on_cpu(**rest))


def _fix_update_split(config: MeasuredTrainer.Config) -> None:
    """Let offloaded Muon (``muon_gpu_newton_schulz``) divide its work in the same way on each rung.

    By default ranks time the ways to share it with the host and take the quickest. Another rung may
    find another one the quickest, and its rounding is not the same: left alone where no numbers are
    compared.
    """
    muon = config.optimizer.optimizer_factory_kwargs_by_name.get("Muon")
    if muon is None or not config.training.enable_cpu_offload or device_type == "cpu":
        return
    if not config.debug.deterministic:
        return
    dist_muon = find("torchtitan.distributed.flex_shard.dist_muon", "DistMuon")
    if dist_muon is not None and "update_split" in signature(dist_muon).parameters:
        muon["update_split"] = "on_device"
