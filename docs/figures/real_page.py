"""The page of docs/figures/real.py: its tables, its sentences and its figure, from the numbers that are kept."""

import json
import math
from pathlib import Path
from statistics import fmean, stdev

from matplotlib.figure import Figure

from dltta.evaluation.comparison import bootstrap_interval
from dltta.evaluation.formats import signed
from dltta.evaluation.paper.published import Published
from dltta.evaluation.tables import NAMES, method_label
from dltta.methods import Method
from dltta.recipes import UDA

TITLES = {
    "wbc_cells": "White blood cells, segmentation, one laboratory → two others",
    "wbc_types": "White blood cells, kinds, one laboratory → two others",
    "nuclei_tissue": "Nuclei in stained tissue, white → lilac",
    "nuclei_fluo": "Nuclei in fluorescence, one acquisition format → another",
    "oct_layers": "Retinal layers, Optovue → Cirrus",
    "prostate_t2": "Prostate MRI, slice by slice, Radboud → UCL and BIDMC",
    "prostate_t2_long": "Prostate MRI, slice by slice, networks trained three times as long",
    "prostate_t2_ucl": "Prostate MRI, slice by slice, UCL → Radboud and BIDMC",
    "prostate_t2_bidmc": "Prostate MRI, slice by slice, BIDMC → Radboud and UCL",
    "prostate_t2_3d": "Prostate MRI, whole volumes, Radboud → UCL and BIDMC",
    "spinal_cord": "Spinal cord MRI, one scanner → three others",
}
PAPER = ("tent", "ttt", "atta")
OTHER_SITES = {"prostate_t2_ucl": "prostate_t2", "prostate_t2_bidmc": "prostate_t2"}  # with --source and --target
LONGER = {
    "prostate_t2_long": "prostate_t2"
}  # with --epochs: the same targets, which count once in what is over targets
COLUMNS = {"ucl": "D", "bidmc": "E"}  # of the paper's prostate table, whose source A is Radboud
PLAIN = ("source", "none")
COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#7f7f7f", "#a6761d", "#000000", "#882255")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")
PICTURE = (
    "![Each method's gain over the source model at every real target: most methods lie where batch statistics alone, "
    "PTBN, lie](images/real.png)"
)
INITIAL_PICTURE = (
    "![Tent, TTT and ATTA at initial rates over a factor of a thousand, at each target: points over the smallest fixed "
    "rate](images/initial.png)"
)
RULES = {"fixed": "#d55e00", "dynamic": "#0072b2"}  # and their colors
CONTROLS = {
    "fixed": "the method's own fixed rate",
    "matched": "a fixed rate at the mean of the dynamic one",
    "shuffled": "the same rates in random order",
}


def place_of(method: str) -> int:
    """In the order of the methods' table; what learns with target images behind, and the default recipe last."""
    order = [*map(str, Method), *UDA, "recommended"]
    return order.index(method) if method in order else len(order)


def gains(kept: dict, method: str, rate: str, over: tuple[str, str] = PLAIN) -> dict:
    """(task, target): how many points better than another method or rate, wherever both were run on the same models."""
    found = {}
    for name, task in kept.items():
        rows = {(row["method"], row["rate"]): row["cells"] for row in task["rows"]}
        for target, cell in rows.get((method, rate), {}).items():
            ours, theirs = by_seed(cell), by_seed(rows.get(over, {}).get(target))
            if seeds := ours.keys() & theirs.keys():
                found[name, target] = fmean(ours[seed] - theirs[seed] for seed in sorted(seeds))
    return found


def by_seed(cell: dict | None) -> dict[str, float]:
    """The mean of each source training; one of before they were kept is the first's."""
    return {} if cell is None else cell.get("by_seed", {"0": cell["mean"]})


def place(key: tuple[str, str]) -> str:
    return f"{key[0]}, {key[1]}"


