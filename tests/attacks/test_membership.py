"""The membership guess never beats its (ε, δ) bound, and the best test comes as near as theory says."""

import math

import mpmath
import pytest
import torch
from scipy.stats import binomtest, norm

from asfl_privacy.accounting.gaussian import gaussian_noise_multiplier
from asfl_privacy.attacks import RecipientView, farthest_neighbours, guess_membership, membership_bound
from asfl_privacy.attacks.intervals import mean_error, rate_interval
from asfl_privacy.attacks.local_inverse import local_inverse

TRIALS = 20_000


def noise(shape, mechanism, scale, *, seed):
    generator = torch.Generator().manual_seed(seed)
    if mechanism == "gaussian":
        return scale * torch.randn(shape, generator=generator, dtype=torch.float64)
    first, second = torch.empty(2, *shape, dtype=torch.float64).exponential_(generator=generator)
    return scale * (first - second)


def guess(difference, mechanism, scale, *, bound=None, seed=0, trials=TRIALS):
    first, second = torch.zeros(1, len(difference), dtype=torch.float64), difference.double().unsqueeze(0)
    return guess_membership(
        first + noise((trials, len(difference)), mechanism, scale, seed=seed),
        second + noise((trials, len(difference)), mechanism, scale, seed=seed + 1),
        expected_first=first,
        expected_second=second,
        mechanism=mechanism,
        bound=bound,
        confidence=0.999,
    )


def test_the_bound_is_the_corner_of_the_region_of_errors_and_rounds_up():
    mpmath.mp.dps = 40
    for epsilon in (0.0, 1e-12, 1e-3, 0.3, 1.0, 4.0, 8.0, 30.0, 50.0, 700.0, 1e4):
        for delta in (0.0, 1e-280, 1e-12, 1e-5, 0.1, 0.9):
            e = mpmath.exp(mpmath.mpf(epsilon))
            exact = (e - 1 + 2 * mpmath.mpf(delta)) / (e + 1)
            bound = membership_bound(epsilon, delta=delta)
            assert exact <= bound <= min(1, exact * (1 + mpmath.mpf(2) ** -48) + mpmath.mpf(2) ** -48)
    assert membership_bound(math.inf, delta=0.0) == 1.0


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 4.0, 8.0])
def test_calibrated_gaussian_noise_keeps_the_optimal_test_at_its_exact_advantage_and_below_the_bound(epsilon):
    # Oracle: Φ(μ/2) − Φ(−μ/2). Catches: half the noise, a variance for a deviation, the likelihood ratio upside down.
    z = gaussian_noise_multiplier(epsilon, delta=1e-5)
    exact = norm.cdf(0.5 / z) - norm.cdf(-0.5 / z)
    bound = membership_bound(epsilon, delta=1e-5)
    difference = torch.tensor([0.6, -0.8, 0.0])
    made = guess(difference, "gaussian", z, bound=bound)
    assert made.low <= exact <= made.high
    assert made.high - made.low < 0.06
    assert made.bound == bound
    assert made.high <= bound or made.low <= bound
    halved = guess(difference, "gaussian", z / 2)
    assert halved.low > exact


def test_one_dimensional_laplace_noise_reaches_the_pure_bound_within_its_theory():
    # Oracle: the optimal test between Laplace(0, b) and Laplace(Δ, b) has advantage 1 − e^(−ε/2), ε = Δ/b.
    for epsilon in (0.5, 2.0):
        made = guess(torch.tensor([1.0]), "laplace", 1.0 / epsilon)
        assert made.low <= 1.0 - math.exp(-epsilon / 2.0) <= made.high
        assert made.low <= membership_bound(epsilon, delta=0.0)


def test_laplace_rows_are_judged_by_absolute_distance():
    # One coordinate far off speaks at most for its own difference under Laplace noise, and drowns all under Gaussian.
    row, first, second = torch.tensor([[-9.0, 0.9, 0.9]]), torch.zeros(1, 3), torch.ones(1, 3)
    made = {
        mechanism: guess_membership(
            row, second, expected_first=first, expected_second=second, mechanism=mechanism
        ).advantage
        for mechanism in ("gaussian", "laplace")
    }
    assert made == {"gaussian": 1.0, "laplace": 0.0}


