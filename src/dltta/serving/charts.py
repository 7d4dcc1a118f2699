"""Small drawings of a stream along time, as SVG text: no script, no library, readable in light and dark."""

from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT, EDGE = 1000, 100, 4  # stretched to the page; strokes and words keep their size
COLORS = {
    "accepted": "var(--good)",
    "in-distribution": "var(--blue)",
    "kept": "var(--warn)",
    "rolled-back": "var(--bad)",
    "source": "var(--soft)",
}


def line_chart(
    title: str,
    values: Sequence[float | None],
    *,
    low: Sequence[float | None] | None = None,
    high: Sequence[float | None] | None = None,
    colors: Sequence[str] | None = None,
    span: tuple[float, float] | None = None,
    ends: Sequence[str] = (),
) -> str | None:
    """A line with dots, a band where bounds are known. None if nothing is known.

    `span` fixes the vertical axis, `ends` are what its first and its last place are called.
    """
    known = [value for series in (values, low or (), high or ()) for value in series if value is not None]
    points = _known(values)
    if not points:
        return None
    bottom, top = span or (min(known), max(known))
    if top <= bottom:
        bottom, top = bottom - 0.5 * (abs(bottom) or 1), top + 0.5 * (abs(top) or 1)

    def at(position: int, value: float) -> str:
        share = position / max(len(values) - 1, 1)
        y = (min(max(value, bottom), top) - bottom) / (top - bottom)
        return f"{EDGE + share * (WIDTH - 2 * EDGE):.1f},{EDGE + (1 - y) * (HEIGHT - 2 * EDGE):.1f}"

    parts = []
    around = [at(i, v) for i, v in _known(low or ())] + [at(i, v) for i, v in reversed(_known(high or ()))]
    if around:
        parts.append(f'<polygon points="{" ".join(around)}" fill="var(--band)"/>')
    path = " ".join(at(i, value) for i, value in points)
    parts.append(f'<polyline class="line" points="{path}"/>')
    for i, value in points:
        color = colors[i] if colors is not None else "var(--blue)"
        parts.append(f'<path class="point" d="M{at(i, value)}h0" stroke="{color}"/>')
    latest = _number(points[-1][1])
    axis = f'<div class="ends">{"".join(f"<span>{escape(end)}</span>" for end in ends)}</div>' if ends else ""
    label = f"{title}: {len(points)} values, latest {latest}"
    return (
        f'<figure class="chart"><figcaption>{escape(title)}: <strong>{latest}</strong></figcaption>'
        f'<div class="plot"><span class="top">{_number(top)}</span><span class="bottom">{_number(bottom)}</span>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" aria-label="{escape(label)}">'
        f"{''.join(parts)}</svg></div>{axis}</figure>"
    )


def _known(values: Sequence[float | None]) -> list[tuple[int, float]]:
    return [(i, value) for i, value in enumerate(values) if value is not None]


def _number(value: float) -> str:
    return f"{value:.3g}"
