"""Which site does a DICOM image come from? A rule fills its name from the header; the same for service and node."""

import re
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dltta.errors import DataError, SettingError

USUAL = "{Manufacturer}/{StationName}/{ProtocolName}"
_FIELD = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class SiteRule:
    """`{StationName}/{ProtocolName}`: names of header elements in braces, anything else as it stands."""

    text: str = USUAL

    def __post_init__(self) -> None:
        named = _FIELD.findall(self.text)
        if not named or set(_FIELD.sub("", self.text)) & set("{}"):
            raise SettingError(f"the rule for sites {self.text!r} names no header element; such as {USUAL!r}")
        if self.text == USUAL:
            return  # known to be good, also where DICOM is not installed
        from dltta.data.formats.dicom import keywords

        for name in named:
            if name not in keywords():
                close = get_close_matches(name, keywords(), 1)
                hint = f"did you mean {close[0]!r}?" if close else "use the keywords of the DICOM standard"
                raise SettingError(f"the rule for sites names {name!r}, which is no DICOM element; {hint}")
            if name.startswith("Patient"):
                raise SettingError(f"the rule for sites names {name!r}: a site is a scanner or protocol, not a patient")

    def site(self, header: Any) -> str:
        """The rule with the values of a header; what is missing is called unknown."""

        def value(match: "re.Match[str]") -> str:
            found = str(getattr(header, match[1], "") or "unknown")
            return "".join(letter if letter.isprintable() else " " for letter in found).strip() or "unknown"

        return _FIELD.sub(value, self.text)[:200].strip() or "unknown"

    def site_of_upload(self, content: bytes) -> str:
        """Of a DICOM file, or of the first one in a zip; raises `DataError` for what has no such header."""
        from dltta.data.formats.dicom import MAGIC, PREAMBLE, read_header
        from dltta.serving.upload import first_bytes

        first = first_bytes(content)
        if first[PREAMBLE - len(MAGIC) : PREAMBLE] != MAGIC:
            raise DataError("no site was given, and only a DICOM image says in its header where it comes from")
        with TemporaryDirectory() as folder:  # for its owner alone
            file = Path(folder, "image")
            file.write_bytes(first)
            return self.site(read_header(file))
