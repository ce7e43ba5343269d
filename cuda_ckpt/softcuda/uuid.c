/* UUIDs as text, for both libraries. */
#include <stdio.h>

#include "softcuda.h"

void device_uuid_text(const struct uuid *uuid, char text[41])
{
    char *cursor = text + sprintf(text, "GPU-");
    for (int index = 0; index < 16; index++) {
        bool dash = index == 4 || index == 6 || index == 8 || index == 10;
        cursor += sprintf(cursor, "%s%02x", dash ? "-" : "", uuid->bytes[index]);
    }
}
