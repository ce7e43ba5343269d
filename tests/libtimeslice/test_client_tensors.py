"""Tensors whose memory is taken away and brought back, with a real torch on the CPU."""

from __future__ import annotations

import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tensor_digests import digest, storage_of

from libtimeslice.errors import Refused
from libtimeslice.storages import Unmovable
from libtimeslice.tensors import Policy, Tensors

LIMIT_S = 100
MIB = 1 << 20


def managed(
    *objects: object, policy: dict[str, Policy] | None = None, **regions: object
) -> Tensors:
    tensors = Tensors("cpu")
    tensors.add(objects, regions, policy)
    return tensors


def bytes_in(tensor: Any) -> int:
    return int(tensor.untyped_storage().nbytes())


def model() -> Any:
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))


def train(module: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    module(torch.ones(4, 64)).square().mean().backward()
    optimizer.step()


def test_memory_is_freed_and_comes_back_byte_for_byte_g12() -> None:
    module = model()
    before, size = digest(module), sum(bytes_in(p) for p in module.parameters())
    tensors = managed(module)
    out = tensors.park()
    assert (out.bytes, tensors.parked) == (size, True)
    assert [bytes_in(p) for p in module.parameters()] == [0, 0, 0, 0]
    back = tensors.unpark()
    assert (back.bytes, tensors.parked) == (size, False)
    assert digest(module) == before
    assert out.seconds > 0
    assert back.gb_per_s == back.bytes / back.seconds / 1e9


def test_what_shares_a_storage_shares_it_still_and_is_copied_once() -> None:
    class Tied(torch.nn.Module):  # type: ignore[misc]  # what is torch's is not typed here
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(32, 16)
            self.head = torch.nn.Linear(16, 32, bias=False)
            self.head.weight = self.embedding.weight

    flat = torch.arange(1000.0)
    views = [flat[:10].view(2, 5), flat[500:], flat[::2], flat[None]]
    module = Tied()
    tensors = managed(module, views, flat)
    objects = [id(module.head.weight), *map(id, views)]
    storages = [storage_of(module.head.weight), storage_of(flat)]
    before = digest(module, flat)
    assert tensors.park().bytes == 32 * 16 * 4 + 4000
    tensors.unpark()
    assert module.head.weight is module.embedding.weight
    assert [id(module.head.weight), *map(id, views)] == objects
    assert [storage_of(module.head.weight), storage_of(views[0])] == storages
    assert digest(module, flat) == before
    flat[0] = 77
    assert views[0][0, 0] == 77, "they are views of the same memory"


def test_an_optimizer_goes_on_as_if_nothing_had_been_moved() -> None:
    torch.manual_seed(1)
    module, twin = model(), model()
    twin.load_state_dict(module.state_dict())
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (module, twin)]
    tensors = managed(module, optimizers[0])
    parameters = sum(bytes_in(p) for p in module.parameters())
    for _ in range(3):
        for each, optimizer in zip((module, twin), optimizers, strict=True):
            train(each, optimizer)
        # Gradients and two moments for each, made after it was named, and a step count for each.
        assert tensors.park().bytes == 4 * parameters + 4 * 4
        moments = optimizers[0].state[module[0].weight]
        assert bytes_in(moments["exp_avg"]) == bytes_in(module[0].weight.grad) == 0
        tensors.unpark()
    assert digest(module, optimizers[0]) == digest(twin, optimizers[1])


