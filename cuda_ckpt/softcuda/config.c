/* The environment of softcuda. Nothing is cached: tests change variables of a running process. */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "softcuda.h"

#ifndef SOFTCUDA_DEFAULT_VERSION
#define SOFTCUDA_DEFAULT_VERSION 13000
#endif

void complain(const char *format, ...)
{
    char line[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    fprintf(stderr, "softcuda: %s\n", line);
}

const char *config_text(const char *name, const char *fallback)
{
    const char *value = getenv(name);
    return value && *value ? value : fallback;
}

long config_number(const char *name, long fallback, long minimum, long maximum)
{
    const char *text = config_text(name, NULL);
    if (!text)
        return fallback;
    char *end;
    errno = 0;
    long value = strtol(text, &end, 10);
    if (errno || *end || value < minimum || value > maximum) {
        complain("%s=%s is not a number from %ld to %ld; using %ld", name, text, minimum, maximum,
                 fallback);
        return fallback;
    }
    return value;
}

bool config_flag(const char *name, bool fallback)
{
    return config_number(name, fallback, 0, 1) != 0;
}

void config_path(char *path, size_t size, const char *file)
{
    const char *directory = config_text("SOFTCUDA_DIR", NULL);
    if (directory)
        snprintf(path, size, "%s%s%s", directory, *file ? "/" : "", file);
    else
        snprintf(path, size, "/dev/shm/softcuda-%u%s%s", (unsigned)getuid(), *file ? "/" : "",
                 file);
}

unsigned config_driver_version(void)
{
    return (unsigned)config_number("SOFTCUDA_VERSION", SOFTCUDA_DEFAULT_VERSION, 1000, 99990);
}
