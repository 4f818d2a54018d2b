# Copyright (c) Meta Platforms, Inc. and affiliates.
# All rights reserved.
#
# This source code is licensed under the BSD-style license found in the
# LICENSE file in the root directory of this source tree.

"""FlexShard's plans are built in near-linear time, and are what plain, slow references say.

All ranks are played in one process: a plan is the same on every rank, and a rank's schedule follows from it.
"""

import dataclasses
import sys
import unittest
from unittest import mock

import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan.distributed.flex_shard import (
    _optimizer_reshard_schedule as schedule_module,
    BlockShard,
    BucketConfig,
    build_dist_muon,
    ComputeLayout,
    dist_muon,
    Owned,
)
from torchtitan.distributed.flex_shard._optimizer_reshard_schedule import (
    _build_owned_redistribution_plan,
    _build_packed_all_to_all_schedule,
    _ParticipantPartition,
    _RedistributionDirection,
    _RedistributionPlan,
    _RouteEndpoint,
    _TensorRegion,
    _TensorRegionRoute,
    _validate_disjoint_regions_in_bounds,
)

FORWARD = _RedistributionDirection.STORAGE_TO_COMPUTE
BACKWARD = _RedistributionDirection.COMPUTE_TO_STORAGE
BLOCK_ROWS = 3
WORLD_SIZE = 128


def plan_dist_muon(shapes, mesh, placements, sharding, params_per_bucket):
    """The bucket plans of a DistMuon, on whatever device and without its buffers."""
    params = []
    for shape in shapes:
        local_shape = list(shape)
        for axis, placement in enumerate(placements):
            if isinstance(placement, Shard):
                local_shape[placement.dim], _ = Shard.local_shard_size_and_offset(
                    shape[placement.dim], mesh.size(axis), mesh.get_coordinate()[axis]
                )
        local = torch.zeros(local_shape)
        stride = torch.empty(shape, device="meta").stride()
        params.append(
            torch.nn.Parameter(
                DTensor.from_local(
                    local,
                    mesh,
                    placements,
                    run_check=False,
                    shape=torch.Size(shape),
                    stride=stride,
                )
            )
        )
    names = [f"p{index:03}" for index in range(len(params))]
    buckets = [
        names[i : i + params_per_bucket]
        for i in range(0, len(names), params_per_bucket)
    ]
    with (
        mock.patch.object(
            dist_muon.DistMuon,
            "_validate_parameter_storage",
            lambda self: torch.device("cpu"),
        ),
        mock.patch.object(dist_muon._BucketedRedistributionRuntime, "reserve_buffers"),
    ):
        optimizer = build_dist_muon(
            [{"params": params, "param_names": names}],
            compute_sharding_by_fqn=dict.fromkeys(
                names, ComputeLayout({"dp_shard": sharding})
            ),
            bucket_configs=[BucketConfig(patterns=tuple(bucket)) for bucket in buckets],
        )
    return optimizer._bucket_plans


def reference_owners(shapes, world_size, params_per_bucket):
    """Greedy balance, by a search through all ranks for each matrix."""

    def cost(shape):
        short, long = sorted(shape)
        return 5 * short * short * (2 * long + short)

    cumulative = [0] * world_size
    owners = []
    for begin in range(0, len(shapes), params_per_bucket):
        bucket = shapes[begin : begin + params_per_bucket]
        in_bucket = [(0, 0)] * world_size
        bucket_owners = {}
        by_cost = sorted(
            range(len(bucket)),
            key=lambda i: (-cost(bucket[i]), -bucket[i][0] * bucket[i][1], i),
        )
        for index in by_cost:
            rows, columns = bucket[index]
            owner = min(
                range(world_size), key=lambda r: (*in_bucket[r], cumulative[r], r)
            )
            flops, nbytes = in_bucket[owner]
            in_bucket[owner] = (
                flops + cost(bucket[index]),
                nbytes + 4 * rows * columns,
            )
            cumulative[owner] += cost(bucket[index])
            bucket_owners[index] = owner
        owners += [bucket_owners[i] for i in range(len(bucket))]
    return owners


