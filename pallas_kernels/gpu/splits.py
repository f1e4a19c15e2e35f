"""How many programs share the context of one sequence."""

__all__ = ["num_splits"]

_PROGRAMS_PER_SM = 2  # so many fit a multiprocessor's shared memory at head_dim 128
_FEWEST_TILES = 4  # of a split: fewer do not pay for the merge


def num_splits(programs: int, tiles: int, num_sms: int) -> int:
    """Splits that fill the multiprocessors when the batch alone does not.

    Lengths are not known when a call is traced, so the widest context decides; a shorter one is cut into as many, smaller splits.

    Args:
      programs: programs of the call without splits: sequences times kv heads, times groups of 8 query heads.
      tiles: tiles of the longest context that a sequence can have.
      num_sms: multiprocessors of the device.
    """
    wanted = -(-_PROGRAMS_PER_SM * num_sms // programs)
    return max(1, min(wanted, tiles // _FEWEST_TILES))
