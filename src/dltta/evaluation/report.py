"""9 report. One HTML file that shows what happened: it needs no network, no script and no second file."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from dltta.evaluation import figures, formats, rendering
from dltta.evaluation.examples import Example
from dltta.evaluation.expected import quality_rows, quality_streams
from dltta.evaluation.headline import Finding, find, hardest_pair, sentences
from dltta.evaluation.parts import by_part, changing_pairs
from dltta.evaluation.results import SOURCE, Results
from dltta.evaluation.story import story
from dltta.evaluation.tables import (
    NAMES,
    Cell,
    Column,
    Pair,
    Row,
    Table,
    by_metric,
    by_target,
    count_decisions,
    method_label,
    methods,
    metric_title,
    metric_word,
    primary_metric,
    targets,
)
from dltta.files import write_atomically

SECTION = re.compile(r'<section id="([^"]+)">\n<h2>(.*?)</h2>')


def write_report(
    path: Path,
    results: Results,
    *,
    examples: Sequence[Example] = (),
    title: str = "Test-time adaptation",
    notes: Sequence[str] = (),
    training: Mapping[str, Sequence[float]] | None = None,
    changing: Results | None = None,
) -> None:
    """Write the report; `notes` are remarks for the top (such as "synthetic images"), `training` curves by name.

    With `changing`, the same model on a stream that changes its site, the report begins with the story of both.
    """
    text = render_report(results, examples=examples, title=title, notes=notes, training=training, changing=changing)
    write_atomically(path, text)


def render_report(
    results: Results,
    *,
    examples: Sequence[Example] = (),
    title: str = "Test-time adaptation",
    notes: Sequence[str] = (),
    training: Mapping[str, Sequence[float]] | None = None,
    changing: Results | None = None,
) -> str:
    """The text of the report; the same arguments give the same text."""
    pair = hardest_pair(results)
    sections = [
        _story_section(results, changing),
        _tables_section(results),
        _gain_section(results),
        _examples_section(examples),
        _changing_section(changing or results),
        _decisions_section(results),
        _quality_section(results),
        _stream_section(results, pair),
        _training_section(training or {}),
        _provenance_section(results),
    ]
    folder = files("dltta.evaluation")
    return Template(folder.joinpath("report.html").read_text(encoding="utf-8")).substitute(
        title=escape(title),
        style=folder.joinpath("report.css").read_text(encoding="utf-8").strip(),
        lead=_lead(results, notes),
        contents=_contents(sections),
        sections="\n".join(filter(None, sections)),
    )


# ---- parts


def _lead(results: Results, notes: Sequence[str]) -> str:
    first, *others = sentences(results)
    parts = [f'<p class="headline">{escape(first)}</p>']
    if others:
        parts.append(f'<p class="qualify">{escape(" ".join(others))}</p>')
    finding = find(results)
    if finding is not None:
        parts.append(_numbers(finding))
    parts.extend(f'<p class="aside">{escape(note)}</p>' for note in notes)
    return "\n".join(parts)


def _numbers(finding: Finding) -> str:
    """The three values behind the headline, large."""
    title, (source, target) = metric_title(finding.metric), finding.pair
    best = f"{title} at {target} with {method_label(*finding.best)}" if finding.best else ""
    shown = [
        (finding.at_source, f"{title} at {source}, the source site"),
        (finding.at_target, f"{title} at {target} without adaptation"),
        (finding.reached if finding.best else None, best),
    ]
    items = [
        f"<div><dt>{escape(what)}</dt><dd>{100 * value:.1f}</dd></div>" for value, what in shown if value is not None
    ]
    return f'<dl class="numbers">{"".join(items)}</dl>'


def _story_section(results: Results, changing: Results | None) -> str:
    """For a reader who knows nothing of all this."""
    lines = [] if changing is None else story(results, changing)
    items = "".join(f"<li><b>{escape(line.head)}</b> {escape(line.text)}</li>\n" for line in lines)
    return _section("What happened", f'<ol class="story">{items}</ol>') if lines else ""


def _changing_section(results: Results) -> str:
    """Streams that change their site: scores along the stream, and the mean of each part."""
    blocks = []
    for pair in changing_pairs(results):
        found = by_part(results, pair)
        sites = [f"{part.site}, {part.count} images" for part in next(iter(found.values()))]
        heads = "".join(f'<th scope="col">{escape(head)}</th>' for head in ("Method", *sites))
        lines = [
            f'<tr><th scope="row">{escape(method_label(*entry))}</th>'
            f"{''.join(f'<td>{_percent(part.score)}</td>' for part in row)}</tr>\n"
            for entry, row in found.items()
        ]
        title = f"{metric_title(primary_metric(results))} of every image"
        blocks.append(_grid([_chart(title, pair[1].replace("+", " → "), figures.change_chart(results, pair))]))
        blocks.append(_scrolled("Scores before and after a change", heads, lines))
    note = "Nobody tells the methods when the site changes. Faint lines: single images; strong lines: running mean."
    return _section("When the scanner changes", f'<p class="note">{note}</p>', *blocks) if blocks else ""


def _tables_section(results: Results) -> str:
    if not any(stream.metrics for stream in results.streams):
        return ""
    sites = targets(results)
    if len(sites) == 1:
        parts = [_table(by_metric(results, sites[0]))]
    else:
        folded = [_folded(_arrow(pair), _table(by_metric(results, pair))) for pair in sites]
        parts = [_table(by_target(results)), *folded]
    parts.extend(_per_class(results, pair) for pair in sites)
    return _section("Results", *parts)


def _per_class(results: Results, pair: Pair) -> str:
    streams = [stream for stream in results.streams if (stream.source, stream.target) == pair]
    names = list(dict.fromkeys(name for stream in streams for name in stream.metrics if name.startswith("dice_")))
    if len(names) < 2:
        return ""
    return _folded(f"Dice of each structure, {_arrow(pair)}", _table(by_metric(results, pair, names)))


def _gain_section(results: Results) -> str:
    """Means and single cases, side by side, for every target."""
    metric = primary_metric(results)
    if all(method == SOURCE for method, _ in methods(results)) or not results.streams:
        return ""
    title = "Predictions that changed" if metric == "accuracy" else "Gain of every case"
    charts = []
    for pair in targets(results):
        charts.append(_chart(f"Gain in {metric_word(metric)}", _arrow(pair), figures.gain_chart(results, pair, metric)))
        charts.append(_chart(title, _arrow(pair), figures.case_gain_chart(results, pair, metric)))
    rates = '<span class="ring"></span> fixed rate, <span class="ring full"></span> dynamic, other or no rate.'
    dots = "" if metric == "accuracy" else " Each dot is a case; the upright bar is their mean."
    note = f'<p class="note">{rates}{dots} Left of the line adaptation harms.</p>'
    return _section("Who gains, who loses", note, _grid(charts))


def _stream_section(results: Results, first: Pair | None) -> str:
    """What the adapter did along the stream; targets other than the hardest one are folded."""
    parts = []
    for pair in sorted(targets(results), key=lambda pair: pair != first):
        charts = _stream_charts(results, pair)
        if charts:
            grid = _grid(charts)
            parts.append(grid if pair == first else _folded(_arrow(pair), grid))
    note = "Thin lines: as measured; strong lines: running mean. The discrepancy starts when the memory is ready."
    return _section("Along the stream", f'<p class="note">{note}</p>', *parts) if parts else ""


def _stream_charts(results: Results, pair: Pair) -> list[str]:
    drawn = {
        "Learning rate": figures.stream_chart(results, pair, "rate"),
        "Discrepancy with what the memory recalls": figures.stream_chart(results, pair, "discrepancy"),
    }
    for method, _ in methods(results):
        drawn[f"Test-time loss of {NAMES.get(method, method)}"] = figures.loss_chart(results, pair, method)
    return [_chart(title, _arrow(pair), svg) for title, svg in drawn.items() if svg is not None]


def _decisions_section(results: Results) -> str:
    """What the guard decided at the targets and why, as counts."""
    rows = count_decisions(results, targets(results))
    if not rows:
        return ""
    heads = "".join(f'<th scope="col">{head}</th>' for head in ("Method", "Decision", "Reason", "Cases"))
    lines = [
        f'<tr><th scope="row">{escape(row.label)}</th><td>{escape(row.decision)}</td>'
        f"<td>{escape(row.reason or formats.NOT_RUN)}</td><td>{row.cases}</td></tr>\n"
        for row in rows
    ]
    return _section("Decisions", _scrolled("Decisions", heads, lines))


def _quality_section(results: Results) -> str:
    """Expected quality beside the scores, a line per stream."""
    rows = quality_rows(results)
    if not rows:
        return ""
    names = (
        "Target",
        "Method",
        "Seed",
        "Cases",
        "Expected",
        "Score",
        "Rank correlation",
        "In the interval",
        "To review",
    )
    heads = "".join(f'<th scope="col">{name}</th>' for name in names)
    lines = [
        f'<tr><th scope="row">{escape(row.target)}</th><td>{escape(NAMES.get(row.method, row.method))}</td>'
        f"<td>{row.seed}</td><td>{row.cases}</td><td>{_percent(row.expected)}</td><td>{_percent(row.score)}</td>"
        f"<td>{formats.NOT_RUN if math.isnan(row.correlation) else f'{row.correlation:.2f}'}</td>"
        f"<td>{_percent(row.covered)}</td><td>{_percent(row.review)}</td></tr>\n"
        for row in rows
    ]
    note = "Expected without labels, by what was rehearsed at the source site; intervals are meant to hold 90 %."
    dots = "Each dot is a case, its line the interval; on the diagonal the expectation is right, red lies outside."
    charts = [
        _chart(
            f"{NAMES.get(stream.method, stream.method)}, expected and true", _arrow((stream.source, stream.target)), svg
        )
        for stream in quality_streams(results)
        if (svg := figures.quality_chart(stream))
    ]
    parts = [f'<p class="note">{note}{" " + dots if charts else ""}</p>', _grid(charts) if charts else ""]
    return _section("Expected quality", *parts, _scrolled("Expected quality", heads, lines))


def _percent(value: float) -> str:
    return formats.NOT_RUN if math.isnan(value) else f"{100 * value:.1f}"


def _training_section(training: Mapping[str, Sequence[float]]) -> str:
    charts = [_chart(name, "", figures.training_chart(name, values)) for name, values in training.items() if values]
    return _section("Source training", _grid(charts)) if charts else ""


def _provenance_section(results: Results) -> str:
    provenance = json.dumps(asdict(results.provenance), indent=2, ensure_ascii=False, default=str)
    config = json.dumps(dict(results.config), indent=2, ensure_ascii=False, default=str)
    return _section(
        "Where these numbers come from",
        _folded("Settings", f'<pre tabindex="0">{escape(config)}</pre>'),
        _folded("Code, data and machine", f'<pre tabindex="0">{escape(provenance)}</pre>'),
    )


# ---- examples


def _examples_section(examples: Sequence[Example]) -> str:
    if not examples:
        return ""
    if all(prediction.ndim == 1 for prediction in examples[0].predictions.values()):
        return _section("Examples", f'<div class="tiles square">{"".join(map(_patch, examples))}</div>')
    note = "Top: the image and the predictions. Bottom: the ground truth and where each prediction is wrong."
    return _section("Examples", f'<p class="note">{note}</p>', _keys(examples), *map(_segmented, examples))


def _segmented(example: Example) -> str:
    place = rendering.slice_of(example)
    heading = example.name if place is None else f"{example.name}, slice {place}"
    tiles = [_truth_tile(example), *(_prediction_tile(example, label) for label in example.predictions)]
    shape = rendering.render_image(example).shape
    ratio = shape[1] / shape[0]
    layout = "wide" if ratio > 1.8 else "medium" if ratio > 1.2 else "square"
    return f'<h3>{escape(heading)}</h3>\n<div class="tiles {layout}">{"".join(tiles)}</div>'


def _truth_tile(example: Example) -> str:
    images = [_image(rendering.render_image(example), f"Image {example.name}")]
    if example.label is not None:
        truth = rendering.render_overlay(example, example.label)
        images.append(_image(truth, f"Ground truth of {example.name}"))
    return f"<figure>{''.join(images)}<figcaption><b>Image, ground truth</b></figcaption></figure>"


def _prediction_tile(example: Example, label: str) -> str:
    prediction = example.predictions[label]
    images = [_image(rendering.render_overlay(example, prediction), f"Prediction of {label} for {example.name}")]
    if example.label is not None:
        images.append(_image(rendering.render_errors(example, prediction), f"Errors of {label} for {example.name}"))
    score = example.scores.get(label, math.nan)
    said = "" if math.isnan(score) else f" Dice {100 * score:.1f}"
    return f"<figure>{''.join(images)}<figcaption><b>{escape(label)}</b>{said}</figcaption></figure>"


def _patch(example: Example) -> str:
    truth = None if example.label is None else int(example.label)
    lines = []
    for label, chances in example.predictions.items():
        predicted = int(chances.argmax())
        outcome = "" if truth is None else "right" if predicted == truth else "wrong"
        said = f"{_class_name(example, predicted)} {100 * float(chances[predicted]):.0f}%"
        sign = {"right": " ✓", "wrong": " ✗", "": ""}[outcome]
        lines.append(f'<dt>{escape(label)}</dt><dd class="{outcome}">{escape(said)}{sign}</dd>')
    known = "" if truth is None else f"<b>{escape(_class_name(example, truth))}</b> "
    image = _image(rendering.render_image(example), f"Patch {example.name}")
    caption = f'<figcaption>{known}{escape(example.name)}<dl class="predictions">{"".join(lines)}</dl></figcaption>'
    return f"<figure>{image}{caption}</figure>"


def _class_name(example: Example, value: int) -> str:
    return example.classes[value] if value < len(example.classes) else f"class {value}"


def _keys(examples: Sequence[Example]) -> str:
    """What the colors mean."""
    classes = [(name, rendering.class_color(value)) for value, name in enumerate(examples[0].classes) if value > 0]
    errors = [("missed", rendering.MISSED), ("invented", rendering.INVENTED)]
    if len(classes) != 1:
        errors.append(("confused with another structure", rendering.CONFUSED))
    return _key("Structures:", classes) + _key("Errors:", errors)


def _key(title: str, items: Iterable[tuple[str, rendering.Color]]) -> str:
    listed = [f'<li><i style="background:rgb{color}"></i>{escape(name)}</li>' for name, color in items]
    return f'<ul class="key"><li>{title}</li>{"".join(listed)}</ul>' if listed else ""


# ---- elements


def _contents(sections: Sequence[str]) -> str:
    """Links to the sections there are."""
    found = [match.groups() for section in sections if (match := SECTION.match(section))]
    links = "".join(f'<li><a href="#{name}">{title}</a></li>' for name, title in found)
    return f'<nav aria-label="Contents"><ol>{links}</ol></nav>'


def _arrow(pair: Pair) -> str:
    return f"{pair[0]} → {pair[1]}"


def _section(title: str, *parts: str) -> str:
    name = f"section-{re.sub(r'[^a-z]+', '-', title.lower()).strip('-')}"
    return "\n".join([f'<section id="{name}">', f"<h2>{escape(title)}</h2>", *filter(None, parts), "</section>"])


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{escape(title)}</summary>\n{content}\n</details>"


def _grid(charts: Sequence[str]) -> str:
    return f'<div class="charts">{"".join(charts)}</div>'


def _chart(title: str, where: str, svg: str) -> str:
    described = f"{title}, {where}" if where else title
    caption = f"<figcaption>{escape(title)} <span>{escape(where)}</span></figcaption>"
    return f'<figure class="chart">{caption}<div role="img" aria-label="{escape(described)}">{svg}</div></figure>\n'


def _image(rendered: rendering.Rendering, alt: str) -> str:
    height, width = rendered.shape[:2]  # so that nothing moves when an image comes into view
    source = rendering.png_uri(rendered)
    return f'<img src="{source}" alt="{escape(alt)}" width="{width}" height="{height}" loading="lazy" decoding="async">'


def _table(table: Table) -> str:
    heads = "".join(f'<th scope="col">{escape(head)}</th>' for head in ["Method", *formats.headings(table)])
    rows = [_table_row(row, table, before) for before, row in zip([None, *table.rows], table.rows, strict=False)]
    notes = "".join(f"<li>{escape(note)}</li>" for note in table.notes)
    return f'{_scrolled("Scores", heads, rows)}\n<ul class="notes">{notes}</ul>'


def _scrolled(name: str, heads: str, rows: Iterable[str]) -> str:
    """A table in a box of its own that scrolls sideways, by keyboard too."""
    table = f"<table><thead><tr>{heads}</tr></thead>\n<tbody>{''.join(rows)}</tbody></table>"
    return f'<div class="scroll" role="region" aria-label="{name}" tabindex="0">{table}</div>'


def _table_row(row: Row, table: Table, before: Row | None) -> str:
    """One method; a line above it where the method changes."""
    cells = [_table_cell(cell, column) for cell, column in zip(row.cells, table.columns, strict=True)]
    cells.extend(f"<td>{escape(text)}</td>" for text in formats.extras(row, table))
    first = ' class="first"' if before is not None and before.method == SOURCE and row.method != SOURCE else ""
    return f'<tr{first}><th scope="row">{escape(row.label)}</th>{"".join(cells)}</tr>\n'


def _table_cell(cell: Cell | None, column: Column) -> str:
    if cell is None:
        return f'<td class="sd">{formats.NOT_RUN}</td>'
    mean, _, spread = formats.value(cell, column).partition(" ± ")
    best = ' class="best"' if cell.best else ""
    sd = f' <span class="sd">± {spread}</span>' if spread else ""
    mark = f'<span class="mark">{formats.mark(cell)}</span>' if cell.significance else ""
    return f"<td><span{best}>{mean}</span>{sd}{mark}{_table_gain(cell, column)}</td>"


def _table_gain(cell: Cell, column: Column) -> str:
    text = formats.gain(cell, column)
    if not text:
        return ""
    size = column.shown(cell.gain)
    tone = " loss" if size < 0 else "" if size > 0 else " none"
    return f'<span class="gain{tone}">{text}</span>'
