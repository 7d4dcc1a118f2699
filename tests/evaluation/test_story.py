"""What a newcomer is told, and the parts of a stream that changes its site: numbers that a reader can check."""

from dataclasses import replace

import pytest
from small_results import results, stream

from dltta.evaluation.figures import change_chart, quality_chart
from dltta.evaluation.parts import by_part, changing_pairs, parts
from dltta.evaluation.report import render_report
from dltta.evaluation.story import story


def moved(method, rate, dice, sites):
    """A stream whose cases are from these sites, one after another."""
    found = stream(method, rate, dice, target="+".join(dict.fromkeys(sites)))
    return replace(found, cases=tuple(replace(row, site=site) for row, site in zip(found.cases, sites, strict=True)))


def expecting(found, *expected):
    """The same stream with an expected quality and its interval for each case."""
    rows = zip(found.cases, expected, strict=True)
    quality = tuple(replace(row, quality=q, quality_low=low, quality_high=high) for row, (q, low, high) in rows)
    return replace(found, cases=quality)


def demo():
    return results(
        stream("source", "none", [0.9, 0.9], target="A"),
        stream("source", "none", [0.5, 0.3]),
        stream("ptbn", "none", [0.7, 0.7]),
        stream("tent", "fixed", [0.7, 0.72]),
        stream("tent", "dynamic", [0.7, 0.74]),
        stream("tent", "matched", [0.7, 0.73]),
        expecting(stream("recommended", "none", [0.4, 0.8]), (0.5, 0.3, 0.6), (0.6, 0.5, 0.7)),
    )


def changing():
    sites = ["A", "A", "B", "B"]
    return results(
        moved("source", "none", [0.9, 0.8, 0.3, 0.5], sites), moved("tent", "dynamic", [0.8, 0.8, 0.6, 0.7], sites)
    )


def told(title, *found):
    return next(line.text for line in story(*found) if line.title == title)


def test_the_story_goes_from_home_to_a_stream_that_changes():
    assert [line.title for line in story(demo(), changing())] == [
        "At home",
        "At another hospital",
        "Statistics only (PTBN)",
        "The paper's recipes",
        "The recommended recipe",
        "How good is each prediction?",
        "The scanner changes half-way",
    ]


@pytest.mark.parametrize(
    ("title", "words"),
    [
        ("At home", "New images of A: Dice 90.0 (100"),
        ("At another hospital", "on images of B: Dice 40.0, 50.0 points below at home."),
        ("Statistics only (PTBN)", "70.0, 30.0 points above no adaptation."),
        ("The paper's recipes", "With a fixed / dynamic / matched rate: Tent 71.0 / 72.0 / 71.5."),
        ("The paper's recipes", "by at most 1.0 points."),
        ("The recommended recipe", "given: 60.0, 20.0 points above no adaptation, 10.0 points below statistics only."),
        ("The recommended recipe", "makes 1 of 2 images worse"),
        ("How good is each prediction?", "it expected 55.0 on average; the truth is 60.0. 1 of 2 images lie in their"),
        ("How good is each prediction?", "rank correlation is 1.00"),
        ("The scanner changes half-way", "2 of A, then 2 of B"),
        ("The scanner changes half-way", "no adaptation 85.0, then 40.0; Tent + dynamic 80.0, then 65.0."),
    ],
)
def test_every_number_of_the_story_can_be_checked_by_hand(title, words):
    assert words in told(title, demo(), changing())


def test_images_made_worse_are_counted():
    better = results(stream("source", "none", [0.5, 0.3]), stream("recommended", "none", [0.6, 0.4]))
    assert "makes none of 2 images worse" in told("The recommended recipe", better)


def test_scores_that_look_alike_are_said_to_be_alike():
    found = results(stream("source", "none", [0.7]), stream("ptbn", "none", [0.7004]))
    assert "70.0, as much as no adaptation." in told("Statistics only (PTBN)", found)


def test_what_was_not_run_is_not_told():
    found = results(stream("source", "none", [0.5, 0.3]), stream("tent", "fixed", [0.6, 0.6]))
    assert [line.title for line in story(found)] == ["At another hospital", "The paper's recipes"]
    assert told("The paper's recipes", found) == "A small learning step on each image. With a fixed rate: Tent 60.0."
    assert story(results(stream("tent", "fixed", [0.6]))) == []
    assert story(results()) == []


def test_a_site_that_comes_back_is_a_part_of_its_own():
    found = parts(moved("source", "none", [0.1, 0.2, 0.3, 0.4], ["A", "B", "B", "A"]).cases, "dice")
    assert [(part.site, part.first, part.count) for part in found] == [("A", 1, 1), ("B", 2, 2), ("A", 4, 1)]
    assert [part.score for part in found] == pytest.approx([0.1, 0.25, 0.4])


def test_only_a_stream_with_a_few_parts_changes_its_site():
    turns = moved("source", "none", [0.5] * 10, ["A", "B"] * 5)
    assert changing_pairs(changing()) == [("A", "A+B")]
    assert changing_pairs(results(turns)) == []
    assert changing_pairs(demo()) == []


def test_parts_of_every_method_go_by_method_and_rate():
    assert list(by_part(changing(), ("A", "A+B"))) == [("source", "none"), ("tent", "dynamic")]


def test_chart_of_a_change_names_the_sites_and_marks_where_they_change():
    drawn = change_chart(changing(), ("A", "A+B"))
    assert drawn.count("<svg") == 1
    assert "> A<" in drawn
    assert "> B<" in drawn
    rows = [replace(each, cases=tuple(replace(row, site="A") for row in each.cases)) for each in changing().streams]
    assert (
        drawn.count("stroke: var(--ink)") == change_chart(results(*rows), ("A", "A+B")).count("stroke: var(--ink)") + 1
    )


def test_chart_of_quality_shows_cases_outside_of_their_interval_in_another_color():
    inside = expecting(stream("recommended", "none", [0.5, 0.6]), (0.5, 0.4, 0.6), (0.6, 0.5, 0.7))
    outside = expecting(stream("recommended", "none", [0.5, 0.9]), (0.5, 0.4, 0.6), (0.6, 0.5, 0.7))
    assert "var(--bad)" not in quality_chart(inside)
    assert "var(--bad)" in quality_chart(outside)


def test_report_with_a_changing_stream_begins_with_the_story():
    page = render_report(demo(), changing=changing())
    assert (
        page.index(">What happened</h2>") < page.index(">Results</h2>") < page.index(">When the scanner changes</h2>")
    )
    assert "<li><b>At home.</b>" in page
    assert "expected and true" in page
    assert ">85.0</td><td>40.0</td>" in page


def test_report_of_a_comparison_tells_no_story_but_shows_changes():
    page = render_report(changing())
    assert ">What happened</h2>" not in page
    assert ">When the scanner changes</h2>" in page
    assert ">When the scanner changes</h2>" not in render_report(demo())
