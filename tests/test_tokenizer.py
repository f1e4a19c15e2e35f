"""Text to ids and back: against an independent engine, over any unicode, and as a stream."""

import json
import pathlib
import shutil

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, pre_tokenizers

from models.formats.gguf_tokenizer import PRE_TOKENIZERS, read_tokenizer
from models.tokenizer import StreamDecoder, Tokenizer

HERE = pathlib.Path(__file__).parent
TINY = HERE / "golden" / "llama"
CASES = json.loads((HERE / "data" / "smollm2_tokenizer_cases.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def real(smollm2):
    """The tokenizer of SmolLM2, from its GGUF file."""
    return smollm2.tokenizer


@pytest.fixture(scope="module")
def toy():
    """The 256 bytes, five merges and three special tokens."""
    return Tokenizer.load(TINY)


@pytest.fixture
def folder(tmp_path):
    """A copy of the tiny tokenizer, to be changed."""
    return pathlib.Path(shutil.copytree(TINY, tmp_path / "tiny"))


def change_json(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def byte_level_metadata(**changes):
    """Byte-level BPE over the 256 bytes, as a GGUF file describes it; keys of the "tokenizer.ggml" part may be changed."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<s>", "</s>", "<eot>", "he", "Ġt"]
    own = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [1] * 256 + [3, 3, 3, 1, 1],
        "merges": ["h e", "Ġ t"],
        "bos_token_id": 256,
        "eos_token_id": 257,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (own | changes).items()}


def sentencepiece_metadata(**changes):
    """SentencePiece BPE with byte fallback: pieces for "the cat" and their scores."""
    pieces = ["▁", "t", "h", "e", "c", "a", "▁t", "he", "▁the", "at", "▁c", "cat", "▁cat"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    own = {
        "model": "llama",
        "tokens": tokens,
        "token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "scores": [0.0] * 259 + [-float(rank) for rank in (90, 91, 92, 93, 94, 95, 0, 1, 2, 3, 4, 6, 5)],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (own | changes).items()}


# Against an independent engine


@pytest.mark.parametrize("case", CASES, ids=lambda case: repr(case["text"])[:30])
def test_ids_of_an_independent_engine(real, case):
    assert real.encode(case["text"]) == case["ids_parse_special"]
    assert real.encode(case["text"], parse_special=False) == case["ids_plain"]
    assert real.decode(case["ids_plain"]) == case["text"]
    assert real.decode(case["ids_parse_special"], skip_special=False) == case["text"]


def test_there_are_cases():
    assert len(CASES) == 55 and any(case["ids_plain"] != case["ids_parse_special"] for case in CASES)


def test_chat_of_a_real_model(real):
    ids = real.chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    assert real.decode(ids, skip_special=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids.count(1) == 3 and real.eos_ids == (2,)


# Any unicode, whole and as a stream


def streamed(tokenizer, pieces, skip_special=True):
    stream = StreamDecoder(tokenizer, skip_special)
    texts = [stream.push(piece) for piece in pieces]
    assert not any(0xD800 <= ord(char) < 0xE000 for text in texts for char in text)
    return "".join(texts) + stream.finish()


def assert_round_trip(tokenizer, text):
    ids = tokenizer.encode(text, parse_special=False)
    assert tokenizer.decode(ids) == text
    assert streamed(tokenizer, [[token] for token in ids]) == text


@given(text=st.text())
def test_round_trip(toy, text):
    assert_round_trip(toy, text)


# This vocabulary has no token for a few control characters and for the bytes that begin characters from U+40000 on.
@given(text=st.text(st.characters(max_codepoint=0x3FFFF, exclude_categories=["Cs", "Cc"], include_characters="\n\t\r")))
def test_round_trip_of_a_real_model(real, text):
    assert_round_trip(real, text)


@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁")))
def test_round_trip_of_sentencepiece(text):
    assert_round_trip(read_tokenizer(sentencepiece_metadata()), text)


@given(data=st.data())
def test_stream_of_any_tokens_is_what_decode_gives(toy, data):
    """Sampled tokens are no valid UTF-8 in general."""
    tokenizer = data.draw(st.sampled_from([toy, read_tokenizer(sentencepiece_metadata())]))
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=30))
    skip = data.draw(st.booleans())
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=4)))
    pieces = [ids[start:end] for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    assert streamed(tokenizer, pieces, skip) == tokenizer.decode(ids, skip)


def test_only_whole_characters_are_given_out(toy):
    ids = toy.encode("a🙂é")
    assert len(ids) == 7
    stream = StreamDecoder(toy)
    assert [stream.push([token]) for token in ids] == ["a", "", "", "", "🙂", "", "é"]
    assert stream.finish() == ""


def test_unfinished_character(toy):
    first, *_ = toy.encode("🙂")
    stream = StreamDecoder(toy)
    assert stream.push([first]) == ""
    assert stream.finish() == "�" == toy.decode([first])
    assert stream.push(toy.encode("a")) == "a"  # it starts anew


def test_bytes_that_are_no_text_do_not_hide_what_follows(toy):
    first, *_ = toy.encode("🙂")
    assert toy.decode([first, *toy.encode("ok")]) == "�ok"


def test_decode_agrees_with_the_backend(real):
    for case in CASES:
        for skip in (True, False):
            expected = real.backend.decode(case["ids_parse_special"], skip_special_tokens=skip)
            assert real.decode(case["ids_parse_special"], skip) == expected


def test_ids_without_text(toy):
    assert toy.decode([toy.vocab_size, 10**6]) == ""


# Special tokens


def test_special_text_can_be_plain(toy):
    text = "<|im_start|>x"
    assert toy.encode(text) == [257, *toy.encode("x")]
    assert 257 not in toy.encode(text, parse_special=False)
    assert toy.encode(text) == [257, *toy.encode("x")]  # the other call changed nothing
    assert toy.decode(toy.encode(text)) == "x"


@pytest.mark.parametrize("metadata", [byte_level_metadata, sentencepiece_metadata])
@pytest.mark.parametrize(("add_bos", "add_eos"), [(True, False), (False, False), (True, True)])
def test_bos_only_where_the_model_asks_for_it(metadata, add_bos, add_eos):
    tokenizer = read_tokenizer(metadata(add_bos_token=add_bos, add_eos_token=add_eos))
    bos, eos = (tokenizer.backend.token_to_id(token) for token in ("<s>", "</s>"))
    plain = tokenizer.encode("the", add_special=False)
    expected = [*([bos] if add_bos else []), *plain, *([eos] if add_eos else [])]
    assert tokenizer.encode("the") == tokenizer.encode("the", parse_special=False) == expected


def test_bos_by_default():
    assert read_tokenizer(sentencepiece_metadata()).encode("")[:1] == [1]
    assert read_tokenizer(byte_level_metadata()).encode("") == []
    assert read_tokenizer(byte_level_metadata(pre="llama-bpe")).encode("") == [256]


@pytest.mark.parametrize(("add_bos", "expected"), [(True, [256]), (False, [])])
def test_bos_in_a_folder(folder, add_bos, expected):
    change_json(folder / "tokenizer_config.json", add_bos_token=add_bos)
    assert Tokenizer.load(folder).encode("") == expected


def test_bos_that_is_no_token(folder):
    change_json(folder / "tokenizer_config.json", add_bos_token=True, bos_token="<bos>")
    with pytest.raises(ValueError, match="'<bos>' around texts, but its vocabulary has no such token"):
        Tokenizer.load(folder)


def test_a_chat_has_one_bos():
    metadata = byte_level_metadata(add_bos_token=True) | {"tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}"}
    assert read_tokenizer(metadata).chat([{"role": "user", "content": "he"}]).count(256) == 1


def test_end_of_generation_ids():
    assert read_tokenizer(byte_level_metadata(eot_token_id=258)).eos_ids == (257, 258)
    assert read_tokenizer(byte_level_metadata(eot_token_id=257)).eos_ids == (257,)


@pytest.mark.parametrize(("value", "ids"), [(7, (7,)), ([7, 8], (7, 8))])
def test_end_of_generation_ids_of_a_folder(folder, value, ids):
    change_json(folder / "generation_config.json", eos_token_id=value)
    assert Tokenizer.load(folder).eos_ids == ids


def test_end_of_generation_ids_from_other_files(folder):
    (folder / "generation_config.json").unlink()
    change_json(folder / "config.json", eos_token_id=9)
    assert Tokenizer.load(folder).eos_ids == (9,)
    (folder / "config.json").unlink()
    assert Tokenizer.load(folder).eos_ids == (258,)  # "<|im_end|>" of tokenizer_config.json


# The tables of a GGUF file


def cut(pre, text):
    """The pieces before byte-level BPE."""
    backend = read_tokenizer(byte_level_metadata(pre=pre)).backend
    return [text[start:end] for _, (start, end) in backend.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["I", "'", "M", " 12345", " a", "-", "b", "\n\n", " c", "!?"]),
        ("smollm", ["I", "'", "M", " ", "1", "2", "3", "4", "5", " a", "-", "b", "\n\n", " c", "!?"]),
        ("llama-bpe", ["I", "'M", " ", "123", "45", " a", "-b", "\n\n", " c", "!?"]),
        ("qwen2", ["I", "'M", " ", "1", "2", "3", "4", "5", " a", "-b", "\n\n", " c", "!?"]),
        ("default", ["I", "'", "M", " ", "123", "45", " a", "-", "b", "\n\n", " c", "!?"]),
    ],
)
def test_pre_tokenizers(pre, pieces):
    assert cut(pre, "I'M 12345 a-b\n\n c!?") == pieces


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
@given(text=st.text())
def test_pre_tokenizers_lose_nothing(pre, text):
    tokenizer = read_tokenizer(byte_level_metadata(pre=pre))
    expected = tokenizer.backend.normalizer.normalize_str(text) if tokenizer.backend.normalizer else text
    assert tokenizer.decode(tokenizer.encode(text, parse_special=False)) == expected


def test_sentencepiece():
    tokenizer = read_tokenizer(sentencepiece_metadata())

    def tokens(text):
        return [tokenizer.backend.id_to_token(token) for token in tokenizer.encode(text, add_special=False)]

    assert tokens("the cat") == ["▁the", "▁cat"]
    assert tokens("thé") == ["▁t", "h", "<0xC3>", "<0xA9>"]
    assert tokens("the</s>the") == ["▁the", "</s>", "▁the"]
    assert tokenizer.decode(tokenizer.encode("the cat")) == "the cat"
    assert tokenizer.decode(tokenizer.encode("  the")) == "  the"


def test_sentencepiece_without_the_first_space():
    tokenizer = read_tokenizer(sentencepiece_metadata(add_space_prefix=False))
    assert [tokenizer.backend.id_to_token(token) for token in tokenizer.encode("the cat", add_special=False)] == ["t", "he", "▁cat"]
    assert tokenizer.decode(tokenizer.encode(" the")) == " the"


def test_refused_tables():
    with pytest.raises(ValueError, match="holds 1 tokens twice"):
        read_tokenizer(byte_level_metadata(tokens=["a", "a"]))
    with pytest.raises(ValueError, match="remove_extra_whitespaces is not supported"):
        read_tokenizer(sentencepiece_metadata(remove_extra_whitespaces=True))
    with pytest.raises(KeyError, match=r"tokenizer\.ggml\.tokens"):
        read_tokenizer({key: value for key, value in byte_level_metadata().items() if not key.endswith("tokens")})


# Folders


@pytest.mark.parametrize("metadata", [byte_level_metadata, sentencepiece_metadata])
def test_save_and_load(metadata, tmp_path):
    template = "{% for message in messages %}\r\n{{ message.content }}{% endfor %}"
    tokenizer = read_tokenizer(metadata(add_bos_token=True) | {"tokenizer.chat_template": template})
    tokenizer.save(tmp_path)
    again = Tokenizer.load(tmp_path)
    for text in ("the cat", "<s>é🙂 </s>", "", "  "):
        for options in ({}, {"parse_special": False}, {"add_special": False}):
            assert again.encode(text, **options) == tokenizer.encode(text, **options)
    assert (again.eos_ids, again.special_tokens, again.chat_template) == (tokenizer.eos_ids, tokenizer.special_tokens, template)
    assert again.vocab_size == tokenizer.vocab_size


def test_truncation_and_padding_are_ignored(folder, toy):
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    backend.save(str(folder / "tokenizer.json"))
    assert Tokenizer.load(folder).encode("a long prompt") == toy.encode("a long prompt")


def test_other_kinds_are_refused(folder):
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.decoder = decoders.WordPiece()
    backend.save(str(folder / "tokenizer.json"))
    with pytest.raises(ValueError, match="decodes with WordPiece is not supported; supported: byte-level and SentencePiece BPE"):
        Tokenizer.load(folder)


def test_named_chat_templates(folder):
    (folder / "chat_template.jinja").unlink()
    templates = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "{{ messages[0].content }}"}]
    change_json(folder / "tokenizer_config.json", chat_template=templates)
    assert Tokenizer.load(folder).chat_template == "{{ messages[0].content }}"
    change_json(folder / "tokenizer_config.json", chat_template=templates[:1])
    with pytest.raises(ValueError, match="no chat template"):
        Tokenizer.load(folder).chat([{"role": "user", "content": "x"}])


def test_special_tokens_may_be_described_at_length(folder):
    change_json(folder / "tokenizer_config.json", bos_token={"content": "<|im_start|>", "special": True})
    assert Tokenizer.load(folder).special_tokens["bos_token"] == "<|im_start|>"
