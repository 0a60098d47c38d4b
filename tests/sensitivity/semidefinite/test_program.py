"""Programs cut to some entries against the whole, and matrices in whichever form their products are fast."""

import numpy as np
import pytest
from scipy import sparse

from sensitivity.semidefinite.constraints import Slopes, WholeNorm, Windows
from sensitivity.semidefinite.program import Program, num_stored, restricted, suited


def random_program(seed: int) -> Program:
    random = np.random.default_rng(seed)
    pattern = np.array([[1.0, 1.0, 0.0, 0.0], [0.0, 1.0, 1.0, 1.0]])

    def matrix(rows: int, columns: int) -> sparse.csr_array:
        return sparse.csr_array(random.normal(size=(rows, columns)) * (random.random((rows, columns)) < 0.6))

    return Program(
        num_in=5,
        num_out=3,
        reads=(
            {0: matrix(4, 5)},
            {0: matrix(4, 5), 1: matrix(4, 4)},
            {2: matrix(3, 2)},
            {1: matrix(3, 4), 3: matrix(3, 3)},
        ),
        constraints=(
            Slopes(low=-random.random(4), high=random.random(4)),
            Windows(pattern=sparse.csr_array(pattern), counts=np.array([2.0, 3.0])),
            WholeNorm(factor=2.0, size=3, num_read=3),
        ),
    )


def read(program: Program, k: int, z: list[np.ndarray]) -> np.ndarray:
    """What reader k reads, by dense products."""
    rows = program.constraints[k].num_read if k < len(program.constraints) else program.num_out
    dense = {i: A if isinstance(A, np.ndarray) else A.toarray() for i, A in program.reads[k].items()}
    return sum((A @ z[i] for i, A in dense.items()), np.zeros(rows))


@pytest.mark.parametrize("seed", range(6))
def test_a_restricted_program_reads_what_the_whole_one_does_where_all_else_is_zero(seed: int) -> None:
    """Mutants: rows and columns swapped, a reader's rows taken for another's, a source left out."""
    program, random = random_program(seed), np.random.default_rng(seed)
    kept = [np.flatnonzero(random.random(size) < 0.6) for size in program.sizes]
    counts = [*(constraint.num_read for constraint in program.constraints), program.num_out]
    rows = [np.flatnonzero(random.random(count) < 0.7) for count in counts]
    rows[0] = kept[1]  # slopes write where they read
    small = restricted(program, kept, rows=rows)
    assert small.sizes == tuple(part.size for part in kept)
    assert small.num_out == rows[-1].size
    short = [random.normal(size=part.size) for part in kept]
    whole = [np.zeros(size) for size in program.sizes]
    for values, part, some in zip(whole, kept, short, strict=True):
        values[part] = some
    for k in range(4):
        assert np.allclose(read(small, k, short), read(program, k, whole)[rows[k]], rtol=1e-14, atol=0.0)
    for constraint, whole_one, written in zip(small.constraints, program.constraints, kept[1:], strict=True):
        assert type(constraint) is type(whole_one)
        assert constraint.size == written.size
    assert [constraint.num_read for constraint in small.constraints] == [part.size for part in rows[:-1]]


def test_sizes_and_entries_count_what_products_read() -> None:
    dense = np.array([[1.0, 0.0], [0.0, 2.0]])
    program = Program(
        num_in=2,
        num_out=1,
        reads=({0: dense}, {1: sparse.csr_array(np.array([[0.0, 3.0]]))}),
        constraints=(Slopes(low=np.zeros(2), high=np.ones(2)),),
    )
    assert program.sizes == (2, 2)
    assert program.num_entries == 5
    assert num_stored(sparse.csr_array(dense)) == 2


@pytest.mark.parametrize("density", [0.0, 0.01, 0.5, 1.0])
def test_a_matrix_is_the_same_in_the_form_that_suits_it(density: float) -> None:
    random = np.random.default_rng(0)
    A = sparse.csr_array(random.normal(size=(40, 30)) * (random.random((40, 30)) < density))
    made = suited(A)
    assert isinstance(made, np.ndarray) == (density > 0.1)
    assert np.array_equal(made if isinstance(made, np.ndarray) else made.toarray(), A.toarray())
