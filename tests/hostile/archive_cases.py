"""Hostile archives, one list: each names its row of the threat table, and the error it must meet.

A case builds its bytes when it is run, because some are large. `both` runs it by artifact and image rules.
What must be *handled* rather than refused is in `test_archives_handled.py`; what exhausts machines in
`test_archives_bombs.py`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.fakes.tars import BLOCK, GNU, Tar, base256, gz, header, padded, pax_record, zst
from unlade.errors import UnladeError
from unlade.unpack import (
    CorruptStream,
    LimitExceeded,
    Limits,
    MalformedArchive,
    UnsafeLink,
    UnsafeName,
    UnsupportedEntry,
)

ARTIFACT = ("artifact",)
IMAGE = ("image",)
BOTH = ("artifact", "image")

# A real directory, named in archives by its absolute path, that must never change.
OUTSIDE = os.fsencode(tempfile.gettempdir()) + b"/unlade-outside-%d/" % os.getpid()


@dataclass(frozen=True)
class Case:
    """One archive, the rules it is tried by, and the error all of them must raise."""

    name: str
    build: Callable[[], bytes]
    error: type[UnladeError]
    rules: tuple[str, ...] = BOTH
    limits: Limits = field(default_factory=Limits)


def of(made: Tar) -> Callable[[], bytes]:
    return lambda: bytes(made)


def each(add: Callable[[Tar, int], object], count: int) -> Callable[[], bytes]:
    def build() -> bytes:
        made = Tar()
        for number in range(count):
            add(made, number)
        return bytes(made)

    return build


def raw(data: bytes) -> Callable[[], bytes]:
    return lambda: data


def _names() -> list[Case]:
    cases = [
        Case(f"name {name!r}", of(Tar().file(name, b"x")), UnsafeName)
        for name in (
            b"../x", b"a/../../x", b"..", b"a/..", b"./../x", b"a/../b", b"/../x",
            b"../../../../etc/cron.d/x", b"a/b/../../../x", b"..//x", b"", b"/..", b"../out-evil/x",
        )
    ]  # fmt: skip
    cases += [
        Case(f"absolute {name!r}", of(Tar().file(name, b"x")), UnsafeName, ARTIFACT)
        for name in (b"/x", b"//x", b"/etc/passwd", OUTSIDE + b"x", b"/./x", OUTSIDE[:-1] + b"-evil/x")
    ]
    cases += [
        Case("directory ..", of(Tar().dir(b"..", mode=0o777)), UnsafeName),
        Case("directory a/../..", of(Tar().dir(b"a/../..", mode=0o777)), UnsafeName),
        Case("pax ..", of(Tar().file(b"ok", pax={b"path": b"../x"})), UnsafeName),
        Case("pax absolute", of(Tar().file(b"ok", pax={b"path": OUTSIDE + b"x"})), UnsafeName, ARTIFACT),
        Case("pax NUL", of(Tar().file(b"ok", pax={b"path": b"a\0b"})), UnsafeName),
        Case("pax NUL hides ..", of(Tar().file(b"ok", pax={b"path": b"ok\0/../x"})), UnsafeName),
        Case("pax link NUL", of(Tar().symlink(b"l", b"t", pax={b"linkpath": b"t\0../x"})), UnsafeName),
        Case("GNU long ..", of(Tar().gnu_long(b"L", b"../" * 60 + b"x").file(b"ok")), UnsafeName),
        Case("prefix ..", raw(bytes(Tar().raw(header(b"x", prefix=b"..")))), UnsafeName),
        Case("prefix absolute", raw(bytes(Tar().raw(header(b"x", prefix=b"/etc")))), UnsafeName, ARTIFACT),
        Case("symlink named ..", of(Tar().symlink(b"..", b"x")), UnsafeName),
        Case("hard link named ..", of(Tar().file(b"f").link(b"../h", b"f")), UnsafeName),
        Case("name beyond PATH_MAX", of(Tar().file(b"/".join([b"d" * 100] * 45))), UnsafeName),
        Case("component beyond NAME_MAX", of(Tar().file(b"n" * 256)), UnsafeName),
        Case("directory beyond NAME_MAX", of(Tar().file(b"n" * 256 + b"/f")), UnsafeName),
    ]
    for root in (b".", b"./", b"/", b"//", b"././.", b"./."):
        for kind in (b"0", b"2", b"1", b"3"):
            rules = IMAGE if root.startswith(b"/") else BOTH
            error = UnsafeName
            if kind == b"0" and root.endswith(b"/"):
                continue  # a file whose name ends in a slash is V7's directory
            cases.append(
                Case(
                    f"root {root!r} as {kind!r}",
                    of(Tar().entry(root, kind=kind, link=b"/tmp").file(b"f")),
                    error,
                    rules,
                )
            )
    return cases


def _links() -> list[Case]:
    up = b"../outside"
    through: list[tuple[str, Tar]] = [
        ("absolute", Tar().symlink(b"l", OUTSIDE).file(b"l/x", b"pwned")),
        ("relative", Tar().symlink(b"l", up).file(b"l/x", b"pwned")),
        ("to the host's root", Tar().symlink(b"l", b"/").file(b"l/tmp/unlade-pwned")),
        ("inside", Tar().dir(b"d").symlink(b"l", b"d").file(b"l/x")),
        ("to itself", Tar().symlink(b"l", b".").file(b"l/l/l/x")),
        ("in the middle", Tar().dir(b"a/d").symlink(b"a/l", b"d").file(b"a/l/b/c/x")),
        (
            "chain",
            Tar().symlink(b"c", b"d").symlink(b"b", b"c").symlink(b"a", b"b").dir(b"d").file(b"a/x"),
        ),
        ("loop", Tar().symlink(b"a", b"b").symlink(b"b", b"a").file(b"a/x")),
        ("dangling", Tar().symlink(b"l", b"missing/below").file(b"l/x")),
        ("prefix confusion", Tar().symlink(b"l", b"../out-evil").file(b"l/x")),
        ("directory below", Tar().dir(b"d").symlink(b"l", b"d").dir(b"l/sub")),
        ("symlink below", Tar().dir(b"d").symlink(b"l", b"d").symlink(b"l/s", b"x")),
        ("hard link below", Tar().dir(b"d").file(b"f").symlink(b"l", b"d").link(b"l/h", b"f")),
        ("hard link target", Tar().file(b"d/f").symlink(b"l", b"d").link(b"h", b"l/f")),
        ("replaced parent", Tar().dir(b"d").file(b"d/f").symlink(b"d", b"e").file(b"d/g")),
    ]
    cases = [Case(f"write through a link: {name}", of(step), UnsafeLink, ARTIFACT) for name, step in through]
    cases += [
        Case(f"link out: {target!r}", of(Tar().symlink(b"d/l", target)), UnsafeLink, ARTIFACT)
        for target in (
            b"/", b"/etc/passwd", b"../..", b"../../outside/secret", b"x/../../../out", b"./../../x", OUTSIDE,
            b"../../out-evil/secret", b"../" * 100 + b"etc/passwd",
        )
    ]  # fmt: skip
    cases += [
        # The text stays inside; the links it passes through do not (CVE-2025-4330 and -4138).
        Case(
            "link out through a link",
            of(Tar().dir(b"a/b/c").symlink(b"deep", b"a/b/c").symlink(b"x", b"deep/../../../..")),
            UnsafeLink,
            ARTIFACT,
        ),
        Case(
            "link out through a chain",
            of(Tar().dir(b"a/b").symlink(b"up", b"a/b/../../a").symlink(b"a/out", b"../up/../..")),
            UnsafeLink,
            ARTIFACT,
        ),
        Case("forty-one links", of(_chain()), UnsafeLink, IMAGE),
        Case(
            "a loop of links",
            of(Tar().symlink(b"a", b"b").symlink(b"b", b"a").file(b"a/x")),
            UnsafeLink,
        ),
        Case("a link to itself", of(Tar().symlink(b"a", b"a").file(b"a/x")), UnsafeLink),
        Case("link target beyond PATH_MAX", of(Tar().symlink(b"l", b"x/" * 2100)), UnsafeLink),
        Case("link target empty", of(Tar().symlink(b"l", b"")), UnsafeLink),
        Case("link lengths beyond PATH_MAX (CVE-2025-4517)", of(_path_max_walk()), UnsafeLink, ARTIFACT),
        Case("a file used as a directory", of(Tar().file(b"f").file(b"f/x")), MalformedArchive),
    ]
    hard: list[tuple[str, Tar, tuple[str, ...]]] = [
        ("outside", Tar().link(b"h", up + b"/secret"), BOTH),
        ("above", Tar().link(b"d/h", b"../outside/secret"), BOTH),
        ("absolute", Tar().link(b"h", OUTSIDE + b"secret"), ARTIFACT),
        ("prefix confusion", Tar().link(b"h", b"../out-evil/secret"), BOTH),
        ("missing", Tar().link(b"h", b"missing"), ARTIFACT),
        ("missing below", Tar().link(b"h", b"no/such/file"), ARTIFACT),
        ("directory", Tar().dir(b"d").link(b"h", b"d"), BOTH),
        ("itself", Tar().file(b"h").link(b"h", b"h"), BOTH),
        ("itself, spelled otherwise", Tar().file(b"d/h").link(b"d/h", b"./d//h"), BOTH),
        ("the root", Tar().link(b"h", b"."), BOTH),
        ("nothing", Tar().link(b"h", b""), BOTH),
        ("its own new parent", Tar().dir(b"d").file(b"d/f").link(b"d", b"d/f"), ARTIFACT),
        ("beyond PATH_MAX", Tar().link(b"h", b"x/" * 2100), BOTH),
    ]
    return cases + [Case(f"hard link to {name}", of(step), UnsafeLink, rules) for name, step, rules in hard]


def _chain() -> Tar:
    t = Tar()
    t.dir(b"end")
    t.symlink(b"l0", b"end")
    for n in range(1, 42):
        t.symlink(b"l%d" % n, b"l%d" % (n - 1))
    t.file(b"l41/x")
    return t


def _path_max_walk() -> Tar:
    """Directories and links so long that realpath gives up and calls the rest unchecked."""
    t = Tar()
    directory, path = b"d" * 247, b""
    for letter in b"abcdefghijklmnop":
        t.dir(path + directory)
        t.symlink(path + bytes([letter]), directory)
        path += directory + b"/"
        if len(path) + 260 > 4095:
            break
    short = b"/".join(bytes([letter]) for letter in b"abcdefghijklmno")
    t.symlink(short + b"/" + b"l" * 254, b"../" * 15)
    t.symlink(b"escape", short + b"/" + b"l" * 254 + b"/../../outside")
    t.link(b"flag", b"escape/secret")
    return t


def _numbers() -> list[Case]:
    def field(**fields: object) -> Callable[[], bytes]:
        return lambda: bytes(Tar().raw(header(b"f", **fields)))  # type: ignore[arg-type]

    bad: list[tuple[str, Callable[[], bytes]]] = [
        ("negative size (CVE-2025-8194)", field(size=base256(-1, 12))),
        ("size of minus a block", field(size=base256(-512, 12))),
        ("size beyond 64 bits", field(size=b"\x80" + b"\xff" * 11)),
        ("size no number", field(size=b"12x45678901")),
        ("size with a sign", field(size=b"+0000000001")),
        ("size with minus", field(size=b"-0000000001")),
        ("size with underscores", field(size=b"1_0_0_0_0_0")),
        ("size with a prefix", field(size=b"0o000000001")),
        ("size in decimal digits", field(size=b"00000000009")),
        ("owner negative", field(uid=base256(-1, 8))),
        ("owner that means nobody", field(uid=base256(2**32 - 1, 8))),
        ("owner beyond 32 bits", field(uid=base256(2**40, 8))),
        ("group negative", field(gid=base256(-2, 8))),
        ("group beyond 32 bits", field(gid=base256(2**32, 8))),
        ("time beyond reason", field(mtime=base256(2**62, 12))),
        ("time before reason", field(mtime=base256(-(2**62), 12))),
        ("mode no number", field(mode=b"rwxr-xr")),
        ("checksum wrong", field(checksum=b"000001\0 ")),
        ("checksum missing", field(checksum=bytes(8))),
        ("checksum no number", field(checksum=b"zzzzzz\0 ")),
    ]
    wrong = [
        *((key, v) for key in (b"size", b"uid", b"gid") for v in (b"-1", b"1e3", b"0x10", b" 1", b"9" * 20)),
        *((b"mtime", v) for v in (b"now", b"1.2.3", b"1e9", b"--1", b"9" * 19, b"nan", b"1,5")),
    ]
    bad += [(f"pax {key!r}={v!r}", of(Tar().file(b"f", pax={key: v}))) for key, v in wrong]
    bad.append(("pax uid overflow", of(Tar().file(b"f", pax={b"uid": b"4294967295"}))))
    records = {
        "no length": b"path=x\n",
        "zero length": b"0 path=x\n",
        "length too long": b"99 path=x\n",
        "length too short": b"5 path=x\n",
        "length negative": b"-9 path=x\n",
        "length huge": b"9" * 30 + b" path=x\n",
        "no equals sign": b"9 path:x\n",
        "no newline": b"9 path=xy",
        "no key": b"5 =x\n",
        "leading zeros only": b"000000000000 path=x\n",
        "binary": bytes(range(1, 40)),
    }
    bad += [(f"pax record: {name}", raw(bytes(_with_pax(data)))) for name, data in records.items()]
    return [Case(name, build, MalformedArchive) for name, build in bad] + [
        Case("size beyond the limit", field(size=base256(2**50, 12)), LimitExceeded),
        Case("pax size beyond the limit", of(Tar().file(b"f", pax={b"size": b"9" * 18})), LimitExceeded),
        Case("pax NUL in a key", raw(bytes(_with_pax(pax_record(b"a\0b", b"x")))), UnsafeName),
    ]


def _with_pax(records: bytes) -> Tar:
    made = Tar().raw(header(b"PaxHeaders/x", kind=b"x", size=len(records)) + padded(records))
    return made.file(b"f", b"x")


def _structure() -> list[Case]:
    whole = bytes(Tar().dir(b"d").file(b"d/f", b"x" * 1500).file(b"g", b"y" * 10))
    cases = [
        Case(f"cut at {at}", raw(whole[:at]), MalformedArchive)
        for at in (1, 100, 511, 513, 1023, 1025, 1200, 2559, 2570, 3060, 3073)
    ]
    return [
        *cases,
        Case("not a tar", raw(b"this is no archive at all, just prose " * 40), MalformedArchive),
        Case("an ELF file", raw(b"\x7fELF" + bytes(range(256)) * 8), MalformedArchive),
        Case("bzip2", raw(b"BZh91AY&SY" + bytes(600)), MalformedArchive),
        Case("xz", raw(b"\xfd7zXZ\0" + bytes(600)), MalformedArchive),
        Case("zip", raw(b"PK\x03\x04" + bytes(600)), MalformedArchive),
        Case("a lone zero block", of(Tar().file(b"f").raw(bytes(BLOCK)).file(b"g")), MalformedArchive),
        Case("ends after pax", of(Tar().file(b"f").pax({b"path": b"x"})), MalformedArchive),
        Case("ends after a long name", of(Tar().gnu_long(b"L", b"x")), MalformedArchive),
        Case(
            "two pax headers",
            of(Tar().pax({b"uid": b"1"}).pax({b"uid": b"2"}).file(b"f")),
            MalformedArchive,
        ),
        Case("empty long name", of(Tar().gnu_long(b"L", b"").file(b"f")), MalformedArchive),
        Case("empty long link", of(Tar().gnu_long(b"K", b"").symlink(b"l", b"f")), MalformedArchive),
        Case(
            "directory with content",
            raw(bytes(Tar().raw(header(b"d/", size=5) + padded(b"hello")))),
            MalformedArchive,
        ),
        *(
            Case(
                f"global pax {key!r}",
                of(Tar().pax({key: b"x"}, kind=b"g").file(b"f")),
                MalformedArchive,
            )
            for key in (b"path", b"linkpath", b"size", b"GNU.sparse.name", b"SCHILY.xattr.user.x")
        ),
        *(
            Case(f"type {kind!r}", of(Tar().entry(b"f", kind=kind)), UnsupportedEntry)
            for kind in (b"S", b"V", b"M", b"D", b"N", b"A", b"s", b"8", b"\xff")
        ),
        *(
            Case(f"pax {key!r}", of(Tar().file(b"f", pax={key: b"1"})), UnsupportedEntry)
            for key in (b"GNU.sparse.major", b"GNU.sparse.size", b"GNU.sparse.map", b"GNU.sparse.numblocks")
        ),
        *(
            Case(
                f"device {kind!r}",
                of(Tar().entry(b"dev/x", kind=kind)),
                UnsupportedEntry,
                ARTIFACT,
            )
            for kind in (b"3", b"4", b"6")
        ),
    ]


def _whiteouts() -> list[Case]:
    return [
        Case(f"whiteout {name!r}", of(Tar().file(name)), UnsafeName, IMAGE)
        for name in (
            b".wh..", b".wh.", b".wh.../x", b".wh...", b"a/.wh.", b"a/.wh..", b"a/.wh...", b".wh.x/y",
            b".wh..wh.", b".wh..wh.x", b"a/.wh..wh..opq/x", b".wh..wh..opq/x", b"a/.wh..wh.plnk/x", b"/.wh..",
        )
    ]  # fmt: skip


def _caps() -> list[Case]:
    return [
        Case(
            "too many entries",
            each(lambda t, _: t.file(b"f"), 101),
            LimitExceeded,
            limits=Limits(max_entries=100),
        ),
        Case(
            "too many headers",
            each(lambda t, _: t.pax({b"comment": b"x"}, kind=b"g"), 101),
            LimitExceeded,
            limits=Limits(max_entries=100),
        ),
        Case("too deep", of(Tar().file(b"d/" * 129 + b"f")), LimitExceeded),
        Case(
            "directories too deep",
            each(lambda t, n: t.dir(b"d/" * n + b"d"), 140),
            LimitExceeded,
        ),
        Case("too deep through links", of(_deep_links()), LimitExceeded, IMAGE),
        Case("pax header too large", of(Tar().file(b"f", pax={b"x": b"y" * (1 << 20)})), LimitExceeded),
        Case("long name too large", of(Tar().gnu_long(b"L", b"n" * (1 << 20)).file(b"f")), LimitExceeded),
        Case(
            "long names together too large",
            each(lambda t, _: t.gnu_long(b"L", b"n" * (300 << 10)), 4),
            LimitExceeded,
        ),
        Case(
            "pax header that claims a terabyte",
            raw(header(b"x", kind=b"x", size=base256(1 << 40, 12))),
            LimitExceeded,
        ),
        Case(
            "long name that claims a terabyte",
            raw(header(b"x", kind=b"L", size=base256(1 << 40, 12), magic=GNU)),
            LimitExceeded,
        ),
        Case(
            "too many bytes",
            of(Tar().file(b"f", bytes(3000))),
            LimitExceeded,
            limits=Limits(max_bytes=2048),
        ),
        Case(
            "too many bytes after the end",
            lambda: bytes(Tar().file(b"f")) + bytes(1 << 20),
            LimitExceeded,
            limits=Limits(max_bytes=1 << 18),
        ),
        Case(
            "too many whiteouts",
            each(lambda t, n: t.file(b".wh.%d" % n), 100),
            LimitExceeded,
            IMAGE,
            Limits(max_noted_bytes=2000),
        ),
        Case(
            "too many implicit parents",
            each(lambda t, n: t.file(b"%d/f" % n), 100),
            LimitExceeded,
            limits=Limits(max_noted_bytes=2000),
        ),
        Case(
            "ratio of gzip",
            lambda: gz(bytes(Tar().file(b"f", bytes(4 << 20)))),
            LimitExceeded,
            limits=Limits(ratio_floor=1 << 20),
        ),
        Case(
            "ratio of zstd",
            lambda: zst(bytes(Tar().file(b"f", bytes(4 << 20)))),
            LimitExceeded,
            limits=Limits(ratio_floor=1 << 20),
        ),
        Case("gzip of empty members", lambda: gz(b"") * 2000, LimitExceeded),
        Case(
            "gzip header without end",
            raw(b"\x1f\x8b\x08\x08\0\0\0\0\0\xff" + b"n" * (200 << 10)),
            LimitExceeded,
        ),
    ]


def _deep_links() -> Tar:
    t = Tar()
    t.dir(b"d/" * 100)
    t.symlink(b"l", b"d/" * 100)
    t.file(b"l/" + b"e/" * 100 + b"f")
    return t


def _streams() -> list[Case]:
    plain = bytes(Tar().file(b"f", bytes(range(256)) * 40))
    packed, squeezed, summed = gz(plain), zst(plain), zst(plain, checksum=True)
    broken = [
        ("gzip: junk after", packed + b"junk"),
        ("gzip: junk after padding", packed + bytes(100) + b"j"),
        ("gzip: second member cut", packed + gz(b"more")[:-3]),
        ("gzip: second member of another kind", packed + squeezed),
        ("gzip: checksum", packed[:-8] + bytes([packed[-8] ^ 1]) + packed[-7:]),
        ("gzip: length", packed[:-4] + bytes([packed[-4] ^ 1]) + packed[-3:]),
        ("gzip: data", packed[:40] + bytes([packed[40] ^ 0x55]) + packed[41:]),
        ("gzip: method", packed[:2] + b"\x07" + packed[3:]),
        ("gzip: reserved flag", packed[:3] + b"\xe0" + packed[4:]),
        ("gzip: header checksum", packed[:3] + b"\x02" + packed[4:10] + b"\0\0" + packed[10:]),
        ("zstd: junk after", squeezed + b"junk"),
        ("zstd: zeros after", squeezed + bytes(8)),
        ("zstd: second frame cut", squeezed + squeezed[:-2]),
        ("zstd: checksum", summed[:-1] + bytes([summed[-1] ^ 1])),
        ("zstd: data", summed[:20] + bytes([summed[20] ^ 0x55]) + summed[21:]),
        ("zstd: skippable frame cut", squeezed + b"\x50\x2a\x4d\x18\xff\0\0\0abc"),
        *((f"gzip: cut at {at}", packed[:at]) for at in (2, 9, 10, 11, 50, len(packed) - 9, len(packed) - 1)),
        *((f"zstd: cut at {at}", squeezed[:at]) for at in (4, 5, 9, 50, len(squeezed) - 1)),
    ]
    return [Case(name, raw(data), CorruptStream) for name, data in broken]


CASES: tuple[Case, ...] = (
    *_names(), *_links(), *_numbers(), *_structure(), *_whiteouts(), *_caps(), *_streams(),
)  # fmt: skip
