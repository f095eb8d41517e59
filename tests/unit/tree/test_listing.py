"""What a file list says is left in the end."""

from __future__ import annotations

import io
import time

from unlade.model import DiffID, Digest
from unlade.tree.listing import Listing
from unlade.unpack.filelist import FileRecord
from unlade.unpack.policy import Unpacked

NO_DIFF = DiffID(Digest.of(b""))


def listing(*records: FileRecord) -> Listing:
    made = Listing()
    for record in records:
        made.add(record)
    return made


def lines(*records: FileRecord) -> io.BytesIO:
    out = io.BytesIO()
    listing(*records).write(out)
    out.seek(0)
    return out


def names(made: Listing) -> set[str]:
    return {record.name for record in made}


def f(name: str, size: int = 0) -> FileRecord:
    return FileRecord("f", name, size=size)


def d(name: str, mode: int = 0) -> FileRecord:
    return FileRecord("d", name, mode=mode)


def test_the_last_record_counts() -> None:
    made = listing(f("a", 1), f("a", 2))
    assert [record.size for record in made] == [2]


def test_what_is_no_directory_ends_what_was_below() -> None:
    assert names(listing(d("a"), f("a/b"), d("a/c"), f("a/c/d"), f("a"))) == {"a"}
    assert names(listing(f("a/b"), f("a"))) == {"a"}, "with and without a record of the directory"
    assert names(listing(f("a/b"), f("a"), d("a"), f("a/c"))) == {"a", "a/c"}


def test_a_hard_link_is_what_its_target_was_then() -> None:
    made = listing(f("a", 1), FileRecord("h", "b", target="a"), f("a", 2))
    assert {record.name: record.size for record in made} == {"a": 2, "b": 1}


def test_a_hard_link_may_find_its_target_later() -> None:
    made = listing(FileRecord("h", "b", target="a"))
    assert [record.type for record in made] == ["h"]
    made.add(f("a", 1))
    made.add(FileRecord("h", "b", target="a"))
    assert {record.name: record.size for record in made} == {"a": 1, "b": 1}


def test_what_is_not_made_takes_the_name() -> None:
    made = listing(f("a"), d("b"), f("b/c"), FileRecord("x", "a"), FileRecord("x", "b"), FileRecord("x", "d"))
    assert names(made) == set()
    made.add(f("a"))
    assert names(made) == {"a"}


def test_layers() -> None:
    made = Listing()
    made.add_layer(lines(d("a", 1), f("a/b"), f("a/c"), d("e", 1), f("e/f"), f("g")), Unpacked(0, 0, NO_DIFF))
    above = Unpacked(
        0,
        0,
        NO_DIFF,
        whiteouts=(b"a/b", b"g"),
        opaques=(b"e",),
        pending_links=((b"h", b"a/c"),),
        implicit_dirs=(b"a", b"new"),
    )
    made.add_layer(lines(d("a", 2), d("e", 2), f("e/x"), d("new", 3), f("new/y")), above)
    assert names(made) == {"a", "a/c", "e", "e/x", "h", "new", "new/y"}
    by_name = {record.name: record for record in made}
    assert (by_name["a"].mode, by_name["e"].mode, by_name["new"].mode) == (1, 2, 3)
    assert by_name["h"].type == "f"


def test_a_written_list_reads_back() -> None:
    made = listing(d("a"), f("a/b", 5), FileRecord("l", "l", target="\xff"), FileRecord("w", "w"))
    out = io.BytesIO()
    made.write(out)
    out.seek(0)
    assert list(Listing.of(out)) == list(made)


def test_flips_are_linear() -> None:
    made = Listing()
    for number in range(20_000):
        made.add(d("a"))
        made.add(f(f"a/{number}"))
    started = time.process_time()
    for _ in range(20_000):
        made.add(f("a"))
        made.add(d("a"))
    assert names(made) == {"a"}
    assert time.process_time() - started < 5
