"""What a cell is held against: the same task, each method with its own learning rate."""

import pytest

from asfl_privacy.reporting.cells import gather_cells
from asfl_privacy.reporting.comparison import check_task, reference_of, same_task, shared_task


def test_a_reference_may_have_another_learning_rate(fedavg, gaussian):
    """Catches: looking for the learning rate of the noised cell."""
    reference, noised = gather_cells([fedavg(lr=0.3), gaussian(lr=0.05)])
    assert reference_of(noised, [reference, noised], method="fedavg") is reference


@pytest.mark.parametrize(
    "change",
    [
        {"data": "mnist5k"},
        {"partition": "iid"},
        {"clients": 20},
        {"cohort": 10},
        {"model": "lenet"},
        {"rounds": 10},
        {"full_steps": 9},
        {"options": "evaluate_on validation"},
    ],
)
def test_a_reference_is_of_the_same_task(fedavg, gaussian, change):
    cells = gather_cells([fedavg(**change), gaussian()])
    assert reference_of(cells[1], cells, method="fedavg") is None
    assert not same_task(*cells)
    with pytest.raises(ValueError, match=r" (is|are) "):
        shared_task(cells)


def test_of_several_references_the_one_of_the_same_layer_steps_and_rate_is_taken(unnoised, fedavg, gaussian):
    cells = gather_cells(
        [
            unnoised(exchange_layer="conv1"),
            unnoised(exchange_layer="conv2"),
            unnoised(exchange_layer="conv2", tail_steps=6, full_steps=4),
            fedavg(lr=0.05),
            fedavg(lr=0.3),
            gaussian(exchange_layer="conv2"),
        ]
    )
    noised = cells[-1]
    asfl, plain = (reference_of(noised, cells, method=method) for method in ("asfl", "fedavg"))
    assert (asfl.settings["exchange_layer"], asfl.settings["tail_steps"]) == ("conv2", 4)
    assert plain.settings["lr"] == 0.05
    others = [cell for cell in cells if cell.settings["lr"] == 0.05 or cell.is_noised]
    assert reference_of(gather_cells([gaussian(exchange_layer="conv3")])[0], others, method="asfl") is None
    unclear = gather_cells([fedavg(lr=0.1), fedavg(lr=0.3), gaussian()])
    assert reference_of(unclear[-1], unclear, method="fedavg") is None


def test_a_noised_cell_is_no_reference_and_no_baseline(fedavg, gaussian):
    private = gaussian(method="fedavg", exchange_layer=None, tail_steps=0, full_steps=10, placement="updates")
    cells = gather_cells([private, gaussian()])
    assert reference_of(cells[0], cells, method="fedavg") is None
    with pytest.raises(ValueError, match="fedavg has 0 cells"):
        check_task(cells, baseline="fedavg")
    assert dict(check_task(gather_cells([private, fedavg()]), baseline="fedavg"))["local steps"] == "10"
