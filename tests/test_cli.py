"""The command line: what it prints, and that bad input is one line on stderr and exit code 2."""

import json
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import jax
import pytest

from jaxpage import cli

LLAMA = str(pathlib.Path(__file__).parent / "golden" / "llama")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A home of its own, and the process's compilation cache as it was."""
    monkeypatch.setenv("JAXPAGE_HOME", str(tmp_path / "home"))
    before = jax.config.jax_compilation_cache_dir
    yield
    jax.config.update("jax_compilation_cache_dir", before)


def generate(*arguments):
    cli.main(["generate", "--model", LLAMA, "--max-tokens", "5", *map(str, arguments)])


def error_of(capsys, arguments):
    with pytest.raises(SystemExit) as stopped:
        cli.main([str(argument) for argument in arguments])
    assert stopped.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1 and err.startswith("jaxpage: error: ")
    return err


def test_version_is_that_of_the_project(capsys):
    project = tomllib.loads((pathlib.Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    cli.main(["--version"])
    assert capsys.readouterr().out.strip() == project["version"]


def test_help_names_the_commands_and_explains_the_flags(capsys):
    for arguments, words in (
        (["--help"], ("generate", "fetch", "convert")),
        (["generate", "--help"], ("--prompts-file", "--top-p", "Tokens a KV")),
    ):
        with pytest.raises(SystemExit) as stopped:
            cli.main(arguments)
        assert stopped.value.code == 0
        out = capsys.readouterr().out
        assert all(word in out for word in words)


def test_json_lines_hold_one_record_a_sequence(capsys, tmp_path):
    generate("--prompt", "abc", "a longer prompt", "--json", "-", "--logprobs", 2, "--prompt-logprobs", "--ignore-eos")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert sorted(line["index"] for line in lines) == [0, 1]
    record = min(lines, key=lambda line: line["index"])
    assert record["prompt"] == "abc" and record["finish_reason"] == "length"
    assert record["num_tokens"] == len(record["token_ids"]) == 5
    assert len(record["prompt_logprobs"]) == record["num_prompt_tokens"]
    assert [token["token_id"] for token in record["logprobs"]] == record["token_ids"]
    assert all(token["logprob"] == pytest.approx(token["top"][0][1]) for token in record["logprobs"])
    assert record["prompt_logprobs"][0] is None and all(value < 0 for value in record["prompt_logprobs"][1:])

    generate("--prompt", "abc", "--json", tmp_path / "out.jsonl", "--ignore-eos")
    assert json.loads((tmp_path / "out.jsonl").read_text())["token_ids"] == record["token_ids"]
    assert "logprobs" not in json.loads((tmp_path / "out.jsonl").read_text())


def test_streamed_text_is_the_whole_text(capsys):
    generate("--prompt", "abc", "--ignore-eos", "--stream")
    streamed = capsys.readouterr().out
    generate("--prompt", "abc", "--ignore-eos", "--json", "-")
    assert streamed.rstrip("\n") == json.loads(capsys.readouterr().out)["text"].rstrip("\n")


def test_streamed_text_ends_before_a_stop_string(capsys):
    generate("--prompt", "abc", "--ignore-eos", "--json", "-", "--max-tokens", 12)
    text = json.loads(capsys.readouterr().out)["text"]
    stop = text[4:7]
    generate("--prompt", "abc", "--ignore-eos", "--stream", "--stop", stop, "--max-tokens", 12)
    assert capsys.readouterr().out == text[: text.index(stop)] + "\n"


def test_a_refused_request_leaves_the_output_file_alone(capsys, tmp_path):
    (tmp_path / "out.jsonl").write_text("kept")
    error_of(capsys, ["generate", "--model", LLAMA, "--prompt", "abc " * 500, "--json", tmp_path / "out.jsonl"])
    assert (tmp_path / "out.jsonl").read_text() == "kept"


def test_prompts_come_from_files_and_chat_uses_the_template(capsys, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "abc"}\n{"prompt": "a longer prompt"}\n')
    generate("--prompts-file", tmp_path / "prompts.jsonl", "--json", "-")
    assert [json.loads(line)["prompt"] for line in sorted(capsys.readouterr().out.splitlines())] == ["abc", "a longer prompt"]
    generate("--prompt", "abc", "--json", "-")
    plain = json.loads(capsys.readouterr().out)["num_prompt_tokens"]
    generate("--prompt", "abc", "--json", "-", "--chat")
    assert json.loads(capsys.readouterr().out)["num_prompt_tokens"] > plain


def test_stats_are_one_line(capsys):
    generate("--prompt", "abc", "--stats", "--ignore-eos", "--block-size", 4)
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if line.startswith("stats:")]
    for word in ("prompt tokens computed", "0 shared", "5 tokens produced", "tokens/s", "blocks used", "of KV", "hold a token"):
        assert word in line


def test_samples_of_a_prompt_have_seeds_of_their_own(capsys):
    generate("--prompt", "abc", "--n", 3, "--temperature", 1.5, "--json", "-", "--ignore-eos")
    lines = sorted((json.loads(line) for line in capsys.readouterr().out.splitlines()), key=lambda line: line["sample"])
    assert [(line["index"], line["sample"]) for line in lines] == [(0, 0), (0, 1), (0, 2)]
    assert len({tuple(line["token_ids"]) for line in lines}) == 3
    generate("--prompt", "abc", "--seed", 2, "--temperature", 1.5, "--json", "-", "--ignore-eos")
    assert json.loads(capsys.readouterr().out)["token_ids"] == lines[2]["token_ids"]


def test_beams_are_printed_the_best_first(capsys):
    generate("--prompt", "abc", "--beam", 3, "--n", 2, "--json", "-")
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert first["score"] >= second["score"] and first["token_ids"] != second["token_ids"]
    assert "none of the options of sampling" in error_of(capsys, ["generate", "--model", LLAMA, "--prompt", "a", "--beam", 2, "--top-k", 3])


def test_guessing_ahead_changes_no_token(capsys):
    generate("--prompt", "abcabcabcabc", "--json", "-")
    plain = capsys.readouterr().out
    generate("--prompt", "abcabcabcabc", "--json", "-", "--speculate", "prompt-lookup")
    assert capsys.readouterr().out == plain


def test_a_conversation_finds_its_earlier_turns_in_the_cache(capsys, monkeypatch):
    lines = iter(["hello", "and again", "/stats", "/tree", "/clear", "/what", "/exit"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    cli.main(["chat", "--model", LLAMA, "--max-tokens", "4"])
    out = capsys.readouterr().out
    hits, asked = map(int, re.search(r"(\d+) of (\d+) prompt tokens were in the cache", out).groups())
    assert 0 < hits < asked
    assert "namespace ''" in out
    assert out.count("/clear begins anew") == 2


def test_seeds_of_prompts_follow_each_other(capsys):
    sampled = ("--temperature", 1.5, "--json", "-", "--ignore-eos")
    generate("--prompt", "abc", "abc", "--seed", 3, *sampled)
    both = [json.loads(line)["token_ids"] for line in sorted(capsys.readouterr().out.splitlines())]
    generate("--prompt", "abc", "--seed", 4, *sampled)
    assert json.loads(capsys.readouterr().out)["token_ids"] == both[1] != both[0]


def test_a_converted_model_gives_the_same_tokens(capsys, tmp_path):
    cli.main(["convert", LLAMA, str(tmp_path / "checkpoint")])
    generate("--prompt", "abc", "--json", "-")
    before = capsys.readouterr().out.splitlines()[-1]
    cli.main(["generate", "--model", str(tmp_path / "checkpoint"), "--max-tokens", "5", "--prompt", "abc", "--json", "-"])
    assert json.loads(capsys.readouterr().out) == json.loads(before)


def test_a_pool_that_runs_out_loses_nothing(capsys):
    generate("--prompt", "abcabc", "abcdefgh", "--json", "-", "--ignore-eos", "--max-tokens", 12)
    whole = {record["index"]: record for record in map(json.loads, capsys.readouterr().out.splitlines())}
    blocks = 1 + sum(-(-record["num_prompt_tokens"] // 2) for record in whole.values()) + 1
    generate("--prompt", "abcabc", "abcdefgh", "--json", "-", "--ignore-eos", "--max-tokens", 12, "--block-size", 2, "--num-blocks", blocks)
    short = {record["index"]: record for record in map(json.loads, capsys.readouterr().out.splitlines())}
    reasons = [short[index]["finish_reason"] for index in (0, 1)]
    assert "out_of_blocks" in reasons
    for index, record in short.items():
        assert record["token_ids"] == whole[index]["token_ids"][: len(record["token_ids"])]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", ""], "prompt 0 is empty"),
        ([], "no prompt given"),
        (["--prompts-file", "nowhere.txt"], "nowhere.txt"),
        (["--prompt", "abc", "--block-size", 0], "block_size must be at least 1, got 0"),
        (["--prompt", "abcdefgh", "--block-size", 1, "--num-blocks", 3], "blocks of 1 tokens (the null block included), the pool has 3"),
        (["--prompt", "abc", "--temperature", -1], "temperature must be from 0.0 to inf, got -1.0"),
        (["--prompt", "abc", "--top-p", 1.5], "top_p must be from 0.0 to 1.0, got 1.5"),
        (["--prompt", "abc", "--max-tokens", 0], "max_tokens must be an integer from 1"),
        (["--prompt", "abc", "--dtype", "int4"], "int4"),
        (["--prompt", "abc " * 500], "the model's context holds"),
        (["--prompt", "abc", "--logit-bias", 100000, 1.0], "outside the vocabulary"),
    ],
)
def test_bad_input_is_one_line(capsys, arguments, message):
    assert message in error_of(capsys, ["generate", "--model", LLAMA, *arguments])


def test_bad_models_are_one_line(capsys, tmp_path):
    def error(model):
        return error_of(capsys, ["generate", "--model", model, "--prompt", "abc"])

    assert "does not exist" in error(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "holds no model" in error(tmp_path / "empty")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + b"\0" * 40)
    assert "broken.gguf" in error(tmp_path / "broken.gguf")
    shutil.copytree(LLAMA, tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "model.safetensors" in error(tmp_path / "cut")
    shutil.copytree(LLAMA, tmp_path / "other")
    config = tmp_path / "other" / "config.json"
    config.write_text(config.read_text().replace('"llama"', '"mamba"').replace("LlamaForCausalLM", "MambaForCausalLM"))
    assert "mamba" in error(tmp_path / "other").lower()
    assert "known models are: smollm2-135m" in error_of(capsys, ["fetch", "gpt-17"])


def test_bad_prompt_files_name_the_line(capsys, tmp_path):
    def error(name, content):
        (tmp_path / name).write_bytes(content)
        return error_of(capsys, ["generate", "--model", LLAMA, "--prompts-file", tmp_path / name])

    assert "bad.jsonl" in (line := error("bad.jsonl", b'{"prompt": "abc"}\nnot json\n')) and "2" in line
    assert "latin.txt" in (line := error("latin.txt", b"abc\nsch\xf6n\n")) and "2" in line
    assert "empty.txt" in error("empty.txt", b"\n\n")


def test_unknown_flags_exit_with_2():
    done = subprocess.run([sys.executable, "-m", "jaxpage.cli", "generate", "--modell", "x"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "--modell" in done.stderr
