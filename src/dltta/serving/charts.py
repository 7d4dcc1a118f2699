"""Small drawings of a stream along time, as SVG text: no script, no library, readable in light and dark."""

from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT, LEFT, BOTTOM = 720, 150, 44, 18
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
) -> str:
    """A line with dots, a band where bounds are known; `span` fixes the axis. A sentence if nothing can be drawn."""
    known = [value for series in (values, low or (), high or ()) for value in series if value is not None]
    if not known:
        return f'<p class="soft">{escape(title)}: not recorded by this method.</p>'
    bottom, top = span or (min(known), max(known))
    if top <= bottom:
        bottom, top = bottom - 0.5 * (abs(bottom) or 1), top + 0.5 * (abs(top) or 1)

    def at(position: int, value: float) -> tuple[float, float]:
        share = position / max(len(values) - 1, 1)
        y = (min(max(value, bottom), top) - bottom) / (top - bottom)
        return LEFT + share * (WIDTH - LEFT - 12), 10 + (1 - y) * (HEIGHT - 10 - BOTTOM)

    parts = [_axis(bottom, top, len(values))]
    if low is not None and high is not None:
        parts.append(_band([at(i, v) for i, v in _known(low)], [at(i, v) for i, v in _known(high)]))
    points = [(i, at(i, value)) for i, value in _known(values)]
    path = " ".join(f"{x:.1f},{y:.1f}" for _, (x, y) in points)
    parts.append(f'<polyline points="{path}" fill="none" stroke="var(--blue)" stroke-width="1.5"/>')
    for i, (x, y) in points:
        color = colors[i] if colors is not None else "var(--blue)"
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{color}"/>')
    label = f"{title}: {len(points)} values, latest {points[-1][1] and _number(_known(values)[-1][1])}"
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg></figure>'
    )


def _known(values: Sequence[float | None]) -> list[tuple[int, float]]:
    return [(i, value) for i, value in enumerate(values) if value is not None]


def _band(low: Sequence[tuple[float, float]], high: Sequence[tuple[float, float]]) -> str:
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (*low, *reversed(high)))
    return f'<polygon points="{points}" fill="var(--band)"/>'


def _axis(bottom: float, top: float, count: int) -> str:
    floor = HEIGHT - BOTTOM
    return (
        f'<line x1="{LEFT}" y1="{floor}" x2="{WIDTH - 12}" y2="{floor}" stroke="var(--line)"/>'
        f'<text x="{LEFT - 6}" y="{floor}" text-anchor="end">{_number(bottom)}</text>'
        f'<text x="{LEFT - 6}" y="18" text-anchor="end">{_number(top)}</text>'
        f'<text x="{LEFT}" y="{HEIGHT - 4}">latest {count} images, oldest left</text>'
    )


def _number(value: float) -> str:
    return f"{value:.3g}"
