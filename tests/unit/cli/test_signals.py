"""Interrupted in the middle: the documented code, soon, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fakes.httpd import Request, Response
from tests.fakes.registry import FakeRegistry
from unlade.model import mediatypes


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_pull(number: int, code: int, tmp_path: Path) -> None:
    with FakeRegistry() as fake:
        layers = [
            fake.put_blob("a/b", os.urandom(1 << 20), annotations={mediatypes.ANNOTATION_TITLE: f"f{n}"})
            for n in range(3)
        ]
        fake.put_artifact("a/b", "v1", layers, "application/x")

        def drip(request: Request, response: Response) -> Response | None:
            if "/blobs/" in request.path:
                response.drip = (4096, 0.05)
                return response
            return None

        fake.alter(drip)
        home = tmp_path / "home"
        home.mkdir()
        environment = {"PATH": os.environ["PATH"], "HOME": str(home), "UNLADE_PLAIN_HTTP": fake.host}
        process = subprocess.Popen(
            [sys.executable, "-m", "unlade", "pull", f"{fake.host}/a/b:v1", str(tmp_path / "out")],
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        end = time.monotonic() + 20
        while not fake.seen("GET", "/blobs/") and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(0.3)
        process.send_signal(number)
        sent = time.monotonic()
        out, err = process.communicate(timeout=30)
        assert time.monotonic() - sent < 10
    assert process.returncode == code, err
    assert out == b""
    assert b"Traceback" not in err
    assert os.listdir(tmp_path) == ["home"]


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    done = subprocess.run(
        f"{sys.executable} -m unlade completion bash | true; exit ${{PIPESTATUS[0]}}",
        shell=True,
        executable="/bin/bash",
        env=environment,
        capture_output=True,
        check=False,
    )
    assert done.returncode in (0, 141)
    assert done.stderr == b""
