"""The commands of a deployment's server: certificates, enroll, revoke, link, probe."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from fednorms.cli.output import print_json, stderr, stdout
from fednorms.cli.parsing import Flag, parse
from fednorms.core.errors import BadInput
from fednorms.core.options import nearest
from fednorms.flower.project import read_address, read_door, read_project, split_address

_Project = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="PROJECT")]


@dataclass
class Certificates:
    """Create the certificate authority, the server's certificate, and a key for each site that has none.

    Nothing is overwritten. The sites' public keys are added to the roster.
    """

    project: _Project
    """The project's folder."""
    days: int = 397
    """Days until the server's certificate ends."""
    renew: Flag = False
    """Replace the server's certificate and its key. A running link uses the new one at once."""
    json: Flag = False
    """Print one JSON object and nothing else."""


@dataclass
class Enroll:
    """Add a site's public key to the roster, or replace it; the former key is revoked.

    With --images, a node of the site that claims more training images is refused.
    """

    project: _Project
    """The project's folder."""
    site: str
    """The site's name, as in the project."""
    key: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: the one it has)")] = None
    """The site's public key, in OpenSSH's format (ssh-keygen -t ecdsa -b 384)."""
    images: Annotated[int | None, tyro.conf.arg(help_behavior_hint="(default: deploy.max_images of the project)")] = (
        None
    )
    """The most training images that the site may have. Its weight in the mean is its number of images."""


@dataclass
class Revoke:
    """Remove a site's key from the roster. A running link and a running round notice at once."""

    project: _Project
    """The project's folder."""
    site: str
    """The site's name."""


@dataclass
class LinkOptions:
    """Start Flower's link for this machine only, and in front of it the door: the only way in for the sites.

    Whoever has a shell on this machine is the operator: Flower's link has no passwords.
    """

    project: _Project
    """The project's folder, with its certificates and its roster."""
    host: str = "0.0.0.0"
    """Address of this machine at which the door listens."""
    port: Annotated[int | None, tyro.conf.arg(help_behavior_hint="(default: the project's)")] = None
    """Port at which the door listens."""
    link_port: int = 8000
    """Port of Flower's link, on 127.0.0.1."""
    database: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: PROJECT/link.db)")] = (
        None
    )
    """The link's database: a link that is started again recognizes its nodes by it."""


@dataclass
class Probe:
    """Test a running door as an outsider would. Every attempt must be refused; otherwise the exit code is 1."""

    address: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="HOST:PORT")]
    """Where the door is."""
    ca: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    """The deployment's ca.crt."""
    site: str = "site"
    """Name of a site, which a stranger tries to use."""
    key: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: only as a stranger)")] = (
        None
    )
    """A site's private key, to test also what that site could do to the others."""
    json: Flag = False
    """Print one JSON object and nothing else."""


def certificates(args: Sequence[str]) -> int:
    """The command."""
    given = parse(Certificates, "deploy certificates", args)
    from fednorms.flower.certificates import make_certificates
    from fednorms.flower.keys import FILE

    _, deployment = read_project(given.project)
    host, _ = read_address(given.project)
    if not 1 <= given.days <= 3650:
        raise BadInput(f"--days is 1 to 3650; got {given.days}.")
    made = make_certificates(given.project, host, deployment.site_names, given.days, renew=given.renew)
    if given.json:
        print_json({"files": [str(path) for path in made]})
        return 0
    console = stdout()
    there = f"Everything is there already. The sites' keys are in {given.project / FILE}."
    console.print("\n".join(map(str, made)) or there, markup=False, soft_wrap=True)
    if made:
        console.print(
            "\nSend each site ca.crt and its own key, over a channel you trust. Keep ca.key and server.key here."
        )
    return 0


def enroll(args: Sequence[str]) -> int:
    """The command."""
    given = parse(Enroll, "deploy enroll", args)
    from fednorms.flower.keys import FILE, SiteKeys, read_keys

    _, deployment = read_project(given.project)
    if given.site not in deployment.site_names:
        raise BadInput(f'No site "{given.site}" in {given.project}: {nearest(given.site, deployment.site_names)}.')
    if given.key is None and given.images is None:
        raise BadInput("Nothing to do: give --key, --images, or both.")
    path = given.project / FILE
    keys = read_keys(path) if path.exists() else SiteKeys()
    console = stdout()
    if given.key is not None:
        try:
            text = given.key.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"Cannot read --key {given.key} ({error}).") from None
        keys = keys.enrolled(given.site, text, str(given.key))
    if given.images is not None:
        if given.images < 1:
            raise BadInput(f"--images is at least 1; got {given.images}.")
        keys = keys.limited(given.site, given.images)
    keys.write(path)
    if given.key is not None:
        console.print(f'The key of site "{given.site}" is in {path}.', markup=False, soft_wrap=True)
    if given.images is not None:
        console.print(
            f'Site "{given.site}" may have at most {given.images:,} training images.', markup=False, soft_wrap=True
        )
    return 0


def revoke(args: Sequence[str]) -> int:
    """The command."""
    given = parse(Revoke, "deploy revoke", args)
    from fednorms.flower.keys import FILE, read_keys

    path = given.project / FILE
    read_keys(path).without(given.site).write(path)
    stdout().print(f'The key of site "{given.site}" is revoked.', markup=False, soft_wrap=True)
    return 0


def require_posix(command: str) -> None:
    """Refuse to start processes where their signals and locks do not exist."""
    if os.name != "posix":
        raise BadInput(f"fednorms deploy {command} runs on Linux and macOS. On Windows, use WSL.")


def link(args: Sequence[str]) -> int:
    """The command."""
    given = parse(LinkOptions, "deploy link", args)
    require_posix("link")
    from fednorms.flower.limits import Limits
    from fednorms.flower.link import Link, run_link

    read_project(given.project)
    limits = Limits.read(read_door(given.project), str(given.project / "pyproject.toml"))
    port = read_address(given.project)[1] if given.port is None else given.port
    database = given.database or given.project / "link.db"
    console = stderr()
    return run_link(
        Link(given.project, given.host, port, given.link_port, database, limits),
        lambda text: console.print(text, markup=False, soft_wrap=True),
    )


def probe(args: Sequence[str]) -> int:
    """The command."""
    given = parse(Probe, "deploy probe", args)
    from fednorms.flower.keys import private_key
    from fednorms.flower.probe import probe as attempts

    host, port = split_address(given.address, "HOST:PORT")
    if not given.ca.is_file():
        raise BadInput(f"Cannot read --ca {given.ca}.")
    key = private_key(given.key) if given.key else None
    console, found = stdout(), []
    for finding in attempts(host.strip("[]"), port, given.ca, given.site, key):
        found.append(finding)
        if not given.json:
            console.print(str(finding), markup=False, soft_wrap=True)
    open_ = [f for f in found if not f.refused]
    if given.json:
        print_json({"refused": not open_, "attempts": [vars(f) for f in found]})
    else:
        all_ = f"\nAll {len(found)} attempts were refused."
        console.print(f"\n{len(open_)} of {len(found)} attempts were NOT refused." if open_ else all_)
    return 1 if open_ else 0
