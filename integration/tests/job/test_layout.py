import pytest

from integration.job.layout import expert_parallel_degree, global_batch


@pytest.mark.parametrize(
    ("ranks", "batch", "experts"),
    # 3 does not divide 4: the batch grows to the next multiple. 5 and more: one sequence a rank.
    [(1, 4, 1), (2, 4, 2), (3, 6, 1), (4, 4, 2), (5, 5, 1), (8, 8, 2)],
)
def test_the_batch_is_the_smallest_multiple_of_the_ranks_from_four(ranks, batch, experts):
    assert global_batch(ranks) == batch
    assert expert_parallel_degree(ranks) == experts
