"""Execute steps in processes of this machine.

Measurements run alone: on the machine, or, if there are several GPUs of one kind, on a GPU of their own, with builds
beside them as far as memory allows. What chooses kernels by their times has its GPU to itself, too.
"""

import contextlib
import functools
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Self

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.errors import BuilderFailed, StepError, StepKilled, StoreError, storage_errors
from enginesmith.pipeline.execution.executor import Executor, Result, StepCache, StepRequest
from enginesmith.pipeline.planning.plan import Step
from enginesmith.pipeline.recipe.fleet import Place
from enginesmith.pipeline.store.store import Store
from enginesmith.pipeline.system import nvidia, worker
from enginesmith.pipeline.system.cpu import free_bytes
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.system.gpu_lock import LONGEST_SECONDS, lock_gpu
from enginesmith.pipeline.tasks.base import Done, execute

_VISIBLE = "CUDA_VISIBLE_DEVICES"


class Gpus:
    """GPUs of this machine of the first one's kind, so that any of them serves a step, which sees it as ``cuda:0``."""

    def __init__(self, alike: int) -> None:
        self._taken: set[int] = set()
        self._stopped, self._returned = False, threading.Condition()
        self.count, self.several = alike, alike > 1

    @contextlib.contextmanager
    def reserve(self, device: Device) -> Iterator[tuple[int, dict[str, str]]]:
        """Reserve a GPU; yields its index, and the environment in which it is the first one.

        A device with an index was chosen by the user, and is that one, of whatever kind.

        Raises:
            StepError: the wait for one was ended.
        """
        with self._returned:
            wanted = {device.index} if device.index else set(range(self.count))
            self._returned.wait_for(lambda: self._stopped or wanted - self._taken)
            if self._stopped:
                raise StepError("it was ended")
            index = min(wanted - self._taken)
            self._taken.add(index)
        try:
            # CUDA's name of a device in the environment, where some may be hidden already
            shown = [name.strip() for name in os.environ.get(_VISIBLE, "").split(",") if name.strip()]
            name = shown[index] if index < len(shown) else str(index)
            yield index, {} if device.index else {_VISIBLE: name}
        finally:
            with self._returned:
                self._taken.remove(index)
                self._returned.notify_all()

    def stop(self) -> None:
        """End waits for a GPU, present and later ones."""
        with self._returned:
            self._stopped = True
            self._returned.notify_all()


def show_only(variables: Mapping[str, str]) -> None:
    """Set the environment of a reserved GPU; called in a worker before CUDA starts."""
    os.environ.update(variables)


_SHARE_TO_WAIT = 0.25
"""Share of a step's time in which it waits for other processes that measure on its GPU."""
_ROOM_BYTES = 2 << 30
"""Free memory that is required to start one more step beside others."""
_POLL_SECONDS = 0.1
"""Age up to which a figure of free memory is used: steps that are taken from the store follow each other fast."""


