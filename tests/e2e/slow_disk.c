/* Makes a disk slow for the process that it is preloaded into: each fsync takes as long as the file
 * that SLOW_DISK names says, in milliseconds; without that file, no longer than it takes. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static void wait_for_the_disk(void)
{
    const char *path = getenv("SLOW_DISK");
    FILE *file = path ? fopen(path, "re") : NULL;
    long ms = 0;
    if (!file)
        return;
    if (fscanf(file, "%ld", &ms) != 1)
        ms = 0;
    fclose(file);
    struct timespec pause = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
    nanosleep(&pause, NULL);
}

int fsync(int descriptor)
{
    wait_for_the_disk();
    int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
    return real(descriptor);
}

int fdatasync(int descriptor)
{
    wait_for_the_disk();
    int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, "fdatasync");
    return real(descriptor);
}
