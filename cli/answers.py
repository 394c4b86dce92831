"""How answers are shown: streamed, one after the other, or as JSON lines; and the figures of `--stats`."""

import json
import resource
import sys
from collections.abc import Sequence
from typing import Any

import attrs

from afl.run.amounts import size

from .prompts import Asked
from .terminal import Interrupts, say, write


class Watched:
    """An engine that notes its use, and that ends all requests between two steps after Ctrl-C."""

    def __init__(self, engine: Any, interrupts: Interrupts) -> None:
        self.engine, self.interrupts = engine, interrupts
        self.most_blocks = 0
        self.most_rows = 0
        self._told = False

    def step(self) -> Any:
        if self.interrupts.pressed and not self._told:
            self._told = True
            for id in list(self.engine.live):
                self.engine.abort(id)
        result = self.engine.step()
        s = self.engine.sched
        self.most_blocks = max(self.most_blocks, s.pool.size - s.pool.free)
        self.most_rows = max(self.most_rows, len(s.running))
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


class Streaming:
    """A single answer, shown as it comes."""

    def __init__(self, asked: Sequence[Asked], n: int, several: bool) -> None:
        self._last = ""

    def take(self, place: int, piece: Any) -> None:
        if piece.text:
            write(piece.text)
            self._last = piece.text
        if piece.done is not None:
            if not self._last.endswith("\n"):
                write("\n")
            if not piece.done.text and piece.done.token_ids:
                say("token ids " + " ".join(map(str, piece.done.token_ids)), "note")
            _show_logprobs(piece.done)

    def refuse(self, place: int, why: str) -> None: ...

    def close(self) -> None: ...


