"""`pkg tree` and `pkg init`: look at a package, begin a package (P10)."""

import os
from dataclasses import dataclass, field

from unlade.errors import InvalidInput
from unlade.packages.identity import field_text
from unlade.packages.ignore import resource_files
from unlade.packages.kptfile import Kptfile, build
from unlade.packages.snapshot import KPTFILE, Snapshot, below, own_files, package_directories, read_directory
from unlade.packages.yamltext import Entry, Map, Scalar, YamlSyntaxError, parse_documents


@dataclass(slots=True)
class Branch:
    """One line of a tree: a package, a directory, or a resource with its file."""

    label: str
    children: list["Branch"] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The tree drawn with box characters."""
        out = [self.label]
        for number, child in enumerate(self.children):
            last = number == len(self.children) - 1
            head, *rest = child.lines()
            out.append(("└── " if last else "├── ") + head)
            out += [("    " if last else "│   ") + line for line in rest]
        return out


def tree(path: str) -> Branch:
    """The packages, files and resources below a directory."""
    files = read_directory(path).files
    name = os.path.basename(os.path.abspath(path))
    return _package(files, name)


def _package(files: Snapshot, name: str) -> Branch:
    branch = Branch(f'Package "{name}"' if KPTFILE in files else name)
    _fill(branch, files, own_files(files), "")
    return branch


def _fill(branch: Branch, files: Snapshot, own: Snapshot, directory: str) -> None:
    """Resources of this directory first, then its sub-directories and sub-packages by name."""
    prefix = directory + "/" if directory else ""
    packages = set(package_directories(files))
    resources = resource_files(files)
    names: set[str] = set()
    for path in sorted(files):
        if not path.startswith(prefix):
            continue
        head, slash, _ = path[len(prefix) :].partition("/")
        if slash:
            names.add(head)
        elif path in own and (path in resources or head == KPTFILE):
            branch.children += [Branch(label) for label in _resources(head, files[path].text)]
    for name in sorted(names):
        below_here = prefix + name
        if below_here in packages:
            branch.children.append(_package(below(files, below_here), name))
            continue
        inner = Branch(name)
        _fill(inner, files, own, below_here)
        if inner.children:
            branch.children.append(inner)


def _resources(name: str, text: str) -> list[str]:
    try:
        roots = [document.root for document in parse_documents(text, name=name)]
    except YamlSyntaxError:
        return [f"[{name}]  not valid YAML"]
    labels = []
    for root in roots:
        if not isinstance(root, Map):
            continue
        namespace = field_text(root, "metadata", "namespace")
        own = field_text(root, "metadata", "name")
        what = f"{field_text(root, 'kind')} {namespace + '/' if namespace else ''}{own}".strip()
        labels.append(f"[{name}]  {what}")
    return labels


_README = """# {name}

## Description
{description}

## Usage

### Fetch the package
`unlade pkg get oci://REGISTRY/REPOSITORY:TAG {name}`

### View package content
`unlade pkg tree {name}`

### Update the package
`unlade pkg update {name}@TAG`
"""
_CONTEXT = """apiVersion: v1
kind: ConfigMap
metadata:
  name: kptfile.kpt.dev
  annotations:
    config.kubernetes.io/local-config: "true"
data:
  name: example
"""


def init(path: str, *, description: str = "", keywords: tuple[str, ...] = (), site: str = "") -> list[str]:
    """Begin a package in an existing directory; the files made. Existing ones are kept."""
    if not os.path.isdir(path):
        raise InvalidInput(f"{path}: no such directory", next_step="create it first")
    name = os.path.basename(os.path.abspath(path))
    description = description or "sample description"
    kptfile = Kptfile.fresh(name)
    notes = build({"annotations": {"config.kubernetes.io/local-config": "true"}}, 2)
    metadata = kptfile.root.get("metadata")
    assert metadata is not None and isinstance(metadata.value, Map) and isinstance(notes, Map)  # just made
    metadata.value.entries += notes.entries
    info: dict[str, object] = {"site": site} if site else {}
    info["description"] = description
    if keywords:
        info["keywords"] = list(keywords)
    kptfile.root.entries.append(Entry(Scalar("info", "info"), build(info, 2), gap=""))
    contents = {
        KPTFILE: kptfile.render(),
        "README.md": _README.format(name=name, description=description),
        "package-context.yaml": _CONTEXT,
    }
    written = []
    for file, text in contents.items():
        target = os.path.join(path, file)
        try:
            with open(target, "x", encoding="utf-8") as out:
                out.write(text)
        except FileExistsError:
            continue
        written.append(target)
    return written
