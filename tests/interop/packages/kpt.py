"""Runs the real kpt on generated cases, many at a time, and reduces trees to what can be compared.

Cases are bundled as sub-packages c000001/, c000002/, … of one package in a scratch git repository: tags v1
(base) and v2 (upstream). `kpt pkg get` v1, the local side is laid over it, `kpt pkg update` to v2. A bundle
costs about 15 ms a case, a single run half a second, and both give the same trees.
"""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.interop.packages.generator import Case
from unlade.packages.kptfile import OWN_ANNOTATIONS
from unlade.packages.yamltext import Map, Node, Scalar, Seq, parse_documents

ROOT_KPTFILE = "apiVersion: kpt.dev/v1\nkind: Kptfile\nmetadata:\n  name: bundle\n"
Files = dict[str, str]


def available() -> str | None:
    """The path of kpt, or None where it is not installed."""
    return shutil.which("kpt")


def write(directory: Path, files: Files) -> None:
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def read(directory: Path) -> Files:
    return {
        str(path.relative_to(directory)): path.read_text()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and ".git" not in path.parts
    }


def git(directory: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *arguments], cwd=directory, check=True, capture_output=True)


def publish(repo: Path, versions: dict[str, Files]) -> None:
    """A git repository with one tag per version of the package in pkg/."""
    repo.mkdir(parents=True)
    git(repo, "init", "-q", "-b", "main")
    for tag, files in versions.items():
        shutil.rmtree(repo / "pkg", ignore_errors=True)
        write(repo / "pkg", files)
        git(repo, "add", "-A", ".")
        git(repo, "commit", "-q", "--allow-empty", "-m", tag)
        git(repo, "tag", tag)


def run_kpt(work: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    tmp = work / "tmp"
    tmp.mkdir(exist_ok=True)
    environment = {**os.environ, "KPT_CACHE_DIR": str(work / "cache"), "TMPDIR": str(tmp), "HOME": str(work)}
    return subprocess.run(
        ["kpt", *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def bundle(cases: Sequence[Case], side: str) -> Files:
    """One side of many cases as one package."""
    files = {"Kptfile": ROOT_KPTFILE}
    for case in cases:
        for name, text in getattr(case, side).items():
            files[f"c{case.seed:06d}/{name}"] = text
    return files


def overlay(directory: Path, cases: Sequence[Case]) -> None:
    """Replace each case's directory by its local side."""
    for case in cases:
        target = directory / f"c{case.seed:06d}"
        shutil.rmtree(target)
        write(target, case.local)


def update_with_kpt(
    work: Path, cases: Sequence[Case], *, strategy: str = "resource-merge"
) -> dict[int, Files]:
    """kpt's outcome of each case."""
    publish(work / "up", {"v1": bundle(cases, "base"), "v2": bundle(cases, "upstream")})
    done = run_kpt(work, "pkg", "get", f"{work}/up/.git/pkg@v1", "local", cwd=work)
    assert done.returncode == 0, done.stderr
    overlay(work / "local", cases)
    done = run_kpt(work, "pkg", "update", "local@v2", f"--strategy={strategy}", cwd=work)
    assert done.returncode == 0, done.stderr
    return split(read(work / "local"), cases)


def split(files: Files, cases: Sequence[Case]) -> dict[int, Files]:
    outcome: dict[int, Files] = {case.seed: {} for case in cases}
    for name, text in files.items():
        head, _, rest = name.partition("/")
        if rest and head[1:].isdigit() and int(head[1:]) in outcome:
            outcome[int(head[1:])][rest] = text
    return outcome


# -- comparison ----------------------------------------------------------------------------------


def values(node: Node | None) -> object:
    """A node's values with the order of keys kept."""
    if node is None or node.null:
        return None
    if isinstance(node, Map):
        return {entry.name: values(entry.value) for entry in node.entries}
    if isinstance(node, Seq):
        return [values(item.value) for item in node.items]
    return node.value


def ordered(node: Node | None) -> object:
    """Values, key order and comments: the second level."""
    if isinstance(node, Map):
        return [
            [entry.name, _remarks(entry.lead), ordered(entry.value), entry.comment.strip()]
            for entry in node.entries
        ]
    if isinstance(node, Seq):
        return [[ordered(item.value), item.comment.strip()] for item in node.items]
    return node.value if isinstance(node, Scalar) and not node.null else None


def _remarks(lead: str) -> list[str]:
    return [line.strip() for line in lead.split("\n") if line.strip()]


def _drop_empty(value: object) -> object:
    if isinstance(value, dict):
        made = {key: _drop_empty(item) for key, item in value.items()}
        return {key: item for key, item in sorted(made.items()) if item not in (None, {}, [], "")}
    if isinstance(value, list):
        return [_drop_empty(item) for item in value]
    return value


def normal(files: Files, *, second: bool = False) -> dict[str, object]:
    """A tree as it is compared: Kptfiles without upstream, resources by value, others by text."""
    out: dict[str, object] = {}
    for name, text in sorted(files.items()):
        if name.rsplit("/", 1)[-1] == "Kptfile":
            root = values(next(doc.root for doc in parse_documents(text) if doc.root is not None))
            assert isinstance(root, dict)
            root.pop("upstream", None)
            root.pop("upstreamLock", None)
            notes = root.get("metadata", {}).get("annotations")
            for key in OWN_ANNOTATIONS if notes else ():
                notes.pop(key, None)
            out[name] = _drop_empty(root)
        elif name.endswith((".yaml", ".yml")):
            roots = [doc.root for doc in parse_documents(text, name=name) if doc.root is not None]
            out[name] = [ordered(root) if second else values(root) for root in roots]
        else:
            out[name] = text
    return out
