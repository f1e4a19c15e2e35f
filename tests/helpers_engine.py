"""What tests of the engine share: small engines, and the check that host, index and device agree."""

import numpy as np

from jaxpage import Engine, EngineOptions, Features, check_cache
from jaxpage.prefix.check import check_index
from jaxpage.programs import Programs
from models import Decoder

LEAN = Features(random=True, truncated=False, penalised=False, num_biases=0, num_stop_ids=1, num_logprobs=None)
"""All that most tests need; each further feature costs seconds of compilation."""


PROGRAMS = Programs()


def make_engine(model: Decoder, num_blocks: int, programs: Programs = PROGRAMS, **options: object) -> Engine:
    chosen = {"block_size": 4, "max_seqs": 4, "tokens_per_pass": 32, "steps_per_round": 4, "features": LEAN, **options}
    return Engine(model, EngineOptions(num_blocks=num_blocks, **chosen), programs=programs)  # type: ignore[arg-type]


def check_engine(engine: Engine) -> None:
    """Every invariant of the cache and the index; and, where nothing is under way, the host's account of the blocks."""
    cache = engine._device.state.cache
    check_cache(cache, holds=np.array(engine.index.blocks if engine.index is not None else []))
    if engine.index is not None:
        check_index(engine.index)  # type: ignore[arg-type]
    if not engine._runner.under_way:
        np.testing.assert_array_equal(cache.pool.refs, engine._memory.ledger.refs)
