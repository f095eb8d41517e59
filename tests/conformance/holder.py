"""The suite that every Holder of volumes' content passes. Subclass it and give it a `holder` fixture."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from tests.conformance.tree_store import fill
from unlade.csi.holding import Holder
from unlade.model import Digest
from unlade.tree import Tree

KEY, OTHER = Digest.of(b"tree"), Digest.of(b"other")


def make(holder: Holder, key: Digest = KEY, **files: str) -> Tree:
    """A tree that nobody holds."""
    with holder.trees.stage(key) as staging:
        fill(staging, **(files or {"f": "content"}))
        return staging.commit(size=7, entries=1)


class HolderSuite:
    """What is promised by unlade.csi.holding, one test per promise."""

    def reopen(self, holder: Holder) -> Holder:
        """The same as another process would open it, the first one being gone."""
        raise NotImplementedError

    def collect(self, holder: Holder) -> None:
        """Run a garbage collection, by somebody who knows nothing of volumes."""
        raise NotImplementedError

    def test_what_is_not_there_is_not_held(self, holder: Holder) -> None:
        assert holder.find(KEY) is None
        assert holder.hold("csi:a", "test", KEY) is None
        assert holder.held() == set()

    def test_what_is_held_stays(self, holder: Holder) -> None:
        made = make(holder)
        assert holder.hold("csi:a", "test", KEY) == made
        make(holder, OTHER)
        self.collect(holder)
        assert holder.find(KEY) == made
        assert (made.layers[0] / "f").read_text() == "content"
        assert holder.find(OTHER) is None
        holder.release("csi:a")
        self.collect(holder)
        assert holder.find(KEY) is None

    def test_holding_outlives_the_process(self, holder: Holder) -> None:
        made = make(holder)
        holder.hold("csi:a", "test", KEY)
        holder.hold("writable:b", "test", KEY, durable=True)
        again = self.reopen(holder)
        assert again.held() == {"csi:a", "writable:b"}
        again.tidy()
        self.collect(again)
        assert again.find(KEY) == made
        again.release("csi:a")
        self.collect(again)
        assert again.find(KEY) == made
        again.release("writable:b")
        assert again.held() == set()
        self.collect(again)
        assert again.find(KEY) is None

    def test_holding_and_releasing_are_idempotent(self, holder: Holder) -> None:
        make(holder)
        for _ in range(2):
            assert holder.hold("csi:a", "test", KEY, durable=True)
        assert holder.held() == {"csi:a"}
        for _ in range(2):
            holder.release("csi:a")
            holder.release("csi:never-there")
        assert holder.held() == set()

    def test_a_name_keeps_what_it_has_when_more_comes(self, holder: Holder) -> None:
        make(holder)
        make(holder, OTHER)
        holder.hold("csi:a", "test", KEY)
        assert holder.hold("csi:a", "test", OTHER)
        assert holder.hold("csi:a", "test", Digest.of(b"none")) is None
        self.collect(holder)
        assert holder.find(KEY)
        assert holder.find(OTHER)
        assert holder.held() == {"csi:a"}

    def test_whoever_holds_in_the_moment_of_a_collection_has_it_or_knows(self, holder: Holder) -> None:
        """Never a tree that is held, said to be there, and gone."""
        with ThreadPoolExecutor(2) as pool:
            for number in range(8):
                make(holder)
                start = threading.Barrier(2)

                def collecting(start: threading.Barrier = start) -> None:
                    start.wait()
                    self.collect(holder)

                running = pool.submit(collecting)
                start.wait()
                tree = holder.hold(f"csi:{number}", "test", KEY)
                running.result()
                if tree is None:
                    assert f"csi:{number}" not in holder.held()
                    continue
                self.collect(holder)
                assert holder.find(KEY) == tree
                assert (tree.layers[0] / "f").read_text() == "content"
                holder.release(f"csi:{number}")
                self.collect(holder)
