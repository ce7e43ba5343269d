"""Lives of simulated clusters, by the thousand: ``make sim SEEDS=20000``, ``make sim SEED=n``.

Seeds are lived on all cores. The first one that breaks a guarantee is lived once more, and told: a
failure prints its seed, what was wrong, and what had happened, in order and by host. At the end
stands how often each phase of a move was hit by each fault; a pair that was hit too rarely fails a
long run, because it shows that the simulation has become blind to something.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from faults import FAULTS
from life import PHASES, Aim, Life, all_pairs
from transcript import Transcript

#: How often each phase is to be hit by each fault in 20,000 lives, and in as many less as there are
#: less lives; a short run shows nothing of that.
MIN_HITS, OF_LIVES, SHORT = 50, 20_000, 5_000
#: Lives per message from a worker.
BATCH = 20


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one life ended. `failure`: None, or what was wrong with it."""

    seed: int
    failure: str | None
    hits: Counter[Aim]
    switches: int


def live(seed: int, *, full_checks: bool = True) -> Outcome:
    """Live one life. `full_checks`: the core looks at itself, too, after each event."""
    life = Life(seed, full_checks=full_checks)
    failure = None
    try:
        life.live()
    except Exception as exc:
        failure = f"{type(exc).__name__}: {exc}"
    return Outcome(seed, failure, life.hits, life.switches)


def tell(seed: int) -> str:
    """Live one life once more, and return what happened in it."""
    life = Life(seed)
    transcript = Transcript(life)
    try:
        life.live()
    except Exception:
        ending = traceback.format_exc(limit=-5)
    else:
        ending = "nothing was wrong"
    layout = ", ".join(
        f"{name} on {'+'.join(on)}" for name, on in life.cluster.layout.groups.items()
    )
    jobs = ", ".join(
        f"{one.key.id} at {'+'.join(seat.host.host for seat in one.seats)}"
        f" for {'|'.join('+'.join(groups) for groups in one.wants)}"
        for one in life.cluster.jobs
    )
    heading = f"seed {seed}: groups {layout}; jobs {jobs}"
    return "\n".join([heading, *transcript.lines, ending])


def live_all(seeds: Iterable[int], workers: int) -> Iterator[Outcome]:
    """Live many lives, in any order."""
    if workers == 1:
        yield from map(live, seeds)
        return
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        yield from pool.imap_unordered(live, seeds, chunksize=BATCH)


def table(hits: Counter[Aim]) -> str:
    """Return how often each phase was hit by each fault."""
    width = max(map(len, FAULTS))
    names = [phase.value.replace(" ", "-") for phase in PHASES]
    lines = [" ".join([" " * width, *names])]
    for fault in FAULTS:
        counts = (f"{hits[Aim(p, fault)]:{len(n)}}" for p, n in zip(PHASES, names, strict=True))
        lines.append(" ".join([f"{fault:{width}}", *counts]))
    return "\n".join(lines)


def run(seeds: range, workers: int) -> int:
    """Live all seeds; return the exit status."""
    hits: Counter[Aim] = Counter()
    failed: list[Outcome] = []
    lived = switches = 0
    began_at = time.monotonic()
    for outcome in live_all(seeds, workers):
        lived, switches = lived + 1, switches + outcome.switches
        hits += outcome.hits
        if outcome.failure is not None:
            failed.append(outcome)
            print(f"seed {outcome.seed}: {outcome.failure}", flush=True)
            if len(failed) >= 20:
                print("that is enough of them")
                break
    seconds = time.monotonic() - began_at
    if failed:
        print(tell(min(failed, key=lambda outcome: outcome.seed).seed))
    print(table(hits))
    print(
        f"{lived} lives, {switches} switches, {len(failed)} failed, {lived / seconds:.0f} lives/s"
    )
    least = MIN_HITS * lived // OF_LIVES if lived >= SHORT else 0
    missing = [aim for aim in all_pairs() if hits[aim] < least]
    if missing:
        pairs = ", ".join(f"{aim.fault} while {aim.phase.value}" for aim in missing)
        print(f"hit fewer than {least} times: {pairs}")
    return bool(failed or missing)


def main() -> int:
    """Do as the command line says."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    arguments.add_argument("--seeds", type=int, default=2000, help="how many lives")
    arguments.add_argument("--first", type=int, default=0, help="seed of the first one")
    arguments.add_argument("--seed", type=int, help="live this one, and tell it")
    arguments.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    options = arguments.parse_args()
    if options.seed is not None:
        print(tell(options.seed))
        return live(options.seed).failure is not None
    return run(range(options.first, options.first + options.seeds), options.jobs)


def with_fixed_hashes() -> None:
    """Start anew where hashes differ from run to run: with them, sets come in another order."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(sys.executable, sys.orig_argv, {**os.environ, "PYTHONHASHSEED": "0"})


if __name__ == "__main__":
    with_fixed_hashes()
    sys.exit(main())
