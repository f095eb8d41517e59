"""The defect this project exists to end, shown on stock engines (V1, V14).

An OCI artifact named in a native `image:` volume is pulled, the event says "Successfully pulled", the pod
starts, and the directory is empty. The same volume with an image works. Should a newer containerd behave
otherwise, this test fails and says with which versions.
"""

from __future__ import annotations

from rig.cluster import Rig
from rig.images import tar
from rig.pods import Namespace

LOOK = "cd /data && find . | sort"


def test_artifact_through_a_native_image_volume_is_silently_empty(cluster: Rig, namespace: Namespace) -> None:
    versions = cluster.versions()
    stated = f"Kubernetes {versions['kubernetes']}, containerd {versions['containerd']}"
    artifact = cluster.registry.push_artifact("models/tiny", {"weights.bin": b"\x00\x01" * 512})
    volume = {"/data": {"image": {"reference": artifact.reference, "pullPolicy": "Always"}}}
    pod = namespace.run("artifact", command=LOOK, volumes=volume)
    pod.wait("Succeeded")
    event = pod.wait_event("Pulled", contains=f'"{artifact.reference}"')
    assert "Successfully pulled" in event["message"], stated
    assert pod.logs() == ".\n", f"with {stated} the artifact is no longer silently empty"
    print(f"{stated}: {event['message']!r}, and the directory is empty")


def test_image_through_the_same_volume_has_its_files(cluster: Rig, namespace: Namespace) -> None:
    image = cluster.registry.push_image("models/as-image", [tar({"weights.bin": b"\x00\x01" * 512})])
    volume = {"/data": {"image": {"reference": image.reference, "pullPolicy": "Always"}}}
    pod = namespace.run("image", command=LOOK, volumes=volume)
    pod.wait("Succeeded")
    assert pod.logs() == ".\n./weights.bin\n"
