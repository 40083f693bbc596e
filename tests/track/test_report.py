"""The report of runs: what it has of them, and the page in a browser, if there is a Chromium."""

import hashlib
import json
import subprocess
import sys

import numpy as np
import pytest
from report_pages import embedded, in_browser, needs_chromium

from primerl import advantage, track
from primerl.track.rollout_files import first_words
from primerl.track.rollout_records import text_of
from primerl.types import Group, Rollout, Sample

WORDS = ["</script>", " zwölf", " &lt;b>", "\n", "a", " 東", '"', "\\"]


def decode(ids):
    """As tokenizers do that drop the space at the beginning."""
    return "".join(WORDS[token] for token in ids).removeprefix(" ")


def sample(ids, prompt, version):
    mask = np.arange(len(ids)) >= prompt
    return Sample(
        token_ids=ids,
        loss_mask=mask,
        behavior_logprobs=np.where(mask, -0.5, 0.0),
        versions=np.where(mask, version, -1),
        temperature=1.0,
    )


def of_trainer(sample):
    """That finds trained tokens half as likely as the sampler did."""
    return {
        "logprobs": np.where(sample.loss_mask, -0.5 - np.log(2), 0.0),
        "entropy": np.where(sample.loss_mask, 1.5, 0.0),
    }


def record(folder, *, steps=3, groups=2, size=4, seed=0, trainer=False, **settings):
    draw = np.random.default_rng(seed)
    with track.Run(folder, args={"lr": 0.1, "seed": seed}, decode=decode, **settings) as run:
        for step in range(steps):
            taken = []
            for number in range(groups):
                ids = [draw.integers(0, len(WORDS), 12) for _ in range(size)]
                rollouts = [
                    Rollout(samples=[sample(one, 4, step)], reward=float(draw.random()), stop=stop)
                    for one, stop in zip(ids, ["stop", "length"] * size, strict=False)
                ]
                taken.append(Group(task_id=f"task {number}", rollouts=rollouts))
            samples = advantage.assign(taken, advantage.centered)
            per_token = [of_trainer(one) for one in samples] if trainer else ()
            run.log(
                step,
                taken,
                samples,
                metrics={"loss": 0.1 * step},
                totals={},
                per_token=per_token,
            )
        run.finish()
    return folder


def records(folder):
    """The records, with their arrays as lists."""
    return [
        line | {name: array.tolist() for name, array in line["arrays"].items()}
        for line in track.read_rollouts(folder)
    ]


def test_a_run_ends_with_a_report_of_its_metrics_and_rollouts(tmp_path):
    folder = record(tmp_path / "run")

    data = embedded(folder / "report.html")
    run, chunk = data["run-0"], data["run-0-chunk-0"]
    lines = records(folder)
    assert run["name"] == "run"
    assert run["args"] == {"lr": 0.1, "seed": 0}
    assert run["summary"]["finished"] is True
    assert run["metrics"]["step"] == [0, 1, 2]
    assert run["metrics"]["loss"] == [0.0, 0.1, 0.2]
    assert run["metrics"]["truncated"] == [0.5, 0.5, 0.5]
    assert run["recorded"] == len(lines) == len(chunk) == 24
    assert run["rollouts"]["reward"] == [line["reward"] for line in lines]
    assert run["rollouts"]["trained"] == [8] * 24
    sequences = [one["sequences"] for one in chunk]
    assert [[one["token_ids"]] for one in lines] == [[o["token_ids"] for o in s] for s in sequences]
    texts = {int(token): text for token, text in run["tokens"].items()}
    assert texts == dict(enumerate(WORDS))
    for line in lines:
        text = "".join(texts[token] for token in line["token_ids"][4:])
        assert line["completion"] == text.removeprefix(" ")


