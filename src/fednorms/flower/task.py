"""Answer one message at a site, with the site's own code.

Flower sends the app as a bundle with every run, and a node of Flower's would unpack and import it. Here nothing of a
bundle is unpacked or imported: the app is the one in the site's own copy of the project. A run whose bundle holds other
code is refused, so both sides know that they run the same. The recipe is the only thing that a bundle brings.
"""

from __future__ import annotations

import hashlib
import io
import sys
import tomllib
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.app.error import Error
from flwr.common.constant import ErrorCode, SubStatus
from flwr.supercore.fab import Fab
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from fednorms.core.errors import BadInput, FednormsError
from fednorms.flower import messages, settings
from fednorms.flower.audit import AuditLog
from fednorms.flower.lifeline import end_with_parent

App = Callable[[Message, Context], Message]
LARGEST_FILE = 2**20  # bytes of one file in a bundle that are compared


@dataclass(frozen=True)
class Responder:
    """What a site's node answers with: its copy of the project, and its audit log."""

    project: Path
    audit: Path

    def answer(self, address: str, token: str) -> None:
        """Fetch a message from the node of Flower's at an address, answer it, and hand the reply over."""
        end_with_parent()
        client = RuntimeHttpClient.from_server_address(
            server_address=address,
            insecure=True,  # on the loopback interface
            root_certificates=None,
            interceptors=[
                RuntimeVersionHttpInterceptor(component_name="flwr-clientapp"),
                RuntimeTokenHttpInterceptor(token),
            ],
            retry_invoker=make_simple_http_retry_invoker(),
        )
        alive = HeartbeatSender(make_task_heartbeat_fn_http(client))
        alive.start()
        context, status, details = None, SubStatus.FAILED, "the message could not be answered"
        try:
            message, context, run, fab = pull_task_input(client)
            reply = self.reply(message, context, fab, run.fab_hash)
            push_message(client, reply, context)
            status, details = SubStatus.COMPLETED, ""
        finally:
            push_task_output(client=client, context=context, sub_status=status, details=details)
            if alive.is_running:
                alive.stop()
            client.close()

    def reply(self, message: Message, context: Context, fab: Fab, fab_hash: str) -> Message:
        """The reply to a message. Both are in the audit log before the work begins and before the reply is sent."""
        log = AuditLog(self.audit)
        asked = message.content if message.has_content() else RecordDict()
        about = {
            "run": message.metadata.run_id,
            "kind": message.metadata.message_type.removeprefix("query."),
            "round": _round(asked, message.metadata.message_type),
            "method": _method(context),
            "bundle": fab_hash,
        }
        log.write("asked", {**about, **_size(asked), "hash": message.metadata.message_id})
        try:
            check_bundle(self.project, fab.content, fab_hash)
            reply = load_app(self.project)(message, context)
        except FednormsError as error:
            words = {"error": type(error).__name__, "reason": str(error)}
            reply = Message(RecordDict({messages.ABOUT: ConfigRecord(words)}), reply_to=message)
        except Exception as error:  # of a custom app
            reason = f"{type(error).__name__}: {error}"
            reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)
        content = reply.content if reply.has_content() else RecordDict()
        reason = str(messages.about(content).get("reason", "")) if reply.has_content() else reply.error.reason
        refused = {"reason": reason} if reason else {}
        log.write("refused" if reason else "sent", {**about, **refused, **_size(content), "hash": reply.object_id})
        return reply


def _method(context: Context) -> str:
    """The method that a run asks for, wherever its config says so; empty if it cannot be read."""
    try:
        return settings.read(context.run_config)[0].method
    except FednormsError:
        return ""


def check_bundle(project: Path, content: bytes, fab_hash: str) -> None:
    """Refuse a bundle whose code is not the site's own, byte for byte. Nothing is unpacked to disk or imported."""
    if hashlib.sha256(content).hexdigest() != fab_hash:
        raise BadInput("The app bundle of this run does not have the hash that the run names.")
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as bundle:
            files = [f for f in bundle.infolist() if f.filename != "pyproject.toml" and not f.is_dir()]
            for file in files:
                if file.filename == ".info/CONTENT":  # Flower's list of the others
                    continue
                own = project / file.filename
                inside = own.resolve().is_relative_to(project.resolve()) and own.is_file()
                if not inside or file.file_size > LARGEST_FILE or bundle.read(file) != own.read_bytes():
                    raise BadInput(
                        f'The app bundle of this run is refused: its file "{file.filename}" is not the one of this '
                        "site. A site runs only the code of its own copy of the project."
                    )
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, OSError, EOFError) as error:
        raise BadInput(f"The app bundle of this run cannot be read ({error}).") from None


def load_app(project: Path) -> App:
    """The ClientApp of the site's own copy of a project."""
    try:
        told: Any = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))
        module, _, name = told["tool"]["flwr"]["app"]["components"]["clientapp"].partition(":")
    except (OSError, tomllib.TOMLDecodeError, KeyError, AttributeError) as error:
        raise BadInput(f"{project} names no clientapp in its pyproject.toml ({error}).") from None
    sys.path.insert(0, str(project.resolve()))
    try:
        app: App = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise BadInput(f"Cannot import the clientapp {module}:{name} of {project} ({error}).") from None
    finally:
        sys.path.remove(str(project.resolve()))
    return app


def _round(asked: RecordDict, kind: str) -> int:
    """The round that a message belongs to, from 1; 0 before the first. Training message t asks for round t + 1."""
    told = messages.about(asked).get("round", 0)
    done = told if isinstance(told, int) else 0
    return done + 1 if kind == "train" else done


def _size(content: RecordDict) -> dict[str, Any]:
    sizes = {name: record.count_bytes() for name, record in content.items()}
    return {"bytes": sum(sizes.values()), "records": sizes}
