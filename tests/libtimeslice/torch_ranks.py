"""Ranks of torch.distributed over gloo that are parked in the middle of their training.

Run with: how the model is spread, the rank, how many, a file for the rendezvous, and after how many
steps everything is parked and brought back. Writes a digest of all that the rank has at the end.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from tensor_digests import digest
from torch import distributed
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from libtimeslice.storages import Walk
from libtimeslice.tensors import Tensors

STEPS = 4
WIDTH = 32


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


def main(how: str, rank: int, many: int, file: str, park_after: int) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{file}", rank=rank, world_size=many)
    torch.manual_seed(3)
    plain = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH))
    model = spread(how, copy.deepcopy(plain))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    tensors = Tensors("cpu")
    tensors.add([model, optimizer], None, None)
    for step in range(1, STEPS + 1):
        model(torch.full((2, WIDTH), float(step + rank))).square().mean().backward()
        optimizer.step()
        if step == park_after:
            moved = tensors.park()
            assert moved.bytes > 0
            left = Walk("cpu").visit("it", [model, optimizer])
            assert left == [], [storage.name for storage in left]
            distributed.barrier()  # what the ranks talk with is there still
            tensors.unpark()
        optimizer.zero_grad(set_to_none=how == "ddp")
    sys.stdout.write(digest(model, optimizer))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
