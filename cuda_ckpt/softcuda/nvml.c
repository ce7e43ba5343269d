/* The management library: reads the ledger and changes nothing in it but the entries of the
 * dead. Its symbols are those that pynvml looks up for what tsliced and its users ask. */
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "nvml_abi.h"
#include "softcuda.h"

#define PCIE_WINDOW_MS 20 /* the call blocks about as long, as the real one does */

/* What a handle points to: its address carries the index, its contents are never read. */
static const char handles[MAX_DEVICES];
static pthread_mutex_t users_mutex = PTHREAD_MUTEX_INITIALIZER;
static unsigned users;

typedef const char *device_handle;

static const struct {
    enum nvml_result result;
    const char *text;
} texts[] = {
    {NVML_SUCCESS, "Success"},
    {NVML_UNINITIALIZED, "Uninitialized"},
    {NVML_INVALID_ARGUMENT, "Invalid Argument"},
    {NVML_NOT_SUPPORTED, "Not Supported"},
    {NVML_NO_PERMISSION, "Insufficient Permissions"},
    {NVML_NOT_FOUND, "Not Found"},
    {NVML_INSUFFICIENT_SIZE, "Insufficient Size"},
    {NVML_DRIVER_NOT_LOADED, "Driver Not Loaded"},
    {NVML_TIMEOUT, "Timeout"},
    {NVML_FUNCTION_NOT_FOUND, "Function Not Found"},
    {NVML_GPU_IS_LOST, "GPU is lost"},
    {NVML_ARGUMENT_VERSION_MISMATCH, "Argument version mismatch"},
};

EXPORT const char *nvmlErrorString(int result)
{
    for (size_t index = 0; index < sizeof texts / sizeof *texts; index++)
        if ((int)texts[index].result == result)
            return texts[index].text;
    return "Unknown Error";
}

EXPORT enum nvml_result nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    if (ledger_open(true))
        return NVML_DRIVER_NOT_LOADED;
    pthread_mutex_lock(&users_mutex);
    users++;
    pthread_mutex_unlock(&users_mutex);
    return NVML_SUCCESS;
}

EXPORT enum nvml_result nvmlShutdown(void)
{
    pthread_mutex_lock(&users_mutex);
    bool was_open = users > 0;
    if (was_open && --users == 0)
        ledger_close();
    pthread_mutex_unlock(&users_mutex);
    return was_open ? NVML_SUCCESS : NVML_UNINITIALIZED;
}

/* Suffers what the faults file says. Not while the ledger is locked: it may take its time. */
static enum nvml_result suffer(struct fault fault)
{
    fault_before(&fault);
    while (fault.kind == FAULT_HANG)
        sleep_ms(1000);
    return fault.kind == FAULT_ERROR ? (enum nvml_result)fault.code : NVML_SUCCESS;
}

/* Locks the ledger for a call that has somewhere to write its answer; a forked child opens its
 * own. With SUCCESS, the caller must unlock. */
static enum nvml_result enter(const void *answer)
{
    enum nvml_result result = suffer(faults_for(FAULT_NVML));
    if (result != NVML_SUCCESS)
        return result;
    if (!users)
        return NVML_UNINITIALIZED;
    if (!answer)
        return NVML_INVALID_ARGUMENT;
    if (ledger_open(true))
        return NVML_UNKNOWN;
    ledger_lock();
    return NVML_SUCCESS;
}

static enum nvml_result device_enter(device_handle handle, const void *answer, unsigned *device)
{
    uintptr_t offset = (uintptr_t)handle - (uintptr_t)handles;
    bool is_handle = offset < MAX_DEVICES;
    *device = (unsigned)offset;
    enum nvml_result result = is_handle ? suffer(faults_for_device(*device)) : NVML_SUCCESS;
    if (result == NVML_SUCCESS)
        result = enter(answer);
    if (result != NVML_SUCCESS)
        return result;
    if (is_handle && *device < ledger_map()->device_count)
        return NVML_SUCCESS;
    ledger_unlock();
    return NVML_INVALID_ARGUMENT;
}

