"""ParallelConfig against the legal sizes and their ranks, written out."""

import itertools

import pytest

from cptools.parallel_config import ParallelConfig, RankCoords

SIZES = (1, 2, 3, 4, 6, 8)


def is_legal(pcp: int, dcp: int, tp: int) -> bool:
    if pcp == tp == 1:
        return True
    return dcp in (1, pcp, pcp * tp) or (tp == 1 and pcp % dcp == 0)


LEGAL = [
    ParallelConfig(pcp=pcp, dcp=dcp, tp=tp, dp=dp)
    for pcp, dcp, tp, dp in itertools.product(SIZES, range(1, 9), SIZES, (1, 2, 3))
    if is_legal(pcp, dcp, tp) and pcp * tp <= 8
]


def test_exactly_the_legal_dcp_sizes_are_accepted():
    for pcp, dcp, tp in itertools.product(SIZES, range(1, 50), SIZES):
        if is_legal(pcp, dcp, tp):
            ParallelConfig(pcp=pcp, dcp=dcp, tp=tp)
        else:
            with pytest.raises(ValueError, match=f"dcp={dcp} does not go with pcp={pcp}, tp={tp}"):
                ParallelConfig(pcp=pcp, dcp=dcp, tp=tp)


@pytest.mark.parametrize("config", LEGAL, ids=str)
def test_sizes_and_coordinates(config):
    pure = config.pcp == config.tp == 1
    replica = config.dcp if pure else config.pcp * config.tp
    assert config.block_size == replica
    assert config.world_size == config.dp * replica
    assert config.kv_copies_per_block * config.dcp == replica
    places = itertools.product(range(config.dp), range(config.pcp), range(config.tp))
    if pure:
        expected = [RankCoords(dp, 0, 0, n, 0) for dp in range(config.dp) for n in range(config.dcp)]
    elif config.dcp == config.pcp * config.tp:
        expected = [RankCoords(dp, pcp, tp, tp * config.pcp + pcp, 0) for dp, pcp, tp in places]
    else:
        expected = [RankCoords(dp, pcp, tp, pcp % config.dcp, 0) for dp, pcp, tp in places]
    assert [config.rank_coords(rank) for rank in range(config.world_size)] == expected


@pytest.mark.parametrize("config", LEGAL, ids=str)
def test_groups_hold_every_rank_once_at_its_group_rank(config):
    at = [config.rank_coords(rank) for rank in range(config.world_size)]
    for name in ("dp", "pcp", "tp", "dcp"):
        groups = getattr(config, f"{name}_groups")()
        assert sorted(sum(groups, ())) == list(range(config.world_size))
        assert list(groups) == sorted(groups)
        for group in groups:
            assert len(group) == getattr(config, name)
            assert [getattr(at[rank], f"{name}_rank") for rank in group] == list(range(len(group)))
    for group in config.dp_groups():
        assert len({(at[r].pcp_rank, at[r].tp_rank, at[r].dcp_rank) for r in group}) == 1
    for group in config.pcp_groups():
        assert len({(at[r].dp_rank, at[r].tp_rank) for r in group}) == 1
    for group in config.tp_groups():
        assert len({(at[r].dp_rank, at[r].pcp_rank) for r in group}) == 1
    for group in config.dcp_groups():
        assert len({at[r].dp_rank for r in group}) == 1
    assert len(config.dcp_groups()) == config.dp * config.kv_copies_per_block


@pytest.mark.parametrize(
    "sizes, groups",
    [
        ({"pcp": 4, "dcp": 2}, ((0, 1), (2, 3))),
        ({"pcp": 2, "dcp": 2, "tp": 2}, ((0, 2), (1, 3))),
        ({"pcp": 2, "dcp": 4, "tp": 2}, ((0, 2, 1, 3),)),
        ({"dcp": 2, "tp": 2}, ((0, 1),)),
        ({"dcp": 2, "dp": 2}, ((0, 1), (2, 3))),
        ({"pcp": 2, "tp": 2}, ((0,), (1,), (2,), (3,))),
    ],
)
def test_known_dcp_groups(sizes, groups):
    assert ParallelConfig(**sizes).dcp_groups() == groups


def test_experts_are_split_over_nothing_or_the_whole_world():
    config = ParallelConfig(pcp=2, tp=2, dp=2, ep=8)
    assert config.ep_groups() == (tuple(range(8)),)
    assert [config.rank_coords(rank).ep_rank for rank in range(8)] == list(range(8))
    assert ParallelConfig(pcp=2).ep_groups() == ((0,), (1,))
    assert ParallelConfig(dcp=4, ep=4).ep_groups() == ((0, 1, 2, 3),)
    for ep in (2, 4, 16):
        with pytest.raises(ValueError, match=f"ep={ep} must be 1 or the whole world of 8 ranks"):
            ParallelConfig(pcp=2, tp=2, dp=2, ep=ep)


def test_tp_4_with_dcp_2_is_refused_with_the_legal_sizes():
    with pytest.raises(ValueError, match=r"dcp=2 .* tp=4: legal are \[1, 4\]"):
        ParallelConfig(dcp=2, tp=4)
    with pytest.raises(ValueError, match=r"dcp=3 .* pcp=8, tp=1: legal are \[1, 2, 4, 8\]"):
        ParallelConfig(pcp=8, dcp=3)


@pytest.mark.parametrize("name", ["pcp", "dcp", "tp", "ep", "dp"])
@pytest.mark.parametrize("value", [0, -1, 2.0, None])
def test_sizes_below_one_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name}={value}"):
        ParallelConfig(**{name: value})


@pytest.mark.parametrize("rank", [-1, 4])
def test_ranks_outside_the_world_are_refused(rank):
    with pytest.raises(ValueError, match=f"rank={rank} is outside the world of 4 ranks"):
        ParallelConfig(pcp=2, dp=2).rank_coords(rank)


def test_models_that_do_not_divide_are_refused():
    config = ParallelConfig(tp=4, pcp=2, ep=8)
    config.validate_model(num_heads=64, num_experts=256)
    with pytest.raises(ValueError, match="tp=4 must divide num_heads=6"):
        config.validate_model(num_heads=6, num_experts=256)
    with pytest.raises(ValueError, match="ep=8 must divide num_experts=12"):
        config.validate_model(num_heads=64, num_experts=12)
