"""What the project's page on mechanisms and accounting states as a number, and where it is tested.

The page's figures that no other test held are tested below; the others, and the cases of its section 7, are in:

Section 1
    table, analytic Gaussian and classic:
        tests/accounting/test_gaussian.py::test_calibration_agrees_with_the_written_values
    table, column classic beyond its range:
        tests/accounting/test_published.py::test_the_formula_gives_the_written_values
    table, true δ 3.4e-4 and .59:
        tests/accounting/test_published.py::test_what_is_claimed_from_epsilon_one_on_can_be_false
    1e-12 relative: tests/accounting/test_gaussian.py::test_calibration_returns_the_safe_end_within_1e12
    classic refused from 1 on: tests/accounting/test_gaussian.py::test_classic_is_refused_from_epsilon_one
    ε = 0: tests/accounting/test_gaussian.py::test_zero_epsilon_needs_the_closed_form_multiplier
    b = Δ/(ε − 2 ln(1 − δ)): tests/accounting/test_laplace.py::test_calibration_with_delta_follows_the_formula
    total 8, Gaussian and 763: tests/accounting/test_calibration.py::test_totals_of_eight_agree_with_the_written_values
    total 8, Laplace, T = 10 at δ = 0: tests/accounting/test_laplace.py::test_totals_agree_with_the_written_values
    total 8, Laplace at δ = 1e-5: tests/golden/test_golden_privacy_page.py::test_laplace_noise_for_a_total_of_eight
Section 2
    √d·R, 8 and 28:
        tests/mechanisms/test_release_sensitivity.py::test_laplace_with_an_l2_radius_at_the_input_agrees_with_the_written_values
    .341 instead of 4.38: tests/accounting/test_ledger.py::test_once_costs_one_release
Section 3
    Gaussian, five counts: tests/accounting/test_ledger.py::test_composition_agrees_with_the_written_values
    Laplace, brackets: tests/golden/test_golden_accounts.py::test_laplace_lies_in_the_written_brackets
    Laplace, basic, KOV, RDP, PLD: tests/golden/test_golden_privacy_page.py::test_laplace_table_of_four_accountants
    observed sampling, right and all:
        tests/golden/test_golden_accounts.py::test_observed_sampling_agrees_with_the_written_values
    observed sampling, wrong:
        tests/golden/test_golden_privacy_page.py::test_poisson_amplification_would_claim_the_written_wrong_values
    labels 37.2 and 1.0, joint 5.03, 90.8:
        tests/golden/test_golden_accounts.py::test_totals_agree_with_the_written_values
    4.73 for 9.997: tests/golden/test_golden_privacy_page.py::test_two_clips_are_due_where_one_record_replaces_another
    other libraries' figures: experiments/benchmarks/privacy/faults.py asks them anew in each report
Section 4
    distances kR: tests/accounting/test_ledger.py::test_the_scales_agree_with_the_written_values
Section 6
    .071 against 0:
        tests/mechanisms/lattice/test_lattice_noise.py::test_the_low_bits_of_a_float_release_give_inputs_away_and_ours_do_not
    5.77: tests/mechanisms/test_noise_statistics.py::test_tails_are_not_cut
    79.8, 69.1, 68.31, 68.25: tests/golden/test_golden_privacy_page.py::test_the_discrete_laplace_loses_more
    (1 + e^ε)·τ is vacuous, 2·draws·η:
        tests/accounting/test_sampler_error.py::test_no_drawn_distribution_within_the_declared_error_exceeds_the_charge
Section 7
    σ NaN, 0, −1: tests/mechanisms/test_mechanism.py::test_bad_scales_and_sensitivities_are_refused
    σ NaN, 0, −1, no records: tests/accounting/test_ledger.py::test_bad_records_are_refused_and_change_nothing
    no releases: tests/accounting/test_calibration.py::test_bad_requests_are_refused_in_one_line
    an empty batch, [NaN, 1, 2]: tests/mechanisms/test_noise_layer.py::test_what_must_not_leave_is_refused_in_one_line
    an empty batch, NaN, in a release:
        tests/mechanisms/test_release.py::test_inputs_that_break_the_claim_are_refused_in_one_line
    before anything is sent: tests/execution/test_charging.py::test_a_refusal_sends_nothing_and_charges_nothing
    a batch of one, noised like any other: tests/mechanisms/test_noise_layer.py::test_a_batch_of_one_is_noised
    μ = 1, δ = .9: tests/accounting/test_gaussian.py::test_epsilon_is_never_negative
    633.9, σ at (1e-3, 1e-12):
        tests/accounting/test_gaussian.py::test_a_thousand_releases_at_multiplier_one_do_not_break_the_bracket
    ε = 16, .344 and never .303: tests/golden/test_golden_privacy_page.py::test_sixteen_is_never_calibrated_by_classic
    a ledger read back:
        tests/accounting/test_ledger.py::test_a_ledger_read_back_and_extended_equals_the_one_kept_in_memory
    a mixed ledger: tests/accounting/test_ledger.py::test_a_mixed_ledger_keeps_the_strong_releases
    never more than asked:
        tests/accounting/test_calibration.py::test_a_ledger_of_what_was_calibrated_never_exceeds_the_total
    never more than asked, whole runs:
        tests/accounting/test_run_calibration.py::test_a_ledger_of_the_calibrated_run_never_exceeds_the_total
    counts round up: tests/accounting/test_gaussian.py::test_a_fraction_of_a_release_counts_as_a_whole_one
    forks and calls: tests/mechanisms/test_noise_layer.py::test_forks_and_copies_never_share_noise
    forks, the words themselves:
        tests/mechanisms/lattice/test_source.py::test_forked_children_and_their_parent_share_no_words
    two processes: tests/golden/test_golden_privacy_page.py::test_two_processes_never_share_noise
    one seed, two mechanisms:
        tests/mechanisms/test_noise_statistics.py::test_two_mechanisms_given_one_seed_do_not_share_a_stream
"""

