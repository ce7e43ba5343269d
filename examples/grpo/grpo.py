"""GRPO in plain torch, as small as it can be: nothing in here knows of tsliced.

The task: answer a prompt of digits with the same digits in the opposite order. A reward function
looks at each answer alone; what makes an answer good is that it beats the others of its group.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

DIGITS = 5
PROMPT = 4
WIDTH = 32
CLIP = 0.2


class Policy(nn.Module):  # type: ignore[misc]  # what is torch's is not typed here
    """A decoder of one layer that goes on writing where a sequence of digits ends."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.tokens = nn.Embedding(DIGITS, width)
        self.places = nn.Embedding(2 * PROMPT, width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.head = nn.Linear(width, DIGITS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns for each of (sequences, length) tokens the log probabilities of the next one."""
        length = tokens.shape[1]
        x = self.tokens(tokens) + self.places.weight[:length]
        query, key, value = self.query_key_value(x).chunk(3, dim=-1)
        x = x + nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.down(torch.relu(self.up(x)))
        return torch.log_softmax(self.head(x), dim=-1)


class Adapter(nn.Module):  # type: ignore[misc]
    """A linear layer that stays as it is, and a trained change of low rank to it (LoRA)."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / rank)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def adapt(policy: Policy, rank: int) -> list[nn.Parameter]:
    """Leaves all of a policy as it is but adapters of this rank, and returns their parameters."""
    policy.requires_grad_(False)
    for name in ("query_key_value", "up", "down", "head"):
        setattr(policy, name, Adapter(getattr(policy, name), rank))
    return [parameter for parameter in policy.parameters() if parameter.requires_grad]


@dataclass
class Rollout:
    """Prompts with their answers, `group` of them for each prompt, one after the other."""

    #: (sequences, 2 * PROMPT)
    tokens: Tensor
    #: (sequences, PROMPT), of the answers' tokens when they were written.
    log_probabilities: Tensor
    group: int

    def to(self, device: str) -> Rollout:
        """Returns the same on a device."""
        return Rollout(self.tokens.to(device), self.log_probabilities.to(device), self.group)


def roll_out(sampler: Policy, prompts: Tensor, group: int, draws: torch.Generator) -> Rollout:
    """Writes answers to (prompts, PROMPT) prompts, `group` to each."""
    tokens = prompts.repeat_interleave(group, dim=0)
    said = []
    for _ in range(PROMPT):
        with torch.no_grad():
            following = sampler(tokens)[:, -1]
        # Drawn on the host, so that a device has no state that nobody names.
        drawn = torch.multinomial(following.exp().cpu(), 1, generator=draws).to(tokens.device)
        said.append(following.gather(1, drawn))
        tokens = torch.cat([tokens, drawn], dim=1)
    return Rollout(tokens, torch.cat(said, dim=1), group)


def reward(tokens: Tensor) -> Tensor:
    """Returns which share of each answer is right: (sequences,). It needs no device."""
    prompts, answers = tokens.split(PROMPT, dim=1)
    return (answers == prompts.flip(1)).float().mean(dim=1)


def advantages(rewards: Tensor, group: int) -> Tensor:
    """Returns how much better each answer is than the others of its group: (sequences,)."""
    grouped = rewards.view(-1, group)
    centred = grouped - grouped.mean(dim=1, keepdim=True)
    return (centred / (grouped.std(dim=1, keepdim=True) + 1e-4)).view(-1)


def update(model: nn.Module, optimizer: Any, rollout: Rollout, rewards: Tensor) -> float:
    """Takes one step towards the better answers, and returns the loss.

    model: the policy, or what spreads it over ranks.
    """
    predicted = model(rollout.tokens[:, :-1])[:, PROMPT - 1 :]
    answers = rollout.tokens[:, PROMPT:, None]
    ratio = (predicted.gather(2, answers).squeeze(2) - rollout.log_probabilities).exp()
    gain = advantages(rewards, rollout.group)[:, None]
    loss = -torch.min(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss)


def sampler_of(policy: Policy) -> Policy:
    """Returns a copy that answers are sampled from, as a serving engine has weights of its own."""
    sampler = copy.deepcopy(policy)
    sampler.requires_grad_(False)
    return sampler


def synchronize(policy: Policy, sampler: Policy) -> None:
    """Brings what was learned to the sampler."""
    for learned, used in zip(policy.parameters(), sampler.parameters(), strict=True):
        if learned.requires_grad:
            used.copy_(learned.detach())
