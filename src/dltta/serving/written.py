"""7 prediction. A prediction as files beside each other in the output folder, and what the log says of them.

A segmentation is a mask, with `--save-probabilities` also the probability of every class; a classification is a row of
`predictions.csv`, which the log holds.
"""

import errno
import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from dltta.data.formats.dicom import Anonymous, Uids
from dltta.data.formats.format import ending, endings, format_of
from dltta.data.inbox import Incoming
from dltta.data.outputs import identifying, still_identifying, write_prediction, write_probabilities
from dltta.errors import DataError, StateError
from dltta.files import write_atomically
from dltta.models.io.opened import OpenedModel
from dltta.predictor import Loaded, Prediction
from dltta.serving.index import shortest
from dltta.serving.journal import Fields, on_disk
from dltta.serving.naming import Naming

FILES = (("prediction", "sha256"), ("probabilities_file", "probabilities_sha256"))  # keys of a line of the log


@dataclass(frozen=True)
class PredictionWriter:
    """Writes the predictions of one stream."""

    opened: OpenedModel
    output: Path
    naming: Naming
    save_probabilities: bool
    uids: Uids = "keep"  # of anonymous DICOM segmentations

    def write(self, case: Incoming, loaded: Loaded, prediction: Prediction) -> Fields:
        """The files of a prediction; says what goes into the line of its case."""
        if self.opened.task == "classification":
            return {
                "image": self.naming.image(case, loaded.digest),
                "prediction": self.opened.classes[int(self.opened.labels(prediction.probabilities))],
                "probabilities": shortest(prediction.probabilities.tolist()),
            }
        named = replace(case, name=self.naming.name(case, loaded.digest))
        labels, files = prediction.labels(self.opened).numpy(), []
        anonymous = None if self.naming.key is None else Anonymous(named.name, self.uids, self.naming.key)
        try:
            files.append(
                write_prediction(self.output, named, labels, loaded.geometry, self.opened.classes, anonymous=anonymous)
            )
            if self.save_probabilities:
                values = prediction.probabilities.numpy()
                files.append(write_probabilities(self.output, named, values, loaded.geometry, anonymous=anonymous))
        except DataError as error:
            for file in files:
                file.unlink()
            if _is_of_the_disk(error):
                raise StateError(f"{error}, then --resume") from error
            raise
        return _described(files)

    def copy(self, case: Incoming, digest: str, first: Fields) -> Fields:
        """The prediction of an earlier case, `first` in the log, for a case with the same content."""
        if "sha256" not in first:
            image = self.naming.image(case, digest)
            return {"image": image, "prediction": first["prediction"], "probabilities": first["probabilities"]}
        name, copies = self.naming.name(case, digest), []
        for key, checksum in FILES:
            if key in first:
                earlier = self.output / first[key]
                if not earlier.is_file() or sha256(earlier) != first[checksum]:
                    raise DataError(f"repeats {first['case']}, whose prediction {earlier.name} is gone; put it back")
                copies.append(self.output / f"{name}{_ending(earlier.name.removeprefix(first['case']), case)}")
                with on_disk(copies[-1]):
                    write_atomically(copies[-1], earlier.read_bytes())
        return _described(copies)


def anonymity(uids: Uids, cases: Sequence[Incoming] = ()) -> str:
    """What an anonymous stream takes out and what stays, in one sentence, as seen in the first image of each kind."""
    anonymous = Anonymous("", uids)
    first = {case.kind: case for case in reversed(cases) if case.problem is None}
    there: list[str] = []
    stays: list[str] = []
    for case in first.values():
        with suppress(DataError):  # said when it is read
            there += identifying(case)
            stays += still_identifying(case, anonymous)
    taken = [name for name in dict.fromkeys(there) if name not in stays]
    found = f" (found: {_listed(taken)})" if taken else ""
    kept = _listed(list(dict.fromkeys(stays))) or ("DICOM identifiers (UIDs)" if uids == "keep" else "")
    still = f"what still identifies: {kept}, by which a segmentation finds its images; " if kept else ""
    return (
        f"anonymize takes names, dates and descriptions out of predictions and log{found}; {still}"
        "the images themselves are not changed, and faces or burnt-in text are not looked for"
    )


def _listed(names: Sequence[str], most: int = 6) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _described(files: Sequence[Path]) -> Fields:
    """What the log says of a prediction's files."""
    fields: Fields = {}
    for (key, checksum), file in zip(FILES, files, strict=False):
        fields |= {key: file.name, checksum: sha256(file)}
    return fields


def _ending(earlier: str, case: Incoming) -> str:
    """The ending of a copied prediction: that of this case's own file where both are of one format."""
    own = ending(case.files[0])
    alike = own is not None and earlier in endings() and format_of(Path(f"_{earlier}")) is format_of(case.files[0])
    return own if own is not None and alike else earlier


def _is_of_the_disk(error: DataError) -> bool:
    """Whether the disk is the cause of a prediction that cannot be written, and not the case with its long name."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno != errno.ENAMETOOLONG
