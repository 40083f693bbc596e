"""The tokens of a sample say what its text says."""

import json

import pytest
import tokenizers
import transformers
from byte_tokenizer import byte_tokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from primerl import data

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.role == 'assistant' %}</s>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
TEXTS = (
    *("Hello, world. It 's a test , isn't it ?  Two  spaces\n\n\tTabs\r\n", " lead", "\n x"),
    *("\u00e9 e\u0301 漢字 😀 \u3000x\u00a0y\u200b", "do n't ca n't 'm", "a\u2028b\x00c\ufeffd"),
    *("def f(x):\n    return x\n", "<|im_start|>user", "\u1100\u1161 \u00c5 \u212b \ufb01"),
)


def wrapped(tokenizer, **options):
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)
    made.chat_template = TEMPLATE
    return made


def of_bytes(*, prefix=False, normalizer=None, **options):
    """A byte-level BPE tokenizer, such as that of GPT-2, whose unknown token is its eos token."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return wrapped(tokenizer, eos_token="</s>", unk_token="</s>", **options)


def like_llama(*, fallback=True, first=False):
    """A BPE tokenizer that writes spaces as U+2581, and one before each text."""
    unknown = ["<unk>", "<s>", "</s>"]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(byte_fallback=fallback, unk_token="<unk>", fuse_unk=True)
    )
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    steps = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    if fallback:
        unknown += [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=unknown, show_progress=False)
    tokenizer.train_from_iterator(["hello the test [user][assistant]"], trainer)
    if first:
        tokenizer.normalizer = None
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return wrapped(tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


STRIPPED = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])
HONEST = {
    "bytes": lambda: byte_tokenizer(["</s>"], TEMPLATE),
    "GPT-2": lambda: of_bytes(clean_up_tokenization_spaces=True),
    "RoBERTa": lambda: of_bytes(prefix=True, clean_up_tokenization_spaces=True),
    "Qwen": lambda: of_bytes(normalizer=normalizers.NFC()),
    "Llama 2": like_llama,
    "Metaspace": lambda: like_llama(first=True),
}


def sample_of(tokenizer, text):
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
    return data.training_sample({"messages": messages}, tokenizer, max_tokens=10_000)


@pytest.mark.parametrize("name", HONEST)
def test_tokenizers_that_keep_the_text(name):
    tokenizer = HONEST[name]()
    for text in TEXTS:
        assert sample_of(tokenizer, text).loss_mask.any(), text


@pytest.mark.parametrize(
    ("tokenizer", "reason"),
    [
        (lambda: like_llama(fallback=False), "has no token for a part of .* and writes '<unk>'"),
        (lambda: of_bytes(normalizer=normalizers.Lowercase()), "'Hi世.*' became 'hi"),
        (lambda: of_bytes(normalizer=STRIPPED), "'éé.*' became 'ee"),
        (lambda: of_bytes(normalizer=normalizers.Replace("世", "")), "'世界.*' became '界"),
    ],
)
def test_tokenizers_that_change_the_text(tokenizer, reason):
    with pytest.raises(data.ConversationError, match=reason):
        sample_of(tokenizer(), "Hi世界 éé")


def test_an_error_of_the_tokenizer_names_the_conversation(monkeypatch):
    tokenizer = of_bytes()

    def broken(text, **_):
        raise TypeError("TextEncodeInput must be Union")

    monkeypatch.setattr(tokenizer, "encode", broken)
    with pytest.raises(data.ConversationError, match="raised an error for .*: TypeError: TextEnc"):
        sample_of(tokenizer, "Hi")


@pytest.mark.parametrize("conversation", [None, [], "x", {"messages": None}])
def test_what_is_no_conversation(conversation):
    with pytest.raises(data.ConversationError, match="the conversation: expected an object with"):
        data.training_sample(conversation, of_bytes(), max_tokens=10)


def test_max_tokens_is_positive():
    with pytest.raises(ValueError, match="max_tokens is -1; expected at least 1"):
        data.training_sample({"messages": []}, of_bytes(), max_tokens=-1, too_long="cut")


def test_errors_begin_with_file_and_line_and_have_the_id(tmp_path):
    rows = [
        {"id": name, "messages": [{"role": "assistant", "content": "x"}]} for name in (0, "", "a")
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    conversations = data.Conversations(path)
    assert [one["id"] for one in conversations] == [0, f"{path}:2", "a"]
    for number, named in ((0, ":1 (0): "), (1, ":2: "), (2, ":3 (a): ")):
        with pytest.raises(data.ConversationError) as caught:
            data.training_sample(conversations[number], of_bytes(), max_tokens=10)
        assert str(caught.value).startswith(f"{path}{named}")
