"""Files: what they cost, what is read of them, that they go, and what happens when there is no room for them."""

from __future__ import annotations

import errno
import gc
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from specs import lm_of, prompts, tokens
from test_places import HEADS, ROWS, agree, chosen, filled, layout_of, reads, victims
from test_places import tokens as columns
from tiny import LAYERS

from kvatlas.engine.cache import KVCache
from kvatlas.errors import UserError
from kvatlas.strategy.place import folder as folders
from kvatlas.strategy.place.disk import Disk, FileSegment
from kvatlas.strategy.place.files import Record, SlotFile, aligned
from kvatlas.strategy.place.folder import Folder, direct_works, remove_leftovers
from kvatlas.strategy.place.tiers import TieredStore
from kvatlas.strategy.place.writeback import HOLDS
from kvatlas.strategy.spec import parse

RAGGED = (40, 23, 31)


def segment(store: Any) -> FileSegment:
    assert isinstance(store, TieredStore)
    (found,) = store.segments
    assert isinstance(found, FileSegment)
    return found


# ------------------------------------------------------------------- the same tokens


@pytest.mark.parametrize("more", ["", ":direct=false", ":overlap=false"])
@pytest.mark.parametrize(
    "spec", ["full", "h2o:0.3", "streaming:0.3", "oracle:0.2", "infinigen:0.2", "quest:0.3", "int4", "h2o:0.3+int8"]
)
def test_a_strategy_gives_the_same_tokens_from_files(spec: str, more: str) -> None:
    """More steps than wait to be written: evicting rules overwrite single slots in files."""
    lm, ids = lm_of("llama"), prompts(*RAGGED)
    with_files = f"{spec}+disk{more}" if spec != "full" else f"disk{more}"
    assert tokens(lm, ids, with_files, HOLDS + 8) == tokens(lm, ids, spec, HOLDS + 8)


@pytest.mark.parametrize("spec", ["disk", "h2o:0.3+disk", "infinigen:0.3+disk"])
def test_turns_and_forks_live_in_files(spec: str) -> None:
    lm, ids, turn = lm_of("llama"), prompts(*RAGGED), prompts(11)[0]
    caches = [lm.new_cache(s) for s in (spec, spec.replace("+disk", "").replace("disk", "full"))]
    outs = []
    for cache in caches:
        token = lm.prefill(cache, ids, 2).argmax(-1)
        lm.step(cache, token)
        cache.select_rows([1, 0, 0, 2])
        out = [lm.extend(cache, 1, turn).argmax(-1)]
        token = torch.tensor([5, 6, 7, 8])
        for _ in range(HOLDS + 4):
            token = lm.step(cache, token).argmax(-1)
            out.append(token)
        outs.append(torch.cat(out).tolist())
    assert outs[0] == outs[1]


# ----------------------------------------------------------------------------- bytes


def running(spec: str, steps: int = 4) -> KVCache:
    lm = lm_of("llama")
    cache = lm.new_cache(spec)
    logits = lm.prefill(cache, prompts(*RAGGED), steps + 1)
    for _ in range(steps):
        logits = lm.step(cache, logits.argmax(-1))
    return cache


@pytest.mark.parametrize("spec", ["disk", "h2o:0.3+disk", "oracle:0.2+disk", "infinigen:0.2+disk", "int4+disk"])
def test_bytes_are_the_closed_form_and_what_lies_on_the_disk(spec: str) -> None:
    cache = running(spec)
    held = cache.bytes()
    assert held.total == cache.bytes_held(RAGGED, 5)
    files = [file for layer in cache.layers for file in segment(layer.store).files]
    assert held.disk == sum(file.path.stat().st_size for file in files)
    assert held.disk <= sum(file.path.stat().st_blocks * 512 for file in files), "room was reserved"
    slot = sum(c.slot_bytes() for c in cache.layers[0].columns if c.kind == "payload")
    kept = sum(layer.held_tokens() * layer.facts.kv_heads for layer in cache.layers)
    assert held.device_payload + held.disk_payload == kept * slot
    assert min(held.device_payload, held.disk_payload, held.disk_padding, held.device_padding) > 0
    on_device = cache.shared.device_bytes()  # type: ignore[union-attr]
    for layer in cache.layers:
        held_here = [*layer.store.data.values(), *segment(layer.store).newest.tensors()]  # type: ignore[attr-defined]
        counts = [layer.store.lengths] + ([layer.store.next] if layer.store.next is not layer.store.lengths else [])
        on_device += sum(t.untyped_storage().nbytes() for t in (*held_here, *counts, *layer.state.values()))
    assert held.device == on_device