import ast
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from asfl_privacy.accounting import (
    LossEvent,
    calibrate,
    classic_noise_multiplier,
    compose,
    laplace_total_epsilon,
    sampled_epsilon,
)
from asfl_privacy.mechanisms import Gaussian, NoiseLayer

ROOT = Path(__file__).parents[2]
DELTA = 1e-5
LAPLACE_TABLE = [
    # ε0, T, basic, KOV (None: overflow), RDP, PLD
    (0.1, 100, 10.0, 4.40, 4.53, 4.220),
    (0.1, 1000, 100.0, None, 18.58, 17.42),
    (1.0, 100, 100.0, 80.0, 70.8, 68.25),
    (1.0, 1000, 1000.0, None, 485.5, 474.3),
]


def one(mechanism, *, epsilon, count, num_classes=None):
    return LossEvent(mechanism=mechanism, noise_multiplier=1.0 / epsilon, count=count, num_classes=num_classes)


def test_every_test_named_above_is_there():
    """Catches: a figure of the page whose test was renamed or removed."""
    named = re.findall(r"(tests/\S+\.py)::(\w+)", __doc__)
    assert len(named) > 40
    for file, name in named:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (file, name)


@pytest.mark.parametrize(("num_releases", "written"), [(10, "1.77"), (100, "8.10"), (1000, "26.6")])
def test_laplace_noise_for_a_total_of_eight(num_releases, written):
    """Noise sd/Δ = √2·b/Δ. Catches: basic composition, which needs 17.7 and 177 for the last two."""
    facts = calibrate("laplace", total_epsilon=8.0, delta=DELTA, num_releases=num_releases)
    half_unit = 0.5 * 10.0 ** -len(written.partition(".")[2])
    assert math.sqrt(2.0) * facts.noise_multiplier == pytest.approx(float(written), abs=half_unit)
    assert facts.epsilon_total <= 8.0


@pytest.mark.parametrize(("epsilon", "count", "basic", "kov", "rdp", "pld"), LAPLACE_TABLE)
def test_laplace_table_of_four_accountants(epsilon, count, basic, kov, rdp, pld):
    """KOV composes as if each release were randomised response with two outcomes, and reads δ at every other multiple of ε0
    only. Ours is the least of the four. Catches: ε of any mechanism of the same pure ε, or a Rényi bound, reported as PLD.
    """
    written = lambda value, digits: pytest.approx(value, abs=0.5 * 10.0**-digits)  # noqa: E731
    ours = compose([one("laplace", epsilon=epsilon, count=count)], delta=DELTA)
    digits = {4.220: 3, 17.42: 2, 68.25: 2, 474.3: 1}[pld]
    assert ours.low == written(pld, digits)
    assert ours.high == written(pld, digits)
    assert laplace_total_epsilon(1.0 / epsilon, num_releases=count) == pytest.approx(basic, rel=1e-12)
    pair = compose([one("randomized-response", epsilon=epsilon, count=count, num_classes=2)], delta=DELTA)
    multiple = count - 2 * math.floor((count - pair.high / epsilon) / 2)
    assert ours.high < pair.low < pair.high <= multiple * epsilon
    if kov is not None:
        assert multiple * epsilon == written(kov, 2)
    accounting = pytest.importorskip("dp_accounting", reason="dp-accounting is not installed: no Rényi accountant")
    renyi = accounting.rdp.RdpAccountant().compose(accounting.LaplaceDpEvent(1.0 / epsilon), count)
    assert renyi.get_epsilon(DELTA) == written(rdp, 2 if rdp < 20 else 1)
    assert ours.high < renyi.get_epsilon(DELTA)


