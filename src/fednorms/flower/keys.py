"""Which key belongs to which site: the roster file of a deployment, `roster.toml`.

    [keys]
    north = "ecdsa-sha2-nistp384 AAAA..."

    [images]
    north = 1200

    [revoked]
    "ecdsa-sha2-nistp384 AAAA..." = "south"

The door of the link lets in the keys of this file and no others, and a node may speak only for the site of its key.
Both the door and the server's app read the file again when it changes: revoking a key takes effect in the running
round. `[images]` has the most training images that a site may have. A site's weight in the mean is its number of
images, which it says itself; only the operator can know whether that is true.
"""

from __future__ import annotations

import os
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fednorms.core.errors import BadInput
from fednorms.core.options import nearest
from fednorms.runs.store.atomic import write_atomic
from fednorms.runs.toml import dumps

FILE = "roster.toml"
TABLES = ("keys", "images", "revoked")
_HEAD = """# The public key of each site. Only these keys pass the door, each as its own site. `fednorms deploy enroll`
# and `fednorms deploy revoke` change this file; changes take effect at once, in a running round, too.
"""


@dataclass(frozen=True)
class SiteKeys:
    """The content of a roster file; keys are OpenSSH text."""

    keys: Mapping[str, str] = field(default_factory=dict)
    revoked: Mapping[str, str] = field(default_factory=dict)
    images: Mapping[str, int] = field(default_factory=dict)

    @property
    def owners(self) -> dict[bytes, str]:
        """The site of each key, by the bytes that Flower's nodes send."""
        return {wire_form(text): site for site, text in self.keys.items()}

    def enrolled(self, site: str, text: str, where: str = "the public key") -> SiteKeys:
        """With this key for a site, in place of its former one, which is revoked."""
        text = _plain(text, where)
        if text in self.revoked:
            raise BadInput(f'{where} was revoked (site "{self.revoked[text]}"). Create a new key for site "{site}".')
        if owner := next((s for s, known in self.keys.items() if known == text and s != site), ""):
            raise BadInput(f'{where} is already the key of site "{owner}". Every site needs its own key.')
        former = self.keys.get(site, text)
        revoked = dict(self.revoked) if former == text else {**self.revoked, former: site}
        return replace(self, keys={**self.keys, site: text}, revoked=revoked)

    def limited(self, site: str, images: int) -> SiteKeys:
        """With this number of training images as the most that a site may have."""
        return replace(self, images={**self.images, site: _count(images, f'The images of site "{site}"')})

    def without(self, site: str) -> SiteKeys:
        """With the key of a site revoked."""
        if site not in self.keys:
            raise BadInput(f'Site "{site}" has no key in the roster: {nearest(site, self.keys)}.')
        keys = {name: text for name, text in self.keys.items() if name != site}
        return replace(self, keys=keys, revoked={**self.revoked, self.keys[site]: site})

    def write(self, path: Path) -> None:
        """Write the file, all or nothing."""
        tables = {"keys": self.keys, "images": self.images, "revoked": self.revoked}
        write_atomic(
            path, (_HEAD + dumps({name: table for name, table in tables.items() if table or name == "keys"})).encode()
        )


def read_keys(path: Path) -> SiteKeys:
    """Read a roster file; anything that is not exactly such a file is an error."""
    try:
        told = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadInput(f"Cannot read the roster {path} ({error}).") from None
    keys, images, revoked = (told.get(name, {}) for name in TABLES)
    tables_only = "keys" in told and all(name in TABLES and isinstance(table, dict) for name, table in told.items())
    if not tables_only:
        tables = ", ".join(f"[{name}]" for name in TABLES)
        raise BadInput(f"{path} is not a roster: expected the tables {tables}, found {sorted(told)}.")
    if wrong := [k for table in (keys, revoked) for k, v in table.items() if not isinstance(v, str)]:
        raise BadInput(f'The entry "{wrong[0]}" of {path} is not text. Expected SITE = "ecdsa-sha2-nistp384 AAAA...".')
    found = {site: _plain(text, f'The key of site "{site}" in {path}') for site, text in keys.items()}
    gone = {_plain(text, f'The revoked key of site "{site}" in {path}'): site for text, site in revoked.items()}
    if len(set(found.values())) < len(found):
        raise BadInput(f"Two sites have the same key in {path}. Every site needs its own key.")
    if both := [site for site, text in found.items() if text in gone]:
        raise BadInput(f'The key of site "{both[0]}" is both in use and revoked in {path}. Remove it from one table.')
    limits = {site: _count(number, f'The images of site "{site}" in {path}') for site, number in images.items()}
    return SiteKeys(found, gone, limits)


