"""The grid holds what was asked, references first, nothing twice."""

from collections import Counter

from asfl_privacy.cells import make_cells
from asfl_privacy.config import SweepConfig, load_config


def cells_of(**overrides):
    return make_cells(load_config(None, overrides=overrides))


def budgets(cells):
    return list(dict.fromkeys((c.target.epsilon, c.target.total_epsilon, c.target.delta) for c in cells if c.target))


def test_the_default_gaussian_grid_is_four_epsilons_and_a_delta_ladder():
    cells = cells_of()
    ladder = [(4.0, None, delta) for delta in (1e-4, 1e-7, 1e-10)]
    assert budgets(cells) == [(epsilon, None, 1e-5) for epsilon in (1.0, 4.0, 16.0, 64.0)] + ladder
    assert Counter(cell.label for cell in cells).most_common()[0][1] == 3  # seeds
    assert [cell.method for cell in cells[:6]] == ["asfl"] * 3 + ["fedavg"] * 3
    assert all(cell.target is None for cell in cells[:6])


def test_the_default_laplace_grid_varies_epsilon_at_delta_zero():
    assert budgets(cells_of(mech="laplace")) == [(epsilon, None, 0.0) for epsilon in (0.25, 1.0, 4.0, 16.0)]


def test_both_kinds_of_epsilon_and_every_delta_are_crossed():
    found = budgets(cells_of(epsilon=["1", "2"], total_epsilon="8", delta=["1e-5", "1e-6"], seeds=1))
    assert found == [
        (1, None, 1e-5),
        (1, None, 1e-6),
        (2, None, 1e-5),
        (2, None, 1e-6),
        (None, 8, 1e-5),
        (None, 8, 1e-6),
    ]


def test_a_total_alone_replaces_the_default_grid():
    assert budgets(cells_of(total_epsilon="8")) == [(None, 8.0, 1e-5)]


def test_delta_belongs_to_the_gaussian_alone_in_a_mixed_grid():
    cells = cells_of(mech=["gaussian", "laplace"], epsilon="1", delta="1e-6", seeds=1)
    assert [(c.mech, c.target.delta, c.target.norm) for c in cells if c.target] == [
        ("gaussian", 1e-6, "2"),
        ("laplace", 0.0, "1"),
    ]


def test_every_grid_field_is_crossed():
    cells = cells_of(
        epsilon="1", radius=["1", "2"], norm=["1", "2"], placement=["input", "exchange"],
        exchange_layer=["conv1", "conv2"], seeds=2,
    )  # fmt: skip
    assert len({cell.label for cell in cells if cell.target}) == 16
    assert len(cells) == 2 * (16 + 2 + 1)


def test_what_is_asked_twice_is_run_once():
    assert len(cells_of(epsilon=["1", "1.0"], seeds=1)) == 3


def test_fedavg_alone_is_one_reference_cell():
    assert [(c.method, c.mech) for c in cells_of(method="fedavg", seeds=1)] == [("fedavg", "none")]


def test_seeds_are_counted_from_the_first():
    assert sorted({cell.seed for cell in cells_of(seed=5, seeds=2)}) == [5, 6]


def test_an_exchange_layer_is_crossed_with_the_methods_that_cut_the_network_alone():
    """Catches runs of one method that differ in a name that nothing reads."""
    config = SweepConfig(
        method=["asfl", "fedproto", "splitfed-v1", "scaffold"], mech="none", seeds=1, exchange_layer=["conv1", "conv2"]
    )
    found = [(cell.method, cell.exchange_layer) for cell in make_cells(config)]
    assert found == [
        ("asfl", "conv1"),
        ("asfl", "conv2"),
        ("fedavg", None),
        ("fedproto", None),
        ("splitfed-v1", "conv1"),
        ("splitfed-v1", "conv2"),
        ("scaffold", None),
    ]


def test_share_yes_puts_activation_sharing_before_every_method():
    config = SweepConfig(method=["fedavg", "scaffold", "asfl"], mech="none", share="yes")
    assert config.methods == ("asfl", "scaffold+sharing")
    assert config.shares_activations
