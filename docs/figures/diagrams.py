"""Draws the diagrams of the documentation as SVG: python docs/figures/diagrams.py

Narrow enough for a phone; on paper of their own, so that they can be read on light and dark pages.
"""

from html import escape
from pathlib import Path

IMAGES = Path(__file__).parent.parent / "images"
WIDTH, LINE, PAD = 460, 18, 10
TINTS = {"plain": "#ffffff", "source": "#dcefe9", "target": "#fdeacb", "result": "#dbe9f6"}


def box(x: int, y: int, width: int, lines: list[str], tint: str = "plain") -> str:
    """A box with lines of text; the first is bold."""
    height = 2 * PAD + LINE * len(lines) - 4
    text = "".join(
        f'<text x="{x + PAD}" y="{y + PAD + 11 + LINE * i}" font-weight="{400 if i else 600}">{escape(line)}</text>'
        for i, line in enumerate(lines)
    )
    frame = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{TINTS[tint]}" stroke="#7a848d"/>'
    return frame + text


def arrow(*points: tuple[int, int]) -> str:
    """A line through the points with a head at its end."""
    path = " ".join(f"{'L' if i else 'M'}{x} {y}" for i, (x, y) in enumerate(points))
    return f'<path d="{path}" fill="none" stroke="#3d464e" stroke-width="1.6" marker-end="url(#head)"/>'


def label(x: int, y: int, text: str) -> str:
    return f'<text x="{x}" y="{y}" fill="#3d464e" font-size="12">{escape(text)}</text>'


def drawing(title: str, height: int, *parts: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="system-ui, Segoe UI, Roboto, Arial, sans-serif" font-size="13" fill="#1b1f24" role="img">'
        f"<title>{escape(title)}</title>"
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#3d464e"/></marker></defs>'
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#f7f8f9"/>{"".join(parts)}</svg>\n'
    )


def overview() -> str:
    return drawing(
        "From hospital A to hospital B", 220,
        box(12, 12, 200, ["Hospital A", "labeled images"], "source"),
        arrow((112, 64), (112, 84)),
        box(12, 86, 200, ["dltta train", "or a network of your own"]),
        box(248, 12, 200, ["Hospital B", "images, one by one"], "target"),
        arrow((348, 64), (348, 84)),
        box(248, 86, 200, ["dltta adapt", "changes its own copy"]),
        arrow((212, 112), (246, 112)), label(212, 80, "model"),
        arrow((348, 138), (348, 154)),
        box(128, 156, 320, ["A mask or class for each image,", "and a log: what was done, and why"], "result"),
    )  # fmt: skip


def step() -> str:
    return drawing(
        "One step of adaptation", 426,
        box(12, 12, 436, ["1  An image x", "goes through the network with its weights θ"], "target"),
        arrow((230, 64), (230, 80)),
        box(12, 82, 436, ["2  Features q and a prediction v"]),
        arrow((118, 114), (118, 130)), arrow((342, 114), (342, 130)),
        box(12, 132, 212, ["3  Memory, Eq. (3)", "p: what similar images got"]),
        box(236, 132, 212, ["4  A loss without labels", "its gradient"]),
        arrow((118, 184), (118, 200)),
        box(12, 202, 212, ["5  Discrepancy, Eq. (4), (5)", "how far v is from p"]),
        arrow((118, 254), (118, 270)), arrow((342, 184), (342, 270)),
        box(12, 272, 436, ["6  Rate η = α · discrepancy, Eq. (6)", "update θ ← θ − η · gradient, Eq. (2)"]),
        arrow((230, 324), (230, 340)),
        box(
            12, 342, 436,
            ["7  The same image through the new network", "is the prediction that is given;",
             "its features and prediction go into the memory"],
            "result",
        ),
    )  # fmt: skip


def rehearsal() -> str:
    return drawing(
        "Rehearsal at hospital A, use at hospital B", 338,
        box(12, 12, 212, ["Hospital A", "images with labels"], "source"),
        box(236, 12, 212, ["Hospital B", "an image without a label"], "target"),
        arrow((118, 64), (118, 80)),
        box(12, 82, 212, ["Simulated sites", "as other scanners show them"]),
        arrow((118, 134), (118, 150)), arrow((342, 64), (342, 150)),
        box(12, 152, 212, ["Predicted in several ways", "signals, and true scores"]),
        box(236, 152, 212, ["Predicted the same ways", "signals"]),
        arrow((118, 204), (118, 220)), arrow((342, 204), (342, 270)),
        box(12, 222, 212, ["Quality model", "kept with the network"]),
        arrow((118, 274), (118, 296), (234, 296)),
        box(236, 272, 212, ["The best prediction,", "and how good it may be"], "result"),
    )  # fmt: skip


def main() -> None:
    for drawn in (overview, step, rehearsal):
        (IMAGES / f"diagram_{drawn.__name__}.svg").write_text(drawn(), encoding="utf-8")


if __name__ == "__main__":
    main()
