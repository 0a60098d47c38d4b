import math

import numpy as np
import pytest

from sensitivity.norms import NORMS, change_of_norm, lipschitz_table, parse_norm, parse_pair, tighten


@pytest.mark.parametrize("norm", [True, False, 0, 3, -1, 1.5, math.nan, -math.inf, "2", "Inf", None, 2 + 0j])
def test_what_is_no_norm_is_refused(norm):
    with pytest.raises(ValueError, match=r"p=.* must be 1, 2, math.inf or 'inf'"):
        parse_norm(norm, name="p")


def test_both_spellings_of_infinity_are_one_norm():
    assert parse_norm("inf", name="q") == parse_norm(math.inf, name="q") == math.inf


def test_all_nine_pairs_are_known():
    assert {parse_pair(p, q) for p in (1, 2, "inf") for q in (1, 2, math.inf)} == {(p, q) for p in NORMS for q in NORMS}


@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_change_of_norm_is_the_largest_ratio_of_norms(size):
    random = np.random.default_rng(size)
    candidates = [np.ones(size), np.eye(size)[0], *random.normal(size=(200, size))]
    for r in NORMS:
        for s in NORMS:
            ratios = [np.linalg.norm(v, s) / np.linalg.norm(v, r) for v in candidates]
            assert max(ratios) == pytest.approx(change_of_norm(r, s, size=size), rel=1e-12)


def test_tightening_never_raises_an_entry_and_uses_every_route():
    loose = ((math.inf, math.inf, math.inf), (math.inf, 3.0, math.inf), (math.inf, math.inf, math.inf))
    tight = tighten(loose, num_in=4, num_out=9)
    assert tight[1][1] == 3.0
    assert tight[0] == (9.0, 3.0, 3.0)
    assert tight[2] == (18.0, 6.0, 6.0)


def test_a_table_of_an_elementwise_map_holds_every_norm_of_a_multiple_of_the_identity():
    table = lipschitz_table(2.0, size=9)
    assert table == ((2.0, 2.0, 2.0), (6.0, 2.0, 2.0), (18.0, 6.0, 2.0))
