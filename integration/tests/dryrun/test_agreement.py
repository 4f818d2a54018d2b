"""What a dry run finds: by hand where it can be counted by hand, and beside the plan."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from integration.jobs import catalog
from integration.plan.params import Place, kinds, local_shape
from integration.tests.dryrun.runs import Ended, dryrun

GIB = 2**30
HIDDEN, EXPERT_HIDDEN, VOCAB = 6144, 1792, 256_000


# Each takes ten seconds of one core, most of them for imports.
RUNS = {
    # Three layers: two that prefetch one another, and what is only once in the model.
    "jupiter_1t": ("jupiter_1t", "--rank", "17", "--layers", "3"),
    "slice": ("slice", "--world", "2", "--rank", "1"),
    # The last stage of a pipeline, with tensor and expert parallelism and AdamW.
    "leonardo_mini": ("leonardo_mini", "--rank", "5"),
    # Six experts over four ranks, which FSDP pads to eight.
    "padded": ("slice", "--world", "8", "--layers", "2", "--experts", "12", "--rank", "7"),
    # 192 shards of an expert divide its 6,144 columns, not its 1,792 rows; replicas are no shards.
    "cut": ("jupiter_1t", "--world", "768", "--layers", "2", "--rank", "17"),
    "cut, replicas": ("jupiter_1t_hsdp", "--world", "3072", "--layers", "2", "--rank", "2000"),
    "placements": ("mini", "--world", "4", "--placements"),
    "less": (
        *("jupiter_1t", "--layers", "2"),
        *("--without", "shared_rope_cache"),
        *("--without", "embedding_skip_backward_gather"),
        *("--without", "fsdp_unshard_async_op"),
    ),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Ended]:
    # pytest makes the first of its folders for one thread at a time.
    folders = [tmp_path_factory.mktemp("run") for _ in RUNS]
    with ThreadPoolExecutor(max_workers=2) as two:
        ended = two.map(lambda folder, run: dryrun(folder, *run), folders, RUNS.values())
        return dict(zip(RUNS, ended, strict=True))


@pytest.fixture(scope="module")
def jupiter(runs) -> Ended:
    return runs["jupiter_1t"]


def test_all_checks_hold_and_the_plan_agrees(jupiter):
    assert jupiter.code == 0, jupiter.stderr
    assert not jupiter.broken()
    assert len(jupiter.found["checks"]) == 5
    assert not jupiter.disagreements()
    assert jupiter.found["cost"]["placements"]["peak_host_bytes"] < 2 * GIB
    assert jupiter.found["cost"]["whole"]["peak_host_bytes"] < 2 * GIB


def test_placements_of_one_rank_of_384(jupiter):
    rows = {row["name"]: row for row in jupiter.found["placements"]}
    expert = rows["layers.*.moe.routed_experts.inner_experts.w1_EFD"]
    assert expert["count"] == 3
    assert expert["mesh"] == "efsdp 96 x ep 4"
    assert expert["local_shape"] == [1, EXPERT_HIDDEN, HIDDEN]  # one whole expert
    embedding = rows["tok_embeddings.weight"]
    assert embedding["shape"] == [VOCAB, HIDDEN]
    assert embedding["local_shape"] == [667, HIDDEN]  # 256,000 / 384, rounded up
    assert "layers.*.moe.routed_experts.inner_experts.w1_EFD" in jupiter.stdout


def test_bytes_counted_by_hand(jupiter):
    # 96 of 384 experts, gathered in bf16 over 96 ranks, in each of three layers.
    experts = 3 * 96 * 3 * EXPERT_HIDDEN * HIDDEN * 2 * 95 // 96
    assert jupiter.received("all-gather, forward", "experts") == experts
    assert jupiter.received("all-gather, backward", "experts") == experts
    assert jupiter.received("reduce-scatter", "experts") == 2 * experts  # fp32
    # Each of 65,536 tokens to 8 experts and back, three quarters of them on other ranks; again in
    # recomputation and in backward.
    tokens = 65_536 * 8 * HIDDEN * 2 * 3 // 4
    assert jupiter.received("expert all-to-all") == 3 * 3 * 2 * tokens
    # Embedding and head in forward; in backward the head alone.
    table = 667 * 384 * HIDDEN * 2 * 383 / 384
    difference = jupiter.received("all-gather, forward", "dense") - jupiter.received(
        "all-gather, backward", "dense"
    )
    assert difference == pytest.approx(table, rel=1e-6)


def test_memory_counted_by_hand(jupiter):
    boundary = 65_536 * HIDDEN * 2
    layer = 2 * (96 * 3 * EXPERT_HIDDEN * HIDDEN)
    peaks = jupiter.found["peaks"]
    # The loss begins with three layers' inputs, and what the last norm gets, saves and gives.
    assert 3 * boundary < peaks["loss"]["boundary activations"] < 6 * boundary
    weights = peaks["backward"]["gathered weights and prefetch"]
    assert weights == pytest.approx(2 * layer, rel=0.10)  # and the dense parameters
    assert jupiter.found["memory"]["RoPE caches"] == 65_536 * 256 * 4
    # At the worst moment of backward: two layers' weights, a layer's gradients, recomputation.
    beside = {pair["name"]: pair for pair in jupiter.found["beside_the_plan"]["peaks"]}
    assert beside["backward"]["plan"] == pytest.approx(beside["backward"]["found"], rel=0.05)


@pytest.mark.parametrize("config", ["slice", "leonardo_mini", "padded", "cut", "cut, replicas"])
def test_the_plan_agrees_on_other_layouts(config, runs):
    ended = runs[config]
    assert ended.code == 0, ended.stderr
    assert not ended.disagreements()
    assert ended.received("expert all-to-all")


@pytest.mark.parametrize("config", ["jupiter_1t", "cut", "cut, replicas"])
def test_each_shard_has_the_shape_that_is_planned(config, runs):
    rows = {row["name"]: row for row in runs[config].found["placements"]}
    ranks, rank = runs[config].found["world"], runs[config].found["rank"]
    job = catalog.find(runs[config].found["config"]).on(ranks)
    place = Place.of(job, rank)
    for kind in kinds(job):
        layer = "layers.*." if kind.role in ("layer", "expert") else ""
        expert = kind.role == "expert"
        planned = local_shape(job, kind, place.efsdp if expert else place.dp_shard)
        planned = planned[:1] if kind.columns == 1 else planned
        assert rows[layer + kind.name]["local_shape"] == list(planned)
    if config != "jupiter_1t":
        w1, w2 = (
            rows[f"layers.*.moe.routed_experts.inner_experts.{w}"] for w in ("w1_EFD", "w2_EDF")
        )
        assert (w1["local_shape"], w2["local_shape"]) == ([96, 1792, 32], [96, 32, 1792])


def test_padding_is_gathered_as_well(runs):
    one = 3 * EXPERT_HIDDEN * HIDDEN * 2
    # Of eight, each rank has two: it receives six, of which two are padding, in two layers.
    assert runs["padded"].received("all-gather, forward", "experts") == 2 * 6 * one


def test_the_sums_of_the_table_have_no_boundary_activations(jupiter):
    forward = jupiter.found["peaks"]["forward"]
    assert forward["boundary activations"] == pytest.approx(2 * 65_536 * HIDDEN * 2, rel=0.01)
    assert "activation_offload keeps all but three of them on the host" in jupiter.stdout
    assert sum(forward.values()) - forward["boundary activations"] < 48 * GIB


def test_placements_alone(runs):
    ended = runs["placements"]
    assert ended.code == 0, ended.stderr
    assert set(ended.found["cost"]) == {"placements"}
    assert "collectives" not in ended.found
    assert not ended.disagreements()


def test_what_a_contribution_mends_is_broken_without_it(runs):
    ended = runs["less"]
    assert ended.code == 1
    assert ended.broken() == {
        "RoPE stored once",
        "no all-gather of the embedding in backward",
        "unshard_async_op set on every FSDP group",
    }
    assert ended.stderr.startswith("error: not so: ")
    assert "Traceback" not in ended.stderr
    # The plan without them agrees as well.
    assert not ended.disagreements()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "arguments",
    [
        ("jupiter_1t", "--rank", "17"),
        ("jupiter_1t_hsdp", "--rank", "700"),
        ("leonardo_1t", "--rank", "17"),
        ("leonardo_small", "--rank", "17"),
        ("leonardo_small", "--rank", "40"),
    ],
    ids=lambda arguments: f"{arguments[0]}-{arguments[2]}",
)
def test_whole_models_within_the_limits(arguments, tmp_path):
    """The published sizes: placements in 30 s and 2 GiB, all in a minute and 4 GiB.

    Seconds are of processor time, as others may have the cores.
    """
    ended = dryrun(tmp_path, *arguments)
    print(ended.stdout)
    assert ended.code == 0, ended.stderr
    assert not ended.broken()
    assert not ended.disagreements()
    cost = ended.found["cost"]
    assert cost["placements"]["processor_seconds"] < 30
    assert cost["placements"]["peak_host_bytes"] < 2 * GIB
    assert cost["whole"]["processor_seconds"] < 60
    assert cost["whole"]["peak_host_bytes"] < 4 * GIB
