"""The store: whole entries or none, damage noticed, other people's files left alone."""

import contextlib
import errno
import functools
import json
import os
import platform
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from enginesmith.cli import main
from enginesmith.pipeline.artifact import Artifact, HistoryEntry, write_whole
from enginesmith.pipeline.errors import StoreError, UsageError
from enginesmith.pipeline.execution.local import LocalExecutor
from enginesmith.pipeline.store import inputs
from enginesmith.pipeline.store.address import default_address, parse_address
from enginesmith.pipeline.store.manifest import MANIFEST
from enginesmith.pipeline.store.store import Store

HISTORY = (HistoryEntry(step="export", parameters={}, tools={}, seconds=1.0, host_peak_bytes=None, effect="made"),)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def put(store: Store, key: str, content: bytes = b"graph") -> Artifact:
    with store.workspace() as folder:
        (folder / "model.onnx").write_bytes(content)
        (folder / "sub").mkdir()
        (folder / "sub" / "weights").write_bytes(b"w")
        return store.publish(key, folder, kind="onnx", file="model.onnx", signature=None, history=HISTORY)


def test_what_was_published_is_found_again(store: Store) -> None:
    made = put(store, "ab" * 32)
    found = Store(store.root).get("ab" * 32)
    assert found == made
    assert found.path.read_bytes() == b"graph"
    assert found.bytes == 6
    assert store.get("cd" * 32) is None


def test_same_content_has_the_same_digest_under_any_key(store: Store) -> None:
    assert put(store, "ab" * 32).sha256 == put(store, "cd" * 32).sha256
    assert put(store, "ef" * 32, b"other").sha256 != put(store, "ab" * 32).sha256


@pytest.mark.parametrize(("umask", "rights"), [(0o022, 0o644), (0o007, 0o660), (0o077, 0o600)])
def test_files_have_the_rights_that_the_umask_gives(store: Store, umask: int, rights: int) -> None:
    """Those that libraries write for their owner only, too; programs can still be run."""
    before = os.umask(umask)
    try:
        write_whole(store.root / "whole", b"1")
        write_whole(store.root / "whole", b"2")
        with store.workspace() as folder:
            for name, own in (("state.safetensors", 0o600), ("program", 0o755)):
                (folder / name).touch()
                (folder / name).chmod(own)
            made = store.publish("ab" * 32, folder, kind="torch", file="program", signature=None, history=())
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (store.root / "whole", *made.folder.iterdir())}
    assert modes == {"whole": rights, "state.safetensors": rights, "artifact.json": rights, "program": 0o755 | rights}
    assert (store.root / "whole").read_bytes() == b"2"
    assert Store(store.root).get("ab" * 32) == made


def test_a_damaged_entry_that_cannot_be_removed_is_not_said_to_be(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "ab" * 32).path.write_bytes(b"grapH")
    monkeypatch.setattr(Path, "rename", lambda *_: raise_denied())
    with pytest.raises(StoreError, match=r"1 of 1 damaged entries of the store .* cannot be removed"):
        store.verify()


def raise_denied() -> None:
    raise PermissionError(13, "Permission denied")


@pytest.mark.parametrize("harm", ["change", "truncate", "remove", "add", "manifest", "history"])
def test_a_damaged_entry_is_noticed_and_removed(store: Store, harm: str) -> None:
    path = put(store, "ab" * 32).path
    if harm == "change":
        path.write_bytes(b"grapH")
    elif harm == "truncate":
        path.write_bytes(b"gra")
    elif harm == "remove":
        (path.parent / "sub" / "weights").unlink()
    elif harm == "add":
        (path.parent / "more").touch()
    elif harm == "manifest":
        (path.parent / "artifact.json").write_text('{"kind": "onnx"')
    else:
        manifest = path.parent / "artifact.json"
        manifest.write_text(manifest.read_text().replace('"made"', '"made up"'))
    said: list[str] = []
    assert Store(store.root, tell=said.append).get("ab" * 32) is None
    assert said == [f"the store {store.root}: the entry {'ab' * 8} is damaged; it is ignored"]
    assert not path.parent.exists()
    assert store.get("ab" * 32) is None


