"""What must one know before using a model? A model card in Markdown, with the header that Hugging Face reads.

Every number is read from the model's own files; what they do not say is said to be unknown.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from dltta.data.shifts.draw import DRAWN
from dltta.methods import Method
from dltta.models.inspection import count
from dltta.models.io.checkpoint import training_words
from dltta.models.io.opened import OpenedModel
from dltta.models.normalization import normalization_layers
from dltta.quality.candidates import BATCH

UNKNOWN = "not recorded in the model"
KINDS = {
    "checkpoint": "a model folder of `dltta train`",
    "bundle": "a MONAI bundle",
    "factory": "Python code with weights",
    "nnunet": "a result folder of nnU-Net",
}


def model_card(opened: OpenedModel) -> str:
    """Training data, in-domain score, rehearsal, intended use and limits of a model."""
    dense = opened.task == "segmentation"
    header = {
        "library_name": "dltta",
        "pipeline_tag": "image-segmentation" if dense else "image-classification",
        "tags": ["medical-imaging", "test-time-adaptation", f"{opened.spatial_dims}d", opened.kind],
    }
    sections = {
        "Model": _rows(_network(opened)),
        "Training data": _rows(training_data(opened)),
        "In-domain score": _rows(in_domain(opened)),
        "Rehearsal": "\n".join(f"- {line}" for line in rehearsed(opened)),
        "Intended use": _intended(opened),
        "Limits": "\n".join(f"- {line}" for line in limits(opened)),
    }
    lines = [
        "---",
        *(f"{key}: {json.dumps(value)}" for key, value in header.items()),
        "---",
        "",
        f"# {opened.name}",
        "",
    ]
    for title, text in sections.items():
        lines += [f"## {title}", "", text, ""]
    return "\n".join(lines)


def missing_parts(opened: OpenedModel) -> list[str]:
    """What the model lacks, and what it would be needed for."""
    found = []
    if opened.calibration is None:
        found.append(
            "calibration: the guard cannot tell images far out of distribution, and there are no shrinkage statistics"
        )
    if opened.rehearsal is None:
        found.append("rehearsal: recommended cannot choose, and expects no quality (dltta calibrate)")
    if opened.checkpoint is None:
        trained = [str(method) for method in Method if method.facts.part and opened.task in method.facts.tasks]
        return [*found, f"parts that only dltta train adds: {', '.join([*trained, '--prefill'])}"]
    pairs, others = opened.checkpoint.pairs, opened.checkpoint.others()
    if opened.rotation is None and "ttt" not in others:
        found.append("rotation head: ttt (dltta train --with ttt)")
    if opened.contrast is None and "ttt++" not in others:
        found.append("projection head: ttt++ (dltta train --with ttt++)")
    if opened.denoiser is None and "dtta" not in others and opened.task in Method.DTTA.facts.tasks:
        found.append("image normalizer and denoiser: dtta (dltta train --with dtta)")
    if opened.reconstructions is None:
        found.append("auto-encoders: atta (dltta train --with atta)")
    if pairs is None:
        found.append("source pairs: --prefill (dltta train --with memory)")
    return found


def _network(opened: OpenedModel) -> dict[str, str]:
    norms = sorted({type(layer).__name__ for _, layer in normalization_layers(opened.model)})
    window = "whole images" if opened.window is None else f"windows of {'x'.join(map(str, opened.window.patch))}"
    return {
        "Form": KINDS[opened.kind],
        "Task": f"{opened.task} of {', '.join(opened.classes)}",
        "Input": f"{opened.spatial_dims}-D images of {opened.in_channels} channels, {window}",
        "Network": f"{type(opened.model).__name__}, {count(opened.model):,} parameters",
        "Normalization": ", ".join(norms) or "none",
        "Fingerprint": f"`{opened.fingerprint}`",
    }


def training_data(opened: OpenedModel) -> dict[str, str]:
    """Where the weights come from, as far as the model says."""
    if opened.checkpoint is not None:
        record = opened.checkpoint.record
        losses = record.get("losses")
        return {
            "Sites": ", ".join(record.get("sites", ())) or UNKNOWN,
            "Epoch": str(record.get("epoch", UNKNOWN)),
            "Trained with": training_words(losses) if losses else UNKNOWN,
            "Adapted": _adapted(record),
        }
    if opened.nnunet is not None:
        dataset = _json(opened.nnunet.path / "dataset.json")
        plans = _json(opened.nnunet.path / "plans.json")
        return {
            "Data set": str(plans.get("dataset_name", UNKNOWN)),
            "Cases": str(dataset.get("numTraining", UNKNOWN)),
            "Channels": ", ".join(map(str, dataset.get("channel_names", {}).values())) or UNKNOWN,
            "Folds": ", ".join(opened.nnunet.folds),
            "License": str(dataset.get("licence", dataset.get("license", UNKNOWN))),
        }
    if opened.bundle is not None and (opened.bundle / "configs" / "metadata.json").is_file():
        described = _json(opened.bundle / "configs" / "metadata.json")
        keys = {"Data": "data_source", "Kind": "data_type", "Authors": "authors", "License": "copyright"}
        return {title: str(described.get(key, UNKNOWN)) for title, key in keys.items()}
    return {"Sites": UNKNOWN}


def in_domain(opened: OpenedModel) -> dict[str, str]:
    """The score on held-out source cases that the training itself recorded."""
    if opened.checkpoint is not None and opened.checkpoint.record.get("score") is not None:
        record = opened.checkpoint.record
        return {f"Validation {record.get('metric', 'score')}": f"{100 * record['score']:.1f}"}
    if opened.nnunet is not None:
        return dict(_nnunet_scores(opened)) or {"Score": UNKNOWN}
    return {"Score": UNKNOWN}


def _nnunet_scores(opened: OpenedModel) -> Iterator[tuple[str, str]]:
    """nnU-Net's own validation of every fold."""
    for fold in opened.nnunet.folds if opened.nnunet is not None else ():
        path = opened.nnunet.path / f"fold_{fold}" / "validation" / "summary.json" if opened.nnunet else Path()
        dice = _json(path).get("foreground_mean", {}).get("Dice") if path.is_file() else None
        if dice is not None:
            yield f"Validation Dice of fold {fold}", f"{100 * dice:.1f}"


