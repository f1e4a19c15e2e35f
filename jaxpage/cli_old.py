"""The command line: the one place where models, decoding and terminal come together."""

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, TextIO

import jax
import tqdm
import tyro

import jaxpage
from jaxpage import fetch, prompts
from models import LoadedModel, load_model, save_checkpoint
from models.tokenizer import StreamDecoder, Tokenizer

__all__ = ["main"]


@dataclasses.dataclass(frozen=True)
class Fetch:
    """Download a model by name and print its path. A model that is there already is not downloaded again."""

    name: Annotated[str, tyro.conf.Positional]
    """Which model: smollm2-135m."""

    def run(self) -> None:
        """Fetches with a progress bar on stderr."""
        print(_fetch(self.name))


@dataclasses.dataclass(frozen=True)
class Convert:
    """Write a model as an Orbax checkpoint folder, which every command loads like any other model."""

    model: Annotated[str, tyro.conf.Positional]
    """A name (smollm2-135m), a .gguf file, a Hugging Face folder, a checkpoint folder or a repository (org/name)."""
    out: Annotated[pathlib.Path, tyro.conf.Positional]
    """The folder to write; it must not exist or be empty."""
    dtype: str = "float32"
    """float32 or bfloat16."""

    def run(self) -> None:
        """Loads and saves."""
        save_checkpoint(_load(self.model, self.dtype), self.out)
        print(self.out)


@dataclasses.dataclass(frozen=True)
class Generate:
    """Generate text for one or many prompts from a paged KV cache. The defaults decode greedily."""

    model: str
    """A name (smollm2-135m, fetched if need be), a .gguf file, a Hugging Face folder, a checkpoint folder or a repository (org/name)."""
    prompt: tuple[str, ...] = ()
    """One or more prompts."""
    prompts_file: pathlib.Path | None = None
    """A file of prompts: .txt has one a line, .jsonl one object a line with the key "prompt"."""
    chat: bool = False
    """Put each prompt into the model's chat format, as the user's message."""
    max_tokens: int = 128
    """Most tokens to produce for each prompt."""
    min_tokens: int = 0
    """Do not stop before so many tokens."""
    temperature: float = 0.0
    """0 takes the best token; higher values draw more freely."""
    top_k: int = 0
    """Draw from the k best tokens; 0 from all."""
    top_p: float = 1.0
    """Draw from the best tokens whose probabilities reach this sum."""
    min_p: float = 0.0
    """Draw from tokens at least this fraction as probable as the best."""
    repetition_penalty: float = 1.0
    """Above 1, tokens of the prompt and the output become less likely."""
    presence_penalty: float = 0.0
    """Subtracted from the scores of tokens in the output."""
    frequency_penalty: float = 0.0
    """Subtracted once for each time a token is in the output."""
    logit_bias: dict[int, float] = dataclasses.field(default_factory=dict)
    """Token ids and the values to add to their scores: ID VALUE ID VALUE."""
    seed: int = 0
    """Seed of the first prompt; each further prompt takes the next number."""
    stop: tuple[str, ...] = ()
    """Strings that end the text."""
    stop_ids: tuple[int, ...] = ()
    """Token ids that end the text, besides the model's own."""
    ignore_eos: bool = False
    """Go on past the model's own end of text."""
    logprobs: int | None = None
    """With --json: the log-probability of each token produced, and of so many alternatives."""
    prompt_logprobs: bool = False
    """With --json: the log-probability of each prompt token."""
    block_size: int = 16
    """Tokens a KV block holds."""
    num_blocks: int | None = None
    """Blocks in the pool, the null block included; by default as many as the prompts may need."""
    max_seqs: int = 64
    """Most prompts to run at a time."""
    dtype: str = "float32"
    """float32 or bfloat16, of weights and KV cache."""
    stream: bool = False
    """Print text as it is produced."""
    json: str | None = None
    """Write one JSON line a prompt to this file, or to the terminal with -."""
    stats: bool = False
    """Print one line on time, speed and the cache's use."""

    def run(self) -> None:
        """Loads, generates and prints results as they come."""
        params = self._params()
        texts = [*self.prompt, *(prompts.read_prompts(self.prompts_file) if self.prompts_file else [])]
        if not texts:
            raise ValueError("no prompt given: use --prompt TEXT or --prompts-file FILE")
        for index, text in enumerate(texts):
            if not text.strip():
                raise ValueError(f"prompt {index} is empty")
        loaded = _load(self.model, self.dtype)
        tokenizer = loaded.tokenizer
        ids = [tokenizer.chat([{"role": "user", "content": text}]) if self.chat else tokenizer.encode(text) for text in texts]
        decoder = jaxpage.BatchDecoder(
            loaded.decoder,
            eos_ids=tokenizer.eos_ids,
            detokenize=tokenizer.decode,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            max_seqs=self.max_seqs,
            cache_dtype=self.dtype,
            steps_per_round=8 if self.stream else 32,
        )
        requests = [dataclasses.replace(params, seed=(self.seed + index) % 2**32) for index in range(len(texts))]
        streams = [_StreamedText(tokenizer, self.stop) for _ in texts]
        updates = decoder.run(ids, requests)  # checks everything before the output is opened
        with _json_output(self.json) as output:
            for update in updates:
                if self.stream and self.json != "-":
                    _print_piece(update, streams[update.prompt_index], alone=len(texts) == 1)
                if update.completion is None:
                    continue
                if output is not None:
                    print(json.dumps(_record(update.completion, texts[update.prompt_index]), ensure_ascii=False), file=output, flush=True)
                if not self.stream and self.json != "-":
                    _print_completion(update.completion, texts[update.prompt_index])
        if self.stats:
            print(_stats_line(decoder), file=sys.stderr if self.json == "-" else sys.stdout)

    def _params(self) -> jaxpage.SamplingParams:
        names = {field.name for field in dataclasses.fields(jaxpage.SamplingParams)}
        return jaxpage.SamplingParams(**{name: value for name, value in vars(self).items() if name in names})


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the `jaxpage` command. Bad input ends it with one line on stderr and exit code 2."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    # Compiled programs are kept beside the models, so that only the first run of a shape waits for the compiler.
    jax.config.update("jax_compilation_cache_dir", str(fetch.default_home() / "programs"))
    try:
        if arguments == ["--version"]:
            print(importlib.metadata.version("jaxpage"))
        else:
            _command(arguments).run()
    except BrokenPipeError:
        # The reader has gone, as in `jaxpage ... | head`; what else is buffered goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, NotImplementedError, OSError) as error:
        _fail(" ".join(str(error).split()))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        _fail("out of memory: model and KV pool do not fit; lower --num-blocks, --max-tokens or --max-seqs")
    except KeyboardInterrupt:
        sys.exit(130)