def test_the_curve_of_evaluations_ends_with_that_of_the_trained_weights(tmp_path):
    def evaluated(reward):
        return [Rollout(samples=[], reward=reward)]

    with track.Run(tmp_path, args={}) as run:
        run.log(0, [], [], totals={})
        run.log(1, [], [], totals={})
        run.log_evaluation(0, evaluated(0.25))  # while training went on
        run.log_evaluation(2, evaluated(0.75))
        run.finish()

    metrics = embedded(tmp_path / "report.html")["run-0"]["metrics"]
    assert metrics["step"] == [0, 1, 2]
    assert metrics["evaluation"] == [0.25, None, 0.75]
    assert metrics["tokens"] == [0, 0, None]


def test_no_text_of_a_model_is_read_as_html(tmp_path):
    page = (record(tmp_path) / "report.html").read_text()

    assert "zwölf" not in page
    assert page.count("</script>") == page.count("<script")
    assert "default-src 'none'" in page


def test_a_token_keeps_the_space_that_a_tokenizer_drops_at_the_beginning():
    assert [text_of(token, decode) for token in range(len(WORDS))] == WORDS


def test_chunks_are_of_bounded_size_and_hold_every_rollout(tmp_path, monkeypatch):
    monkeypatch.setattr(track.report, "CHUNK_BYTES", 3000)
    folder = record(tmp_path, steps=4)

    data = embedded(folder / "report.html")
    chunks = [value for name, value in data.items() if "chunk" in name]
    lines = records(folder)
    assert len(chunks) > 4
    assert max(len(json.dumps(chunk)) for chunk in chunks) < 6000
    chunk_of = data["run-0"]["rollouts"]["chunk"]
    assert chunk_of == [n for n, chunk in enumerate(chunks) for _ in chunk]
    held = [one["sequences"][0]["token_ids"] for chunk in chunks for one in chunk]
    assert held == [line["token_ids"] for line in lines]


@pytest.mark.parametrize("bound", [{"max_rollouts": 21}, {"max_bytes": 10_000}])
def test_of_too_many_rollouts_whole_groups_are_left_out_evenly(tmp_path, bound):
    folder = record(tmp_path, steps=10, groups=4, size=2)
    size = sum((folder / f"rollouts.{name}").stat().st_size for name in ("jsonl", "bin"))

    run = embedded(track.write_report([folder], **bound))["run-0"]

    steps = run["rollouts"]["step"]
    limit = 21 if "max_rollouts" in bound else 80 * 10_000 / size
    assert limit - 2 < len(steps) <= limit
    assert all(
        run["rollouts"]["task"].count(task) % 2 == 0 for task in set(run["rollouts"]["task"])
    )
    assert {step // 2 for step in steps} == set(range(5))
    assert run["recorded"] == 80


def test_a_run_that_is_killed_while_it_writes_has_a_report(tmp_path):
    folder = record(tmp_path)
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        with (folder / name).open("a") as file:
            file.write('{"step": 3, "rew')
    (folder / "summary.json").unlink()

    run = embedded(track.write_report([folder], tmp_path / "r.html"))["run-0"]

    assert run["metrics"]["step"] == [0, 1, 2]
    assert len(run["rollouts"]["step"]) == 24


def test_a_run_that_fails_has_a_report_that_says_why(tmp_path):
    with pytest.raises(ZeroDivisionError), track.Run(tmp_path):
        raise ZeroDivisionError("half way")

    run = embedded(tmp_path / "report.html")["run-0"]
    assert run["summary"]["error"] == "ZeroDivisionError: half way"


@pytest.mark.parametrize("name", ["args.json", "rollouts.jsonl"])
def test_records_that_were_damaged_hide_no_error_of_the_run(tmp_path, capsys, name):
    with pytest.raises(ZeroDivisionError), track.Run(tmp_path):  # noqa: PT012
        (tmp_path / name).write_text('{"step": 0}\n[\n')
        raise ZeroDivisionError("half way")

    assert f"{tmp_path} has no report: {tmp_path / name}" in capsys.readouterr().err
    assert "half way" in (tmp_path / "summary.json").read_text()
    with pytest.raises(ValueError, match="is not a record|cannot be read"):
        track.write_report([tmp_path])


def test_an_odd_line_of_an_evaluation_is_left_out_of_the_report_and_named(tmp_path, caplog):
    odd = [
        '{"step": 1, "eval',
        "[1]",
        "null",
        '{"evaluation": 0.5}',
        '{"step": "3", "evaluation": 0.5, "evaluation_failed": 0}',
        '{"step": true, "evaluation": 0.5, "evaluation_failed": 0}',
        "[" * 100_000,
    ]
    with pytest.raises(ZeroDivisionError), track.Run(tmp_path) as run:  # noqa: PT012
        run.log_evaluation(0, [Rollout(samples=[], reward=0.25)])
        run.state()
        with (tmp_path / "evaluations.jsonl").open("a") as file:
            file.write("\n".join(odd) + "\n")
        raise ZeroDivisionError("half way")

    path = tmp_path / "evaluations.jsonl"
    for number in range(2, 2 + len(odd)):
        assert f"{path}, line {number}, is damaged, and is left out" in caplog.text
    run = embedded(tmp_path / "report.html")["run-0"]
    assert run["metrics"]["evaluation"] == [0.25]
    assert run["summary"]["error"] == "ZeroDivisionError: half way"


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "evaluations.jsonl", "tokens.jsonl", "rollouts.jsonl", "summary.json"]
)
@pytest.mark.parametrize("line", ["[1]", "3", '{"step": []}', '{"step": {"a": 1}}', "null", "{}"])
def test_no_damaged_record_hides_the_error_of_the_run(tmp_path, name, line):
    with pytest.raises(ZeroDivisionError), track.Run(tmp_path) as run:  # noqa: PT012
        run.log(0)
        run.state()
        (tmp_path / name).write_text(line + "\n")
        raise ZeroDivisionError("half way")

    assert "half way" in (tmp_path / "summary.json").read_text()