def rehearsed(opened: OpenedModel) -> Iterator[str]:
    """What the model knows of how adaptation goes on it."""
    if opened.calibration is None:
        yield "none: the model was not calibrated on source images"
    else:
        measured = len(opened.calibration.layers), len(opened.calibration.predictions)
        yield "calibrated on source images: {} layers, {} numbers about predictions".format(*measured)
    if opened.rehearsal is not None:
        yield f"rehearsed with {rehearsal_extent(opened.rehearsal)}"
        yield from rehearsal_sentences(opened.rehearsal)


def rehearsal_extent(found: Mapping[str, Any]) -> str:
    """How much was rehearsed; further streams are the source, one that changes half-way, and harmful ones."""
    simulated = [each for each in found["sites"] if each["name"].startswith(DRAWN)]
    cases, further = max(found["cases"].values()), len(found["sites"]) - len(simulated)
    return f"{cases} source cases at {len(simulated)} simulated sites and in {further} further streams"


def rehearsal_sentences(found: Mapping[str, Any]) -> list[str]:
    """What a rehearsal found, for people: one for each batch size."""
    said = []
    for size, efforts in found["batch_sizes"].items():
        best = efforts["default"]
        sites = [row for row in best["scores"] if not row["harmful"] and row["site"] != "source"]
        mean = {key: 100 * fmean(row[key] for row in sites) for key in ("source", "batch", "chosen")}
        compared = f"source model {mean['source']:.1f}"
        if BATCH in best["plan"]["arms"]:
            compared += f", batch statistics {mean['batch']:.1f}"
        arms = ", ".join(best["plan"]["arms"])
        said.append(f"batches of {size}: {arms}; at simulated sites {mean['chosen']:.1f} ({compared})")
    return said


def _intended(opened: OpenedModel) -> str:
    what = "segmenting" if opened.task == "segmentation" else "classifying"
    return (
        f"{what.capitalize()} {', '.join(opened.classes)} in images like those it was trained on, and, adapting, in "
        "images of other scanners and protocols of the same anatomy. Research; not a medical device."
    )


def limits(opened: OpenedModel) -> Iterator[str]:
    """Where it must not be trusted."""
    yield "predictions on images of other anatomy, modality or disease are not covered by any number here"
    yield "adaptation changes predictions: look at the decisions and reasons in stream.jsonl"
    for part in missing_parts(opened):
        yield f"without {part}"


def _adapted(record: Any) -> str:
    return f"version {record['adapted']['version']} of a stream" if "adapted" in record else "no"


def _rows(entries: dict[str, str]) -> str:
    return "\n".join(f"- **{title}**: {text}" for title, text in entries.items())


def _json(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text("utf-8"))
    return found if isinstance(found, dict) else {}
