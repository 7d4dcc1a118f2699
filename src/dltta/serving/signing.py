"""Who wrote the log? With a key that only its writer has, every line carries a signature (HMAC-SHA256)."""

import hashlib
import hmac
from dataclasses import dataclass, field
from pathlib import Path

from dltta.errors import SettingError

SHORTEST = 16  # bytes


@dataclass(frozen=True)
class Signer:
    """Signs and checks with one key, which is never shown."""

    key: bytes = field(repr=False)

    @classmethod
    def from_file(cls, path: Path, output: Path) -> "Signer":
        """The key is the content of a file, which must not lie in the folder that it protects."""
        if path.resolve().is_relative_to(output.resolve()):
            raise SettingError(f"{path} lies in {output}, which it should protect; keep the key elsewhere")
        try:
            key = path.read_bytes()
        except OSError as error:
            raise SettingError(f"{path}: the key cannot be read ({error.strerror or error})") from error
        if len(key) < SHORTEST:
            raise SettingError(
                f"{path} holds a key of {len(key)} bytes; make one of 32: head -c 32 /dev/urandom > {path.name}"
            )
        return cls(key)

    def sign(self, content: bytes) -> str:
        return hmac.new(self.key, content, hashlib.sha256).hexdigest()

    def accepts(self, content: bytes, signature: str) -> bool:
        return hmac.compare_digest(self.sign(content).encode(), signature.encode(errors="replace"))