@pytest.mark.parametrize(("share", "recorded"), [(0.0, 0), (0.25, 2), (0.5, 4), (1.0, 8)])
def test_a_share_of_the_groups_is_recorded(tmp_path, share, recorded):
    folder = record(tmp_path, steps=4, record_rollouts=share)

    assert len((folder / "rollouts.jsonl").read_bytes().splitlines()) == 4 * recorded


def test_a_share_out_of_range_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"record_rollouts is 1\.5; expected a share from 0 to 1"):
        track.Run(tmp_path / "run", record_rollouts=1.5)


def test_the_command_writes_one_file_for_several_runs(tmp_path):
    one, two = record(tmp_path / "one"), record(tmp_path / "two", seed=1)
    command = [sys.executable, "-m", "primerl.track"]

    done = subprocess.run(
        [*command, one, two, "--output", tmp_path / "both.html"],
        capture_output=True,
        encoding="utf-8",
    )
    missing = subprocess.run([*command, tmp_path], capture_output=True, encoding="utf-8")

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "both.html")
    data = embedded(tmp_path / "both.html")
    assert [data[f"run-{n}"]["name"] for n in (0, 1)] == ["one", "two"]
    assert missing.returncode == 1
    assert missing.stderr == f"{tmp_path / 'args.json'} is missing\n"


def test_no_run_is_refused():
    with pytest.raises(ValueError, match="no run is given"):
        track.write_report([])


# ---- in a browser ----


@pytest.mark.parametrize(
    ("per_token", "message"),
    [
        ([{}], "per_token is for 1 samples; expected 2"),
        ([{}, {}, {}], "per_token is for 3 samples; expected 2"),
        (
            [{}, {"entropy": np.zeros(3)}],
            r"has entropy of shape \(3,\) for a sample of shape \(5,\)",
        ),
        ([{}, {"versions": np.zeros(5)}], "has versions, which is recorded for every sample; use"),
        ([{}, {"words": np.array(["a"] * 5)}], "has words of type <U1; expected numbers"),
    ],
)
def test_arrays_of_other_samples_are_refused(tmp_path, per_token, message):
    rollouts = [Rollout(samples=[sample([1, 2, 3, 4, 5], 2, 0)], reward=r) for r in (0.0, 1.0)]
    groups = [Group(task_id="t", rollouts=rollouts)]
    samples = advantage.assign(groups, advantage.centered)

    with track.Run(tmp_path, args={}) as run, pytest.raises(ValueError, match=message):
        run.log(0, groups, samples, per_token=per_token)

    assert (tmp_path / "metrics.jsonl").read_text() == ""
    assert (tmp_path / "rollouts.jsonl").read_text() == ""


