"""Cut off work on files at its k-th system call."""

from __future__ import annotations

import os


class Killed(BaseException):
    """Nothing runs after kill -9: from then on every system call raises, so no clean-up can happen."""


class Calls:
    """Counts system calls that change the disk, and makes the k-th one fail, with an OSError or as if killed."""

    NAMES = ("open", "write", "fsync", "replace", "unlink", "mkdir", "rmdir")

    def __init__(self, monkeypatch, fail_at, error=None):
        self.count, self.fail_at, self.error, self.dead = 0, fail_at, error, False
        for name in self.NAMES:
            monkeypatch.setattr(os, name, self._wrap(name, getattr(os, name)))

    def _wrap(self, name, original):
        def call(*args, **keywords):
            if self.dead:
                raise Killed
            self.count += 1
            if self.count == self.fail_at:
                if name == "write":
                    original(args[0], bytes(args[1])[: len(args[1]) // 2])
                if self.error:
                    raise OSError(self.error, os.strerror(self.error), str(args[0]))
                self.dead = True
                raise Killed
            return original(*args, **keywords)

        return call