class Ordered:
    """Answers in order of the prompts and samples, each as soon as it and all before it are finished."""

    def __init__(self, asked: Sequence[Asked], n: int, several: bool) -> None:
        self.asked, self.n, self.several = asked, n, several
        self._waiting = [(i, s) for i in range(len(asked)) for s in range(n)][::-1]
        self._ready: dict[tuple[int, int], Any] = {}

    def take(self, place: int, piece: Any) -> None:
        if piece.done is not None:
            self._ready[place, piece.sample] = piece.done
            self._advance()

    def refuse(self, place: int, why: str) -> None:
        self._ready[place, 0] = why
        self._ready |= {(place, s): None for s in range(1, self.n)}     # one line for all samples
        self._advance()

    def _advance(self) -> None:
        while self._waiting and self._waiting[-1] in self._ready:
            place, sample = self._waiting.pop()
            found = self._ready.pop((place, sample))
            if found is not None:
                self.show(place, sample, found)

    def show(self, place: int, sample: int, found: Any) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Show what is ready though something before it never finished."""
        for place, sample in sorted(self._ready):
            found = self._ready.pop((place, sample))
            if found is not None:
                self.show(place, sample, found)


class Plain(Ordered):
    """Several answers as text, each under a line that says whose it is."""

    def show(self, place: int, sample: int, found: Any) -> None:
        if isinstance(found, str):
            return      # the message is on stderr
        value = self.asked[place].value
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        head = f"=== {self.asked[place].where}" + (f", sample {sample}" if self.n > 1 else "")
        short = " ".join(text.split())
        write(f"{head}: {short if len(short) <= 60 else short[:57] + '...'}\n")
        write(found.text + ("" if found.text.endswith("\n") else "\n"))
        _show_logprobs(found)


class Lines(Ordered):
    """One JSON object per line and answer."""

    def show(self, place: int, sample: int, found: Any) -> None:
        row = record(found) if not isinstance(found, str) else {
            "text": "", "token_ids": [], "prompt_tokens": 0, "finish_reason": "error", "stats": dict(_NO_STATS),
            "error": found,
        }
        if self.several:
            row = {"index": place, **({"sample": sample} if self.n > 1 else {}), **row}
        sys.stdout.write(json.dumps(row, ensure_ascii=not sys.stdout.encoding.lower().startswith("utf")) + "\n")
        sys.stdout.flush()


_NO_STATS = {"ttft_s": 0.0, "prefill_tokens_per_s": 0.0, "decode_tokens_per_s": 0.0, "total_s": 0.0}


def record(c: Any) -> dict[str, Any]:
    """A completion as plain values."""
    row = {
        "text": c.text, "token_ids": list(c.token_ids), "prompt_tokens": c.prompt_tokens,
        "finish_reason": c.finish_reason,
        "stats": {k: round(c.stats[k], 6) for k in _NO_STATS},
    }
    if c.stop_reason is not None:
        row["stop_reason"] = c.stop_reason
    if c.logprobs is not None:
        row["logprobs"] = [plain(t) for t in c.logprobs]
    return row


def plain(x: Any) -> Any:
    """Values of JSON from values of ours."""
    return attrs.asdict(x) if attrs.has(type(x)) else x


def _show_logprobs(c: Any) -> None:
    """One line per token on stderr: the token, its log-probability, alternatives."""
    if c.logprobs is not None:
        say("\n".join(json.dumps(plain(t), ensure_ascii=False) for t in c.logprobs))


def statistics(watched: Watched, done: Sequence[Any]) -> str:
    """The table of `--stats`."""
    engine, m = watched.engine, watched.engine.model
    pool, programs = engine.pool, [*engine.greedy.programs(), *engine.sampled.programs()]
    asked, made = sum(c.prompt_tokens for c in done), sum(len(c.token_ids) for c in done)
    wall = max((c.stats["total_s"] for c in done), default=0.0)
    many = len(done) > 1
    rate = "tokens/s each" if many else "tokens/s"
    rows = [("answers", f"{len(done)}, {asked} prompt tokens, {made} new tokens in {wall:.2f} s")]
    if done:
        rows += [
            ("time to first token", _range([c.stats["ttft_s"] * 1e3 for c in done], "ms")),
            ("prefill", _range([c.stats["prefill_tokens_per_s"] for c in done], rate)),
            ("decode", _range([c.stats["decode_tokens_per_s"] for c in done], rate)),
        ]
        if many and wall > 0:
            rows.append(("together", f"{made / wall:.1f} new tokens/s"))
    rows += [
        ("traces", f"{engine.traces}" + (" (eager)" if engine.config.eager else f", {len(programs)} programs")),
        *(("program", f"{p.name}: {len(p.graph.eqns)} equations, {len(p.plan.copies)} copies, "
                      f"temporaries {size(p.plan.peak)} as traced") for p in programs),
        *((("graphs", str(engine.graphs)),) if m.chip.captures else ()),
        ("steps", f"{engine.steps}, at most {watched.most_rows} requests at a time, "
                  f"{engine.sched.preemptions} preemptions"),
        ("cache blocks", f"{watched.most_blocks} of {pool.blocks} used at most; {pool.block_tokens} tokens, "
                         f"{size(pool.block_bytes)} each; sized by {pool.why}"),
        ("longest sequence", f"{pool.max_model_len} tokens (the model's {m.c.max_len})"),
        ("memory", f"{size(m.param_bytes)} parameters, {size(pool.nbytes)} cache, {size(peak_bytes())} process peak"),
        ("runs on", f"{m.chip.name}, {str(m.dtype).removeprefix('torch.')}, {engine.threads} threads, "
                    f"depth {engine.config.depth}"),
        *(("note", n) for n in m.notices),
    ]
    return "\n".join(f"{name:<20} {text}" for name, text in rows)


def _range(values: Sequence[float], unit: str) -> str:
    low, high = min(values), max(values)
    return f"{low:.1f} {unit}" if len(values) == 1 else f"{low:.1f} to {high:.1f} {unit}"


def peak_bytes() -> int:
    """Most resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