static enum nvml_result answer_text(char *answer, unsigned size, const char *text)
{
    if (!answer)
        return NVML_INVALID_ARGUMENT;
    if (size <= strlen(text))
        return NVML_INSUFFICIENT_SIZE;
    strcpy(answer, text);
    return NVML_SUCCESS;
}

static void bus_id_text(unsigned device, char text[32])
{
    snprintf(text, 32, "00000000:%02X:00.0", FIRST_PCI_BUS + device);
}

/* ---- system ---- */

EXPORT enum nvml_result nvmlSystemGetDriverVersion(char *version, unsigned size)
{
    return users ? answer_text(version, size, config_text("SOFTCUDA_DRIVER", "580.95.05"))
                 : NVML_UNINITIALIZED;
}

EXPORT enum nvml_result nvmlSystemGetNVMLVersion(char *version, unsigned size)
{
    char text[80];
    snprintf(text, sizeof text, "%u.%.60s", config_driver_version() / 1000,
             config_text("SOFTCUDA_DRIVER", "580.95.05"));
    return users ? answer_text(version, size, text) : NVML_UNINITIALIZED;
}

EXPORT enum nvml_result nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    if (!version)
        return NVML_INVALID_ARGUMENT;
    *version = (int)config_driver_version();
    return NVML_SUCCESS;
}

EXPORT enum nvml_result nvmlSystemGetCudaDriverVersion(int *version)
{
    return nvmlSystemGetCudaDriverVersion_v2(version);
}

/* ---- finding devices ---- */

EXPORT enum nvml_result nvmlDeviceGetCount_v2(unsigned *count)
{
    enum nvml_result result = enter(count);
    if (result != NVML_SUCCESS)
        return result;
    *count = ledger_map()->device_count;
    ledger_unlock();
    return NVML_SUCCESS;
}

static enum nvml_result hand_out(unsigned device, device_handle *handle)
{
    *handle = &handles[device];
    return suffer(faults_for_device(device));
}

EXPORT enum nvml_result nvmlDeviceGetHandleByIndex_v2(unsigned index, device_handle *handle)
{
    enum nvml_result result = enter(handle);
    if (result != NVML_SUCCESS)
        return result;
    bool is_there = index < ledger_map()->device_count;
    ledger_unlock();
    return is_there ? hand_out(index, handle) : NVML_INVALID_ARGUMENT;
}

EXPORT enum nvml_result nvmlDeviceGetHandleByUUID(const char *uuid, device_handle *handle)
{
    char text[41];
    unsigned device = 0;
    enum nvml_result result = enter(uuid ? handle : NULL);
    if (result != NVML_SUCCESS)
        return result;
    for (; device < ledger_map()->device_count; device++) {
        device_uuid_text(&ledger_map()->devices[device].uuid, text);
        if (!strcasecmp(text, uuid))
            break;
    }
    bool is_there = device < ledger_map()->device_count;
    ledger_unlock();
    return is_there ? hand_out(device, handle) : NVML_NOT_FOUND;
}

/* Takes the domain with four digits or with eight. */
EXPORT enum nvml_result nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, device_handle *handle)
{
    char text[32];
    enum nvml_result result = enter(bus_id ? handle : NULL);
    if (result != NVML_SUCCESS)
        return result;
    result = NVML_NOT_FOUND;
    for (unsigned device = 0; device < ledger_map()->device_count; device++) {
        bus_id_text(device, text);
        if (!strcasecmp(text, bus_id) || !strcasecmp(text + 4, bus_id)) {
            *handle = &handles[device];
            result = NVML_SUCCESS;
        }
    }
    ledger_unlock();
    return result;
}

/* ---- what a device is ---- */

EXPORT enum nvml_result nvmlDeviceGetName(device_handle handle, char *name, unsigned size)
{
    unsigned device;
    enum nvml_result result = device_enter(handle, name, &device);
    if (result != NVML_SUCCESS)
        return result;
    ledger_unlock();
    return answer_text(name, size, DEVICE_NAME);
}

