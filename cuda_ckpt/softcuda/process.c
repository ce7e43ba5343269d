/* Who a pid is. Identity is (innermost pid, start time): the start time is the same in every
 * pid namespace, and together they tell a process from a later one with a reused number. */
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "softcuda.h"

static bool read_text(const char *path, char *text, size_t size)
{
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return false;
    ssize_t length = read(file, text, size - 1);
    close(file);
    if (length <= 0)
        return false;
    text[length] = 0;
    return true;
}

/* The number after `field` in a /proc status text; of several, the first or the last. */
static int status_number(const char *status, const char *field, bool last)
{
    const char *found = strstr(status, field);
    if (!found)
        return 0;
    const char *end = found + strcspn(found + 1, "\n") + 1;
    char *next = (char *)found + strlen(field);
    int number = (int)strtol(next, &next, 10);
    while (last && next < end && *next == '\t')
        number = (int)strtol(next, &next, 10);
    return number;
}

/* Field 22 of /proc/PID/stat, in clock ticks since boot. The command in field 2 may contain
 * spaces and parentheses, so counting starts after the last parenthesis. */
static uint64_t parse_start_time(const char *stat)
{
    enum { START_TIME_FIELD = 22, FIELD_AFTER_COMMAND = 3 };
    const char *cursor = strrchr(stat, ')');
    if (!cursor)
        return 0;
    cursor += 2;
    for (int field = FIELD_AFTER_COMMAND; field < START_TIME_FIELD; field++) {
        cursor = strchr(cursor, ' ');
        if (!cursor)
            return 0;
        cursor++;
    }
    return strtoull(cursor, NULL, 10);
}

static bool identify(const char *name, struct process_identity *identity)
{
    char path[64], text[4096];
    snprintf(path, sizeof path, "/proc/%.20s/status", name);
    if (!read_text(path, text, sizeof text))
        return false;
    identity->pid = status_number(text, "\nTgid:", false);
    identity->innermost_pid = status_number(text, "\nNStgid:", true);
    identity->uid = (unsigned)status_number(text, "\nUid:", false);
    snprintf(path, sizeof path, "/proc/%.20s/stat", name);
    if (*name != 's')
        snprintf(path, sizeof path, "/proc/%d/stat", identity->pid);
    if (!read_text(path, text, sizeof text))
        return false;
    identity->start_time = parse_start_time(text);
    return identity->pid > 0 && identity->start_time > 0;
}

bool process_identify(int pid_or_thread, struct process_identity *identity)
{
    char name[16];
    if (pid_or_thread <= 0)
        return false;
    snprintf(name, sizeof name, "%d", pid_or_thread);
    return identify(name, identity);
}

bool process_identify_self(struct process_identity *identity)
{
    return identify("self", identity);
}

uint64_t process_own_namespace(void)
{
    struct stat stat_buffer;
    return stat("/proc/self/ns/pid", &stat_buffer) ? 0 : stat_buffer.st_ino;
}

int process_visible_pid(const struct process_entry *entry)
{
    if (entry->pid_namespace == process_own_namespace())
        return entry->pid;
    DIR *processes = opendir("/proc");
    if (!processes)
        return entry->pid;
    int visible = entry->pid;
    for (struct dirent *item; (item = readdir(processes));) {
        struct process_identity identity;
        if (item->d_name[0] < '1' || item->d_name[0] > '9' || !identify(item->d_name, &identity))
            continue;
        if (identity.innermost_pid == entry->pid && identity.start_time == entry->start_time) {
            visible = identity.pid;
            break;
        }
    }
    closedir(processes);
    return visible;
}

int process_visible_thread(int pid, int innermost_thread)
{
    char path[64], text[4096];
    snprintf(path, sizeof path, "/proc/%d/task", pid);
    DIR *threads = opendir(path);
    if (!threads)
        return innermost_thread;
    int visible = innermost_thread;
    for (struct dirent *item; (item = readdir(threads));) {
        snprintf(path, sizeof path, "/proc/%d/task/%.20s/status", pid, item->d_name);
        if (item->d_name[0] != '.' && read_text(path, text, sizeof text) &&
            status_number(text, "\nNSpid:", true) == innermost_thread)
            visible = atoi(item->d_name);
    }
    closedir(threads);
    return visible;
}
