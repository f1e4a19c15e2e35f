"""What was produced and nobody was told of yet. Each piece of news is handed out once."""

from collections.abc import Collection

from jaxpage.generate import Update

__all__ = ["News"]


class News:
    """Updates in the order in which they came."""

    def __init__(self) -> None:
        self.waiting: list[Update] = []

    def add(self, update: Update) -> None:
        """Keeps an update until it is taken."""
        self.waiting.append(update)

    def take(self, names: Collection[int] | None = None) -> list[Update]:
        """Hands out the updates of some requests; None: of all."""
        taken = [update for update in self.waiting if names is None or update.prompt_index in names]
        self.waiting = [] if names is None else [update for update in self.waiting if update.prompt_index not in names]
        return taken
