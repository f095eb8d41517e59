"""Helm charts: the chart's directory, as `helm pull --untar` gives it.

The chart is one gzipped tar whose entries all stand below the chart's name. A provenance file, where there
is one, signs the packed chart and means nothing beside the unpacked one, so it is skipped. Kept packed
(`unpack: never`), both get the names that `helm pull --prov` gives them: `NAME-VERSION.tgz` and
`NAME-VERSION.tgz.prov`.
"""

from __future__ import annotations

from typing import Final

from unlade.model import Manifest
from unlade.model.paths import UnsafeTitle, check_relative
from unlade.planning.view import Placement, View

NAME = "helm"
CONFIG: Final = "application/vnd.cncf.helm.config.v1+json"
CHART: Final = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"
LEGACY_CHART: Final = "application/tar+gzip"
PROVENANCE: Final = "application/vnd.cncf.helm.chart.provenance.v1.prov"


def recognise(manifest: Manifest) -> bool:
    """Helm's config type."""
    return manifest.config.media_type == CONFIG


def place(view: View, index: int) -> Placement | None:
    """Charts are unpacked, provenance is skipped."""
    media_type = view.layer(index).media_type
    if media_type in (CHART, LEGACY_CHART):
        return Placement(
            rule="helm: the chart, unpacked", name=_archive_name(view, ".tgz"), archive=True, certain=True
        )
    if media_type == PROVENANCE:
        return Placement(
            rule="helm: provenance of the packed chart, not delivered",
            name=_archive_name(view, ".tgz.prov"),
            skip=True,
        )
    return None


def _archive_name(view: View, extension: str) -> str | None:
    """`NAME-VERSION.tgz` from the config, which is read only for this; else `chart.tgz`."""
    if not view.keep:
        return None
    config = view.config()
    name = f"{config.get('name')}-{config.get('version')}{extension}"
    try:
        plain = "/" not in check_relative(name) and bool(config.get("name")) and bool(config.get("version"))
    except UnsafeTitle:
        plain = False
    return name if plain else f"chart{extension}"
