"""Which signals earn their place? From the rehearsals of models: the error of the quality model without each signal,
and what choosing a candidate for each image gained over giving one everywhere.

    python docs/figures/signals.py cells=MODEL types=MODEL …

writes docs/results/signals.json and the tables in docs/rehearsal.md.
"""

import json
import sys
from pathlib import Path

from dltta.quality.measures import SIGNALS

DOCS = Path(__file__).parent.parent
BEGIN, END = "<!-- signals: begin -->", "<!-- signals: end -->"


def found_in(folder):
    """Errors with all signals and without each, and the plan, of the batch size that the task is run with."""
    sizes = json.loads((Path(folder) / "rehearsal.json").read_text())["batch_sizes"]
    size = max(sizes, key=int)
    return {
        "batch": int(size),
        **{key: sizes[size]["default"][key] for key in ("signals", "plan", "policy", "choosing")},
    }


def table(models):
    lines = ["| | " + " | ".join(models) + " |", "|:--|" + "--:|" * len(models)]
    plans = [" + ".join(each["plan"]["arms"]) for each in models.values()]
    flips = ["" if each["plan"]["flip"] is None else ", flip" for each in models.values()]
    lines.append("| chosen plan | " + " | ".join(map("".join, zip(plans, flips, strict=True))) + " |")
    gains = [
        f"{100 * each['choosing']['gain']:+.1f} ± {100 * each['choosing']['error']:.1f}" for each in models.values()
    ]
    lines.append("| choosing for each image gained, points | " + " | ".join(gains) + " |")
    lines.append("| error with all | " + " | ".join(f"{each['signals']['all']:.3f}" for each in models.values()) + " |")
    for signal in SIGNALS:
        worse = [each["signals"][signal] - each["signals"]["all"] for each in models.values()]
        lines.append(f"| without `{signal}` | " + " | ".join(f"{1000 * value:+.1f}" for value in worse) + " |")
    return "\n".join(lines)


def main():
    models = {name: found_in(folder) for name, _, folder in (each.partition("=") for each in sys.argv[1:])}
    (DOCS / "results" / "signals.json").write_text(json.dumps(models, indent=1) + "\n")
    page = DOCS / "rehearsal.md"
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{table(models)}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
