"""A processing module for mercure, a DICOM orchestrator: series in one folder, segmentations into another.

mercure starts the module once per task, with MERCURE_IN_DIR and MERCURE_OUT_DIR. The first holds the slices, named
SERIES#INSTANCE.dcm, and task.json with this module's settings; all that is in the second is sent on, and result.json is
kept with the task. Settings (`process.settings`), all but the first optional:

    {"model": "/model", "state": "/state", "method": "recommended", "site": "{StationName}/{ProtocolName}",
     "capture": false, "review_notification": true}

State must be a volume that outlives the container, or every task begins with the source model; without it that is said.
"""

import json
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dltta.data.formats.dicom import read_header
from dltta.errors import DataError, DlttaError, SettingError
from dltta.files import write_atomically
from dltta.models.io.opening import ModelSource
from dltta.recipes import recipe_for
from dltta.serving.inbound import packed
from dltta.serving.node import OwnShard, Predicted
from dltta.serving.session import Request
from dltta.serving.settings import StreamSettings
from dltta.serving.shard import Shard, ShardSettings
from dltta.serving.site_rule import USUAL, SiteRule

KNOWN = {"model", "state", "method", "site", "capture", "review_notification"}


def run_task(arriving: Path, leaving: Path) -> dict[str, Any]:
    """Predict every series of a task; what result.json says."""
    settings = _settings(arriving)
    series = _series(arriving)
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(settings.get("state") or scratch)
        model = ModelSource(str(settings["model"]))
        stream = StreamSettings(recipe_for(str(settings.get("method", "recommended"))))
        shard = Shard(ShardSettings(root, {"model": model}, stream, threads=os.cpu_count() or 1))
        backend = OwnShard(shard, "model")
        found = {uid: _predict(backend, uid, files, leaving, settings) for uid, files in sorted(series.items())}
        shard.close()
    return _result(found, settings)


def _settings(arriving: Path) -> Mapping[str, Any]:
    try:
        task = json.loads((arriving / "task.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{arriving / 'task.json'} cannot be read ({error}); is this a folder of mercure?") from error
    process = task.get("process") if isinstance(task, dict) else None
    process = process[0] if isinstance(process, list) and process else process
    settings = process.get("settings") if isinstance(process, dict) else None
    if not isinstance(settings, dict) or "model" not in settings:
        raise SettingError('the module\'s settings name no model; write {"model": "/path/in/the/container"}')
    unknown = sorted(set(settings) - KNOWN)
    if unknown:
        raise SettingError(f"the module has no setting {unknown[0]!r}; there are {', '.join(sorted(KNOWN))}")
    return settings


def _series(arriving: Path) -> dict[str, list[Path]]:
    """Slices by series, as mercure names them."""
    found: dict[str, list[Path]] = defaultdict(list)
    for file in sorted(arriving.glob("*.dcm")):
        found[file.name.partition("#")[0]].append(file)
    if not found:
        raise DataError(f"{arriving} holds no slices (SERIES#INSTANCE.dcm)")
    return found


def _predict(
    backend: OwnShard, uid: str, files: list[Path], leaving: Path, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """One series: its segmentation into the folder; its line, or what is wrong with it."""
    try:
        site = SiteRule(str(settings.get("site", USUAL))).site(read_header(files[0]))
    except DataError as error:
        return {"problem": str(error)}
    predicted: Predicted = backend.predict(site, Request(uid, "series.zip", packed(files)))
    if predicted.line is None or predicted.segmentation is None:
        return {"problem": predicted.problem or "no segmentation"}
    write_atomically(leaving / f"{uid}#seg.dcm", predicted.segmentation)
    if settings.get("capture"):
        from dltta.serving.capture import secondary_capture

        write_atomically(
            leaving / f"{uid}#capture.dcm", secondary_capture(files, predicted.segmentation, predicted.line)[1]
        )
    kept = ("sequence", "decision", "reason", "detail", "quality", "quality_low", "quality_high", "review")
    return {name: predicted.line[name] for name in kept if name in predicted.line}


def _result(found: Mapping[str, Mapping[str, Any]], settings: Mapping[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {"series": dict(found), "state_kept": bool(settings.get("state"))}
    odd = [uid for uid, each in found.items() if each.get("review") or "problem" in each]
    if odd and settings.get("review_notification", True):
        text = f"{len(odd)} of {len(found)} series should be reviewed or could not be segmented"
        result["__mercure_notification"] = {"text": text, "requested": True}
    return result


def main() -> None:
    """The container's entry point."""
    try:
        arriving, leaving = (Path(_variable(name)) for name in ("MERCURE_IN_DIR", "MERCURE_OUT_DIR"))
        result = run_task(arriving, leaving)
        write_atomically(leaving / "result.json", json.dumps(result, indent=1) + "\n")
    except DlttaError as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        sys.exit(2)
    sys.exit(1 if all("problem" in each for each in result["series"].values()) else 0)


def _variable(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise SettingError(f"{name} is not set; mercure sets it when it starts the module")
    return value


if __name__ == "__main__":
    main()
