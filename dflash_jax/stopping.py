"""When a generated sequence ends, and which of its text may already be shown.

Runs on the host. A speculative round emits several tokens at once, so every rule is applied token by token
inside the block: the result never depends on how the tokens were grouped into rounds. Rules, in the order in
which they are looked at for each token (meanings as in vLLM):

1. A stop token ends the sequence. Its id is kept in the ids; it adds nothing to the text, special or not.
2. A stop string ends the sequence with the token that completes it. That token's id is kept, later ones are
   dropped; the text is cut before the stop string. The string may begin and end inside tokens and span
   rounds.
3. `max_new_tokens` ends it with reason "length"; a stop rule met by that same token wins.

Several stop strings: the one whose last character comes first wins; of those that end at the same character,
the longest. This depends on the text only, not on where tokens begin.
"""

import dataclasses
from collections.abc import Iterable
from typing import Literal

from dflash_jax.errors import UserError
from dflash_jax.tokenizer import Tokenizer

FinishReason = Literal["stop", "length"]


class _Matcher:
    """One stop string, fed a character at a time (Knuth-Morris-Pratt, O(1) amortised).

    `state` is the length of the longest prefix of the pattern that the text so far ends with.
    """

    def __init__(self, pattern: str):
        self.pattern = pattern
        self.state = 0
        # border[i]: length of the longest proper prefix of pattern[:i] that is also its suffix.
        self._border = [0] * (len(pattern) + 1)
        length = 0
        for i in range(1, len(pattern)):
            while length and pattern[i] != pattern[length]:
                length = self._border[length]
            length += pattern[i] == pattern[length]
            self._border[i + 1] = length

    def feed(self, char: str) -> bool:
        """Takes one character; True when the text now ends with the pattern. Not to be fed after that."""
        while self.state and char != self.pattern[self.state]:
            self.state = self._border[self.state]
        self.state += char == self.pattern[self.state]
        return self.state == len(self.pattern)


class StopStrings:
    """Searches a growing text for stop strings and holds back what may be the beginning of one."""

    def __init__(self, stops: Iterable[str]):
        """Takes non-empty strings; repeated ones count once."""
        self._matchers = [_Matcher(stop) for stop in dict.fromkeys(stops)]
        self._held = ""

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._matchers)

    def feed(self, text: str) -> tuple[str, str | None]:
        """Takes the next piece of text.

        Returns:
          The text that is now certain to precede any stop string, and the stop string found (then the text
          ends just before it and nothing may be fed any more) or None.
        """
        if not self._matchers:
            return text, None
        buffer = self._held + text
        for i, char in enumerate(text):
            found = [matcher.pattern for matcher in self._matchers if matcher.feed(char)]
            if found:
                stop = max(found, key=len)
                # A match cannot begin before the held text: that is the longest beginning of any stop string.
                end = len(self._held) + i + 1
                self._held = ""
                return buffer[: end - len(stop)], stop
        safe = len(buffer) - max(matcher.state for matcher in self._matchers)
        self._held = buffer[safe:]
        return buffer[:safe], None

    def flush(self) -> str:
        """The text that was held back; for the end of a sequence that no stop string ended."""
        held, self._held = self._held, ""
        return held


