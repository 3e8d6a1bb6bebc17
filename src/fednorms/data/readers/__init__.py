"""Readers of published data sets: a folder in its usual layout becomes the papers' federation."""

from __future__ import annotations

from fednorms.data.readers import digits_five
from fednorms.data.readers.reader import Reader

READERS: dict[str, Reader] = {reader.name: reader for reader in (digits_five.READER,)}
