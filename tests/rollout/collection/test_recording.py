import msgspec
import numpy as np
import pytest
from conftest import make_group, make_sample
from hypothesis import given, settings
from hypothesis import strategies as st

from primerl import rollout
from primerl.rollout.collection import recording
from primerl.rollout.collection.recording import DTYPES
from primerl.types import Group, Rollout, Sample, TrainingSample


def same(a: Group, b: Group) -> bool:
    if (a.task_id, a.environment, len(a.rollouts)) != (b.task_id, b.environment, len(b.rollouts)):
        return False
    for x, y in zip(a.rollouts, b.rollouts, strict=True):
        for name in ("stop", "agent", "episode_id"):
            assert getattr(x, name) == getattr(y, name)
        assert float(x.reward).hex() == float(y.reward).hex()
        assert dict(x.metrics) == dict(y.metrics)
        assert x.conversation == y.conversation
        assert [type(v) for v in x.metrics.values()] == [type(v) for v in y.metrics.values()]
        for s, t in zip(x.samples, y.samples, strict=True):
            assert (s.temperature, s.routes) == (t.temperature, t.routes)
            for name in DTYPES:
                one, other = getattr(s, name), getattr(t, name)
                if one is None:
                    assert other is None
                    continue
                assert one.dtype == other.dtype
                assert one.tobytes() == other.tobytes()
    return True


