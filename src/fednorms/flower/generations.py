"""A site's own state on its disk, in two generations, so a lost reply can be undone.

Flower keeps nothing for a site between runs and restarts. The state folder holds, for every recipe and site,
`round-000004.safetensors`: the state after round 4. The server says which round it accepted last. The site continues
from that one, and drops a newer one whose reply was lost.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from urllib.parse import quote

import torch
from safetensors import SafetensorError

from fednorms.core.errors import RunFailed
from fednorms.core.states import ClientState
from fednorms.core.tree import Tree
from fednorms.runs.store.atomic import clear_errors, write_atomic
from fednorms.runs.store.packing import pack_client, unpack_client
from fednorms.runs.store.seal import check_tensors, sealed_tensors

NONE = -1  # the round of a site that has no state


def default_root() -> Path:
    """The default state folder, if the node's config names none."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "fednorms"


def file_name(site: str) -> str:
    """A site's name as that of a file or folder.

    >>> file_name("north east")
    'north%20east-165b65e7'
    """
    return f"{quote(site, safe='')[:60]}-{hashlib.blake2b(site.encode(), digest_size=4).hexdigest()}"


class Generations:
    """The states of one site in one recipe.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as root:
    ...     kept = Generations(Path(root), "recipe", "north")
    ...     for t in (1, 2, 3):
    ...         kept.save(ClientState(t, Tree(w=torch.ones(1)), {}), accepted=t - 1)
    ...     kept.rounds(), kept.load(2).round, kept.load(NONE)
    ([2, 3], 2, None)
    """

    def __init__(self, root: Path, recipe: str, site: str) -> None:
        self.site, self.recipe = site, recipe
        self.folder = root / recipe / file_name(site)

    def rounds(self) -> list[int]:
        """The rounds whose states are stored."""
        return sorted(int(path.stem.removeprefix("round-")) for path in self.folder.glob("round-*.safetensors"))

    def load(self, accepted: int, device: torch.device | str = "cpu") -> ClientState | None:
        """Load the state that the server accepted last; None before the first."""
        if accepted == NONE:
            return None
        return self._read(self._path(accepted), f'The state of site "{self.site}" after round {accepted}', device)

    def save(self, state: ClientState, accepted: int) -> None:
        """Store a new state next to the accepted one, and remove all others."""
        with clear_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(self._path(state.round), sealed_tensors(pack_client(state)))
        for t in self.rounds():
            if t not in (accepted, state.round):
                self._path(t).unlink(missing_ok=True)

    def save_fixed(self, fixed: Tree) -> None:
        """Store the tensors of the model that are sent only once."""
        with clear_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(self.folder / "fixed.safetensors", sealed_tensors(pack_client(ClientState(0, fixed, {}))))

    def load_fixed(self, device: torch.device | str = "cpu") -> Tree:
        """Load what `save_fixed` stored."""
        what = f'The first model that was sent to site "{self.site}"'
        return self._read(self.folder / "fixed.safetensors", what, device).local

    def save_answer(self, t: int, model: Tree) -> None:
        """Store the noised update that is sent in a round, before it is sent; only the last two stay."""
        with clear_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(self._answer(t), sealed_tensors(pack_client(ClientState(t, model, {}))))
        for path in sorted(self.folder.glob("answer-*.safetensors"))[:-2]:
            path.unlink(missing_ok=True)

    def has_answer(self, t: int) -> bool:
        """Whether the answer of a round is still stored."""
        return self._answer(t).exists()

    def load_answer(self, t: int, device: torch.device | str = "cpu") -> Tree:
        """Load what `save_answer` stored."""
        return self._read(self._answer(t), f'The answer of site "{self.site}" for round {t + 1}', device).local

    def _answer(self, t: int) -> Path:
        return self.folder / f"answer-{t:06d}.safetensors"

    def _path(self, t: int) -> Path:
        return self.folder / f"round-{t:06d}.safetensors"

    def _read(self, path: Path, what: str, device: torch.device | str) -> ClientState:
        try:
            data = path.read_bytes()
            check_tensors(data)
            return unpack_client(data, device)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or error
            raise RunFailed(f"{what} cannot be read from {path} ({reason}). Restore the folder from a copy.") from error
