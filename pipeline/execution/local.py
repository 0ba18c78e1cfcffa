"""Steps in processes of this machine.

Measurements are alone: on the machine, or, where there are several GPUs of one kind, on a GPU of their own, with builds
beside them as far as memory goes.
"""

import contextlib
import functools
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.errors import BuilderFailed, StepError, StepKilled, storage_errors
from enginesmith.pipeline.execution.executor import Executor, Result, StepCache, StepRequest
from enginesmith.pipeline.measure.memory.usage import available_bytes
from enginesmith.pipeline.planning.plan import Step
from enginesmith.pipeline.recipe.fleet import Place
from enginesmith.pipeline.store.store import Store
from enginesmith.pipeline.system import cuda
from enginesmith.pipeline.system import worker as workers
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tasks.base import Done, execute, execute_on

# The GPUs of this machine, handed out one by one: a step sees the one it was given as ``cuda:0``.

_VISIBLE = "CUDA_VISIBLE_DEVICES"


class Gpus:
    """Those that are of the kind of the first one, so that it makes no difference which of them a step is given."""

    def __init__(self, alike: int) -> None:
        self._free = set(range(alike))
        self._returned = threading.Condition()
        self.count = alike

    @property
    def several(self) -> bool:
        """Whether there is a choice."""
        return self.count > 1

    @classmethod
    def detect(cls) -> "Gpus":
        """As the driver shows them."""
        devices = cuda.driver().devices
        alike = 0
        for device in devices:
            if device != devices[0]:
                break
            alike += 1
        return cls(alike)

    @contextmanager
    def reserve(self, device: Device) -> Iterator[dict[str, str]]:
        """Hold a GPU; yields the environment in which it is the first one.

        A device with an index was chosen by the user, and is that one.
        """
        with self._returned:
            wanted = {device.index} if device.index else set(range(self.count))
            self._returned.wait_for(lambda: self._free & wanted)
            index = min(self._free & wanted)
            self._free.remove(index)
        try:
            yield {} if device.index else {_VISIBLE: self._name(index)}
        finally:
            with self._returned:
                self._free.add(index)
                self._returned.notify_all()

    @staticmethod
    def _name(index: int) -> str:
        """What CUDA calls a device in the environment, where some may be hidden already."""
        shown = [name.strip() for name in os.environ.get(_VISIBLE, "").split(",") if name.strip()]
        return shown[index] if index < len(shown) else str(index)


def show_only(variables: Mapping[str, str]) -> None:
    """In a worker before CUDA starts: take over the environment that came with a GPU."""
    os.environ.update(variables)


_ROOM_BYTES = 2 << 30
"""Memory that has to be left for one more step to be started beside others."""
_LOOK_SECONDS = 0.1
"""How old what is known of memory may be: steps that are taken from the store follow each other fast."""


