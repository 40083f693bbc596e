"""Images of sessions: their formats, hostile layers, one fetch for all, limits and engines."""

import asyncio
import bz2
import gzip
import hashlib
import io
import json
import lzma
import os
import shlex
import shutil
import stat
import sys
import tarfile
import tracemalloc
import zlib

import pytest
from sandboxed import needed, with_pool

from primerl.sandbox import SandboxError, SandboxPool
from primerl.sandbox.archives import BadArchive
from primerl.sandbox.tiers.images import folders, formats
from primerl.sandbox.tiers.images.cache import ImageCache
from primerl.sandbox.tiers.images.layers import LayeredRoot
from primerl.sandbox.tiers.images.parts import ArchiveParts

MANY = 1 << 40


def tar(entries, *, form=tarfile.PAX_FORMAT):
    """An archive; an entry is content, a link (``-> target``, ``= target``), or a TarInfo."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as archive:
        for name, entry in entries.items() if isinstance(entries, dict) else entries:
            about, content = tarfile.TarInfo(name), b""
            if isinstance(entry, tarfile.TarInfo):
                about = entry
                about.name = name
            elif entry is None:
                about.type, about.mode = tarfile.DIRTYPE, 0o755
            elif isinstance(entry, str):
                kind, _, about.linkname = entry.partition(" ")
                about.type = {"->": tarfile.SYMTYPE, "=": tarfile.LNKTYPE}[kind]
            else:
                about.size, content = len(entry), entry
            archive.addfile(about, io.BytesIO(content))
    return buffer.getvalue()


def about(**fields):
    made = tarfile.TarInfo()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def unpacked(tmp_path, *layers, most=MANY):
    """The files of a root made of layers, by path: content, link's target, or None (a folder)."""
    target = tmp_path / "root"
    left = [most]

    def grow(size):
        left[0] -= size
        if left[0] < 0:
            raise OverflowError

    root = LayeredRoot(str(target), owner=0, grow=grow)
    try:
        for layer in layers:
            root.add(io.BytesIO(layer))
    finally:
        root.close()
    return tree(target)


def tree(folder):
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = f"-> {os.readlink(path)}"
        else:
            found[name] = None if path.is_dir() else path.read_bytes()
    return found


# ---- layers ----


def test_layers_are_stacked_by_whiteouts_and_links(tmp_path):
    lower = tar(
        {
            "usr/": None,
            "usr/lib/a": b"lower a",
            "lib": "-> usr/lib",
            "gone/x": b"x",
            "kept/old": b"old",
            "kept/both": b"both",
            "was/folder": b"f",
            "one": b"1",
            "same": "= one",
        }
    )
    upper = tar(
        [
            ("lib/b", b"through the link"),
            (".wh.gone", b""),
            ("kept/new", b"new"),
            ("kept/sub/new", b"new"),
            ("kept/.wh..wh..opq", b""),  # after what this layer has: only older files go
            ("was", b"a file now"),
            ("one", b"2"),
            ("up", "= usr/lib/a"),
        ]
    )

    assert unpacked(tmp_path, lower, upper) == {
        "usr": None,
        "usr/lib": None,
        "usr/lib/a": b"lower a",
        "usr/lib/b": b"through the link",
        "lib": "-> usr/lib",
        "kept": None,
        "kept/new": b"new",
        "kept/sub": None,
        "kept/sub/new": b"new",
        "was": b"a file now",
        "one": b"2",
        "same": b"1",
        "up": b"lower a",
    }


def test_modes_and_times_are_kept_but_for_setuid_and_devices(tmp_path):
    layer = tar(
        {
            "su": about(mode=0o4755, mtime=12345),
            "pipe": about(type=tarfile.FIFOTYPE),
            "null": about(type=tarfile.CHRTYPE, devmajor=1, devminor=3),
            "closed/": about(type=tarfile.DIRTYPE, mode=0o055),
        }
    )

    assert unpacked(tmp_path, layer) == {"closed": None, "su": b""}
    status = (tmp_path / "root" / "su").stat()
    assert (stat.S_IMODE(status.st_mode), status.st_mtime) == (0o755, 12345)
    assert stat.S_IMODE((tmp_path / "root" / "closed").stat().st_mode) == 0o755