EXPORT enum nvml_result nvmlDeviceGetUUID(device_handle handle, char *uuid, unsigned size)
{
    unsigned device;
    char text[41];
    enum nvml_result result = device_enter(handle, uuid, &device);
    if (result != NVML_SUCCESS)
        return result;
    device_uuid_text(&ledger_map()->devices[device].uuid, text);
    ledger_unlock();
    return answer_text(uuid, size, text);
}

static enum nvml_result answer_number(device_handle handle, unsigned *answer, bool is_index,
                                      unsigned value)
{
    unsigned device;
    enum nvml_result result = device_enter(handle, answer, &device);
    if (result != NVML_SUCCESS)
        return result;
    *answer = is_index ? device : value;
    ledger_unlock();
    return NVML_SUCCESS;
}

EXPORT enum nvml_result nvmlDeviceGetIndex(device_handle handle, unsigned *index)
{
    return answer_number(handle, index, true, 0);
}

EXPORT enum nvml_result nvmlDeviceGetMinorNumber(device_handle handle, unsigned *minor)
{
    return answer_number(handle, minor, true, 0);
}

EXPORT enum nvml_result nvmlDeviceGetPersistenceMode(device_handle handle, unsigned *mode)
{
    return answer_number(handle, mode, false, config_flag("SOFTCUDA_PERSISTENCE", true));
}

EXPORT enum nvml_result nvmlDeviceGetComputeMode(device_handle handle, unsigned *mode)
{
    return answer_number(handle, mode, false, 0);
}

EXPORT enum nvml_result nvmlDeviceGetCurrentClocksThrottleReasons(device_handle handle,
                                                                  unsigned long long *reasons)
{
    unsigned device;
    enum nvml_result result = device_enter(handle, reasons, &device);
    if (result != NVML_SUCCESS)
        return result;
    ledger_unlock();
    *reasons = (unsigned long long)config_number("SOFTCUDA_CLOCK_REASONS", 0, 0, 511);
    return NVML_SUCCESS;
}

EXPORT enum nvml_result nvmlDeviceGetMigMode(device_handle handle, unsigned *current,
                                             unsigned *pending)
{
    if (strcmp(config_text("SOFTCUDA_UNSUPPORTED", ""), "mig"))
        return users ? NVML_NOT_SUPPORTED : NVML_UNINITIALIZED;
    enum nvml_result result = answer_number(handle, current, false, 1);
    return result == NVML_SUCCESS ? answer_number(handle, pending, false, 1) : result;
}

EXPORT enum nvml_result nvmlDeviceGetPciInfo_v3(device_handle handle, struct nvml_pci *pci)
{
    unsigned device;
    enum nvml_result result = device_enter(handle, pci, &device);
    if (result != NVML_SUCCESS)
        return result;
    ledger_unlock();
    *pci = (struct nvml_pci){.bus = FIRST_PCI_BUS + device};
    bus_id_text(device, pci->bus_id);
    strcpy(pci->legacy_bus_id, pci->bus_id + 4);
    return NVML_SUCCESS;
}

/* ---- what it does ---- */

EXPORT enum nvml_result nvmlDeviceGetMemoryInfo(device_handle handle, struct nvml_memory *memory)
{
    unsigned device;
    enum nvml_result result = device_enter(handle, memory, &device);
    if (result != NVML_SUCCESS)
        return result;
    ledger_reap();
    memory->total = (uint64_t)ledger_map()->devices[device].page_count * PAGE_BYTES;
    memory->free = (uint64_t)ledger_free_pages(device) * PAGE_BYTES;
    memory->used = memory->total - memory->free;
    ledger_unlock();
    return NVML_SUCCESS;
}