def test_a_graph_that_is_alive_can_be_walked_back_after_a_move() -> None:
    torch.manual_seed(2)
    module = model()
    given = torch.randn(4, 64)
    module(given).square().mean().backward()
    expected = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    inner = given * 3
    loss = module(given).square().mean()
    tensors = managed(module, {"not a leaf": loss, "inner": inner})
    tensors.park()
    tensors.unpark()
    loss.backward()
    for parameter, gradient in zip(module.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_regions_go_each_their_own_way_and_the_first_that_is_named_has_a_tensor() -> None:
    base = model()
    adapters = [base[0].bias, base[2].bias]
    kept = torch.ones(100)
    tensors = managed(
        lora=adapters,
        base=base,
        cache={"kv": kept},
        policy={"base": "discard", "cache": "keep"},
    )
    before = digest(adapters)
    moved = tensors.park()
    assert [(r.name, r.policy, r.storages, r.bytes) for r in moved.regions] == [
        ("lora", "save", 2, (256 + 8) * 4),
        ("base", "discard", 2, (64 * 256 + 256 * 8) * 4),
        ("cache", "keep", 1, 400),
    ]
    assert moved.bytes == (256 + 8) * 4
    assert [bytes_in(p) for p in base.parameters()] == [0, 0, 0, 0]
    assert kept.sum() == 100
    assert tensors.host_bytes == MIB, "what is discarded has no place on the host"
    tensors.unpark()
    assert digest(adapters) == before
    assert bytes_in(base[0].weight) == 64 * 256 * 4, "the job has something to fill"


def test_what_is_not_named_stays() -> None:
    base = model()
    tensors = managed(lora=[base[2].bias])
    assert tensors.park().bytes == 8 * 4
    assert bytes_in(base[0].weight) > 0
    tensors.unpark()


@dataclass
class Batch:
    tokens: Any
    step: int = 3


def test_containers_of_all_kinds_are_walked_through() -> None:
    ring: list[object] = [torch.ones(1)]
    ring.append(ring)
    tensors = managed(
        {"a": (torch.ones(2), None)}, Batch(torch.ones(3)), ring, {7: {"deep": [torch.ones(4)]}}
    )
    assert tensors.park().bytes == (1 + 2 + 3 + 4) * 4
    tensors.unpark()


def test_what_has_no_memory_there_is_passed_over() -> None:
    lazy = torch.nn.LazyLinear(4)
    tensors = managed(torch.ones(1000, device="meta"), lazy, torch.ones(0), torch.ones(5))
    assert tensors.check() == 20
    lazy(torch.ones(1, 3))
    assert tensors.check() == 20 + (4 * 3 + 4) * 4
    elsewhere = Tensors("cuda")
    elsewhere.add([torch.ones(5), lazy], None, None)
    assert elsewhere.check() == 0, "what is on the host does not take memory from the devices"


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.eye(3).to_sparse(), "no storage of its own"),
        (lambda: torch.frombuffer(bytearray(64), dtype=torch.uint8), "not torch's to free"),
        (lambda: torch.ones(3).share_memory_(), "not torch's to free"),
        (lambda: object(), "is a object: name modules"),
    ],
    ids=["sparse", "another library's", "shared", "no tensor"],
)
def test_what_cannot_be_moved_is_refused_by_its_name(make: Any, why: str) -> None:
    tensors = managed(torch.ones(7))
    with pytest.raises(Unmovable, match=why) as raised:
        tensors.add([], {"cache": {"first": [torch.ones(1), make()]}}, None)
    assert raised.value.message.startswith("cache['first'][1] ")
    assert tensors.check() == 28, "and what was there before is there still"


def test_what_turned_unmovable_is_refused_when_it_is_to_be_moved_and_nothing_is() -> None:
    holder = {"good": torch.ones(7), "bad": torch.ones(7)}
    tensors = managed(holder=holder)
    holder["bad"] = torch.eye(3).to_sparse()
    for move in (tensors.check, tensors.park):
        with pytest.raises(Unmovable, match=r"holder\['bad'\]"):
            move()
    assert (bytes_in(holder["good"]), tensors.parked) == (28, False)


@pytest.mark.parametrize(
    ("regions", "policy", "why"),
    [
        ({"a": []}, {"b": "keep"}, "which is no region"),
        ({"a": []}, {"a": "burn"}, "is one of"),
        ({"old": []}, {}, "already"),
    ],
)
def test_names_and_policies_that_make_no_sense_are_refused(
    regions: dict[str, object], policy: dict[str, Any], why: str
) -> None:
    tensors = managed(old=torch.ones(1))
    with pytest.raises(ValueError, match=why):
        tensors.add([], regions, policy)
    with pytest.raises(ValueError, match="'cuda' or 'cpu'"):
        Tensors("tape")


def test_the_second_move_and_all_after_it_make_no_host_memory() -> None:
    tensors = managed([torch.ones(MIB) for _ in range(16)])
    tensors.park()
    had = tensors.host_bytes
    assert had == 64 * MIB
    tensors.unpark()
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        tensors.park()
        faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
        assert faults < 64 * MIB // resource.getpagesize() / 100, "fresh pages are faulted in"
        assert tensors.host_bytes == had
        tensors.unpark()


