/* The driver's functions for initialization and devices. */
#include <stdio.h>
#include <string.h>

#include "softcuda.h"

EXPORT enum result cuInit(unsigned flags)
{
    return flags ? RESULT_INVALID_VALUE : target_initialize();
}

EXPORT enum result cuDriverGetVersion(int *version)
{
    if (!version)
        return RESULT_INVALID_VALUE;
    *version = (int)config_driver_version();
    return RESULT_SUCCESS;
}

EXPORT enum result cuDeviceGetCount(int *count)
{
    enum result result = gate_enter();
    if (result != RESULT_SUCCESS)
        return result;
    if (count)
        *count = (int)devices_visible();
    gate_leave();
    return count ? RESULT_SUCCESS : RESULT_INVALID_VALUE;
}

/* Enters the gate for a call on device `ordinal` that has somewhere to write its answer. */
static enum result device_enter(int ordinal, const void *answer)
{
    enum result result = gate_enter();
    if (result != RESULT_SUCCESS)
        return result;
    if (!answer)
        result = RESULT_INVALID_VALUE;
    else if (ordinal < 0 || (unsigned)ordinal >= devices_visible())
        result = RESULT_INVALID_DEVICE;
    if (result != RESULT_SUCCESS)
        gate_leave();
    return result;
}

EXPORT enum result cuDeviceGet(int *device, int ordinal)
{
    enum result result = device_enter(ordinal, device);
    if (result != RESULT_SUCCESS)
        return result;
    *device = ordinal;
    gate_leave();
    return RESULT_SUCCESS;
}

EXPORT enum result cuDeviceGetName(char *name, int size, int device)
{
    enum result result = device_enter(device, name);
    if (result != RESULT_SUCCESS)
        return result;
    if (size > 0)
        snprintf(name, (size_t)size, "%s", DEVICE_NAME);
    gate_leave();
    return RESULT_SUCCESS;
}

EXPORT enum result cuDeviceGetUuid_v2(struct uuid *uuid, int device)
{
    enum result result = device_enter(device, uuid);
    if (result != RESULT_SUCCESS)
        return result;
    *uuid = ledger_map()->devices[device_physical((unsigned)device)].uuid;
    gate_leave();
    return RESULT_SUCCESS;
}

EXPORT enum result cuDeviceGetUuid(struct uuid *uuid, int device)
{
    return cuDeviceGetUuid_v2(uuid, device);
}

EXPORT enum result cuDeviceTotalMem_v2(size_t *bytes, int device)
{
    enum result result = device_enter(device, bytes);
    if (result != RESULT_SUCCESS)
        return result;
    *bytes = (size_t)ledger_map()->devices[device_physical((unsigned)device)].page_count *
             PAGE_BYTES;
    gate_leave();
    return RESULT_SUCCESS;
}

/* The few attributes that programs look at before they use a device. */
EXPORT enum result cuDeviceGetAttribute(int *value, int attribute, int device)
{
    enum result result = device_enter(device, value);
    if (result != RESULT_SUCCESS)
        return result;
    switch (attribute) {
    case 16: /* multiprocessors */
        *value = 1;
        break;
    case 20: /* compute mode: default */
        *value = 0;
        break;
    case 33: /* PCI bus */
        *value = (int)(FIRST_PCI_BUS + device_physical((unsigned)device));
        break;
    case 34: /* PCI device */
    case 50: /* PCI domain */
        *value = 0;
        break;
    case 41: /* unified addressing */
    case 83: /* managed memory */
        *value = 1;
        break;
    case 75: /* compute capability, major */
        *value = 9;
        break;
    case 76: /* and minor */
        *value = 0;
        break;
    default:
        result = RESULT_INVALID_VALUE;
    }
    gate_leave();
    return result;
}
