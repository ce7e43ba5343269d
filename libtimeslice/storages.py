"""Which memory the tensors of a job stand on.

Storages are what moves, not tensors: tied weights, views, the flat parameters of FSDP and the
gradients in buckets of DDP share storages, and share them still when these are back. So what a job
names is walked through down to its storages, each time anew: optimizers make their state late.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

from libtimeslice.errors import Refused

#: What containers may hold besides tensors, and is passed over.
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class Unmovable(Refused):
    """A tensor, or something else that was named, cannot be moved; the text names it."""

    default_code = "refused"


class Storage(NamedTuple):  # ten thousand are made in each move, and this is made fastest
    """Memory of a device that tensors stand on."""

    #: Of the first tensor that was found on it, such as ``model.layers.0.weight``.
    name: str
    #: torch.UntypedStorage
    memory: Any
    bytes: int
    #: torch.device
    device: Any


class Walk:
    """Collects the storages of one kind of device under everything that it visits, each once.

    What stands on other devices, meta tensors among it, is passed over: it needs no move.
    """

    def __init__(self, kind: str) -> None:
        import torch  # the job has it, and this library does not need it
        from torch.utils._python_dispatch import is_traceable_wrapper_subclass

        self._torch, self._is_wrapper = torch, is_traceable_wrapper_subclass
        #: As `torch.device.type` has it.
        self.kind = kind
        self._known: set[int] = set()
        #: The objects too: one that is made for the walk alone must not pass its id on.
        self._visited: dict[int, object] = {}
        self._found: list[Storage] = []

    def visit(self, name: str, value: object) -> list[Storage]:
        """Returns the storages under `value` that no earlier visit found.

        value: a module, an optimizer, a tensor, or a mapping, sequence, set or dataclass of such.
        Raises Unmovable, naming what cannot be moved.
        """
        self._found = []
        self._value(name, value)
        return self._found

    def _value(self, name: str, value: Any) -> None:
        torch = self._torch
        if isinstance(value, _PLAIN) or id(value) in self._visited:
            return
        self._visited[id(value)] = value
        if isinstance(value, torch.Tensor):
            self._tensor(name, value)
        elif isinstance(value, torch.nn.Module):
            self._module(name, value)
        elif isinstance(value, torch.optim.Optimizer):
            for number, group in enumerate(value.param_groups):
                self._value(f"{name}.param_groups[{number}]", group["params"])
            for number, state in enumerate(value.state.values()):
                self._state(f"{name}.state[{number}]", state)
        elif (parts := _parts(value)) is not None:
            for part, inner in parts:
                self._value(f"{name}{part}", inner)
        else:
            raise Unmovable(
                f"{name} is a {type(value).__name__}: name modules, optimizers, tensors, or "
                "containers of them"
            )

    def _module(self, name: str, module: Any) -> None:
        for part, tensor in module.named_parameters():
            self._value(f"{name}.{part}", tensor)
        for part, tensor in module.named_buffers():
            self._value(f"{name}.{part}", tensor)

    def _state(self, name: str, value: Any) -> None:
        """Visits an optimizer's own books, in which anything may stand beside tensors."""
        if isinstance(value, self._torch.Tensor):
            self._value(name, value)
        elif id(value) not in self._visited and (parts := _parts(value)) is not None:
            self._visited[id(value)] = value
            for part, inner in parts:
                self._state(f"{name}{part}", inner)

    def _tensor(self, name: str, tensor: Any) -> None:
        # That of a tensor which is no leaf is none, and a warning.
        if tensor.is_leaf and tensor.grad is not None:
            self._value(f"{name}.grad", tensor.grad)
        if self._is_wrapper(tensor):  # DTensor, as FSDP2 has it
            for part in tensor.__tensor_flatten__()[0]:
                inner = getattr(tensor, part)
                if isinstance(inner, self._torch.Tensor):  # a DTensor's mesh is among them
                    self._tensor(f"{name}.{part}", inner)
        elif tensor.device.type == self.kind:
            self._plain_tensor(name, tensor)

    def _plain_tensor(self, name: str, tensor: Any) -> None:
        if self._torch.nn.parameter.is_lazy(tensor):
            return  # it has no memory yet
        try:
            memory = tensor.untyped_storage()
        except NotImplementedError as error:
            raise Unmovable(
                f"{name} has no storage of its own (layout {tensor.layout}, "
                f"{type(tensor).__name__}): name the tensors that it consists of"
            ) from error
        size = memory.nbytes()
        if size == 0 or memory._cdata in self._known:
            return
        if not memory.resizable() or (self.kind == "cpu" and memory.is_shared()):
            raise Unmovable(
                f"{name} stands on memory that is not torch's to free: of another library, mapped "
                "from a file, or shared with other processes"
            )
        self._known.add(memory._cdata)
        self._found.append(Storage(name, memory, size, memory.device))


def _parts(value: Any) -> Iterator[tuple[str, Any]] | None:
    """What a container holds, with how it is reached; None if it is none.

    One by one: ten thousand at a time would have the garbage collector look through the process.
    """
    if isinstance(value, Mapping):
        return ((f"[{key!r}]", inner) for key, inner in value.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        return ((f"[{number}]", inner) for number, inner in enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return ((f".{field.name}", getattr(value, field.name)) for field in fields(value))
    return None
