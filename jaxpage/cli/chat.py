"""`jaxpage chat`: a conversation whose earlier turns are prefix hits."""

import dataclasses
import sys

import jaxpage
from jaxpage.cli.fetch import load_named_model
from jaxpage.cli.output import NOTES, StreamedText
from models.tokenizer import Tokenizer

__all__ = ["Chat"]

_HELP = "/stats and /tree show what the cache shares and keeps, /clear begins anew, /exit or Ctrl-D ends; Ctrl-C stops an answer"


@dataclasses.dataclass(frozen=True)
class Chat:
    """Talk with a model. Each turn computes only what is new: the turns before it are found in the cache."""

    model: str
    """A name (smollm2-135m, fetched if need be), a .gguf file, a Hugging Face folder, a checkpoint folder or a repository (org/name)."""
    max_tokens: int = 512
    """Most tokens of an answer."""
    temperature: float = 0.0
    """0 takes the best token; higher values draw more freely."""
    top_p: float = 1.0
    """Draw from the best tokens whose probabilities reach this sum."""
    seed: int = 0
    """Seed of the first answer; each further one takes the next number."""
    system: str = ""
    """What the model is told before the conversation."""
    num_blocks: int | None = None
    """Blocks in the pool, the null block included; by default as many as the model's context needs."""
    block_size: int = 16
    """Tokens a KV block holds."""
    dtype: str = "float32"
    """float32 or bfloat16, of weights and KV cache."""

    def run(self) -> None:
        """Reads a line, answers it, and so on to the end of the input."""
        params = jaxpage.SamplingParams(self.max_tokens, temperature=self.temperature, top_p=self.top_p, seed=self.seed)
        loaded = load_named_model(self.model, self.dtype)
        options = jaxpage.EngineOptions(
            num_blocks=self.num_blocks or -(-loaded.decoder.config.max_length // self.block_size) + 1,
            block_size=self.block_size,
            max_seqs=1,
            cache_dtype=self.dtype,
            steps_per_round=8,
            features=jaxpage.Features.of([params], loaded.tokenizer.eos_ids),
        )
        engine = jaxpage.Engine(loaded.decoder, options, eos_ids=loaded.tokenizer.eos_ids, detokenize=loaded.tokenizer.decode)
        opening = [{"role": "system", "content": self.system}] if self.system else []
        messages = list(opening)
        print(_HELP)
        while (line := _ask()) is not None:
            if line in ("/exit", "/quit"):
                return
            if line == "/clear":
                messages = list(opening)
            elif line == "/stats":
                print(_stats(engine))
            elif line == "/tree":
                print(engine.index.render(lambda ids: repr(loaded.tokenizer.decode(ids, skip_special=False))))  # type: ignore[union-attr]
            elif line.startswith("/"):
                print(_HELP)
            elif line:
                messages.append({"role": "user", "content": line})
                try:
                    answer = _answer(engine, loaded.tokenizer, messages, params)
                except ValueError as error:  # the conversation is too long, for instance
                    messages.pop()
                    print(f"{error}; /clear begins anew", file=sys.stderr)
                    continue
                messages.append({"role": "assistant", "content": answer})
                params = dataclasses.replace(params, seed=(params.seed + 1) % 2**32)


def _ask() -> str | None:
    """A line of the user's; None at the end."""
    try:
        return input("> ").strip()
    except EOFError:
        print()
        return None


def _answer(engine: jaxpage.Engine, tokenizer: Tokenizer, messages: list[dict[str, str]], params: jaxpage.SamplingParams) -> str:
    """Prints an answer as it comes, and returns it. Ctrl-C ends it where it is."""
    name = engine.submit(tokenizer.chat(messages), params)
    text, said = StreamedText(tokenizer, params.stop), ""
    try:
        for update in engine.stream(name):
            piece = text.take(update)
            said += piece
            print(piece, end="", flush=True)
            if update.completion is not None and update.completion.finish_reason in NOTES:
                print(" " + NOTES[update.completion.finish_reason], end="")
    except KeyboardInterrupt:
        said = engine.abort(name).text or ""
        engine.step()
    print()
    return said


def _stats(engine: jaxpage.Engine) -> str:
    stats, usage = engine.stats(), engine.usage()
    asked = stats.prompt_tokens + stats.hit_tokens
    return (
        f"{stats.hit_tokens} of {asked} prompt tokens were in the cache ({stats.hit_tokens / max(asked, 1):.0%}); {stats.tokens} produced; "
        f"{usage.blocks_used} of {usage.blocks_total} blocks keep {usage.slots_used} tokens"
    )