EXPORT enum nvml_result nvmlDeviceGetMemoryInfo_v2(device_handle handle,
                                                   struct nvml_memory_v2 *memory)
{
    struct nvml_memory plain;
    if (memory && memory->version != NVML_MEMORY_V2)
        return NVML_ARGUMENT_VERSION_MISMATCH;
    enum nvml_result result = nvmlDeviceGetMemoryInfo(handle, memory ? &plain : NULL);
    if (result != NVML_SUCCESS)
        return result;
    memory->total = plain.total;
    memory->reserved = 0;
    memory->free = plain.free;
    memory->used = plain.used;
    return NVML_SUCCESS;
}

static unsigned list_processes(unsigned device, struct nvml_process processes[MAX_PROCESSES])
{
    struct process_entry entries[MAX_PROCESSES];
    unsigned count = 0;
    bool hide_used = config_flag("SOFTCUDA_NVML_USED_NONE", false);
    bool list_residue = config_flag("SOFTCUDA_RESIDUE_LISTED", true);
    ledger_reap();
    for (int slot = 0; slot < MAX_PROCESSES; slot++) {
        const struct process_entry *entry = &ledger_map()->processes[slot];
        if (!entry->used || !entry->contexts[device])
            continue;
        if (entry->state == STATE_CHECKPOINTED &&
            !(list_residue && ledger_used_bytes(device, slot)))
            continue;
        processes[count] = (struct nvml_process){
            .used_bytes = hide_used ? NVML_NOT_AVAILABLE : ledger_used_bytes(device, slot),
            .gpu_instance = NVML_NO_INSTANCE,
            .compute_instance = NVML_NO_INSTANCE};
        entries[count++] = *entry;
    }
    ledger_unlock(); /* looking through /proc takes a while */
    for (unsigned index = 0; index < count; index++)
        processes[index].pid = (uint32_t)process_visible_pid(&entries[index]);
    return count;
}

/* Asked with too small a count, it tells how many there are. */
EXPORT enum nvml_result nvmlDeviceGetComputeRunningProcesses_v3(device_handle handle,
                                                                unsigned *count,
                                                                struct nvml_process *processes)
{
    unsigned device;
    struct nvml_process found[MAX_PROCESSES];
    enum nvml_result result = device_enter(handle, count, &device);
    if (result != NVML_SUCCESS)
        return result;
    unsigned room = processes ? *count : 0;
    *count = list_processes(device, found);
    if (*count > room)
        return NVML_INSUFFICIENT_SIZE;
    if (*count)
        memcpy(processes, found, *count * sizeof *found);
    return NVML_SUCCESS;
}

EXPORT enum nvml_result nvmlDeviceGetUtilizationRates(device_handle handle,
                                                      struct nvml_utilization *utilization)
{
    unsigned device;
    enum nvml_result result = device_enter(handle, utilization, &device);
    if (result != NVML_SUCCESS)
        return result;
    ledger_reap();
    activity_utilization(device, &utilization->gpu_percent, &utilization->memory_percent);
    ledger_unlock();
    return NVML_SUCCESS;
}

/* In KB/s, seen from the device: counter 0 (sent) rises in a snapshot, 1 (received) in a
 * restore. */
EXPORT enum nvml_result nvmlDeviceGetPcieThroughput(device_handle handle, int counter,
                                                    unsigned *kb_per_s)
{
    unsigned device;
    enum nvml_result result = device_enter(handle, kb_per_s, &device);
    if (result != NVML_SUCCESS)
        return result;
    ledger_unlock();
    if (counter != 0 && counter != 1)
        return NVML_INVALID_ARGUMENT;
    const struct device_entry *entry = &ledger_map()->devices[device];
    const _Atomic uint64_t *bytes = counter ? &entry->received_bytes : &entry->sent_bytes;
    uint64_t before = *bytes, start_ns = monotonic_ns();
    sleep_ms(PCIE_WINDOW_MS);
    double seconds = (double)(monotonic_ns() - start_ns) / 1e9;
    *kb_per_s = (unsigned)((double)(*bytes - before) / 1000 / seconds);
    return NVML_SUCCESS;
}
