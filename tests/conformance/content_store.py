"""The suite that every ContentStore passes. Subclass it and give it a `store` fixture.

Only the protocol is used: what a test needs beyond it (a second handle on the same content, a collection)
comes from the methods at the top, which a subclass overrides.
"""

from __future__ import annotations

import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from unlade.errors import DeadlineExceeded, IntegrityError, StoreError
from unlade.model import Deadline, Descriptor, Digest, mediatypes
from unlade.store import ContentStore, NotInStore


def blob(data: bytes, media_type: str = "application/octet-stream") -> Descriptor:
    return Descriptor(media_type=media_type, digest=Digest.of(data), size=len(data))


def image(*layers: Descriptor, config: Descriptor) -> bytes:
    document = {
        "schemaVersion": 2,
        "mediaType": mediatypes.OCI_MANIFEST,
        "config": config.to_json(),
        "layers": [layer.to_json() for layer in layers],
    }
    return json.dumps(document).encode()


class ContentStoreSuite:
    """What is promised by unlade.store.content, one test per promise."""

    def reopen(self, store: ContentStore) -> ContentStore:
        """The same content as another process would open it."""
        raise NotImplementedError

    def collect(self, store: ContentStore) -> None:
        """Run a garbage collection."""
        raise NotImplementedError

    def read(self, store: ContentStore, digest: Digest) -> bytes:
        with store.open(digest) as stream:
            return stream.read()

    def test_what_was_put_is_read_back(self, store: ContentStore) -> None:
        data = random.Random(1).randbytes(300_000)
        info = store.put(blob(data), data)
        assert (info.digest, info.size) == (Digest.of(data), len(data))
        assert store.stat(Digest.of(data)) == info
        assert self.read(store, Digest.of(data)) == data

    @pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1])
    def test_sizes_at_the_edges(self, store: ContentStore, size: int) -> None:
        data = random.Random(size).randbytes(size)
        store.put(blob(data), data)
        assert self.read(store, Digest.of(data)) == data

    def test_sha512(self, store: ContentStore) -> None:
        import hashlib

        digest = Digest("sha512", hashlib.sha512(b"data").hexdigest())
        store.put(Descriptor(media_type="a/b", digest=digest, size=4), b"data")
        assert self.read(store, digest) == b"data"

    def test_what_is_not_there(self, store: ContentStore) -> None:
        digest = Digest.of(b"nothing")
        assert store.stat(digest) is None
        with pytest.raises(NotInStore):
            store.open(digest)
        assert store.delete(digest) is False

    def test_uncommitted_content_is_invisible(self, store: ContentStore) -> None:
        with store.ingest(blob(b"hello")) as ingest:
            ingest.write(b"hello")
            assert store.stat(Digest.of(b"hello")) is None
            assert list(store.walk()) == []
        assert store.stat(Digest.of(b"hello")) is None

    def test_a_partial_is_continued(self, store: ContentStore) -> None:
        data = random.Random(2).randbytes(3_000_000)
        with store.ingest(blob(data)) as ingest:
            ingest.write(data[:1_234_567])
        again = self.reopen(store)
        with again.ingest(blob(data)) as ingest:
            assert ingest.offset == 1_234_567
            ingest.write(data[ingest.offset :])
            ingest.commit()
        assert self.read(again, Digest.of(data)) == data

    def test_a_partial_survives_an_error(self, store: ContentStore) -> None:
        with pytest.raises(ConnectionError), store.ingest(blob(b"hello")) as ingest:
            ingest.write(b"hel")
            raise ConnectionError
        with store.ingest(blob(b"hello")) as ingest:
            assert ingest.offset == 3

    def test_a_discarded_partial_starts_over(self, store: ContentStore) -> None:
        with store.ingest(blob(b"hello")) as ingest:
            ingest.write(b"hel")
            ingest.discard()
            assert ingest.offset == 0
            ingest.write(b"hello")
            ingest.commit()
        assert self.read(store, Digest.of(b"hello")) == b"hello"

    def test_wrong_bytes_are_refused_and_forgotten(self, store: ContentStore) -> None:
        with pytest.raises(IntegrityError), store.ingest(blob(b"hello")) as ingest:
            ingest.write(b"jello")
            ingest.commit()
        assert store.stat(Digest.of(b"hello")) is None
        with store.ingest(blob(b"hello")) as ingest:
            assert ingest.offset == 0

    def test_a_wrong_prefix_is_found_at_the_end(self, store: ContentStore) -> None:
        with store.ingest(blob(b"hello")) as ingest:
            ingest.write(b"jel")
        with pytest.raises(IntegrityError), store.ingest(blob(b"hello")) as ingest:
            ingest.write(b"lo")
            ingest.commit()
        store.put(blob(b"hello"), b"hello")
        assert self.read(store, Digest.of(b"hello")) == b"hello"

    def test_too_short_is_refused_and_kept(self, store: ContentStore) -> None:
        with store.ingest(blob(b"hello")) as ingest:
            ingest.write(b"hel")
            with pytest.raises(IntegrityError):
                ingest.commit()
        with store.ingest(blob(b"hello")) as ingest:
            assert ingest.offset == 3

    def test_too_long_is_refused_at_once(self, store: ContentStore) -> None:
        with store.ingest(blob(b"hello")) as ingest, pytest.raises(IntegrityError):
            ingest.write(b"hello!")

    def test_present_content_takes_no_bytes(self, store: ContentStore) -> None:
        info = store.put(blob(b"hello"), b"hello")
        with store.ingest(blob(b"hello")) as ingest:
            assert ingest.present
            assert ingest.offset == 5
            with pytest.raises(IntegrityError):
                ingest.write(b"x")
            ingest.discard()
            assert ingest.commit() == info
        assert self.read(store, Digest.of(b"hello")) == b"hello"

    def test_a_descriptor_that_lies_about_its_size(self, store: ContentStore) -> None:
        store.put(blob(b"hello"), b"hello")
        liar = Descriptor(media_type="a/b", digest=Digest.of(b"hello"), size=6)
        with pytest.raises(IntegrityError), store.ingest(liar):
            pass

    def test_ingest_is_exclusive_and_the_second_finds_it(self, store: ContentStore) -> None:
        other = self.reopen(store)
        started, order = threading.Event(), []

        def second() -> None:
            started.set()
            with other.ingest(blob(b"hello")) as ingest:
                order.append("second")
                assert ingest.present

        with ThreadPoolExecutor(1) as pool:
            with store.ingest(blob(b"hello")) as ingest:
                future = pool.submit(second)
                started.wait()
                ingest.write(b"hello")
                order.append("first")
                ingest.commit()
            future.result(timeout=10)
        assert order == ["first", "second"]

    def test_waiting_ends_with_the_deadline(self, store: ContentStore) -> None:
        other = self.reopen(store)
        with (
            store.ingest(blob(b"hello")),
            pytest.raises(DeadlineExceeded),
            other.ingest(blob(b"hello"), deadline=Deadline.after(0.05)),
        ):
            pass

    def test_many_threads_one_winner(self, store: ContentStore) -> None:
        data = random.Random(3).randbytes(100_000)
        wrote = []

        def pull(number: int) -> None:
            with store.ingest(blob(data)) as ingest:
                if not ingest.present:
                    ingest.write(data)
                    ingest.commit()
                    wrote.append(number)

        with ThreadPoolExecutor(20) as pool:
            list(pool.map(pull, range(100)))
        assert len(wrote) == 1

    def test_delete(self, store: ContentStore) -> None:
        store.put(blob(b"hello"), b"hello")
        assert store.delete(Digest.of(b"hello")) is True
        assert store.stat(Digest.of(b"hello")) is None
        assert store.delete(Digest.of(b"hello")) is False
        store.put(blob(b"hello"), b"hello")
        assert self.read(store, Digest.of(b"hello")) == b"hello"

    def test_what_is_held_is_not_deleted(self, store: ContentStore) -> None:
        with store.lease("test", ttl=60) as lease:
            store.put(blob(b"hello"), b"hello", lease=lease)
            with pytest.raises(StoreError):
                store.delete(Digest.of(b"hello"))
        assert store.delete(Digest.of(b"hello")) is True

    def test_walk_gives_every_blob_in_order(self, store: ContentStore) -> None:
        expected = []
        for number in range(50):
            data = str(number).encode()
            store.put(blob(data), data)
            expected.append(Digest.of(data))
        assert [info.digest for info in store.walk()] == sorted(expected)

    def test_collection_takes_what_nobody_holds(self, store: ContentStore) -> None:
        store.put(blob(b"held"), b"held")
        store.put(blob(b"free"), b"free")
        with store.lease("test", ttl=60) as lease:
            assert lease.hold(Digest.of(b"held"))
            self.collect(store)
            assert store.stat(Digest.of(b"held"))
            assert store.stat(Digest.of(b"free")) is None
            assert not lease.hold(Digest.of(b"free"))
        self.collect(store)
        assert store.stat(Digest.of(b"held")) is None

    def test_a_blob_is_born_held(self, store: ContentStore) -> None:
        with store.lease("test", ttl=60) as lease:
            with store.ingest(blob(b"hello"), lease=lease) as ingest:
                ingest.write(b"hello")
                ingest.commit()
            self.collect(store)
            assert store.stat(Digest.of(b"hello"))

    def test_present_content_is_held_by_who_finds_it(self, store: ContentStore) -> None:
        store.put(blob(b"hello"), b"hello")
        with store.lease("test", ttl=60) as lease:
            with store.ingest(blob(b"hello"), lease=lease) as ingest:
                assert ingest.present
            self.collect(store)
            assert store.stat(Digest.of(b"hello"))

    def test_an_expired_lease_holds_nothing(self, store: ContentStore) -> None:
        with store.lease("test", ttl=-1) as lease:
            store.put(blob(b"hello"), b"hello", lease=lease)
            self.collect(store)
            assert store.stat(Digest.of(b"hello")) is None

    def test_a_renewed_lease_holds(self, store: ContentStore) -> None:
        with store.lease("test", ttl=-1) as lease:
            store.put(blob(b"hello"), b"hello", lease=lease)
            lease.renew(60)
            self.collect(store)
            assert store.stat(Digest.of(b"hello"))

    def test_a_manifest_keeps_its_children(self, store: ContentStore) -> None:
        config, layer = blob(b"{}"), blob(b"layer")
        raw = image(layer, config=config)
        manifest = blob(raw, mediatypes.OCI_MANIFEST)
        with store.lease("test", ttl=60) as lease:
            store.put(manifest, raw, lease=lease)
            store.put(config, b"{}")
            store.put(layer, b"layer")
            self.collect(store)
            assert store.stat(config.digest) and store.stat(layer.digest)
        self.collect(store)
        assert list(store.walk()) == []

    def test_given_children_are_kept(self, store: ContentStore) -> None:
        store.put(blob(b"child"), b"child")
        with store.lease("test", ttl=60) as lease:
            store.put(blob(b"parent"), b"parent", lease=lease, children=[Digest.of(b"child")])
            self.collect(store)
            assert store.stat(Digest.of(b"child"))

    def test_an_open_blob_stays_readable(self, store: ContentStore) -> None:
        data = random.Random(4).randbytes(200_000)
        store.put(blob(data), data)
        with store.open(Digest.of(data)) as stream:
            head = stream.read(100)
            store.delete(Digest.of(data))
            assert head + stream.read() == data

    def test_collection_against_pulls(self, store: ContentStore) -> None:
        """Whatever a lease said it holds is there until it ends, with collections all the time."""
        stop = threading.Event()
        errors: list[str] = []

        def collector() -> None:
            while not stop.is_set():
                self.collect(store)

        def puller(seed: int) -> None:
            chance = random.Random(seed)
            for _ in range(15):
                with store.lease("pull", ttl=60) as lease:
                    wanted = [str(chance.randrange(10)).encode() for _ in range(5)]
                    for data in wanted:
                        store.put(blob(data), data, lease=lease)
                    errors.extend(
                        data.decode() for data in wanted if self.read(store, Digest.of(data)) != data
                    )

        background = threading.Thread(target=collector)
        background.start()
        try:
            with ThreadPoolExecutor(4) as pool:
                list(pool.map(puller, range(4)))
        finally:
            stop.set()
            background.join()
        assert errors == []