def test_a_large_file_is_hashed_again_once_its_inode_changed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("enginesmith.pipeline.store.manifest._ALWAYS_HASH_BYTES", 0)
    path = put(store, "ab" * 32).path
    hashed: list[Path] = []
    monkeypatch.setattr("enginesmith.pipeline.store.manifest.file_digest", lambda path: hashed.append(path) or "x")
    assert store.get("ab" * 32) is not None
    assert hashed == []
    path.write_bytes(b"grapH")
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert store.get("ab" * 32) is None
    assert set(hashed) == {path}


def test_work_that_is_not_published_leaves_nothing(store: Store) -> None:
    with contextlib.suppress(RuntimeError), store.workspace() as folder:
        (folder / "half").write_bytes(b"x")
        raise RuntimeError
    assert list((store.root / "tmp").iterdir()) == []
    assert store.entries() == []


def test_without_reuse_only_own_work_is_found(store: Store) -> None:
    put(store, "ab" * 32)
    fresh = Store(store.root, reuse=False)
    assert fresh.get("ab" * 32) is None
    put(fresh, "ab" * 32, b"newer")
    found = fresh.get("ab" * 32)
    assert found.path.read_bytes() == b"newer"


def test_a_whole_entry_of_another_process_stays(store: Store) -> None:
    first = put(store, "ab" * 32)
    inode = first.path.stat().st_ino
    assert put(Store(store.root), "ab" * 32).path.stat().st_ino == inode


def test_verify_reads_every_byte(store: Store) -> None:
    put(store, "ab" * 32)
    path = put(store, "cd" * 32).path
    path.write_bytes(b"Graph")
    assert store.verify() == ["cd" * 32]
    assert [entry.key for entry in store.entries()] == ["ab" * 32]


def test_prune_removes_what_was_not_used_lately(store: Store) -> None:
    for key in ("ab" * 32, "cd" * 32, "ef" * 32):
        put(store, key)
    now = time.time()
    for age, key in ((3, "ab" * 32), (2, "cd" * 32), (1, "ef" * 32)):
        os.utime(store.root / "objects" / key[:2] / key, (now - age * 1000,) * 2)
    assert [entry.key for entry in store.prune(max_age_seconds=2500)] == ["ab" * 32]
    assert [entry.key for entry in store.prune(max_bytes=store.size() - 1)] == ["cd" * 32]
    assert [entry.key for entry in store.entries()] == ["ef" * 32]


def test_prune_spares_what_was_used_since_a_process_at_work_began(store: Store) -> None:
    unused, used = put(store, "ab" * 32), put(store, "cd" * 32)
    with LocalExecutor(store, 1):
        for artifact in (unused, used):
            os.utime(artifact.folder, (1, 1))
        assert store.get("cd" * 32) == used
        made = put(store, "ef" * 32)
        assert [entry.key for entry in Store(store.root).prune(max_bytes=0)] == ["ab" * 32]
        assert (used.path.exists(), made.path.exists()) == (True, True)
    assert len(Store(store.root).prune(max_bytes=0)) == 2
    assert list((store.root / "tmp").iterdir()) == []


def test_prune_removes_what_is_left_of_an_entry_without_its_manifest(store: Store) -> None:
    whole, damaged = (put(store, key).path.parent for key in ("ab" * 32, "cd" * 32))
    (damaged / MANIFEST).unlink()
    store.prune()
    assert (whole.exists(), damaged.exists()) == (True, False)


def test_prune_counts_and_removes_small_files_too(store: Store) -> None:
    put(store, key := "ab" * 32)
    now = time.time()
    files = {"reads/x/gone.json": 9, "timing/sm86.cache": 5, "kernels/k.cache": 3, "reads/y/new.json": 0}
    for name, age in files.items():
        (store.root / name).parent.mkdir(parents=True, exist_ok=True)
        (store.root / name).write_bytes(b"x" * 1000)
        os.utime(store.root / name, (now - age * 1000,) * 2)
    os.utime(store.root / "objects/ab" / key, (now - 4000,) * 2)
    prune = ["cache", "prune", "--json", "--store", str(store.root), "--max-size"]
    limit = store.size() - 1500  # the list of an entry that is gone is removed first
    facts = json.loads(CliRunner().invoke(main, [*prune, f"{limit}B"]).output)
    assert facts == {"removed": 0, "removed_files": 2, "freed_bytes": 2000, "left_bytes": limit - 500}
    assert [entry.key for entry in store.prune(max_bytes=2500)] == [key]
    assert "total: 1.95 KiB" in CliRunner().invoke(main, ["cache", "list", "--store", str(store.root)]).output
    told = CliRunner().invoke(main, [*prune[:2], *prune[3:], "0B"]).output
    assert told == "removed: 0\nremoved_files: 2\nfreed: 1.95 KiB\nleft: 0 B\n"
    wrong = CliRunner().invoke(main, ["cache", "list", "--store", str(store.root / "reads")])
    assert (wrong.exit_code, "there is no store in" in wrong.output) == (2, True)


