"""A planner in a process of its own.  It may die, hang, answer late or answer nonsense: serving never waits for it.

`ask` returns at once, `poll` says what came of it.  Each job has a new process, which a timer of the operating system
ends even if its parent is gone; what it answers is data, and a plan that would break a placement becomes a `Failed`.
"""

import queue
import signal
import subprocess
import sys
import threading

import attrs

from afl.dist.eplb.events import Failed, Planned, StartPlan
from afl.dist.eplb.plan import faults, plan
from afl.dist.eplb.values import Params, Topology
from afl.dist.eplb.wire import pack_job, pack_plan, unpack_job, unpack_plan
from afl.errors import AflError

COMMAND = (sys.executable, "-m", "afl.dist.eplb.worker")


@attrs.define(eq=False)
class _Job:
    """One question: its process once it runs, and whether the answer is still wanted."""

    start: StartPlan
    process: subprocess.Popen | None = None
    unwanted: bool = False

    def end(self) -> None:
        self.unwanted = True
        if self.process is not None:
            self.process.kill()


@attrs.define(eq=False)
class Planner:
    """Asks a process for plans.  `command`: what is run with the seconds as argument, for tests of bad planners."""

    topology: Topology
    params: Params = attrs.field(factory=Params)
    policy: str = "afl"
    seconds: float = 60.0
    command: tuple[str, ...] = COMMAND
    _answers: "queue.SimpleQueue[Planned | Failed]" = attrs.field(factory=queue.SimpleQueue, init=False)
    _job: _Job | None = attrs.field(default=None, init=False)

    def ask(self, start: StartPlan) -> None:
        """Begin to plan; an earlier job that still runs is ended."""
        self.stop()
        self._job = _Job(start)
        threading.Thread(target=self._work, args=(self._job,), daemon=True, name="afl planner").start()

    def poll(self) -> list[Planned | Failed]:
        """What has come since the last call, without waiting."""
        out = []
        while not self._answers.empty():
            out.append(self._answers.get())
        return out

    def stop(self) -> None:
        """End the process that is running, if any; its job is answered by `Failed`."""
        if self._job is not None:
            self._job.end()

    def _work(self, job: _Job) -> None:
        try:
            self._answers.put(self._answer(job))
        except (AflError, OSError, ValueError, MemoryError) as e:
            self._answers.put(Failed(job.start.ticket, str(e) or type(e).__name__))

    def _answer(self, job: _Job) -> Planned | Failed:
        start = job.start
        message = pack_job(start.window, start.placement, self.topology, self.params, self.policy)
        process = subprocess.Popen([*self.command, str(self.seconds)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, start_new_session=True)
        job.process = process
        late = threading.Timer(self.seconds, job.end)
        late.start()
        try:
            if job.unwanted:
                process.kill()
            out, err = process.communicate(message)
        finally:
            process.kill()
            late.cancel()
        if job.unwanted:
            return Failed(start.ticket, f"the planner was ended, at the latest after {self.seconds:g} s")
        if process.returncode:
            why = (err.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
            return Failed(start.ticket, f"the planner ended with status {process.returncode}: {why}")
        made = unpack_plan(out)
        bad = faults(made, start.placement, start.window.experts)
        return Failed(start.ticket, f"the planner's plan is wrong: {bad[0]}") if bad else Planned(start.ticket, made)


def main() -> None:
    """The process: a job on stdin, a plan on stdout, at most the seconds of the first argument."""
    signal.setitimer(signal.ITIMER_REAL, float(sys.argv[1]) + 1)        # default action: the process ends
    try:
        answer = pack_plan(plan(*unpack_job(sys.stdin.buffer.read())))
    except AflError as e:
        sys.exit(str(e).replace("\n", " "))
    sys.stdout.buffer.write(answer)


if __name__ == "__main__":
    main()
