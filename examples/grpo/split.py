"""The same training with rollout and training apart: a process for each, on devices of its own.

    TSLICE_JOB_ID=exp7 python -m examples.grpo.split --out run

The processes lease the groups `sampler` and `trainer`, each while it works, and other jobs have the
devices of the one that waits. Weights and answers go through the host; see `train.py` for the rest.
"""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from examples.grpo.grpo import DIGITS, PROMPT, Policy, Rollout, reward, roll_out, update
from examples.grpo.train import EPOCHS, GROUP, PROMPTS, options_of, prepare
from libtimeslice import connect


def on_host(policy: Policy) -> dict[str, Tensor]:
    """Returns copies of the weights: what is managed must not be shared with other processes."""
    return {name: tensor.to("cpu", copy=True) for name, tensor in policy.state_dict().items()}


def job_of(options: Any, side: str) -> str | None:
    """Returns the job of one side; None: that of the environment, for both.

    NVML says which process is on which devices. Of tensors on the CPU it knows nothing, and each
    process would be taken to be on all groups of its job; so there each side is a job of its own.
    """
    return None if options.device == "cuda" else f"{os.environ['TSLICE_JOB_ID']}-{side}"


def sample(options: Any, trainer: Connection) -> None:
    """Writes answers with the weights that come, until none come any more."""
    prepare(options)
    ts = connect(job=job_of(options, "sampler"))
    step = ts.pausable_step()
    with ts.lease("sampler", phase="load"):
        sampler = Policy(options.width).to(options.device).requires_grad_(False)
        ts.torch.manage(sampler, device=options.device)
    draws = torch.Generator().manual_seed(1000 * options.seed)
    while (weights := trainer.recv()) is not None:
        with ts.lease("sampler", phase="rollout"), step:
            sampler.load_state_dict(weights)
            prompts = torch.randint(DIGITS, (PROMPTS, PROMPT), generator=draws)
            samples = roll_out(sampler, prompts.to(options.device), GROUP, draws)
            answers = samples.tokens.cpu(), samples.log_probabilities.cpu()
        trainer.send(answers)
    ts.close()


def train(options: Any, sampler: Connection) -> None:
    """Learns from the answers that come, and saves all that came of it."""
    losses: list[float] = []
    means: list[float] = []
    ts = connect(job=job_of(options, "trainer"))
    step = ts.pausable_step()
    with ts.lease("trainer", phase="load"):
        policy = Policy(options.width).to(options.device)
        optimizer = torch.optim.AdamW(policy.parameters(), lr=options.lr)
        ts.torch.manage(policy, optimizer, device=options.device)
        weights = on_host(policy)
    for number in range(options.steps):
        sampler.send(weights)
        tokens, log_probabilities = sampler.recv()
        with ts.phase("reward"):
            rewards = reward(tokens)
        ts.queue("samples", depth=len(tokens))
        with ts.lease("trainer", phase="training"), step:
            samples = Rollout(tokens, log_probabilities, GROUP).to(options.device)
            gains = rewards.to(options.device)
            losses.extend(update(policy, optimizer, samples, gains) for _ in range(EPOCHS))
            weights = on_host(policy)
        ts.queue("samples", depth=0)
        means.append(float(rewards.mean()))
        ts.progress(step=number, reward=means[-1], loss=losses[-1])
    with ts.lease("trainer", phase="save"):
        result = {
            "policy": on_host(policy),
            "optimizer": optimizer.state_dict(),
            "losses": losses,
            "rewards": means,
        }
        torch.save(result, f"{options.out}.0")
    sampler.send(None)
    ts.close()


def main() -> None:
    """Trains a policy with two processes, and saves all that came of it."""
    options = options_of("python -m examples.grpo.split", main.__doc__)
    prepare(options)
    here, there = multiprocessing.Pipe()
    sampler = multiprocessing.get_context("spawn").Process(target=sample, args=(options, there))
    sampler.start()
    there.close()
    try:
        train(options, here)
    finally:
        here.close()
        sampler.join()


if __name__ == "__main__":
    main()
