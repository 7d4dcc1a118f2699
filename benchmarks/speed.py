"""How long does a step take, and what for? `make bench-speed`, or in seconds: python benchmarks/speed.py --quick

Writes docs/results/speed.json and from it docs/speed.md (with --quick: runs/speed.json and runs/speed.md). Every
workload, allocator setting and memory measurement runs in a process of its own, one after the other; what is compared
is always from one process. Leave the machine alone meanwhile. An interrupted run goes on where it was: the same command
takes the parts that were measured with the same code from speed.parts.json, which goes when all is written.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import parts
from dltta.evaluation.provenance import Provenance
from dltta.files import write_atomically
from dltta.models.allocator import keep_freed_memory
from speed_page import page
from workloads import WORKLOADS

ROOT = Path(__file__).resolve().parent.parent
AGAIN = ("timing", "options", "methods", "memory", "recall", "stream", "training")


def main(arguments: Sequence[str] | None = None) -> None:
    settings = _parser().parse_args(arguments)
    if settings.part is not None:
        _run_part(settings)
        return
    folder = ROOT / ("runs" if settings.quick else "docs/results")
    output = settings.output or folder / "speed.json"
    shown = settings.page or (output.with_suffix(".md") if settings.quick else ROOT / "docs" / "speed.md")
    output.parent.mkdir(parents=True, exist_ok=True)
    settings.kept = output.with_suffix(".parts.json")
    results = _again(settings, json.loads(output.read_text())) if settings.again else _collect(settings)
    output.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    shown.write_text(page(results))
    settings.kept.unlink(missing_ok=True)
    print(f"wrote {output} and {shown}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--repeats", type=int, help="rounds that are counted; by default as many as suit the workload")
    parser.add_argument("--quick", action="store_true", help="small images and few rounds: tries the program")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--compile", nargs="*", choices=list(WORKLOADS), default=[], help="with torch.compile too")
    parser.add_argument("--again", nargs="+", choices=AGAIN, default=[], help="measure only these, keep the rest")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--allocator", choices=["default", "keep"], default="keep", help=argparse.SUPPRESS)
    parser.add_argument("--row", default="", help=argparse.SUPPRESS)
    return parser


def _collect(settings: argparse.Namespace) -> dict[str, Any]:
    def part(name: str, **options: str) -> Any:
        return _in_a_process(settings, name, options)

    results: dict[str, Any] = {"quick": settings.quick, "machine": part("machine")}
    results["workloads"] = {name: _workload(name, part, settings) for name in settings.workloads}
    if "histology" in settings.workloads:
        results["recall"] = part("recall", workloads="histology")
    results["methods"] = {name: _methods(name, part) for name in settings.workloads if name != "histology"}
    results["stream"] = part("stream")
    results["training"] = part("training")
    return results


def _workload(name: str, part: Callable[..., Any], settings: argparse.Namespace) -> dict[str, Any]:
    measured: dict[str, Any] = part("timing", workloads=name)
    _measure_memory(name, measured["rows"], part)
    return measured | _options(name, part, settings)


def _options(name: str, part: Callable[..., Any], settings: argparse.Namespace) -> dict[str, Any]:
    allocators = {each: part("options", workloads=name, allocator=each) for each in ("default", "keep")}
    compiled = {"compile": part("compile", workloads=name)} if name in settings.compile else {}
    return {"options": allocators, **compiled}


def _methods(name: str, part: Callable[..., Any]) -> dict[str, Any]:
    measured: dict[str, Any] = part("methods", workloads=name)
    _measure_memory(name, measured["rows"], part)
    return measured


def _again(settings: argparse.Namespace, results: dict[str, Any]) -> dict[str, Any]:
    def part(name: str, **options: str) -> Any:
        return _in_a_process(settings, name, options)

    for name in settings.workloads:
        measured = results["workloads"][name]
        if "timing" in settings.again:
            peaks = {row["name"]: row["peak_bytes"] for row in measured["rows"]}
            measured |= part("timing", workloads=name)
            for row in measured["rows"]:
                row["peak_bytes"] = peaks[row["name"]]
        if "options" in settings.again:
            measured.pop("compile", None)  # it was of another network or code
            measured |= _options(name, part, settings)
        if "memory" in settings.again:
            _measure_memory(name, measured["rows"], part)
    if "methods" in settings.again:
        results["methods"] = {
            **results.get("methods", {}),
            **{name: _methods(name, part) for name in settings.workloads},
        }
    for name in settings.again:
        if name not in ("timing", "options", "methods", "memory"):
            results[name] = part(name, **({"workloads": "histology"} if name == "recall" else {}))
    return results


def _measure_memory(name: str, rows: list[dict[str, Any]], part: Callable[..., Any]) -> None:
    for row in rows:
        row["peak_bytes"] = part("memory", workloads=name, row=row["name"], allocator="default")


def _in_a_process(settings: argparse.Namespace, part: str, options: dict[str, str]) -> Any:
    command = ["--part", part, "--threads", str(settings.threads)]
    command += [text for name, value in options.items() for text in (f"--{name}", value)]
    command += ["--quick"] if settings.quick else []
    command += ["--repeats", str(settings.repeats)] if settings.repeats else []
    kept = json.loads(settings.kept.read_text()) if settings.kept.is_file() else {}
    key = " ".join([str(Provenance.collect(seeds=(), data={}).commit), *command])
    if key in kept:
        print("measured before:", part, *options.values(), flush=True)
        return kept[key]
    print("measuring", part, *options.values(), flush=True)
    environment = {**os.environ, "OMP_NUM_THREADS": str(settings.threads)}
    done = subprocess.run(
        [sys.executable, __file__, *command], stdout=subprocess.PIPE, text=True, check=True, env=environment
    )
    measured = json.loads(done.stdout.splitlines()[-1])
    write_atomically(settings.kept, json.dumps({**kept, key: measured}))
    return measured


def _run_part(settings: argparse.Namespace) -> None:
    """What the process for one part does: the last line that it prints is its result."""
    kept = settings.allocator == "keep" and keep_freed_memory()
    torch.set_num_threads(settings.threads)
    if settings.part == "machine":
        provenance = Provenance.collect(seeds=(0,), data={})
        measured: Any = {
            "version": provenance.version,
            "commit": provenance.commit,
            "packages": dict(provenance.packages),
            **provenance.machine,
            "bf16": parts.has_bf16(),
            "allocator": "glibc, freed memory kept" if kept else "as the system has it",
        }
    else:
        workload = WORKLOADS[settings.workloads[0]]
        workload = workload.small() if settings.quick else workload
        measured = parts.PARTS[settings.part](workload, settings)
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
