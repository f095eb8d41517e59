"""Decoding: what is read, and that nothing is decoded by a type that threads may meet together."""

import re
from pathlib import Path

import msgspec

import unlade.controllers
from unlade.controllers.objects import METADATA, STATUS, Page, PodManifest


def test_no_type_is_met_for_the_first_time_in_a_thread() -> None:
    """msgspec 0.22 crashes when two threads first use a Struct type together; decoders are made at import."""
    folder = Path(unlade.controllers.__file__).parent
    for path in folder.glob("*.py"):
        assert not re.search(r"\bdecode\([^)]*type=|msgspec\.convert\(", path.read_text()), path


def test_the_controller_is_the_owner_that_says_so() -> None:
    owners = b'[{"uid":"a"},{"uid":"b","controller":false},{"uid":"c","controller":true}]'
    found = METADATA.decode(b'{"metadata":{"name":"n","namespace":"s","ownerReferences":' + owners + b"}}")
    assert found.metadata.controller_uid == "c"
    assert found.metadata.key == "s/n"
    assert METADATA.decode(b'{"metadata":{"name":"n"}}').metadata.controller_uid == ""
    assert METADATA.decode(b'{"metadata":{"name":"n"}}').metadata.key == "n"


def test_an_empty_list_may_be_null_and_a_status_may_be_bare() -> None:
    pages = msgspec.json.Decoder(Page[PodManifest])
    assert pages.decode(b'{"metadata":{"resourceVersion":"7"},"items":null}').items is None
    assert STATUS.decode(b"{}").message == ""