def test_what_the_trainer_computed_is_recorded_by_token(tmp_path):
    folder = record(tmp_path, trainer=True)

    first = records(folder)[0]
    shown = embedded(folder / "report.html")["run-0-chunk-0"][0]["sequences"][0]
    assert first["logprobs"] == pytest.approx([0.0] * 4 + [-0.5 - np.log(2)] * 8)
    assert shown["logprobs"] == [0.0] * 4 + [-1.19315] * 8
    assert first["entropy"] == shown["entropy"] == [0.0] * 4 + [1.5] * 8


def test_of_several_passes_the_first_is_recorded(tmp_path):
    rollouts = [Rollout(samples=[sample([1, 2], 1, 0)], reward=r) for r in (0.0, 1.0)]
    groups = [Group(task_id="t", rollouts=rollouts)]
    samples = advantage.assign(groups, advantage.centered)
    passes = [{"entropy": np.array([0.0, number])} for number in (1.0, 2.0, 3.0, 4.0)]

    with track.Run(tmp_path, args={}) as run:
        run.log(0, groups, samples, per_token=passes)

    assert [line["entropy"] for line in records(tmp_path)] == [[0.0, 1.0], [0.0, 2.0]]


@needs_chromium
def test_colors_of_what_the_trainer_computed(tmp_path):
    with_trainer = record(tmp_path / "with", trainer=True) / "report.html"
    without = record(tmp_path / "without") / "report.html"
    background = "getComputedStyle(document.querySelector('.trained')).backgroundColor"
    title = "document.querySelector('.trained').title"

    async def steps(page):
        await page.click("#row-0")
        await page.until("document.querySelector('.trained') !== null")
        assert "ratio 0.5000\nentropy 1.5000" in await page.run(title)
        await page.run("document.getElementById('list').focus()")
        await page.press("c")
        ratio = await page.run(background)  # orange in full: half as likely
        assert ratio == "rgba(205, 92, 20, 0.75)"
        await page.press("c")
        await page.until(f"{background} === 'rgba(205, 92, 20, 0.376)'")  # 1.5 of 3 nats

    async def steps_without(page):
        await page.click("#row-0")
        await page.until("document.querySelector('.trained') !== null")
        assert "ratio not recorded\nentropy not recorded" in await page.run(title)
        await page.run("document.getElementById('list').focus()")
        await page.press("c")
        assert await page.run(background) == "rgba(20, 110, 205, 0)"

    in_browser(with_trainer, with_trainer.parent, steps)
    in_browser(without, without.parent, steps_without)


@needs_chromium
def test_curves_are_drawn_and_rollouts_open_by_click_and_by_key(tmp_path):
    folder = record(tmp_path / "run")
    lines = records(folder)

    async def steps(page):
        curves = await page.run("document.querySelectorAll('#charts .curve').length")
        assert curves >= 5
        text = "document.querySelector('article .text')?.textContent"
        await page.click("#row-1")
        await page.until(f"{text} !== undefined")
        assert await page.run(text) == "".join(WORDS[token] for token in lines[1]["token_ids"])
        assert await page.run("document.querySelectorAll('article b').length") == 0

        await page.run("document.getElementById('list').focus()")
        await page.press("ArrowDown")
        await page.until(
            f"{text} === {json.dumps(''.join(WORDS[t] for t in lines[2]['token_ids']))}"
        )
        await page.press("g")
        await page.until("document.querySelectorAll('article').length === 4")
        for color in ("ratio", "entropy", "logprob", "version", "advantage"):
            await page.press("c")
            assert await page.run("document.getElementById('color').value") == color
        await page.press("n")
        await page.until("document.querySelectorAll('rt').length === 4 * 8")

    in_browser(folder / "report.html", tmp_path, steps)


