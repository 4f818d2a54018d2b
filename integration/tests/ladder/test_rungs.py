"""Which sets the ladder measures, in which order, and with which each is compared."""

from itertools import pairwise

import pytest

from integration.ground.errors import UserError
from integration.jobs import catalog
from integration.ladder import order, rungs
from integration.ladder.order import Place
from integration.ladder.rungs import Only, Rung
from integration.patchset import repository
from integration.tests.ladder.made import contribution

CPU = Place(gpu=False, cpu_offload=False, muon=True)
OFFLOADED = Place(gpu=True, cpu_offload=True, muon=True)
REAL = repository.load()


# In series order, which is not the ladder's: c needs b, b needs a.
CHAIN = (
    contribution("cpu_device"),
    contribution("a"),
    contribution("shared_rope_cache"),
    contribution("b", ("a",)),
    contribution("c", ("b",)),
)


def test_every_contribution_has_a_place_and_a_reason():
    assert {c.name for c in REAL} <= set(order.ORDER)


def test_nothing_comes_before_what_it_requires():
    done: list[str] = []
    required = {c.name: c.requires for c in REAL}
    for name in order.sort(REAL):
        assert set(required[name]) <= set(done), name
        done.append(name)
    assert sorted(done) == sorted(required)


def test_newton_schulz_also_runs_on_the_cpu_where_one_gpu_has_its_weights_there():
    def variants(place, **kwargs):
        climbed = rungs.climb(REAL, place, **kwargs)
        return [rung for rung in climbed if rung.kind == "variant"]

    (variant,) = variants(OFFLOADED)
    assert set(variant.names) == {c.name for c in REAL}
    assert variant.options and variant.changes
    full = next(r for r in rungs.climb(REAL, OFFLOADED) if set(r.names) == set(variant.names))
    assert rungs.reference([full, variant], variant, [full]) is full
    assert not variants(CPU)
    assert not variants(Place(gpu=True, cpu_offload=True, muon=True, ranks=2))
    assert not variants(OFFLOADED, only=Only.ADD)
    assert not variants(OFFLOADED, names=["shared_rope_cache"])


def test_a_requirement_pulls_what_it_needs_before_it():
    # fsdp_unshard_async_op stands in ORDER; what it needs here does not.
    made = (contribution("new"), contribution("fsdp_unshard_async_op", ("new",)))
    assert order.sort(made) == ["new", "fsdp_unshard_async_op"]


def test_the_ladder_starts_at_pristine_and_ends_with_the_full_set_less_each():
    climbed = rungs.climb(CHAIN, CPU)
    assert [(r.label, r.kind) for r in climbed] == [
        ("pristine", "base"),
        ("pristine + cpu_device", "base"),
        ("+ shared_rope_cache", "add"),
        ("+ a", "add"),
        ("+ b", "add"),
        ("+ c", "add"),
        ("full set - cpu_device", "without"),
        ("full set - shared_rope_cache", "without"),
        ("full set - a", "without"),
        ("full set - b", "without"),
        ("full set - c", "without"),
    ]
    assert climbed[5].names == tuple(c.name for c in CHAIN)


def test_each_rung_adds_one_and_a_set_is_named_in_series_order():
    adding = [r for r in rungs.climb(REAL, OFFLOADED, only=Only.ADD)]
    series = [c.name for c in REAL]
    for below, rung in pairwise(adding):
        assert len(set(rung.names) - set(below.names)) == 1
        assert list(rung.names) == [name for name in series if name in rung.names]
    assert adding[-1].names == tuple(series)


def test_leaving_one_out_leaves_out_all_that_needs_it():
    rung = next(r for r in rungs.climb(CHAIN, CPU) if r.label == "full set - a")
    assert rung.names == ("cpu_device", "shared_rope_cache")
    assert rung.also_removed == ("b", "c")
    alone = next(r for r in rungs.climb(CHAIN, CPU) if r.label == "full set - c")
    assert alone.also_removed == ()


