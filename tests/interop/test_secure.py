"""TLS with an authority of our own, htpasswd, and credential files that other tools write (V4)."""

from __future__ import annotations

import json
from pathlib import Path

from tests.interop.peers import Peers
from tests.interop.real_registry import RealRegistry
from tests.interop.trees import sample_tree, snapshot


def test_login_push_pull_logout(secure_registry: RealRegistry, peers: Peers, tmp_path: Path) -> None:
    tree = sample_tree(tmp_path / "tree")
    ref = secure_registry.reference("private/app")
    trust = ("--ca-file", secure_registry.ca_file)
    # Without the authority's certificate nothing is sent; without credentials the registry says no.
    untrusted = peers.unlade_error("pull", ref, tmp_path / "no", expect=4)
    assert "certificate" in untrusted
    anonymous = peers.unlade_error("push", *trust, tree, ref, expect=5)
    assert "next: " in anonymous
    wrong = peers.unlade_error(
        "login", *trust, "-u", "alice", "--password-stdin", secure_registry.host, stdin=b"wrong\n", expect=5
    )
    assert "wrong" not in wrong.replace("wrong password", "")
    assert not (peers.home / ".docker" / "config.json").exists()
    password = secure_registry.password.encode() + b"\n"
    said = peers.unlade(
        "login", *trust, "-u", "alice", "--password-stdin", secure_registry.host, stdin=password
    )
    assert "logged in" in said
    stored = json.loads((peers.home / ".docker" / "config.json").read_text())
    assert list(stored["auths"]) == [secure_registry.host]
    assert (peers.home / ".docker" / "config.json").stat().st_mode & 0o077 == 0
    name = peers.unlade("push", *trust, tree, ref).strip()
    # crane uses what we stored.
    environment = {"SSL_CERT_FILE": secure_registry.ca_file}
    assert name.endswith(peers.crane("digest", ref, env=environment).decode().strip())
    peers.unlade("pull", *trust, ref, tmp_path / "out")
    assert snapshot(tmp_path / "out") == snapshot(tree)
    assert "logged out" in peers.unlade("logout", secure_registry.host)
    peers.unlade_error("pull", *trust, ref, tmp_path / "no", expect=5)
    assert not (tmp_path / "no").exists()
    # For one command only, and never in a file.
    creds = f"alice:{secure_registry.password}"
    peers.unlade("pull", *trust, "--creds", creds, ref, tmp_path / "again")
    assert snapshot(tmp_path / "again") == snapshot(tree)
    assert not json.loads((peers.home / ".docker" / "config.json").read_text())["auths"]


def test_credentials_that_others_stored(secure_registry: RealRegistry, peers: Peers, tmp_path: Path) -> None:
    tree = sample_tree(tmp_path / "tree")
    host = secure_registry.host
    environment = {"SSL_CERT_FILE": secure_registry.ca_file}
    for number, login in enumerate(
        (
            ("crane", "auth", "login", "-u", "alice", "--password-stdin"),
            ("skopeo", "login", "-u", "alice", "--password-stdin"),
        )
    ):
        run = peers.crane if login[0] == "crane" else peers.skopeo
        run(*login[1:], host, stdin=secure_registry.password.encode(), env=environment)
        ref = secure_registry.reference(f"theirs/app{number}")
        peers.unlade("push", "--ca-file", secure_registry.ca_file, tree, ref)
        peers.unlade("logout", host)
        peers.unlade_error("push", "--ca-file", secure_registry.ca_file, tree, ref, expect=5)


def test_certificates_where_containerd_looks(
    secure_registry: RealRegistry, peers: Peers, tmp_path: Path
) -> None:
    """--certs-dir: hosts.toml with an authority, as for containerd."""
    directory = tmp_path / "certs.d" / secure_registry.host
    directory.mkdir(parents=True)
    (directory / "hosts.toml").write_text(
        f'server = "https://{secure_registry.host}"\n\n'
        f'[host."https://{secure_registry.host}"]\n  ca = "{secure_registry.ca_file}"\n'
    )
    creds = f"alice:{secure_registry.password}"
    ref = secure_registry.reference("hosts/app")
    tree = sample_tree(tmp_path / "tree")
    peers.unlade("push", "--certs-dir", tmp_path / "certs.d", "--creds", creds, tree, ref)
    peers.unlade("pull", "--insecure-skip-tls-verify", "--creds", creds, ref, tmp_path / "out")
    assert snapshot(tmp_path / "out") == snapshot(tree)


def test_plain_http_is_never_a_fallback(
    registry: RealRegistry, secure_registry: RealRegistry, peers: Peers, tmp_path: Path
) -> None:
    tree = sample_tree(tmp_path / "tree")
    error = peers.unlade_error("push", tree, registry.reference("plain/app"), expect=4)
    assert "--plain-http" in error
    peers.unlade("push", tree, registry.reference("plain/app"), env={"UNLADE_PLAIN_HTTP": registry.host})
    # And a registry with TLS is not talked to without it, even when asked.
    peers.unlade_error(
        "pull", "--plain-http", secure_registry.reference("private/x"), tmp_path / "no", expect=4
    )


def test_copies_between_plain_and_secure(
    registry: RealRegistry, secure_registry: RealRegistry, peers: Peers, tmp_path: Path
) -> None:
    source = registry.reference("mixed/app")
    name = peers.unlade("push", "--plain-http", sample_tree(tmp_path / "t"), source).strip()
    copied = peers.unlade(
        "copy",
        "--ca-file",
        secure_registry.ca_file,
        "--creds",
        f"alice:{secure_registry.password}",
        source,
        secure_registry.reference("mixed/app"),
        env={"UNLADE_PLAIN_HTTP": registry.host},
    ).strip()
    assert copied.rpartition("@")[2] == name.rpartition("@")[2]