def test_the_interval_takes_both_rates_at_their_worst():
    # 80 of 100 right and 30 of 100 wrong; second method: scipy's exact binomial test, each at half the error.
    first, second = torch.zeros(1, 1), torch.ones(1, 1)
    right = (torch.arange(100) >= 80).float().unsqueeze(1)
    wrong = (torch.arange(100) >= 30).float().unsqueeze(1)
    made = guess_membership(right, wrong, expected_first=first, expected_second=second, confidence=0.9)
    ends = [binomtest(hits, 100).proportion_ci(0.95, method="exact") for hits in (80, 30)]
    assert made.advantage == 0.5
    assert made.low == pytest.approx(ends[0].low - ends[1].high, rel=1e-6)
    assert made.high == pytest.approx(ends[0].high - ends[1].low, rel=1e-6)


def test_randomised_rows_that_reach_the_bound_are_measured_at_it():
    # Binary randomised response keeps the truth with probability e^ε/(1 + e^ε) and attains the bound at δ = 0.
    epsilon = 1.0
    keep = math.exp(epsilon) / (1.0 + math.exp(epsilon))
    kept = torch.rand(2, TRIALS, 1, generator=torch.Generator().manual_seed(0)) < keep
    made = guess_membership(
        (~kept[0]).float(),
        kept[1].float(),
        expected_first=torch.zeros(1, 1),
        expected_second=torch.ones(1, 1),
        confidence=0.999,
    )
    assert made.low <= membership_bound(epsilon, delta=0.0) <= made.high


def test_intervals_by_hand_and_their_coverage():
    assert rate_interval(0, trials=10) == (0.0, pytest.approx(1 - 0.025**0.1))
    assert rate_interval(10, trials=10) == (pytest.approx(0.025**0.1), 1.0)
    covered = 0.0  # exact: summed over all outcomes of Binomial(30, .2)
    for hits in range(31):
        low, high = rate_interval(hits, trials=30, confidence=0.9)
        covered += math.comb(30, hits) * 0.2**hits * 0.8 ** (30 - hits) * (low <= 0.2 <= high)
    assert covered >= 0.9
    made = mean_error([1.0, 2.0, 6.0])  # s² = 7, s/√3
    assert (made.mean, made.standard_error) == (3.0, pytest.approx(math.sqrt(7 / 3)))


@pytest.mark.parametrize("p", [1, 2, math.inf])
@pytest.mark.parametrize("q", [1, 2])
def test_neighbours_stay_in_ball_and_box_and_beat_random_ones(p, q):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(12, 20, generator=generator)
    records = torch.rand(16, 12, generator=generator)
    records[0] = 1.0
    far = farthest_neighbours(
        lambda x: torch.relu(x @ weight),
        records,
        radius=0.4,
        p=p,
        q=q,
        input_box=(0, 1),
        generator=torch.Generator().manual_seed(0),
    )
    difference = (far - records).double()
    assert float(torch.linalg.vector_norm(difference, ord=p, dim=1).max()) <= 0.4
    assert float(far.min()) >= 0.0
    assert float(far.max()) <= 1.0

    def moved(others):
        return torch.linalg.vector_norm(torch.relu(others @ weight) - torch.relu(records @ weight), ord=q, dim=1)

    for seed in range(5):
        step = torch.randn(records.shape, generator=torch.Generator().manual_seed(seed))
        step = step * (0.4 / torch.linalg.vector_norm(step, ord=p, dim=1, keepdim=True))
        assert bool((moved(far) >= moved((records + step).clamp(0, 1))).all()), seed


