"""Every family's own pipeline, end to end on 2, 3 and 4 ranks: the picture of one process, or a refusal."""

from pathlib import Path

import numpy as np
import pytest

from tests.usp.families import CELLS, LABELS, alone, cell_of, table, together
from usp.demo import tiny
from usp.plans import PLANS, UNSERVED

README = Path(__file__).parents[2] / "README.md"
# fp32, at the latents after four steps; matmuls of fewer rows and a ring's merge round differently.
TOLERANCE = 1e-4


@pytest.mark.parametrize("column", CELLS)
@pytest.mark.parametrize("family", LABELS)
def test_a_family_makes_the_picture_of_one_process(ranks, family, column):
    """Promise 1 for each model x strategy x CFG x cache x LoRA; a refusal names its reason on all ranks."""
    cell = cell_of(family, column)
    every = ranks(cell.size).run(together, family, cell)
    if cell.refused is not None:
        assert all(cell.refused in error for _, error, _ in every), every[0][1]
        return
    one = alone(family, cell)
    assert np.isfinite(one).all()
    assert one.std() > 0.1
    for found, error, reports in every:
        assert error == ""
        assert found is not None
        assert found.shape == one.shape
        assert np.abs(found - one).max() <= TOLERANCE
        if cell.cache is not None:
            assert reports
            assert all("2 of 4 skipped: 2-3" in report or " of 2 skipped" in report for report in reports)


def test_the_readme_shows_what_is_tested():
    """The table in the README is the one that these tests make; each family has a row, each plan a family."""
    assert table() in README.read_text(encoding="utf-8")
    served = set(tiny.FAMILIES) - {"ltx-2"}
    assert set(LABELS) == served
    assert "LTX2VideoTransformer3DModel" in UNSERVED
    assert len(PLANS) <= len(LABELS)