def _fail(message: str) -> None:
    print(f"jaxpage: error: {message}", file=sys.stderr)
    sys.exit(2)


def _command(arguments: list[str]) -> Generate | Fetch | Convert:
    return tyro.extras.subcommand_cli_from_dict(
        {"generate": Generate, "fetch": Fetch, "convert": Convert},
        prog="jaxpage",
        description="Paged attention in JAX: run language models from a paged KV cache. `jaxpage --version` prints the version.",
        args=arguments,
        config=(tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes),
    )


def _load(model: str, dtype: str) -> LoadedModel:
    source = _fetch(model) if model in fetch.KNOWN_MODELS else model
    return load_model(source, dtype=dtype)


def _fetch(name: str) -> pathlib.Path:
    with tqdm.tqdm(desc=name, unit="B", unit_scale=True, disable=None, leave=False) as bar:

        def report(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        return fetch.fetch_model(name, report=report)


@contextlib.contextmanager
def _json_output(target: str | None) -> Iterator[TextIO | None]:
    if target is None:
        yield None
    elif target == "-":
        yield sys.stdout
    else:
        with open(target, "w", encoding="utf-8") as file:
            yield file


def _record(completion: jaxpage.Completion, prompt: str) -> dict[str, object]:
    record: dict[str, object] = {
        "index": completion.index,
        "prompt": prompt,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "num_prompt_tokens": len(completion.prompt_ids),
        "num_tokens": len(completion.token_ids),
    }
    if completion.logprobs is not None:
        record["logprobs"] = [token._asdict() for token in completion.logprobs]
    if completion.prompt_logprobs is not None:
        record["prompt_logprobs"] = list(completion.prompt_logprobs)
    return record


_CUT_SHORT = "(cut short: the pool ran out of blocks; raise --num-blocks)"


def _print_completion(completion: jaxpage.Completion, prompt: str) -> None:
    print(f"[{completion.index}] {prompt}\n{(completion.text or '').strip()}")
    if completion.finish_reason == "out_of_blocks":
        print(_CUT_SHORT)
    print(flush=True)


class _StreamedText:
    """What of a sequence's text may be shown: all but an end that a stop string may yet cut off."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
        self._decoder = StreamDecoder(tokenizer)
        self._held = max(map(len, stop), default=1) - 1
        self._text = ""
        self._shown = 0

    def take(self, update: jaxpage.Update) -> str:
        """The text that can be shown now and has not been yet."""
        if update.completion is None:
            self._text += self._decoder.push(update.token_ids)
            end = len(self._text) - self._held
        else:
            self._text = update.completion.text or ""
            end = len(self._text)
        piece = self._text[self._shown : max(end, self._shown)]
        self._shown += len(piece)
        return piece


def _print_piece(update: jaxpage.Update, text: _StreamedText, *, alone: bool) -> None:
    piece, done = text.take(update), update.completion
    if alone:
        print(piece, end="\n" if done else "", flush=True)
        if done and done.finish_reason == "out_of_blocks":
            print(_CUT_SHORT, flush=True)
    else:
        print(f"[{update.prompt_index}] {piece!r}" + (f" ({done.finish_reason})" if done else ""), flush=True)


def _stats_line(decoder: jaxpage.BatchDecoder) -> str:
    stats, usage = decoder.stats, decoder.stats.usage
    speed = stats.tokens / stats.decode_seconds if stats.decode_seconds else 0.0
    return (
        f"stats: prefill {stats.prefill_seconds:.2f} s ({stats.prompt_tokens} tokens), decode {stats.decode_seconds:.2f} s "
        f"({stats.tokens} tokens, {speed:.1f} tokens/s), compile {decoder.programs.compile_seconds:.1f} s; "
        f"{usage.blocks_used} of {usage.blocks_total} blocks used, pool {stats.kv_bytes / 1e6:.1f} MB of KV, "
        f"{usage.share:.1%} of the slots in used blocks hold a token"
    )


if __name__ == "__main__":
    main()
