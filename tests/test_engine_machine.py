"""A long random life of an engine whose pool is always too small."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx
from helpers_engine import check_engine, make_engine

import jaxpage
from jaxpage import SamplingParams

STEPS = 2000


@pytest.mark.parametrize("index", ["radix", "hash"])
def test_random_workload(tiny, index):
    """Submit, abort, fork, preempt and new weights at random. The new weights equal the old ones, so that all tokens are known."""
    random = np.random.default_rng(5)
    documents = [random.integers(0, 97, 60).tolist() for _ in range(4)]
    engine = make_engine(
        tiny, 26, max_length=80, prefix_index=index, preemption="swap", swap_bytes=60_000, scheduling="longest-prefix", max_passed_over=8
    )
    prompts, asked, ends = {}, {}, {}

    def remember(name):
        seq = engine._runner.seqs[name]
        prompts[name], asked[name] = seq.request.prompt, seq.request.params

    def submit():
        document = documents[random.integers(len(documents))]
        prompt = [*document[: random.integers(0, 50)], *random.integers(0, 97, random.integers(1, 8)).tolist()]
        sampled = {"temperature": 1.0, "seed": int(random.integers(2**32))} if random.random() < 0.5 else {}
        remember(
            engine.submit(prompt, SamplingParams(max_tokens=int(random.integers(1, 25)), **sampled), namespace=str(random.integers(2)))
        )

    def fork():
        parent = random.choice(list(engine._runner.seqs))
        seq = engine._runner.seqs[parent]
        remember(engine.fork(parent, dataclasses.replace(seq.request.params), from_prompt=bool(random.integers(2))))

    def abort():
        engine.abort(int(random.choice(list(engine._runner.seqs))))

    def preempt():
        engine._runner.collect_all()
        if engine._scheduler.running:
            engine._scheduler.preempt(
                engine._scheduler.running[random.integers(len(engine._scheduler.running))], swap=bool(random.integers(2))
            )

    def new_weights():
        graph, state = nnx.split(tiny)
        engine.set_model(nnx.merge(graph, jax.tree.map(lambda leaf: leaf + 0, state)))

    for _ in range(STEPS):
        if len(engine._runner.seqs) < 10 and random.random() < 0.4:
            submit()
        if engine._runner.seqs and random.random() < 0.05:
            random.choice([fork, fork, abort, preempt])()
        if random.random() < 0.005:
            new_weights()
        for update in engine.step():
            if update.completion is not None:
                ends[update.prompt_index] = update.completion
        check_engine(engine)
    while engine.unfinished:
        for update in engine.step():
            if update.completion is not None:
                ends[update.prompt_index] = update.completion
    engine._runner.collect_all()
    check_engine(engine)
    stats = engine.stats()
    assert stats.blocks_used == stats.blocks_cached
    assert stats.swapped_bytes == 0
    assert stats.preemptions > 20
    assert stats.hit_tokens > 1000
    assert ends.keys() == prompts.keys()

    names = list(ends)
    reasons = [ends[name].finish_reason for name in names]
    assert reasons.count("length") > 0.8 * len(names)
    alone = jaxpage.generate(tiny, [prompts[name] for name in names], [asked[name] for name in names], block_size=4)
    for name, completion in zip(names, alone, strict=True):
        got = ends[name].token_ids
        assert got == completion.token_ids[: len(got)], f"request {name} ended by {ends[name].finish_reason}"
        if ends[name].finish_reason == "length":
            assert len(got) == len(completion.token_ids)