def test_the_search_finds_the_top_singular_direction():
    # Oracle: a linear map moves an ℓ2 ball's points by at most σ_max·R, from a record in the middle of a wide box.
    weight = torch.randn(6, 9, generator=torch.Generator().manual_seed(2))
    far = farthest_neighbours(
        lambda x: x @ weight,
        torch.zeros(2, 6),
        radius=0.5,
        p=2,
        q=2,
        input_box=(-1, 1),
        steps=60,
        generator=torch.Generator().manual_seed(0),
    )
    top = float(torch.linalg.matrix_norm(weight, ord=2))
    assert torch.linalg.vector_norm(far @ weight, dim=1).tolist() == pytest.approx([0.5 * top] * 2, rel=0.01)


@pytest.mark.parametrize("mechanism", ["gaussian", "laplace"])
def test_noise_behind_layers_is_seen_through_so_that_the_test_stays_optimal(conv_head, digits, mechanism):
    # Noise at the input, 8×8; the head keeps it. Oracle at μ = 1 for Gaussian noise: .3829. Catches: guessing in the
    # output space without regard to the covariance there, a bias towards one candidate.
    stddev, trials = 0.2, 4000
    view = RecipientView(
        before_noise=torch.nn.Identity(), after_noise=conv_head, mechanism=mechanism, noise_stddev=stddev
    )
    first = digits.test_inputs[:1]
    second = (first + 0.025).clamp(0, 1) if mechanism == "laplace" else first.clone()
    if mechanism == "gaussian":
        second[0, 0, 3, 3] = second[0, 0, 3, 3] - 0.2 if float(second[0, 0, 3, 3]) > 0.5 else second[0, 0, 3, 3] + 0.2
    scale = stddev if mechanism == "gaussian" else stddev / math.sqrt(2)
    noised = [
        records.double() + noise((trials, 1, 8, 8), mechanism, scale, seed=seed)
        for seed, records in ((0, first), (1, second))
    ]
    with torch.no_grad():
        released = [conv_head(rows.float()) for rows in noised]
    estimate = local_inverse(view, torch.cat([first, second]), generator=torch.Generator().manual_seed(9))
    arguments = {"expected_first": first, "expected_second": second, "mechanism": mechanism}
    seen = guess_membership(*(estimate(rows) for rows in released), **arguments)
    full = guess_membership(*noised, **arguments)  # of one who sees the noised record itself
    assert seen.advantage > full.advantage - 0.08
    if mechanism == "gaussian":
        assert seen.low <= norm.cdf(0.5) - norm.cdf(-0.5)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: membership_bound(math.nan, delta=0.0), "epsilon"),
        (lambda: membership_bound(-1.0, delta=0.0), "epsilon"),
        (lambda: membership_bound(1.0, delta=1.0), "delta"),
        (lambda: rate_interval(3, trials=2), "only 2 trials"),
        (lambda: rate_interval(0, trials=0), "trials"),
        (lambda: rate_interval(1, trials=2, confidence=1.0), "confidence"),
        (lambda: mean_error([]), "0 values"),
        (lambda: mean_error([math.nan]), "NaN"),
        (lambda: RecipientView(before_noise=abs, after_noise=abs, mechanism="x"), "one of gaussian, laplace"),
        (lambda: RecipientView(before_noise=abs, after_noise=abs, noise_stddev=0.0), "noise_stddev"),
        (lambda: RecipientView(before_noise=torch.nn.Dropout(), after_noise=abs), "train mode"),
    ],
)
def test_bad_membership_values_are_refused_in_one_line(call, words):
    with pytest.raises(ValueError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_rows_that_do_not_match_and_records_outside_the_box_are_refused():
    rows = torch.zeros(4, 2)
    with pytest.raises(ValueError, match="match the batches"):
        guess_membership(rows, rows[:3], expected_first=rows, expected_second=rows)
    with pytest.raises(ValueError, match="leave the box"):
        farthest_neighbours(
            abs, rows + 2, radius=1.0, p=2, q=2, input_box=(0, 1), generator=torch.Generator().manual_seed(0)
        )


def test_equal_candidates_cannot_be_told_apart():
    assert guess(torch.zeros(3), "gaussian", 1.0).advantage == 0.0