class LocalExecutor(Executor):
    """Runs ``jobs`` steps at a time, each in a fresh process; cheap ones share a process, one after the other."""

    is_local = True

    def __init__(self, store: Store, jobs: int, gpus: Gpus | None = None) -> None:
        self._store, self._jobs, self._gpus = store, jobs, gpus or Gpus.detect()
        self.slots = jobs + (self._gpus.count if self._gpus.several else 0)
        if "://" not in store.address:
            self.max_lookups = 1  # faster there: Python's threads would wait for each other at every turn
        cores = sorted(os.sched_getaffinity(0))
        self._shares: queue.SimpleQueue[frozenset[int]] = queue.SimpleQueue()
        """Cores for each of several steps: thread pools that share cores would spin against each other."""
        for slot in range(self.slots):
            self._shares.put(frozenset(cores[slot % len(cores) :: self.slots] or cores))
        self._active: set[workers.Worker] = set()
        self._spare: list[workers.Worker] = []
        """Processes that did a cheap step, and can do the next one."""
        self._at_work = 0
        self._looked, self._has_room = -math.inf, True
        self._lock = threading.Lock()
        self._stopped = False

    def why_unavailable(self, place: Place) -> str:
        """Only the GPU is looked at: resources are what nodes of a cluster declare."""
        if place.device == "cpu":
            return ""
        found = cuda.driver()
        if not found.devices:
            return f"this machine has no GPU: {found.reason}"
        name = found.devices[0].name
        if not is_called(name, place.accelerator):
            return f"the GPU of this machine is {name}, and {place.accelerator} was asked for"
        return ""

    def can_start(self, step: Step, running: Collection[Step]) -> bool:
        """Whether there is a slot and memory left, and nothing disturbs a measurement."""
        if not running:
            return True
        return len(running) < self.slots and self._undisturbed([step, *running]) and self._room()

    def _room(self) -> bool:
        if time.monotonic() - self._looked > _LOOK_SECONDS:
            free = available_bytes()
            self._looked, self._has_room = time.monotonic(), free is None or free >= _ROOM_BYTES
        return self._has_room

    def _undisturbed(self, together: Collection[Step]) -> bool:
        measuring = [one.task for one in together if one.task.exclusive]
        if not measuring:
            return len(together) <= self._jobs
        gpus = [one.task.gpus for one in together if one.task.gpus]
        on_their_own = all(task.gpus == "one" for task in measuring)
        return self._gpus.several and on_their_own and "all" not in gpus and len(gpus) <= self._gpus.count

    def allows_lookups(self, step: Step) -> bool:
        """A measurement bears them only where it is done beside builds, too."""
        return self._gpus.several or not step.task.exclusive

    def lookup(self, request: StepRequest) -> Artifact | None:
        """Only the store is asked: who made it does not matter."""
        return StepCache(request.step, request.inputs, self._store).lookup()

    def execute(self, request: StepRequest) -> Result:
        """Do it in a worker; one that was killed from outside is started once more."""
        with request.with_notes() as noted:
            return self._carried_out(noted)

    def _carried_out(self, request: StepRequest) -> Result:
        cache = StepCache(request.step, request.inputs, self._store)
        request.on_start()
        try:
            return Result(cache.make(functools.partial(self._work, request)), cached=False)
        except StepKilled as killed:
            if self._stopped:
                raise
            request.on_note(f"{killed}; it is done once more")
            return Result(cache.make(functools.partial(self._work, request)), cached=False)

    def _work(self, request: StepRequest, out: Path, begun: Path | None) -> Done:
        with storage_errors(f"the logs in {request.log.parent}"):
            request.log.parent.mkdir(parents=True, exist_ok=True)
            request.log.unlink(missing_ok=True)
        try:
            if request.step.task.in_process:
                return self._done_quickly(request, out)
            return self._done(request, out, begun)
        except (StepError, BuilderFailed) as error:
            error.remedy += f"; its log: {request.log}"
            raise

    def _done(self, request: StepRequest, out: Path, begun: Path | None) -> Done:
        with contextlib.ExitStack() as stack:
            cores = stack.enter_context(self._cores())
            prepare = stack.enter_context(self._gpu(request.step))
            worker: list[workers.Worker] = []
            stack.callback(self._forget, worker)

            def started(this: workers.Worker) -> None:
                worker.append(this)
                self._remember(this)

            done: Done = workers.run(
                execute if begun is None else execute_on,
                request.step.task,
                request.inputs,
                out,
                *([] if begun is None else [begun]),
                log=request.log,
                on_progress=request.on_progress,
                on_start=started,
                timeout_seconds=request.timeout_seconds,
                cores=cores,
                prepare=prepare,
            )
            return done

    def _done_quickly(self, request: StepRequest, out: Path) -> Done:
        """In a process that may have done others like it, and may do more."""
        with self._lock:
            worker = self._spare.pop() if self._spare else None
        if worker is None:
            worker = workers.Worker(serve_steps, log=request.log)
            self._remember(worker)
        try:
            done: Done = worker.request(
                request.step.task,
                request.inputs,
                out,
                on_progress=request.on_progress,
                timeout_seconds=request.timeout_seconds,
            )
        except BaseException:
            worker.kill()
            self._forget([worker])
            raise
        with self._lock:
            self._spare.append(worker)
        return done

    @contextlib.contextmanager
    def _cores(self) -> Iterator[frozenset[int] | None]:
        """A share of the cores; all of them, None, for a step that starts while no other one is at work."""
        with self._lock:
            alone, self._at_work = not self._at_work, self._at_work + 1
        share = None if alone else self._shares.get()
        try:
            yield share
        finally:
            if share is not None:
                self._shares.put(share)
            with self._lock:
                self._at_work -= 1

    @contextlib.contextmanager
    def _gpu(self, step: Step) -> Iterator[Callable[[], None] | None]:
        """What has a worker see the one GPU that it is given; None where there is no choice."""
        if step.task.gpus != "one" or not self._gpus.several:
            yield None
            return
        with self._gpus.reserve(step.task.runs_on) as variables:
            yield functools.partial(show_only, variables)

    def _remember(self, worker: workers.Worker) -> None:
        with self._lock:
            self._active.add(worker)
        if self._stopped:
            worker.kill()

    def _forget(self, gone: Collection[workers.Worker]) -> None:
        with self._lock:
            self._active.difference_update(gone)

    def stop(self) -> None:
        """Kill all workers, and let nobody wait for the store."""
        self._stopped = True
        self._store.stop()
        with self._lock:
            for worker in self._active:
                worker.kill()

    def close(self) -> None:
        """End the processes that wait for another cheap step."""
        with self._lock:
            for worker in self._spare:
                worker.kill()
            self._active.difference_update(self._spare)
            self._spare.clear()


def serve_steps(connection: Connection) -> None:
    """A worker's body: one step after the other."""
    workers.serve(connection, execute)


def is_called(name: str, accelerator: str) -> bool:
    """Whether a GPU's full name, as drivers give it, is of that type: ``NVIDIA H100 80GB HBM3`` is an H100."""
    return accelerator.casefold().replace("-", " ") in name.casefold().replace("-", " ")
