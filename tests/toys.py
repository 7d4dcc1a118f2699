"""An image format from outside: one class in one file."""

import numpy as np

from dltta.data.formats.format import Geometry


class Toy:
    """`TOY`, rows, columns, bytes per value, then the values."""

    name, endings = "Toy", (".toy",)

    def begins(self, start):
        return start[:3] == b"TOY"

    def _open(self, path):
        content = path.read_bytes()
        if not self.begins(content):
            raise ValueError("no TOY at the start")
        rows, columns, size = content[3:6]
        return np.frombuffer(content[6:], f"u{size}").reshape(rows, columns)

    def read_geometry(self, path):
        values = self._open(path)
        return Geometry("toy", values.shape, 1, int(np.iinfo(values.dtype).max))

    def read_pixels(self, path):
        return self._open(path)[None]

    def read_classes(self, path):
        return self._open(path)

    def write_classes(self, file, labels, like, ending):
        file.write(b"TOY" + bytes([*labels.shape, labels.itemsize]) + labels.tobytes())
