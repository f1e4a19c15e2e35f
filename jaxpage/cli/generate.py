"""`jaxpage generate`."""

import dataclasses
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Literal, NamedTuple

import tqdm

import jaxpage
from jaxpage import admission, prompts
from jaxpage.cli import output
from jaxpage.cli.fetch import load_named_model
from jaxpage.programs import Programs
from models import LoadedModel

__all__ = ["Generate"]

_LOOKUP = "prompt-lookup"


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
    """Seed of the first text; each further one takes the next number."""
    n: int = 1
    """Texts for each prompt; with a temperature they differ. They share the prompt's blocks."""
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
    """Most texts to run at a time."""
    beam: int = 0
    """Beam search of this width instead of sampling; --n texts of it are printed, the best first. 0 is none."""
    speculate: str | None = None
    """Guess tokens ahead, which changes the speed and not the text: prompt-lookup, or a small model of the same vocabulary."""
    prefix_index: Literal["radix", "hash", "none"] = "radix"
    """How prompts with the same beginning are found, so that they share its blocks: to the token, by full blocks, or not at all."""
    dtype: str = "float32"
    """float32 or bfloat16, of weights and KV cache."""
    stream: bool = False
    """Print text as it is produced."""
    json: str | None = None
    """Write one JSON line a text to this file, or to the terminal with -."""
    stats: bool = False
    """Print one line on time, speed and the cache's use."""

    def run(self) -> None:
        """Loads, generates and prints results as they come. Ctrl-C prints what there is."""
        params = self._params()
        texts = [*self.prompt, *(prompts.read_prompts(self.prompts_file) if self.prompts_file else [])]
        if not texts:
            raise ValueError("no prompt given: use --prompt TEXT or --prompts-file FILE")
        for index, text in enumerate(texts):
            if not text.strip():
                raise ValueError(f"prompt {index} is empty")
        if self.n < 1:
            raise ValueError(f"n must be at least 1, got {self.n}")
        loaded = load_named_model(self.model, self.dtype)
        tokenizer = loaded.tokenizer
        ids = [tokenizer.chat([{"role": "user", "content": text}]) if self.chat else tokenizer.encode(text) for text in texts]
        if self.beam:
            self._search(loaded, ids, params, texts)
            return
        engine = self._engine(loaded, ids, params)
        jobs = self._submit(engine, ids, params, texts)
        streams = {name: output.StreamedText(tokenizer, self.stop) for name in jobs}
        peak, interrupted = engine.usage(), False
        with output.json_output(self.json) as file, tqdm.tqdm(total=len(jobs), disable=None if len(jobs) > 8 else True) as bar:
            for update in _updates(engine):
                interrupted |= update.completion is not None and update.completion.finish_reason == "aborted"
                peak = max(peak, engine.usage())
                job = jobs[update.prompt_index]
                if self.stream and self.json != "-":
                    _print_piece(update, job.name, streams[update.prompt_index], alone=len(jobs) == 1)
                if update.completion is None:
                    continue
                bar.update()
                if file is not None:
                    entry = output.record(update.completion, job.prompt, job.sample if self.n > 1 else None, job.text)
                    print(json.dumps(entry, ensure_ascii=False), file=file, flush=True)
                if not self.stream and self.json != "-":
                    bar.write(output.show_completion(update.completion, job.name, job.text), file=sys.stdout)
                    sys.stdout.flush()
        if self.stats:
            print(_stats_line(engine, peak), file=sys.stderr if self.json == "-" else sys.stdout)
        if interrupted:
            raise KeyboardInterrupt

    def _params(self) -> jaxpage.SamplingParams:
        names = {field.name for field in dataclasses.fields(jaxpage.SamplingParams)}
        return jaxpage.SamplingParams(**{name: value for name, value in vars(self).items() if name in names})

    def _search(self, loaded: LoadedModel, ids: list[list[int]], params: jaxpage.SamplingParams, texts: list[str]) -> None:
        """Beam search, one prompt after another."""
        plain = jaxpage.SamplingParams(params.max_tokens, seed=params.seed)
        if params != plain or self.stream or self.stats or self.speculate:
            raise ValueError("beam takes --n and --max-tokens, and none of the options of sampling, --stream, --stats or --speculate")
        if self.n > self.beam:
            raise ValueError(f"n must be at most the beam's width of {self.beam}, got {self.n}")
        programs, eos_ids = Programs(), loaded.tokenizer.eos_ids
        with output.json_output(self.json) as file:
            for number, prompt in enumerate(ids):
                found = jaxpage.beam_search(
                    loaded.decoder,
                    prompt,
                    width=self.beam,
                    max_tokens=self.max_tokens,
                    num_return=self.n,
                    eos_ids=eos_ids,
                    block_size=self.block_size,
                    cache_dtype=self.dtype,
                    programs=programs,
                )
                for sample, each in enumerate(found):
                    text = loaded.tokenizer.decode([token for token in each.token_ids if token not in eos_ids])
                    done = jaxpage.Completion(number, tuple(prompt), each.token_ids, text, each.finish_reason, None, None)
                    if file is not None:
                        entry = output.record(done, number, sample, texts[number]) | {"score": each.score}
                        print(json.dumps(entry, ensure_ascii=False), file=file, flush=True)
                    if self.json != "-":
                        print(output.show_completion(done, f"{number}.{sample}, score {each.score:.3f}", texts[number]), flush=True)

    def _engine(self, loaded: LoadedModel, ids: list[list[int]], params: jaxpage.SamplingParams) -> jaxpage.Engine:
        """An engine for just these prompts."""
        admission.check_sizes(self.block_size, self.max_seqs, self.num_blocks)
        requests = [request for request in admission.check_requests(ids, params, loaded.decoder.config) for _ in range(self.n)]
        config = admission.size_cache(
            requests,
            loaded.decoder.config,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            max_seqs=self.max_seqs,
            dtype=self.dtype,
        )
        options = jaxpage.EngineOptions(
            num_blocks=config.num_blocks,
            block_size=self.block_size,
            max_seqs=config.max_seqs,
            max_length=config.max_blocks_per_seq * self.block_size,
            cache_dtype=self.dtype,
            prefix_index=self.prefix_index,
            tokens_per_pass=512,
            steps_per_round=8 if self.stream else 32,
            features=jaxpage.Features.of([params], loaded.tokenizer.eos_ids),
            speculation=jaxpage.Speculation() if self.speculate else None,
        )
        draft = None if self.speculate in (None, _LOOKUP) else load_named_model(self.speculate, self.dtype).decoder
        return jaxpage.Engine(
            loaded.decoder, options, eos_ids=loaded.tokenizer.eos_ids, detokenize=loaded.tokenizer.decode, draft_model=draft
        )

    def _submit(self, engine: jaxpage.Engine, ids: list[list[int]], params: jaxpage.SamplingParams, texts: list[str]) -> "dict[int, _Job]":
        """All texts of all prompts, by their requests; further samples of a prompt take over the blocks of the first."""
        jobs: dict[int, _Job] = {}
        for number, prompt in enumerate(ids):
            first = None
            for sample in range(self.n):
                seeded = dataclasses.replace(params, seed=(self.seed + len(jobs)) % 2**32)
                name = engine.submit(prompt, seeded) if first is None else engine.fork(first, seeded, from_prompt=True)
                first = name if first is None else first
                jobs[name] = _Job(number, sample, f"{number}.{sample}" if self.n > 1 else str(number), texts[number])
        return jobs


