/* softcuda-init [DIR]: makes the devices of DIR (else SOFTCUDA_DIR) and fills their memory.
 *
 * Run it outside the jobs' memory cgroups, before anything else uses the directory: device
 * memory is charged to whoever fills it. Repeating it is harmless. Remove the directory to get
 * rid of the devices. */
#include <stdio.h>
#include <stdlib.h>

#include "softcuda.h"

int main(int argument_count, char **arguments)
{
    char path[4096];
    if (argument_count > 2 || (argument_count == 2 && arguments[1][0] == '-')) {
        fprintf(stderr, "usage: softcuda-init [DIR]\n");
        return 2;
    }
    if (argument_count == 2 && setenv("SOFTCUDA_DIR", arguments[1], 1))
        return 1;
    if (ledger_open(true))
        return 1;
    for (unsigned device = 0; device < ledger_map()->device_count; device++)
        if (!pool_open(device))
            return 1;
    config_path(path, sizeof path, "");
    printf("%s: %u devices of %u MiB\n", path, ledger_map()->device_count,
           ledger_map()->devices[0].page_count * (PAGE_BYTES >> 20));
    return 0;
}
