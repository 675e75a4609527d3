"""Continues a stream with a further message, or branches it off; never reads one.

A turn continues after all tokens of the one before, unchanged, so that the earlier turn's pages hold its start. Next to
read: stream.py, whose `send` and `fork` call this.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.engine.delivery.stops import WatchedGeneration
from headrace.engine.errors import InvalidParams
from headrace.engine.intake.intake import Intake, Turn
from headrace.engine.intake.prompt_ids import more_token_ids
from headrace.engine.intake.prompts import Prompt
from headrace.engine.params import SamplingParams
from headrace.engine.scheduling.options.forks import branch

__all__ = ["branch_turn", "check_branch", "check_single", "following_turn"]

_MASK = 2**64 - 1


def following_turn(
    intake: Intake,
    turn: Turn,
    added: Prompt,
    params: SamplingParams | None,
    deadline: float | None,
    priority: int | None,
) -> Turn:
    """Begin a turn with `added` after `turn`, which has ended; None keeps the value of `turn`.

    Raises:
        InvalidParams: The parameters do not fit a stream.
        EngineStopped: The engine is not open.
        EngineCrashed: The step loop died.
    """
    parts = intake.serving.parts()
    before = turn.generation.requests[0]
    known = before.tokens[before.virtual_tokens :]
    asking = replace(
        turn.asking,
        params=_again(turn.asking.params) if params is None else params,
        deadline=turn.asking.deadline if deadline is None else deadline,
        priority=turn.asking.priority if priority is None else priority,
        before=before,
        since=parts.loop.now,
    )
    tokenizer = parts.opened.tokenizer
    return intake.start(asking, added, parts, lambda: known + more_token_ids(added, tokenizer, known), len(known))


def check_single(turn: Turn, what: str) -> None:
    """Refuse `what`, a method that only a stream of one choice has, where `turn` has several or was not admitted.

    Raises:
        InvalidParams: The turn has several choices.
        RuntimeError: The scheduler does not have its request yet.
    """
    params = turn.asking.params
    if params.n != 1 or params.beam_width is not None:
        field = "n" if params.beam_width is None else "beam_width"
        raise InvalidParams(
            f"{what}: a stream of one choice is needed, got one with {field}={getattr(params, field)}", field=field
        )
    if not turn.generation.requests:
        raise RuntimeError("the request has not been admitted: await stream.admitted() before")


def check_branch(intake: Intake, seed: int | None) -> None:
    """Refuse a branch that cannot begin; raises as `following_turn` does."""
    if seed is not None and type(seed) is not int:
        raise InvalidParams(f"seed: must be an int, got {seed!r}", field="seed", value=seed)
    intake.serving.parts()


def branch_turn(intake: Intake, turn: Turn, read: int, seed: int | None) -> Turn:
    """Begin another course of `turn`, which was admitted, after its first `read` tokens; raises as `following_turn`
    does."""
    parts = intake.serving.parts()
    parent = turn.generation.requests[0]
    chosen = intake.random.getrandbits(63) if seed is None else seed & _MASK
    virtual = parent.virtual_tokens
    request = branch(parent, virtual + len(turn.generation.prompt) + read, chosen)
    made = intake.make_turn(replace(turn.asking, params=_again(turn.asking.params)), parts)
    own = request.tokens[request.prompt_len :]
    made.maker.skip(own)
    if isinstance(made.generation, WatchedGeneration):
        made.generation.skip(own)
    parts.loop.submit(made.generation, request.tokens[virtual:], [request])
    return made


def _again(params: SamplingParams) -> SamplingParams:
    """Return `params` without log-probabilities of the prompt, which would have to be computed again."""
    return params if params.prompt_logprobs is None else params.replace(prompt_logprobs=None)
