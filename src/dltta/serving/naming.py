"""What is a case called in the log, in predictions and in messages?

By the name of its file, never by a folder. An anonymous stream uses the hash of the content instead, and removes file
names from every message. A file that cannot be read gets a keyed hash of its name; the key stays with the state, so
that names cannot be guessed from the log alone.
"""

import hashlib
import hmac
import os
import re
from dataclasses import dataclass

from dltta.data.inbox import Incoming
from dltta.errors import DlttaError


@dataclass(frozen=True)
class Naming:
    """`key` makes a stream anonymous."""

    key: str | None = None

    def name(self, case: Incoming, digest: str | None) -> str:
        """Of a case whose content has this hash; None if it could not be read."""
        if self.key is None:
            return case.name
        if digest is not None:
            return digest[:16]
        return "unread-" + hmac.new(self.key.encode(), case.name.encode(), hashlib.sha256).hexdigest()[:16]

    def image(self, case: Incoming, digest: str) -> str:
        """Its name in `predictions.csv`: with the ending of the file, where it is a single file."""
        return case.files[0].name if self.key is None and len(case.files) == 1 else self.name(case, digest)

    def reason(self, error: DlttaError, case: Incoming, name: str) -> str:
        """What went wrong, in one sentence for the log: no folders, in an anonymous stream no file names."""
        sentence = " ".join(str(error).split())
        for folder in {str(file.parent) for file in case.files}:
            sentence = sentence.removeprefix(f"{folder}: ").replace(f"{folder}{os.sep}", "")
        words = _words(case) if self.key is not None else {file.name for file in case.files[:1]}
        for word in sorted(words, key=len, reverse=True):
            sentence = re.sub(rf"(?<!\w){re.escape(word)}(?!\w)", name, sentence)
        return sentence.removeprefix(f"{name}: ")

    def sentence(self, error: DlttaError, case: Incoming, name: str) -> str:
        """The same for the user: with the path, unless the stream is anonymous."""
        whole = " ".join(str(error).split())
        if self.key is not None:
            return f"{name}: {self.reason(error, case, name)}"
        return whole if name in whole else f"{name}: {whole}"


def _words(case: Incoming) -> set[str]:
    """Everything that contains the case's name, also as Python quotes it."""
    names = {file.name for file in case.files} | {file.parent.name for file in case.files if case.kind == "dicom"}
    stems = {name.split(".")[0] for name in names} | {name.rpartition(".")[0] for name in names}
    plain = {case.name, *names, *stems} - {""}
    return plain | {ascii(word)[1:-1] for word in plain}