def reference_schedule(plans, direction, local):
    """Split sizes and spans, by a search through all transfers for each peer."""
    participants = plans[0].participants
    transfers = []
    for index, plan in enumerate(plans):
        for route in plan.storage_to_compute_routes:
            source, destination = route.source, route.destination
            if direction is BACKWARD:
                source, destination = destination, source
            holders = sorted(source.participants, key=participants.index)
            for receiver in destination.participants:
                sender = receiver if receiver in holders else holders[0]
                transfers.append(
                    (
                        sender,
                        receiver,
                        index,
                        source.tensor_region,
                        destination.tensor_region,
                    )
                )
    remote = any(sender != receiver for sender, receiver, *_ in transfers)
    sends = [
        [(i, s) for a, b, i, s, _ in transfers if (a, b) == (local, peer)]
        for peer in participants
    ]
    receives = [
        [(i, d) for a, b, i, _, d in transfers if (a, b) == (peer, local)]
        for peer in participants
    ]
    result = [remote]
    for splits in (sends, receives):
        spans, cursor = [[] for _ in plans], 0
        for split in splits:
            for index, region in split:
                spans[index].append((region, cursor))
                cursor += region.numel
        result += [[sum(r.numel for _, r in split) for split in splits], spans]
    return result


def fields(schedule):
    def spans(spans_by_parameter):
        return [
            [(span.region, span.buffer_offset) for span in spans]
            for spans in spans_by_parameter
        ]

    return [
        schedule.has_remote_transfers,
        schedule.input_split_sizes,
        spans(schedule.input_spans_by_parameter),
        schedule.output_split_sizes,
        spans(schedule.output_spans_by_parameter),
    ]


def index(region):
    return tuple(slice(o, o + s) for o, s in zip(region.offsets, region.shape))


def redistribute(plans, direction, tensors):
    """Play the packed all-to-all of all ranks; each element must arrive exactly once."""
    participants = plans[0].participants
    schedules = {
        p: _build_packed_all_to_all_schedule(
            plans, direction=direction, process_group=None, local_participant=p
        )
        for p in participants
    }
    packed = {}
    for p, schedule in schedules.items():
        buffer = torch.full((schedule.input_buffer_numel,), torch.nan)
        for parameter, spans in enumerate(schedule.input_spans_by_parameter):
            for span in spans:
                buffer[span.buffer_offset :][: span.numel] = tensors[p][parameter][
                    index(span.region)
                ].flatten()
        packed[p] = buffer.split(schedule.input_split_sizes)
    received = {}
    for rank, (p, schedule) in enumerate(schedules.items()):
        parts = [packed[peer][rank] for peer in participants]
        assert [part.numel() for part in parts] == schedule.output_split_sizes
        buffer = torch.cat(parts)
        received[p] = []
        for plan, spans in zip(plans, schedule.output_spans_by_parameter):
            shape = (
                plan.compute_partition
                if direction is FORWARD
                else plan.storage_partition
            )(p).tensor_shape
            tensor, writes = torch.full(shape, torch.nan), torch.zeros(shape)
            for span in spans:
                tensor[index(span.region)] = buffer[span.buffer_offset :][
                    : span.numel
                ].view(span.region.shape)
                writes[index(span.region)] += 1
            assert bool((writes == 1).all()), f"{p} got {writes}"
            received[p].append(tensor)
    return received