@pytest.mark.parametrize(("rounds", "q", "wrong"), [(100, 0.1, ".347"), (1000, 0.1, "1.209"), (1000, 0.01, ".098")])
def test_poisson_amplification_would_claim_the_written_wrong_values(rounds, q, wrong):
    """What a recipient that sees its items must not be told. Catches: the observed mixture replaced by hidden sampling."""
    distributions = pytest.importorskip(
        "dp_accounting.pld.privacy_loss_distribution", reason="dp-accounting is not installed: no hidden sampling"
    )
    hidden = distributions.from_gaussian_mechanism(10.0, sampling_prob=q, value_discretization_interval=5e-5)
    claimed = hidden.self_compose(rounds).get_epsilon_for_delta(DELTA)
    assert claimed == pytest.approx(float(wrong), abs=5e-4)
    observed = sampled_epsilon(10.0, num_rounds=rounds, sampling_probability=q, delta=DELTA)
    assert observed.low > 3.0 * claimed


def test_two_clips_are_due_where_one_record_replaces_another():
    """σ/C = 10, T = 100: 9.997 with Δ = 2C. Catches: Δ = C, which gives 4.377 (4.73 by Rényi orders)."""
    total = compose([LossEvent(mechanism="gaussian", noise_multiplier=10.0 / 2.0, count=100)], delta=DELTA)
    assert total.low == pytest.approx(9.997, abs=5e-4)
    assert total.high == pytest.approx(9.997, abs=5e-4)


def discrete_laplace_epsilon(*, cells, epsilon, count):
    """ε of discrete Laplace releases with Δ = ``cells``: their losses are multiples of ε0/cells, so sums need no rounding."""
    x = np.arange(-60 * cells, 61 * cells)  # what lies beyond weighs e^{−60}
    ratio = math.exp(-epsilon / cells)
    weights = (1.0 - ratio) / (1.0 + ratio) * ratio ** np.abs(x)
    mass = np.bincount(np.abs(x - cells) - np.abs(x) + cells, weights=weights)
    total = np.array([1.0])
    for _ in range(count):
        total = np.convolve(total, mass)
    losses = (np.arange(total.size) - count * cells) * epsilon / cells
    low, high = 0.0, count * epsilon
    for _ in range(50):
        middle = 0.5 * (low + high)
        delta = float(np.sum(total * -np.expm1(np.minimum(0.0, middle - losses))))
        low, high = (low, middle) if delta <= DELTA else (middle, high)
    return high


@pytest.mark.parametrize(("cells", "written"), [(1, "79.8"), (4, "69.1"), (16, "68.31")])
def test_the_discrete_laplace_loses_more(cells, written):
    """Our account is that of the continuous Laplace, 68.25, which rounding keeps. Catches: it offered for the discrete one.

    With one cell the pair is randomised response with two outcomes, up to what no outcome tells apart: a second account.
    """
    discrete = discrete_laplace_epsilon(cells=cells, epsilon=1.0, count=100)
    assert discrete == pytest.approx(float(written), abs=0.5 * 10.0 ** -len(written.partition(".")[2]))
    continuous = compose([one("laplace", epsilon=1.0, count=100)], delta=DELTA)
    assert continuous.high == pytest.approx(68.25, abs=5e-3)
    assert discrete > continuous.high
    if cells == 1:
        pair = compose([one("randomized-response", epsilon=1.0, count=100, num_classes=2)], delta=DELTA)
        assert pair.low - 1e-6 <= discrete <= pair.high + 1e-6


def test_sixteen_is_never_calibrated_by_classic():
    """Classic would hand out .303, which spends 18.9. Catches: classic as the default, or its refusal dropped."""
    assert calibrate("gaussian", epsilon=16.0, delta=DELTA).noise_multiplier == pytest.approx(0.3442, abs=5e-5)
    with pytest.raises(ValueError, match="proven for 0 < epsilon < 1"):
        classic_noise_multiplier(16.0, delta=DELTA)
    with pytest.raises(ValueError, match="proven for 0 < epsilon < 1"):
        calibrate("gaussian", epsilon=16.0, delta=DELTA, method="classic")


def test_two_processes_never_share_noise():
    """Catches: noise from a generator with a fixed seed, which every fresh process draws alike."""
    code = (
        "import torch; from asfl_privacy.mechanisms import Gaussian, NoiseLayer; torch.manual_seed(0);"
        "print(NoiseLayer(Gaussian(noise_stddev=1.0))(torch.zeros(1, 64)).tolist())"
    )
    child = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    torch.manual_seed(0)
    here = NoiseLayer(Gaussian(noise_stddev=1.0))(torch.zeros(1, 64)).numpy()
    there = np.array(ast.literal_eval(child.stdout))
    assert here.shape == there.shape
    assert not np.isclose(here, there, rtol=1e-6).any()
