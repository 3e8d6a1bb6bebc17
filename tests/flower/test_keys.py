"""The roster file, and the certificates and keys of a deployment."""

import contextlib
import ssl
import stat

import pytest

pytest.importorskip("flwr", reason="Flower is an optional extra: pip install 'fednorms[flower]'")

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.cli.supernode.register import try_load_public_key

from fednorms.core.errors import BadInput
from fednorms.flower.certificates import check_certificates, days_left, make_certificates
from fednorms.flower.keys import SiteKeys, Watched, new_key, read_keys
from tests.support.door import Keys


def test_a_roster_reads_back_with_any_name(tmp_path):
    keys = SiteKeys()
    for site in ("north", "St. Olav's", 'Å "b" = [c]'):
        keys = keys.enrolled(site, new_key()[1] + " a comment")
    keys = keys.without("north")
    keys.write(tmp_path / "roster.toml")
    assert read_keys(tmp_path / "roster.toml") == keys
    assert sorted(keys.owners.values()) == sorted(keys.keys)


def test_keys_are_what_flower_makes_of_the_same_file(tmp_path):
    keys = Keys(tmp_path)
    owners = Watched(keys.roster).owners()
    assert {try_load_public_key(keys.certificates / f"{site}.pub"): site for site in ("north", "south")} == owners
    assert {keys.public(site): site for site in ("north", "south")} == owners


def test_a_revoked_key_does_not_come_back(tmp_path):
    keys = Keys(tmp_path)
    first = (keys.certificates / "north.pub").read_text()
    read_keys(keys.roster).without("north").write(keys.roster)
    assert make_certificates(tmp_path, "127.0.0.1", ["north", "south"], 30) == []
    assert list(read_keys(keys.roster).keys) == ["south"]
    with pytest.raises(BadInput, match=r'was revoked \(site "north"\)'):
        read_keys(keys.roster).enrolled("north", first)
    second = new_key()[1]
    assert read_keys(keys.roster).enrolled("north", second).keys["north"] == second


def test_a_new_key_revokes_the_former_one():
    first, second = new_key()[1], new_key()[1]
    keys = SiteKeys().enrolled("north", first).enrolled("north", first).enrolled("north", second)
    assert keys == SiteKeys({"north": second}, {first: "north"})
    with pytest.raises(BadInput, match='already the key of site "north"'):
        keys.enrolled("south", second)
    with pytest.raises(BadInput, match='did you mean "north"'):
        keys.without("nort")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected the tables"),
        ("keys = 3", "expected the tables"),
        ("[keys]\n[other]", "expected the tables"),
        ("[keys]\nnorth = 3", 'The entry "north"'),
        ("[keys]\nnorth = 'x'", "not a public key"),
        ("[keys", "Cannot read the roster"),
        ("[keys]\nnorth = '{rsa}'", "is not an ECDSA key"),
        ("[keys]\nnorth = '{a}'\nsouth = '{a} comment'", "Two sites have the same key"),
        ("[keys]\nnorth = '{a}'\n[revoked]\n'{a}' = 'north'", "both in use and revoked"),
    ],
)
def test_a_roster_that_is_not_one_is_refused(text, said, tmp_path):
    other = ed25519.Ed25519PrivateKey.generate().public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    (tmp_path / "roster.toml").write_text(text.replace("{a}", new_key()[1]).replace("{rsa}", other.decode()))
    with pytest.raises(BadInput, match=said):
        Watched(tmp_path / "roster.toml").owners()


def test_changes_of_the_roster_are_seen_and_damage_lets_nobody_in(tmp_path):
    keys = Keys(tmp_path)
    watched = Watched(keys.roster)
    assert len(watched.owners()) == 2
    read_keys(keys.roster).without("north").write(keys.roster)
    assert list(watched.owners().values()) == ["south"]
    good = keys.roster.read_bytes()
    for damage in (b"", b"[keys", good[:-20]):
        keys.roster.write_bytes(damage)
        with pytest.raises(BadInput):
            watched.owners()
    keys.roster.unlink()
    with pytest.raises(BadInput):
        watched.owners()
    keys.roster.write_bytes(good)
    assert list(watched.owners().values()) == ["south"]


def test_certificates_verify_and_private_keys_are_private(tmp_path):
    keys = Keys(tmp_path)
    ca = x509.load_pem_x509_certificate(keys.ca.read_bytes())
    server = x509.load_pem_x509_certificate((keys.certificates / "server.pem").read_bytes())
    server.verify_directly_issued_by(ca)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(a) for a in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]
    for secret in keys.certificates.glob("*.key"):
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600, secret
    strict = ssl.create_default_context(cafile=str(keys.ca))
    strict.verify_flags |= ssl.VERIFY_X509_STRICT
    ours, theirs = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(keys.certificates / "server.pem", keys.certificates / "server.key")
    client = strict.wrap_bio(theirs, ours, server_hostname="127.0.0.1")
    door = context.wrap_bio(ours, theirs, server_side=True)
    for _ in range(4):
        for side in (client, door):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    assert client.version() in ("TLSv1.2", "TLSv1.3")


def test_renewing_replaces_only_the_servers_certificate(tmp_path):
    keys = Keys(tmp_path)
    before = {p.name: p.read_bytes() for p in keys.certificates.iterdir()}
    assert make_certificates(tmp_path, "127.0.0.1", ["north", "south"], 30) == []
    assert {p.name: p.read_bytes() for p in keys.certificates.iterdir()} == before
    made = make_certificates(tmp_path, "127.0.0.1", ["north", "south"], 90, renew=True)
    after = {p.name: p.read_bytes() for p in keys.certificates.iterdir()}
    assert {name for name in after if after[name] != before[name]} == {p.name for p in made}
    assert {p.name for p in made} == {"server.key", "server.pem"}
    assert 89 < days_left(keys.certificates / "server.pem") < 91
    assert check_certificates(keys.certificates) == []


def test_certificates_that_end_are_named_before_and_refused_after(tmp_path):
    soon = Keys(tmp_path / "soon", days=5)
    (said,) = check_certificates(soon.certificates)
    assert "server.pem ends in 5 days" in said
    over = Keys(tmp_path / "over", days=-3)
    with pytest.raises(BadInput, match=r"server.pem ended 3 days ago"):
        check_certificates(over.certificates)
    (soon.certificates / "server.key").write_bytes((over.certificates / "server.key").read_bytes())
    with pytest.raises(BadInput, match="do not fit together"):
        check_certificates(soon.certificates)
    (soon.certificates / "ca.crt").unlink()
    with pytest.raises(BadInput, match="Cannot read the certificate"):
        check_certificates(soon.certificates)


def test_keys_of_the_script_of_0_1_are_enrolled_not_replaced(tmp_path):
    keys = Keys(tmp_path)
    keys.roster.unlink()
    assert make_certificates(tmp_path, "127.0.0.1", ["north", "south"], 30) == []
    assert Watched(keys.roster).owners() == {keys.public(site): site for site in ("north", "south")}
    assert isinstance(keys.private("north"), ec.EllipticCurvePrivateKey)
