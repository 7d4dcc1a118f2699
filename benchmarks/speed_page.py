"""docs/speed.md from what was measured."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from steps import RECOMMENDED, TENT_DYNAMIC

LIMITS = {
    "default": 6.0,
    "low": 3.0,
}  # plain passes of the fastest layout that a step of the recommended recipe may take
OURS = ("recall", "discrepancy", "push")  # what the dynamic rate adds to a step


def page(results: Mapping[str, Any]) -> str:
    workloads = results["workloads"]
    parts = [
        _head(results),
        _goals(results),
        *(_workload(workload) for workload in workloads.values()),
        _methods(list(results.get("methods", {}).values())),
        _options(workloads.values()),
        _bank(workloads.values()),
        _recall(results.get("recall"), workloads.get("histology")),
        _stream(results["stream"]),
        _training(results["training"]),
    ]
    return "\n".join(part for part in parts if part)


def _head(results: Mapping[str, Any]) -> str:
    machine = results["machine"]
    packages = ", ".join(
        f"{name} {version}" for name, version in machine["packages"].items() if name in ("torch", "monai")
    )
    small = "**Small images, to try the program: no statement about speed.**\n\n" if results["quick"] else ""
    return f"""# Speed

{small}Made by `make bench-speed` on {machine["cpu"]}, {machine["torch_threads"]} threads, {packages}, dltta
{machine["version"]}, where a table names no other.
Everything in one table was measured in one process, in rounds in which every row has its turn; seconds are medians over
the rounds, ratios medians of the rounds' ratios. Ratios hold on other machines, seconds do not. Memory is the peak of a
process that does only this, beyond what it had before network and images existed, with the system's own allocator;
times are with this allocator: {machine["allocator"]}, as the command line sets it.

A step of adaptation is a forward pass, a backward pass for the adapted parameters, and a forward pass. "As released" is
the order of operations of the authors' program, with our loss: four forward passes, of which two record a graph that
nobody uses, and a memory of numpy arrays.

