"""The kubelet's credential provider plugins, as real programs (V4)."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from unlade.registry import (
    Credential,
    InvalidCredentials,
    KubeletProviderCredentials,
    ServiceAccount,
    providers,
)
from unlade.registry.durations import parse_duration

API = "credentialprovider.kubelet.k8s.io/v1"


class Plugins:
    """A plugin directory and a kubelet's configuration of it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "plugins"
        self.directory.mkdir()
        self.config = directory / "config.yaml"
        self.entries: list[dict[str, Any]] = []

    def add(self, name: str, script: str, *match: str, **options: Any) -> None:
        """A provider that is a shell script; what it is asked is kept in NAME.asked, one line each."""
        program = self.directory / name
        asked = self.directory / f"{name}.asked"
        program.write_text(f"#!/bin/sh\ncat >> {asked}; echo >> {asked}\n{script}\n")
        program.chmod(0o755)
        entry = {"name": name, "matchImages": list(match), "apiVersion": API, "defaultCacheDuration": "1h"}
        self.entries.append({**entry, **options})

    def source(self) -> KubeletProviderCredentials:
        document = {
            "apiVersion": "kubelet.config.k8s.io/v1",
            "kind": "CredentialProviderConfig",
            "providers": self.entries,
        }
        self.config.write_text(json.dumps(document))
        return KubeletProviderCredentials(str(self.config), str(self.directory))

    def asked(self, name: str) -> list[dict[str, str]]:
        file = self.directory / f"{name}.asked"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture
def plugins(tmp_path: Path) -> Plugins:
    return Plugins(tmp_path)


def answer(auth: dict[str, Any], cache: str = "Registry", **more: Any) -> str:
    document = {
        "kind": "CredentialProviderResponse",
        "apiVersion": API,
        "cacheKeyType": cache,
        "auth": auth,
        **more,
    }
    return f"cat <<'END'\n{json.dumps(document)}\nEND"


def test_a_provider_is_asked_for_the_images_it_matches(plugins: Plugins) -> None:
    plugins.add("ecr", answer({"*.ecr.example": {"username": "AWS", "password": "p"}}), "*.ecr.example")
    source = plugins.source()
    assert source.lookup("1.ecr.example", "team/app") == [Credential("AWS", "p")]
    assert source.lookup("ecr.example", "team/app") == []
    assert plugins.asked("ecr") == [
        {"kind": "CredentialProviderRequest", "apiVersion": API, "image": "1.ecr.example/team/app"}
    ]


@pytest.mark.parametrize(("cache", "runs"), [("Image", 3), ("Registry", 2), ("Global", 1)])
def test_answers_are_kept_as_they_ask_to_be(plugins: Plugins, cache: str, runs: int) -> None:
    plugins.add("any", answer({"*.example": {"username": "u", "password": "p"}}, cache), "*.example")
    source = plugins.source()
    for _ in range(2):
        for image in (("a.example", "x"), ("a.example", "y"), ("b.example", "x")):
            assert source.lookup(*image) == [Credential("u", "p")]
    assert len(plugins.asked("any")) == runs


def test_a_duration_of_nothing_is_not_kept(plugins: Plugins) -> None:
    plugins.add(
        "any", answer({"r.example": {"username": "u", "password": "p"}}, cacheDuration="0s"), "r.example"
    )
    source = plugins.source()
    source.lookup("r.example", "a")
    source.lookup("r.example", "a")
    assert len(plugins.asked("any")) == 2


def test_several_providers_and_keys(plugins: Plugins) -> None:
    plugins.add("one", answer({"r.example": {"username": "a", "password": "1"}}), "r.example")
    two = {
        "r.example": {"username": "b", "password": "2"},
        "r.example/team": {"username": "c", "password": "3"},
    }
    plugins.add("two", answer(two), "r.example/team")
    source = plugins.source()
    assert source.lookup("r.example", "team/app") == [
        Credential("a", "1"),
        Credential("c", "3"),
        Credential("b", "2"),
    ]
    assert source.lookup("r.example", "other") == [Credential("a", "1")]


def test_arguments_and_environment(plugins: Plugins) -> None:
    secret = {"username": "$1", "password": "$SECRET"}
    script = answer({"r.example": secret}, "Image").replace(
        "'END'", "END"
    )  # the shell fills in the variables
    plugins.add("env", script, "r.example", args=["from-args"], env=[{"name": "SECRET", "value": "from-env"}])
    assert plugins.source().lookup("r.example", "a") == [Credential("from-args", "from-env")]


def test_many_threads_run_a_provider_once(plugins: Plugins) -> None:
    plugins.add(
        "slow", "sleep 0.2\n" + answer({"r.example": {"username": "u", "password": "p"}}), "r.example"
    )
    source = plugins.source()
    found: list[object] = []
    threads = [
        threading.Thread(target=lambda: found.append(source.lookup("r.example", "a"))) for _ in range(10)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[Credential("u", "p")]] * 10
    assert len(plugins.asked("slow")) == 1


