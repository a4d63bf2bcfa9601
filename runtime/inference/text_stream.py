"""Turns the tokens of one completion into text while they come: whole characters, up to a text that stops it."""

from collections.abc import Callable, Sequence

NO_CHARACTER = "\ufffd"  # what bytes decode to that are no character, or not yet
MOST_PENDING = 3  # tokens at the end of a text that the next ones may complete: a character has 4 bytes at most


class TextStream:
    """Decodes the tokens that follow others. before: the last tokens of a prompt, as a token's text may depend on what
    it follows: SentencePiece drops the space of the first one."""

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Sequence[int]):
        self._decode = decode
        self._tokens = list(before)
        self._first, self._shown = 0, len(self._tokens)  # tokens decoded again, for what they are followed by; shown

    def add(self, token: int) -> str:
        """Returns the text that this token completes."""
        self._tokens.append(token)
        if not self._decode(self._tokens[self._first :]).endswith(NO_CHARACTER):
            return self._show(len(self._tokens))
        if len(self._tokens) - self._shown <= MOST_PENDING:
            return ""
        return self._show(len(self._tokens) - MOST_PENDING)

    def end(self) -> str:
        """Returns the text of what is incomplete at the end."""
        return self._show(len(self._tokens))

    def _show(self, last: int) -> str:
        before = self._decode(self._tokens[self._first : self._shown])
        text = self._decode(self._tokens[self._first : last])[len(before) :]
        self._first, self._shown = self._shown, last
        return text


class Stops:
    """Ends a text before the first of some texts. What may be the beginning of one is held back."""

    def __init__(self, stops: Sequence[str]):
        self._stops = stops
        self._held = ""
        self.is_over = False

    def add(self, text: str) -> str:
        """Returns what can be shown."""
        self._held += text
        places = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            self.is_over = True
            shown, self._held = self._held[: min(places)], ""
            return shown
        num_held = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - num_held
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def end(self) -> str:
        """Returns what was held back, where no more text comes."""
        shown, self._held = self._held, ""
        return shown


def _overlap(text: str, stop: str) -> int:
    """Returns how many characters at the end of a text begin the other one."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
