"""What is a case called in the log, in predictions and in messages?

By its file's name; folders are never told. An anonymous stream calls a case by the hash of its content, and takes file
names out of every sentence. What cannot even be read gets a hash of its name with a key that stays with the state, so
that nobody who has the log alone can try names.
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
        """What a table of labels calls it: the file with its ending where it is one."""
        return case.files[0].name if self.key is None and len(case.files) == 1 else self.name(case, digest)

    def reason(self, error: DlttaError, case: Incoming, name: str) -> str:
        """What went wrong in one sentence fit for the log: without folders, anonymous without file names."""
        sentence = " ".join(str(error).split())
        for folder in {str(file.parent) for file in case.files}:
            sentence = sentence.removeprefix(f"{folder}: ").replace(f"{folder}{os.sep}", "")
        words = _words(case) if self.key is not None else {file.name for file in case.files[:1]}
        for word in sorted(words, key=len, reverse=True):
            sentence = re.sub(rf"(?<!\w){re.escape(word)}(?!\w)", name, sentence)
        return sentence.removeprefix(f"{name}: ")

    def sentence(self, error: DlttaError, case: Incoming, name: str) -> str:
        """The same for whoever runs the stream: with the path, unless anonymous."""
        whole = " ".join(str(error).split())
        if self.key is not None:
            return f"{name}: {self.reason(error, case, name)}"
        return whole if name in whole else f"{name}: {whole}"


def _words(case: Incoming) -> set[str]:
    """Everything that tells the case's name, also as Python would quote it."""
    names = {file.name for file in case.files} | {file.parent.name for file in case.files if case.kind == "dicom"}
    stems = {name.split(".")[0] for name in names} | {name.rpartition(".")[0] for name in names}
    plain = {case.name, *names, *stems} - {""}
    return plain | {ascii(word)[1:-1] for word in plain}
