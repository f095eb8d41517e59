"""The guard over our .proto files: it finds what it must, and our files agree with the official ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from rig import protos

SOURCE = Path(__file__).resolve().parents[2] / "src" / "unlade"

# A true extract of four protocols, as a file of ours would be: only some calls, only some fields.
TRUE_SAMPLES = {
    "cri": """
        syntax = "proto3";
        package runtime.v1;
        service ImageService {
          rpc PullImage(PullImageRequest) returns (PullImageResponse) {}
          rpc StreamImages(StreamImagesRequest) returns (stream StreamImagesResponse) {}
        }
        message ImageSpec {
          string image = 1;
          map<string, string> annotations = 2;
          string user_specified_image = 18;
          string runtime_handler = 19;
        }
        message AuthConfig { string username = 1; string password = 2; }
        message PullImageRequest { ImageSpec image = 1; AuthConfig auth = 2; }
        message PullImageResponse { string image_ref = 1; }
        message StreamImagesRequest {}
        message StreamImagesResponse {}
        """,
    "csi": """
        syntax = "proto3";
        package csi.v1;
        service Identity { rpc GetPluginInfo (GetPluginInfoRequest) returns (GetPluginInfoResponse); }
        message GetPluginInfoRequest {}
        message GetPluginInfoResponse { string name = 1; map<string, string> manifest = 3; }
        message VolumeCapability {
          message BlockVolume {}
          message MountVolume { string fs_type = 1; repeated string mount_flags = 2; }
          oneof access_type { BlockVolume block = 1; MountVolume mount = 2; }
          message AccessMode { enum Mode { UNKNOWN = 0; SINGLE_NODE_WRITER = 1; } Mode mode = 1; }
          AccessMode access_mode = 3;
        }
        """,
    "registration": """
        syntax = "proto3";
        package pluginregistration;
        message PluginInfo {
          string type = 1; string name = 2; string endpoint = 3; repeated string supported_versions = 4;
        }
        message InfoRequest {}
        service Registration { rpc GetInfo(InfoRequest) returns (PluginInfo) {} }
        """,
    "containerd": """
        syntax = "proto3";
        package containerd.services.leases.v1;
        import "google/protobuf/timestamp.proto";
        message Lease {
          string id = 1;
          google.protobuf.Timestamp created_at = 2;
          map<string, string> labels = 3;
        }
        """,
}


@pytest.mark.parametrize("name", TRUE_SAMPLES)
def test_true_extracts_agree_with_the_official_files(name: str, tmp_path: Path) -> None:
    (tmp_path / "sample.proto").write_text(TRUE_SAMPLES[name])
    assert protos.check(tmp_path) == []


# Each changes one fact of the samples; the guard must name it.
LIES = {
    "number": ("cri", "runtime_handler = 19", "runtime_handler = 20", "ImageSpec field 20"),
    "name": ("cri", "string username = 1", "string user = 1", "AuthConfig field 1"),
    "type": ("cri", "string image_ref = 1", "bytes image_ref = 1", "PullImageResponse field 1"),
    "map": ("cri", "map<string, string> annotations", "map<string, bytes> annotations", "ImageSpec field 2"),
    "stream": ("cri", "stream StreamImagesResponse", "StreamImagesResponse", "ImageService/StreamImages"),
    "call": ("cri", "rpc PullImage(", "rpc FetchImage(", "ImageService/FetchImage"),
    "message": ("csi", "message GetPluginInfoRequest {}", "message Invented {}", "Invented does not exist"),
    "label": ("csi", "repeated string mount_flags", "string mount_flags", "MountVolume field 2"),
    "oneof": ("csi", "oneof access_type {", "oneof kind {", "VolumeCapability field 1"),
    "value": ("csi", "SINGLE_NODE_WRITER = 1", "SINGLE_NODE_WRITER = 2", "SINGLE_NODE_WRITER: ours 2"),
    "foreign type": (
        "containerd",
        "google.protobuf.Timestamp created_at",
        "google.protobuf.Duration created_at",
        "Lease field 2",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_each_kind_of_wrong_fact_is_found(lie: str, tmp_path: Path) -> None:
    sample, truth, false, named = LIES[lie]
    assert truth in TRUE_SAMPLES[sample]
    (tmp_path / "sample.proto").write_text(TRUE_SAMPLES[sample].replace(truth, false))
    assert any(named in line for line in protos.check(tmp_path))


def test_unknown_package_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "sample.proto").write_text('syntax = "proto3"; package nobody.v1; message M {}')
    with pytest.raises(protos.ProtoError, match="no official source"):
        protos.check(tmp_path)


def test_truncated_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "sample.proto").write_text("package runtime.v1; message M { string a = 1")
    with pytest.raises(protos.ProtoError, match=r"sample\.proto"):
        protos.check(tmp_path)


def test_our_files_agree_with_the_official_ones() -> None:
    assert protos.check(SOURCE) == []
