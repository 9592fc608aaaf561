"""Qualifier: proves each kernel on this machine before a request uses it.

    compiled or loaded ──> verdict kept? ──yes──> usable, or quarantined
                                │ no
                                └──> experiments, on their own thread and stream ──> verdict

Only a variant without a verdict waits for experiments.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

from gpu_actors.compiling.cubin_entry import EntryName
from gpu_actors.compiling.source import Cubin
from gpu_actors.compiling.variant import Variant
from gpu_actors.devices.interface import Device, Kernel, Kernels, Stream
from gpu_actors.errors import CompileError, ContextLost, GpuActorsError, LaunchError, Unqualified, caused
from gpu_actors.qualification.evidence import evidence_of
from gpu_actors.qualification.experiment import Experiment, ProofFailed, ProofTimeout
from gpu_actors.qualification.experiments import experiments_of, is_proved
from gpu_actors.qualification.verdicts import Verdict, VerdictName, Verdicts
from gpu_actors.runtime.environment import Environment
from gpu_actors.runtime.meter import Histogram

__all__ = ["Qualifier"]

logger: logging.Logger = logging.getLogger("gpu_actors")

Product: TypeAlias = Cubin | Kernel
Done: TypeAlias = Callable[[GpuActorsError | None], None]

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_LOCK_SECONDS = 60.0


class Qualifier:
    """The proofs of a context. Any thread may use it.

    environment: the context's. again: whether to ignore kept verdicts. key_of: returns the name of a variant's cubin.
    make: returns what the device loads for a variant, or has built for it.
    seconds: the durations of proofs. counts: verdicts of this context by outcome, kept ones included.
    """

    def __init__(
        self,
        environment: Environment,
        verdicts: Verdicts,
        key_of: Callable[[Variant], EntryName],
        make: Callable[[Variant], Product],
        again: bool,
    ) -> None:
        self._environment = environment
        self._device: Device = environment.device
        self._verdicts = verdicts
        self._key_of = key_of
        self._make = make
        self._again = again
        self._known: dict[VerdictName, Verdict] = {}
        self._stream: Stream | None = None  # used by the pool's thread alone
        self._lock = threading.Lock()
        # One thread, because proofs would take turns on the device's multiprocessors anyway.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="qualify")
        self.seconds: Histogram = Histogram(_SECONDS)
        self.counts: dict[str, int] = {"qualified": 0, "quarantined": 0}

    def judge(self, variant: Variant, product: Product, done: Done) -> None:
        """Call ``done`` with None once a variant may be launched, or with the error that answers its requests.

        The error is `Unqualified` if the variant is wrong. If a verdict is kept, this reads at most one file, and calls
        ``done`` at once.
        """
        if not is_proved(variant):
            done(None)
            return
        name = self._verdicts.name(self._key_of(variant), product)
        verdict = self._known.get(name)
        if verdict is None and not self._again:
            verdict = self._verdicts.read(name)
        if verdict is not None and verdict.outcome != "suspect":
            done(self._conclude(variant, name, verdict, kept=True))
            return
        try:
            self._pool.submit(self._prove_for, variant, product, name, done)
        except RuntimeError as error:  # the context closes
            done(GpuActorsError(f"proving {variant.kernel} could not begin: {error}"))

    def close(self) -> None:
        # Proofs that have not begun are dropped: the closing context answers their calls.
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _prove_for(self, variant: Variant, product: Product, name: VerdictName, done: Done) -> None:
        failure: GpuActorsError | None
        try:
            failure = self._prove(variant, product, name)
        except ContextLost as error:
            failure = self._environment.context_lost(error)
        except GpuActorsError as error:
            failure = error.with_traceback(None)
        except BaseException as error:
            logger.exception("proving %s raised", variant.kernel)
            failure = caused(GpuActorsError(f"proving {variant.kernel} raised {error!r}"), error.with_traceback(None))
        done(failure)

    def _prove(self, variant: Variant, product: Product, name: VerdictName) -> Unqualified | None:
        with self._verdicts.locked(name, _LOCK_SECONDS) as held:
            before = self._verdicts.read(name)  # another process may have proved it meanwhile
            if before is not None and before.outcome != "suspect" and not self._again:
                return self._conclude(variant, name, before, kept=True)
            began = time.monotonic()
            try:
                verdict, evidence = self._experiment(variant, product)
            except ContextLost as error:
                if held:
                    # Another kernel may be at fault. After two losses in a row, this one counts as wrong, because
                    # otherwise no process would survive it.
                    again = before is not None and before.outcome == "suspect"
                    lost = Verdict("quarantined" if again else "suspect", reason=f"the device was lost: {error}")
                    self._verdicts.publish(name, lost)
                raise
            seconds = time.monotonic() - began
            with self._lock:
                self.seconds.observe(seconds)
            if held:
                self._verdicts.publish(name, verdict, evidence)
            return self._conclude(variant, name, verdict, kept=False)

    def _conclude(self, variant: Variant, name: VerdictName, verdict: Verdict, kept: bool) -> Unqualified | None:
        with self._lock:
            self._known[name] = verdict
            self.counts[verdict.outcome] += 1
        trace, about = self._environment.trace, {"kernel": variant.kernel, "variant": str(variant), "kept": kept}
        if verdict.outcome == "qualified":
            trace.emit("kernel.qualified", **about, experiments=verdict.experiments, seconds=verdict.seconds)
            return None
        evidence = self._verdicts.evidence(name)
        trace.emit("kernel.quarantined", **about, problem=verdict.problem, reason=verdict.reason, evidence=evidence)
        message = f"{variant.kernel} is quarantined on {self._device.info.name}: {verdict.reason}"
        return Unqualified(message, variant.kernel, verdict.problem, verdict.reason, evidence)

    def _experiment(self, variant: Variant, product: Product) -> tuple[Verdict, bytes | None]:
        """Return the verdict of all experiments, and the evidence of a failure. Raises errors not due to the kernel."""
        device, began, count = self._device, time.monotonic(), 0
        device.bind_thread()
        for experiment in experiments_of(variant, device):
            try:
                kernels = self._kernels(experiment, variant, product)
            except CompileError:
                if not self._environment.options.offline:
                    raise
                continue  # another kernel of the launch is in no cache: requests that need it fail
            failed = self._try(experiment, kernels)
            count += 1
            if failed is not None:
                reason, outputs = failed
                verdict = Verdict("quarantined", count, time.monotonic() - began, experiment.text, reason)
                return verdict, evidence_of(experiment, variant, outputs, reason)
        return Verdict("qualified", count, time.monotonic() - began), None

    def _try(self, experiment: Experiment, kernels: Kernels) -> tuple[str, dict[str, object]] | None:
        """Return why an experiment failed, and the kernel's outputs, or None if it did not fail."""
        if self._stream is None:
            self._stream = self._device.open_stream("qualify")
        try:
            experiment.prove(self._stream, kernels, self._environment.hang_timeout)
        except ProofFailed as error:
            return str(error), dict(error.outputs)
        except ProofTimeout as error:
            # Later work on the stream would wait for the launch that hangs there.
            self._stream.close()
            self._stream = None
            return f"its launch {error}", {}
        except LaunchError as error:
            return f"its launch failed: {error}", {}
        return None

    def _kernels(self, experiment: Experiment, variant: Variant, product: Product) -> Kernels:
        """The loaded kernels of an experiment, none if the device runs none."""
        if not self._device.info.runs_kernels:
            return Kernels(())
        products = [product if other == variant else self._make(other) for other in experiment.variants]
        return Kernels(
            self._device.load(each, each.entry_points[0]) if isinstance(each, Cubin) else each for each in products
        )
