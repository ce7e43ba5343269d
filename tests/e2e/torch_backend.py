"""The torch backend for ranks on the CPU, whose tensors no NVML sees."""

from __future__ import annotations

from tsliced.host.backends.torch import TorchBackend


class CpuTorchBackend(TorchBackend):
    """Goes by who registered, and believes what the ranks say."""

    seen_by_nvml = False