def test_what_waits_is_counted_on_the_device() -> None:
    stores = filled(Disk(), (140, 3, 300))
    for step in range(HOLDS + 2):
        held = stores[0].bytes()
        waiting = ROWS * HEADS * (step if step <= HOLDS else step - HOLDS)
        assert held.device_payload == waiting * 128
        assert held.disk_payload == (443 * HEADS + ROWS * HEADS * step - waiting) * 128
        for store in stores:
            store.append(columns(step, ROWS, HEADS))
    for store in stores:
        store.drop(victims(stores[1], 3))
    gone = int((stores[0].next < stores[0].lengths).sum())
    held = stores[0].bytes()
    assert held.device_payload + held.disk_payload == (int(stores[0].lengths.sum()) - gone) * 128


def test_a_record_holds_its_columns_at_whole_pages() -> None:
    for names in ("full", "int4", "int8"):
        for dim in (16, 64, 80, 128):
            encode = parse(names).encode
            record = Record.of(encode.columns(dim, torch.bfloat16))
            assert record.page * record.size % 4096 == 0 and record.block % record.page == 0
            assert record.size < sum(c.slot_bytes() for c in record.columns) + 8 * len(record.columns)
            values = encode.encode(*torch.randn(2, 2, 5, dim).bfloat16(), torch.arange(5).expand(2, 5))
            back = record.views(record.pack(values))
            for name, column in values.items():
                assert torch.equal(back[name].view(column.shape), column)


# ------------------------------------------------------------------- what is read


