# Owner(s): ["oncall: distributed"]

import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import (
    distribute_tensor,
    DTensor,
    Partial,
    Replicate,
    Shard,
)
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.testing._internal.common_cuda import TEST_MULTIGPU
from torch.testing._internal.common_utils import (
    HardwareClassification,
    run_tests,
)
from torch.testing._internal.distributed._tensor.common_dtensor import (
    DTensorTestBase,
    with_comms,
)


def exact_norm(tensor: torch.Tensor) -> float:
    parts = tensor.reshape(-1).split(1 << 16)
    return sum(part.double().square().sum() for part in parts).sqrt().item()


def norm_at_once(grad: DTensor) -> tuple[torch.Tensor, int]:
    """The norm as it was, and the number of its collectives."""
    with CommDebugMode() as comms:
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad)]))
    return norm, comms.get_total_counts()


class TwoRanksTestBase(DTensorTestBase):
    @property
    def world_size(self) -> int:
        return 2


class TestClipGradCPUDTensor(TwoRanksTestBase):
    hw_classification = HardwareClassification.GENERIC

    @property
    def device_type(self) -> str:
        return "cpu"

    @with_comms
    def test_placements(self):
        mesh = init_device_mesh("cpu", (2,))
        torch.manual_seed(0)
        cases = [
            ((5, 600, 1000), Shard(0)),  # uneven
            ((1, 1500, 1000), Shard(0)),  # a rank without rows
            ((5, 600, 1000), Shard(1)),
            ((5, 600, 1000), Replicate()),
        ]
        for shape, placement in cases:
            with self.subTest(shape=shape, placement=placement):
                full = torch.randn(shape)
                grad = distribute_tensor(full, mesh, [placement])
                with CommDebugMode() as comms:
                    total = get_total_norm([grad])
                self.assertEqual(comms.get_total_counts(), norm_at_once(grad)[1])
                self.assertIsInstance(total, DTensor)
                got = total.full_tensor().item()
                # Without rows, the sum is off by 1e-5 to 1e-4 here.
                self.assertEqual(got, exact_norm(full), rtol=1e-6, atol=0)

    @with_comms
    def test_shards_in_any_layout(self):
        """Shards along the last dim, of one dim, of two columns, of a transpose."""
        mesh = init_device_mesh("cpu", (2,))
        torch.manual_seed(0)
        cases = [
            (torch.randn(2, 1 << 20), [Shard(1)]),
            (torch.randn((1 << 21) + 3), [Shard(0)]),
            (torch.randn(1 << 20, 2), [Shard(0)]),
            (torch.randn(1024, 2048).t(), [Shard(0)]),
        ]
        for full, placements in cases:
            grad = distribute_tensor(full, mesh, placements)
            with CommDebugMode() as comms:
                total = get_total_norm([grad])
            self.assertEqual(comms.get_total_counts(), norm_at_once(grad)[1])
            got = total.full_tensor().item()
            self.assertEqual(got, exact_norm(full), rtol=1e-6, atol=0)

    @with_comms
    def test_strided_shard(self):
        mesh = init_device_mesh("cpu", (2,))
        torch.manual_seed(0)
        full = torch.randn(4, 1 << 19)
        local = full.view(2, 2, -1)[:, self.rank].clone()
        grad = DTensor.from_local(local, mesh, [_StridedShard(0, split_factor=2)])
        total = get_total_norm([grad]).full_tensor().item()
        self.assertEqual(total, exact_norm(full), rtol=1e-6, atol=0)

    @with_comms
    def test_layouts_together(self):
        mesh = init_device_mesh("cpu", (2,))
        torch.manual_seed(0)
        full = [torch.randn(4, 1 << 20) for _ in range(4)] + [torch.randn(4, 4)]
        placements = [Shard(0), Shard(1), Replicate(), Shard(0), Shard(0)]
        grads = [distribute_tensor(t, mesh, [p]) for t, p in zip(full, placements)]
        total = get_total_norm(grads).full_tensor().item()
        exact = sum(exact_norm(t) ** 2 for t in full) ** 0.5
        self.assertEqual(total, exact, rtol=1e-6, atol=0)

    @with_comms
    def test_sums_are_as_before(self):
        # The norm of a sum is not a sum of norms.
        mesh = init_device_mesh("cpu", (2,))
        local = torch.full((1 << 20,), float(self.rank + 1))
        grad = DTensor.from_local(local, mesh, [Partial()])
        total = get_total_norm([grad]).full_tensor()
        expected = torch.linalg.vector_norm(torch.full((1 << 20,), 3.0))
        self.assertEqual(total, expected, rtol=0, atol=0)

    @with_comms
    def test_two_mesh_dims(self):
        mesh = init_device_mesh("cpu", (1, 2))
        torch.manual_seed(0)
        full = torch.randn(6, 500, 1000)
        for placements in ([Shard(1), Shard(0)], [Replicate(), Shard(0)]):
            grad = distribute_tensor(full, mesh, placements)
            total = get_total_norm([grad]).full_tensor().item()
            self.assertEqual(total, exact_norm(full), rtol=1e-6, atol=0)


class TestClipGradCPUOffload(TwoRanksTestBase):
    hw_classification = HardwareClassification.GENERIC

    @property
    def device_type(self) -> str:
        return "cuda" if TEST_MULTIGPU else "cpu"

    @with_comms(backend="cpu:gloo,cuda:nccl" if TEST_MULTIGPU else "gloo")
    def test_fsdp2_cpu_offload(self):
        # The mesh is of GPUs, where there are two; the gradients are on the host.
        torch.manual_seed(42)
        model = nn.Linear(1000, 3000, bias=False)
        mesh = init_device_mesh(self.device_type, (2,))
        fully_shard(
            model,
            mesh=mesh,
            offload_policy=CPUOffloadPolicy(pin_memory=TEST_MULTIGPU),
        )
        (parameter,) = model.parameters()
        for foreach in (None, False):
            with self.subTest(foreach=foreach):
                x = torch.randn(16, 1000, device=self.device_type)
                model(x).square().sum().backward()
                self.assertEqual(parameter.grad.device.type, "cpu")
                full = parameter.grad.full_tensor()
                before = exact_norm(full)
                total = clip_grad_norm_([parameter], 1.0, foreach=foreach)
                got = total.full_tensor().item()
                self.assertEqual(got, before, rtol=1e-6, atol=0)
                self.assertEqual(
                    exact_norm(parameter.grad.full_tensor()), 1.0, rtol=1e-5, atol=0
                )
                parameter.grad = None


if __name__ == "__main__":
    run_tests()