def test_opening_clears_up_after_dead_processes_of_this_machine_only(store: Store) -> None:
    here = platform.node()
    dead, alive, elsewhere = (
        store.root / "tmp" / name for name in (f"999999999@{here}-x", f"{os.getpid()}@{here}-y", "999999999@other-z")
    )
    for folder in (dead, alive, elsewhere):
        folder.mkdir()
    Store(store.root)
    assert not dead.exists()
    assert alive.exists()
    assert elsewhere.exists()


def test_work_of_a_process_in_another_container_is_left_alone(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers on the host's network have its name, and process numbers that mean nothing elsewhere."""
    monkeypatch.setattr("enginesmith.pipeline.store.store._workspace_name", lambda: f"999999999@{platform.node()}-x")
    with store.workspace() as folder:
        Store(store.root)
        assert folder.exists()
    assert not folder.exists()


def test_a_place_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="not a directory"):
        Store(tmp_path / "file" / "store")


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Containers run as any user id, with no entry in /etc/passwd, and with a home that is read-only or absent."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    for name in ("ENGINESMITH_STORE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    with pytest.raises(UsageError, match="HOME is not set") as caught:
        Store()
    assert "ENGINESMITH_STORE" in caught.value.remedy
    inputs._anchors.cache_clear()
    assert inputs.from_portable_path(inputs.to_portable_path(str(tmp_path))) == str(tmp_path)
    inputs._anchors.cache_clear()
    monkeypatch.setattr(Path, "mkdir", _refuse)
    with pytest.raises(StoreError) as refused:
        Store(tmp_path / "store")
    assert "ENGINESMITH_STORE" in refused.value.remedy


