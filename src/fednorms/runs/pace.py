"""How long the rounds that are left will take: a smooth estimate from the rounds trained so far."""

from __future__ import annotations

LIMIT = 1.5  # how much the estimate for one round may change from one round to the next, as a factor


class Pace:
    """Seconds per round, from the mean over all rounds that were trained here.

    The first round does not count: it also opens the data and starts processes. Rounds that a run had before it was
    continued are never reported. Between two rounds the estimate changes by at most a factor of `LIMIT`, so one slow
    round does not triple the time left.

    >>> pace = Pace()
    >>> for now in (100.0, 102.0, 104.0): pace.trained(now)
    >>> pace.left(rounds=10, now=104.5)
    19.5
    """

    def __init__(self) -> None:
        self.began: float | None = None
        self.rounds = 0
        self.each = 0.0
        self.last = 0.0

    def trained(self, now: float) -> None:
        """A round has ended."""
        self.last = now
        if self.began is None:
            self.began = now
            return
        self.rounds += 1
        mean = (now - self.began) / self.rounds
        self.each = mean if self.rounds == 1 else min(max(mean, self.each / LIMIT), self.each * LIMIT)

    def left(self, rounds: int, now: float) -> float | None:
        """Seconds for so many more rounds; None while too little is known."""
        if self.rounds < 2 or rounds < 1:
            return None
        return max(0.0, self.each * rounds - (now - self.last))