@pytest.mark.parametrize(
    "entries",
    [
        [("trap", "-> OUT"), ("trap/escaped", b"x")],
        [("trap", "-> ../../../../../../../../..OUT"), ("trap/escaped", b"x")],
        [("trap", "-> OUT"), ("trap/.wh.victim", b"")],
        [("trap", "-> OUT"), ("trap/.wh..wh..opq", b"")],
        [("a/b", "-> ../.."), ("a/b/OUT/escaped", b"x")],
        [("OUT/escaped", b"x")],
        [(".wh...", b""), (".wh..", b""), (".wh.", b"")],
        [("link", "-> OUT/victim"), ("link", b"changed")],
        [("trap", "-> OUT"), ("trap", None), ("trap/escaped", b"x")],
    ],
)
def test_no_path_leads_out_of_the_root(tmp_path, entries):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "victim").write_bytes(b"kept")

    def named(text):
        return text.replace("OUT", str(outside)) if isinstance(text, str) else text

    unpacked(tmp_path, tar([(named(name), named(entry)) for name, entry in entries]))

    assert tree(outside) == {"victim": b"kept"}
    assert {one.name for one in tmp_path.iterdir()} == {"outside", "root"}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"../x": b""}, "has '..'"),
        ({"a/../../x": b""}, "has '..'"),
        ({"hard": "= /etc/hostname"}, "can't be unpacked"),
        ({"hard": "= ../../etc/hostname"}, "has '..'"),
        ({"folder/": None, "hard": "= folder"}, "does not lead to a file"),
        ({"a": "-> b", "b": "-> a", "a/x": b""}, "too many links"),
        ({"a/" * 300 + "x": b""}, "more than 256 deep"),
        ({"x" * 300: b""}, "can't be unpacked"),
        ({"x/" + "yy/" * 2000: b""}, "more than 4096 bytes"),
    ],
)
def test_hostile_layers_are_refused(tmp_path, entries, message):
    with pytest.raises(BadArchive, match=message):
        unpacked(tmp_path, tar(entries))


