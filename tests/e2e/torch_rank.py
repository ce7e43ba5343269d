"""A rank with a real torch, which takes commands as ``rank.py`` does, and these besides.

Its tensors are on the CPU, or where RANK_DEVICE says. Its loop trains in steps that the daemon can
pause; each step uses all that was managed, and fails if it is away.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
import time

import rank
import torch

from libtimeslice.storages import Storage, Walk

torch.set_num_threads(1)
DEVICE = os.environ.get("RANK_DEVICE", "cpu")


class Trainer:
    """A model, its optimizer, and a thread that trains them under leases of its own, or without."""

    def __init__(self, width: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Linear(width, 8))
        self.model.append(torch.nn.Linear(8, width, bias=False))
        self.model.to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.given = torch.ones(4, width, device=DEVICE)
        self.steps = 0
        self.enough: int | None = None
        self.failed: BaseException | None = None
        self.step = rank.client().pausable_step()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def train(self) -> None:
        """Takes one step."""
        with self.step:
            self.optimizer.zero_grad()
            self.model(self.given).square().mean().backward()
            self.optimizer.step()
            self.steps += 1

    def _run(self) -> None:
        try:
            while self.enough is None or self.steps < self.enough:
                self.train()
                time.sleep(0.002)
        except BaseException as failed:
            self.failed = failed

    def digest(self) -> str:
        """Returns the SHA-256 of all its storages."""
        total = hashlib.sha256()
        for storage in self._storages():
            on_host = storage.memory.cpu()
            total.update(ctypes.string_at(on_host.data_ptr(), storage.bytes))
        return total.hexdigest()

    def resident(self) -> int:
        """Returns how many bytes of it have memory."""
        return sum(each.bytes for each in self._storages())

    def _storages(self) -> list[Storage]:
        return Walk(DEVICE).visit("it", [self.model, self.optimizer])


trainers: list[Trainer] = []


@rank.command
def load(width: int, seed: int, managed: bool = True) -> int:
    """Makes a model, takes a first step, and gives both to be moved; returns how many bytes."""
    made = Trainer(width, seed)
    trainers.append(made)
    made.train()
    if managed:
        rank.client().torch.manage(made.model, made.optimizer, device=DEVICE)
    return made.resident()


@rank.command
def train(steps: int) -> str:
    """Takes steps, and returns a digest of all tensors behind them."""
    for _ in range(steps):
        trainers[-1].train()
    return trainers[-1].digest()


@rank.command
def resident() -> int:
    return trainers[-1].resident()


@rank.command
def loop() -> None:
    """Begins to train in a thread of its own, for as long as nobody pauses it."""
    trainers[-1].thread.start()


@rank.command
def steps() -> int:
    return trainers[-1].steps


@rank.command
def finish(more: int) -> str:
    """Ends the loop after some more steps, and returns a digest of all tensors."""
    trainer = trainers[-1]
    trainer.enough = trainer.steps + more
    trainer.thread.join(30)
    assert not trainer.thread.is_alive(), f"it hangs at {trainer.steps} of {trainer.enough}"
    if trainer.failed is not None:
        raise trainer.failed
    return trainer.digest()


@rank.command
def twin(width: int, seed: int, steps: int) -> str:
    """Returns the digest of a model that was trained so far and is not managed."""
    made = Trainer(width, seed)
    for _ in range(steps):
        made.train()
    return made.digest()


if __name__ == "__main__":
    rank.main()