def test_chosen_names_are_added_after_what_they_require():
    climbed = rungs.climb(CHAIN, CPU, names=["b"])
    assert [r.label for r in climbed] == [
        "pristine",
        "pristine + cpu_device",
        "+ a",
        "+ b",
        "full set",
        "full set - b",
    ]


def test_a_few_that_are_added_end_with_the_full_set():
    """The last rung shows what the others are worth together."""
    climbed = rungs.climb(CHAIN, CPU, only=Only.ADD, names=["a"])
    assert [r.label for r in climbed][-2:] == ["+ a", "full set"]


def test_the_full_set_is_measured_where_only_without_is_asked_for():
    climbed = rungs.climb(CHAIN, CPU, only=Only.WITHOUT, names=["c"])
    assert [r.label for r in climbed] == ["full set", "full set - c"]


def test_the_full_set_can_be_measured_alone():
    assert [r.label for r in rungs.climb(CHAIN, OFFLOADED, only=Only.FULL)] == ["full set"]


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(UserError, match="did you mean cpu_device"):
        rungs.climb(CHAIN, CPU, names=["cpu_devise"])


@pytest.mark.parametrize("value", ["a,", ",", "a,,b"])
def test_names_between_commas_must_be_there(value):
    with pytest.raises(UserError, match="unknown contribution"):
        rungs.climb(CHAIN, CPU, names=[value])


def test_names_are_repeated_or_stand_between_commas():
    together = rungs.climb(CHAIN, CPU, names=["a, c", "cpu_device"])
    assert together == rungs.climb(CHAIN, CPU, names=["a", "c", "cpu_device"])


@pytest.mark.parametrize(
    ("config", "gpu", "options", "least"),
    [
        ("mini", False, (), ("cpu_device",)),
        ("mini", True, (), ()),
        ("mini", True, ("--training.enable_cpu_offload",), ("dtensor_cpu_rng",)),
        ("slice", True, (), ("dtensor_cpu_rng",)),
        ("slice", True, ("--training.no-enable-cpu-offload",), ()),
    ],
)
def test_the_least_that_starts_depends_on_where_the_weights_are(config, gpu, options, least):
    assert Place.of(catalog.find(config), gpu=gpu, options=options).least == least


def test_a_base_that_needs_nothing_is_pristine_alone():
    climbed = rungs.climb(CHAIN, Place(gpu=True, cpu_offload=False, muon=True), only=Only.ADD)
    assert [r.label for r in climbed][:2] == ["pristine", "+ cpu_device"]


def test_an_added_one_is_compared_with_the_last_below_that_ran():
    climbed = rungs.climb(CHAIN, CPU)
    by_label = {r.label: r for r in climbed}
    ran = [r for r in climbed if r.label not in ("pristine", "+ a")]

    def reference(label: str) -> Rung | None:
        return rungs.reference(climbed, by_label[label], ran)

    assert reference("pristine + cpu_device") is None
    assert reference("+ b") == by_label["+ shared_rope_cache"]  # a did not run
    assert reference("full set - b") == by_label["+ c"]


def test_one_left_out_is_not_compared_where_the_full_set_did_not_run():
    climbed = rungs.climb(CHAIN, CPU)
    ran = [r for r in climbed if r.label != "+ c"]
    without = next(r for r in climbed if r.kind == "without")
    assert rungs.reference(climbed, without, ran) is None


@pytest.mark.parametrize(
    ("name", "place", "why"),
    [
        ("flex_shard_muon", CPU, "AdamW"),
        ("flex_shard_muon", Place(gpu=False, cpu_offload=False, muon=False), ""),
        ("flex_shard_newton_schulz", OFFLOADED, "Gram"),
        ("flex_shard_newton_schulz", CPU, ""),
        ("dist_muon_batched_compute", CPU, "another order"),
        ("shared_rope_cache", CPU, ""),
    ],
)
def test_what_may_change_numbers(name, place, why):
    reason = order.changes(next(c for c in REAL if c.name == name), place)
    assert bool(reason) == bool(why)
    assert why in reason
