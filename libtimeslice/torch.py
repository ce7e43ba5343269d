"""`ts.torch`: lets the daemon move a job's tensors with the help of the job, without the driver's.

    ts = connect()
    step = ts.pausable_step()
    ts.torch.manage(model, optimizer)
    for batch in batches:
        with ts.lease("trainer"), step:
            train(model, optimizer, batch)

torch is imported when tensors are managed, and not before. See `docs/torch.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from libtimeslice.callbacks import Callbacks, Pause
from libtimeslice.parking import Parking
from libtimeslice.tensors import Moved, MovedRegion, Policy, Tensors

__all__ = ["ManagedTensors", "Moved", "MovedRegion", "Policy"]


class ManagedTensors:
    """What a process gives to be moved. Made by its client; see `TimeSlice.torch`."""

    def __init__(
        self, parking: Parking, callbacks: Callbacks, announce: Callable[[], object]
    ) -> None:
        self._parking = parking
        self._callbacks = callbacks
        self._announce = announce

    def manage(
        self,
        *objects: object,
        regions: Mapping[str, object] | None = None,
        policy: Mapping[str, Policy] | None = None,
        device: str | None = None,
    ) -> None:
        """Has the memory under tensors moved to the host while others have the devices, and back.

        objects: modules, with their parameters, buffers and gradients; optimizers, with the state
            that they have at the time of the move; tensors; containers of these.
        regions: the same, with a name for each. A tensor that several lead to belongs to the first
            that leads to it; `objects` come after them.
        policy: of regions, `save` if it is not said: `discard` frees the memory and copies nothing,
            and an `on_resume` function has to fill it again; `keep` leaves it where it is.
        device: the kind of device whose memory is to be freed, `cuda` or `cpu`; by default `cuda`
            where there is one. Tensors elsewhere stay where they are.

        The tensors must be used inside of a `pausable_step` alone, or else be out of use when the
        job's `on_pause` functions have returned. May be called again, for more.

        Raises ValueError if there is neither, or for names that make no sense, and Unmovable, which
        names the tensor that cannot be moved.
        """
        if not self._callbacks.has(Pause):
            raise ValueError(
                "nothing would keep this process from using its tensors while they are away: make "
                "a step first (pausable_step), and use them inside of it"
            )
        tensors = self._tensors_on(device)
        tensors.add(objects, regions, policy)
        self._parking.tensors = tensors
        self._announce()

    @property
    def bytes(self) -> int:
        """How much a move would free as things stand, bytes."""
        tensors = self._parking.tensors
        return 0 if tensors is None else tensors.check()

    @property
    def last_move(self) -> Moved | None:
        """What the latest move did, to the host or back; None: there was none."""
        return self._parking.moved

    def _tensors_on(self, kind: str | None) -> Tensors:
        tensors = self._parking.tensors
        if tensors is None:
            return Tensors(kind if kind is not None else _default_kind())
        if kind not in (None, tensors.kind):
            raise ValueError(f"tensors on {tensors.kind} are managed already, and not on {kind}")
        return tensors


def _default_kind() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
