import base64
import io
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image
from small_results import one_target, results, stream

from dltta.errors import DataError
from dltta.evaluation.examples import Example
from dltta.evaluation.figures import (
    MOST_POINTS,
    _along,
    _blocks,
    _smooth,
    _spaced,
    case_gain_chart,
    method_color,
    stream_chart,
)
from dltta.evaluation.headline import sentences
from dltta.evaluation.rendering import (
    CONFUSED,
    INVENTED,
    MISSED,
    absolute_error,
    render_errors,
    render_image,
    render_overlay,
    slice_of,
)
from dltta.evaluation.report import render_report, write_report
from dltta.evaluation.results import StreamResult
from dltta.evaluation.run import CaseRecord, StreamRecord

EVIL = "</h3><script>alert('$x')</script>\" onerror=\"x"
VOID = {"meta", "img", "br", "hr", "link", "input"}


class Page(HTMLParser):
    """Checks that every element that opens also closes, and collects what the tests ask about."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] != "style":
            self.words += data


def segmented(name: str = "case_0") -> Example:
    label = np.array([[0, 1, 1, 0], [0, 2, 2, 0]])
    prediction = np.array([[1, 1, 0, 0], [0, 1, 2, 0]])
    image = np.arange(8.0).reshape(1, 2, 4)
    return Example(
        name, image, label, {"Source": prediction, "Tent": label}, {"Source": 0.5, "Tent": 1.0}, ("bg", "x", "y")
    )


def classified(name: str = "patch_0") -> Example:
    image = np.zeros((3, 4, 4))
    return Example(
        name, image, np.array(1), {"Source": np.array([0.7, 0.3]), "Tent": np.array([0.2, 0.8])}, {}, ("no", "yes")
    )


def everything() -> str:
    training = {"Cross-entropy": [1.0, 0.5], "empty": []}
    notes = ["Synthetic & small"]
    return render_report(one_target(), examples=[segmented()], title="A <title>", notes=notes, training=training)


@pytest.fixture(scope="module")
def full() -> str:
    return everything()


def test_page_is_well_formed_and_complete(full):
    page = Page(full)
    for words in (
        "A <title>",
        "Synthetic & small",
        "75.0",
        "Tent + dynamic",
        "case_0",
        "Learning rate",
        "Cross-entropy",
    ):
        assert words in page.words
    headings = re.findall(r"<h2>(.*?)</h2>", full)
    assert headings == [
        "Results",
        "Who gains, who loses",
        "Examples",
        "Along the stream",
        "Source training",
        "Where these numbers come from",
    ]


def test_decisions_of_the_guard_are_a_table_by_reason():
    assert "<h2>Decisions</h2>" not in render_report(one_target())
    first, second, *rest = one_target().streams[2].cases
    decided = replace(first, decision="kept", reason="<ood>"), replace(second, decision="accepted")
    tent = replace(one_target().streams[2], cases=(*decided, *rest))
    page = render_report(results(one_target().streams[1], tent))
    section = page.split("<h2>Decisions</h2>")[1].split("</section>")[0]
    rows = re.findall(r"<tr><th[^>]*>(.*?)</th><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td></tr>", section)
    assert rows == [("Tent", "accepted", "–", "1"), ("Tent", "kept", "&lt;ood&gt;", "1")]


def test_page_needs_no_network_and_no_script(full):
    page = Page(full)
    assert "http" not in full
    assert not {"script", "link", "iframe"} & {tag for tag, _ in page.tags}
    assert "@import" not in full
    assert "url(" not in re.sub(r"url\(#", "", full)
    for tag, attributes in page.tags:
        for name in ("src", "href"):
            address = attributes.get(name)
            assert address is None or address.startswith(("data:image/png;base64,", "#")), (tag, address)


def test_every_image_and_chart_has_a_description(full):
    page = Page(full)
    assert all(attributes.get("alt") for tag, attributes in page.tags if tag == "img")
    described = [attributes for _, attributes in page.tags if attributes.get("role") == "img"]
    assert len(described) == full.count("<svg")
    assert all(attributes["aria-label"] for attributes in described)


def test_ids_are_unique_and_references_point_somewhere(full):
    ids = re.findall(r'\bid="([^"]+)"', full)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"url\(#([^)]+)\)", full)) | set(re.findall(r'href="#([^"]+)"', full)) <= set(ids)


def test_contents_lead_to_every_section_in_order(full):
    contents = full.split('<nav aria-label="Contents">')[1].split("</nav>")[0]
    links = re.findall(r'<a href="#([^"]+)">(.*?)</a>', contents)
    assert links == re.findall(r'<section id="([^"]+)">\n<h2>(.*?)</h2>', full)
    assert links[1] == ("section-who-gains-who-loses", "Who gains, who loses")


def test_images_load_as_they_come_into_view_and_keep_their_place(full):
    images = [attributes for tag, attributes in Page(full).tags if tag == "img"]
    assert images
    assert {image["loading"] for image in images} == {"lazy"}
    height, width = render_image(segmented()).shape[:2]
    assert (images[0]["width"], images[0]["height"]) == (str(width), str(height))


def test_everything_that_scrolls_is_reached_by_keyboard_and_has_a_name(full):
    tags = Page(full).tags
    scrolled = [attributes for _, attributes in tags if attributes.get("class") == "scroll"]
    assert scrolled
    assert all(each["tabindex"] == "0" and each["role"] == "region" and each["aria-label"] for each in scrolled)
    assert all(attributes.get("tabindex") == "0" for tag, attributes in tags if tag == "pre")
    first = next(attributes for tag, attributes in tags if tag == "a")
    assert (first["class"], first["href"]) == ("skip", "#main")


def luminance(color):
    """Relative luminance as WCAG 2 defines it."""
    parts = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_colors_can_be_told_from_the_paper(full, scheme):
    """WCAG AA: 4.5 for text, 3 for what is drawn."""
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    root = re.findall(r":root \{(.*?)\}", full, re.DOTALL)[scheme]
    colors = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", root))
    for name in ("ink", "muted", "bad", "good", "link"):
        assert contrast(colors[name], colors["paper"]) >= 4.5, name
    assert contrast(colors["ink"], colors["panel"]) >= 4.5
    drawn = [name for name in colors if name.startswith("series")]
    assert len(drawn) == 10
    for name in drawn:
        assert contrast(colors[name], colors["paper"]) >= 3, name


def test_charts_take_their_colors_from_the_page(full):
    placeholders = re.findall(r"#0[1-6]0[0-9a-f]0[0-9a-f]\b", full)
    assert placeholders == []
    assert "var(--series-1)" in full


@pytest.mark.parametrize("example", [segmented(EVIL), classified(EVIL)])
def test_names_are_text_not_markup(example):
    evil = results(
        stream("source", "none", [0.5, 0.6], target=EVIL, source=EVIL),
        stream(EVIL, "fixed", [0.5, 0.6], target=EVIL, source=EVIL),
        stream(EVIL, "$dynamic$", [0.5, 0.6], target=EVIL, source=EVIL),
    )
    examples = [
        replace(example, predictions={EVIL: next(iter(example.predictions.values()))}, classes=(EVIL, EVIL, EVIL))
    ]
    text = render_report(
        replace(evil, config={EVIL: EVIL}), examples=examples, title=EVIL, notes=[EVIL], training={EVIL: [1.0, 2.0]}
    )
    page = Page(text)
    assert "script" not in {tag for tag, _ in page.tags}
    assert not any("onerror" in attributes for _, attributes in page.tags)


def test_same_arguments_give_the_same_page(full):
    assert everything() == full


def test_page_is_written_as_rendered(tmp_path):
    write_report(tmp_path / "new" / "report.html", results(), title="T")
    assert (tmp_path / "new" / "report.html").read_text(encoding="utf-8") == render_report(results(), title="T")


def test_classification_page():
    rows = tuple(
        CaseRecord(f"p{i}", "B", {"accuracy": float(i % 2)}, 0.1, 0.3, None, 1e-3, label=1, prediction=i % 2)
        for i in range(6)
    )
    record = StreamRecord("B", "classification", {"accuracy": 0.5}, rows)
    streams = [
        StreamResult.of(record, source="A", method=m, rate=r, seed=0)
        for m, r in (("source", "none"), ("tent", "fixed"))
    ]
    page = Page(render_report(results(*streams), examples=[classified()]))
    assert "no 70% ✗" in page.words
    assert "yes 80% ✓" in page.words
    assert "newly wrong" in page.words


def test_results_without_labels_or_streams_still_make_a_page():
    unlabeled = StreamRecord("B", "segmentation", {}, (CaseRecord("a", "B", {}, 0.1, 0.5, 0.1, 1e-3),))
    for some in (results(), results(StreamResult.of(unlabeled, source="A", method="tent", rate="dynamic", seed=0))):
        assert "No case was scored" in Page(render_report(some)).words


# ---- headline


def test_headline_of_a_success():
    assert sentences(one_target()) == [
        "Without adaptation Dice falls from 91.0 at A to 60.0 at B; "
        "the best method, Tent + dynamic, wins back 15.0 points and reaches 75.0.",
        "Tent + dynamic makes 1 of the 8 cases worse.",
        "With Tent the dynamic rate beats the fixed one.",
    ]


def test_headline_says_when_adaptation_hurts():
    hurt = results(stream("source", "none", [0.6, 0.6]), stream("tent", "fixed", [0.5, 0.6]))
    assert sentences(hurt) == [
        "Without adaptation Dice is 60.0 at B; no method improves on that: the best, Tent, loses 5.0 points.",
        "Tent makes 1 of the 2 cases worse.",
    ]


def test_headline_says_when_nothing_changes_and_nothing_fell():
    same = results(
        stream("source", "none", [0.6], target="A"), stream("source", "none", [0.7]), stream("tent", "fixed", [0.7])
    )
    assert sentences(same)[0] == (
        "Without adaptation Dice does not fall: 60.0 at A, 70.0 at B; "
        "no method improves on that: the best, Tent, changes nothing."
    )


def test_headline_names_the_methods_that_harm_and_the_rate_that_loses():
    mixed = results(
        stream("source", "none", [0.6]),
        stream("ptbn", "none", [0.7]),
        stream("tent", "fixed", [0.58]),
        stream("tent", "dynamic", [0.55]),
    )
    assert sentences(mixed)[0].endswith("the best method, PTBN, gains 10.0 points and reaches 70.0.")
    assert "Worse than no adaptation: Tent (2.0 points), Tent + dynamic (5.0 points)." in sentences(mixed)
    assert "With Tent the dynamic rate falls behind the fixed one." in sentences(mixed)


def test_headline_counts_the_methods_that_a_dynamic_rate_helps():
    several = results(
        stream("source", "none", [0.6]),
        *(stream("tent", rate, [score]) for rate, score in (("fixed", 0.7), ("dynamic", 0.8))),
        *(stream("ttt", rate, [score]) for rate, score in (("fixed", 0.7), ("dynamic", 0.65))),
    )
    assert "The dynamic rate beats the fixed one for 1 of 2 methods and falls behind it for 1." in sentences(several)
    same = results(stream("source", "none", [0.6]), stream("tent", "fixed", [0.7]), stream("tent", "dynamic", [0.7]))
    assert "With Tent the dynamic rate scores like the fixed one." in sentences(same)


def test_a_tie_as_shown_goes_to_the_simplest_method():
    tied = results(
        stream("source", "none", [0.6]),
        stream("atta", "fixed", [0.7]),
        stream("tent", "dynamic", [0.7004]),
        stream("tent", "fixed", [0.7]),
        stream("ptbn", "none", [0.6996]),
    )
    assert sentences(tied)[0].endswith("the best method, PTBN, gains 10.0 points and reaches 70.0.")
    without = results(*tied.streams[:4])
    assert sentences(without)[0].endswith("the best method, Tent, gains 10.0 points and reaches 70.0.")


def test_headline_over_several_targets_speaks_of_the_hardest_and_of_all():
    several = results(
        stream("source", "none", [0.6]),
        stream("source", "none", [0.5], target="C"),
        stream("tent", "fixed", [0.61]),
        stream("tent", "fixed", [0.7], target="C"),
    )
    assert sentences(several)[0].startswith("Without adaptation Dice is 50.0 at C; the best method, Tent, gains 20.0")
    assert sentences(several)[-1] == "Over all 2 targets Tent gains 10.5 points on average; its worst site is B (61.0)."


def test_headline_without_the_source_method():
    assert sentences(results(stream("tent", "fixed", [0.7])))[0] == (
        "At B the source model was not run; the best method, Tent, reaches 70.0."
    )


# ---- rendering


def pixels(rendered: np.ndarray, row: int, column: int) -> tuple[int, ...]:
    scale = rendered.shape[1] // 4
    return tuple(int(value) for value in rendered[row * scale, column * scale])


def test_error_map_tells_missed_invented_and_confused_apart():
    example = segmented()
    rendered = render_errors(example, example.predictions["Source"])
    assert pixels(rendered, 0, 0) == INVENTED
    assert pixels(rendered, 0, 2) == MISSED
    assert pixels(rendered, 1, 1) == CONFUSED
    right = tuple(int(value) // 3 for value in render_image(example)[0, rendered.shape[1] // 4])
    assert pixels(rendered, 0, 1) == right


def test_absolute_errors_are_distances_of_class_values():
    example = segmented()
    prediction = np.array([[2, 1, 0, 0], [0, 0, 2, 0]], np.uint8)
    errors = absolute_error(example, prediction)
    scale = errors.shape[1] // 4
    assert errors.shape == render_image(example).shape[:2]
    assert errors[::scale, ::scale].tolist() == [[2, 0, 1, 0], [0, 2, 0, 0]]
    with pytest.raises(DataError, match="has no label"):
        absolute_error(replace(example, label=None), prediction)


def test_overlay_colors_foreground_only():
    example = segmented()
    rendered, plain = render_overlay(example, example.predictions["Tent"]), render_image(example)
    assert pixels(rendered, 1, 3) == pixels(plain, 1, 3) == (255, 255, 255)
    assert pixels(rendered, 0, 1) != pixels(plain, 0, 1)


def test_volume_is_cut_in_the_middle_of_the_structure():
    label = np.zeros((4, 4, 10), dtype=int)
    label[1, 1, 6:9] = 1
    image = np.zeros((1, 4, 4, 10))
    image[0, 2, 3, 7] = 1
    volume = Example("v", image, label, {"Source": label})
    assert slice_of(volume) == 7
    assert pixels(render_image(volume), 3, 2) == (255, 255, 255)  # x to the right, y down
    assert slice_of(replace(volume, label=None)) == 5
    assert slice_of(replace(volume, axis=0)) == 1
    assert slice_of(segmented()) is None


def test_constant_image_and_unlabeled_example_can_be_shown():
    flat = Example("f", np.ones((2, 4, 4)), None, {"Source": np.ones((4, 4), dtype=int)})
    assert render_image(flat).max() == 0
    assert (render_errors(flat, flat.predictions["Source"]) == render_overlay(flat, flat.predictions["Source"])).all()
    assert "Ground truth of" not in render_report(results(), examples=[flat])


def test_renderings_are_enlarged_or_thinned_to_a_useful_size():
    assert render_image(Example("s", np.zeros((1, 10, 20)), None, {})).shape == (160, 320, 3)
    assert render_image(Example("l", np.zeros((1, 100, 3000)), None, {})).shape == (34, 1000, 3)


def test_the_inlined_image_is_the_rendering(full):
    first = re.search(r'src="data:image/png;base64,([^"]+)"', full)
    assert first
    shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(first[1]))))
    assert (shown == render_image(segmented())).all()


# ---- charts


def test_methods_keep_their_color():
    assert method_color("tent") == method_color("tent", ["ttt", "mine", "tent"])
    assert method_color("mine", ["mine", "yours"]) != method_color("yours", ["mine", "yours"])
    assert len({method_color(name) for name in ("source", "ptbn", "tent", "ttt", "atta")}) == 5


def test_stream_values_are_means_over_streams_at_each_position():
    first = stream("tent", "dynamic", [0.5, 0.5])
    rows = (replace(first.cases[0], rate=None), replace(first.cases[1], rate=3e-3))
    second = replace(first, seed=1, cases=rows)
    (one, two) = _along([first, second], "rate")
    assert one == (1, 1e-3, 0.0)
    assert two == pytest.approx((2, 2e-3, math.sqrt(2) * 1e-3))


def test_dollar_signs_in_names_are_not_mathematics():
    name = r"$\nonsense{$"
    chart = case_gain_chart(results(stream("source", "none", [0.5]), stream(name, "fixed", [0.6])), ("A", "B"), "dice")
    assert name in chart


def test_chart_of_nothing_is_none():
    assert stream_chart(results(stream("source", "none", [0.5])), ("A", "B"), "rate") is None


def test_long_streams_are_drawn_with_few_points():
    blocks = _blocks([(place, float(place), 0.0) for place in range(1, 1001)])
    assert blocks[0] == (1, 2.0, 0.0)
    assert len(blocks) == 334
    spaced = _spaced([float(value) for value in range(5000)])
    assert (len(spaced), spaced[0], spaced[-1]) == (MOST_POINTS, 0.0, 4999.0)


def test_running_mean():
    assert _smooth([1.0, 2.0, 3.0]) == [1.0, 2.0, 3.0]
    assert _smooth([0.0] * 24 + [25.0] + [0.0] * 24)[24] == 5.0  # five values wide