class TestPlans(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        store = FakeStore()
        dist.init_process_group("fake", store=store, rank=0, world_size=WORLD_SIZE)
        cls.addClassCleanup(dist.destroy_process_group)

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(st.data())
    def test_plans_and_schedules_are_the_references(self, data):
        world_size = data.draw(st.integers(1, 5))
        replicas = data.draw(st.sampled_from([1, 2]))
        params_per_bucket = data.draw(st.integers(1, 4))
        sharding, placement = data.draw(
            st.sampled_from(
                [
                    (Owned(), Shard(0)),
                    (Owned(), Shard(1)),
                    (Owned(), Replicate()),
                    (BlockShard(0, BLOCK_ROWS), Shard(0)),
                    (Shard(0), Replicate()),
                ]
            )
        )
        size = st.integers(1, 7)
        shape = st.tuples(size, size)
        if isinstance(sharding, BlockShard):
            shape = shape.map(lambda s: (s[0] * BLOCK_ROWS, s[1]))
        elif isinstance(sharding, Shard):
            shape = st.tuples(size, size, size)
        shapes = data.draw(st.lists(shape, min_size=1, max_size=6))
        # Any order of ranks in the mesh; the process groups sort them.
        ranks = data.draw(st.permutations(range(replicas * world_size)))
        mesh = DeviceMesh(
            "cpu",
            torch.tensor(ranks).view(replicas, world_size),
            mesh_dim_names=("dp_replicate", "dp_shard"),
        )
        buckets = plan_dist_muon(
            shapes, mesh, [Replicate(), placement], sharding, params_per_bucket
        )
        if not hasattr(buckets[0], "group"):
            return  # what every rank needs, it has

        if sharding == Owned():
            owners = iter(reference_owners(shapes, world_size, params_per_bucket))
        for bucket in buckets:
            plans, group = bucket.redistribution_plans, bucket.group
            self.assertEqual(group.local_participant, 0)
            if sharding == Owned():
                for plan in plans:
                    owner = group.participants[next(owners)]
                    holders = {}
                    for p in plan.participants:
                        (region,) = plan.storage_partition(p).logical_regions
                        holders.setdefault(region, []).append(p)
                    built = _build_owned_redistribution_plan(
                        tuple(
                            (tuple(ranks), region) for region, ranks in holders.items()
                        ),
                        participants=plan.participants,
                        owner_rank=owner,
                        logical_shape=plan.logical_shape,
                    )
                    self.assertEqual(plan, built)
            for direction in (FORWARD, BACKWARD):
                for participant in group.participants:
                    schedule = _build_packed_all_to_all_schedule(
                        plans,
                        direction=direction,
                        process_group=None,
                        local_participant=participant,
                    )
                    self.assertEqual(
                        fields(schedule),
                        reference_schedule(plans, direction, participant),
                    )
            self.assertEqual(
                fields(bucket.storage_to_compute_schedule),
                reference_schedule(plans, FORWARD, group.local_participant),
            )
            self.assertEqual(
                fields(bucket.compute_to_storage_schedule),
                reference_schedule(plans, BACKWARD, group.local_participant),
            )

            whole = [
                torch.arange(float(torch.Size(p.logical_shape).numel())).view(
                    p.logical_shape
                )
                for p in plans
            ]
            stored = {
                p: [
                    w[index(plan.storage_partition(p).logical_regions[0])]
                    for w, plan in zip(whole, plans)
                ]
                for p in group.participants
            }
            computed = redistribute(plans, FORWARD, stored)
            for p, tensors in computed.items():
                for w, plan, tensor in zip(whole, plans, tensors):
                    for region in plan.compute_partition(p).logical_regions:
                        self.assertTrue(torch.equal(tensor, w[index(region)]))
            returned = redistribute(plans, BACKWARD, computed)
            for p in group.participants:
                self.assertTrue(all(map(torch.equal, returned[p], stored[p])))

    def test_equal_parameters_are_planned_once(self):
        shapes = [(8, 6), (6, 8), (8, 6)] * 8
        validate = schedule_module._validate_redistribution_plan
        mesh = DeviceMesh("cpu", torch.arange(4), mesh_dim_names=("dp_shard",))
        with mock.patch.object(
            schedule_module, "_validate_redistribution_plan", side_effect=validate
        ) as validations:
            for attempt in (1, 2):  # nothing is kept from one planning to the next
                plan_dist_muon(shapes, mesh, [Shard(0)], Owned(), params_per_bucket=3)
                self.assertEqual(validations.call_count, 2 * attempt)

    def test_work_grows_linearly_with_ranks(self):
        calls = {}
        for world_size in (8, 32, 64, 128):  # the first is to import what is needed
            ranks = torch.arange(world_size)
            mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("dp_shard",))
            count = 0

            def profile(frame, event, argument):
                nonlocal count
                count += event == "call"

            shapes = [(128, 6), (6, 128)] * 2
            sys.setprofile(profile)
            try:
                plan_dist_muon(shapes, mesh, [Shard(0)], Owned(), params_per_bucket=2)
            finally:
                sys.setprofile(None)
            calls[world_size] = count
        # Twice the ranks more, twice the calls more.
        self.assertLess(calls[128] - calls[64], 2.2 * (calls[64] - calls[32]))


