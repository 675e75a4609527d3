"""`Told`: what one caller was told of one request, against what it would have been told alone; asks for nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from simulation.engine_device import chosen, report, written
from simulation.grammar import END, follows, is_whole, picked
from simulation.search import best_sequences

from headrace.engine.events import Completion, FinishReason, Token, TokenLogprobs
from headrace.engine.params import SamplingParams
from headrace.engine.scheduling.plan import Capacity

__all__ = ["Told", "values_of"]

_GOLDEN = 0x9E3779B97F4A7C15  # what makes the seeds of a prompt's choices differ


def values_of(ids: Sequence[int], adapter: int) -> list[int]:
    """What the cells of a prompt hold, the virtual tokens of adapter 6 included."""
    virtual = [ids[0]] * (2 if adapter == 6 else 0)
    return [written(token, adapter) for token in [*virtual, *ids]]


class Told:
    """The choices of one request, token by token."""

    def __init__(self, name: str, params: SamplingParams, ids: Sequence[int], clock: Callable[[], float]) -> None:
        """Nothing has come yet; `ids` is the prompt."""
        self.name = name
        self.params = params
        self.ids = list(ids)
        self.prompt: str | list[int] = self.ids
        """As text or as they are; long texts are tokenised in a thread."""
        self.tokens: list[list[int]] = [[] for _ in range(params.n)]
        self.ends: list[FinishReason | None] = [None] * params.n
        self.texts = [""] * params.n
        self.cancelled = False
        """Somebody cancelled it, or closed the engine."""
        self.deadline: float | None = None
        """When it ends at the latest, on the engine's clock."""
        self.may_give_up = False
        """Whether it may end before its deadline, because that cannot be met."""
        self.stops_at: int | None = None
        """What its `stop_when` says yes to."""
        self.least_pool: Callable[[], int] | None = None
        """Tokens that the pool had room for at least, where its size changes."""
        self.before: list[int] = []
        """Tokens of a branch that came before it; its prompt has them, too."""
        self._clock = clock
        self._room = 0
        self._adapter = 0
        self._known: list[list[int]] = []
        self._seeds: Sequence[int] = ()

    def begin(self, adapter: int, capacity: Capacity, seeds: Sequence[int] | None = None) -> None:
        """The request was taken in, wearing that adapter; `seeds` of its choices, where they are not its own."""
        seed = self.params.seed or 0
        self._seeds = [(seed + choice * _GOLDEN) % 2**64 for choice in range(self.params.n)] if seeds is None else seeds
        self._adapter = adapter
        self._known = [values_of(self.ids, adapter) for _ in self.tokens]
        most = capacity.check_length(len(self._known[0]))
        self._room = min(most - len(self._known[0]), (self.params.max_tokens or 0) - len(self.before))

    def check_completion(self, completion: Completion, adapters: Sequence[int], capacity: Capacity) -> None:
        """Assert that a whole answer is right for one of `adapters`, which it may have worn."""
        assert completion.prompt_token_ids == self.ids
        for place, adapter in enumerate(adapters):
            alone = Told(self.name, self.params, self.ids, self._clock)
            alone.cancelled, alone.deadline, alone.may_give_up = self.cancelled, self.deadline, self.may_give_up
            alone.least_pool = self.least_pool
            alone.begin(adapter, capacity)
            try:
                for choice in completion.choices:
                    alone.hear_all(choice.index, choice.token_ids, choice.finish_reason, choice.logprobs)
                    alone.check_text(choice.index, choice.text)
                return
            except AssertionError:
                if place == len(adapters) - 1:
                    raise

    def check_search(self, completion: Completion, adapters: Sequence[int], capacity: Capacity) -> None:
        """Assert that these are the best sequences of a search that wears one of `adapters`."""
        found = [(choice.token_ids, choice.finish_reason) for choice in completion.choices]
        if all(reason == "cancelled" for _, reason in found):
            assert self.cancelled and not any(tokens for tokens, _ in found), (
                f"{self.name}: nobody cancelled its search"
            )
            return
        stops = frozenset((*self.params.stop_token_ids, END))
        wanted = []
        for adapter in adapters:
            prompt = values_of(self.ids, adapter)
            room = capacity.check_length(len(prompt)) - len(prompt)
            most = min(room, self.params.max_tokens or room)
            least = most if self.least_pool is None else max(1, min(most, self.least_pool() + 1 - len(prompt)))
            for limit in range(most, least - 1, -1):
                wanted.append(best_sequences(self.params, stops, limit, prompt, partial(written, adapter=adapter)))
                if found == wanted[-1]:
                    break
        assert found in wanted, f"{self.name}: a search found {found}, alone it would be {wanted}"
        for choice in completion.choices:
            letters = bytes(choice.token_ids[: -1 if choice.finish_reason == "stop" else None]).decode()
            assert choice.text == letters, f"{self.name}: the text of a sequence is {choice.text!r}"

    def hear_all(
        self, choice: int, ids: Sequence[int], reason: FinishReason, logprobs: Sequence[TokenLogprobs] | None
    ) -> None:
        """All tokens of a choice, what was said of them, and its end."""
        with_token = reason in ("stop", "length")
        assert logprobs is None or len(logprobs) == len(ids)
        for place, identity in enumerate(ids):
            last = with_token and place == len(ids) - 1
            self.hear(choice, identity, reason if last else None, logprobs[place] if logprobs else None)
        if not with_token:
            self.hear(choice, None, reason)

    def take(self, token: Token) -> None:
        """The next item of a stream."""
        assert token.position == len(self.tokens[token.index]) + len(self.before), (
            f"{self.name}: a token is out of place"
        )
        self.hear(token.index, token.id, token.finish_reason, token.logprobs)
        self.texts[token.index] += token.text

    def hear(
        self, choice: int, identity: int | None, reason: FinishReason | None, logprobs: TokenLogprobs | None = None
    ) -> None:
        """A token, with what is said of it, or an end without one."""
        who = f"{self.name}[{choice}]"
        assert self.ends[choice] is None, f"{who}: something comes after {self.ends[choice]}"
        self.ends[choice] = reason
        if identity is None:
            self._check_end_without(who, choice, reason)
            return
        tokens = self.tokens[choice]
        want = self._alone(choice)
        assert identity == want, f"{who}: token {identity} at {len(tokens)}, alone it would be {want}"
        assert logprobs is None or self._said(logprobs) == report(
            self._known[choice], identity, self.params.logprobs or 0
        ), f"{who}: other log-probabilities at {len(tokens)}"
        assert (logprobs is None) is (self.params.logprobs is None)
        tokens.append(identity)
        self._known[choice].append(written(identity, self._adapter))
        expected = self._expected_end(tokens)
        if reason == "length" != expected and self.least_pool is not None and not self._stops(tokens):
            assert len(self._known[choice]) > self.least_pool(), f"{who}: ends where it had room"
        else:
            assert reason == expected, f"{who}: {reason} at token {len(tokens)}, where it is {expected}"

    def _alone(self, choice: int) -> int:
        """The next token, were the request alone."""
        seed, known, wanted = self._seeds[choice], self._known[choice], self.params.response_format
        if wanted is None:
            return chosen(seed, known)
        return picked(seed, known, follows(wanted, (*self.before, *self.tokens[choice])))

    @staticmethod
    def _said(logprobs: TokenLogprobs) -> tuple[float, int, tuple[tuple[int, float], ...]]:
        top = tuple((each.id, each.logprob) for each in logprobs.top_logprobs)
        return logprobs.logprob, logprobs.rank, top

    def check_whole(self) -> None:
        """The stream was read to its end: every choice has one, and the text is that of its tokens."""
        for choice, end in enumerate(self.ends):
            assert end is not None, f"{self.name}[{choice}] has no end"
            self.check_text(choice, self.texts[choice])

    def check_text(self, choice: int, text: str) -> None:
        """Assert that `text` is that of a choice that has ended; a branch may begin with what was held back before."""
        letters = want = _text(self.tokens[choice])
        if self.ends[choice] == "stop":
            cut = next((len(stop) for stop in self.params.stop if letters.endswith(stop)), 0)
            cut = cut or (self.tokens[choice][-1] in self.params.stop_token_ids)
            want = letters[: max(0, len(letters) - cut)]
        if self.params.response_format is not None and self.tokens[choice][-1:] == [END]:
            whole = _text([*self.before, *self.tokens[choice]])
            assert is_whole(self.params.response_format, whole), (
                f"{self.name}[{choice}]: {whole!r} is not of its format"
            )
        held = _text(self.before[-1:])
        assert text in (want, held + want), f"{self.name}[{choice}]: its text is {text!r}, not {want!r}"

    def _expected_end(self, tokens: list[int]) -> FinishReason | None:
        if self._stops(tokens):
            return "stop"
        if len(tokens) >= self._room:
            return "length"
        return "stop" if tokens[-1] == self.stops_at else None

    def _stops(self, tokens: list[int]) -> bool:
        """Whether the last of `tokens` ends the choice, or its text does."""
        text = _text([*self.before, *tokens][-4:])
        return tokens[-1] in (END, *self.params.stop_token_ids) or any(text.endswith(stop) for stop in self.params.stop)

    def _check_end_without(self, who: str, choice: int, reason: FinishReason | None) -> None:
        if reason == "deadline":
            assert self.deadline is not None, f"{who}: an end by a deadline that it has not"
            assert self.may_give_up or self._clock() >= self.deadline, f"{who}: ended before its deadline"
        else:
            assert reason == "cancelled" and self.cancelled, f"{who}: {reason}, and nobody asked for that"


def _text(tokens: Sequence[int]) -> str:
    return bytes(token for token in tokens if token != END).decode()
