"""No multipliers, however bad, bound a program below its true largest output; and rounding is covered, checked exactly."""

import itertools
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from scipy import sparse

from sensitivity.semidefinite import response
from sensitivity.semidefinite.constraints import Constraint, Slopes, WholeNorm, Windows
from sensitivity.semidefinite.lifting import Multipliers, multipliers
from sensitivity.semidefinite.program import Matrix, Program
from sensitivity.semidefinite.response import columns_up, norm_up, response_flops

SIX = [(1.0, 1.0), (1.0, 2.0), (2.0, 1.0), (2.0, 2.0), (math.inf, 1.0), (math.inf, 2.0)]
WIDENING = 2e-4  # the one that exact checks use
MAX_CASES = 600  # secants that are tried; a random part where there are more


def dense(A: Matrix) -> np.ndarray:
    return A if isinstance(A, np.ndarray) else A.toarray()


def secants(constraint: Constraint, random: np.random.Generator) -> list[np.ndarray]:
    """Matrices whose hull holds every secant: ends of the slopes, one entry per window; some rotations of a whole norm."""
    if isinstance(constraint, Slopes):
        ends = [sorted({a, b}) for a, b in zip(constraint.low, constraint.high, strict=True)]
        return [np.diag(d) for d in itertools.product(*ends)]
    if isinstance(constraint, Windows):
        rows = []
        for row, count in zip(constraint.pattern.toarray(), constraint.counts, strict=True):
            rows.append(
                [np.eye(row.size)[w] for w in np.flatnonzero(row)] + [np.zeros(row.size)] * int(count > row.sum())
            )
        return [np.stack(rows_chosen) for rows_chosen in itertools.product(*rows)]
    side = max(constraint.size, constraint.num_read)
    turns = [np.linalg.qr(random.normal(size=(side, side)))[0] for _ in range(5)]
    return [constraint.factor * Q[: constraint.size, : constraint.num_read] for Q in turns]


def jacobian(program: Program, chosen: tuple[np.ndarray, ...]) -> np.ndarray:
    written = [np.eye(program.num_in)]
    for k, terms in enumerate(program.reads):
        size = program.num_out if k == len(chosen) else program.constraints[k].num_read
        read = sum((dense(A) @ written[i] for i, A in terms.items()), np.zeros((size, program.num_in)))
        written.append(chosen[k] @ read if k < len(chosen) else read)
    return written[-1]


