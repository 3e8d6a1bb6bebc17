"""`fednorms deploy node` and `deploy audit`: connect a site to the server of a deployment, and what it then did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from fednorms.cli.deploy_server import require_posix
from fednorms.cli.output import grid, print_json, stderr, stdout
from fednorms.cli.parsing import Flag, Text, parse
from fednorms.core.errors import BadInput
from fednorms.core.options import nearest
from fednorms.flower.project import read_address, read_project, split_address


@dataclass
class NodeOptions:
    """Connect a site: answer the server's messages with the site's data and its own copy of the project.

    Code that comes with a run is never loaded. Every message and every reply is written to the audit log.
    """

    project: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="PROJECT")]
    """The site's copy of the project's folder."""
    site: str
    """The site's name, as in the project."""
    ca: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    """The deployment's ca.crt: no other server is accepted."""
    key: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    """The site's private key."""
    data: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")] = None
    """The site's folder of CLASS/image. Without it, the site's data are those in the recipe's federation."""
    policy: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """What a run may ask of this site, as TOML. Without it, everything but class counts."""
    server: Annotated[str, tyro.conf.arg(metavar="HOST:PORT", help_behavior_hint="(default: the project's)")] = ""
    """Where the server's door is."""
    state: Annotated[
        Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: ~/.local/state/fednorms)")
    ] = None
    """Folder of the site's state."""
    audit: Annotated[
        Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: audit-SITE.jsonl in the state folder)")
    ] = None
    """The site's audit log."""
    device: Text = ""
    """cpu, cuda or auto; the recipe's if empty."""
    config: Annotated[list[str], tyro.conf.arg(metavar="KEY=VALUE [KEY=VALUE ...]")] = field(default_factory=list)
    """Further keys of the node's config, as in attribute.modality=MR."""


def node(args: Sequence[str]) -> int:
    """The command."""
    given = parse(NodeOptions, "deploy node", args)
    require_posix("node")
    from fednorms.flower.generations import default_root
    from fednorms.flower.node import Node, run_node
    from fednorms.flower.policy import Policy
    from fednorms.flower.task import Responder, load_app

    _, deployment = read_project(given.project)
    if given.site not in deployment.site_names:
        raise BadInput(f'No site "{given.site}" in {given.project}: {nearest(given.site, deployment.site_names)}.')
    host, port = split_address(given.server, "--server") if given.server else read_address(given.project)
    state = given.state or default_root()
    config = dict(_pair(text) for text in given.config)
    config |= {"site": given.site, "state": str(state.expanduser().resolve())}
    config |= {"data": str(given.data.resolve())} if given.data else {}
    config |= {"device": given.device} if given.device else {}
    config |= {"policy": str(given.policy.resolve())} if given.policy else {}
    Policy.of(config)  # a mistake in it is an error now
    audit = given.audit or state.expanduser() / f"audit-{given.site}.jsonl"
    responder = Responder(given.project.resolve(), audit.resolve())
    load_app(responder.project)  # now, not at the first message
    console = stderr()
    return run_node(
        Node(f"{host}:{port}", given.ca.resolve(), given.key.resolve(), responder, config),
        lambda text: console.print(text, markup=False, soft_wrap=True),
    )


@dataclass
class AuditOptions:
    """Show a site's audit log. The exit code is 1 if a line was changed, or is missing in the middle."""

    log: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE")]
    """The site's audit log, audit-SITE.jsonl in its state folder."""
    json: Flag = False
    """Print one JSON object and nothing else."""


def audit(args: Sequence[str]) -> int:
    """The command."""
    given = parse(AuditOptions, "deploy audit", args)
    require_posix("audit")
    from fednorms.flower.audit import AuditLog

    lines = AuditLog(given.log).lines()
    if given.json:
        print_json({"lines": lines})
        return 0
    shown = ("time", "event", "run", "kind", "round", "method", "bytes")
    rows = [[*(str(line.get(key, "")) for key in shown), line.get("reason", "")] for line in lines]
    console = stdout()
    console.print(grid([*shown, "reason"], rows))
    sizes = [int(line["bytes"]) for line in lines if line.get("event") == "sent"]
    replies = "1 reply" if len(sizes) == 1 else f"{len(sizes)} replies"
    console.print(f"\nNo line was changed. {replies}, {sum(sizes):,} bytes sent.")
    return 0


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise BadInput(f'--config takes KEY=VALUE; got "{text}".')
    if key in ("site", "data", "state", "device", "policy"):
        raise BadInput(f'--config does not take "{key}": it has its own option, --{key}.')
    return key, value