@pytest.mark.parametrize(
    "script",
    [
        "echo secret-output; exit 1",
        "echo secret-output",
        "echo '{}'",
        answer({}, "Sometimes"),
        answer({}, cacheDuration="secret-output"),
        answer({}).replace(API, "credentialprovider.kubelet.k8s.io/v9"),
        answer({"r.example": "secret-output"}),
        "exec sleep 60",
    ],
)
def test_a_provider_that_fails(plugins: Plugins, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.setattr(providers, "_SECONDS", 0.5)
    plugins.add("bad", script, "r.example")
    with pytest.raises(InvalidCredentials, match="bad") as caught:
        plugins.source().lookup("r.example", "a")
    assert "secret-output" not in f"{caught.value} {caught.value.next_step}"


def test_a_provider_that_is_missing(plugins: Plugins) -> None:
    plugins.add("gone", "", "r.example")
    (plugins.directory / "gone").unlink()
    with pytest.raises(InvalidCredentials, match="not installed"):
        plugins.source().lookup("r.example", "a")


@pytest.mark.parametrize("name", ["../evil", "/bin/sh", "..", ".", "", "a b", "a/b"])
def test_a_provider_has_a_plain_name(plugins: Plugins, name: str) -> None:
    plugins.entries.append({"name": name, "matchImages": ["r.example"], "apiVersion": API})
    with pytest.raises(InvalidCredentials):
        plugins.source()


def test_the_configuration_is_yaml(plugins: Plugins) -> None:
    plugins.config.write_text(
        "apiVersion: kubelet.config.k8s.io/v1\nkind: CredentialProviderConfig\nproviders:\n"
        f'- name: x\n  matchImages: ["r.example"]\n  apiVersion: {API}\n  defaultCacheDuration: "0s"\n'
    )
    assert KubeletProviderCredentials(str(plugins.config), "/nowhere").lookup("s.example", "a") == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[",
        "kind: CredentialProviderConfig",
        "apiVersion: v1\nkind: Secret\nproviders: []",
        "apiVersion: kubelet.config.k8s.io/v9\nkind: CredentialProviderConfig\nproviders: []",
        "apiVersion: kubelet.config.k8s.io/v1\nkind: CredentialProviderConfig\nproviders: {}",
        "apiVersion: kubelet.config.k8s.io/v1\nkind: CredentialProviderConfig\n"
        "providers: [{name: x, matchImages: [a], apiVersion: other/v1}]",
        "!!python/object/apply:os.system [true]",
    ],
)
def test_a_configuration_that_is_none(plugins: Plugins, text: str) -> None:
    plugins.config.write_text(text)
    with pytest.raises(InvalidCredentials):
        KubeletProviderCredentials(str(plugins.config), str(plugins.directory))


def test_a_configuration_that_is_missing(plugins: Plugins) -> None:
    with pytest.raises(InvalidCredentials, match="cannot be read"):
        KubeletProviderCredentials(str(plugins.config), str(plugins.directory))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0", 0), ("0s", 0), ("12h", 43200), ("1m30.5s", 90.5), ("1ms", 0.001), ("1h0m0s", 3600)]
    + [(bad, None) for bad in ("", "1", "s", "-1s", "1d", "1s ", "９s", "9" * 30 + "s", "1s" * 100)],
)
def test_durations(text: str, seconds: float | None) -> None:
    assert parse_duration(text) == seconds


class TestServiceAccountTokens:
    """Providers that trade the pod's own token (kubelet: tokenAttributes)."""

    def wanting(self, plugins: Plugins, **attributes: Any) -> KubeletProviderCredentials:
        wants = {"serviceAccountTokenAudience": "aud", "cacheType": "Token", "requireServiceAccount": True}
        plugins.add(
            "p",
            answer({"r.example": {"username": "u", "password": "s"}}),
            "r.example",
            tokenAttributes={**wants, **attributes},
        )
        return plugins.source()

    def test_the_token_is_passed_and_answers_are_for_it_alone(self, plugins: Plugins) -> None:
        source = self.wanting(plugins)
        one, two = (ServiceAccount("ns", "sa", "uid", {"aud": token}) for token in ("t1", "t2"))
        for account in (one, one, two):
            assert source.acting_for(account).lookup("r.example", "a") == [Credential("u", "s")]
        assert [asked["serviceAccountToken"] for asked in plugins.asked("p")] == ["t1", "t2"]

    def test_answers_may_be_for_the_account(self, plugins: Plugins) -> None:
        source = self.wanting(plugins, cacheType="ServiceAccount")
        for namespace, token in (("a", "t1"), ("a", "t2"), ("b", "t3")):
            source.acting_for(ServiceAccount(namespace, "sa", "uid", {"aud": token})).lookup("r.example", "a")
        assert [asked["serviceAccountToken"] for asked in plugins.asked("p")] == ["t1", "t3"]

    def test_without_what_it_wants_a_provider_is_not_asked(self, plugins: Plugins) -> None:
        source = self.wanting(plugins)
        assert source.lookup("r.example", "a") == []
        other = ServiceAccount("ns", "sa", "uid", {"other": "t"})
        assert source.acting_for(other).lookup("r.example", "a") == []
        plugins.entries.clear()
        annotated = self.wanting(plugins, requiredServiceAccountAnnotationKeys=["example.com/role"])
        known = ServiceAccount("ns", "sa", "uid", {"aud": "t"})
        assert annotated.acting_for(known).lookup("r.example", "a") == []
        assert plugins.asked("p") == []

    def test_one_that_can_do_without_is_asked_without(self, plugins: Plugins) -> None:
        source = self.wanting(plugins, requireServiceAccount=False)
        assert source.lookup("r.example", "a") == [Credential("u", "s")]
        assert "serviceAccountToken" not in plugins.asked("p")[0]