# Rows 0-1 on rank 0 and row 2 on rank 1; rank 1 computes.
VALID = {
    "participants": (0, 1),
    "logical_shape": (3, 2),
    "storage_partitions": (
        _ParticipantPartition(0, (2, 2), (_TensorRegion((0, 0), (2, 2)),)),
        _ParticipantPartition(1, (1, 2), (_TensorRegion((2, 0), (1, 2)),)),
    ),
    "compute_partitions": (
        _ParticipantPartition(0, (0,), ()),
        _ParticipantPartition(1, (3, 2), (_TensorRegion((0, 0), (3, 2)),)),
    ),
    "storage_to_compute_routes": tuple(
        _TensorRegionRoute(
            _TensorRegion((row, 0), (rows, 2)),
            _RouteEndpoint(_TensorRegion((0, 0), (rows, 2)), (holder,)),
            _RouteEndpoint(_TensorRegion((row, 0), (rows, 2)), (1,)),
        )
        for holder, row, rows in ((0, 0, 2), (1, 2, 1))
    ),
}


def with_route(number, **changes):
    routes = list(VALID["storage_to_compute_routes"])
    routes[number] = dataclasses.replace(routes[number], **changes)
    return {"storage_to_compute_routes": tuple(routes)}


class TestNoCheckIsDropped(unittest.TestCase):
    def test_valid(self):
        plan = _RedistributionPlan(**VALID)
        self.assertEqual(
            plan.swap_compute_participants(1, 0).swap_compute_participants(0, 1), plan
        )
        with self.assertRaisesRegex(RuntimeError, "compute participants must be"):
            plan.swap_compute_participants(1, 2)

    def test_invalid(self):
        first, second = VALID["storage_to_compute_routes"]
        storage, compute = VALID["storage_partitions"], VALID["compute_partitions"]
        region, endpoint = _TensorRegion, _RouteEndpoint
        whole = dataclasses.replace(compute[1], participant=0)
        cases = {
            "participants must be unique": {"participants": (0, 0)},
            "storage partitions must follow": {"storage_partitions": storage[::-1]},
            "compute partitions must follow": {"compute_partitions": compute[:1]},
            "storage logical partition 1 regions must be in bounds": {
                "storage_partitions": (
                    storage[0],
                    _ParticipantPartition(1, (1, 2), (region((3, 0), (1, 2)),)),
                )
            },
            "storage logical partition 1 regions do not match": {
                "storage_partitions": (
                    storage[0],
                    _ParticipantPartition(1, (2, 2), (region((2, 0), (1, 2)),)),
                )
            },
            "routes require source": with_route(
                0, source=endpoint(region((0, 0), (2, 2)), ())
            ),
            "participants must be unique$": with_route(
                0, source=endpoint(region((0, 0), (2, 2)), (0, 0))
            ),
            "unknown participant": with_route(
                0, destination=endpoint(region((0, 0), (2, 2)), (7,))
            ),
            "equal numel": with_route(0, source=endpoint(region((0, 0), (1, 2)), (0,))),
            "storage-to-compute regions do not cover": {
                "storage_to_compute_routes": (first,)
            },
            "storage-to-compute regions must be in bounds": with_route(
                1, logical_region=region((3, 0), (1, 2))
            ),
            "overlapping logical tensor regions": {
                "storage_to_compute_routes": (first, first, second)
            },
            "storage source 0 regions do not cover": with_route(
                1, source=endpoint(region((0, 0), (1, 2)), (0,))
            ),
            "storage source 0 regions leave": {
                "storage_to_compute_routes": (
                    dataclasses.replace(first, logical_region=region((1, 0), (2, 2))),
                    dataclasses.replace(second, logical_region=region((0, 0), (1, 2))),
                )
            },
            "storage source tensor 1 regions must be in bounds": with_route(
                1, source=endpoint(region((1, 0), (1, 2)), (1,))
            ),
            "compute destination 0 regions do not cover": with_route(
                0, destination=endpoint(region((0, 0), (2, 2)), (0,))
            ),
            # A replica that no route knows.
            "storage source 1 regions do not cover": {
                "storage_partitions": (
                    whole,
                    dataclasses.replace(whole, participant=1),
                ),
                "storage_to_compute_routes": (
                    dataclasses.replace(
                        first,
                        logical_region=compute[1].logical_regions[0],
                        source=endpoint(region((0, 0), (3, 2)), (0,)),
                        destination=endpoint(region((0, 0), (3, 2)), (1,)),
                    ),
                ),
            },
            # The last row lands on the first.
            "overlapping logical": with_route(
                1, destination=endpoint(region((0, 0), (1, 2)), (1,))
            ),
            "compute destination tensor 1 regions must be in bounds": with_route(
                1, destination=endpoint(region((3, 0), (1, 2)), (1,))
            ),
        }
        for message, changes in cases.items():
            with (
                self.subTest(message),
                self.assertRaisesRegex(
                    RuntimeError, f"invalid redistribution plan: .*{message}"
                ),
            ):
                _RedistributionPlan(**(VALID | changes))

    @settings(max_examples=200, deadline=None, derandomize=True)
    @given(st.data())
    def test_overlap_is_what_comparing_all_elements_says(self, data):
        # Cuts, as sharding makes them, and then perhaps one region moved or grown.
        shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
        regions = [_TensorRegion((0,) * len(shape), shape)]
        for _ in range(data.draw(st.integers(0, 6))):
            region = regions.pop(data.draw(st.integers(0, len(regions) - 1)))
            dim = data.draw(st.integers(0, len(shape) - 1))
            size = data.draw(st.integers(0, region.shape[dim]))
            for offset, length in ((0, size), (size, region.shape[dim] - size)):
                offsets, part = list(region.offsets), list(region.shape)
                offsets[dim] += offset
                part[dim] = length
                regions.append(_TensorRegion(tuple(offsets), tuple(part)))
        if data.draw(st.booleans()):
            offsets = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
            part = tuple(
                data.draw(st.integers(0, size - o)) for size, o in zip(shape, offsets)
            )
            regions[data.draw(st.integers(0, len(regions) - 1))] = _TensorRegion(
                offsets, part
            )
        regions = tuple(data.draw(st.permutations(regions)))
        writes = torch.zeros(shape)
        for region in regions:
            writes[index(region)] += 1
        if writes.max() > 1:
            with self.assertRaisesRegex(RuntimeError, "overlapping"):
                _validate_disjoint_regions_in_bounds(regions, shape, direction="test")
        else:
            _validate_disjoint_regions_in_bounds(regions, shape, direction="test")

    def test_regions_that_no_cut_separates(self):
        # A pinwheel: five regions, of which no straight cut separates two.
        pinwheel = [
            ((0, 0), (1, 2)),
            ((0, 2), (2, 1)),
            ((2, 1), (1, 2)),
            ((1, 0), (2, 1)),
            ((1, 1), (1, 1)),
        ]
        regions = tuple(_TensorRegion(*r) for r in pinwheel)
        _validate_disjoint_regions_in_bounds(regions, (3, 3), direction="test")
        grown = _TensorRegion((1, 1), (1, 2))
        with self.assertRaisesRegex(RuntimeError, "overlapping"):
            _validate_disjoint_regions_in_bounds(
                (*regions[:4], grown), (3, 3), direction="test"
            )

    def test_overlap_with_a_region_that_began_long_before(self):
        # Sorted by rows, the second region ends before the third begins; the first
        # does not.
        boxes = [((0, 0), (6, 1)), ((1, 1), (1, 1)), ((3, 0), (1, 2))]
        regions = tuple(_TensorRegion(*box) for box in boxes)
        with self.assertRaisesRegex(RuntimeError, "overlapping"):
            _validate_disjoint_regions_in_bounds(regions, (6, 2), direction="test")


if __name__ == "__main__":
    unittest.main()
