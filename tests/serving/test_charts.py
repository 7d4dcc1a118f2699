"""Drawings of a stream: what is known is drawn where it belongs."""

import re

from dltta.serving.charts import line_chart


def test_values_are_drawn_from_left_to_right_and_from_bottom_to_top():
    drawn = line_chart("Rate", [0.0, None, 1.0], colors=["red", "green", "blue"])
    assert re.search(r'points="4.0,96.0 996.0,4.0"', drawn)  # by hand: 1000 x 100 with an edge of 4
    assert re.findall(r'stroke="(\w+)"', drawn) == ["red", "blue"]
    assert "Rate: <strong>1</strong>" in drawn
    assert "polygon" not in drawn


def test_an_interval_is_a_band_between_its_bounds():
    drawn = line_chart("Quality", [0.5, 0.5], low=[0.25, 0.0], high=[0.75, 1.0], span=(0.0, 1.0))
    (band,) = re.findall(r'<polygon points="([^"]*)"', drawn)
    assert band == "4.0,73.0 996.0,96.0 996.0,4.0 4.0,27.0"


def test_what_is_not_known_is_not_drawn():
    assert line_chart("Rate", [None, None]) is None


def test_the_ends_of_the_stream_are_named_below():
    assert '<div class="ends"><span>#3</span><span>#9</span></div>' in line_chart("Rate", [1.0, 2.0], ends=("#3", "#9"))


def test_a_title_cannot_bring_markup():
    assert "<script" not in line_chart("<script>", [1.0])