def random_sample(seed, length, temperature, routes):
    """Any bits that a sample allows: NaN with a payload, infinity, -0.0."""
    rng = np.random.default_rng(seed)
    mask = rng.random(length) < 0.5
    mask[0] = False
    logprobs = np.frombuffer(rng.bytes(4 * length), np.float32)
    signed = np.where(mask, -np.abs(logprobs), logprobs)
    versions = np.frombuffer(rng.bytes(4 * length), np.int32)
    return Sample(
        token_ids=np.frombuffer(rng.bytes(4 * length), np.int32) & np.int32(2**31 - 1),
        loss_mask=mask,
        behavior_logprobs=np.where(mask & ~(np.abs(logprobs) < np.inf), np.float32(-1), signed),
        versions=np.where(mask, np.abs(versions // 2), versions),
        temperature=temperature,
        routes=routes,
        observation_mask=~mask if seed % 2 else None,
    )


# Plain values, built in the test: beartype, which checks them, draws from ``random``.
text = st.text(max_size=4)
samples = st.tuples(st.integers(0, 2**32), st.integers(1, 12), st.floats(0, 1e6), st.none() | text)
numbers = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False)
rollouts = st.fixed_dictionaries(
    {
        "samples": st.lists(samples, max_size=2),
        "reward": st.floats(-1e38, 1e38),
        "metrics": st.dictionaries(text, numbers, max_size=3),
        "stop": text,
        "agent": text,
        "episode_id": text,
        "conversation": st.none() | st.just({"messages": [{"role": "user", "content": "a"}]}),
    }
)
groups = st.tuples(text, st.lists(rollouts, max_size=3), text)


def build(task_id, rollouts, environment):
    made = [
        Rollout(**{**one, "samples": [random_sample(*sample) for sample in one["samples"]]})
        for one in rollouts
    ]
    return Group(task_id=task_id, rollouts=made, environment=environment)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("recordings")


@given(steps=st.lists(st.lists(groups, max_size=2), max_size=2))
@settings(deadline=None, max_examples=40)
def test_a_recording_is_exact(steps, folder):
    path, steps = folder / "groups.msgpack", [[build(*group) for group in step] for step in steps]

    path.unlink(missing_ok=True)
    rollout.save_groups(path, steps)
    loaded = rollout.load_groups(path)

    assert [len(step) for step in loaded] == [len(step) for step in steps]
    for before, after in zip(steps, loaded, strict=True):
        assert all(same(x, y) for x, y in zip(before, after, strict=True))
    assert [entry.name for entry in folder.iterdir()] == ["groups.msgpack"]


def test_an_encoded_group_is_made_of_builtins_and_bytes():
    group = Group(
        task_id="t",
        rollouts=[
            Rollout(
                samples=[make_sample()], reward=0.5, metrics={"turns": np.float64(2), "won": True}
            ),
        ],
    )

    encoded = recording.encode_group(group)

    (one,) = encoded["rollouts"]
    assert one["metrics"] == {"turns": 2.0, "won": True}
    assert type(one["metrics"]["turns"]) is float
    (sample,) = one["samples"]
    assert sample["token_ids"] == {
        "dtype": "<i4",
        "data": np.array(group.samples[0].token_ids, "<i4").tobytes(),
    }
    carried = msgspec.msgpack.decode(msgspec.msgpack.encode(encoded))
    assert same(recording.decode_group(carried), recording.decode_group(encoded))
    assert recording.encode_group(recording.decode_group(carried)) == encoded


def test_another_reader_needs_only_messagepack(tmp_path):
    rollout.save_groups(tmp_path / "g", [[make_group()], []])

    file = msgspec.msgpack.decode((tmp_path / "g").read_bytes())

    assert file["format"] == "primerl-groups"
    assert file["version"] == 1
    array = file["steps"][0][0]["rollouts"][1]["samples"][0]["behavior_logprobs"]
    expected = make_group().rollouts[1].samples[0].behavior_logprobs
    assert np.frombuffer(array["data"], array["dtype"]).tolist() == expected.tolist()


def test_what_would_not_be_exact_is_refused(tmp_path):
    trained = make_sample(kind=TrainingSample, advantages=np.zeros(7))
    with pytest.raises(ValueError, match="a TrainingSample cannot be recorded"):
        recording.encode_group(Group(task_id="", rollouts=[Rollout(samples=[trained], reward=0)]))


def damaged(change):
    """A recording with one entry changed."""
    encoded = recording.encode_group(make_group())
    change(encoded["rollouts"][0]["samples"][0])
    file = {"format": "primerl-groups", "version": 1, "steps": [[encoded]]}
    return msgspec.msgpack.encode(file)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("recording") / "whole"
    rollout.save_groups(path, [[make_group()]])
    return path.read_bytes()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (lambda whole: b"", "not a complete recording"),
        (lambda whole: whole[:-1], "not a complete recording"),
        (lambda whole: whole[: len(whole) // 2], "not a complete recording"),
        (lambda whole: whole + b"\0", "not a complete recording"),
        (lambda whole: b"PK\3\4 another format", "not a complete recording"),
        (lambda whole: msgspec.msgpack.encode([1, 2]), "Expected `object`, got `array`"),
        (lambda whole: msgspec.msgpack.encode({"a": 1}), "missing required field `format`"),
        (
            lambda whole: msgspec.msgpack.encode({"format": "x", "version": 1}),
            "format 'x', version 1; this version of primerl reads 'primerl-groups', version 1",
        ),
        (
            lambda whole: msgspec.msgpack.encode({"format": "primerl-groups", "version": 2}),
            "version 2; this",
        ),
        (
            lambda whole: damaged(lambda sample: sample.pop("versions")),
            r"missing required field `versions` - at `\$.steps",
        ),
        (lambda whole: damaged(lambda sample: sample.update(more=1)), "unknown field `more`"),
        (
            lambda whole: damaged(lambda sample: sample["token_ids"].update(dtype="<f4")),
            "token_ids has dtype '<f4', expected '<i4'",
        ),
        (
            lambda whole: damaged(lambda sample: sample["token_ids"].update(data=b"123")),
            "token_ids has 3 bytes, not a whole number of <i4",
        ),
        (
            lambda whole: damaged(lambda sample: sample["token_ids"].update(data=b"1234")),
            r"Sample.loss_mask has shape \(7,\), expected \(1,\)",
        ),
        (
            lambda whole: damaged(
                lambda sample: sample["loss_mask"].update(data=b"\1" * 7)  # token 0 too
            ),
            r"loss_mask\[0\] is set",
        ),
    ],
)
def test_a_file_that_is_no_recording_is_named_with_its_problem(tmp_path, whole, content, problem):
    (tmp_path / "mine.groups").write_bytes(content(whole))

    with pytest.raises(ValueError, match=rf"mine\.groups .*{problem}"):
        rollout.load_groups(tmp_path / "mine.groups")


def test_a_malformed_group_is_named():
    with pytest.raises(
        ValueError, match="not an encoded group: .*missing required field `task_id`"
    ):
        recording.decode_group({})


def test_a_recording_overwrites_no_file(tmp_path):
    (tmp_path / "mine").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("mine", "link"):
        with pytest.raises(ValueError, match=f"{name} exists already; record in a new file"):
            rollout.save_groups(tmp_path / name, [[make_group()]])

    assert (tmp_path / "mine").read_text() == "kept"
    assert not (tmp_path / "nowhere").exists()


def test_a_failed_recording_leaves_nothing(tmp_path):
    broken = Group(task_id="", rollouts=[])
    object.__setattr__(broken, "rollouts", [None])

    with pytest.raises(AttributeError):
        rollout.save_groups(tmp_path / "g", [[broken]])

    assert not list(tmp_path.iterdir())
