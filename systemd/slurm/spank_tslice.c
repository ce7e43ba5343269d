/* A SPANK plugin for `srun --tslice=NAME`: names a job's experiment for tsliced, or turns sharing off.
 *
 *     gcc -shared -fPIC -Wall -Wextra -o spank_tslice.so spank_tslice.c
 *
 * needs the headers of Slurm (on Debian: libslurm-dev) and a line in plugstack.conf; see docs/slurm.md.
 */
#include <slurm/spank.h>
#include <string.h>

SPANK_PLUGIN(tslice, 1);

/* As much as an id of tsliced can have. */
#define NAME_BYTES 129

static char name[NAME_BYTES];

static int take(int value, const char *given, int remote)
{
    (void)value;
    (void)remote;
    if (given == NULL || *given == '\0' || strlen(given) >= sizeof name) {
        slurm_error("--tslice: give a name of 1 to 128 characters, or off");
        return ESPANK_BAD_ARG;
    }
    strcpy(name, given);
    return ESPANK_SUCCESS;
}

struct spank_option spank_options[] = {
    {"tslice", "NAME", "name this experiment for tsliced, or: off", 1, 0, take},
    SPANK_OPTIONS_TABLE_END,
};

/* In the task, after its TaskProlog: what the option says counts. */
int slurm_spank_task_init(spank_t spank, int count, char **arguments)
{
    (void)count;
    (void)arguments;
    if (*name == '\0')
        return ESPANK_SUCCESS;
    if (strcmp(name, "off") == 0)
        return spank_setenv(spank, "TSLICE_MODE", "off", 1);
    return spank_setenv(spank, "TSLICE_JOB_ID", name, 1);
}
