"""In which order rows come."""

from __future__ import annotations

from rlstreams.workers.dataset.order import Order


def test_every_epoch_has_every_row_once_in_its_own_order() -> None:
    """Two epochs are two permutations."""
    order = Order(seed=3, num_rows=50)
    places = [order.at(position) for position in range(100)]
    epochs = [[row for epoch, row in places if epoch == number] for number in (0, 1)]
    assert [list(range(50))] * 2 == [sorted(rows) for rows in epochs]
    assert epochs[0] != epochs[1]
    assert epochs[0] != [row for _, row in map(Order(4, 50).at, range(50))]


def test_the_order_is_the_same_on_every_machine() -> None:
    """A run that is resumed elsewhere goes on where it was."""
    order = Order(seed=7, num_rows=6)
    assert [order.at(position) for position in range(3)] == [(0, 4), (0, 1), (0, 3)]


def test_the_order_goes_on_behind_what_was_issued() -> None:
    """The position after rows of an epoch is behind the last of them, wherever that is."""
    order = Order(seed=3, num_rows=5)
    rows = [row for _, row in map(order.at, range(5))]
    assert order.after(0, []) == 0
    assert order.after(0, {rows[0], rows[2]}) == 3
    assert order.after(2, set(rows)) == 15