@needs_chromium
def test_filters_select_rollouts_and_two_runs_share_their_charts(tmp_path):
    one, two = record(tmp_path / "one"), record(tmp_path / "two", seed=1)
    report = track.write_report([one, two])

    async def steps(page):
        reward = "document.querySelector('#charts figure')"
        assert await page.run(f"{reward}.querySelectorAll('.curve').length") == 2
        for name, value in (("step-from", 1), ("step-to", 1), ("task", "TASK 1")):
            field = f"document.getElementById('{name}')"
            await page.run(f"{field}.value = '{value}'; {field}.dispatchEvent(new Event('input'))")
        assert await page.run("document.getElementById('count').textContent") == "4 of 24 rollouts"
        assert await page.run("document.querySelectorAll('#list .row').length") == 4
        rows = "[...document.querySelectorAll('.differs th')].map(row => row.textContent)"
        differing = await page.run(rows)
        assert "seed" in differing
        assert "lr" not in differing

    in_browser(report, tmp_path, steps, dark=True)


@needs_chromium
def test_ten_thousand_rollouts_open_at_once(tmp_path):
    folder = record(tmp_path / "run", steps=25, groups=50, size=8)

    async def steps(page):
        assert "10,000 of 10,000" in await page.run("document.getElementById('count').textContent")
        assert await page.run("document.querySelectorAll('#list .row').length") < 100
        await page.run("document.getElementById('list').focus()")
        await page.press("End")
        await page.until("document.querySelectorAll('article').length === 1")

    in_browser(folder / "report.html", tmp_path, steps)


def metrics_run(folder, **columns):
    """A run with these metrics; ``__`` in a name stands for a slash."""
    count = len(next(iter(columns.values())))
    with track.Run(folder, args={}) as run:
        for step in range(count):
            run.log(step, metrics={name.replace("__", "/"): x[step] for name, x in columns.items()})
    return folder


FIGURE = (
    "[...document.querySelectorAll('figure')]"
    ".find(one => one.querySelector('strong').textContent === '{}')"
)
OPEN_ALL = "document.querySelectorAll('details').forEach(one => one.open = true)"


@needs_chromium
@pytest.mark.parametrize("width", [400, 1400])
def test_labels_of_axes_are_whole_and_large_enough(tmp_path, width):
    """Their minus signs, too, at both widths. Digits were 8 pixels high, and long ones were cut."""
    folder = metrics_run(
        tmp_path / "run",
        small=[-4.9e-11, 1e-11, 3e-11],
        large=[-123_456_789.0, 5.0, 2e9],
        close=[-1000.00012, -1000.00011, -1000.0001],
    )
    boxes = (
        "[...document.querySelectorAll('.ticks span, .steps span')].map(one => {"
        "const figure = one.closest('figure').getBoundingClientRect();"
        "const box = one.getBoundingClientRect();"
        "return [one.textContent, box.left - figure.left, figure.right - box.right,"
        " one.scrollWidth - one.clientWidth, parseFloat(getComputedStyle(one).fontSize)];})"
    )

    async def steps(page):
        await page.run(OPEN_ALL)
        found = await page.run(boxes)
        labels = [label for label, *_ in found]
        assert {"-5e-11", "-1B", "-1,000.00012"} <= set(labels)
        for label, left, right, hidden, size in found:
            assert left >= 0, label
            assert right >= 0, label
            assert hidden <= 0, label
            assert size >= 12

    in_browser(folder / "report.html", tmp_path, steps, width=width)


