"""The loop: events into the scheduler, its plan through the program, results back as events.

Everything above `_launch` is a pure transition on values; `_launch` and `_land` touch the device.
"""

import itertools
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import torch

from afl import config as configs
from afl import sched, tree
from afl.config import EngineConfig
from afl.errors import RequestError
from afl.run.graphs import capture_decode
from afl.run.load import set_threads
from afl.run.logprobs import TokenLogprobs, top_logprobs
from afl.run.memory import groups_of, size_pool
from afl.run.pack import fills_of, leaves_of, pack, pad
from afl.run.policies import figured, policy_of
from afl.run.programs import greedy_program, sample_program
from afl.run.sampling import FILLS, SampleTable, SamplingParams, pad_rows
from afl.run.sampling import leaves_of as sample_leaves
from afl.sched import Aborted, Arrived, Outputs, Paused, Plan, Request, Reset, Resumed, Sampled, Tick, Timed
from afl.sched.events import NEVER
from afl.sched.health import Health, Watch
from afl.sched.policy import bind
from afl.sched.timing import features

STUCK = 60.0  # seconds without progress after which an engine with work is not healthy


@attrs.frozen(eq=False)
class Flight:
    """A step that was submitted: its plan, and what it will have sampled, still on the device."""

    plan: Plan
    token: torch.Tensor  # int32 [r]
    logits: torch.Tensor | None  # f32 [r, v]; of a captured step only if somebody asked for log-probabilities
    scored: tuple[tuple[int, int], ...]  # (place in the batch, alternatives) of rows whose log-probability is wanted


@attrs.frozen(eq=False)
class StepResult:
    """What one turn of the loop delivered."""

    outputs: Outputs
    logprobs: dict[str, TokenLogprobs]  # of requests that asked for them, for the token delivered now
    planned: int  # tokens that the new step computes