def test_bombs_are_stopped_by_the_limit_on_bytes(tmp_path):
    zeros = tar({"zeros": bytes(4 << 20)})
    for number, (layer, most) in enumerate(
        [(zeros, 1 << 20), (tar({f"f{n}": b"" for n in range(100)}), 50 * 4096)]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        with pytest.raises(OverflowError):
            unpacked(folder, layer, most=most)
        size = sum(p.stat().st_size for p in (folder / "root").rglob("*") if p.is_file())
        assert size <= most


def test_members_in_deep_folders_take_little_memory(tmp_path):
    deep = "dd/" * 60
    layer = tar({f"{'ab'[n % 2]}/{deep}{n}": "-> x" for n in range(1000)})
    root = LayeredRoot(str(tmp_path / "root"), owner=0, grow=id)
    tracemalloc.start()
    try:
        root.add(io.BytesIO(layer))
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        root.close()

    assert kept < 1000 * 500


# ---- formats ----

CONFIG = {"config": {"Env": ["GREETING=hello = x", "PATH=/opt/bin:/usr/bin:/bin", "1bad=x"]}}
LAYERS = [tar({"data/a": b"lower", "data/b": b"lower"}), tar({"data/b": b"upper", "x": b"1"})]
FILES = {"data": None, "data/a": b"lower", "data/b": b"upper", "x": b"1"}


def digest(content):
    return hashlib.sha256(content).hexdigest()


def docker_save(*, layers=LAYERS, variables=CONFIG["config"]["Env"], **config):
    """An archive as docker writes it: the layer of a hash, and one that is a link to another."""
    first, second = layers
    config = json.dumps({"config": {"Env": variables}, **config}).encode()
    names = [f"{digest(first)}/layer.tar", f"{'0' * 64}/layer.tar"]
    manifest = [{"Config": f"{digest(config)}.json", "RepoTags": ["a:b"], "Layers": names}]
    return tar(
        {
            f"{digest(config)}.json": config,
            names[1]: f"-> ../{digest(second)}.tar",
            f"{digest(second)}.tar": second,
            names[0]: first,
            "manifest.json": json.dumps(manifest).encode(),
        }
    )


def oci_parts(*, architecture="amd64"):
    """The files of an OCI image layout: an index of two platforms, and compressed layers."""
    blobs = {}

    def blob(content, **more):
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        blobs[f"blobs/sha256/{digest(content)}"] = content
        return {"digest": f"sha256:{digest(content)}", "size": len(content), **more}

    layers = [blob(gzip.compress(layer)) for layer in LAYERS]
    manifest = {"config": blob(CONFIG), "layers": layers}
    other = {"os": "linux", "architecture": "s390x"}
    ours = {"os": "linux", "architecture": architecture}
    index = {"manifests": [blob({}, platform=other), blob(manifest, platform=ours)]}
    return {
        "oci-layout": b'{"imageLayoutVersion": "1.0.0"}',
        "index.json": json.dumps({"manifests": [blob(index)]}).encode(),
        **blobs,
    }


def made(tmp_path, kind):
    """An image of a kind, as a path."""
    if kind == "folder":
        folder = tmp_path / "folder"
        (folder / "data").mkdir(parents=True)
        for name, content in FILES.items():
            if content is not None:
                (folder / name).write_bytes(content)
        return folder
    if kind == "OCI folder":
        folder = tmp_path / "layout"
        (folder / "blobs/sha256").mkdir(parents=True)
        for name, content in oci_parts().items():
            (folder / name).write_bytes(content)
        return folder
    path = tmp_path / "image"
    content = {
        "docker save": docker_save,
        "docker save, compressed": lambda: gzip.compress(docker_save()),
        "OCI archive": lambda: tar({"./blobs/": None, **oci_parts()}),
        "docker export": lambda: tar(FILES),
        "docker export, compressed": lambda: gzip.compress(tar(FILES, form=tarfile.GNU_FORMAT)),
    }[kind]()
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    "kind",
    [
        *("docker save", "docker save, compressed", "OCI archive", "OCI folder", "docker export"),
        *("docker export, compressed", "folder"),
    ],
)
def test_images_of_each_kind_have_the_same_files(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(formats.platform, "machine", lambda: "x86_64")
    sizes = []
    image = formats.unpack(
        str(made(tmp_path, kind)), str(tmp_path / "root"), owner=0, grow=sizes.append
    )

    assert tree(tmp_path / "root") == FILES
    layered = "save" in kind or "OCI" in kind
    variables = {"GREETING": "hello = x", "PATH": "/opt/bin:/usr/bin:/bin"}
    assert image.environment == (variables if layered else {})
    assert sum(sizes) >= sum(len(content or b"") for content in FILES.values())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"nothing", "no valid header"),
        (docker_save()[:5000], "cut off"),
        (gzip.compress(tar(FILES))[:-20], "damaged"),
        (b"\x28\xb5\x2f\xfd" + bytes(600), "zstd"),
        (tar({"manifest.json": b"[]"}), "does not list one image"),
        (tar({"manifest.json": b"[" * 100_000}), "is not JSON"),
        (tar({"manifest.json": b'[{"Layers": ["no"], "Config": "../x"}]'}), "has no '../x'"),
        (tar({"oci-layout": b"{}", "index.json": b'{"manifests": 3}'}), "no platform"),
        (
            tar({"oci-layout": b"{}", "index.json": b'{"config": {"digest": "x"}, "layers": []}'}),
            "has no sha256 digest",
        ),
        (tar(oci_parts(architecture="sparc")), "for linux/s390x, linux/sparc"),
        (tar(oci_parts(architecture="x" * 1000)), r"linux/x{100,200}, not linux"),
        (docker_save(architecture="s390x"), "for linux/s390x, not linux"),
        (docker_save(variables=5), "5 is not a list of variables"),
        (docker_save(variables=["A=b\0c"]), "variable A has a character"),
        (docker_save(variables=["A=\ud800"]), "variable A has a character"),
        (docker_save(variables=["A=" + "x" * (1 << 17)]), "expected at most 131071"),
    ],
)
def test_malformed_images_are_refused(tmp_path, content, message):
    (tmp_path / "image").write_bytes(content)

    with pytest.raises(BadArchive, match=message):
        formats.unpack(str(tmp_path / "image"), str(tmp_path / "root"), owner=0, grow=id)


