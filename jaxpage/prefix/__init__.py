"""Prefix indexes: which blocks hold which first tokens, so that sequences can share them."""

from jaxpage.prefix.check import check_index
from jaxpage.prefix.eviction import POLICIES, Policy, Record
from jaxpage.prefix.hash_index import HashIndex
from jaxpage.prefix.index import Event, Match, PrefixIndex, Removed, Stats, Stored
from jaxpage.prefix.radix_index import RadixIndex

__all__ = [
    "POLICIES",
    "Event",
    "HashIndex",
    "Match",
    "Policy",
    "PrefixIndex",
    "RadixIndex",
    "Record",
    "Removed",
    "Stats",
    "Stored",
    "check_index",
]