@pytest.mark.parametrize(
    ("address", "place", "remedy"),
    [
        ("{}/store", "the store {}/store", "give --store, or set ENGINESMITH_STORE to"),
        ("file://{}/far", "the cache {}/cache/", "set ENGINESMITH_CACHE to"),
    ],
)
def test_a_store_that_may_only_be_read_is_named_with_how_to_take_another(
    address: str, place: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINESMITH_CACHE", str(tmp_path / "cache"))
    put(Store(address.format(tmp_path)), "ab" * 32)
    monkeypatch.setattr(Path, "mkdir", lambda self, **_: _refuse() if self.parent.name in ("tmp", "begun") else None)
    store = Store(address.format(tmp_path))
    assert store.get("ab" * 32) is not None
    for begin in (store.workspace, functools.partial(store.partial_work, "work")):
        with pytest.raises(StoreError) as refused, begin():
            pass
        assert refused.value.message.startswith(place.format(tmp_path))
        assert refused.value.message.endswith(": permission denied")
        assert refused.value.remedy == f"{remedy} a folder that you may write to"


def _refuse(*_: object, **__: object) -> None:
    raise PermissionError(errno.EACCES, "Permission denied")


def test_what_was_begun_is_found_again_until_it_is_done(store: Store) -> None:
    def interrupted() -> None:
        with store.partial_work("work") as folder:
            (folder / "half").write_bytes(b"so far")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [(entry.step, entry.bytes) for entry in store.entries()] == [("unfinished", 6)]
    with store.partial_work("work") as folder, store.partial_work("work") as other:
        assert (folder / "half").read_bytes() == b"so far"
        assert other != folder
        assert not list(other.iterdir())
        assert store.prune(max_bytes=0) == []  # somebody is at work on it
    assert store.entries() == []


def test_without_reuse_what_others_began_is_not_gone_on_from_and_what_it_begins_can_be(store: Store) -> None:
    for one, left in ((store, b"of before"), (Store(store.root, reuse=False), b"so far")):
        with contextlib.suppress(KeyboardInterrupt), one.partial_work("work") as folder:
            (folder / "state").mkdir()  # there is nothing yet
            (folder / "state" / "half").write_bytes(left)
            raise KeyboardInterrupt
    with store.partial_work("work") as folder:
        assert (folder / "state" / "half").read_bytes() == b"so far"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.delenv("ENGINESMITH_CACHE", raising=False)
    monkeypatch.delenv("ENGINESMITH_STORE", raising=False)


def test_a_path_is_a_folder_of_this_machine(tmp_path: Path) -> None:
    for given in ("store", Path("store"), tmp_path / "store"):
        found = parse_address(given)
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
    found = parse_address(given)
    assert found.text == found.url == url.format(here=tmp_path)
    assert found.folder.parent == tmp_path / "user" / "enginesmith-shared"
    assert parse_address(found.text) == found
    assert parse_address("s3://team/other").folder != found.folder


def test_the_cache_can_be_put_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINESMITH_CACHE", str(tmp_path / "fast"))
    assert parse_address("s3://team/store").folder.parent == tmp_path / "fast"
    assert parse_address("store").folder == tmp_path / "store"


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
        parse_address(given)
    assert variables in str(caught.value)
    assert "cr3t" not in str(caught.value)


@pytest.mark.parametrize("given", ["s3://", "s3:///", "simplecache::s3://team/x", "s3://team/x::file://y"])
def test_other_places_are_refused(given: str) -> None:
    with pytest.raises(UsageError, match="no valid address of a store"):
        parse_address(given)


@pytest.mark.parametrize(
    ("given", "words"), [("file://store", "did you mean file:///store"), ("http://host/store", "cannot be written to")]
)
def test_places_that_could_not_be_shared(given: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_address(given)


def test_a_url_that_became_a_path_is_noticed() -> None:
    with pytest.raises(UsageError, match="lost a slash"):
        parse_address(Path("s3://team/store"))


def test_the_environment_names_a_place_that_is_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_address().folder == tmp_path / "user" / "enginesmith"
    monkeypatch.setenv("ENGINESMITH_STORE", str(tmp_path / "here"))
    assert default_address().folder == tmp_path / "here"
    monkeypatch.setenv("ENGINESMITH_STORE", "s3://team/store")
    assert default_address().url == "s3://team/store"


def test_an_entry_stays_if_its_replacement_is_killed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    made, rename = put(store, "ab" * 32), Path.rename

    def kill_after_first(path: Path, target: Path) -> Path:
        if path.name == "ab" * 32:
            rename(path, target)
            monkeypatch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            return target
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", kill_after_first)
    with pytest.raises(KeyboardInterrupt):
        put(Store(store.root, reuse=False), "ab" * 32, b"other")
    monkeypatch.undo()
    assert store.get("ab" * 32) is None
    assert Store(store.root).get("ab" * 32) == made
    assert list((store.root / "tmp").iterdir()) == []


def test_a_killed_removal_leaves_no_half_of_an_entry(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(store, "ab" * 32).path
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        store.prune(max_bytes=0)
    assert not path.parent.exists()


def test_what_a_killed_writer_left_half_written_is_removed_after_a_day(store: Store) -> None:
    (store.root / "reads" / "x").mkdir()
    (store.root / "unshared").mkdir()
    put(store, "ab" * 32)
    old, new = store.root / "reads" / "x" / ".one.json.abc", store.root / "reads" / "x" / ".two.json.abc"
    known, unknown = store.root / "unshared" / ("ab" * 32), store.root / "unshared" / ("cd" * 32)
    for path in (old, new, known, unknown):
        path.write_bytes(b"{")
    for path in (old, known, unknown):
        os.utime(path, (time.time() - 2 * 86400,) * 2)
    store.prune(max_bytes=1 << 30)
    assert [path.exists() for path in (old, new, known, unknown)] == [False, True, True, False]


def test_a_large_file_that_lost_its_end_is_noticed_although_its_inode_is_as_it_was(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("enginesmith.pipeline.store.manifest._ALWAYS_HASH_BYTES", 0)
    monkeypatch.setattr("enginesmith.pipeline.store.manifest._inode", lambda status: (1, 1, 1))
    path = put(store, "ab" * 32).path
    assert store.get("ab" * 32) is not None
    os.truncate(path, 2)
    assert store.get("ab" * 32) is None