class Engine:
    """One model being served.  Not thread-safe: one thread submits, aborts and steps."""

    def __init__(self, model: Any, config: EngineConfig | None = None) -> None:
        config = config or model.config
        assert config is not None
        self.threads = set_threads(config.threads)
        self.pool = size_pool(
            model.caches, model.c.max_len, model.chip, model.dtype, config, configs.available_memory()
        )
        self.model = attrs.evolve(model, config=config)
        self.config = config
        self.policy = figured(policy_of(config.policy), model, self.pool.block_bytes, self.pool.block_tokens)
        self.needs = sched.policies.needs(self.policy)
        swaps = "host" in self.needs and bind(self.policy).params["swap"] != "never"
        self.sched = sched.init(
            sched.SchedConfig(
                config.max_seqs,
                config.max_step_tokens,
                self.pool.max_model_len,
                self.pool.blocks,
                self.pool.block_tokens,
                groups_of(model.caches, self.pool.block_tokens),
                config.prefix_cache,
                depth=config.depth,
                host_blocks=self.pool.blocks if swaps else 0,
            ),
            self.policy,
        )
        self.host: list[torch.Tensor] = []  # content of swapped blocks, one tensor per cache leaf
        self.log = sched.EventLog(config.log, self.sched.config, self.policy) if config.log else None
        self.eos_ids: tuple[int, ...] = model.eos_ids
        self.greedy, self.sampled = greedy_program(self.model, self.pool), sample_program(self.model, self.pool)
        with torch.inference_mode():
            self.state = model.init_state(self.pool.blocks, self.pool.block_tokens, config.max_seqs)
        self.leaves = tuple(tree.leaves(self.state))
        fills = fills_of(len(self.sched.config.groups))
        with torch.inference_mode():
            self.graphs = capture_decode(
                ((self.greedy, fills), (self.sampled, fills + FILLS)), self.leaves, model.chip, config
            )
        self.table = SampleTable(config.max_seqs)
        self.owner = np.zeros(config.max_seqs, np.int64)  # number of the request whose parameters each row holds
        self.live: dict[str, tuple[SamplingParams, int, int]] = {}  # id -> parameters, seed, prompt tokens
        self.cached: dict[str, int] = {}  # id -> prompt tokens that the prefix cache had
        self.flight: deque[Flight] = deque()
        self.inbox: list[Any] = []
        self.stalled = False
        self.watch = Watch(STUCK)
        self.steps = 0
        self._numbers = itertools.count()
        self._seeds = np.random.SeedSequence(config.seed)

    # ---- requests

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, id: str | None = None, *, priority: int = 0,
        deadline: float | None = None,
    ) -> str:
        """Queue a request; returns its id.  Raises RequestError, with all that is wrong, if it cannot be served.

        priority: smaller is more important; deadline: seconds from now in which its first token is due.  Policies of
        those names use them.
        """
        id = id if id is not None else f"r{next(self._numbers)}"
        if id in self.live:
            raise RequestError(f"request id {id!r} is in use; give each request an id of its own")
        limit, v = self.pool.max_model_len, self.model.c.v
        params.validate(v, limit)
        ids = np.asarray(prompt, dtype=np.int64)
        if ids.ndim != 1 or not ids.size:
            raise RequestError("the prompt is empty: a model continues at least one token")
        if ids.min() < 0 or ids.max() >= v:
            raise RequestError(
                f"the prompt holds token id {int(ids.max() if ids.max() >= v else ids.min())}; ids go from 0 to {v - 1}"
            )
        most = params.max_tokens if params.max_tokens is not None else limit
        seed = params.seed if params.seed is not None else int(self._seeds.spawn(1)[0].generate_state(1, np.uint64)[0])
        self.live[id] = params, seed, ids.size
        now = time.monotonic()
        self.inbox.append(
            Arrived(
                Request(
                    id,
                    ids.astype(np.int32),
                    most,
                    min_tokens=params.min_tokens,
                    eos_ids=self.eos_ids,
                    stop_ids=params.stop_ids,
                    ignore_eos=params.ignore_eos,
                    needs_host=params.needs_host,
                    priority=priority,
                    arrival=now,
                    deadline=NEVER if deadline is None else now + deadline,
                )
            )
        )
        return id

    def abort(self, id: str, reason: str = "abort") -> None:
        """End a request; unknown or finished ids are ignored.  reason: a member of `afl.sched.REASONS`."""
        if reason not in sched.REASONS[1:]:
            raise RequestError(f"abort: reason is {reason!r}; give one of {', '.join(sched.REASONS[1:])}")
        if id in self.live:
            self.inbox.append(Aborted(id, reason))

    def pause(self, mode: str = "wait") -> None:
        """Stop admitting ("wait"), stop everything ("keep"), or end everything ("abort"), from the next step on."""
        self.inbox.append(Paused(mode))

    def resume(self) -> None:
        """Go on after a pause."""
        self.inbox.append(Resumed())

    def reset_prefix_cache(self, weights: int | None = None) -> None:
        """Forget cached prefixes, from the next step on; `weights`: the version of new parameters, if they changed."""
        self.inbox.append(Reset(weights))

    def metrics(self) -> dict[str, Any]:
        """Gauges and counters of the scheduler, see `afl.sched.metrics`, and of captured graphs."""
        return {**sched.metrics(self.sched), **self.graphs.metrics()}

    def health(self, now: float | None = None) -> Health:
        """Whether the engine gets on, with the oldest request and what it waits for if not; from any thread."""
        return self.watch.health(self.sched, time.monotonic() if now is None else now)

    @property
    def busy(self) -> bool:
        """Something waits, runs or is in flight."""
        return bool(self.inbox or self.flight or self.sched.busy)

    # ---- the loop

    def step(self) -> StepResult:
        """One turn: results of the oldest step if `depth` are in flight or nothing else can be done; then a step."""
        events, self.inbox = self.inbox, []
        logprobs: dict[str, TokenLogprobs] = {}
        if self.flight and (len(self.flight) >= self.config.depth or self.stalled):
            event, logprobs = self._land(self.flight.popleft())
            events.append(event)
        if "clock" in self.needs:
            events.append(Tick(time.monotonic()))
        if self.log is not None:
            self.log.write(events)
        self.sched, plan, outputs = sched.step(self.sched, events, self.policy)
        self.stalled = plan is None
        self.watch = self.watch.see(self.sched, time.monotonic())
        if plan is not None:
            self.flight.append(self._launch(plan))
            self.steps += 1
        if np.count_nonzero(outputs.finish):
            for id in outputs.ids[outputs.finish != 0]:
                self.live.pop(id, None)
                self.cached.pop(id, None)
        for id, _ in outputs.refused:
            self.live.pop(id, None)
        return StepResult(outputs, logprobs, plan.tokens if plan is not None else 0)

    def _launch(self, plan: Plan) -> Flight:
        """Submit a plan: pack, choose the program, run."""
        began = time.perf_counter()
        with torch.inference_mode():
            if len(plan.out.device) or len(plan.back.device):
                self._swap(plan)
            self._admit(plan)
            batch = pack(plan, self.sched)
            edits, rows = None, None
            if self.table.any_special and self.table.special[plan.at].any():
                rows, edits = self.table.pack(plan.at, plan.kv_len, plan.emit, self.sched.tokens)
            scored = self._scored(plan)
            token, logits = self._run(batch, rows, edits, len(plan.rows), bool(scored))
        if "timing" in self.needs:
            token.numpy()  # wait for the device
            self.inbox.append(Timed(plan.step, features(plan), (time.perf_counter() - began) * 1e3))
        return Flight(plan, token, logits, scored)

    def _run(
        self, batch: Any, rows: Any, edits: Any, r: int, scored: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        jitted = self.greedy if rows is None else self.sampled
        if self.config.eager:
            trees = (self.state, batch) if rows is None else (self.state, batch, rows, edits)
            self.state, token, logits = jitted(self.model.params, *trees)
            return token, logits
        sizes = {"tokens": len(batch.token), "rows": r, "width": batch.blocks[0].shape[1]}
        if rows is not None:
            sizes["edits"] = len(edits.row)
        program = jitted.program(**sizes)
        graph = self.graphs.of(program)
        if graph is not None:
            more = () if rows is None else sample_leaves(rows, edits)
            token, logits = graph.run((*leaves_of(batch), *more))
            # the next run overwrites them, and at depth 2 it comes before they are read
            return token[:r].clone(), logits[:r].clone() if scored else None
        z = program.sizes
        if z is not None:
            batch = pad(batch, z["tokens"], z["rows"], z["width"])
            rows, edits = (None, None) if rows is None else pad_rows(rows, edits, z["rows"], z["edits"])
        more = () if rows is None else sample_leaves(rows, edits)
        *leaves, token, logits = program(*self.leaves, *leaves_of(batch), *more)
        self.leaves = self.graphs.home(self.leaves, leaves)
        return (token, logits) if z is None else (token[:r], logits[:r])

    def _scored(self, plan: Plan) -> tuple[tuple[int, int], ...]:
        """Rows of a plan whose log-probabilities are wanted."""
        if not self.table.any_scored:
            return ()
        places = np.flatnonzero(self.table.scored[plan.at] & plan.emit)
        return tuple((int(i), int(self.table.logprobs[plan.rows[i]])) for i in places)

    def _swap(self, plan: Plan) -> None:
        """Move the content of cache blocks to and from host memory, as the plan says."""
        caches = (tree.leaves(self.state) if self.config.eager else self.leaves)[:-1]  # the last leaf is last_token
        if not self.host:
            self.host = [torch.empty(self.pool.blocks + 1, *x.shape[1:], dtype=x.dtype) for x in caches]
        for cache, host in zip(caches, self.host, strict=True):
            out, back = plan.out, plan.back
            host[torch.from_numpy(out.host).long()] = cache[torch.from_numpy(out.device).long()]
            cache[torch.from_numpy(back.device).long()] = host[torch.from_numpy(back.host).long()]

    def _admit(self, plan: Plan) -> None:
        """Give rows that changed hands the sampling parameters of their request."""
        number = self.sched.number[plan.at]
        new = self.owner[plan.at] != number
        if np.count_nonzero(new):
            for i in np.flatnonzero(new).tolist():
                row, (params, seed, prompt_tokens) = int(plan.rows[i]), self.live[plan.ids[i]]
                self.cached.setdefault(plan.ids[i], int(plan.start[i]))
                stops = params.stop_ids if params.ignore_eos else (*self.eos_ids, *params.stop_ids)
                self.table.set(row, params, seed, prompt_tokens, stops)
                self.owner[row] = number[i]

    def _land(self, f: Flight) -> tuple[Sampled, dict[str, TokenLogprobs]]:
        """Wait for a step's tokens and, where asked for, their log-probabilities."""
        token, plan = f.token.numpy(), f.plan
        wanted = {}
        for i, n in f.scored:
            assert f.logits is not None, "a step with scored rows keeps its logits"
            wanted[plan.ids[i]] = top_logprobs(f.logits[i : i + 1], f.token[i : i + 1], n)[0]
        return Sampled(f.plan.step, token), wanted

    @property
    def traces(self) -> int:
        """Programs traced so far; 0 for good in eager mode."""
        return self.greedy.traces + self.sampled.traces

    def close(self) -> None:
        """Flush the event log."""
        if self.log is not None:
            self.log.close()