def test_long_names_of_parts_are_not_kept(tmp_path):
    image = tmp_path / "image"
    image.write_bytes(tar({f"blobs/{n}{'x' * 60_000}": "-> y" for n in range(50)}))
    with image.open("rb") as archive:
        tracemalloc.start()
        try:
            found = ArchiveParts(archive)
            kept, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

    assert not found.has("manifest.json")
    assert kept < 1 << 20


def test_a_blob_that_its_digest_does_not_match_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(formats.platform, "machine", lambda: "x86_64")
    forged = gzip.compress(tar({"forged": b""}))
    for part in [name for name in oci_parts() if name.startswith("blobs/")]:
        image = tmp_path / "image"
        content = oci_parts()
        if content[part] == b"{}":
            continue  # of another platform
        is_layer = content[part].startswith(b"\x1f\x8b")
        content[part] = forged if is_layer else content[part] + b" "
        image.write_bytes(tar(content))
        with pytest.raises(BadArchive, match=f"{part} has another digest"):
            formats.unpack(str(image), str(tmp_path / part[-8:]), owner=0, grow=id)


@pytest.mark.parametrize("layer", ["../secret", "link"])
def test_a_folder_of_an_image_layout_does_not_lead_to_other_files(tmp_path, layer):
    (tmp_path / "secret").write_bytes(tar({"secret": b""}))
    folder = tmp_path / "layout"
    folder.mkdir()
    (folder / "link").symlink_to("../secret")
    (folder / "oci-layout").write_text("{}")
    (folder / "config").write_text("{}")
    manifest = [{"Config": "config", "Layers": [layer]}]
    (folder / "manifest.json").write_text(json.dumps(manifest))

    with pytest.raises(BadArchive, match="leads out of the folder"):
        formats.unpack(str(folder), str(tmp_path / "root"), owner=0, grow=id)


def test_a_copied_folder_keeps_modes_and_times(tmp_path):
    image = tmp_path / "image"
    image.mkdir()
    (image / "tool").write_bytes(b"x")
    (image / "tool").chmod(0o4751)
    os.utime(image / "tool", ns=(1, 1234567890_123456789))

    folders.merge([str(image)], tmp_path / "root", owner=0)

    status = (tmp_path / "root" / "tool").stat()
    assert (stat.S_IMODE(status.st_mode), status.st_mtime_ns) == (0o751, 1234567890_123456789)


def test_a_folder_that_is_too_deep_is_refused(tmp_path):
    deep = tmp_path / "image"
    for names in ("x/" * 200, "x/" * 56):
        deep /= names
        deep.mkdir(parents=True)
    folders.merge([str(tmp_path / "image")], tmp_path / "root", owner=0)
    (deep / "x").mkdir()

    with pytest.raises(OSError, match="more than 256 deep"):
        folders.merge([str(tmp_path / "image")], tmp_path / "root2", owner=0)


def test_a_file_that_grows_while_it_is_copied_stays_within_the_limit(tmp_path):
    image = tmp_path / "image"
    image.mkdir()
    (image / "log").write_bytes(b"")
    sizes = []

    def grow(size):
        sizes.append(size)
        if sum(sizes) > 8 << 20:
            raise OverflowError
        with (image / "log").open("ab") as file:
            file.write(bytes(1 << 20))

    with pytest.raises(OverflowError):
        folders.merge([str(image)], tmp_path / "root", owner=0, grow=grow)


@pytest.mark.parametrize("at", ["top", "layer"])
def test_content_that_is_passed_over_can_be_cancelled(tmp_path, at):
    unknown = about(name="x", type=b"V", size=64 << 20).tobuf() + bytes(64 << 20)
    bomb = bz2.compress(unknown)
    assert len(bomb) < 1 << 12
    image = tmp_path / "image"
    image.write_bytes(bomb if at == "top" else docker_save(layers=[bomb, LAYERS[0]]))
    calls = []

    def cancelled(size):
        calls.append(size)
        if len(calls) > 10:
            raise OverflowError

    with pytest.raises(OverflowError):
        formats.unpack(str(image), str(tmp_path / "root"), owner=0, grow=cancelled)


