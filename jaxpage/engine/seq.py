"""One request as the host sees it: what is known of it, and what of it is on the device."""

import dataclasses

from jaxpage.admission import Request
from jaxpage.completion import Transcript
from jaxpage.engine.constraint import AllowedTokens
from jaxpage.engine.swap import Swapped
from jaxpage.prefix import Match

__all__ = ["Seq"]


@dataclasses.dataclass(eq=False, slots=True)
class Seq:
    """A request from its submission to its end.

    What has been dispatched to the device and not fetched yet is known by its upper bounds only.

    Attributes:
      id: its name.
      request: prompt, parameters, and how many tokens it may produce.
      transcript: what it has produced.
      tokens: prompt and produced tokens.
      priority: higher runs first and is preempted last.
      namespace: where prefixes are shared.
      arrival: its place in the order of submission.
      parent: the sequence whose blocks it takes over when it starts, if that still runs then.
      passed_over: how many sequences that came later were admitted before it.
      row: its row on the device, or None while it waits.
      blocks: blocks of its first tokens, as far as fetched.
      length: tokens in those.
      bound: most tokens it holds after all that is dispatched or promised.
      computed: tokens of `tokens` whose computation is dispatched.
      decoding: the device knows its newest token and samples the next.
      made_bound: most tokens it has produced after all that is dispatched.
      shared_tail: its last block may be shared, so that the next write takes a copy.
      match: the prefix that it has locked in the index.
      inserted: its blocks that the index has been offered.
      shareable: what it computes may be shared: it runs under the weights of now.
      swapped: its keys and values, while they are in host memory.
      allowed_tokens: says what it may choose next; None: anything.
      allowed_known: how many tokens it had produced when the device was told last what it may choose; None while it was not.
    """

    id: int
    request: Request
    transcript: Transcript
    tokens: list[int]
    priority: int
    namespace: str
    arrival: int
    parent: "Seq | None" = None
    passed_over: int = 0
    row: int | None = None
    blocks: list[int] = dataclasses.field(default_factory=list)
    length: int = 0
    bound: int = 0
    computed: int = 0
    decoding: bool = False
    made_bound: int = 0
    shared_tail: bool = False
    match: Match | None = None
    inserted: int = 0
    shareable: bool = True
    swapped: Swapped | None = None
    allowed_tokens: AllowedTokens | None = None
    allowed_known: int | None = None

    @property
    def steps_left(self) -> int:
        """Most tokens that it may still produce beyond all that is dispatched."""
        return self.request.max_tokens - self.made_bound

    @property
    def its_row(self) -> int:
        """The row of a sequence that runs."""
        assert self.row is not None, f"sequence {self.id} does not run"
        return self.row

    def continue_from(self, parent: "Seq", produced: list[int]) -> None:
        """It begins with the first tokens that another sequence has produced, and may take over that one's blocks."""
        self.transcript.token_ids.extend(produced)
        self.transcript.logprobs.extend(parent.transcript.logprobs[: len(produced)])
        self.tokens.extend(produced)
        self.made_bound = len(produced)
        self.parent = parent

    def forget_row(self) -> None:
        """It holds nothing on the device any more."""
        self.row, self.blocks, self.parent, self.match, self.allowed_known = None, [], None, None, None
        self.length = self.bound = self.computed = self.inserted = 0
        self.decoding = self.shared_tail = False
        self.shareable = True
        self.made_bound = len(self.transcript.token_ids)
