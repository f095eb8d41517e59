"""`unlade node serve`: what it makes of its options, and what it says when it cannot start."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import urllib3

from unlade.cli import main
from unlade.cli.node import _handler
from unlade.cli.service import JsonLines, address
from unlade.containerd import Handler
from unlade.cri.observed import Metrics, Window
from unlade.errors import InvalidInput
from unlade.model import Platform


def test_handlers_and_addresses() -> None:
    assert _handler("vm=linux/arm64/v8") == Handler("vm", Platform.parse("linux/arm64/v8"), "")
    windows = Platform("windows", "amd64", os_version="10.0.20348", os_features=("win32k",))
    assert _handler("hcs=windows(10.0.20348+win32k)/amd64") == Handler("hcs", windows, "")
    assert _handler("vm=linux/arm64,native") == Handler("vm", Platform.parse("linux/arm64"), "native")
    assert address("127.0.0.1:9753") == ("127.0.0.1", 9753)
    assert address("[::1]:0") == ("::1", 0)
    for text in ("vm", "=linux/arm64", "vm=", "vm=linux/arm64,", "vm=linux"):
        with pytest.raises(InvalidInput):
            _handler(text)
    for text in ("9753", "host:", "host:http"):
        with pytest.raises(InvalidInput):
            address(text)


def test_a_wrong_option_ends_before_anything_is_touched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["node", "serve", "--socket", f"{tmp_path}/s", "--handler", "vm", "--listen", "127.0.0.1:0"]
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 3
    assert "next: write NAME=" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_log_lines_name_the_pod() -> None:
    record = logging.LogRecord("unlade.cri", logging.INFO, "f", 1, "pulled", (), None)
    record.about = {"pod": "n/p", "seconds": 1.5}
    line = json.loads(JsonLines().format(record))
    assert (line["message"], line["pod"], line["seconds"]) == ("pulled", "n/p", 1.5)


def test_the_window() -> None:
    reasons = {"healthy": "", "ready": "containerd does not answer"}
    window = Window(
        "127.0.0.1", 0, Metrics(), healthy=lambda: reasons["healthy"], ready=lambda: reasons["ready"]
    )
    try:
        with urllib3.PoolManager(retries=False) as pool:
            base = f"http://127.0.0.1:{window.port}"
            assert pool.request("GET", f"{base}/healthz").data == b"ok\n"
            ready = pool.request("GET", f"{base}/readyz")
            assert (ready.status, ready.data) == (500, b"containerd does not answer\n")
            assert b"unlade_node_fetched_bytes_total 0.0" in pool.request("GET", f"{base}/metrics").data
            assert pool.request("GET", f"{base}/other").status == 404
    finally:
        window.close()