def test_a_selection_reads_the_pages_that_it_needs_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Disk(direct=False)
    layout = layout_of(1600)
    link = place.shared(1)
    store = place.store(layout, link)
    for row, n in enumerate((1500, 40, 1025)):
        store.extend(row, columns(row, HEADS, n))
    page = segment(store).record.page
    assert page * 128 == 4096
    read: list[tuple[int, int]] = []
    plain = os.preadv

    def watched(file: int, buffers: list[np.ndarray], at: int) -> int:
        read.append((at, sum(buffer.nbytes for buffer in buffers)))
        return plain(file, buffers, at)

    monkeypatch.setattr(os, "preadv", watched)
    for seed in range(3):
        part, before = chosen(store, seed, share=0.1), link.transfers().bytes
        read.clear()
        reads(store, part)
        wanted = {
            (row, head, slot // page)
            for row in range(ROWS)
            for head in range(HEADS)
            for slot in part.index[row, head, : int(part.count[row, head])].tolist()
        }
        assert link.transfers().bytes - before == len(wanted) * 4096 == sum(n for _, n in read)
        assert all(at % 4096 == 0 and n % 4096 == 0 for at, n in read)


def test_everything_is_read_once_and_no_further_than_a_sequence_goes() -> None:
    place = Disk()
    link = place.shared(1)
    store = place.store(layout_of(2200), link)
    for row, n in enumerate((2100, 40, 1025)):
        store.extend(row, columns(row, HEADS, n))
    before = link.transfers()
    reads(store)
    moved = link.transfers()
    blocks = 17 + 1 + 9  # of 128 slots
    assert (moved.bytes - before.bytes, moved.count - before.count) == (blocks * 128 * 128 * HEADS, 3)


def test_direct_and_buffered_files_hold_the_same(tmp_path: Path) -> None:
    """Whatever is written in one way can be read in the other."""
    found = []
    for direct in {False, direct_works(str(tmp_path))}:
        folder = Folder(str(tmp_path), direct)
        record = Record.of(layout_of(1).columns[:2])
        file = SlotFile(folder, record, HEADS, 1000)
        assert file.bytes == 1024 * HEADS * 128 == file.path.stat().st_size
        data = np.arange(HEADS * 256 * 128, dtype=np.uint8).reshape(HEADS, 256, 128)
        buffer = aligned(data.nbytes).numpy().reshape(data.shape)
        buffer[:] = data
        file.write_range(buffer, 512)
        other = file.copy()
        file.folder = other.folder = Folder(str(tmp_path), False)
        buffer[:] = 0
        assert other.read_range(buffer, 512) == data.nbytes and np.array_equal(buffer, data)
        found.append(file.path.read_bytes())
    assert all(content == found[0] for content in found)


def test_few_files_are_open_at_a_time() -> None:
    """More files than a process may hold open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    cache = running("disk", 1)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8, hard))
    try:
        cache.select_rows([0] * 6 + [1, 2])
        lm_of("llama").step(cache, torch.arange(8))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert sum(len(segment(layer.store).files) for layer in cache.layers) == 8 * LAYERS


# ------------------------------------------------------------------------ the folder


def ours(parent: Path) -> list[Path]:
    return sorted(parent.glob("kvatlas-*"))


def test_files_go_with_their_sequences_and_the_folder_with_its_cache(tmp_path: Path) -> None:
    cache = lm_of("llama").new_cache(f"disk:dir={tmp_path}")
    assert ours(tmp_path) == []
    lm_of("llama").prefill(cache, prompts(*RAGGED), 4)
    (folder,) = ours(tmp_path)
    assert len(list(folder.glob("*.kv"))) == 3 * LAYERS and f"-{os.getpid()}-" in folder.name
    cache.select_rows([0, 1, 0])
    assert len(list(folder.glob("*.kv"))) == 3 * LAYERS
    cache.select_rows([1])
    gc.collect()
    assert len(list(folder.glob("*.kv"))) == LAYERS
    del cache
    gc.collect()
    assert ours(tmp_path) == []


CHILD = """
import os, sys, torch
sys.path.insert(0, {tests!r})
from test_places import filled
from kvatlas.strategy.place.disk import Disk
store = filled(Disk(dir={folder!r}), (140, 3, 300))[0]
print("ready", flush=True)
sys.stdin.readline()
"""


@contextmanager
def child(parent: Path) -> Iterator[subprocess.Popen]:
    code = CHILD.format(tests=str(Path(__file__).parent), folder=str(parent))
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            stream.close()


def test_a_process_takes_its_files_with_it(tmp_path: Path) -> None:
    """At once when it ends by itself, and when it was killed, as soon as the next one comes; not while it lives."""
    with child(tmp_path) as first, child(tmp_path) as second:
        assert len(ours(tmp_path)) == 2, "two that live leave each other alone"
        first.communicate("\n")
        assert first.returncode == 0
        assert [f"-{second.pid}-" in path.name for path in ours(tmp_path)] == [True]
        second.send_signal(signal.SIGKILL)
        second.wait()
        assert len(ours(tmp_path)) == 1, "a killed process cannot clean up"
        folder = Folder(str(tmp_path), False)
        assert ours(tmp_path) == [folder.path]


def test_nothing_else_is_removed(tmp_path: Path) -> None:
    """Not a folder that another machine or container has locked, nor one in the making, nor what is not ours."""
    import fcntl

    elsewhere, young, old = (tmp_path / f"kvatlas-99999999-1-{name}" for name in ("far", "new", "old"))
    for path in (elsewhere, young, old, tmp_path / "kvatlas-notes-of-mine", tmp_path / "other"):
        path.mkdir()
    (elsewhere / "lock").touch()
    with open(elsewhere / "lock", "r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.utime(old, (1, 1))
        remove_leftovers(tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == {
            elsewhere.name, young.name, "kvatlas-notes-of-mine", "other",
        }  # fmt: skip
    remove_leftovers(tmp_path)
    assert not elsewhere.exists()


def test_a_forked_child_leaves_the_files_alone(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path), False)
    pid = os.fork()
    if pid == 0:
        folder._gone()
        os._exit(0)
    os.waitpid(pid, 0)
    assert folder.path.is_dir()


# ------------------------------------------------------------------------- no room


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """No file may grow beyond ``size`` bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_said_before_anything_is_stored() -> None:
    lm = lm_of("llama")
    with files_up_to(10_000), pytest.raises(UserError, match="no room left"):
        lm.prefill(lm.new_cache("disk"), prompts(*RAGGED), 4)


def test_a_sequence_that_finds_no_room_leaves_the_others_as_they_were() -> None:
    stores = filled(Disk(), (140, 3, 300), room=4)
    for store in stores:
        store.append(columns(40, ROWS, HEADS))
    before = reads(stores[0])
    with files_up_to(segment(stores[0]).files[0].bytes), pytest.raises(UserError, match="no room left"):
        stores[0].extend(1, columns(41, HEADS, 900))
    assert stores[0].lengths[:, 0].tolist() == [141, 4, 301]
    for got, want in zip(reads(stores[0]), before):
        assert torch.equal(got, want)
    for store in stores:
        store.extend(1, columns(41, HEADS, 900))
        store.append(columns(42, ROWS, HEADS))
    agree(stores)


def test_a_step_that_finds_no_room_can_be_taken_again() -> None:
    """Growing past what was reserved."""
    stores = filled(Disk(), (120, 3, 100), room=4)
    with files_up_to(segment(stores[0]).files[0].bytes):
        for step in range(20):
            try:
                stores[0].append(columns(step, ROWS, HEADS))
            except UserError as error:
                assert "no room left" in str(error)
                break
            stores[1].append(columns(step, ROWS, HEADS))
        else:
            raise AssertionError("it never grew")
        agree(stores)
    for step in range(20, 60):
        for store in stores:
            store.append(columns(step, ROWS, HEADS))
        agree(stores)


def test_a_fork_that_finds_no_room_leaves_all_as_it_was() -> None:
    stores = filled(Disk(), (120, 3, 300), room=4)
    files = [file.path for file in segment(stores[0]).files]
    with files_up_to(10_000), pytest.raises(UserError, match="no room left"):
        stores[0].select_rows(torch.tensor([0, 1, 1, 2]))
    assert [file.path for file in segment(stores[0]).files] == files
    agree(stores)


def test_a_write_that_fails_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits stays where it is until it has been written."""
    stores = filled(Disk(), (140, 3, 300), room=60)
    for step in range(HOLDS):
        for store in stores:
            store.append(columns(step, ROWS, HEADS))

    def fails(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", fails)
    with pytest.raises(UserError, match="no room left"):
        stores[0].append(columns(99, ROWS, HEADS))
    monkeypatch.undo()
    agree(stores)
    for step in range(HOLDS + 2):
        for store in stores:
            store.append(columns(200 + step, ROWS, HEADS))
    agree(stores)


# ------------------------------------------------------------------------ bad input


def test_a_folder_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    for path in (file, file / "below"):
        with pytest.raises(UserError, match="is not a folder"):
            parse(f"disk:dir={path}")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(UserError, match="not writable"):
        parse(f"disk:dir={tmp_path}")
    monkeypatch.undo()

    def fails(*_: object, **__: object) -> str:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(folders.tempfile, "mkdtemp", fails)
    lm = lm_of("llama")
    with pytest.raises(UserError, match=r"cannot write in .*Read-only file system.*dir="):
        lm.prefill(lm.new_cache(f"disk:dir={tmp_path}"), prompts(5), 4)


def test_a_folder_that_does_not_exist_yet_is_made(tmp_path: Path) -> None:
    there = tmp_path / "new" / "one"
    assert tokens(lm_of("llama"), prompts(9), f"disk:dir={there}") == tokens(lm_of("llama"), prompts(9), "full")
    assert there.is_dir()


def test_direct_io_is_as_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    works = direct_works(str(tmp_path))
    assert ("direct I/O" in Disk(dir=str(tmp_path)).words()) == works
    assert "buffered I/O" in Disk(direct=False).words()
    assert Folder(str(tmp_path), None).direct == works and not Folder(str(tmp_path), False).direct
    monkeypatch.setattr(folders, "direct_works", lambda _: False)
    assert not Folder(str(tmp_path), None).direct
    with pytest.raises(UserError, match="no direct I/O; use direct=auto"):
        Folder(str(tmp_path), True)
    with pytest.raises(UserError, match="direct must be true or false or auto, not 'maybe'"):
        parse("disk:direct=maybe")