class Watched:
    """A roster file that is read again whenever it changes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: tuple[int, int, int] | None = None
        self._owners: dict[bytes, str] = {}
        self._images: Mapping[str, int] = {}
        self._error = ""

    @classmethod
    def of_link(cls) -> Watched | None:
        """The roster of the link that started this process; None without one, as in Flower's simulation."""
        path = os.environ.get("FEDNORMS_ROSTER")
        return cls(Path(path)) if path else None

    def environment(self) -> dict[str, str]:
        """What `of_link` needs in the environment of a process that the link starts."""
        return {"FEDNORMS_ROSTER": str(self.path.resolve())}

    def owners(self) -> Mapping[bytes, str]:
        """The site of each key; BadInput while the file cannot be read, so nobody is let in by an old list."""
        self._read()
        return self._owners

    def images(self) -> Mapping[str, int]:
        """The most training images that each site may have, of those sites for which the file says it."""
        self._read()
        return self._images

    def _read(self) -> None:
        try:
            file = self.path.stat()
            now = (file.st_mtime_ns, file.st_size, file.st_ino)
        except OSError as error:
            self._seen = None
            raise BadInput(f"Cannot read the roster {self.path} ({error}).") from None
        if now != self._seen:
            self._owners, self._error, self._seen = {}, "", now
            try:
                found = read_keys(self.path)
                self._owners, self._images = found.owners, found.images
            except BadInput as error:
                self._error = str(error)
        if self._error:
            raise BadInput(self._error)


def claims(sites: Sequence[str]) -> str:
    """What an operator should know about sites without a number of images in the roster.

    >>> print(claims(["north"]))
    The roster has no number of images for north: where sites are weighted by their images, it counts for as many as it
    claims. If you know the number: fednorms deploy enroll PROJECT --site north --images N
    """
    many = len(sites) > 1
    return (
        f"The roster has no number of images for {', '.join(sites)}: where sites are weighted by their images, "
        f"{'each' if many else 'it'} counts for as many as it claims. If you know the number{'s' * many}: "
        f"fednorms deploy enroll PROJECT --site {shlex.quote(sites[0])} --images N"
    )


def wire_form(text: str) -> bytes:
    """An OpenSSH public key as Flower's nodes send theirs: PEM."""
    pem, form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    return _load(text, "The public key").public_bytes(pem, form)


def new_key() -> tuple[bytes, str]:
    """A new private key in OpenSSH's format, and its public key."""
    private = ec.generate_private_key(ec.SECP384R1())
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH
    return private.private_bytes(pem, form, serialization.NoEncryption()), _text(private.public_key())


def private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Read a site's private key; BadInput if it is none."""
    try:
        found = serialization.load_ssh_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise BadInput(
            f"Cannot read the private key {path} ({error}). Expected an ECDSA key without a passphrase, in OpenSSH's "
            "format."
        ) from None
    if not isinstance(found, ec.EllipticCurvePrivateKey):
        raise BadInput(f"{path} is not an ECDSA key. Create one with: ssh-keygen -t ecdsa -b 384 -N '' -f {path.name}")
    return found


def public_text(private: ec.EllipticCurvePrivateKey) -> str:
    """The public key of a private one, as the roster has it."""
    return _text(private.public_key())


def _count(number: object, where: str) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise BadInput(f"{where}: expected a number of at least 1, found {number!r}.")
    return number


def _plain(text: str, where: str) -> str:
    """The key without its comment, so the same key is the same text."""
    return _text(_load(text, where))


def _load(text: str, where: str) -> ec.EllipticCurvePublicKey:
    try:
        found = serialization.load_ssh_public_key(text.strip().encode())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise BadInput(f"{where} is not a public key in OpenSSH's format ({error}).") from None
    if not isinstance(found, ec.EllipticCurvePublicKey):
        raise BadInput(f"{where} is not an ECDSA key. Create one with: ssh-keygen -t ecdsa -b 384")
    return found


def _text(public: ec.EllipticCurvePublicKey) -> str:
    return public.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()
