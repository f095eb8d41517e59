"""Packages in git, read with the git command.

Objects are fetched into a scratch repository and read with ls-tree and cat-file: nothing is checked out, so
no hook, filter or link of the repository takes effect. A lock's commit is asked for by its hash; a server
that refuses that is asked for everything. Prompts are off: credentials come from git's own helpers.
"""

import os
import subprocess
import tempfile

from unlade.errors import InvalidInput, RegistryError
from unlade.model import Deadline
from unlade.packages.kptfile import GitUpstream
from unlade.packages.snapshot import MAX_BYTES, MAX_FILES, File, NotAPackage, Snapshot

# Transports that run commands named by the URL are never what a Kptfile means.
_OPTIONS = (
    "-c",
    "protocol.ext.allow=never",
    "-c",
    "core.hooksPath=/dev/null",
    "-c",
    "advice.detachedHead=false",
)


class GitFailed(RegistryError):
    """The git command failed; its own words are in the message."""

    code = "git"


class UnknownRef(InvalidInput):
    """The repository has no such branch, tag or commit."""

    code = "unknown-ref"


def _git(*arguments: str, cwd: str, deadline: Deadline, stdin: bytes | None = None) -> bytes:
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0"}
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        environment.pop(name, None)
    try:
        done = subprocess.run(
            ["git", *_OPTIONS, *arguments],
            cwd=cwd,
            env=environment,
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            check=False,
            timeout=deadline.remaining(),
        )
    except FileNotFoundError as error:
        raise GitFailed(
            "the git command is not installed", next_step="install git, or use an OCI upstream"
        ) from error
    except subprocess.TimeoutExpired:
        deadline.check()
        raise
    if done.returncode != 0:
        words = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise GitFailed(f"git {arguments[0]} failed: {' '.join(words[-3:])[:400]}")
    return done.stdout


def default_branch(repo: str, *, deadline: Deadline) -> str:
    """The branch that the repository's HEAD names."""
    with tempfile.TemporaryDirectory(prefix="unlade-git-") as scratch:
        out = _git("ls-remote", "--symref", "--", _url(repo), "HEAD", cwd=scratch, deadline=deadline)
    for line in out.decode("utf-8", "replace").splitlines():
        if line.startswith("ref: refs/heads/"):
            return line.split()[1].removeprefix("refs/heads/")
    raise UnknownRef(f"{repo}: no default branch", next_step="name one: REPO.git@BRANCH")


def _url(repo: str) -> str:
    # The command runs in a scratch directory, so a relative path must not be relative to that.
    if "://" not in repo and ":" not in repo.split("/", 1)[0]:
        return os.path.abspath(repo)
    return repo


def fetch_git(upstream: GitUpstream, *, deadline: Deadline) -> tuple[Snapshot, GitUpstream, tuple[str, ...]]:
    """The files of a directory at a ref (or, in a lock, a commit), the lock for it, and links left out."""
    with tempfile.TemporaryDirectory(prefix="unlade-git-") as scratch:
        _git("init", "-q", "--bare", ".", cwd=scratch, deadline=deadline)
        commit = _obtain(upstream, scratch, deadline)
        files, links = _files(upstream, commit, scratch, deadline)
    return files, GitUpstream(upstream.repo, upstream.directory, upstream.ref, commit), links


def _obtain(upstream: GitUpstream, scratch: str, deadline: Deadline) -> str:
    wanted = upstream.commit or upstream.ref
    try:
        _git(
            "fetch",
            "-q",
            "--depth=1",
            "--no-tags",
            "--",
            _url(upstream.repo),
            wanted,
            cwd=scratch,
            deadline=deadline,
        )
        name = "FETCH_HEAD"
    except GitFailed as first:
        try:
            refs = ("+refs/heads/*:refs/heads/*", "+refs/tags/*:refs/tags/*")
            _git("fetch", "-q", "--", _url(upstream.repo), *refs, cwd=scratch, deadline=deadline)
        except GitFailed:
            raise first from None
        name = wanted
    try:
        out = _git(
            "rev-parse",
            "--verify",
            "-q",
            "--end-of-options",
            name + "^{commit}",
            cwd=scratch,
            deadline=deadline,
        )
    except GitFailed as error:
        raise UnknownRef(
            f"unknown ref {wanted!r} in {upstream.repo}", next_step="name a branch, a tag or a commit"
        ) from error
    return out.decode().strip()


def _files(
    upstream: GitUpstream, commit: str, scratch: str, deadline: Deadline
) -> tuple[Snapshot, tuple[str, ...]]:
    prefix = upstream.directory.strip("/")
    tree = f"{commit}:{prefix}" if prefix else commit
    try:
        listing = _git("ls-tree", "-r", "-z", "-l", "--full-tree", tree, cwd=scratch, deadline=deadline)
    except GitFailed as error:
        raise NotAPackage(
            f"{upstream.repo} has no directory {upstream.directory} at {upstream.ref}"
        ) from error
    wanted: list[tuple[str, str, int]] = []
    links: list[str] = []
    total = 0
    for record in listing.split(b"\0"):
        if not record:
            continue
        head, _, name = record.partition(b"\t")
        mode, kind, blob, size = head.split()
        path = name.decode("utf-8", "surrogateescape")
        if mode == b"120000":
            links.append(path)
        elif kind == b"blob":
            total += int(size)
            wanted.append((path, blob.decode(), 0o755 if mode == b"100755" else 0o644))
    if len(wanted) > MAX_FILES or total > MAX_BYTES:
        raise NotAPackage(f"{upstream}: more than {MAX_FILES} files or {MAX_BYTES >> 20} MiB")
    request = "".join(blob + "\n" for _, blob, _ in wanted).encode()
    out = _git("cat-file", "--batch", cwd=scratch, deadline=deadline, stdin=request)
    files: Snapshot = {}
    at = 0
    for path, _blob, mode_bits in wanted:
        end = out.index(b"\n", at)
        size_text = out[at:end].rsplit(b" ", 1)[-1]
        start = end + 1
        at = start + int(size_text) + 1
        files[path] = File(out[start : at - 1], mode_bits)
    return files, tuple(links)