def plain_rates(kept: dict) -> list[tuple[str, str]]:
    """Every method as its authors run it, in the order of the methods' table; the default recipe last."""
    found = dict.fromkeys((row["method"], row["rate"]) for task in kept.values() for row in task["rows"])
    usual = [pair for pair in found if pair[1] in ("none", "fixed", "aligned") and pair[0] != "source"]
    aligned = {method for method, rate in usual if rate == "aligned"}  # its authors' rule
    chosen = [pair for pair in usual if pair[1] != "fixed" or pair[0] not in aligned]
    return sorted(chosen, key=lambda pair: place_of(pair[0]))


def overview(kept: dict) -> str:
    """Every method over all targets."""
    lines = [
        "| Method | targets | gain over source | worst target | gap closed | cases made worse | over PTBN |",
        "|:--|--:|--:|--:|--:|--:|--:|",
    ]
    for method, rate in plain_rates(kept):
        found = gains(kept, method, rate)
        worst = min(found, key=lambda key: found[key])
        gaps = {
            (name, target): task["home"]["mean"] - cell["mean"]
            for name, task in kept.items()
            if task["home"] is not None
            for row in task["rows"]
            if row["method"] == "source"
            for target, cell in row["cells"].items()
        }
        open_gaps = [key for key in found if gaps.get(key, 0.0) > 0]
        closed = sum(found[key] for key in open_gaps) / sum(gaps[key] for key in open_gaps) if open_gaps else math.nan
        over = gains(kept, method, rate, ("ptbn", "none"))
        worse = [
            row["worse"]
            for task in kept.values()
            for row in task["rows"]
            if (row["method"], row["rate"]) == (method, rate) and row["worse"] is not None
        ]
        cells = [
            NAMES.get(method, method),
            str(len(found)),
            points(fmean(found.values())) + over_tasks(found),
            f"{points(found[worst])} ({place(worst)})",
            "–" if math.isnan(closed) else signed(f"{100 * closed:.0f} %"),
            f"{100 * fmean(worse):.0f} %" if worse else "–",
            points(fmean(over.values())) + over_tasks(over) if over and method != "ptbn" else "–",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def over_tasks(found: dict[tuple[str, str], float]) -> str:
    """The 95 % interval of the mean over targets: other tasks, each with its targets, which share source models."""
    low, high = bootstrap_interval([found], {key: key[0] for key in found})
    return "" if math.isnan(low) else f" ({points(low)} to {points(high)})"


def draw(kept: dict) -> Figure:
    """Each method's gain over the source model: a dot for every target, a bar at their mean."""
    kept = counted(kept)
    rows = [(method, found) for method, rate in plain_rates(kept) if (found := gains(kept, method, rate))]
    figure = Figure(figsize=(7.2, 0.3 * len(rows) + 1.6), layout="constrained")
    axis = figure.subplots()
    axis.axvline(0, color="#888888", linewidth=1, zorder=1)
    tasks = list(kept)
    for place, (_, found) in enumerate(rows):
        axis.plot([min(found.values()), max(found.values())], [place, place], color="#e4e4e4", linewidth=5, zorder=0)
        for (name, _), gain in found.items():
            color, marker = COLORS[tasks.index(name) % len(COLORS)], MARKERS[tasks.index(name) % len(MARKERS)]
            axis.scatter(gain, place, s=26, color=color, marker=marker, alpha=0.9, linewidths=0, zorder=2)
        axis.scatter(fmean(found.values()), place, s=170, color="black", marker="|", linewidths=2, zorder=3)
    axis.set_yticks(range(len(rows)), [f"{NAMES.get(method, method)} ({len(found)})" for method, found in rows])
    axis.invert_yaxis()
    axis.set_xlabel("points above the source model, at each target (bar: mean; in brackets: targets)")
    axis.spines[["top", "right"]].set_visible(False)
    for place, name in enumerate(tasks):
        color, marker = COLORS[place % len(COLORS)], MARKERS[place % len(MARKERS)]
        axis.scatter([], [], s=26, color=color, marker=marker, linewidths=0, label=name)
    figure.legend(loc="outside upper center", ncols=4, frameon=False, fontsize=8)
    return figure


def points(value: float) -> str:
    return signed(f"{round(value, 1) + 0.0:+.1f}")


def dynamic(kept: dict) -> str:
    """The paper's rate against its controls."""
    lines = ["| Method | dynamic over | targets | mean | worst target | targets ≥ 0 |", "|:--|:--|--:|--:|--:|--:|"]
    for method in PAPER:
        for control, words in CONTROLS.items():
            found = gains(kept, method, "dynamic", (method, control))
            if found:
                worst = min(found, key=lambda key: found[key])
                shown = [
                    NAMES[method],
                    words,
                    str(len(found)),
                    signed(f"{fmean(found.values()):+.2f}"),
                    signed(f"{found[worst]:+.2f} ({place(worst)})"),
                    f"{sum(round(value, 2) >= 0 for value in found.values())} of {len(found)}",
                ]
                lines.append(f"| {' | '.join(shown)} |")
    return "\n".join(lines) if len(lines) > 2 else "Not run yet."


def homes(kept: dict) -> str:
    lines = [
        "| task | source | epochs | held out | at home | at the targets | trained at the target |",
        "|:--|:--|--:|--:|--:|:--|:--|",
    ]
    for name, task in kept.items():
        source = next(row for row in task["rows"] if row["method"] == "source")
        away = ", ".join(f"{target} {cell['mean']:.1f}" for target, cell in source["cells"].items())
        there = [
            f"{target} {found['mean']:.1f} ({found['n']} held out)"
            for target in source["cells"]
            if (found := at_target(kept, name, target)) is not None
        ]
        home = task["home"]
        sites = " + ".join(spec.rpartition("/")[2] for spec in task["source"])
        score = (
            "–" if home is None else f"{task['metric'].capitalize()} {home['mean']:.1f}{spread(home, task['metric'])}"
        )
        score += "".join(longer(home, epochs, found) for epochs, found in task.get("longer", {}).items())
        lines.append(
            f"| {name} | {sites} | {task['epochs']} | {'–' if home is None else home['n']} | {score} | {away} | "
            f"{', '.join(there) or '–'} |"
        )
    return "\n".join(lines)


def longer(home: dict | None, epochs: str, found: dict) -> str:
    """Other networks that trained for so many epochs, beside those of the same seeds, which hold out the same cases."""
    known = {} if home is None else home.get("by_seed", {})
    seeds = sorted(found["by_seed"].keys() & known.keys())
    beside = f" instead of {fmean(known[seed] for seed in seeds):.1f}" if seeds else ""
    return f"; {found['mean']:.1f}{beside} with {epochs} epochs ({count(len(found['by_seed']), 'training')})"


def spread(home: dict, metric: str) -> str:
    """From which training to which, if there are several, and from which case to which; a class is right or not."""
    trainings = list(home.get("by_seed", {}).values())
    known = {"trainings": trainings if len(trainings) > 1 else [], "cases": home.get("cases", [])}
    shown = [
        f"{what} {min(scores):.1f} to {max(scores):.1f}"
        for what, scores in known.items()
        if scores and not (what == "cases" and metric == "accuracy")
    ]
    return f" ({', '.join(shown)})" if shown else ""


def at_target(kept: dict, name: str, target: str) -> dict | None:
    """At home, a network whose source is this target: of a comparison for that, or of another direction."""
    family = family_of(name)
    others = [kept[each] for each in counted(kept) if family_of(each) == family]
    homes = [task["home"] for task in others if [spec.rpartition("/")[2] for spec in task["source"]] == [target]]
    return kept[name].get("there", {}).get(target) or next(iter(homes), None)


def expected(kept: dict) -> str:
    """What the recommended recipe said of its predictions, and what labels say."""
    lines = [
        "| task, target | expected, mean | score, mean | Spearman | inside the 90 % interval | to review |",
        "|:--|--:|--:|--:|--:|--:|",
    ]
    for name, task in kept.items():
        for row in task["expected"]:
            if row["method"] != "recommended" or row["target"] not in task["targets"]:
                continue
            cells = [
                f"{name}, {row['target']}",
                f"{100 * row['expected']:.1f}",
                *("–" if row[key] is None else f"{100 * row[key]:.1f}" for key in ("score",)),
                "–" if row["correlation"] is None else signed(f"{row['correlation']:.2f}"),
                "–" if row["covered"] is None else f"{100 * row['covered']:.0f} %",
                f"{100 * row['review']:.0f} %",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) if len(lines) > 2 else "Not run yet."


def task_table(task: dict) -> str:
    """Scores, and the gain over the source model with its 95 % interval."""
    targets, uneven = list(task["targets"]), len({streams_of(row) for row in task["rows"]}) > 1
    heads = ["Method", *(f"{target} | gain" for target in targets), "Made worse", *(["Seeds × orders"] * uneven)]
    lines = [f"| {' | '.join(heads)} |", "|:--|" + "--:|--:|" * len(targets) + "--:|" + "--:|" * uneven]
    for row in task["rows"]:
        cells = [part for target in targets for part in shown(row["cells"].get(target))]
        cells.append("" if row["worse"] is None else f"{100 * row['worse']:.0f} %")
        cells += [streams_of(row)] * uneven
        lines.append(f"| {' | '.join([method_label(row['method'], row['rate']), *cells])} |")
    return "\n".join(lines)


def streams_of(row: dict) -> str:
    """How many source trainings a row is over, and how many orders of each stream."""
    return f"{row.get('seeds', 1)} × {row.get('orders', 1)}"


def beside_the_paper(task: dict) -> str:
    """The rows of the paper's prostate table at the hospitals that are its columns D and E."""
    published = Published.load("prostate")
    ours = {(row["method"], row["rate"]): row["cells"] for row in task["rows"]}
    targets = [target for target in task["targets"] if target in COLUMNS]
    heads = [
        part for target in targets for part in (f"paper, {COLUMNS[target]}", f"here, {target}", "surface distance")
    ]
    lines = [f"| Method | {' | '.join(heads)} |", "|:--|" + "--:|" * len(heads)]
    for row in published.rows:
        cells = []
        for target in targets:
            printed = row.values[published.columns.index(COLUMNS[target])]
            cell = ours.get((row.method, row.rate), {}).get(target)
            distance = None if cell is None else cell.get("asd")
            cells += [
                "–" if printed is None else printed.shown(1),
                "not run" if cell is None else over_trainings(cell),
                "–" if distance is None else f"{distance:.2f}",
            ]
        lines.append(f"| {method_label(row.method, row.rate)} | {' | '.join(cells)} |")
    return (
        "### Beside the paper\n\nThree of the hospitals of the paper's third table: A (Radboud, the source), D (UCL) "
        "and E (BIDMC). Dice in points per volume. What differs: 12 source cases, other patients than the paper's, of "
        "which a quarter is held out; images of 8 bits, of a lower resolution, as the configuration says; networks of "
        "minutes; ± is over trainings here, where there are several. Surface distances are in voxels, because the "
        "spacing of these files is not known; the paper prints none here.\n\n" + "\n".join(lines)
    )


def over_trainings(cell: dict) -> str:
    """The mean, and the standard deviation where there are several trainings."""
    scores = list(by_seed(cell).values())
    return f"{cell['mean']:.1f}" + (f" ± {stdev(scores):.1f}" if len(scores) > 1 else "")


def shown(cell: dict | None) -> tuple[str, str]:
    if cell is None:
        return "–", "–"
    if cell["gain"] is None:
        return f"{cell['mean']:.1f}", ""
    interval = "" if cell["low"] is None else f" ({points(cell['low'])} to {points(cell['high'])})"
    return f"{cell['mean']:.1f}{cell['mark']}", points(cell["gain"]) + interval


def run_of(task: dict) -> str:
    """How a comparison was run, in one sentence."""
    part = "" if task["cases"] is None else f"; at most {task['cases']} cases of a target, evenly spread"
    batches = "one by one" if task["batch_size"] in (None, 1) else f"batches of {task['batch_size']}"
    sizes = ", ".join(
        f"{target}: {size['cases']}" + ("" if size["cases"] == size["patients"] else f" of {size['patients']} patients")
        for target, size in task["targets"].items()
    )
    return (
        f"{up_to(task, 'seed')}, {up_to(task, 'order')}, {batches}{part}. Scored cases, the same for every method: "
        f"{sizes}."
    )


def up_to(task: dict, thing: str) -> str:
    """`3 seeds` where every row is over as many, `up to 3 seeds` where some are over fewer."""
    numbers = {row.get(f"{thing}s", 1) for row in task["rows"]}
    return ("up to " if len(numbers) > 1 else "") + count(max(numbers), thing)


def configured(name: str) -> str:
    """The file of a task, or that of which it takes other sites or more epochs."""
    changed = " with other sites" if name in OTHER_SITES else " with more epochs" if name in LONGER else ""
    return f"`configs/real/{family_of(name)}.toml`{changed}"


def family_of(name: str) -> str:
    """The configuration of a task."""
    return {**OTHER_SITES, **LONGER}.get(name, name)


def counted(kept: dict) -> dict:
    """The tasks whose targets count in what is said over targets: not those of another task once more."""
    return {name: task for name, task in kept.items() if "again" not in task}


def changes(kept: dict) -> str:
    parts = []
    for name, task in kept.items():
        for target in dict.fromkeys(row["target"] for row in task["changing"]):
            rows = [row for row in task["changing"] if row["target"] == target]
            sites = [site for site, _ in rows[0]["parts"]]
            heads = " | ".join(f"{number}. {site}" for number, site in enumerate(sites, 1))
            lines = [f"| Method | {heads} |", "|:--|" + "--:|" * len(sites)]
            for row in rows:
                scores = " | ".join(f"{score:.1f}" for _, score in row["parts"])
                lines.append(f"| {method_label(row['method'], row['rate'])} | {scores} |")
            run = f"{up_to({'rows': rows}, 'seed')}, {up_to({'rows': rows}, 'order')}"
            parts.append(f"**{name}, {target}**, {rows[0]['cases']} cases, {run}\n\n" + "\n".join(lines))
    return "\n\n".join(parts) if parts else "Not run yet."


def passes(kept: dict) -> str:
    """Who degrades when the same images come again: the last pass against the first."""
    streams = {(name, row["target"]) for name, task in kept.items() for row in task["changing"] if repeated(row)}
    columns = sorted(streams, key=lambda stream: list(kept).index(stream[0]))
    found: dict[tuple[str, str], dict[tuple[str, str], float]] = {}
    for name, target in columns:
        for row in kept[name]["changing"]:
            if row["target"] == target:
                (_, first), *_, (_, last) = row["parts"]
                found.setdefault((row["method"], row["rate"]), {})[name, target] = last - first
    if not found:
        return ""
    lines = [
        f"| Last pass over first, points | {' | '.join(f'{name}, {target}' for name, target in columns)} |",
        "|:--|" + "--:|" * len(columns),
    ]
    for method, rate in sorted(found, key=lambda row: place_of(row[0])):
        shown = [points(found[method, rate][at]) if at in found[method, rate] else "–" for at in columns]
        lines.append(f"| {method_label(method, rate)} | {' | '.join(shown)} |")
    lines.append("\nPTBN learns nothing: where images come in batches it differs by which of them share one.")
    return "\n".join(lines)


def repeated(row: dict) -> bool:
    return len(row["parts"]) > 1 and len({site for site, _ in row["parts"]}) == 1


def count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def why(docs: Path) -> str:
    """What docs/figures/why.py measured: only the statistics differ, one image at a time."""
    file = docs / "results" / "why.json"
    if not file.is_file():
        return ""
    lines = ["| | stored | shrinkage | instance | usual discrepancy |", "|:--|--:|--:|--:|--:|"]
    for task, entry in json.loads(file.read_text()).items():
        for site, scores in entry["sites"].items():
            shown = " | ".join(f"{scores[way]:.1f}" for way in ("source", "shrinkage", "instance"))
            level = f"{entry['discrepancy']:.3g}" if site == "source site" and entry["discrepancy"] is not None else ""
            lines.append(f"| {task}, {site} | {shown} | {level} |")
    return (
        "## Only the statistics\n\nOne image at a time, nothing learned, only the statistics of batch normalization "
        "differ (`python docs/figures/why.py runs/real SITES`; one source training, up to 24 images of a site). "
        "*Source site*: source images kept for validation. What instance statistics lose there they lose without any "
        "change of site. The usual discrepancy is the factor that Eq. (6) multiplies the rate with at the source "
        "site.\n\n" + "\n".join(lines)
    )


def initial(kept: dict) -> str:
    """The paper's methods over a factor of a thousand of the initial rate, by both rules."""
    found = by_alpha(kept)
    if not found:
        return "Not run yet."
    alphas = sorted({alpha for rules in found.values() for scores in rules.values() for alpha in scores})
    return "\n\n".join(["\n".join(over_smallest(found, alphas)), INITIAL_PICTURE, "\n".join(each_rate(found, alphas))])


def over_smallest(found: dict, alphas: list[float]) -> list[str]:
    """By method and rule: the mean, over targets where neither rule diverged, over the smallest fixed rate there."""
    lines = [f"| | {' | '.join(f'{alpha:g}' for alpha in alphas)} |", "|:--|" + "--:|" * len(alphas)]
    for method in dict.fromkeys(method for _, _, method in found):
        targets = [rules for (_, _, each), rules in found.items() if each == method]
        for rule in RULES:
            cells = []
            for alpha in alphas:
                known = [each for each in targets if all(alpha in each.get(rule, {}) for rule in RULES)]
                known = [each for each in known if alphas[0] in each["fixed"]]
                gained = [each[rule][alpha] - each["fixed"][alphas[0]] for each in known]
                cells.append(f"{points(fmean(gained))} ({len(gained)})" if gained else "–")
            lines.append(f"| {method_label(method, rule)} | {' | '.join(cells)} |")
    return lines


def each_rate(found: dict, alphas: list[float]) -> list[str]:
    """By task, target and method: the score at each initial rate."""
    heads = [f"{rule} {alpha:g}" for rule in RULES for alpha in alphas]
    lines = [f"| | {' | '.join(heads)} |", "|:--|" + "--:|" * len(heads)]
    for (name, target, method), rules in found.items():
        scores = [rules.get(rule, {}).get(alpha) for rule in RULES for alpha in alphas]
        shown = " | ".join("–" if score is None else f"{score:.1f}" for score in scores)
        lines.append(f"| {name}, {target}, {NAMES[method]} | {shown} |")
    return lines


def by_alpha(kept: dict) -> dict[tuple[str, str, str], dict[str, dict[float, float]]]:
    """(task, target, method): rule: initial rate: score, in the order of the page."""
    found: dict[tuple[str, str, str], dict[str, dict[float, float]]] = {}
    for name, task in kept.items():
        for row in sorted(task.get("initial", []), key=lambda row: place_of(row["method"])):
            rule, _, alpha = row["rate"].partition(":")
            if alpha:
                scores = found.setdefault((name, row["target"], row["method"]), {})
                scores.setdefault(rule, {})[float(alpha)] = row["mean"]
    return found


def draw_initial(kept: dict) -> Figure:
    """A panel for each method: at each target, the score at each initial rate over that at the smallest fixed one."""
    found = by_alpha(kept)
    methods = list(dict.fromkeys(method for _, _, method in found))
    figure = Figure(figsize=(7.2, 3.2), layout="constrained")
    axes = figure.subplots(1, len(methods), sharey=True, squeeze=False)[0]
    for axis, method in zip(axes, methods, strict=True):
        axis.axhline(0, color="#888888", linewidth=1)
        for rules in (rules for (_, _, each), rules in found.items() if each == method and rules.get("fixed")):
            smallest = rules["fixed"][min(rules["fixed"])]
            for rule in rules.keys() & RULES.keys():
                alphas, scores = zip(*sorted(rules[rule].items()), strict=True)
                over = [score - smallest for score in scores]
                axis.semilogx(alphas, over, "o-", color=RULES[rule], markersize=3, linewidth=1, alpha=0.7)
        axis.set_title(NAMES[method], fontsize=9, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    for rule, color in RULES.items():
        axes[0].plot([], [], "o-", color=color, markersize=3, label=f"{rule} rate")
    figure.supxlabel("initial rate α", fontsize=9)
    axes[0].set_ylabel("points over the smallest fixed rate", fontsize=9)
    figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize=9)
    return figure


def page(kept: dict, docs: Path) -> str:
    once = counted(kept)
    targets = sum(len(task["targets"]) for task in once.values())
    seeds, orders = ({row.get(key, 1) for task in once.values() for row in task["rows"]} for key in ("seeds", "orders"))
    run = f"**{_several(seeds, 'seed')} and {_several(orders, 'order')}**"
    head = (docs / "figures" / "real_head.md").read_text().strip()
    beginning, _, protocol = head.partition("<!-- overview -->")
    missing = [name for name in TITLES if name not in kept]
    parts = [
        beginning.strip(),
        f"## All together\n\n{count(targets, 'target')} of {count(len(once), 'task')}, {run}, every method as its "
        "authors set it. Gains are means over targets, in points, each on the source models that both methods ran on; "
        "those over different targets do not compare: mind their number. In brackets the 95 % interval of the mean, by "
        "a bootstrap over tasks, of which there are few. *Gap closed*: gains over gaps between home and target, both "
        "summed over the targets at which there is a gap.",
        overview(once),
        PICTURE,
        "### Is it the rate being dynamic?\n\nThe paper's rate (Eq. 6) against its controls, in points:",
        dynamic(once),
        "### The initial rate\n\nThe paper's methods at rates over a factor of a thousand: fixed, and the same as the "
        "α of Eq. (6). Points over the smallest fixed rate, the mean over targets where neither rule diverged (in "
        "brackets how many); below it the scores. A dash: the method diverged.",
        initial(kept),
        "### The source networks at home\n\nOn cases of the source site that training did not see; weights of the last "
        "epoch, so these cases decided nothing; of several trainings, each of which holds out other cases, the "
        "mean. *Trained at the target*: the same training with labels of the target, scored on cases of it "
        "that were held out: about what these data allow.",
        homes(kept),
        "### Expected quality against the truth\n\nOf the recommended recipe, case by case; slices of volumes have no "
        "score of their own.",
        expected(kept),
        protocol.strip(),
    ]
    for name, task in kept.items():
        notes = "  \n".join(note for note in task["notes"] if not note.startswith(("Points", "With a sign")))
        parts.append(
            f"## {TITLES[name]}\n\n{configured(name)}: {run_of(task)}\n\n{task_table(task)}\n\n"
            f"{task['metric'].capitalize()} in points; gain over Source with its 95 % interval (bootstrap over "
            f"patients and source trainings).  \n{notes}"
        )
        if task["source"][0].endswith("/radboud") and set(COLUMNS) & set(task["targets"]):
            parts.append(beside_the_paper(task))
    parts.append(
        "## Long and changing streams\n\nOne stream, several parts: the adapter is told nothing of where a part begins "
        "([how](changing.md)): `a+b` is a, then b; `a/b` the two in turn; `a>b` a that gives way to b little by "
        "little. A site that comes three times is the same images three times over. Mean of each part."
    )
    parts += [part for part in (passes(kept), changes(kept)) if part]
    parts += [part for part in (why(docs),) if part]
    if missing:
        parts.append("## Not run\n\n" + "\n".join(f"- {TITLES[name]} ({configured(name)})" for name in missing))
    return "\n\n".join(parts) + "\n"


def _several(numbers: set[int], thing: str) -> str:
    few, many = min(numbers), max(numbers)
    return count(few, thing) if few == many else f"{few} to {many} {thing}s"
