"""The readers on small made-up files in the official layouts, downloads from a server on this machine, real data if there."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import io
import os
import pickle
import struct
import tarfile
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import programs
from sensli_lab.paper import image_sets
from sensli_lab.paper.image_sets import DataError, FetchError, UnsafePickle, fetch, read_batch

NAMES = list(image_sets.CIFAR10_SUMS)


def batches() -> dict[str, bytes]:
    """Six batches of five records each."""
    random = np.random.default_rng(0)
    return {name: random.integers(0, 10, (5, 3073), dtype=np.uint8).tobytes() for name in NAMES}


def sums(contents: dict[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha1(content).hexdigest() for name, content in contents.items()}


def write_binary(folder: Path, contents: dict[str, bytes]) -> None:
    (folder / image_sets.BINARY).mkdir(parents=True)
    for name, content in contents.items():
        (folder / image_sets.BINARY / f"{name}.bin").write_bytes(content)


def write_pickled(folder: Path, contents: dict[str, bytes]) -> None:
    (folder / image_sets.PICKLED).mkdir(parents=True)
    for name, content in contents.items():
        table = np.frombuffer(content, np.uint8).reshape(-1, 3073)
        batch = {b"data": np.ascontiguousarray(table[:, 1:]), b"labels": [int(label) for label in table[:, 0]]}
        (folder / image_sets.PICKLED / name).write_bytes(pickle.dumps(batch, protocol=2))


def test_both_layouts_give_the_same_images(tmp_path):
    contents = batches()
    write_binary(tmp_path / "a", contents)
    write_pickled(tmp_path / "b", contents)
    one, other = (image_sets.load_cifar10(tmp_path / name, sums=sums(contents)) for name in "ab")
    for mine, yours in zip(vars(one).values(), vars(other).values(), strict=True):
        assert torch.equal(mine, yours)
    assert one.train_x.shape == (25, 32, 32, 3) and one.test_x.shape == (5, 32, 32, 3)
    record = contents["data_batch_2"][3073 * 3 : 3073 * 4]
    assert one.train_y[8] == record[0]
    assert one.train_x[8, 5, 7].tolist() == [record[1 + plane * 1024 + 5 * 32 + 7] for plane in range(3)]


@pytest.mark.parametrize("write", [write_binary, write_pickled])
def test_altered_files_are_noticed(tmp_path, write):
    contents = batches()
    known = sums(contents)
    contents["data_batch_3"] = contents["data_batch_4"]
    write(tmp_path, contents)
    with pytest.raises(DataError, match=r"data_batch_3.*not the published file") as caught:
        image_sets.load_cifar10(tmp_path, sums=known)
    assert "\n" not in str(caught.value)


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickle_cannot_execute_anything(tmp_path):
    marker = tmp_path / "executed"
    for payload in (Evil(marker), {b"data": Evil(marker), b"labels": []}):
        with pytest.raises(UnsafePickle, match="mkdir, which no batch of images needs"):
            read_batch(pickle.dumps(payload, protocol=2))
    assert not marker.exists()
    for broken in (b"", b"\x80\x02", pickle.dumps([1]), pickle.dumps({b"data": 1, b"labels": [1]})):
        with pytest.raises(UnsafePickle):
            read_batch(broken)


def test_a_folder_that_lacks_a_batch(tmp_path):
    contents = batches()
    write_binary(tmp_path, contents)
    (tmp_path / image_sets.BINARY / "test_batch.bin").unlink()
    with pytest.raises(DataError, match=r"test_batch.bin cannot be read"):
        image_sets.load_cifar10(tmp_path, sums=sums(contents))


@pytest.fixture
def server():
    """Serves `content`, but breaks off after `cut` bytes or answers with `status`; counts the requests."""

    class Handler(http.server.BaseHTTPRequestHandler):
        content, cut, status, asked = b"", None, 200, 0

        def do_GET(self):
            cls = type(self)
            cls.asked += 1
            self.send_response(cls.status)
            self.send_header("Content-Length", str(len(cls.content)))
            self.end_headers()
            self.wfile.write(cls.content[: cls.cut])
            self.close_connection = True

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        Handler.address = f"http://127.0.0.1:{running.server_address[1]}/file"
        yield Handler
        running.shutdown()
        thread.join(programs.HANGS)
        assert not thread.is_alive()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_what_is_cut_or_altered_is_not_kept(server, tmp_path):
    server.content = bytes(range(256)) * 4000
    known, target = sha256(server.content), tmp_path / "new" / "file"
    server.cut = 300_000
    with pytest.raises(FetchError):
        fetch(server.address, target, known)
    server.content, server.cut = b"another file", None
    with pytest.raises(FetchError, match="what arrived is not the published file"):
        fetch(server.address, target, known)
    server.status = 404
    with pytest.raises(FetchError, match="the server answered 404 Not Found"):
        fetch(server.address, target, known)
    assert list(target.parent.iterdir()) == []
    server.content, server.status = bytes(range(256)) * 4000, 200
    fetch(server.address, target, known)
    assert list(target.parent.iterdir()) == [target] and target.read_bytes() == server.content


def test_a_link_in_the_place_of_the_file_is_not_followed(server, tmp_path):
    server.content = b"abc"
    (tmp_path / "victim").write_text("keep me")
    (tmp_path / "file").symlink_to("victim")
    fetch(server.address, tmp_path / "file", sha256(b"abc"))
    assert (tmp_path / "victim").read_text() == "keep me" and (tmp_path / "file").read_bytes() == b"abc"


@pytest.mark.skipif(os.name != "posix", reason="limits the size of files")
def test_a_disk_without_room_is_said_at_once_and_left_as_it_was(server, tmp_path):
    import resource

    server.content = b"abc" * 1_000_000
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))
    try:
        with pytest.raises(FetchError, match="File too large"):
            fetch(server.address, tmp_path / "file", sha256(server.content))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == [] and server.asked == 1


def test_nothing_is_downloaded_where_that_is_forbidden(server, tmp_path, monkeypatch):
    monkeypatch.setenv("SENSLI_OFFLINE", "1")
    with pytest.raises(FetchError, match="SENSLI_OFFLINE is set"):
        fetch(server.address, tmp_path / "new" / "file", sha256(b""))
    assert server.asked == 0 and list(tmp_path.iterdir()) == []


def archive(contents: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in {
            **{f"{key}.bin": value for key, value in contents.items()},
            "../readme.html": b"x",
        }.items():
            entry = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def test_cifar10_is_downloaded_checked_and_unpacked(server, tmp_path):
    contents = batches()
    server.content = archive(contents)
    known = {"address": server.address, "sums": sums(contents)}
    with pytest.raises(DataError, match=r"cannot be downloaded \(what arrived is not the published file"):
        image_sets.load_cifar10(tmp_path / "new", **known)
    found = image_sets.load_cifar10(tmp_path / "new", sha256=sha256(server.content), **known)
    assert len(found.train_y) == 25
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == sorted(f"{n}.bin" for n in NAMES)
    server.content = archive({**contents, "test_batch": b"other"})
    with pytest.raises(DataError, match="not the published file"):
        image_sets.load_cifar10(tmp_path / "bad", sha256=sha256(server.content), **known)


def test_without_network_one_line_says_what_to_put_where(tmp_path):
    closed = "http://127.0.0.1:9/x"
    with pytest.raises(
        DataError, match=r"cannot be downloaded.*Put the folder cifar-10-batches-bin from .* there"
    ) as caught:
        image_sets.load_cifar10(tmp_path, address=closed)
    assert "\n" not in str(caught.value) and "--data DIR or SENSLI_DATA" in str(caught.value)
    with pytest.raises(DataError, match=r"Fashion-MNIST is incomplete.*Put the four files train-images"):
        image_sets.load_fashion_mnist(tmp_path, address=closed)


def idx(values: np.ndarray) -> bytes:
    return bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


def test_fashion_mnist(tmp_path):
    random = np.random.default_rng(0)
    arrays = [random.integers(0, 10, shape, dtype=np.uint8) for shape in ((6, 28, 28), (6,), (2, 28, 28), (2,))]
    contents = dict(zip(image_sets.FASHION_SUMS, map(idx, arrays), strict=True))
    (tmp_path / "fashion_mnist").mkdir()
    for name, content in contents.items():
        (tmp_path / "fashion_mnist" / f"{name}.gz").write_bytes(gzip.compress(content))
    found = image_sets.load_fashion_mnist(tmp_path, sums=sums(contents))
    assert found.train_x.shape == (6, 28, 28, 1) and found.test_y.tolist() == arrays[3].tolist()
    assert torch.equal(found.train_x[..., 0], torch.from_numpy(arrays[0]))
    (tmp_path / "fashion_mnist" / "t10k-labels-idx1-ubyte.gz").write_bytes(b"no gzip")
    with pytest.raises(DataError, match="cannot be unpacked"):
        image_sets.load_fashion_mnist(tmp_path, sums=sums(contents))


def test_where_the_data_lies(tmp_path, monkeypatch):
    monkeypatch.setenv("SENSLI_DATA", str(tmp_path))
    assert image_sets.folder(Path("x")) == Path("x") and image_sets.folder() == tmp_path
    monkeypatch.delenv("SENSLI_DATA")
    assert image_sets.folder() == Path("data")


REAL = Path(os.environ.get("SENSLI_DATA", "")) / image_sets.BINARY


@pytest.mark.skipif(not REAL.is_dir(), reason="needs CIFAR-10: set SENSLI_DATA to a folder with cifar-10-batches-bin")
def test_the_real_cifar10():
    found = image_sets.load_cifar10(REAL.parent)
    assert (
        torch.bincount(found.train_y).tolist() == [5000] * 10 and torch.bincount(found.test_y).tolist() == [1000] * 10
    )
    mean = found.train_x.float().mean((0, 1, 2)) / 255
    torch.testing.assert_close(mean, torch.tensor(image_sets.CIFAR10_FACTS.mean), atol=2e-4, rtol=0)
