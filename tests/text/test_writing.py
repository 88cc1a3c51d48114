"""Files are complete or absent: with several writers, on a full disk, when interrupted; and nothing is left beside them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import stat
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import programs
import warm
from sensli import History, load_checkpoint, save_checkpoint
from sensli.checkpoint import storage
from sensli.errors import CheckpointError, HistoryError, SensliError
from sensli.integrations import transformers
from sensli.page import page_data, write_page
from sensli.surgery.record import Decision, Record
from sensli.text.commands import TRAINER_FILE
from sensli.text.files import ABANDONED, check_writable, replacing, write_bytes
from sensli_lab.errors import StoreError
from sensli_lab.work.store import write_json, write_results

POSIX = pytest.mark.skipif(os.name != "posix", reason="needs signals, links and modes of POSIX")


def make_model() -> nn.Module:
    return nn.Linear(2, 2)


def _save_many(path: Path, mark: int, size: int, pipe: Connection) -> None:
    model = make_model()
    pipe.send("ready")
    while not pipe.poll():
        save_checkpoint(path, model, extra=torch.full((size,), float(mark)))
    pipe.send("done")


def start(target: Any, *arguments: Any) -> tuple[Any, Connection]:
    """A process of its own from a server that has imported torch once, and a pipe to it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(*arguments, theirs))
    with pytest.MonkeyPatch.context() as patch:  # the server does not find this module otherwise, and would not say so
        patch.setenv("PYTHONPATH", programs.environment()["PYTHONPATH"])
        process.start()
    theirs.close()
    return process, ours


def said(pipe: Connection) -> Any:
    """What comes next from the process; one that has ended, or says nothing for as long as only a hang takes, fails the test."""
    assert pipe.poll(programs.HANGS), "the process does not answer"
    return pipe.recv()


def ended(process: Any) -> None:
    process.join(programs.HANGS)
    assert process.exitcode == 0


@POSIX
@pytest.mark.process
def test_several_writers_of_one_checkpoint_leave_one_of_theirs_complete(tmp_path: Path) -> None:
    path = tmp_path / "a"
    writers = [start(_save_many, path, mark, 1000 * 10**mark) for mark in (1, 2, 3)]
    assert all(said(pipe) == "ready" for _, pipe in writers)
    seen: set[int] = set()
    loads = 0
    while loads < 100 or len(seen) < 2:  # until two of them have had their turn
        assert all(process.is_alive() for process, _ in writers)
        if not path.exists():
            time.sleep(0.01)
            continue
        extra = load_checkpoint(path, make_model).extra
        loads += 1
        mark = int(extra[0])
        assert torch.equal(extra, torch.full((1000 * 10**mark,), float(mark)))
        seen.add(mark)
    for process, pipe in writers:
        pipe.send("stop")
        assert said(pipe) == "done"  # and did not fail on the way
        ended(process)
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


