/* The devices that this process may see: CUDA_VISIBLE_DEVICES maps ordinals to devices. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "softcuda.h"

static unsigned visible_count;
static unsigned physical_of[MAX_DEVICES];

int device_find(const struct uuid *uuid)
{
    for (unsigned device = 0; device < ledger_map()->device_count; device++)
        if (!memcmp(&ledger_map()->devices[device].uuid, uuid, sizeof *uuid))
            return (int)device;
    return -1;
}

/* An index, or a UUID that may be shortened as long as it names one device. */
static int parse_device(const char *name, size_t length)
{
    int found = -1;
    char text[41];
    char *end;
    if (length && name[0] >= '0' && name[0] <= '9') {
        unsigned long index = strtoul(name, &end, 10);
        return end == name + length && index < ledger_map()->device_count ? (int)index : -1;
    }
    for (unsigned device = 0; device < ledger_map()->device_count && length > 4; device++) {
        device_uuid_text(&ledger_map()->devices[device].uuid, text);
        if (length > strlen(text) || strncasecmp(text, name, length))
            continue;
        if (found >= 0)
            return -1;
        found = (int)device;
    }
    return found;
}

/* As the driver does it: an entry that names no device ends the list, one that is named twice
 * makes the list invalid. */
enum result devices_choose(void)
{
    const char *cursor = getenv("CUDA_VISIBLE_DEVICES");
    bool taken[MAX_DEVICES] = {false};
    visible_count = 0;
    for (unsigned device = 0; !cursor && device < ledger_map()->device_count; device++)
        physical_of[visible_count++] = device;
    while (cursor && *cursor) {
        cursor += strspn(cursor, " ");
        size_t length = strcspn(cursor, ", ");
        int device = parse_device(cursor, length);
        if (device < 0)
            break;
        if (taken[device]) {
            visible_count = 0;
            break;
        }
        taken[device] = true;
        physical_of[visible_count++] = (unsigned)device;
        cursor += length;
        cursor += strspn(cursor, " ");
        cursor += *cursor == ',';
    }
    return visible_count ? RESULT_SUCCESS : RESULT_NO_DEVICE;
}

unsigned devices_visible(void)
{
    return visible_count;
}

unsigned device_physical(unsigned ordinal)
{
    return physical_of[ordinal];
}

enum result devices_check_pairs(const struct gpu_pair *pairs, unsigned count,
                                unsigned physical[MAX_DEVICES])
{
    bool old_named[MAX_DEVICES] = {false}, new_named[MAX_DEVICES] = {false};
    if (count != visible_count)
        return RESULT_INVALID_VALUE;
    for (unsigned index = 0; index < count; index++) {
        int old_device = device_find(&pairs[index].old_uuid);
        int new_device = device_find(&pairs[index].new_uuid);
        unsigned ordinal = 0;
        while (ordinal < visible_count && (int)physical_of[ordinal] != old_device)
            ordinal++;
        if (new_device < 0)
            return RESULT_INVALID_DEVICE;
        if (ordinal == visible_count || old_named[ordinal] || new_named[new_device])
            return RESULT_INVALID_VALUE;
        old_named[ordinal] = new_named[new_device] = true;
        physical[ordinal] = (unsigned)new_device;
    }
    return RESULT_SUCCESS;
}

void devices_migrate(const unsigned physical[MAX_DEVICES])
{
    memcpy(physical_of, physical, sizeof physical_of);
}