@dataclasses.dataclass(frozen=True)
class StopUpdate:
    """What one `push` adds to the result.

    Attributes:
      token_ids: the new ids that belong to the sequence (the stop token included).
      text: new text, safe to show: it will never be taken back.
      finish_reason: None while the sequence goes on; "stop" or "length" once it has ended.
      stop: the stop string or stop token id that ended it, if one did.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    stop: str | int | None = None


class StopChecker:
    """Applies the stop rules of one request to its tokens, round by round.

    The texts of all updates, concatenated, equal `text`; the ids equal `token_ids`. Only generated text is
    searched: a stop string in the prompt, or one that begins in it, does not count.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_new_tokens: int,
        stop_strings: Iterable[str] = (),
        eos_ids: Iterable[int] = (),
        skip_special: bool = True,
    ):
        """Starts a sequence.

        Args:
          tokenizer: turns ids into text.
          max_new_tokens: at least 1; the stop token counts.
          stop_strings: non-empty strings. One that is exactly a special token (such as "<|im_end|>") also
            acts as a stop token, since `skip_special` would keep it out of the searched text; `stop` then
            reports the string.
          eos_ids: stop token ids; empty to ignore the model's end of text.
          skip_special: leave special tokens out of the text.

        Raises:
          UserError: an empty stop string or max_new_tokens below 1.
        """
        if isinstance(stop_strings, str):
            raise TypeError(
                "stop_strings takes a list of strings; a bare string would mean one stop a character"
            )
        if max_new_tokens < 1:
            raise UserError(f"--max-new-tokens must be at least 1, found {max_new_tokens}")
        stops = list(stop_strings)
        if "" in stops:
            raise UserError("--stop must not be empty: an empty string would end every text at once")
        self._limit = max_new_tokens
        self._stop_tokens: dict[int, str | int] = {int(number): int(number) for number in eos_ids}
        for stop in stops:
            number = tokenizer.token_to_id(stop)
            if number is not None and number in tokenizer.special_ids:
                self._stop_tokens[number] = stop
        self._strings = StopStrings(stops)
        self._detokenizer = tokenizer.detokenizer(skip_special)
        self._ids: list[int] = []
        self._pieces: list[str] = []
        self._finish_reason: FinishReason | None = None
        self._stop: str | int | None = None

    @property
    def token_ids(self) -> list[int]:
        """All ids of the sequence so far."""
        return list(self._ids)

    @property
    def text(self) -> str:
        """All text that has been released so far; complete once `finish_reason` is set."""
        return "".join(self._pieces)

    @property
    def finish_reason(self) -> FinishReason | None:
        """None while the sequence goes on, then "stop" or "length"."""
        return self._finish_reason

    @property
    def stop(self) -> str | int | None:
        """The stop string or stop token id that ended the sequence, if one did."""
        return self._stop

    def push(self, ids: Iterable[int]) -> StopUpdate:
        """Takes the tokens of one round, in order, and returns what they add.

        Tokens behind the end are dropped, also in later calls: the device runs ahead of the host, so rounds
        that were already under way may still arrive.
        """
        first_id, first_piece = len(self._ids), len(self._pieces)
        numbers = list(map(int, ids))
        inside = self._inside(numbers)
        if inside:
            self._ids += numbers[:inside]
            self._take(self._detokenizer.push(numbers[:inside]))
        for number in numbers[inside:]:
            if self._finish_reason is not None:
                break
            self._ids.append(number)
            if number in self._stop_tokens:
                self._end("stop", self._stop_tokens[number])
                break
            self._take(self._detokenizer.push((number,)))
            if self._finish_reason is None and len(self._ids) >= self._limit:
                self._end("length", None)
        return self._update(first_id, first_piece)

    def _inside(self, numbers: list[int]) -> int:
        """How many of the next tokens certainly do not end the sequence, so that they can be taken all at once."""
        if self._finish_reason is not None or self._strings:
            return 0  # a stop string may end in any of them
        before = min(len(numbers), self._limit - len(self._ids) - 1)
        return next((i for i in range(before) if numbers[i] in self._stop_tokens), before)

    def finish(self) -> StopUpdate:
        """Ends the sequence from outside (caches full) with reason "length"; no-op once it has ended."""
        first_id, first_piece = len(self._ids), len(self._pieces)
        if self._finish_reason is None:
            self._end("length", None)
        return self._update(first_id, first_piece)

    def _update(self, first_id: int, first_piece: int) -> StopUpdate:
        return StopUpdate(
            tuple(self._ids[first_id:]), "".join(self._pieces[first_piece:]), self._finish_reason, self._stop
        )

    def _take(self, text: str) -> None:
        safe, stop = self._strings.feed(text)
        self._pieces.append(safe)
        if stop is not None:
            self._finish_reason, self._stop = "stop", stop

    def _end(self, reason: FinishReason, stop: str | int | None) -> None:
        # An unfinished character becomes U+FFFD here, and that may still complete a stop string.
        self._take(self._detokenizer.flush())
        if self._finish_reason is None:
            self._pieces.append(self._strings.flush())
            self._finish_reason, self._stop = reason, stop