@needs_chromium
def test_a_metric_that_spans_decades_has_a_logarithmic_axis_that_says_so(tmp_path):
    folder = metrics_run(
        tmp_path / "run",
        mismatch_kl=[4.9e-11, 1e-7, 1.9e-3],
        exact=[0.0, 1e-9, 1e-5],
        loss=[-1e-9, 1e-5, 1.0],
        errors=[0, 1, 400],
        entropy=[0.5, 1.0, 2.0],
    )

    def said(title):
        return f"{FIGURE.format(title)}.querySelector('.scale').textContent"

    def labels(title):
        texts = "querySelectorAll('.ticks span')].map(one => one.textContent)"
        return f"[...{FIGURE.format(title)}.{texts}"

    async def steps(page):
        assert await page.run(said("mismatch_kl")) == "log scale"
        assert await page.run(said("exact")) == "log scale"
        for title in ("loss", "errors", "entropy"):
            assert await page.run(said(title)) == ""
        assert await page.run(labels("mismatch_kl")) == ["1e-11", "1e-8", "1e-5", "0.01"]
        assert await page.run(labels("entropy")) == ["0.5", "1.0", "1.5", "2.0"]
        curve = f"{FIGURE.format('mismatch_kl')}.querySelector('.curve').getAttribute('d')"
        heights = [float(point.split()[1]) for point in (await page.run(curve))[1:].split("L")]
        assert heights[0] - heights[1] > 20  # 1e-7 is not at the bottom, as 4.9e-11 is

    in_browser(folder / "report.html", tmp_path, steps)


@needs_chromium
def test_colors_mean_runs_and_line_styles_mean_series(tmp_path):
    """Also in curves that show several series."""
    one, two = record(tmp_path / "one"), record(tmp_path / "two", seed=1)
    looks = (
        "[...document.querySelectorAll('figure')].map(one => ["
        "one.querySelector('strong').textContent,"
        " [...one.querySelectorAll('.curve')].map(line => [line.getAttribute('stroke'),"
        " line.getAttribute('stroke-dasharray')])])"
    )

    async def steps(page):
        found = dict(await page.run(looks))
        for title in ("reward", "completion_tokens", "staleness", "stop"):
            lines = found[title]
            assert {color for color, _ in lines} == {"var(--one)", "var(--two)"}
            assert len(set(map(tuple, lines))) == len(lines)
        assert {dash for _, dash in found["reward"]} == {""}
        samples = "document.querySelectorAll('#legend path')"
        legend = await page.run(f"[...{samples}].map(one => one.getAttribute('stroke'))")
        assert legend == ["var(--one)", "var(--two)"]

    in_browser(track.write_report([one, two]), tmp_path, steps)


@needs_chromium
def test_a_seventh_run_has_a_color_of_its_own_and_captions_stay_in_their_charts(tmp_path):
    """A sixth run looked like a further series of the first one; values left their charts."""
    folders = [
        metrics_run(tmp_path / f"async_grpo-{number:03}", tokens__a=[1.0], tokens__b=[2.0])
        for number in range(7)
    ]
    looks = (
        "[...document.querySelectorAll('figure')].find(one => one.querySelectorAll('.curve').length"
        " === 14).querySelectorAll('.curve')"
    )
    outside = (
        "[...document.querySelectorAll('figcaption *')].filter(one => one.getBoundingClientRect()"
        ".right > one.closest('figure').getBoundingClientRect().right).map(one => one.textContent)"
    )

    async def steps(page):
        await page.run(OPEN_ALL)
        colors = await page.run(f"[...{looks}].map(one => getComputedStyle(one).stroke)")
        dashes = await page.run(f"[...{looks}].map(one => one.getAttribute('stroke-dasharray'))")
        assert len(set(colors)) == 7
        assert len(set(dashes)) == 2
        assert await page.run(outside) == []

    in_browser(track.write_report(folders), tmp_path, steps)