`dltta adapt` from file to file: [speed-adapt.md](speed-adapt.md).
What a step holds at its peak, counted tensor by tensor: [speed-memory.md](speed-memory.md).
"""


def _methods(workloads: Sequence[Mapping[str, Any]]) -> str:
    """The recommended recipe, and methods that the paper does not compare, against plain forward passes."""
    if not workloads:
        return ""
    parts = []
    for workload in workloads:
        lines = ["| step | × plain | × fastest plain | ms | peak MB |", "|---|--:|--:|--:|--:|"]
        for row in workload["rows"]:
            peak = f"{row['peak_bytes'] / 1e6:.0f}" if "peak_bytes" in row else "–"
            ratios = f"{row['ratio']:.1f} | {row['fastest']:.1f}"
            lines.append(f"| {row['name']} | {ratios} | {1000 * row['seconds']:.0f} | {peak} |")
        parts.append("\n".join([f"### {workload['title']}", "", measured_in(workload), "", *lines]))
    return (
        "## The recommended recipe and newer methods\n\n*Fastest plain*: a plain pass with channels-last or as it is, "
        f"whichever is faster. {_recommended(workloads)} The recipe is timed with as many passes as "
        "rehearsal may choose; many a model chooses fewer.\n\n"
        "Newer methods are as their authors set them ([methods.md](methods.md)), but: NOTE and RoTTA learn from a "
        "memory of 8 images with every batch; the authors' learn once in 64 images. EATA, SAR and DeYO learn from "
        "every prediction, however uncertain: weights are untrained.\n\n" + "\n\n".join(parts) + "\n"
    )


def _recommended(workloads: Sequence[Mapping[str, Any]]) -> str:
    """What a step of the recommended recipe takes, beside what it may."""
    said = []
    for effort, name in RECOMMENDED.items():
        found = {workload["title"].split(",")[0]: _rows(workload)[name]["fastest"] for workload in workloads}
        listed = ", ".join(f"{title} {times:.1f}" for title, times in found.items())
        kept = "kept" if max(found.values()) <= LIMITS[effort] else "missed"
        said.append(f"{name}, limit {LIMITS[effort]:g} × it: {listed}: {kept}.")
    return " ".join(said)


def measured_in(found: Mapping[str, Any]) -> str:
    """How often, with which code and how busy the machine was; nothing of the latter where it was not noted."""
    if "load" not in found:
        return f"{found['repeats']} rounds."
    busy = " Other programs were running: only ratios tell something." if found["load"] > found["threads"] else ""
    where = f" on {found['cpu']}" if "cpu" in found else ""
    said = f"{found['repeats']} rounds{where}; dltta {found['version']}, threads: {found['threads']}"
    return f"{said}, load of the machine before: {found['load']}.{busy}"


def _goals(results: Mapping[str, Any]) -> str:
    workloads = results["workloads"]
    lines = [
        "| | Tent, dynamic, against a plain pass | memory, discrepancy and rate, of the step | "
        "TTT, dynamic against fixed | ATTA, dynamic against fixed |",
        "|---|---|---|---|---|",
        "| aim | ≤ 3.0 | ≤ 3 % | ≤ 1.05 | ≤ 1.05 |",
    ]
    for workload in workloads.values():
        cells = [
            f"{_rows(workload)[TENT_DYNAMIC]['ratio']:.2f}",
            f"{100 * dynamic_share(workload):.1f} %",
            *(f"{workload['dynamic_to_fixed'][method]:.2f}" for method in ("TTT", "ATTA")),
        ]
        lines.append(f"| {workload['title']} | {' | '.join(cells)} |")
    return "## In short\n\n" + "\n".join(lines) + "\n"


def dynamic_share(workload: Mapping[str, Any]) -> float:
    """What recall, discrepancy, rate and push take of a dynamic Tent step."""
    parts = workload["breakdown"]
    return sum(parts[name] for name in OURS) / sum(parts.values())


def _rows(workload: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {row["name"]: row for row in workload["rows"]}


def _workload(workload: Mapping[str, Any]) -> str:
    batch = workload["shape"][0]
    lines = ["| | seconds | × plain pass | peak memory |", "|---|---|---|---|"]
    for row in workload["rows"]:
        images = "" if row["batch"] == batch else f" ({row['batch']} images)"
        lines.append(
            f"| {row['name']}{images} | {row['seconds']:.4f} | {row['ratio']:.2f} | {_size(row['peak_bytes'])} |"
        )
    spent = workload["breakdown"]
    whole = sum(spent.values())
    shares = ["| part of a dynamic Tent step | milliseconds | share |", "|---|---|---|"]
    shares += [f"| {name} | {1000 * value:.2f} | {100 * value / whole:.1f} % |" for name, value in spent.items()]
    table, parts = "\n".join(lines), "\n".join(shares)
    return f"## {workload['title']}\n\n{measured_in(workload)}\n\n{table}\n\n{parts}\n"


def _options(workloads: Iterable[Mapping[str, Any]]) -> str:
    """What each way to be faster gives: seconds of a dynamic Tent step against the network as it is given."""
    lines = [
        "| | freed memory kept | channels-last | both | bf16 besides | `torch.compile` besides |",
        "|---|---|---|---|---|---|",
    ]
    for workload in workloads:
        default, keep = workload["options"]["default"], workload["options"]["keep"]
        base, compiled = default["given"], workload.get("compile")
        cells = [_times(base, keep["given"]), _times(base, default["auto"]), _times(base, keep["auto"])]
        cells.append(_times(keep["auto"], keep["bf16"]) if "bf16" in keep else "not on this CPU")
        cells.append(_compiled(compiled))
        lines.append(f"| {workload['title']} | {' | '.join(cells)} |")
    return f"""## What makes it faster