def _save_large(path: Path, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell makes what runs in the background ignore it
    extra = torch.zeros(2_000_000)
    # The first one imports numpy, whose random part loses an interrupt that comes meanwhile.
    save_checkpoint(path, make_model(), extra="good")
    try:
        pipe.send("ready")
        while True:
            save_checkpoint(path, make_model(), extra=extra)
    except KeyboardInterrupt:
        pipe.send("interrupted")
    except BaseException as error:
        pipe.send(repr(error))


@POSIX
@pytest.mark.process
def test_ctrl_c_leaves_the_last_good_file_and_nothing_else(tmp_path: Path) -> None:
    for number in range(0, 8, 2):
        path = tmp_path / str(number) / "a"
        path.parent.mkdir()
        save_checkpoint(path, make_model(), extra="good")
        process, pipe = start(_save_large, path)
        assert said(pipe) == "ready"
        time.sleep(0.01 + 0.011 * number)
        os.kill(process.pid, signal.SIGINT)
        assert said(pipe) == "interrupted"
        ended(process)
        assert [file.name for file in path.parent.iterdir()] == ["a"]
        assert load_checkpoint(path, make_model).extra is not None


def test_an_interrupt_at_any_step_of_a_save_comes_out_as_one(tmp_path: Path) -> None:
    """Not as an error of torch, which ends its archive on the way out; the earlier file stays."""
    path, writing = tmp_path / "a", storage._Hashed.write.__code__
    save_checkpoint(path, make_model(), extra="good")
    steps = iter(range(0))

    def interrupt(frame: Any, event: str, value: Any) -> None:
        if frame.f_code is writing and next(steps, None) is None:
            raise KeyboardInterrupt

    for step in range(0, 10_000, 17):
        steps = iter(range(step))
        sys.setprofile(interrupt)
        try:
            save_checkpoint(path, make_model(), extra="new")
            break
        except KeyboardInterrupt:
            assert load_checkpoint(path, make_model).extra == "good"
            assert [file.name for file in tmp_path.iterdir()] == ["a"]
        finally:
            sys.setprofile(None)
    assert step > 100 and load_checkpoint(path, make_model).extra == "new"


def write_each(size: int) -> list[tuple[str, Any, type[Exception]]]:
    """Every kind of file, with content of about so many bytes."""
    text = "x" * size
    numbers = torch.zeros(size // 4)
    history = History(record=Record(decisions=[Decision(1, 1.0, "largest", text)], calls=1))
    return [
        ("a.ckpt", lambda path: save_checkpoint(path, make_model(), extra=numbers), CheckpointError),
        ("history.json", history.save, HistoryError),
        ("page.html", lambda path: write_page(path, page_data(history)), SensliError),
        ("runs.pt", lambda path: write_results(path, {"numbers": numbers}), StoreError),
        ("runs.json", lambda path: write_json(path, {"text": text}), StoreError),
        (TRAINER_FILE, lambda path: transformers.write_growth_file(path.parent, {"grower": text}), CheckpointError),
        ("bench.json", lambda path: write_bytes(path, text.encode()), SensliError),
    ]


def check_each(folder: Path, why: str) -> None:
    """Small files fit and large ones do not: one clear error each, the small ones stay, and nothing else is there."""
    for (name, small, _), (_, large, error) in zip(write_each(100), write_each(4_000_000), strict=True):
        small(folder / name)
        before = (folder / name).read_bytes()
        with pytest.raises(
            error, match=rf"{name} cannot be written: {why}\. .*An earlier file there was not changed"
        ) as caught:
            large(folder / name)
        assert caught.type is error
        assert [file.name for file in folder.iterdir()] == [name]
        assert (folder / name).read_bytes() == before
        (folder / name).unlink()


def run(code: str, folder: Path, *before: str) -> subprocess.CompletedProcess[str]:
    program = ["-c", f"from pathlib import Path; import test_writing as t; {code}", str(folder)]
    return programs.run([*before, sys.executable, *program], folder) if before else warm.run(program, folder)


@POSIX
@pytest.mark.process
def test_a_full_disk_is_said_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """On a small disk of its own, mounted for one process."""
    mount = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=1m none "$0" && exec "$@"', str(tmp_path)]
    try:
        subprocess.run([*mount, "true"], check=True, capture_output=True, timeout=programs.HANGS)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("a disk cannot be mounted here")
    done = run(f"t.check_each(Path({str(tmp_path)!r}), 'No space left on device')", tmp_path, *mount)
    assert done.returncode == 0, done.stderr


@POSIX
@pytest.mark.process
def test_a_limit_of_the_file_size_is_said_and_leaves_nothing_behind(tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))"
    done = run(f"{limit}; t.check_each(Path({str(tmp_path)!r}), 'File too large')", tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name, write, error in write_each(100):
        with pytest.raises(error, match="cannot be written: Not a directory"):
            write(tmp_path / "file" / "folder" / name)
    with pytest.raises(SensliError, match="Not a directory"):
        check_writable(tmp_path / "file" / "x")
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


@POSIX
@pytest.mark.skipif(os.name == "posix" and os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_read_only_folder_is_said(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(CheckpointError, match="cannot be written: Permission denied"):
        save_checkpoint(tmp_path / "a", make_model())


@POSIX
def test_what_is_not_a_file_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name, what in (("folder", "it is a folder"), ("pipe", "it is a device or pipe")):
        with pytest.raises(SensliError, match=what):
            write_bytes(tmp_path / name, b"new")
        with pytest.raises(SensliError, match=what):
            check_writable(tmp_path / name)
    assert (tmp_path / "folder").is_dir() and (tmp_path / "pipe").is_fifo()
    assert len(list(tmp_path.iterdir())) == 2


@POSIX
def test_links_beside_the_file_are_not_followed_and_the_file_may_be_one(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("keep me")
    (tmp_path / "a.part").symlink_to("victim")
    save_checkpoint(tmp_path / "a", make_model())
    assert (tmp_path / "victim").read_text() == "keep me" and (tmp_path / "a.part").is_symlink()
    (tmp_path / "latest").symlink_to("a")
    save_checkpoint(tmp_path / "latest", make_model(), extra="newer")
    assert (tmp_path / "latest").is_symlink() and load_checkpoint(tmp_path / "a", make_model).extra == "newer"


@POSIX
def test_the_mode_is_what_the_umask_leaves(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_bytes(tmp_path / "a", b"")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


def test_missing_folders_are_made_and_long_names_fit(tmp_path: Path) -> None:
    for name in ("x" * 250, "\N{SNOWMAN}" * 80):
        write_bytes(tmp_path / "new" / "folder" / name, b"1")
        assert (tmp_path / "new" / "folder" / name).read_bytes() == b"1"


def test_parts_of_processes_that_were_killed_are_removed_some_time_later(tmp_path: Path) -> None:
    kept, abandoned, other = (tmp_path / name for name in (".a.1.part", ".a.2.part", ".b.3.part"))
    for part in (kept, abandoned, other):
        part.write_text("")
    for part in (abandoned, other):
        os.utime(part, (time.time() - ABANDONED - 10,) * 2)
    write_bytes(tmp_path / "a", b"")
    assert {file.name for file in tmp_path.iterdir()} == {"a", kept.name, other.name}


def test_a_block_that_raises_leaves_nothing(tmp_path: Path) -> None:
    write_bytes(tmp_path / "a", b"old")
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "a") as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert (tmp_path / "a").read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 1