class _Job(NamedTuple):
    prompt: int  # its number
    sample: int
    name: str
    text: str


def _updates(engine: jaxpage.Engine) -> Iterator[jaxpage.Update]:
    """All news to the end; after Ctrl-C what there is."""
    try:
        while engine.unfinished:
            yield from engine.step()
    except KeyboardInterrupt:
        engine.close()
    yield from engine.step()


def _print_piece(update: jaxpage.Update, name: str, text: output.StreamedText, *, alone: bool) -> None:
    piece, done = text.take(update), update.completion
    if alone:
        print(piece, end="\n" if done else "", flush=True)
        if done and done.finish_reason in output.NOTES:
            print(output.NOTES[done.finish_reason], flush=True)
    else:
        print(f"[{name}] {piece!r}" + (f" ({done.finish_reason})" if done else ""), flush=True)


def _stats_line(engine: jaxpage.Engine, peak: jaxpage.Usage) -> str:
    stats = engine.stats()
    seconds = stats.host_seconds + stats.wait_seconds - engine.programs.compile_seconds
    return (
        f"stats: {stats.prompt_tokens} prompt tokens computed and {stats.hit_tokens} shared, {stats.tokens} tokens produced, "
        f"{_drafts(stats)}in {seconds:.2f} s ({stats.tokens / seconds:.1f} tokens/s), compile {engine.programs.compile_seconds:.1f} s; "
        f"{peak.blocks_used} of {peak.blocks_total} blocks used, pool {engine.kv_bytes / 1e6:.1f} MB of KV, "
        f"{peak.share:.1%} of the slots in used blocks hold a token"
    )


def _drafts(stats: jaxpage.EngineStats) -> str:
    return f"{stats.kept_drafts} of {stats.drafted_tokens} guesses right, " if stats.drafted_tokens else ""