def test_tensors_that_straddle_the_pieces_of_host_memory_come_back_whole() -> None:
    odd = [torch.randint(0, 255, (size,), dtype=torch.uint8) for size in (MIB - 7, MIB + 13, 3)]
    tensors = managed(odd[:1])
    before = digest(odd)
    tensors.park()
    tensors.unpark()
    tensors.add(odd[1:], None, None)
    tensors.park()
    assert tensors.host_bytes == 3 * MIB, "in pieces, of which none was made in vain"
    tensors.unpark()
    assert digest(odd) == before


SHORT = """
import resource, sys
sys.path.insert(0, sys.argv[1])
import torch
from tensor_digests import digest
from libtimeslice.errors import Refused
from libtimeslice.tensors import Tensors

def limit(more):
    pages = int(open("/proc/self/statm").read().split()[0])
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = hard if more is None else pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))

def refused(move, code):
    try:
        move()
    except Refused as error:
        assert error.code == code, error
        return
    raise AssertionError("it went through")

# Each of a size that is put aside when it is freed.
held = [torch.rand(8 << 20) for _ in range(4)]
before = digest(held)
tensors = Tensors("cpu")
tensors.add(held, None, None)
limit(50 << 20)
refused(tensors.park, "no_host_memory")
assert not tensors.parked and digest(held) == before
limit(None)
tensors.park()
limit(-100 << 20)
refused(tensors.unpark, "no_device_memory")
assert tensors.parked and all(t.untyped_storage().nbytes() == 0 for t in held)
limit(None)
tensors.unpark()
assert digest(held) == before
# There is no room to put the first aside, and what it leaves is enough for the others.
limit(1 << 20)
tensors.park()
tensors.unpark()
limit(None)
assert digest(held) == before
print("whole")
"""


def run(script: str, *arguments: str, **environment: str) -> list[str]:
    """Runs a script in a process of its own, and returns its lines."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, str(Path(__file__).parent), *arguments],
        env={"PATH": "", **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_memory_that_is_short_is_refused_and_all_stays_where_it_was_g12() -> None:
    assert run(SHORT) == ["whole"]


#: Moves few large tensors and many small ones as an agent does: in a thread, and in a process as it
#: comes. Prints for each the medians of several rounds, in GB/s: a copy of as many pieces of memory
#: by memcpy, the way out, and the way back; and how many pages were made in the last round. What
#: counts is the thread's own time: it moves alone, and others on the machine are none of its doing.
SPEED = """
import ctypes, resource, statistics, threading, time
import torch
from libtimeslice.tensors import Tensors

total, rounds = 256 << 20, 9
to, source = [torch.ones(total, dtype=torch.uint8) for _ in range(2)]

def memcpy(many):
    each = total // many
    for at in range(0, many * each, each):
        ctypes.memmove(to.data_ptr() + at, source.data_ptr() + at, each)

def rate(move, *arguments):
    begun = time.thread_time()
    move(*arguments)
    return total / (time.thread_time() - begun) / 1e9

def pages():
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt

def measure(many):
    tensors = Tensors("cpu")
    tensors.add([[torch.ones(total // many // 4) for _ in range(many)]], None, None)
    figures = []
    for _ in range(rounds):
        copied, before = rate(memcpy, many), pages()
        figures.append((copied, rate(tensors.park), rate(tensors.unpark)))
        made = pages() - before
    # In the first rounds pages come from the kernel.
    print(*map(statistics.median, zip(*figures[rounds // 2 :])), made)

for many in (4, 640):
    agent = threading.Thread(target=measure, args=[many])
    agent.start()
    agent.join()
"""


def test_a_move_takes_little_longer_than_a_copy_also_of_many_small_tensors() -> None:
    for line in run(SPEED):
        memcpy, out, back, made = map(float, line.split())
        assert min(out, back) > 0.7 * memcpy, line
        assert made < 256 * MIB // resource.getpagesize() / 100, "and it makes no memory"


def test_a_refusal_carries_a_code_of_the_wire() -> None:
    assert issubclass(Unmovable, Refused)
    assert Unmovable("x").code == "refused"
