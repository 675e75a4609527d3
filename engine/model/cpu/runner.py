"""`CpuRunner`: carries out plans on the CPU in a thread of its own, which releases the GIL inside every operation.

Owns the model and the paged cache; never decides what runs. Sampled tokens stay with the rows, so the next
step can be launched before this one is done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from headrace.engine.model.cpu.adapters import CpuBank
from headrace.engine.model.cpu.draft_model import CpuDraftModel
from headrace.engine.model.cpu.drafts import CpuDrafts, verify
from headrace.engine.model.cpu.heads import LoadHead, known_lengths
from headrace.engine.model.cpu.options import prompt_places
from headrace.engine.model.cpu.rows import CpuRows, StepBatch
from headrace.engine.model.drafting.ngram import Drafter
from headrace.engine.model.network.decoder import Decoder, HiddenStates
from headrace.engine.model.network.foreign import Network
from headrace.engine.model.shared.host_pool import HostPool
from headrace.engine.model.shared.kv_layout import kv_layout
from headrace.engine.model.shared.memory import free_host_bytes, return_freed_memory
from headrace.engine.model.shared.plan_thread import PlanStep, PlanThread
from headrace.engine.model.shared.results import step_result
from headrace.engine.model.shared.runs import Verified, with_verified
from headrace.engine.model.spec import MixerSpec
from headrace.engine.scheduling.plan import Ability, Capacity, StepPlan, Work
from headrace.engine.scheduling.result import Choice, StepResult
from headrace.engine.scheduling.shaping import Report
from headrace.ops.cpu.block import CpuOps
from headrace.ops.cpu.kv import CpuKv
from headrace.ops.cpu.linear import ALIKE_ROWS, CpuLinear
from headrace.ops.cpu.lora import AdapterUsers, CpuAdapterOps
from headrace.ops.cpu.step import CpuStep

__all__ = ["CpuDecoder", "CpuRunner"]

CpuDecoder: TypeAlias = Network[CpuLinear, CpuStep, CpuKv]


class CpuRunner:
    """The runner of a decoder on the CPU."""

    abilities: Final[frozenset[Ability]] = frozenset(("hooks", "shaping", "logprobs", "grammar", "pooling"))

    def __init__(
        self,
        load: Callable[[], CpuDecoder],
        ops: Mapping[MixerSpec, CpuOps],
        capacity: Capacity,
        threads: int,
        bank: CpuBank | None = None,
        drafter: Drafter | None = None,
        load_head: LoadHead | None = None,
        load_draft: Callable[[CpuRows, Capacity], CpuDraftModel] | None = None,
    ) -> None:
        """Load the model, allocate the paged cache and start the thread.

        Args:
            load: Reads the model, now and after a sleep without weights.
            ops: The operations that the model is made with, by mixer.
            capacity: Pages, rows and tokens.
            threads: Number of threads that one operation uses.
            bank: The adapters that rows may use; None without adapters.
            drafter: Guesses tokens for rows that speculate, by their tokens alone; None where none does.
            load_head: Reads the draft head that guesses tokens for rows that speculate; None where none does.
            load_draft: Reads the draft model that guesses them, for the rows of a table and the
                capacity; None where none does.
        """
        decoder = load()
        self._load: Callable[[], CpuDecoder] | None = load
        self._decoder: CpuDecoder | None = decoder
        self._ops = ops
        self._any = next(iter(ops.values()))  # what does not depend on the kind of a layer is asked of one
        self._kv = CpuKv.allocate(kv_layout(decoder.spec, ops), capacity.num_pages, self._any.dtype)
        self._rows = CpuRows(capacity, bank)
        self._load_head = load_head
        self._head = None if load_head is None else load_head(decoder, self._rows, capacity.num_pages)
        self._draft = None if load_draft is None else load_draft(self._rows, capacity)
        guesses = self._draft or self._head or drafter
        self._drafts = None if guesses is None else CpuDrafts(capacity, guesses)
        self._hosts: tuple[HostPool, ...] = ()
        self._head_host: HostPool | None = None  # of a head whose weights are released
        head_kv = None if self._head is None else self._head.kv
        self._page_bytes = self._kv.page_bytes + (0 if head_kv is None else head_kv.page_bytes)
        self._page_bytes += 0 if self._draft is None else self._draft.page_bytes
        self._thread = PlanThread(self._carry_out, name="headrace-cpu", threads=threads)

    def launch(self, plan: StepPlan) -> PlanStep:
        """Queue `plan` behind the steps launched before it; return its step."""
        return self._thread.launch(plan)

    @property
    def most_pages(self) -> int:
        """Largest number of pages for `resize`: what free memory can hold beside the present ones."""
        return max(self._kv.num_pages, free_host_bytes() // self._page_bytes)

    def resize(self, num_pages: int) -> None:
        """Make room for `num_pages` pages; until that is done, the present ones hold their memory, too."""
        if self._head is not None:
            self._head.read_all()
            self._any.rest()
        self._kv = self._kv.resized(num_pages)
        self._resize_drafter(num_pages)
        return_freed_memory()

    def _resize_drafter(self, num_pages: int) -> None:
        if self._head is not None:
            self._head.resize(num_pages)
        if self._draft is not None:
            self._draft.resize(num_pages)

    def sleep(self, *, keep_weights: bool) -> None:
        """Release the memory of the pages, and that of the weights unless `keep_weights`."""
        self._kv = self._kv.resized(1)
        self._resize_drafter(1)
        if not keep_weights:
            if self._draft is not None:
                self._draft.release_weights()
            if self._head is not None and self._drafts is not None:
                self._head_host = self._head.host
                self._drafts.drafter = None  # it is the head, which holds the model, too
            self._decoder = self._head = None
        return_freed_memory()

    def wake(self, num_pages: int) -> None:
        """Restore the weights, and make room for `num_pages` pages."""
        if self._decoder is None:
            assert self._load is not None
            self._decoder = self._load()
        if self._draft is not None:
            self._draft.restore_weights()
        self._resize_drafter(num_pages)
        if self._head is None and self._load_head is not None and self._drafts is not None:
            self._head = self._drafts.drafter = self._load_head(self._decoder, self._rows, num_pages)
            self._head.host = self._head_host
        self._kv = self._kv.resized(num_pages)

    def open_host_pool(self, places: int) -> float:
        """Make room for `places` pages beside the cache; return the seconds that moving one page takes."""
        hosts, pools = list[HostPool](), self._kv.pools
        for pool in pools:
            hosts.append(HostPool(pool, places, pinned=False, promised=sum(each.nbytes for each in hosts)))
        self._hosts = tuple(hosts)
        if self._head is not None:
            self._head.open_host_pool(places, promised=sum(each.nbytes for each in hosts))
        if self._draft is not None:
            self._draft.open_host_pool(places, promised=sum(each.nbytes for each in hosts))
        each = zip(hosts, pools, strict=True)
        return sum(host.measure(pool, self._kv.num_pages, lambda: None) for host, pool in each)

    def close(self) -> None:
        """Join the thread and drop the model and the cache."""
        self._thread.close()
        self._rows.options.close()
        if self._draft is not None:
            self._draft.close()
        for ops in self._ops.values():
            ops.close()
        self._decoder = self._load = self._head = self._draft = self._drafts = self._load_head = None
        self._hosts = ()
        del self._kv, self._ops, self._any
        return_freed_memory()

    def _carry_out(self, plan: StepPlan) -> StepResult:
        try:
            return self._run(plan)
        finally:
            self._any.rest()

    def _run(self, plan: StepPlan) -> StepResult:
        decoder = self._decoder
        assert decoder is not None
        self._apply(plan)
        works, drafted = self._placed(plan)
        tokens = [0] * len(works)
        if self._rows.all_stopped(works):
            return StepResult(tokens)
        batch = self._rows.batch(works, drafted)
        steps = {mixer: ops.prepare(batch.paged) for mixer, ops in self._ops.items()}
        last_S = batch.last_S
        if batch.prompts:
            last_S = torch.cat((last_S, prompt_places(batch.prompts)))
        if batch.pooled:
            last_S = torch.cat((last_S, torch.tensor([place for span in batch.pooled for place in span.places])))
        hidden_SE, states = self._hidden(decoder, batch, steps, last_S)
        reports: dict[int, Report] = {}
        choices: dict[int, Choice] = {}
        forced: dict[int, Sequence[int]] = {}
        hosts = self._rows.hosts
        count = len(batch.last_S)
        verified: dict[int, Verified] = {}
        if count:
            logits_SV = decoder.logits(hidden_SE[:count], self._adapted(batch.adapted_samplers))
            self._any.rest()
            found: dict[int, Report] = {}
            runs: dict[int, Sequence[int]] = {}
            if count > len(batch.samplers):
                verified, runs = self._verify(logits_SV, works, batch.samplers, drafted)
                chosen = [verified[index].tokens[0] for index in batch.samplers]
            else:
                sampling = [works[index] for index in batch.samplers]
                chosen, found, runs = self._rows.options.choose(logits_SV, sampling, batch.choosing, self._rows.known)
                self._append(sampling, chosen)
            place = 0
            for index, token in zip(batch.samplers, chosen, strict=True):
                tokens[index] = token
                work = works[index]
                if hosts.asks[work.row]:
                    choices[index] = hosts.choice(work.row, logits_SV[place].float().numpy())
                place += 1 + drafted[index]
            reports = {batch.samplers[place]: report for place, report in found.items()}
            forced = {batch.samplers[place]: rest for place, rest in runs.items()}
        if self._head is not None and states is not None:
            runs_of = {index: verified[index].tokens if verified else [tokens[index]] for index in batch.samplers}
            self._head.take_up(works, batch, states, known_lengths(works, drafted, runs_of))
        if not (reports or choices or forced or batch.prompts or batch.pooled or verified):
            return step_result(tokens)
        first_pooled = len(hidden_SE) - sum(span.length for span in batch.pooled)

        def logits(hidden_PE: Tensor, work: int) -> Tensor:
            users = self._rows.row_users(works[work].row, len(hidden_PE))
            return decoder.logits(hidden_PE, self._adapted(users))

        prompts = self._rows.options.prompt_reports(batch.prompts, hidden_SE[count:first_pooled], logits)
        pooled = self._rows.pools.pool(batch.pooled, hidden_SE[first_pooled:])
        result = step_result(
            tokens, reports=reports, prompt_reports=prompts, pooled=pooled, choices=choices, forced=forced
        )
        return with_verified(result, verified, drafted[: len(plan.decodes)]) if verified else result

    def _apply(self, plan: StepPlan) -> None:
        """Take in what a plan changes before its works."""
        for host, pool in zip(self._hosts, self._kv.pools, strict=False):
            host.spill(pool, plan.spills)
        if self._head is not None:
            self._head.spill(plan)
            self._head.update(plan)
        if self._draft is not None:
            self._draft.spill(plan)
            self._draft.update(plan)
        accepted = self._rows.update(plan)
        if self._drafts is not None:
            self._drafts.update(plan, accepted)
        self._kv.copy_pages(plan.copies)
        for host, pool in zip(self._hosts, self._kv.pools, strict=False):
            host.fetch(pool, plan.fetches)

    def _hidden(
        self, decoder: CpuDecoder, batch: StepBatch, steps: Mapping[MixerSpec, CpuStep], last_S: Tensor
    ) -> tuple[Tensor, HiddenStates | None]:
        """Return the hidden states of the tokens `last_S`, and those of all tokens that a draft head reads, if any."""
        tokens_N, adapted = self._padded(batch), self._adapted(batch.users)
        if self._head is None:
            return decoder.hidden(tokens_N, steps, self._kv, last_S, adapted), None
        assert isinstance(decoder, Decoder)  # no other model has a head
        states = decoder.hidden_states(tokens_N, steps, self._kv, self._head.inputs, adapted)
        return states.final_NE[last_S], states

    def _placed(self, plan: StepPlan) -> tuple[Sequence[Work], Sequence[int]]:
        """Return the works of a plan that has been applied, where they truly are, and how many drafts each has."""
        if self._drafts is None:
            return plan.works, [0] * plan.size
        return self._drafts.place(plan, self._rows.tokens_RN, self._rows.goes_on, self._rows.options.draft)

    def _append(self, works: Sequence[Work], chosen: Sequence[int]) -> None:
        """Store the tokens that `works` chose for the next step."""
        self._rows.append(works, chosen)
        if self._drafts is not None:
            for work in works:
                self._drafts.reach(work.row, work.start + work.num_tokens + 1)

    def _verify(
        self, logits_SV: Tensor, works: Sequence[Work], samplers: Sequence[int], drafted: Sequence[int]
    ) -> tuple[dict[int, Verified], dict[int, Sequence[int]]]:
        """Return what the works with the indices `samplers` chose, of a step with drafts, and what is forced behind it.

        The latter is by place in `samplers`.
        """
        rows, forced = self._rows, dict[int, Sequence[int]]()

        def choose(logits_AV: Tensor, parts: Sequence[Work]) -> tuple[list[int], dict[int, Report]]:
            chosen, reports, runs = rows.options.choose(logits_AV, parts, list(map(rows.choosing, parts)), rows.known)
            self._append(parts, chosen)
            forced.update({part.row: runs.get(place, ()) for place, part in enumerate(parts)})
            return chosen, reports

        sampling, drafts = [works[index] for index in samplers], [drafted[index] for index in samplers]
        found = verify(logits_SV, sampling, drafts, rows.tokens_RN, rows.goes_on, choose)
        rests = {place: rest for place, work in enumerate(sampling) if (rest := forced[work.row])}
        return dict(zip(samplers, found, strict=True)), rests

    def _adapted(self, users: Sequence[AdapterUsers]) -> Mapping[MixerSpec, CpuAdapterOps] | None:
        """Return the operations of a step in which tokens use adapters; None if no token does."""
        if not users:
            return None
        return {mixer: CpuAdapterOps(ops, users) for mixer, ops in self._ops.items()}

    def _padded(self, batch: StepBatch) -> Tensor:
        """Return the step's tokens, padded with zeros up to `ALIKE_ROWS` where a prompt is so long.

        The end of a prompt behind a cached prefix then has the same bits as in a prompt that is computed at once.
        """
        longest = max((row.length for row in batch.paged.prefills), default=0)
        missing = min(longest, ALIKE_ROWS) - len(batch.tokens_N)
        if missing <= 0 or self._any.rows_are_alike:
            return batch.tokens_N
        return functional.pad(batch.tokens_N, (0, missing))
