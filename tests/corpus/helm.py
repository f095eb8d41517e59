"""What `helm push` writes: the packed chart, its metadata as config, perhaps the provenance."""

from __future__ import annotations

from tests.corpus.archives import f, helm_gzip, tar
from tests.corpus.artifact import CREATED, Artifact, Kit, file
from unlade.model.mediatypes import ANNOTATION_CREATED, ANNOTATION_TITLE
from unlade.planning import NotATar, PlanOptions

CONFIG = "application/vnd.cncf.helm.config.v1+json"
CHART = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"
LEGACY = "application/tar+gzip"
PROVENANCE = "application/vnd.cncf.helm.chart.provenance.v1.prov"
META = {
    "name": "web",
    "version": "0.1.0",
    "description": "A web server",
    "apiVersion": "v2",
    "appVersion": "1.27",
    "type": "application",
}
_FILES = {
    "web/Chart.yaml": "apiVersion: v2\nname: web\nversion: 0.1.0\n",
    "web/values.yaml": "replicas: 1\n",
    "web/templates/deployment.yaml": "kind: Deployment\n",
    "web/charts/db/Chart.yaml": "apiVersion: v2\nname: db\nversion: 0.0.1\n",
}
_PROV = b"-----BEGIN PGP SIGNED MESSAGE-----\nname: web\n"


def _push(name: str, *, chart_type: str = CHART, provenance: bool = False, **fields: object) -> Artifact:
    kit = Kit()
    # Helm writes files only, no directories, all 0644.
    packed = helm_gzip(tar(f(path, text, mtime=1772359200) for path, text in _FILES.items()))
    if fields.get("error"):
        packed = b"not a chart at all"
    layers = [kit.blob(chart_type, packed)]
    if provenance:
        layers.append(kit.blob(PROVENANCE, _PROV))
    # Helm sorts layers by digest, so the provenance may come first.
    layers.sort(key=lambda layer: layer["digest"])
    kit.manifest(
        kit.json(CONFIG, META),
        layers,
        media_type=None,
        annotations={
            ANNOTATION_CREATED: CREATED,
            "org.opencontainers.image.description": META["description"],
            ANNOTATION_TITLE: META["name"],
            "org.opencontainers.image.version": META["version"],
        },
    )
    tree = {path: file(text, 0o644) for path, text in _FILES.items()}
    if fields.get("options"):
        tree = {"web-0.1.0.tgz": file(packed), "web-0.1.0.tgz.prov": file(_PROV)}
    if fields.get("error"):
        return kit.done(name, "helm", None, **fields)
    return kit.done(name, "helm", tree, **fields)


def artifacts() -> list[Artifact]:
    """Charts of today and of the experimental days."""
    return [
        _push("helm-chart"),
        _push("helm-provenance", provenance=True),
        _push("helm-legacy", chart_type=LEGACY),
        _push("helm-kept-packed", provenance=True, options=PlanOptions(unpack="never")),
        _push("helm-no-tar", error=NotATar),
    ]