def jacobians(program: Program, random: np.random.Generator) -> list[np.ndarray]:
    """Of all corners of the secants: norms are convex in each secant, so the largest is at one."""
    choices = [secants(constraint, random) for constraint in program.constraints]
    if math.prod(len(choice) for choice in choices) <= MAX_CASES:
        return [jacobian(program, chosen) for chosen in itertools.product(*choices)]
    picks = [tuple(choice[random.integers(len(choice))] for choice in choices) for _ in range(MAX_CASES // 5)]
    return [jacobian(program, chosen) for chosen in picks]


def norm(J: np.ndarray, p: float, q: float) -> float:
    if p == 2.0 and q == 2.0:
        return float(np.linalg.norm(J, 2))
    if p == 2.0:
        J, q = J.T, 2.0  # 2→1 of J is ∞→2 of its transpose
    signs = np.array(list(itertools.product([1.0, -1.0], repeat=J.shape[1]))).T
    return float(np.linalg.norm(J @ signs, ord=q, axis=0).max())


def bound(program: Program, found: Multipliers, p: float, q: float) -> np.ndarray | None:
    """One bound per unit vector for p = 1, else one."""
    made = columns_up(program, found, q=q) if p == 1.0 else norm_up(program, found, p=p, q=q)
    return None if made is None else np.atleast_1d(made)


def truth(Js: list[np.ndarray], p: float, q: float) -> np.ndarray:
    if p == 1.0:
        return np.max([np.linalg.norm(J, ord=q, axis=0) for J in Js], axis=0)
    return np.array([max(norm(J, p, q) for J in Js)])


def random_program(seed: int) -> Program:
    """Any graph of up to 3 knots: skips, branches that end nowhere, rows and columns of zeros, entries far apart."""
    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> Matrix:
        A = random.normal(size=(rows, columns)) * 10.0 ** random.choice([-3, 0, 0, 0, 3])
        if random.random() < 0.4:
            A *= random.random(A.shape) < 0.6
            A[random.integers(rows)] = 0.0
        return A if random.random() < 0.5 else sparse.csr_array(A)

    sizes = [int(random.integers(1, 5))]
    reads: list[dict[int, Matrix]] = []
    constraints: list[Constraint] = []
    for k in range(int(random.integers(0, 4)) + 1):
        sources = [i for i in range(k + 1) if random.random() < 0.6] or [k]
        rows = int(random.integers(1, 4))
        reads.append({i: matrix(rows, sizes[i]) for i in sources})
        kind = random.integers(4)
        if kind < 2:
            low = random.normal(size=rows) * random.choice([0.0, 0.1, 1.0])
            constraint: Constraint = Slopes(
                low=low, high=low + np.abs(random.normal(size=rows)) * random.choice([0.0, 1e-9, 1.0, 3.0])
            ).widened()
        elif kind == 2:
            pattern = random.random((int(random.integers(1, 3)), rows)) < 0.6
            pattern[:, 0] |= ~pattern.any(axis=1)
            counts = pattern.sum(axis=1) + random.integers(0, 2, len(pattern)) * 1.0
            constraint = Windows(pattern=sparse.csr_array(pattern * 1.0), counts=counts)
        else:
            factor = abs(random.normal()) * 10.0 ** random.choice([-2, 0, 2])
            constraint = WholeNorm(factor=float(factor), size=int(random.integers(1, 4)), num_read=rows)
        constraints.append(constraint)
        sizes.append(constraint.size)
    constraints.pop()
    sizes.pop()
    return Program(
        num_in=sizes[0],
        num_out=dense(next(iter(reads[-1].values()))).shape[0],
        reads=tuple(reads),
        constraints=tuple(constraints),
    )


def spoiled(found: Multipliers, random: np.random.Generator, *, p: float, q: float) -> Multipliers:
    """The same multipliers, each times a random power of ten."""
    reach = float(random.choice([0.05, 0.3, 1.0, 3.0, 6.0]))

    def moved(values: np.ndarray) -> np.ndarray:
        return values * 10.0 ** random.uniform(-reach, reach, values.shape)

    return Multipliers(
        knots=tuple(moved(values) for values in found.knots),
        source=moved(found.source) if p == math.inf else found.source,
        output=moved(found.output) if q == 1.0 else found.output,
        value=found.value * 10.0 ** int(random.integers(-3, 4)),
    )


@pytest.mark.parametrize("seed", range(36))
def test_no_multipliers_bound_a_program_below_its_secants(seed: int) -> None:
    """Mutants: a sign, a half, a dropped term of R or of F, columns of H for another's, scales forgotten, Σ 1/w for Σ w."""
    random, program, proven = np.random.default_rng(seed), random_program(seed), 0
    Js = jacobians(program, random)
    if not max(np.abs(J).max() for J in Js) > 0.0:
        return
    for p, q in SIX:
        found = multipliers(program, p=2.0 if p == 1.0 else p, q=q, steps=int(random.integers(1, 25)))
        worst = truth(Js, p, q)
        for tried in (found, spoiled(found, random, p=p, q=q), spoiled(found, random, p=p, q=q)):
            value = bound(program, tried, p, q)
            if value is not None:
                proven += 1
                assert (value >= worst * (1 - 1e-13)).all()
    assert proven > 0 or program.constraints


def relu_chain(seed: int, *, num_in: int) -> Program:
    random = np.random.default_rng(seed)
    sizes = (num_in, 5, 4)
    last = [0.3 * random.normal(size=(3, size)) for size in sizes]  # every source is also read by the output
    slopes = [Slopes(low=np.zeros(n), high=np.ones(n)) for n in sizes[1:]]
    return Program(
        num_in=num_in,
        num_out=3,
        reads=(*({i: random.normal(size=(sizes[i + 1], sizes[i]))} for i in range(2)), dict(enumerate(last))),
        constraints=tuple(slopes),
    )


@pytest.mark.parametrize("is_complex", [False, True])
def test_a_stack_of_programs_has_the_largest_of_their_bounds(is_complex: bool) -> None:
    """Catches: blocks of one program in another's place, an error or a shift taken from another, a largest that is not."""
    made = relu_chain(0, num_in=3)
    random = np.random.default_rng(5)

    def wide(A: np.ndarray) -> np.ndarray:
        scales = np.exp(random.normal(size=(7, 1, 1)) / 8.0)
        return A * (scales * np.exp(1j * random.uniform(0, 6, size=(7, *A.shape))) if is_complex else scales)

    stacked = replace(made, reads=tuple({i: wide(A) for i, A in terms.items()} for terms in made.reads))
    found = multipliers(made, p=2.0, q=2.0, steps=60)
    found = replace(found, knots=tuple(2.0 * m for m in found.knots))  # so that the first widening does for each
    singles = [
        norm_up(
            replace(made, reads=tuple({i: A[n] for i, A in terms.items()} for terms in stacked.reads)),
            found,
            p=2.0,
            q=2.0,
        )
        for n in range(7)
    ]
    together = norm_up(stacked, found, p=2.0, q=2.0)
    assert together == pytest.approx(max(singles), rel=1e-12)
    assert max(singles) > 1.01 * min(singles)


@pytest.mark.parametrize(("p", "q"), SIX)
def test_good_multipliers_come_close_to_the_truth(p: float, q: float) -> None:
    """ReLU chains of 9 units, all read by the output too, over all 512 patterns: within 15 % for 1→2 and 2→2, else 25 %."""
    for seed in range(3):
        program = relu_chain(seed, num_in=1 if p == 1.0 else 4)
        found = multipliers(program, p=2.0 if p == 1.0 else p, q=q, steps=60, fixed=p == 1.0)
        value, worst = bound(program, found, p, q), truth(jacobians(program, np.random.default_rng(0)), p, q)
        assert value is not None
        assert (worst * (1 - 1e-13) <= value).all()
        assert (value <= worst * (1.15 if q == 2.0 and p < 3.0 else 1.25)).all()


def test_a_linear_program_is_bounded_by_its_norm_alone() -> None:
    """No constraints: columns and 2→2 come out exactly, up to rounding."""
    A = np.random.default_rng(0).normal(size=(4, 3))
    program = Program(num_in=3, num_out=4, reads=({0: A},), constraints=())
    found = multipliers(program, p=2.0, q=2.0, steps=30)
    columns, ball = columns_up(program, found, q=2.0), norm_up(program, found, p=2.0, q=2.0)
    assert columns is not None
    assert ball is not None
    for made, exact in ((columns, np.linalg.norm(A, axis=0)), (ball, np.linalg.norm(A, 2))):
        assert (exact * (1 - 1e-15) <= made).all()
        assert (made <= exact * (1 + 1e-12)).all()


@pytest.mark.parametrize("stored", ["dense", "sparse"])
@pytest.mark.parametrize("q", [1.0, 2.0])
def test_one_factorisation_serves_a_group_of_columns(stored: str, q: float) -> None:
    """Multipliers of one column bound all of the group, where x is also read directly, in dense and sparse matrices."""
    random = np.random.default_rng(1)
    n = 16
    made = (lambda A: A) if stored == "dense" else sparse.csr_array
    W, V = random.normal(size=(6, n)), random.normal(size=(n, 6))
    whole = Program(
        num_in=n,
        num_out=n,
        reads=({0: made(W)}, {0: made(np.eye(n)), 1: made(V)}),
        constraints=(Slopes(low=np.zeros(6), high=np.ones(6)),),
    )
    alone = Program(
        num_in=1,
        num_out=n,
        reads=({0: W[:, :1]}, {0: np.eye(n)[:, :1], 1: V}),
        constraints=whole.constraints,
    )
    found = multipliers(alone, p=2.0, q=q, steps=40, fixed=True)
    together, single = columns_up(whole, found, q=q), columns_up(alone, found, q=q)
    assert together is not None
    assert single is not None
    assert together.shape == (n,)
    assert together[0] == pytest.approx(single[0], rel=1e-9)
    worst = truth(jacobians(whole, random), 1.0, q)
    assert (together >= worst * (1 - 1e-13)).all()
    assert single[0] <= 1.1 * worst[0]


def exact_square(program: Program, found: Multipliers, *, q: float, widening: float, column: int) -> Fraction | None:
    """R_cc·Σ 1/w in rational numbers, from the constraints as the module's text has them; slopes only."""
    starts = np.concatenate([[0], np.cumsum(program.sizes)]).tolist()
    num = starts[-1]
    F = [[Fraction(0)] * num for _ in range(num)]

    def row(k: int, o: int) -> list[Fraction]:
        made = [Fraction(0)] * num
        for i, A in program.reads[k].items():
            for c, entry in enumerate(dense(A)[o]):
                made[starts[i] + c] += Fraction(float(entry))
        return made

    def add(v: list[Fraction], w: list[Fraction], times: Fraction) -> None:
        for a, b in itertools.product(range(num), repeat=2):
            F[a][b] += times * (v[a] * w[b] + w[a] * v[b]) / 2

    for k, constraint in enumerate(program.constraints):
        assert isinstance(constraint, Slopes)
        weights = found.knots[k] * (1.0 + widening)
        for o in range(constraint.size):
            u, z = row(k, o), [Fraction(int(a == starts[k + 1] + o)) for a in range(num)]
            low, high = Fraction(float(constraint.low[o])), Fraction(float(constraint.high[o]))
            add(
                [a - low * b for a, b in zip(z, u, strict=True)],
                [a - high * b for a, b in zip(z, u, strict=True)],
                Fraction(float(weights[o])),
            )
    for o in range(program.num_out):
        y = row(len(program.constraints), o)
        add(y, y, -Fraction(float(found.output[o])))
    for last in range(num - 1, program.num_in - 1, -1):  # the greatest −F over one entry of z after the other
        pivot = F[last][last]
        if pivot <= 0:
            return None
        for a, b in itertools.product(range(last), repeat=2):
            F[a][b] -= F[a][last] * F[last][b] / pivot
    factor = Fraction(1) if q == 2.0 else sum((Fraction(1) / Fraction(float(w)) for w in found.output), Fraction(0))
    return -F[column][column] * factor


def small_program(seed: int) -> Program:
    """Up to 2 knots of up to 2 entries, whose entries differ by up to 16 powers of ten."""
    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return random.normal(size=(rows, columns)) * 10.0 ** (random.uniform(-8, 8) if random.random() < 0.4 else 0.0)

    sizes, reads, constraints = [int(random.integers(1, 3))], [], []
    for k in range(int(random.integers(1, 3))):
        rows = int(random.integers(1, 3))
        reads.append({i: matrix(rows, sizes[i]) for i in range(k + 1) if i == k or random.random() < 0.6})
        low = random.normal(size=rows)
        high = low + np.abs(random.normal(size=rows)) * 10.0 ** random.uniform(-6, 0)
        constraints.append(Slopes(low=low, high=high).widened())
        sizes.append(rows)
    num_out, last = int(random.integers(1, 3)), len(constraints)
    reads.append({i: matrix(num_out, sizes[i]) for i in range(last + 1) if i == last or random.random() < 0.5})
    return Program(num_in=sizes[0], num_out=num_out, reads=tuple(reads), constraints=tuple(constraints))


def times(found: Multipliers, factor: float) -> Multipliers:
    return Multipliers(
        knots=tuple(values * factor for values in found.knots),
        source=found.source,
        output=found.output,
        value=found.value,
    )


@pytest.mark.parametrize("seed", range(24))
def test_bounds_are_above_the_exact_value_of_their_own_multipliers(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In rational numbers, where P is all but singular: there the roundings are amplified and no slack hides them; and
    where it is not, so that slack alone cannot pass.

    Mutants: δ or the residual term left out, a shift of 0, multipliers not widened as claimed, R lowered by 1e-12.
    """
    monkeypatch.setattr(response, "WIDENINGS", (WIDENING,))
    program, q = small_program(seed), 1.0 + seed % 2
    found = multipliers(program, p=2.0, q=q, steps=20)
    least, most = 1e-8, 1e8
    for _ in range(60):  # the least factor that is proven
        middle = math.sqrt(least * most)
        proven = columns_up(program, times(found, middle), q=q) is not None
        least, most = (least, middle) if proven else (middle, most)
    for nearness in (1.0, 1.0 + 1e-12, 1.0 + 1e-9, 1.01, 4.0):
        assert_exact(program, times(found, most * nearness), q=q)


def assert_exact(program: Program, found: Multipliers, *, q: float) -> None:
    """Bounds on columns are at or above √R in rational numbers, if there are any."""
    made = columns_up(program, found, q=q)
    for column in range(0 if made is None else program.num_in):
        square = exact_square(program, found, q=q, widening=WIDENING, column=column)
        assert square is not None  # P is positive definite
        assert Fraction(float(made[column])) ** 2 >= square


@pytest.mark.parametrize("seed", range(12))
def test_terms_that_cancel_leave_their_roundings(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """y = z₂ − A·z₁ where z₂ is all but A·z₁: terms of A² = 10⁸ cancel down to 10³ in P, and their roundings with them.

    Mutant: ε, the error of the stored form, left out: nothing else here is as large.
    """
    monkeypatch.setattr(response, "WIDENINGS", (WIDENING,))
    random = np.random.default_rng(seed)
    A, narrow = 1e4 * random.uniform(1.0, 2.0), 1e-5
    program = Program(
        num_in=1,
        num_out=1,
        reads=(
            {0: np.array([[random.uniform(1.0, 2.0)]])},
            {1: np.array([[A]])},
            {1: np.array([[-A]]), 2: np.array([[1.0]])},
        ),
        constraints=(
            Slopes(low=np.zeros(1), high=np.ones(1)),
            Slopes(low=np.ones(1), high=np.ones(1) * (1.0 + narrow)),
        ),
    )
    own = A * A * narrow * narrow / (4.0 * narrow)
    found = Multipliers(
        knots=(
            np.array([own * random.uniform(1.05, 1.5) / (1.0 + WIDENING)]),
            np.array([(1.0 + narrow) / (1.0 + WIDENING)]),
        ),
        source=np.ones(1),
        output=np.ones(1),
        value=math.sqrt(own),
    )
    assert columns_up(program, found, q=2.0) is not None
    assert_exact(program, found, q=2.0)


@pytest.mark.parametrize("seed", range(6))
def test_errors_of_matrices_are_covered(seed: int) -> None:
    """Matrices off by up to 1e-3 in Frobenius norm: the bound of those given holds for all of them. Mutant: ε left out."""
    random, program = np.random.default_rng(seed), relu_chain(seed, num_in=3)
    errors = {(k, i): 1e-3 for k, terms in enumerate(program.reads) for i in terms}
    given = Program(**{**vars(program), "errors": errors})
    moved = []
    for _ in range(4):
        reads = []
        for terms in program.reads:
            off = {i: random.normal(size=dense(A).shape) for i, A in terms.items()}
            reads.append({i: dense(A) + 1e-3 * off[i] / np.linalg.norm(off[i]) for i, A in terms.items()})
        moved += jacobians(Program(**{**vars(program), "reads": tuple(reads)}), random)
    for p, q in SIX:
        found = multipliers(program, p=2.0 if p == 1.0 else p, q=q, steps=40)
        value = bound(given, found, p, q)
        assert value is None or (value >= truth(moved, p, q)).all()


@pytest.mark.parametrize("error", [1e-3, 1e-2, 0.1])
def test_errors_leave_no_multiplier_with_a_bound_too_small(error: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """y = A·z, 0 ≤ z ≤ x, A within `error` of 1: 1 + error, whatever the multiplier, down to where P is hardly definite.

    Mutants: ε left out, of P or of R; the residual term left out, which is all that is left of R there.
    """
    monkeypatch.setattr(response, "WIDENINGS", (WIDENING,))
    program = Program(
        num_in=1,
        num_out=1,
        reads=({0: np.ones((1, 1))}, {1: np.ones((1, 1))}),
        constraints=(Slopes(low=np.zeros(1), high=np.ones(1)),),
        errors={(1, 1): error},
    )
    proven = 0
    for multiplier in 1.0 + np.geomspace(error / 2.0, 3.0, 200):
        found = Multipliers(knots=(np.array([multiplier]),), source=np.ones(1), output=np.ones(1), value=1.0)
        made = columns_up(program, found, q=2.0)
        proven += made is not None
        assert made is None or made[0] >= 1.0 + error
    assert proven > 5


@pytest.mark.parametrize("slopes", [(-1e-162, 1e-162), (1.7e-162, 1.70002e-162), (0.0, 1e-170)])
def test_slopes_whose_product_underflows_are_bounded_or_refused(slopes: tuple[float, float]) -> None:
    """a·b = 1e-324 is 0 or 5e-324 in float64, but m·a·b is no small number: m is of the order of 1/(a·b)."""
    constraint = Slopes(low=np.array([slopes[0]]), high=np.array([slopes[1]])).widened()
    program = Program(
        num_in=1, num_out=1, reads=({0: np.array([[1e80]])}, {1: np.array([[1e80]])}), constraints=(constraint,)
    )
    worst = 1e160 * max(abs(side) for side in slopes)
    for p, q in SIX:
        made = bound(program, multipliers(program, p=2.0 if p == 1.0 else p, q=q, steps=30), p, q)
        assert made is None or made[0] >= worst * (1 - 1e-13)


@pytest.mark.parametrize("scale", [1e-120, 1e-60, 1e-20, 1e20, 1e60, 1e120])
def test_bounds_scale_with_the_weights(scale: float) -> None:
    """Weights times s in front and over s behind leave the bound alone; where numbers get extreme, none is given."""
    whole = relu_chain(0, num_in=2)
    plain = Program(
        num_in=2, num_out=3, reads=(*whole.reads[:2], {2: whole.reads[2][2]}), constraints=whole.constraints
    )
    scaled = Program(
        num_in=2,
        num_out=3,
        reads=({0: dense(plain.reads[0][0]) * scale}, plain.reads[1], {2: dense(plain.reads[2][2]) / scale}),
        constraints=plain.constraints,
    )
    for p, q in SIX:
        one, other = (
            bound(program, multipliers(program, p=2.0 if p == 1.0 else p, q=q, steps=20), p, q)
            for program in (plain, scaled)
        )
        assert one is not None
        assert other is not None or not 1e-30 < scale < 1e30
        assert other is None or np.allclose(one, other, rtol=1e-6)


def test_impossible_multipliers_prove_nothing() -> None:
    """Multipliers a millionth of what they should be leave P indefinite: no bound rather than a small one."""
    program = relu_chain(1, num_in=2)
    found = times(multipliers(program, p=2.0, q=2.0, steps=30), 1e-6)
    assert columns_up(program, found, q=2.0) is None
    assert norm_up(program, found, p=2.0, q=2.0) is None


def test_work_grows_with_the_cube_of_the_entries() -> None:
    assert response_flops(relu_chain(0, num_in=2)) > 0.0
    n = 400
    wide = Program(
        num_in=1,
        num_out=1,
        reads=({0: np.ones((n, 1))}, {1: np.ones((1, n))}),
        constraints=(Slopes(low=np.zeros(n), high=np.ones(n)),),
    )
    assert response_flops(wide) > 0.05 * n**3
