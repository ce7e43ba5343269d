"""A training run that shares its devices: rollout and training in one process, or in one per rank.

    python -m examples.grpo.train --out run
    torchrun --nproc-per-node 2 -m examples.grpo.train --out run    # saves run.0 and run.1

The loop itself is in `grpo.py`; here is what tsliced adds to it. With TSLICE_MODE=off nothing is
shared, and nothing else differs.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel

from examples.grpo.grpo import (
    DIGITS,
    PROMPT,
    WIDTH,
    Policy,
    Rollout,
    adapt,
    reward,
    roll_out,
    sampler_of,
    synchronize,
    update,
)
from libtimeslice import PausableStep, TimeSlice, connect

PROMPTS = 8
GROUP = 8
#: Updates from one rollout.
EPOCHS = 2


class Run:
    """All that a rank has on its device, and what it draws its prompts and samples from."""

    def __init__(self, options: argparse.Namespace, rank: int, ranks: int) -> None:
        self.policy = Policy(options.width)
        if options.lora:
            adapt(self.policy, options.lora)
        self.policy.to(options.device)
        self.sampler = sampler_of(self.policy)
        self.model = DistributedDataParallel(self.policy) if ranks > 1 else self.policy
        self.optimizer: Any = torch.optim.AdamW(self.trained, lr=options.lr)
        self.draws = torch.Generator().manual_seed(1000 * options.seed + rank)
        self.device = options.device

    @property
    def trained(self) -> list[Tensor]:
        """What the optimizer changes: all of the policy, or its adapters."""
        return [parameter for parameter in self.policy.parameters() if parameter.requires_grad]

    @property
    def synchronized(self) -> list[Tensor]:
        """What the sampler has of that."""
        pairs = zip(self.policy.parameters(), self.sampler.parameters(), strict=True)
        return [used for learned, used in pairs if learned.requires_grad]

    def prompts(self) -> Tensor:
        """Returns the next prompts of this rank."""
        drawn = torch.randint(DIGITS, (PROMPTS, PROMPT), generator=self.draws)
        return drawn.to(self.device)

    def manage(self, ts: TimeSlice, *, lora: bool) -> None:
        """Says what is moved while others have the devices."""
        if not lora:
            ts.torch.manage(self.model, self.sampler, self.optimizer, device=self.device)
            return
        # What is trained comes and goes. The base is named by nobody, and stays on the device.
        ts.torch.manage(
            regions={
                "adapters": self.trained,
                "optimizer": self.optimizer,
                "sampler": self.synchronized,
            },
            device=self.device,
        )

    def result(self) -> dict[str, Any]:
        """Returns all that training changes."""
        return {
            "policy": self.policy.state_dict(),
            "sampler": self.sampler.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }


def train(run: Run, ts: TimeSlice, step: PausableStep, steps: int) -> dict[str, list[float]]:
    """Takes so many steps of training, and returns what came of each."""
    losses: list[float] = []
    means: list[float] = []

    @ts.on_accelerators(phase="rollout")  # ts: waits for its turn, and all is back when it begins
    def rollout() -> tuple[Rollout, Tensor]:
        with step:  # ts: whoever is paused stands between two of these
            samples = roll_out(run.sampler, run.prompts(), GROUP, run.draws)
            return samples, samples.tokens.cpu()

    @ts.on_accelerators(phase="training")
    def training(samples: Rollout, rewards: Tensor) -> None:
        with step:
            gains = rewards.to(run.device)
            losses.extend(update(run.model, run.optimizer, samples, gains) for _ in range(EPOCHS))
            synchronize(run.policy, run.sampler)

    for number in range(steps):
        samples, answers = rollout()
        with ts.phase("reward"):  # ts: needs no device, and others have them meanwhile
            rewards = reward(answers)
        ts.queue("samples", depth=len(answers))
        training(samples, rewards)
        ts.queue("samples", depth=0)
        means.append(float(rewards.mean()))
        ts.progress(step=number, reward=means[-1], loss=losses[-1])  # ts
    return {"losses": losses, "rewards": means}


def main() -> None:
    """Trains a policy, and saves all that came of it."""
    options = options_of("python -m examples.grpo.train", main.__doc__)
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    prepare(options)
    if ranks > 1:
        distributed.init_process_group("nccl" if options.device == "cuda" else "gloo")
    ts = connect()
    step = ts.pausable_step()  # ts: before anything is managed
    with ts.lease(phase="load"):
        run = Run(options, rank, ranks)
        run.manage(ts, lora=bool(options.lora))
    told: dict[str, Any] = dict(train(run, ts, step, options.steps))
    with ts.lease(phase="save"):
        if (moved := ts.torch.last_move) is not None:
            told["moved"] = {region.name: region.bytes for region in moved.regions}
        torch.save({**run.result(), **told}, f"{options.out}.{rank}")
        if ranks > 1:
            distributed.destroy_process_group()
    ts.close()


def prepare(options: argparse.Namespace) -> None:
    """Makes what this process computes repeatable, so that runs can be compared."""
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)


def options_of(program: str, description: str | None) -> argparse.Namespace:
    """Returns what the command line says."""
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument("--out", type=Path, required=True, help="where to save, rank by rank")
    parser.add_argument("--steps", type=int, default=30, help="of training (default 30)")
    parser.add_argument("--seed", type=int, default=1, help="of all that is random (default 1)")
    parser.add_argument("--lora", type=int, default=0, help="train adapters of this rank alone")
    parser.add_argument("--width", type=int, default=WIDTH, help=f"of the policy (default {WIDTH})")
    parser.add_argument("--lr", type=float, default=1e-2, help="learning rate (default 0.01)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    return parser.parse_args()


if __name__ == "__main__":
    main()