class LocalExecutor(Executor):
    """Runs ``jobs`` steps at a time, each in a fresh process; cheap ones share processes."""

    is_local = True

    def __init__(self, store: Store, jobs: int, gpus: Gpus | None = None) -> None:
        self._store, self._jobs, self._gpus = store, jobs, gpus or Gpus(nvidia.count_alike())
        self.slots = jobs + (self._gpus.count if self._gpus.several else 0)
        if "://" not in store.address:
            self.max_lookups = 1  # faster there: Python's threads would wait for each other at every turn
        cores = sorted(os.sched_getaffinity(0))
        self._shares: queue.SimpleQueue[frozenset[int]] = queue.SimpleQueue()
        """Cores for each of several steps: thread pools that share cores would spin against each other."""
        for slot in range(self.slots):
            self._shares.put(frozenset(cores[slot % len(cores) :: self.slots] or cores))
        self._active: set[worker.Worker] = set()
        self._spare: list[worker.Worker] = []
        """Idle processes for cheap steps."""
        self._running, self._stopped, self._lock = 0, False, threading.Lock()
        self._session = contextlib.ExitStack()
        self._memory_read_at, self._enough_memory = -math.inf, True

    def __enter__(self) -> Self:
        """Have the store keep what is used from now on until :meth:`close`, where its folder can be written."""
        with contextlib.suppress(StoreError):
            self._session.enter_context(self._store.workspace())
        return self

    def why_unavailable(self, place: Place) -> str:
        """Explain why the GPU of a place is not available; resources are for clusters, and ignored here."""
        if place.device == "cpu":
            return ""
        availability = nvidia.available(0)
        if not availability.ok:
            return f"the GPU of this machine cannot be used: {availability.reason}"
        name = nvidia.driver().devices[0].name  # as drivers give it: NVIDIA H100 80GB HBM3 is an H100
        if place.accelerator.casefold().replace("-", " ") not in name.casefold().replace("-", " "):
            return f"the GPU of this machine is {name}, and {place.accelerator} was requested"
        return ""

    def can_start(self, step: Step, running: Collection[Step]) -> bool:
        """Return whether there is a slot and memory left, and nothing disturbs a measurement."""
        if not running:
            return True
        return len(running) < self.slots and self._is_undisturbed([step, *running]) and self._has_memory()

    def _has_memory(self) -> bool:
        if time.monotonic() - self._memory_read_at > _POLL_SECONDS:
            free = free_bytes()
            self._memory_read_at, self._enough_memory = time.monotonic(), free is None or free >= _ROOM_BYTES
        return self._enough_memory

    def _is_undisturbed(self, together: Collection[Step]) -> bool:
        measuring = [step.task for step in together if step.task.exclusive]
        gpus = [step.task for step in together if step.task.gpus]
        if len(gpus) > 1 and not self._gpus.several and any(task.times_kernels for task in gpus):
            return False
        if not measuring or all(step.task.pairs and step.task.title == measuring[0].title for step in together):
            return len(together) <= self._jobs
        on_their_own = all(task.gpus == "one" for task in [*measuring, *gpus])
        return self._gpus.several and on_their_own and len(gpus) <= self._gpus.count

    def allows_lookups(self, step: Step) -> bool:
        """Return whether lookups may go on; a measurement tolerates them only where it tolerates builds."""
        return self._gpus.several or not step.task.exclusive

    def lookup(self, request: StepRequest) -> Artifact | None:
        return StepCache(request.step, request.inputs, self._store).lookup()

    def execute(self, request: StepRequest) -> Result:
        """Execute a step in a worker; one that was killed from outside is repeated once."""
        cache, begun = StepCache(request.step, request.inputs, self._store), time.monotonic()
        request.on_start()
        try:
            return Result(cache.make(functools.partial(self._work, request)), cached=False)
        except StepKilled as killed:
            again = request.after(time.monotonic() - begun)
            if self._stopped or again is None:
                raise
            request.on_note(f"{killed}; it is run again")
            return Result(cache.make(functools.partial(self._work, again)), cached=False)

    def _work(self, request: StepRequest, out: Path, partial: Path | None) -> Done:
        with storage_errors(f"the logs in {request.log.parent}"):
            request.log.parent.mkdir(parents=True, exist_ok=True)
            request.log.unlink(missing_ok=True)
        try:
            if request.step.task.in_process:
                return self._run_in_shared_worker(request, out)
            return self._run_in_worker(request, out, partial)
        except (StepError, BuilderFailed) as error:
            error.remedy += f"; its log: {request.log}"
            raise

    def _run_in_worker(self, request: StepRequest, out: Path, partial: Path | None) -> Done:
        with contextlib.ExitStack() as stack:
            cores = stack.enter_context(self._reserve_cores(request.step))
            gpu, prepare = stack.enter_context(self._reserve_gpu(request.step))
            request = stack.enter_context(self._lock_gpu(request, gpu))

            def remember(process: worker.Worker) -> None:
                stack.callback(self._forget, process)
                self._remember(process)

            done: Done = worker.run(
                functools.partial(execute, begun=partial),
                request.step.task,
                request.inputs,
                out,
                log=request.log,
                on_progress=request.on_progress,
                on_start=remember,
                timeout_seconds=request.timeout_seconds,
                cores=cores,
                prepare=prepare,
            )
            return done

    def _run_in_shared_worker(self, request: StepRequest, out: Path) -> Done:
        with self._lock:
            process = self._spare.pop() if self._spare else None
        if process is None:
            process = worker.Worker(worker.serve, execute, log=request.log)
            self._remember(process)
        try:
            done: Done = process.request(
                request.step.task,
                request.inputs,
                out,
                on_progress=request.on_progress,
                timeout_seconds=request.timeout_seconds,
            )
        except BaseException:
            process.kill()
            self._forget(process)
            raise
        with self._lock:
            self._spare.append(process)
        return done

    @contextlib.contextmanager
    def _reserve_cores(self, step: Step) -> Iterator[frozenset[int] | None]:
        """Reserve a share of the cores; all, None, for a measurement and a step that starts while no other one runs.

        Threads on all cores would wait for those of steps that begin right after it: some share them from the start.
        """
        if step.task.exclusive:
            yield None
            return
        with self._lock:
            alone = not self._running and not step.task.shares_cores
            self._running += 1
        share = None if alone else self._shares.get()
        try:
            yield share
        finally:
            if share is not None:
                self._shares.put(share)
            with self._lock:
                self._running -= 1

    @contextlib.contextmanager
    def _reserve_gpu(self, step: Step) -> Iterator[tuple[int, Callable[[], None] | None]]:
        """Reserve a GPU; yields its index, and what has a worker see only that one, or None if there is no choice."""
        if step.task.gpus != "one" or not self._gpus.several:
            yield step.task.runs_on.index, None
            return
        with self._gpus.reserve(step.task.runs_on) as (index, variables):
            yield index, functools.partial(show_only, variables)

    @contextlib.contextmanager
    def _lock_gpu(self, request: StepRequest, index: int) -> Iterator[StepRequest]:
        """Keep other processes of this machine from taking times on a GPU meanwhile; yields the request as it is then.

        Waiting for them takes a part of the time that the step has.
        """
        task = request.step.task
        if task.gpus != "one" or not (task.exclusive or task.times_kernels):
            yield request
            return
        limit = min(LONGEST_SECONDS, _SHARE_TO_WAIT * (request.timeout_seconds or math.inf))
        with lock_gpu(index, limit, request.on_note, lambda: self._stopped) as waited:
            yield request.after(waited) or request

    def _remember(self, process: worker.Worker) -> None:
        with self._lock:
            self._active.add(process)
        if self._stopped:
            process.kill()

    def _forget(self, process: worker.Worker) -> None:
        with self._lock:
            self._active.discard(process)

    def stop(self) -> None:
        self._stopped = True
        self._store.stop()
        self._gpus.stop()
        with self._lock:
            for process in self._active:
                process.kill()

    def close(self) -> None:
        self._session.close()
        with self._lock:
            for process in self._spare:
                process.kill()
            self._active.difference_update(self._spare)
            self._spare.clear()
