"""An engine on disk: what is restored goes on as if nothing had happened, and a save that fails changes nothing."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from flax import nnx
from helpers_engine import LEAN, PROGRAMS, check_engine

from jaxpage import Engine, EngineOptions, SamplingParams
from jaxpage.engine import save as save_module
from models import Decoder

OPTIONS = EngineOptions(num_blocks=18, block_size=4, max_seqs=4, tokens_per_pass=32, steps_per_round=4, features=LEAN)
FEATURES = dataclasses.replace(LEAN, constrained=True, num_logprobs=2, num_stop_ids=0, random=True, penalised=True)


@pytest.fixture(scope="module")
def prompts():
    random = np.random.default_rng(0)
    return [random.integers(0, 97, size).tolist() for size in (5, 17, 16, 2, 30, 1)]


PARAMS = [SamplingParams(max_tokens=14 + index, temperature=float(index % 2), seed=index) for index in range(6)]


def submit_all(engine, prompts, params=PARAMS):
    return [engine.submit(prompt, each) for prompt, each in zip(prompts, params, strict=True)]


def finish(engine):
    """All completions that are still to come, by name."""
    done = {}
    for _ in range(400):
        for update in engine.step():
            if update.completion is not None:
                done[update.prompt_index] = update.completion
        if not engine.unfinished:
            check_engine(engine)
            return done
    raise AssertionError("the engine did not come to an end")


def letters(ids):
    return "".join(chr(65 + token // 26) + chr(97 + token % 26) for token in ids)


@pytest.mark.parametrize(
    ("steps", "options"),
    [
        (0, {}),
        (1, {}),
        (3, {}),
        (7, {}),
        (12, {}),
        (7, {"prefix_index": "hash"}),
        (7, {"prefix_index": "none"}),
        (9, {"preemption": "swap", "swap_bytes": 10**8}),
    ],
)
def test_the_restored_engine_gives_what_the_uninterrupted_one_gives(tiny, prompts, tmp_path, steps, options):
    """The pool is too small for all, so that some have given way by the time of the save."""
    options = dataclasses.replace(OPTIONS, **options)
    engine = Engine(tiny, options, programs=PROGRAMS)
    names = submit_all(engine, prompts)
    ended = {}
    for _ in range(steps):
        ended |= {update.prompt_index: update.completion for update in engine.step() if update.completion is not None}
    engine.save(tmp_path / "engine")
    restored = Engine.restore(tmp_path / "engine", tiny, options, programs=PROGRAMS)
    check_engine(restored)
    assert restored.stats() == engine.stats()
    fresh = [engine.submit([*prompts[1], 3], PARAMS[0]), restored.submit([*prompts[1], 3], PARAMS[0])]
    assert fresh == [len(names)] * 2
    rest = finish(engine)
    assert finish(restored) == rest
    assert sorted({**ended, **rest}) == [*names, fresh[0]]
    if engine.index is not None:
        assert restored.index.evict(100) == engine.index.evict(100)


def test_swapped_sequences_come_back_from_the_disk(tiny, prompts, tmp_path):
    options = dataclasses.replace(OPTIONS, preemption="swap", swap_bytes=10**8)
    engine = Engine(tiny, options, programs=PROGRAMS)
    submit_all(engine, prompts)
    for _ in range(60):
        if engine.stats().swapped_bytes:
            break
        engine.step()
    assert engine.stats().swapped_bytes > 0
    engine.save(tmp_path)
    restored = Engine.restore(tmp_path, tiny, options, programs=PROGRAMS)
    assert restored.stats().swapped_bytes == engine.stats().swapped_bytes
    assert finish(restored) == finish(engine)


def test_news_logprobs_stop_strings_functions_and_forks_are_kept(tiny, prompts, tmp_path):
    options = dataclasses.replace(OPTIONS, num_blocks=80, features=FEATURES)

    def even(produced):
        mask = np.zeros(97, bool)
        mask[len(produced) % 2 :: 2] = True
        return mask

    given = {"detokenize": letters, "programs": PROGRAMS}
    engine = Engine(tiny, options, **given)
    params = SamplingParams(max_tokens=12, logprobs=2, prompt_logprobs=True, logit_bias={}, frequency_penalty=0.5)
    names = [
        engine.submit(prompts[0], params, namespace="a", priority=2),
        engine.submit(prompts[1], dataclasses.replace(params, stop=("zz",)), namespace="a"),
        engine.submit(prompts[2], dataclasses.replace(params, temperature=1.0, seed=5), allowed_tokens=even),
        engine.submit(prompts[3], SamplingParams(max_tokens=1)),
    ]
    for _ in range(3):
        engine._runner.advance()  # as `step`, but the news are kept: the last request has ended
    assert any(update.completion for update in engine._runner.news.waiting)
    names.append(engine.fork(names[0], dataclasses.replace(params, seed=9, temperature=1.0)))
    engine.index.pin(prompts[3], "")
    engine.save(tmp_path)
    restored = Engine.restore(tmp_path, tiny, options, allowed_tokens={names[2]: even}, **given)
    done = finish(engine)
    assert finish(restored) == done
    assert sorted(done) == names
    assert all(token % 2 == place % 2 for place, token in enumerate(done[names[2]].token_ids))
    restored.index.unpin(prompts[3], "")
    with pytest.raises(ValueError, match=f"request {names[2]} was saved with allowed_tokens, so it is restored so"):
        Engine.restore(tmp_path, tiny, options, **given)
    with pytest.raises(ValueError, match=f"request {names[1]} has stop strings, which need a detokenizer"):
        Engine.restore(tmp_path, tiny, options, allowed_tokens={names[2]: even}, programs=PROGRAMS)


@pytest.fixture(scope="module")
def saved(tiny, prompts, tmp_path_factory):
    """A folder with an engine that has four sequences under way, and their completions."""
    folder = tmp_path_factory.mktemp("saved")
    engine = Engine(tiny, OPTIONS, programs=PROGRAMS)
    submit_all(engine, prompts)
    for _ in range(4):
        engine.step()
    engine.save(folder)
    return folder, finish(engine)


@pytest.mark.parametrize("place", ["arrays", "sync", "host", "rename"])
def test_a_save_that_fails_leaves_the_one_before_whole(tiny, prompts, saved, tmp_path, monkeypatch, place):
    folder = shutil.copytree(saved[0], tmp_path / "engine")
    engine = Engine.restore(folder, tiny, OPTIONS, programs=PROGRAMS)
    engine.step()

    def fail(*_, **__):
        raise OSError("the disk is full")

    save_arrays = save_module.save_arrays

    def save_some(path, tree):
        save_arrays(path, tree)
        fail()

    fault = {
        "arrays": lambda patch: patch.setattr(save_module, "save_arrays", save_some),
        "sync": lambda patch: patch.setattr(save_module.os, "fsync", fail),
        "host": lambda patch: patch.setattr(save_module.json, "dump", fail),
        "rename": lambda patch: patch.setattr(save_module.Path, "replace", fail),
    }[place]
    with monkeypatch.context() as patch:
        fault(patch)
        with pytest.raises(OSError, match="the disk is full"):
            engine.save(folder)
    assert finish(Engine.restore(folder, tiny, OPTIONS, programs=PROGRAMS)) == saved[1]
    engine.save(folder)  # the engine is as good as before, and what the failure left is cleared away
    assert sum(path.name.startswith("arrays-") for path in folder.iterdir()) == 1
    assert finish(Engine.restore(folder, tiny, OPTIONS, programs=PROGRAMS)) == finish(engine)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 8}, "block_size of the options is 4 there and 8 here"),
        (
            {"num_blocks": 30, "max_seqs": 2},
            "num_blocks of the options is 18 there and 30 here; max_seqs of .* 4 there and 2 here",
        ),
        ({"prefix_index": "hash"}, "prefix_index of the options is 'radix' there and 'hash' here"),
        ({"features": dataclasses.replace(LEAN, penalised=True)}, "features of the options is .* there and .* here"),
    ],
)
def test_other_options_are_refused_by_name(tiny, saved, changes, message):
    with pytest.raises(ValueError, match=f"the saved engine cannot go on here: {message}"):
        Engine.restore(saved[0], tiny, dataclasses.replace(OPTIONS, **changes))


def test_another_model_is_refused_by_its_sizes(tiny, saved):
    with jax.default_device(jax.devices("cpu")[0]):
        other = Decoder(dataclasses.replace(tiny.config, num_layers=1, hidden_size=16), rngs=nnx.Rngs(0))
    message = "hidden_size of the model is 32 there and 16 here; num_layers of the model is 2 there and 1 here"
    with pytest.raises(ValueError, match=message):
        Engine.restore(saved[0], other, OPTIONS)
    with pytest.raises(ValueError, match=r"eos_ids of the engine is \[\] there and \[7\] here"):
        Engine.restore(saved[0], tiny, OPTIONS, eos_ids=[7])
    with pytest.raises(ValueError, match="hidden_size of the draft model is None there and 16 here"):
        Engine.restore(saved[0], tiny, OPTIONS, draft_model=other)


def test_what_is_broken_or_not_there_is_named(tiny, saved, tmp_path):
    with pytest.raises(FileNotFoundError, match="no engine was saved there"):
        Engine.restore(tmp_path / "nowhere", tiny, OPTIONS)
    folder = shutil.copytree(saved[0], tmp_path / "engine")
    text = (folder / "engine.json").read_text()
    (folder / "engine.json").write_text(text[:-9])
    with pytest.raises(ValueError, match=r"engine\.json is broken: "):
        Engine.restore(folder, tiny, OPTIONS)
    (folder / "engine.json").write_text(json.dumps(json.loads(text) | {"format": 99}))
    with pytest.raises(ValueError, match=r"engine\.json is no saved engine of format 1"):
        Engine.restore(folder, tiny, OPTIONS)
    host = json.loads(text)
    host["seqs"][0]["blocks"] = []
    (folder / "engine.json").write_text(json.dumps(host))
    with pytest.raises(ValueError, match="hold other blocks than its pool says"):
        Engine.restore(folder, tiny, OPTIONS, programs=PROGRAMS)
    (folder / "engine.json").write_text(text)
    shutil.rmtree(folder / json.loads(text)["arrays"])
    with pytest.raises(FileNotFoundError, match="the checkpoint was not finished, or is not one"):
        Engine.restore(folder, tiny, OPTIONS, programs=PROGRAMS)