How many times as fast a dynamic Tent step becomes. Channels-last is on by default (`Adapter(layout="auto")`) and
changes predictions by rounding; the command line keeps freed memory. The others are off: bf16 changes predictions by
more than rounding, and compiling takes longer than many a stream.

{chr(10).join(lines)}
"""


def _times(before: float, after: float) -> str:
    return f"{before / after:.2f}"


def _compiled(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "not measured"
    if "error" in found:
        return f"fails: {found['error'][:60]}"
    return f"{found['eager'] / found['compiled']:.2f}, after {found['compiling']:.0f} s of compiling"


def _bank(workloads: Iterable[Mapping[str, Any]]) -> str:
    lines = ["| | pairs | numbers per pair | by arithmetic | held | in half precision | rate, half against full |"]
    lines.append("|---|---|---|---|---|---|---|")
    for workload in workloads:
        bank = workload["bank"]
        numbers = bank["key"] + bank["value"]
        worst = max(
            (
                abs(half / full - 1)
                for half, full in zip(bank["rates"]["float16"], bank["rates"]["float32"], strict=True)
            ),
            default=0.0,
        )
        cells = [
            bank["pairs"],
            f"{bank['key']:,} + {bank['value']:,}",
            _size(4 * numbers * bank["pairs"]),
            _size(bank["bytes"]["float32"]),
            _size(bank["bytes"]["float16"]),
            f"within {100 * worst:.2g} %",
        ]
        lines.append(f"| {workload['title']} | {' | '.join(map(str, cells))} |")
    return f"""## The memory's size

A pair is the features of one image and its prediction, 4 bytes a number: pairs × (features + classes × positions) × 4.
A memory that already holds pairs when the adapter gets it is kept a second time, for `reset()`.

{chr(10).join(lines)}
"""


def _recall(found: Sequence[Mapping[str, float]] | None, histology: Mapping[str, Any] | None) -> str:
    if not found or histology is None:
        return ""
    step = _rows(histology)[TENT_DYNAMIC]["seconds"]
    lines = ["| pairs in memory | milliseconds | of a dynamic Tent step |", "|---|---|---|"]
    for row in found:
        lines.append(f"| {int(row['pairs']):,} | {1000 * row['seconds']:.1f} | {100 * row['seconds'] / step:.1f} % |")
    return f"""## Recall along the number of pairs

Looking up a batch of {histology["shape"][0]} images ({histology["title"]}); the aim is under 5 % of a step up to 10,000
pairs.

{chr(10).join(lines)}
"""


def _stream(found: Mapping[str, Any]) -> str:
    lines = ["| | median milliseconds per step | × plain pass at that time | resident memory |", "|---|---|---|---|"]
    for end in ("first", "last"):
        step, plain = found[end], found[f"plain_{end}"]
        size = _size(found[f"resident_after_{end}"])
        lines.append(f"| {end} {found['window']:,} | {1000 * step:.3f} | {step / plain:.2f} | {size} |")
    return f"""## Along a stream

{found["images"]:,} images of 32 × 32 through a small U-Net, dynamic Tent, one thread. A machine's own speed drifts
within minutes, so a plain pass is timed after every step.

{chr(10).join(lines)}
"""


def _training(found: Sequence[Mapping[str, Any]]) -> str:
    lines = ["| | augmentation | plain loop, s per epoch | `dltta train` | ratio |", "|---|---|---|---|---|"]
    for row in found:
        ratio = row["ours"] / row["plain"]
        lines.append(
            f"| {row['title']} | {row['augmentation']} | {row['plain']:.3f} | {row['ours']:.3f} | {ratio:.2f} |"
        )
    return f"""## Source training

One epoch of our loop, with its checkpoint for resuming written to disk, beside a plain PyTorch loop on the same
network, images, batches and augmentation.

{chr(10).join(lines)}
"""


def _size(count: float) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 1e5 else f"{count / 1e3:,.1f} kB"
