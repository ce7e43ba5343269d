/* The part of NVML's binary interface that softcuda speaks, in our own words: return codes and
 * layouts as pynvml and other clients expect them. */
#ifndef SOFTCUDA_NVML_ABI_H
#define SOFTCUDA_NVML_ABI_H

#include <stddef.h>
#include <stdint.h>

enum nvml_result {
    NVML_SUCCESS = 0,
    NVML_UNINITIALIZED = 1,
    NVML_INVALID_ARGUMENT = 2,
    NVML_NOT_SUPPORTED = 3,
    NVML_NO_PERMISSION = 4,
    NVML_NOT_FOUND = 6,
    NVML_INSUFFICIENT_SIZE = 7,
    NVML_DRIVER_NOT_LOADED = 9,
    NVML_TIMEOUT = 10,
    NVML_FUNCTION_NOT_FOUND = 13,
    NVML_GPU_IS_LOST = 15,
    NVML_ARGUMENT_VERSION_MISMATCH = 25,
    NVML_UNKNOWN = 999,
};

struct nvml_memory {
    uint64_t total;
    uint64_t free;
    uint64_t used;
};

#define NVML_MEMORY_V2 0x02000028u

struct nvml_memory_v2 {
    uint32_t version;
    uint64_t total;
    uint64_t reserved;
    uint64_t free;
    uint64_t used;
};

#define NVML_NOT_AVAILABLE UINT64_MAX
#define NVML_NO_INSTANCE UINT32_MAX

struct nvml_process {
    uint32_t pid;
    uint64_t used_bytes; /* or NVML_NOT_AVAILABLE */
    uint32_t gpu_instance;
    uint32_t compute_instance;
};

struct nvml_utilization {
    uint32_t gpu_percent;
    uint32_t memory_percent;
};

struct nvml_pci {
    char legacy_bus_id[16];
    uint32_t domain;
    uint32_t bus;
    uint32_t device;
    uint32_t device_id;
    uint32_t subsystem_id;
    char bus_id[32];
};

_Static_assert(sizeof(struct nvml_memory) == 24, "memory");
_Static_assert(sizeof(struct nvml_memory_v2) == 40, "memory v2");
_Static_assert(offsetof(struct nvml_memory_v2, used) == 32, "memory v2 used");
_Static_assert(sizeof(struct nvml_process) == 24, "process");
_Static_assert(offsetof(struct nvml_process, gpu_instance) == 16, "GPU instance");
_Static_assert(sizeof(struct nvml_utilization) == 8, "utilization");
_Static_assert(sizeof(struct nvml_pci) == 68, "PCI");
_Static_assert(offsetof(struct nvml_pci, bus_id) == 36, "bus id");

#endif
