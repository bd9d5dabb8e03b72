"""A made-up run for the tests of its report: asynchronous workers in virtual time, logged as a real one logs."""

from __future__ import annotations

import heapq
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.configs import make_config
from trainer.runlog.events import COLUMNS

BEGUN = 1_760_000_000.0


@dataclass
class MadeUpRun:
    """Worker w takes step_s[w] seconds a step, with noise. ``train`` simulates until an epoch ends, ``roll_back`` and
    ``restart`` do what they say, ``finish`` ends it; the files are written by ``save``."""

    num_workers: int = 12
    epochs: int = 5
    steps_per_epoch: int = 30
    batch: int = 10
    slow: dict[int, float] = field(default_factory=lambda: {7: 2.5})
    changes: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        config = make_config("hdfs://name/shards", "out/run", epochs=self.epochs, servers=2, **self.changes)
        plan: dict[str, Any] = {
            "num_workers": self.num_workers,
            "worker_batches": [self.batch] * self.num_workers,
            "drops": [],
        }
        plan |= {"synchronous": config.protocol.synchronous, "clock_bound": config.protocol.clock_bound()}
        self.events: list[dict[str, Any]] = []
        self.rows: list[str] = []
        self.seconds, self.wall, self.version, self.generation = 0.0, BEGUN, 0, 1
        self.clock = [0] * self.num_workers
        self.window: list[tuple[int, int, float, float]] = []  # worker, staleness, loss, accuracy
        self.saved: tuple[int, float, list[int]] = (0, 0.0, [0] * self.num_workers)
        self.log("start", config=config.to_json(), plan=plan, versions={"torch": "2.13.0"}, resumed_from=None)

    @property
    def epoch(self) -> float:
        return self.version / (self.num_workers * self.steps_per_epoch)

    def log(self, event: str, **values: Any) -> None:
        self.events.append({"event": event, "time": self.wall, **values})

    def train(self, until: float, *, idle: tuple[int, ...] = ()) -> None:
        """Push until that global epoch; idle workers do not take part."""
        working = [worker for worker in range(self.num_workers) if worker not in idle]
        queue = [(self.seconds + self._step_s(worker), worker, self.version) for worker in working]
        heapq.heapify(queue)
        logged, began = self.seconds, self.seconds
        while self.epoch < until:
            now, worker, pulled = heapq.heappop(queue)
            self.wall += now - self.seconds
            self.seconds = now
            self._push(worker, pulled)
            heapq.heappush(queue, (now + self._step_s(worker), worker, self.version))
            if now - logged >= 1.0:
                self._log_train(now - logged)
                logged = now
        self._log_train(max(self.seconds - max(logged, began), 1e-3))

    def end_epoch(self, *, evaluate: bool = True) -> None:
        number, loss, accuracy = round(self.epoch), self._loss(), self._accuracy()
        where = {"epoch": number, "version": self.version, "seconds": self.seconds}
        self.log("epoch", **where, loss=loss + 0.05, accuracy=accuracy - 0.02)
        if evaluate:
            train = {"train_loss": loss - 0.05, "train_accuracy": accuracy + 0.02}
            last = {"rows": 10_000, "final": number == self.epochs}
            self.log("eval", **where, loss=loss, accuracy=accuracy, **train, **last)
        self.saved = (self.version, self.seconds, list(self.clock))

    def restart(self, worker: int) -> None:
        self.log("restart", role="worker", index=worker, cause="killed by signal 9")

    def roll_back(self) -> None:
        """To the end of the last epoch."""
        before = self.version
        self.version, self.seconds, self.clock = self.saved[0], self.saved[1], list(self.saved[2])
        self.wall += 4.0
        self.generation += 1
        self.log("restart", role="server", index=1, cause="killed by signal 9")
        self.log("rollback", from_version=before, to_version=self.version, cause="server 1 was started again")

    def finish(self, cause: str = "finished") -> None:
        self.log("end", cause=cause, seconds=self.seconds, updates=self.version)

    def save(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in self.events))
        if self.rows:
            (folder / "pushes.csv").write_text("\n".join([COLUMNS, *self.rows]) + "\n")
        return folder

    def _step_s(self, worker: int) -> float:
        return 0.8 * self.slow.get(worker, 1.0) * float(self.rng.lognormal(0, 0.1))

    def _loss(self) -> float:
        return 0.4 + 1.9 * float(np.exp(-0.6 * self.epoch))

    def _accuracy(self) -> float:
        return 0.1 + 0.8 * (1 - float(np.exp(-0.6 * self.epoch)))

    def _push(self, worker: int, pulled: int) -> None:
        staleness = self.version - pulled
        self.version += 1
        loss = self._loss() * float(self.rng.lognormal(0, 0.15))
        correct = int(self.rng.binomial(self.batch, self._accuracy()))
        who = f"{self.generation},{self.version},{worker},{self.clock[worker]},{pulled},{staleness}"
        self.rows.append(f"{who},{self.batch},{loss:.6g},{correct},{self.seconds:.3f},1,0.050000,0.000100")
        self.clock[worker] += 1
        self.window.append((worker, staleness, loss, correct / self.batch))

    def _log_train(self, spent: float) -> None:
        window, self.window = self.window, []
        if not window:
            return
        _, staleness, losses, accuracies = map(np.array, zip(*window, strict=True))
        counts = {worker: sum(w == worker for w, *_ in window) for worker in sorted({w for w, *_ in window})}
        self.log(
            "train",
            seconds=self.seconds,
            version=self.version,
            accepted=self.version,
            epoch=self.epoch,
            loss=float(losses.mean()),
            accuracy=float(accuracies.mean()),
            learning_rate=0.1 if self.epoch < 4 else 0.01,
            images_per_s=self.batch * len(window) / spent,
            staleness_mean=float(staleness.mean()),
            staleness_max=int(staleness.max()),
            workers=[
                {"index": w, "clock": self.clock[w], "images": self.batch * n, "step_s": 0.8 * self.slow.get(w, 1.0)}
                for w, n in counts.items()
            ],
        )


def eventful_run(**changes: Any) -> MadeUpRun:
    """12 workers, 5 epochs; worker 4 dies in the second and comes back, a server in the fourth; one warning."""
    run = MadeUpRun(**changes)
    for epoch in range(1, run.epochs + 1):
        if epoch == 2:
            run.train(1.4)
            run.restart(4)
            run.train(1.7, idle=(4,))
        if epoch == 4:
            run.train(3.6)
            run.roll_back()
        run.train(epoch)
        run.end_epoch()
    run.log("warning", message="checkpoint 00000720 could not be pruned: Permission denied")
    run.finish()
    return run
