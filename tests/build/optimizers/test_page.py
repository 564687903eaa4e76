"""docs/optimizers.md says of every optimizer what the built one holds."""

import pytest

from benchmarks.optimizers_page import EIGHTH, PAGE, ROWS, bytes_of, line, page, stepped, stood_in
from framework.build.optimizers.low_bit import LOW_BIT
from framework.schema.optimizers import FACTS, Optimizer
from tests.optimizers import eager, needs  # noqa: F401


@pytest.mark.slow
def test_the_page_is_what_the_built_optimizers_say():
    assert PAGE.read_text() == page(), "run: python benchmarks/optimizers_page.py"


@pytest.mark.parametrize("name", [Optimizer.ADAFACTOR, Optimizer.ANYPRECISION_ADAMW])
def test_a_line_is_what_the_built_optimizer_says(name):
    assert all(line(row) in PAGE.read_text() for row in ROWS if row.optimizer is name)


def test_every_optimizer_has_a_line():
    assert {row.optimizer for row in ROWS} == set(Optimizer)


ON_CPU = [row for row in ROWS if row.optimizer in LOW_BIT and not LOW_BIT[row.optimizer].paged]


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=needs(FACTS[row.optimizer].package), id=row.optimizer) for row in ON_CPU],
)
def test_what_stands_in_for_a_library_holds_the_bytes_of_its_class(row, dtype):
    assert bytes_of(*stood_in(row, dtype, EIGHTH)) == pytest.approx(bytes_of(*stepped(row, dtype)), rel=1e-3)
