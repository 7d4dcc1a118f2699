"""Tables that spreadsheets show and do not compute."""

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dltta.files import csv_table, from_csv

FORMULAS = ["=1+1", "+1+1", "-cmd|' /C calc'!A0", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "＝1+1"]


@pytest.mark.parametrize("cell", FORMULAS)
def test_a_formula_becomes_text(cell):
    ((found,),) = csv.reader(io.StringIO(csv_table([[cell]]), newline=""))
    assert found == "'" + cell.replace("\r", " ")  # which would end the row


def test_numbers_and_plain_text_stay():
    row = ["a", "-0.5", "+3", "-inf", -0.25, 7, None, "", "x=1", "a-b", "'quoted'"]
    assert csv_table([row]) == "a,-0.5,+3,-inf,-0.25,7,,,x=1,a-b,'quoted'\n"


@given(st.lists(st.text(alphabet="=+-@\t'\"a1, é", max_size=6), min_size=1, max_size=3))
def test_what_was_written_is_read_again(cells):
    (found,) = csv.reader(io.StringIO(csv_table([cells]), newline=""))
    assert list(map(from_csv, found)) == cells or cells == [""]
    assert not any(cell[:1] in "=@\t" and cell for cell in found)
