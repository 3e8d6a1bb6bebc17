"""The certificates and keys of a deployment, in the project's folder `certificates`.

| file | who needs it |
|---|---|
| `ca.key` | signs the server's certificate; stays with the operator |
| `ca.crt` | every site: a node accepts only a server with a certificate of this authority |
| `server.key`, `server.pem` | the door |
| `SITE.key`, `SITE.pub` | one site each; the roster has the public key |

A site that creates its own key never sends it: the operator enrolls the public one.
"""

from __future__ import annotations

import ipaddress
import os
import ssl
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fednorms.core.errors import BadInput
from fednorms.flower.keys import FILE, SiteKeys, new_key, private_key, public_text, read_keys

FOLDER = "certificates"
AUTHORITY_DAYS = 3650
SOON = 30  # days before the end from which the link warns


def make_certificates(project: Path, host: str, sites: Sequence[str], days: int, *, renew: bool = False) -> list[Path]:
    """Create what is missing of the authority, the server's certificate and the sites' keys; returns the new files.

    Nothing is overwritten, except the server's certificate and its key with `renew`. A site that is in the roster
    already, or whose key was revoked, gets no key.
    """
    folder, roster = project / FOLDER, project / FILE
    known = read_keys(roster) if roster.exists() else SiteKeys()
    folder.mkdir(mode=0o700, exist_ok=True)
    made: list[Path] = []
    if not (folder / "ca.key").exists():
        key = ec.generate_private_key(ec.SECP384R1())
        made += _save(folder / "ca.key", _private(key), folder / "ca.crt", _pem(authority(key)))
    if renew or not (folder / "server.key").exists():
        ca, ca_key = _authority_of(folder)
        key = ec.generate_private_key(ec.SECP384R1())
        certificate = server_certificate(ca, ca_key, key.public_key(), host, days)
        made += _save(folder / "server.key", _private(key), folder / "server.pem", _pem(certificate))
    for site in sites:
        if site in known.keys or site in known.revoked.values():
            continue
        if (folder / f"{site}.key").exists():  # as the script of version 0.1 made it
            public = public_text(private_key(folder / f"{site}.key"))
        else:
            secret, public = new_key()
            made += _save(folder / f"{site}.key", secret, folder / f"{site}.pub", f"{public} {site}\n".encode())
        known = known.enrolled(site, public)
    known.write(roster)
    return made


def authority(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    """A new certificate authority, signed by itself."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fednorms deployment")])
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)  # it only signs
    return (
        _certificate(name, name, key.public_key(), AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )


def server_certificate(
    ca: x509.Certificate, ca_key: ec.EllipticCurvePrivateKey, key: ec.EllipticCurvePublicKey, host: str, days: float
) -> x509.Certificate:
    """A certificate for a server that is reached as `host`, or as localhost."""
    names: list[x509.GeneralName] = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    try:
        names.insert(0, x509.IPAddress(ipaddress.ip_address(host.strip("[]"))))
    except ValueError:
        names.insert(0, x509.DNSName(host))
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host[:64])])
    return (
        _certificate(subject, ca.subject, key, days)
        .add_extension(x509.SubjectAlternativeName(dict.fromkeys(names)), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA384())
    )


def days_left(path: Path) -> float:
    """Days until the last certificate of a file ends; negative afterwards. BadInput if the file holds none."""
    try:
        found = x509.load_pem_x509_certificates(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BadInput(f"Cannot read the certificate {path} ({error}).") from None
    return (max(c.not_valid_after_utc for c in found) - datetime.now(UTC)) / timedelta(days=1)


def check_certificates(folder: Path) -> list[str]:
    """Warnings about certificates that end soon; BadInput if one is missing, has ended, or does not fit its key."""
    warnings: list[str] = []
    advice = {
        "server.pem": "fednorms deploy certificates PROJECT --renew",
        "ca.crt": 'see "Rotation" in docs/flower.md',
    }
    for name, how in advice.items():
        left = days_left(folder / name)
        if left <= 0:
            raise BadInput(f"{folder / name} ended {-left:.0f} days ago, and every node refuses it. Renew it: {how}.")
        if left < SOON:
            warnings.append(f"{name} ends in {left:.0f} days. Renew it: {how}.")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(folder / "server.pem", folder / "server.key")
    except (OSError, ssl.SSLError) as error:
        raise BadInput(f"server.pem and server.key in {folder} do not fit together ({error}).") from None
    return warnings


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: float
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1) + min(timedelta(days=days), timedelta()))  # clocks differ
        .not_valid_after(now + timedelta(days=days))
    )


def _authority_of(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    try:
        ca = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
        key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise BadInput(f"Cannot read the certificate authority in {folder} ({error}).") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise BadInput(f"{folder / 'ca.key'} is not an ECDSA key.")
    return ca, key


def _save(secret: Path, key: bytes, public: Path, certificate: bytes) -> list[Path]:
    """Write a private key, which only its owner may read, and what belongs to it."""
    for path, data, mode in ((secret, key, 0o600), (public, certificate, 0o644)):
        new = path.with_name(f".{path.name}.new")
        new.unlink(missing_ok=True)
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
        new.replace(path)
    return [secret, public]


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return key.private_bytes(pem, form, serialization.NoEncryption())


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
