"""What `oras push` and `oras attach` write, of today, of 1.0, and by the Python client."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.corpus.archives import Entry, d, f, gzip, s, tar
from tests.corpus.artifact import CREATED, Artifact, Kit, Tree, file, link
from tests.corpus.images import BASE, add_image
from unlade.errors import NothingProduced
from unlade.model import Digest
from unlade.model.mediatypes import ANNOTATION_CREATED, ANNOTATION_TITLE, OCI_LAYER, OCI_LAYER_GZIP
from unlade.model.paths import UnsafeTitle
from unlade.planning import NotATar, PathConflict, PlanOptions

UNKNOWN_ARTIFACT = "application/vnd.unknown.artifact.v1"
UNKNOWN_CONFIG = "application/vnd.unknown.config.v1+json"
_CREATED = {ANNOTATION_CREATED: CREATED}


def titled(kit: Kit, title: str, content: bytes | str, media_type: str = OCI_LAYER) -> dict[str, Any]:
    """A file as `oras push FILE` writes it: the default type says tar, and the file is none."""
    data = content.encode() if isinstance(content, str) else content
    return kit.blob(media_type, data, {ANNOTATION_TITLE: title})


def packed(
    kit: Kit, title: str, entries: Iterable[Entry], media_type: str = OCI_LAYER_GZIP
) -> dict[str, Any]:
    """A directory as `oras push DIR` writes it."""
    data = tar(entries)
    annotations = {
        "io.deis.oras.content.digest": str(Digest.of(data)),
        "io.deis.oras.content.unpack": "true",
        ANNOTATION_TITLE: title,
    }
    return kit.blob(media_type, gzip(data), annotations)


def push(kit: Kit, *layers: dict[str, Any], artifact_type: str = UNKNOWN_ARTIFACT) -> None:
    """The manifest of image-spec 1.1, with the empty config embedded."""
    kit.manifest(kit.empty(), layers or [kit.empty()], artifact_type=artifact_type, annotations=_CREATED)


def _made(name: str, *layers: dict[str, Any], kit: Kit, tree: Tree | None = None, **fields: Any) -> Artifact:
    push(kit, *layers)
    return kit.done(f"oras-{name}", "oras", tree, **fields)


def artifacts() -> list[Artifact]:
    """Files, packed directories in every form, and what must be refused."""
    made = [*_files(), *_directories(), *_older(), *_refused()]
    kit = Kit()
    image = add_image(kit, [(OCI_LAYER_GZIP, gzip, BASE)])
    kit.manifest(
        kit.empty(),
        [titled(kit, "sbom.spdx.json", '{"spdxVersion":"SPDX-2.3"}\n', "application/spdx+json")],
        artifact_type="application/spdx+json",
        subject=image.descriptor(),
        annotations=_CREATED,
    )
    made.append(
        kit.done("oras-attached-sbom", "generic", {"sbom.spdx.json": file('{"spdxVersion":"SPDX-2.3"}\n')})
    )
    return made


def _files() -> list[Artifact]:
    made = []
    kit = Kit()
    layers: tuple[dict[str, Any], ...] = (
        titled(kit, "hello.txt", "hello\n"),
        titled(kit, "conf/app.yaml", "a: 1\n", "application/yaml"),
    )
    made.append(
        _made(
            "files",
            *layers,
            kit=kit,
            tree={"hello.txt": file("hello\n", 0o644), "conf/app.yaml": file("a: 1\n")},
        )
    )
    kit = Kit()
    archive = gzip(tar([f("inside", "x")]))
    layer = titled(kit, "bundle.tar.gz", archive, OCI_LAYER_GZIP)
    made.append(_made("titled-tar-stays-a-file", layer, kit=kit, tree={"bundle.tar.gz": file(archive)}))
    made.append(
        _made(
            "titled-tar-unpacked-by-the-caller",
            layer,
            kit=kit,
            tree={"inside": file("x")},
            options=PlanOptions(unpack="always"),
        )
    )
    kit = Kit()
    layers = (
        titled(kit, "same", "lower\n"),
        titled(kit, "other", "other\n"),
        titled(kit, "same", "higher\n"),
    )
    made.append(
        _made("duplicate-titles", *layers, kit=kit, tree={"same": file("higher\n"), "other": file("other\n")})
    )
    kit = Kit()
    layers = (titled(kit, "empty", b""), titled(kit, ".wh.data", "plain data\n"))
    made.append(
        _made("whiteout-name", *layers, kit=kit, tree={"empty": file(b""), ".wh.data": file("plain data\n")})
    )
    kit = Kit()
    layers = tuple(titled(kit, f"weights/{n}.bin", f"{n}\n") for n in range(3))
    made.append(
        _made(
            "subset",
            *layers,
            titled(kit, "README.md", "read\n"),
            kit=kit,
            tree={"weights/1.bin": file("1\n"), "README.md": file("read\n")},
            options=PlanOptions(only=("weights/[1]*", "README.md")),
        )
    )
    return made


def _directories() -> list[Artifact]:
    made = []
    inside = [
        d("assets"),
        f("assets/a.txt", "a\n", 0o640),
        d("assets/sub", 0o700),
        f("assets/sub/run", "run\n", 0o755),
    ]
    tree = {"assets/a.txt": file("a\n", 0o640), "assets/sub/run": file("run\n", 0o755)}
    kit = Kit()
    made.append(_made("directory", packed(kit, "assets", inside), kit=kit, tree=tree))
    kit = Kit()
    linked = [*inside, s("assets/latest", "a.txt")]
    made.append(
        _made(
            "directory-with-link",
            packed(kit, "assets", linked),
            kit=kit,
            tree=tree | {"assets/latest": link("a.txt")},
        )
    )
    kit = Kit()
    deep = [Entry(f"site/{e.name}", e.content, e.mode, e.kind) for e in inside]
    made.append(
        _made(
            "directory-nested",
            packed(kit, "site/assets", deep),
            kit=kit,
            tree={f"site/{path}": node for path, node in tree.items()},
        )
    )
    kit = Kit()
    made.append(
        _made(
            "directory-nested-by-base-name",
            packed(kit, "site/assets", inside),
            kit=kit,
            tree={f"site/{path}": node for path, node in tree.items()},
        )
    )
    kit = Kit()
    bare = [f("a.txt", "a\n"), f("sub/b.txt", "b\n")]
    made.append(
        _made(
            "directory-without-its-name",
            packed(kit, "assets", bare),
            kit=kit,
            tree={"assets/a.txt": file("a\n"), "assets/sub/b.txt": file("b\n")},
        )
    )
    kit = Kit()
    here = [d("."), f("a.txt", "a\n"), d("sub"), f("sub/b.txt", "b\n")]
    made.append(
        _made(
            "directory-here",
            packed(kit, ".", here),
            kit=kit,
            tree={"a.txt": file("a\n"), "sub/b.txt": file("b\n")},
        )
    )
    kit = Kit()
    long_title = "/".join(["directory-of-a-rather-long-name"] * 5)
    made.append(
        _made(
            "directory-long-names",
            packed(kit, long_title, [d(long_title), f(f"{long_title}/file", "far\n")]),
            kit=kit,
            tree={f"{long_title}/file": file("far\n")},
        )
    )
    kit = Kit()
    both = (packed(kit, "assets", inside), titled(kit, "assets/a.txt", "over\n"))
    made.append(
        _made("file-over-directory-entry", *both, kit=kit, tree=tree | {"assets/a.txt": file("over\n")})
    )
    kit = Kit()
    layer = packed(kit, "assets", inside)
    made.append(
        _made(
            "directory-kept-packed",
            layer,
            kit=kit,
            tree={"assets": file(kit.blobs[Digest.parse(layer["digest"])])},
            options=PlanOptions(unpack="never"),
        )
    )
    return made


def _older() -> list[Artifact]:
    made = []
    # oras 1.0 and image-spec 1.0: no artifactType, the config's type says it.
    kit = Kit()
    config = kit.blob(UNKNOWN_CONFIG, b"{}")
    kit.manifest(config, [titled(kit, "hi.txt", "hi\n")], annotations=_CREATED)
    made.append(kit.done("oras-spec-1.0", "oras", {"hi.txt": file("hi\n")}))
    # The Python client packs a directory, titles it and writes no annotation: a file by rule 5.
    archive = gzip(tar([d("data"), f("data/x", "x\n")]))
    kit = Kit()
    kit.manifest(kit.blob(UNKNOWN_CONFIG, b"{}"), [titled(kit, "data", archive, OCI_LAYER_GZIP)])
    made.append(kit.done("oras-py-directory", "oras", {"data": file(archive)}))
    made.append(
        kit.done(
            "oras-py-directory-unpacked",
            "oras",
            {"data/x": file("x\n")},
            options=PlanOptions(unpack="always"),
        )
    )
    return made


def _refused() -> list[Artifact]:
    made = []
    for name, title in (
        ("parent", "../evil"),
        ("inner-parent", "a/../../evil"),
        ("absolute", "/etc/passwd"),
        ("dots", ".."),
        ("dot", "."),
        ("empty-part", "a//b"),
        ("trailing-slash", "a/"),
        ("nul", "a\0b"),
    ):
        kit = Kit()
        layers = (titled(kit, "good", "good\n"), titled(kit, title, "evil\n"))
        made.append(_made(f"title-{name}", *layers, kit=kit, error=UnsafeTitle))
    kit = Kit()
    made.append(_made("no-files", kit=kit, error=NothingProduced))
    kit = Kit()
    layers = (titled(kit, "a", "file\n"), titled(kit, "a/b", "below a file\n"))
    made.append(_made("file-and-directory", *layers, kit=kit, error=PathConflict))
    kit = Kit()
    lie = titled(kit, "assets", b"no tar at all\n" * 100, OCI_LAYER_GZIP)
    lie["annotations"]["io.deis.oras.content.unpack"] = "true"
    made.append(_made("unpack-of-no-tar", lie, kit=kit, error=NotATar))
    return made
