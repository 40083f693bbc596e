"""Files and folders of conversations: what is read, and errors that name the file."""

import json
import os

import pytest

from primerl import data

LINE = json.dumps(
    {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]}
)


def test_a_folder_names_what_is_not_read(tmp_path):
    for name in ("a.jsonl", "b.JSONL", "c.json", "d.jsonl.gz", ".hidden.jsonl", "._a.jsonl"):
        (tmp_path / name).write_text(LINE)
    (tmp_path / "more").mkdir()
    (tmp_path / "e.jsonl").mkdir()
    conversations = data.Conversations(tmp_path)
    assert [one["id"] for one in conversations] == [
        f"{tmp_path / 'a.jsonl'}:1",
        f"{tmp_path / 'b.JSONL'}:1",
    ]
    names = ("c.json", "d.jsonl.gz", "e.jsonl/", "more/")
    assert conversations.unread_files == [f"{tmp_path}/{name}" for name in names]
    for name in ("a.jsonl", "b.JSONL"):
        (tmp_path / name).unlink()
    with pytest.raises(ValueError, match=r"no files that end in .*; it has c.json, d.jsonl.gz"):
        data.Conversations(tmp_path)


def test_a_broken_link_is_named(tmp_path):
    (tmp_path / "a.jsonl").symlink_to(tmp_path / "gone.jsonl")
    with pytest.raises(ValueError, match="a.jsonl: a link to a file that does not exist"):
        data.Conversations(tmp_path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('[\n{"messages": []}\n]', "looks like a JSON array: write one conversation per line.*jq"),
        (f"[{LINE}]", "found a list. The file looks like a JSON array"),
        ('{\n  "messages": []\n}', "looks like pretty-printed JSON"),
        ('{"prompt": "Q"}', "found the keys prompt"),
    ],
)
def test_files_of_other_kinds_are_recognised(tmp_path, text, reason):
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(ValueError, match=f"(?s)a.jsonl:1: .*{reason}"):
        data.Conversations(tmp_path)


def test_files_with_other_suffixes_say_what_to_do(tmp_path):
    for name, advice in (("a.json", "jq -c"), ("a.jsonl.gz", "gunzip")):
        (tmp_path / name).write_text(LINE)
        with pytest.raises(ValueError, match=f"{name}: expected a file .*{advice}"):
            data.Conversations(tmp_path / name)


def test_the_first_error_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n{"y": 2}\n{"z": 3}\n')
    with pytest.raises(ValueError, match="well-formed; the first: .*a.jsonl:1: .*the keys x"):
        data.Conversations(tmp_path, skip_bad=True)


def test_two_bad_rows_with_one_id_are_two(tmp_path):
    (tmp_path / "a.jsonl").write_text(f'{{"id": 7}}\n{{"id": 7}}\n{LINE}\n')
    bad = data.Conversations(tmp_path, skip_bad=True).bad
    assert len(set(bad)) == 2
    assert bad[1].startswith(f"{tmp_path / 'a.jsonl'}:2 (7): ")


def test_a_file_that_changes_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(f"{LINE}\n{LINE}\n")
    conversations = data.Conversations(path)
    path.write_text(f"{'x' * len(LINE)}\n" * 2)
    os.utime(path, (0, 0))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"a.jsonl: the file has been changed or removed"):
            conversations[1]
        path.unlink(missing_ok=True)


def test_parquet_files_that_cannot_be_read_are_named(tmp_path):
    pytest.importorskip("datasets")
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    path.write_bytes(b"no Parquet")
    with pytest.raises(ValueError, match="a.parquet: the Parquet file can't be read"):
        data.Conversations(path)
    parquet.write_table(pyarrow.table({"messages": []}), path)
    with pytest.raises(ValueError, match="a.parquet: the file is empty"):
        data.Conversations(path)
    pairs = pyarrow.array([[("a", 1)]], pyarrow.map_(pyarrow.string(), pyarrow.int64()))
    parquet.write_table(pyarrow.table({"messages": pairs}), path)
    with pytest.raises(ValueError, match=r"a.parquet"):
        data.Conversations(path)
