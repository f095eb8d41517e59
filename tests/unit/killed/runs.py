"""`python -m tests.unit.killed.runs HOST WORK SEED RUNS PART PARTS`: kill, check, try again; JSON lines.

A process of its own without threads, which forks a child for every command: SIGKILL then hits a whole process
of ours, and starting one costs milliseconds. Children whose parent was killed come to this process, so that
one that does not end is found. Each pair of scene and point is taken once before any is taken twice; from
then on the retry is killed as well, at a point of its own, before the last try.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.unit.killed.scenes import OLD, SCENES, Listing, Place, Scene, clear, listing, run, succeed
from unlade.cli.root import COMMANDS
from unlade.kernel import failpoints

PR_SET_CHILD_SUBREAPER = 36


class Wrong(Exception):
    """A check that failed; the child's own words."""


class Runs:
    """All runs of one seed."""

    def __init__(self, host: str, work: Path) -> None:
        self._host = host
        self._work = work
        self._said = work / "said"
        self._number = 0
        self.contents: dict[str, Listing] = {"old": {}}
        for name in ("app:v1", "app:v2", "by:v1", "model:v1"):
            place = Place(work / "content", host)
            place.root.mkdir()
            self.child(succeed, place, "pull", f"REGISTRY/{name}", "OUT")
            self.contents[name] = listing(place.root / "out")
            clear(place)
        self._templates: dict[str, Path] = {}

    def child(self, task: Callable[..., object], *arguments: object, point: str = "") -> int:
        """Run in a process of its own; 0, the exit code, or the negative signal. Raises Wrong."""
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                with self._said.open("w") as said:
                    os.dup2(said.fileno(), 2)
                with open(os.devnull, "w") as nowhere:
                    os.dup2(nowhere.fileno(), 1)
                if point:
                    failpoints._armed = failpoints._Armed(point)
                code = int(task(*arguments) or 0)  # type: ignore[call-overload]
            except BaseException:
                traceback.print_exc()
                code = 99
            finally:
                os._exit(code)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status == 99:
            raise Wrong(self._said.read_text()[-3000:])
        return status

    def points(self, scene: Scene) -> list[str]:
        """Every name:ordinal that an undisturbed run of the scene passes."""
        place = self._begin(scene)
        trace = self._work / "trace"

        def traced() -> int:
            passed: list[str] = []

            def note(name: str) -> None:
                passed.append(name)

            failpoints.reach = note
            code = run(place, *scene.command)
            trace.write_text("\n".join(passed))
            return code

        assert self.child(traced) == 0, self._said.read_text()
        self.child(scene.check_done, place, self.contents)
        clear(place)
        seen: Counter[str] = Counter()
        found = []
        for name in trace.read_text().split():
            seen[name] += 1
            found.append(f"{name}:{seen[name]}")
        return found

    def one(self, scene: Scene, *points: str) -> bool:
        """Kill at each point in turn, check after each, then succeed. False: the first was not reached."""
        place = self._begin(scene)
        killed = 0
        for point in points:
            status = self.child(run, place, *scene.command, point=point)
            self._reap()
            if status != -signal.SIGKILL:
                if status != 0 and status not in scene.again:
                    raise Wrong(f"exit {status} at {point}: {self._said.read_text()[-2000:]}")
                break
            killed += 1
            self.child(scene.check_killed, place, self.contents)
        status = self.child(run, place, *scene.command)
        if status != 0 and status not in scene.again:
            raise Wrong(f"the retry after {points} ended with {status}: {self._said.read_text()[-2000:]}")
        self.child(scene.check_done, place, self.contents)
        clear(place)
        return killed > 0

    def _begin(self, scene: Scene) -> Place:
        self._number += 1
        template = self._templates.get(scene.name)
        if template is None:
            template = self._work / f"template-{len(self._templates)}"
            self.child(scene.set_up, Place(template, self._host))
            self._templates[scene.name] = template
        place = Place(self._work / f"run-{self._number}", self._host, self._number)
        subprocess.run(["cp", "-a", str(template), str(place.root)], check=True)
        if scene.pushed:
            self.child(self._push_old, place, scene)
        self.child(scene.begin, place)
        return place

    def _push_old(self, place: Place, scene: Scene) -> None:
        old = Place(place.root / "old", self._host, place.number)
        for name, data in OLD.items():
            path = old.root / "src" / name
            path.parent.mkdir(parents=True)
            path.write_bytes(data)
        succeed(old, "push", "--image", "SRC", scene.pushed)

    def _reap(self) -> None:
        """Whatever the killed one had started must end by itself."""
        end = time.monotonic() + 20
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                if time.monotonic() > end:
                    raise Wrong("a worker outlives the process that started it")
                time.sleep(0.005)


def plan(every: list[tuple[Scene, str]], runs: int, chance: random.Random) -> list[tuple[Scene, list[str]]]:
    """Which points: a sample, or each once and then pairs of them."""
    if runs <= len(every):
        return [(scene, [point]) for scene, point in chance.sample(every, runs)]
    by_scene: dict[str, list[str]] = {}
    for scene, point in every:
        by_scene.setdefault(scene.name, []).append(point)
    twice = [chance.choice(every) for _ in range(runs - len(every))]
    return [(scene, [point]) for scene, point in every] + [
        (scene, [point, chance.choice(by_scene[scene.name])]) for scene, point in twice
    ]


def main(host: str, work: str, seed: str, count: str, part: str, parts: str) -> None:
    """Write the points of each scene, then the outcome of each run of one part of so many."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # Imported here once, not in every child: commands import what they need when they are called.
    for module in (
        *(COMMANDS[name][0] for name in ("pull", "push", "mount", "images", "gc")),
        "unlade.library",
    ):
        importlib.import_module(module)
    runs = Runs(host, Path(work))
    runs.contents["old"] = {}
    every = []
    for scene in SCENES:
        every += [(scene, point) for point in runs.points(scene)]
    runs.contents["old"] = _old(Path(work))
    tell(pairs=len(every), points=sorted({point for _, point in every}))
    chosen = plan(every, int(count), random.Random(int(seed)))
    for scene, points in chosen[int(part) :: int(parts)]:
        try:
            tell(scene=scene.name, points=points, killed=runs.one(scene, *points), wrong="")
        except (Wrong, AssertionError) as error:
            tell(scene=scene.name, points=points, killed=True, wrong=str(error))


def _old(work: Path) -> Listing:
    place = work / "old-content"
    for name, data in OLD.items():
        (place / name).parent.mkdir(parents=True)
        (place / name).write_bytes(data)
    for directory in (path for path in place.rglob("*") if path.is_dir()):
        directory.chmod(0o755)
    return listing(place)


def tell(**facts: object) -> None:
    """One line for the test."""
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
