"""The conversations that a run leaves out: counted once, named, and written again when resumed."""

from primerl import data


def test_each_counts_once_and_the_first_are_printed(tmp_path, capsys):
    left_out = data.LeftOut()
    for number in range(25):
        for _ in range(2):  # drawn in two epochs
            left_out.add(f"chats.jsonl:{number}: not\nvalid")
    assert len(left_out) == 25
    printed = capsys.readouterr().out.splitlines()
    assert printed == [f"left out: chats.jsonl:{number}: not valid" for number in range(20)]
    left_out.write(tmp_path / "left_out.txt")
    assert len((tmp_path / "left_out.txt").read_text().splitlines()) == 25


def test_a_resumed_run_goes_on_with_those_of_its_file(tmp_path):
    path = tmp_path / "left_out.txt"
    assert len(data.LeftOut.read(path)) == 0
    assert len(data.LeftOut.read(None)) == 0
    first = data.LeftOut()
    first.add("a")
    first.write(path)
    resumed = data.LeftOut.read(path)
    for error in ("a", "b"):
        resumed.add(error)
    resumed.write(path)
    assert path.read_text() == "a\nb\n"


def test_a_full_disk_does_not_end_the_run(tmp_path, capsys):
    left_out = data.LeftOut()
    left_out.add("a")
    left_out.write(tmp_path / "missing" / "left_out.txt")  # as a disk that can't be written to
    assert "left_out.txt was not written: " in capsys.readouterr().err
    (tmp_path / "missing").mkdir()
    left_out.write(tmp_path / "missing" / "left_out.txt")
    assert (tmp_path / "missing" / "left_out.txt").read_text() == "a\n"
