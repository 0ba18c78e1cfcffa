"""What can be given as a store, and where its cache lies."""

from pathlib import Path

import pytest

from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.store.address import address, default_address


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.delenv("ENGINESMITH_CACHE", raising=False)
    monkeypatch.delenv("ENGINESMITH_STORE", raising=False)


def test_a_path_is_a_folder_of_this_machine(tmp_path: Path) -> None:
    for given in ("store", Path("store"), tmp_path / "store"):
        found = address(given)
        assert (found.text, found.folder, found.url) == (str(tmp_path / "store"), tmp_path / "store", "")


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("s3://team/store/", "s3://team/store"),
        ("S3://Team/Store", "s3://Team/Store"),
        ("sftp://me@host:22/store", "sftp://me@host:22/store"),
        ("abfs://container@account.dfs.core.windows.net/x", "abfs://container@account.dfs.core.windows.net/x"),
        ("file:///mnt/store", "file:///mnt/store"),
    ],
)
def test_a_url_is_shared_and_has_a_cache_of_its_own(given: str, url: str, tmp_path: Path) -> None:
    found = address(given)
    assert found.text == found.url == url.format(here=tmp_path)
    assert found.folder.parent == tmp_path / "user" / "enginesmith-shared"
    assert address(found.text) == found
    assert address("s3://team/other").folder != found.folder


def test_the_cache_can_be_put_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINESMITH_CACHE", str(tmp_path / "fast"))
    assert address("s3://team/store").folder.parent == tmp_path / "fast"
    assert address("store").folder == tmp_path / "store"


@pytest.mark.parametrize(
    ("given", "variables"),
    [
        ("s3://AKIA:se/cr3t@team/store", "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
        ("sftp://me:se/cr3t@host/store", "FSSPEC_SFTP_PASSWORD"),
        ("abfs://container/x?sig=se/cr3t", "AZURE_STORAGE_ACCOUNT_KEY"),
    ],
)
def test_credentials_in_a_url_are_refused_and_not_repeated(given: str, variables: str) -> None:
    with pytest.raises(UsageError) as caught:
        address(given)
    assert variables in str(caught.value)
    assert "cr3t" not in str(caught.value)


@pytest.mark.parametrize("given", ["s3://", "s3:///", "simplecache::s3://team/x", "s3://team/x::file://y"])
def test_other_places_are_refused(given: str) -> None:
    with pytest.raises(UsageError, match="no place for a store"):
        address(given)


@pytest.mark.parametrize(
    ("given", "words"), [("file://store", "did you mean file:///store"), ("http://host/store", "cannot be written to")]
)
def test_places_that_could_not_be_shared(given: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        address(given)


def test_a_url_that_became_a_path_is_noticed() -> None:
    with pytest.raises(UsageError, match="lost a slash"):
        address(Path("s3://team/store"))


def test_the_environment_names_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_address().folder == tmp_path / "user" / "enginesmith"
    monkeypatch.setenv("ENGINESMITH_STORE", str(tmp_path / "here"))
    assert default_address().folder == tmp_path / "here"
    monkeypatch.setenv("ENGINESMITH_STORE", "s3://team/store")
    assert default_address().url == "s3://team/store"