def test_xz_files_are_read_like_others_within_a_limit_on_memory(tmp_path):
    image = tmp_path / "image"
    saved = docker_save()
    # Two streams, with padding between them; the layers lie before the manifest that names them.
    image.write_bytes(lzma.compress(saved[:1500]) + bytes(8) + lzma.compress(saved[1500:]))
    formats.unpack(str(image), str(tmp_path / "root"), owner=0, grow=id)
    assert tree(tmp_path / "root") == FILES

    greedy = bytearray(lzma.compress(saved))
    header = greedy[12 : 12 + (greedy[12] + 1) * 4]
    assert header[2:4] == b"\x21\x01"  # LZMA2, with one byte: the size of its dictionary
    header[4] = 40  # 4 GiB
    header[-4:] = zlib.crc32(header[:-4]).to_bytes(4, "little")
    greedy[12 : 12 + len(header)] = header
    image.write_bytes(greedy)
    with pytest.raises(BadArchive, match="Memory usage limit"):
        formats.unpack(str(image), str(tmp_path / "root2"), owner=0, grow=id)


# ---- the cache ----


class Library:
    """Images of the given sizes, which count how often each is fetched and removed."""

    def __init__(self, sizes, **cache):
        self.sizes = sizes
        self.fetched, self.removed = [], []
        self.gate = asyncio.Event()
        self.gate.set()
        self.cache = ImageCache(
            self.fetch, self.removed.append, **{"limit_bytes": 100, "timeout_s": 60.0, **cache}
        )

    async def fetch(self, name, grow):
        await self.gate.wait()
        if name not in self.sizes:
            raise SandboxError(f"the image {name} is unknown")
        self.fetched.append(name)
        for _ in range(self.sizes[name] // 10):
            grow(10)
        return name


def test_sessions_that_ask_at_once_share_one_fetch():
    async def run():
        library = Library({"a": 30})
        library.gate.clear()
        asking = [asyncio.create_task(library.cache.take("a")) for _ in range(50)]
        late = asyncio.create_task(library.cache.take("a"))
        await asyncio.sleep(0)
        late.cancel()  # the others still get it
        library.gate.set()
        held = await asyncio.gather(*asking)
        return library, held

    library, held = asyncio.run(run())

    assert library.fetched == ["a"]
    assert {id(one) for one in held} == {id(held[0])}
    assert library.cache.stats() == {
        "images": {"a": {"bytes": 30, "sessions": 50}},
        "image_bytes": 30,
        "images_fetched": 1,
        "images_removed": 0,
    }


def test_the_image_unused_for_longest_makes_room_and_none_in_use_does():
    async def run():
        library = Library({"a": 40, "b": 30, "c": 30, "d": 30})
        cache = library.cache
        first = await cache.take("a")
        for name in ("b", "c", "b"):  # c is unused for longest, then b; a is in use
            cache.release(await cache.take(name))
        assert library.removed == []
        cache.release(await cache.take("d"))
        assert library.removed == ["c"]
        cache.release(first)
        await cache.fetch("c")
        return library

    library = asyncio.run(run())

    assert library.removed == ["c", "b"]
    assert library.fetched == ["a", "b", "c", "d", "c"]
    assert library.cache.stats()["image_bytes"] == 100
    assert library.cache.stats()["images_removed"] == 2


def test_an_image_waits_for_the_space_that_sessions_use():
    async def run():
        library = Library({"a": 60, "b": 60})
        held = await library.cache.take("a")
        waiting = asyncio.create_task(library.cache.take("b"))
        while library.fetched != ["a", "b"]:  # the first attempt has no room
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert not waiting.done()
        library.cache.release(held)
        await waiting
        return library

    library = asyncio.run(run())

    assert library.removed == ["a"]
    assert library.cache.stats()["images"] == {"b": {"bytes": 60, "sessions": 1}}


def test_failures_name_the_image_and_leave_nothing():
    async def run():
        library = Library({"large": 200, "a": 10}, timeout_s=0.2)
        messages = []
        for name in ("large", "no"):
            with pytest.raises(SandboxError) as caught:
                await library.cache.take(name)
            messages.append(str(caught.value))
        library.gate.clear()
        with pytest.raises(SandboxError) as caught:
            await library.cache.fetch("a")
        messages.append(str(caught.value))
        library.gate.set()
        await library.cache.fetch("a")
        await library.cache.close()
        with pytest.raises(SandboxError, match="closed"):
            await library.cache.fetch("no")
        return library, messages

    library, messages = asyncio.run(run())

    assert messages == [
        (
            "the image large has more than the 100 bytes that images may take on this host "
            "(image_bytes)"
        ),
        "the image no is unknown",
        "the image a was not fetched within 0.2 s (image_timeout_s)",
    ]
    assert library.cache.stats()["image_bytes"] == 10


# ---- pools ----


def image_of(tmp_path, name, content, **layer):
    """An archive of docker save, whose second layer has a file ``/testbed/name``."""
    layer = tar({"testbed/name": content, **layer})
    path = tmp_path / name
    path.write_bytes(docker_save(layers=[tar({"testbed/": None}), layer]))
    return str(path)


def test_sessions_have_the_files_and_variables_of_their_images(tmp_path):
    needed()
    images = [image_of(tmp_path, name, name.encode() + b"\n") for name in ("one", "two")]

    async def run(pool):
        async def play(image):
            async with pool.session(image=image) as session:
                command = ["sh", "-c", "cat /testbed/name; echo $GREETING; echo x > /testbed/name"]
                said = (await session.run(command)).stdout
                kept = await session.snapshot("/testbed")
                assert await session.read("/testbed/name") == b"x\n"
                return said, kept

        played = await asyncio.gather(*(play(image) for image in images * 8))
        async with pool.session(snapshot=played[0][1]) as again:
            changed = await again.read("/testbed/name")
            other = await again.run(["sh", "-c", "echo $GREETING $X"], environment={"X": "y"})
            stats = pool.stats()
        with pytest.raises(SandboxError, match="no-image can't be unpacked: .*No such file"):
            async with pool.session(image=str(tmp_path / "no-image")):
                pass
        return [said for said, _ in played], changed, other.stdout, stats

    said, changed, other, stats = with_pool(run, concurrency=4, warm=0)

    assert said == [b"one\nhello = x\n", b"two\nhello = x\n"] * 8
    assert (changed, other) == (b"x\n", b"hello = x y\n")
    assert stats["images_fetched"] == 2
    assert {name: one["sessions"] for name, one in stats["images"].items()} == {
        images[0]: 1,
        images[1]: 0,
    }


def test_a_pool_keeps_to_its_bytes_and_frees_the_disk(tmp_path):
    needed()
    images = [image_of(tmp_path, f"i{n}", bytes(1 << 20)) for n in range(3)]

    async def run(pool):
        folder = pool._tier.launcher.folder / "roots"
        for image in images:
            async with pool.session(image=image) as session:
                assert len(await session.read("/testbed/name")) == 1 << 20
        names = {one.name for one in folder.iterdir()}
        bomb = tmp_path / "bomb"
        bomb.write_bytes(gzip.compress(tar({"zeros": bytes(64 << 20)})))
        with pytest.raises(SandboxError, match="bomb has more than the 3145728 bytes"):
            async with pool.session(image=str(bomb)):
                pass
        return names, list(folder.iterdir()), pool.stats()

    names, left, stats = with_pool(run, concurrency=1, warm=0, image_bytes=3 << 20)

    assert len(names) == 2
    assert left == []  # they made room for the bomb, whose part is gone, too
    assert stats["image_bytes"] == 0
    assert stats["images_removed"] == 3


def test_an_image_that_someone_removed_is_fetched_again(tmp_path):
    needed()
    image = image_of(tmp_path, "image", b"here")

    async def run(pool):
        async with pool.session(image=image):
            [folder] = (pool._tier.launcher.folder / "roots").iterdir()
        shutil.rmtree(folder)
        with pytest.raises(SandboxError):
            async with pool.session(image=image):
                pass
        async with pool.session(image=image) as session:
            return await session.read("/testbed/name"), pool.stats()

    content, stats = with_pool(run, concurrency=1, warm=0)

    assert content == b"here"
    assert (stats["images_fetched"], stats["images_removed"]) == (2, 1)
    assert stats["image_bytes"] == stats["images"][image]["bytes"]


def test_sessions_with_a_root_and_an_image_or_a_malformed_one_are_refused(caplog):
    needed()

    async def run(pool):
        root = await pool.prepare_root("/etc/alternatives")
        with pytest.raises(ValueError, match="a root or an image, not both"):
            async with pool.session(root=root, image="/x"):
                pass
        with pytest.raises(SandboxError, match="'--privileged' is no image"):
            async with pool.session(image="--privileged"):
                pass
        for image in ("https://user:hidden@example.com/x", "user:hidden@host:5000"):
            with pytest.raises(SandboxError, match="no user and password") as caught:
                async with pool.session(image=image):
                    pass
            assert "hidden" not in str(caught.value)

    caplog.set_level("INFO")
    with_pool(run, concurrency=1, warm=0)
    assert "hidden" not in caplog.text
    with pytest.raises(ValueError, match="image_bytes"):
        SandboxPool(image_bytes=0)


# ---- engines ----

# Stands for docker: it has an image if the file of its name exists, which a pull makes.
ENGINE = """
import os, shutil, sys, time
here, arguments = {here!r}, sys.argv[1:]
open(here + "/log", "a").write(" ".join(arguments) + "\\n")
name = here + "/has-" + arguments[-1].replace("/", "_")
match arguments[0]:
    case "image":
        if not os.path.exists(name):
            sys.exit("Error: No such image")
        print('["GREETING=hi"]')
    case "pull":
        print("Pulling", flush=True)
        if "denied" in name:
            sys.exit("Using default tag\\nError response from daemon: pull access denied\\n")
        time.sleep(60 if "slow" in name else 0)
        open(name, "w").close()
    case "create":
        print("container-1")
    case "export":
        if os.path.exists(here + "/fails"):
            sys.exit("no space left on device")
        with open(here + "/export.tar", "rb") as file:
            shutil.copyfileobj(file, sys.stdout.buffer)
    case "rmi":
        os.unlink(name)
"""


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """A folder with the log of a fake docker."""
    folder = tmp_path / "bin"
    folder.mkdir()
    code = folder / "engine.py"
    code.write_text(ENGINE.format(here=str(folder)))
    program = folder / "docker"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S {code} "$@"\n')
    program.chmod(0o755)
    (folder / "export.tar").write_bytes(tar({"testbed/name": b"exported"}))
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def commands(folder):
    return [line.split()[0] for line in (folder / "log").read_text().splitlines()]


def test_an_engine_pulls_an_image_once_and_its_copy_is_removed(engine):
    needed()

    async def run(pool):
        async def play():
            async with pool.session(image="registry.example.com/a/b:1") as session:
                return (await session.run(["sh", "-c", "cat /testbed/name; echo $GREETING"])).stdout

        return await asyncio.gather(*(play() for _ in range(10)))

    assert with_pool(run, concurrency=2, warm=0) == [b"exportedhi\n"] * 10
    assert commands(engine) == [
        *("info", "image", "pull", "image", "create", "export", "rm", "rmi")
    ]


def test_what_an_engine_says_is_in_the_error(engine):
    needed()

    async def run(pool):
        messages = []
        for image in ("denied/x", "other"):
            with pytest.raises(SandboxError) as caught:
                async with pool.session(image=image):
                    pass
            messages.append(str(caught.value))
        return messages, list((pool._tier.launcher.folder / "roots").iterdir())

    async def late(pool):
        with pytest.raises(SandboxError) as caught:
            async with pool.session(image="slow"):
                pass
        return str(caught.value)

    (engine / "fails").touch()
    messages, left = with_pool(run, concurrency=1, warm=0)
    messages.append(with_pool(late, concurrency=1, warm=0, image_timeout_s=2.0))

    assert messages == [
        (
            "the image denied/x can't be had from docker: Error response from daemon: pull access "
            "denied"
        ),
        "the image other can't be had from docker: no space left on device",
        "the image slow was not fetched within 2 s (image_timeout_s)",
    ]
    assert left == []
    assert not list(engine.glob("has-*"))


def test_without_an_engine_the_error_says_so(tmp_path, monkeypatch):
    needed()
    monkeypatch.setenv("PATH", str(tmp_path))

    async def run(pool):
        async with pool.session(image="a/b:1"):
            pass

    with pytest.raises(SandboxError, match="a/b:1 can't be pulled on this host: neither docker"):
        with_pool(run, concurrency=1, warm=0)
