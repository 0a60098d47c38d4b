"""Every fault is seen by the parts named, and every part is the sole catcher of at least one."""

import pytest
from audit.mutants import MUTANTS

from asfl_privacy import audit

SOLE = [mutant for mutant in MUTANTS if mutant.sole]


def parts_that_see(mutant, parts=audit.PARTS):
    layer = mutant.make()
    # alpha in proportion, so that each part keeps the level it has in a whole audit
    alpha = 1e-6 * len(parts) / len(audit.PARTS)
    tap = layer.tap if mutant.with_tap else None
    report = audit.run(layer, mutant.claim, tap=tap, parts=parts, alpha=alpha)
    assert report.passed == (not report.breaches)
    return {breach.part for breach in report.breaches}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_is_seen(mutant):
    seen = parts_that_see(mutant)
    assert seen >= set(mutant.seen_by)
    if mutant.sole:
        assert seen == set(mutant.seen_by)


def test_every_part_has_a_mutant_of_its_own():
    assert {mutant.seen_by[0] for mutant in SOLE} == set(audit.PARTS)
    assert all(len(mutant.seen_by) == 1 for mutant in SOLE)


@pytest.mark.parametrize("mutant", SOLE, ids=lambda mutant: mutant.name)
def test_without_its_part_a_mutant_passes(mutant):
    others = tuple(part for part in audit.PARTS if part not in mutant.seen_by)
    assert parts_that_see(mutant, others) == set()
