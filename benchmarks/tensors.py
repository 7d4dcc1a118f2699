"""What does a dynamic step hold at its peak, beyond a fixed one? python benchmarks/tensors.py

Counts every tensor that is allocated and freed within one Tent step (torch's profiler), so that the result does not
depend on how the system's allocator feels that day: the resident sizes of docs/speed.md scatter by tens of megabytes
from process to process. Writes docs/results/speed_tensors.json and docs/speed-memory.md.
"""

import json
from dataclasses import asdict
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from dltta.evaluation.provenance import Provenance
from steps import rows
from workloads import WORKLOADS

DOCS = Path(__file__).parent.parent / "docs"


def main() -> None:
    measured = {}
    for name, workload in WORKLOADS.items():
        measured[name] = {"title": workload.title}
        for kind in ("fixed", "dynamic"):
            row = rows(workload)[f"Tent, {kind}"](workload)
            row.run()
            measured[name][kind] = peak(row.run)
            bank = row.adapter.memory
            measured[name]["bank"] = 0 if bank is None else bank.nbytes
    result = {"workloads": measured, "provenance": asdict(Provenance.collect(seeds=(0,), data={}))}
    (DOCS / "results" / "speed_tensors.json").write_text(json.dumps(result, indent=1) + "\n")
    (DOCS / "speed-memory.md").write_text(page(result))
    print(page(result))


def peak(run) -> int:
    """The most bytes that tensors made within this call hold at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    most = held = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def page(result: dict) -> str:
    lines = [
        f"| {found['title']} | {found['fixed'] / 1e6:.1f} MB | {found['dynamic'] / 1e6:.1f} MB "
        f"| {(found['dynamic'] - found['fixed']) / 1e6:+.1f} MB | {found['bank'] / 1e6:.1f} MB |"
        for found in result["workloads"].values()
    ]
    return "\n".join(
        [
            "# What a step holds at its peak",
            "",
            "Made by `python benchmarks/tensors.py`: the most bytes that tensors made within one Tent step hold at",
            "once, counted by torch's profiler. Beside this a dynamic adapter holds its memory bank all the time.",
            "",
            "| | Tent, fixed | Tent, dynamic | difference | bank |",
            "|---|---|---|---|---|",
            *lines,
            "",
        ]
    )


if __name__ == "__main__":
    main()
