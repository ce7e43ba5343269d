"""Ranks of torch.distributed over gloo that are parked in the middle of their training.

Run with: the rank, how many there are, and a directory for their rendezvous. For each way to spread
a model it trains twice, the second time parked and brought back in the middle, and writes a line of
JSON: the way, and digests of all that the rank has at the end of either. All in one process, since
importing torch takes longer than all of the rest.
"""

from __future__ import annotations

import copy
import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from tensor_digests import digest
from torch import distributed
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from libtimeslice.storages import Walk
from libtimeslice.tensors import Tensors

WAYS = ("ddp", "ddp_views", "fsdp_flat", "fsdp_views", "fsdp2")
STEPS = 4
PARK_AFTER = 2
WIDTH = 32
#: How long a rank waits for another one, which may have failed.
LIMIT = timedelta(seconds=60)


def spread(how: str, model: Any) -> Any:
    """Returns the model, spread over all ranks in one of the ways that torch has."""
    if how == "ddp":
        return DistributedDataParallel(model)
    if how == "ddp_views":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    if how in ("fsdp_flat", "fsdp_views"):
        return FullyShardedDataParallel(
            model,
            device_id=torch.device("cpu"),
            sharding_strategy=ShardingStrategy.FULL_SHARD,
            use_orig_params=how == "fsdp_views",
        )
    assert how == "fsdp2"
    mesh = distributed.init_device_mesh("cpu", (distributed.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(how: str, rank: int, *, park: bool) -> str:
    """Trains a model, and returns a digest of what this rank has of it in the end."""
    torch.manual_seed(3)
    plain = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH))
    model = spread(how, copy.deepcopy(plain))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    tensors = Tensors("cpu")
    tensors.add([model, optimizer], None, None)
    for step in range(1, STEPS + 1):
        model(torch.full((2, WIDTH), float(step + rank))).square().mean().backward()
        optimizer.step()
        if park and step == PARK_AFTER:
            moved = tensors.park()
            assert moved.bytes > 0
            left = Walk("cpu").visit("it", [model, optimizer])
            assert left == [], [storage.name for storage in left]
            distributed.barrier()  # what the ranks talk with is there still
            tensors.unpark()
        optimizer.zero_grad(set_to_none=how == "ddp")
    return digest(model, optimizer)


def main(rank: int, many: int, directory: Path) -> None:
    torch.set_num_threads(1)
    rendezvous = f"file://{directory / 'rendezvous'}"
    distributed.init_process_group("gloo", rendezvous, LIMIT, rank=rank, world_size=many)
    for how in WAYS:
        never, parked = (train(how, rank, park=park) for park in (False, True))
        sys.stdout.write(json.dumps([how, never, parked]) + "\n")
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
