"""Tensors side by side in memory are found and joined, others are not."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from shard_comm import SoloComm
from shard_flat import shard_tensor
from shard_optim._runs import find_runs, flat_piece, is_dense, join, piece_of

sizes_of = st.lists(st.integers(0, 7), min_size=1, max_size=8)


def test_worked_example() -> None:
    buffer, other, elsewhere = torch.arange(9.0), torch.arange(5.0), torch.arange(4.0)
    p = [buffer[0:3], buffer[3:5], buffer[5:9]]
    g = [other[0:3], other[3:5], elsewhere[0:4]]
    assert find_runs([p, g]) == [[0, 1], [2]]
    assert find_runs([p]) == [[0, 1, 2]]
    assert find_runs([g]) in ([[0, 1], [2]], [[2], [0, 1]])


@given(sizes=sizes_of, gaps=st.data())
def test_random_cuts(sizes: list[int], gaps: st.DataObject) -> None:
    """Rows join exactly where neither column has a gap between them."""
    columns: list[list[torch.Tensor]] = []
    parted: set[int] = set()
    for _ in range(gaps.draw(st.integers(1, 3))):
        buffer = torch.arange(float(sum(sizes) + 3 * len(sizes)))
        at, column = 0, []
        for row, size in enumerate(sizes):
            if gaps.draw(st.booleans()):
                at += 2
                parted.add(row)
            column.append(buffer[at : at + size])
            at += size
        columns.append(column)
    expected: list[list[int]] = []
    broken = True
    for row, size in enumerate(sizes):
        broken = broken or row in parted
        if not size:
            continue
        if broken:
            expected.append([])
        expected[-1].append(row)
        broken = False
    found = find_runs(columns)
    assert found == expected
    for rows in found:
        for column in columns:
            flat = join([column[row] for row in rows])
            assert torch.equal(flat, torch.cat([column[row] for row in rows]))
            assert flat.data_ptr() == column[rows[0]].data_ptr()


@given(order=st.permutations(range(6)))
def test_rows_come_in_the_order_of_memory(order: list[int]) -> None:
    parts = list(torch.arange(12.0).split(2))
    (rows,) = find_runs([[parts[i] for i in order]])
    assert [order[row] for row in rows] == [0, 1, 2, 3, 4, 5]


def test_neighbours_that_do_not_join() -> None:
    buffer = torch.arange(8.0)
    assert find_runs([[buffer[0:4], buffer[4:8].view(torch.int32)]]) == [[0], [1]]  # dtype
    assert find_runs([[buffer[0:4:2], buffer[4:8]]]) == [[0], [1]]  # holes
    assert find_runs([[buffer[0:4], buffer[0:4]]]) == [[0], [1]]  # the same memory
    assert find_runs([[buffer[0:4:2], buffer[2:6:2]]]) == [[0], [1]]
    halves = [buffer[0:4], buffer[4:8]]
    assert find_runs([halves, halves[::-1]]) == [[0], [1]]  # one column runs backwards


def test_pieces() -> None:
    sharded = shard_tensor(torch.arange(6.0).view(2, 3), comm=SoloComm(), name="w")
    assert piece_of(sharded) is sharded.local
    assert flat_piece(sharded).tolist() == [0, 1, 2, 3, 4, 5]
    plain = torch.nn.Parameter(torch.arange(6.0).view(2, 3).t())
    assert piece_of(plain) is plain
    assert flat_piece(plain).tolist() == [0, 1, 2, 3, 4, 5]  # as it lies in memory
    assert flat_piece(plain).data_ptr() == plain.data_ptr()
    assert not flat_piece(plain).requires_grad


def test_dense() -> None:
    whole = torch.zeros(2, 3, 4)
    assert is_dense(whole)
    assert is_dense(whole.permute(2, 0, 1))
    assert is_dense(whole[:, :1].expand(2, 1, 4)[:1])
    assert is_dense(torch.zeros(0, 3))
    assert not is_dense(whole[:, ::2])
    assert not is_dense(torch.zeros(3, 1).expand(3, 2))
    assert not is_dense(torch.zeros(8)[::2])