@needs_chromium
def test_curves_of_extreme_numbers(tmp_path):
    """The page did not respond if neighboring floats of 1e17 were on one axis."""
    folder = metrics_run(
        tmp_path / "run",
        neighbors=[1e17, 1e17 + 16, 1e17],
        rounding=[0.3, 0.1 + 0.2, 0.3],
        count=[123_456_789, 123_456_790, 123_456_791],
        norm=[1.0, 1e300, 1e300],
        least=[0.0, 5e-324, 0.0],
        once=[None, 1.0, None],
    )
    labels = "[...{}.querySelectorAll('.ticks span')].map(one => one.textContent)"

    async def steps(page):
        await page.run(OPEN_ALL)
        found = {
            title: await page.run(labels.format(FIGURE.format(title)))
            for title in ("neighbors", "rounding", "count", "norm", "least", "once")
        }
        assert all(len(set(texts)) == len(texts) > 1 for texts in found.values()), found
        assert found["neighbors"] == ["5e16", "1.0e17", "1.5e17"]
        assert max(map(len, found["rounding"])) == 3
        assert found["count"][0] == "123,456,789"
        caption = f"{FIGURE.format('norm')}.querySelector('output').textContent"
        assert (await page.run(caption)).strip() == "1.00e300"
        once = f"getComputedStyle({FIGURE.format('once')}.querySelector('.curve')).strokeWidth"
        assert await page.run(once) == "6px"

    in_browser(folder / "report.html", tmp_path, steps)


def test_runs_of_the_same_name_are_named_by_their_paths(tmp_path):
    folders = [record(tmp_path / name, steps=1) for name in ("one/run", "two/run")]
    data = embedded(track.write_report(folders))

    assert [data[f"run-{number}"]["name"] for number in range(2)] == ["one/run", "two/run"]


CHATS = {
    "<|im_start|>system\nBrief.<|im_end|>\n<|im_start|>user\nHow  many?<|im_end|>\n": "How many?",
    "<|start_header_id|>user<|end_header_id|>\n\nHow many?<|eot_id|>": "How many?",
    "[gMASK]<sop><|user|>\nHow many?<|assistant|>": "How many?",
    "<|start|>user<|message|>How many?<|end|><|start|>assistant": "How many?",
    "<bos><start_of_turn>user\nHow many?<end_of_turn>\n": "How many?",
    "<s>[INST] How many? [/INST]": "How many?",
    "How many?\nA:": "How many? A:",
    "x" * 500: "x" * 79 + "…",
    "": "",
}


@pytest.mark.parametrize(("prompt", "words"), CHATS.items())
def test_the_first_words_are_those_of_the_user(prompt, words):
    assert first_words(prompt) == words


@needs_chromium
def test_the_list_of_rollouts_shows_the_first_words_of_prompts(tmp_path):
    folder = record(tmp_path / "run")
    prompt = " ".join(records(folder)[0]["prompt"].split())
    listed = "document.querySelector('#row-0').children[2].textContent"

    async def steps(page):
        assert await page.run("document.querySelector('#head').children[2].textContent") == "prompt"
        assert await page.run(listed) == prompt
        assert prompt

    in_browser(folder / "report.html", tmp_path, steps)


@needs_chromium
def test_a_verdict_is_on_top_for_each_run(tmp_path):
    folders = [
        metrics_run(tmp_path / name, loss=values)
        for name, values in (("good", [8.0, 7, 6, 5, 4, 3]), ("bad", [3.0, 4, 5, 6, 7, 8]))
    ]
    report = track.write_report(folders)

    async def steps(page):
        lines = "[...document.querySelectorAll('#verdict p')].map(one => one.textContent)"
        good, bad = await page.run(lines)
        assert good == "good: learning: loss 7.5 → 3.5 over 6 steps."
        assert bad.startswith("bad: not learning yet: loss 3.5 → 7.5 over 6 steps")

    in_browser(report, tmp_path, steps)


SOURCES = ("report_page.html", "report_conversation.js", "report.py", "verdict.py")


def test_the_screenshots_in_the_documentation_are_of_this_page(root):
    sources = [root / "primerl/track" / name for name in SOURCES]
    page = hashlib.sha256(b"".join(one.read_bytes() for one in sources)).hexdigest()
    shown = (root / "docs/images/report.sha256").read_text().strip()

    assert shown == page, "the report has changed: tools/screenshots.py RUN_DIR"
