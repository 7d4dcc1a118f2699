"""Every comparison of docs/real.md, one after another, and the page: make bench-real SITES=FOLDER

FOLDER holds the site folders that configs/real name. Hours of two cores with one seed: every command continues where it
was stopped, and what was run at another time joins the page as long as the source models still give the same scores.

    python benchmarks/real.py FOLDER --only oct_layers spinal_cord --seeds 3
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
QUOTING = ("docs/figures/numbers_of_pages.py", "benchmarks/methods_page.py")  # pages that quote its numbers
PROSTATE = ("radboud", "ucl", "bidmc")
RATES = ["--methods", "source,ptbn,tent,ttt,atta", "--rates", "fixed,dynamic,matched,shuffled"]
UDAS = ["--methods", "source,udas", "--rates", "fixed"]
ALPHAS = ("1e-3", "1e-2", "1e-1", "1")  # initial rates; the first is the paper's in segmentation
INITIAL = [
    "--methods",
    "source,tent,ttt,atta",
    "--rates",
    ",".join(f"{rule}:{alpha}" for rule in ("fixed", "dynamic") for alpha in ALPHAS),
]
CASES = {"wbc_cells": 40, "wbc_types": 128, "nuclei_tissue": 16, "nuclei_fluo": 16}  # at most, of a target
ALONG = (  # what carries something on from image to image: the paper's methods at both rates, others as they are set
    ["--methods", "source,ptbn,tent,ttt,atta,recommended", "--rates", "fixed,dynamic"],
    ["--methods", "source,cotta,eata,sar,deyo,rotta,note", "--rates", "fixed"],
)
PASSES = 3  # how often a site comes back
CHANGING = {  # sites of streams that change, and how many images of each
    "wbc_cells": ("cellavision", "bccd", 40),
    "wbc_types": ("cellavision", "bccd", 96),
}
THERE = {  # task: targets to train at, to see what their data allow, and the site that such a network is also run on
    "wbc_cells": (("bccd", "cellavision"), "jtsc"),
    "wbc_types": (("bccd", "cellavision"), "jtsc"),
    "nuclei_tissue": (("tissue_lilac",), "tissue_white"),
    "nuclei_fluo": (("fluo_360",), "fluo_256"),
    "oct_layers": (("cirrus",), "optovue_a"),
}
LONGER = {"oct_layers": 135}  # epochs, of a second network for the score at home: is it training that limits it?
DIRECTIONS = {"prostate_t2_ucl": ("ucl", 80), "prostate_t2_bidmc": ("bidmc", 45)}  # epochs: about as many steps
LONG = {"prostate_t2_long": 360}  # epochs: the same hospitals once more, with networks that trained three times as long
LONG_METHODS = {  # those that need no network of their own
    "rates": ["--methods", "source,ptbn,tent,atta,recommended", "--rates", "fixed,dynamic"],
    "methods": ["--methods", "source,t3a,cotta,eata,note,rotta,sar,deyo,intent,vptta,grata", "--rates", "fixed"],
}
TASKS = (
    "oct_layers",
    "prostate_t2",
    *LONG,
    "prostate_t2_3d",
    "wbc_cells",
    "wbc_types",
    "nuclei_tissue",
    "nuclei_fluo",
    "spinal_cord",
    *DIRECTIONS,
)


def main(arguments: Sequence[str] | None = None) -> None:
    settings = _parser().parse_args(arguments)
    if unknown := [name for name in settings.only if name not in TASKS]:
        raise SystemExit(f"no task {unknown[0]!r}; there are {', '.join(TASKS)}")
    tasks = {name: commands(name, settings) for name in TASKS if not settings.only or name in settings.only}
    if settings.dry_run:
        for listed in tasks.values():
            print("\n".join(" ".join(["dltta", *command]) for command in listed))
        return
    with ThreadPoolExecutor(settings.jobs) as pool:  # a task's commands share its models: one after another
        failed = [
            command for lost in pool.map(lambda name: run(name, tasks[name], settings), tasks) for command in lost
        ]
    subprocess.run([sys.executable, ROOT / "docs" / "figures" / "real.py", settings.work], check=True)
    for page in QUOTING:
        subprocess.run([sys.executable, ROOT / page], check=True)
    if failed:
        raise SystemExit("failed: " + "; ".join(" ".join(command) for command in failed))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sites", type=Path, help="the folder that holds the site folders")
    parser.add_argument("--work", type=Path, default=Path("runs/real"), help="models, streams and results")
    parser.add_argument("--only", nargs="+", default=[], metavar="TASK", help="of: " + ", ".join(TASKS))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0, help="the first of them; others may be there already")
    parser.add_argument("--orders", type=int, default=1)
    parser.add_argument("--methods", default="all", metavar="LIST", help="of the comparison of methods; default: all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="tasks at the same time, a thread each")
    parser.add_argument("--dry-run", action="store_true", help="print the commands and run nothing")
    return parser


def commands(name: str, settings: argparse.Namespace) -> list[list[str]]:
    """What `dltta` is given for a task, in this order."""
    family = "prostate_t2" if name in (*DIRECTIONS, *LONG) else name
    work = settings.work / name
    shared = ["bench", f"{ROOT / 'configs' / 'real' / family}.toml", "--data", str(settings.sites), "--threads", "1"]
    cases = ["--cases", str(CASES[name])] if name in CASES else []
    many = ["--seeds", str(settings.seeds), "--orders", str(settings.orders)]
    many += ["--first-seed", str(settings.first_seed)] if settings.first_seed else []

    def compared(output: str, *options: str) -> list[str]:
        return [*shared, "--work", str(work), "-o", str(work / output), *options, *cases, *many, *_sites(name)]

    if name in LONG:
        return [compared(output, *chosen, "--epochs", str(LONG[name])) for output, chosen in LONG_METHODS.items()]
    listed = [
        compared("rates", *RATES),
        compared("methods", "--methods", settings.methods, "--rates", "fixed"),
    ]
    if name not in DIRECTIONS:
        listed.append(compared("initial/rates", *INITIAL))
    if name == "prostate_t2":
        listed.append(compared("udas", *UDAS))
    if name in CHANGING:
        for output, methods in zip(("changing", "changing_methods"), ALONG, strict=True):
            listed.append([*shared, "--work", str(work), "-o", str(work / output), *methods, *many, *changing(name)])
    if name in LONGER and not settings.first_seed:
        epochs = str(LONGER[name])
        alone = ["--methods", "source", "--epochs", epochs]
        listed.append([*shared, "-o", str(work / "longer" / epochs), *alone])
    for target in () if settings.first_seed else THERE.get(name, ((), ""))[0]:  # one training says what data allow
        where = ["--source", f"{name}/{target}", "--target", f"{name}/{THERE[name][1]}"]
        listed.append([*shared, "-o", str(work / "there" / target), *where, "--methods", "source", "--cases", "2"])
    return listed


def changing(name: str) -> list[str]:
    """Several passes over one site, and two sites in blocks, in turn, and one giving way to the other."""
    *sites, many = CHANGING[name]
    first, second = (f"{name}/{site}" for site in sites)
    streams = [f"{turns}:{first},{second}" for turns in ("sequence", "interleave", "drift")]
    again = ",".join([second] * PASSES)
    return [f"--target={stream}" for stream in (f"sequence:{again}", *streams)] + ["--cases", str(many)]


def _sites(name: str) -> list[str]:
    """Of a direction that its configuration does not have."""
    if name not in DIRECTIONS:
        return []
    source, epochs = DIRECTIONS[name]
    targets = [f"--target=slices:prostate_t2/{site}" for site in PROSTATE if site != source]
    return [f"--source=slices:prostate_t2/{source}", *targets, "--epochs", str(epochs)]


def run(name: str, listed: Sequence[list[str]], settings: argparse.Namespace) -> list[list[str]]:
    """The commands that failed; what each says is in a file beside its results."""
    failed = []
    folder = settings.work / name
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "log.txt").open("a") as log:
        for command in listed:
            print(f"{name}: dltta {' '.join(command)}", flush=True)
            program = [sys.executable, "-m", "dltta", *command]
            done = subprocess.run(program, stdout=log, stderr=subprocess.STDOUT, env=environment, check=False)
            failed += [command] if done.returncode else []
    return failed


if __name__ == "__main__":
    main()
