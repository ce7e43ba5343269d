/* Faults on request. The file is read at every call, so that a test can break the n-th
 * operation of one rank while everything runs. Lines: operation, pid, n-th call, action. */
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "softcuda.h"

static const char *const operation_names[FAULT_OPERATIONS] = {
    [FAULT_INIT] = "init",         [FAULT_ALLOC] = "alloc",
    [FAULT_STATE] = "state",       [FAULT_THREAD] = "thread",
    [FAULT_LOCK] = "lock",         [FAULT_CHECKPOINT] = "checkpoint",
    [FAULT_RESTORE] = "restore",   [FAULT_UNLOCK] = "unlock",
    [FAULT_NVML] = "nvml",
};

static pthread_mutex_t count_mutex = PTHREAD_MUTEX_INITIALIZER;
static unsigned counts[FAULT_OPERATIONS];
static unsigned device_counts[MAX_DEVICES];

#define STALL_POLL_MS 5

static bool matches_number(const char *field, long number)
{
    char *end;
    return !strcmp(field, "*") || (strtol(field, &end, 10) == number && !*end);
}

/* `rank:N` names a process before its pid is known. */
static bool matches_process(const char *field)
{
    if (strncmp(field, "rank:", 5))
        return matches_number(field, getpid());
    const char *rank = config_text("RANK", config_text("SLURM_PROCID", ""));
    return !strcmp(field + 5, rank);
}

static bool parse_action(const char *action, struct fault *fault)
{
    char *end = NULL;
    const char *colon = strchr(action, ':');
    long number = colon ? strtol(colon + 1, &end, 10) : 0;
    if (colon && (end == colon + 1 || *end || number < 0 || number > INT_MAX))
        return false;
    if (colon && !strncmp(action, "delay:", 6))
        fault->delay_ms += (unsigned)number;
    else if (colon && !strncmp(action, "error:", 6))
        fault->kind = FAULT_ERROR;
    else if (colon && !strncmp(action, "fail:", 5))
        fault->kind = FAULT_FAIL;
    else if (!strcmp(action, "hang"))
        fault->kind = FAULT_HANG;
    else if (!strcmp(action, "stall"))
        fault->kind = FAULT_STALL;
    else if (!strcmp(action, "segv"))
        fault->kind = FAULT_SEGV;
    else if (!strcmp(action, "die-before"))
        fault->kind = FAULT_DIE_BEFORE;
    else if (!strcmp(action, "die-after"))
        fault->kind = FAULT_DIE_AFTER;
    else
        return false;
    if (fault->kind == FAULT_ERROR || fault->kind == FAULT_FAIL)
        fault->code = (int)number;
    return true;
}

/* `nvml:N` is NVML's calls on one device. */
static bool parse_operation(const char *name, struct fault_call *named)
{
    char *end = NULL;
    bool of_device = !strncmp(name, "nvml:", 5);
    named->device = of_device ? (int)strtol(name + 5, &end, 10) : -1;
    if (of_device && (end == name + 5 || *end))
        return false;
    for (int index = 0; index < FAULT_OPERATIONS; index++) {
        named->operation = (enum fault_operation)index;
        if (!strcmp(of_device ? "nvml" : name, operation_names[index]))
            return true;
    }
    return false;
}

/* Delays add up; of the other actions the first that matches counts. */
static void apply_line(const char *line, struct fault *fault)
{
    char name[32], process[32], nth[16], action[32], more[2];
    int fields = sscanf(line, "%31s %31s %15s %31s %1s", name, process, nth, action, more);
    if (fields <= 0 || name[0] == '#')
        return;
    struct fault read = {0};
    bool valid = (fields == 4 || (fields == 5 && more[0] == '#')) &&
                 parse_operation(name, &read.call) && parse_action(action, &read);
    if (!valid) {
        complain("faults file: can't use the line: %.*s", (int)strcspn(line, "\n"), line);
        return;
    }
    if (read.call.operation != fault->call.operation || read.call.device != fault->call.device ||
        !matches_process(process) || !matches_number(nth, fault->call.count))
        return;
    fault->delay_ms += read.delay_ms;
    if (fault->kind == FAULT_NONE) {
        fault->kind = read.kind;
        fault->code = read.code;
    }
}

static struct fault look_up(struct fault_call call)
{
    struct fault fault = {.call = call};
    char path[4096], line[256];
    config_path(path, sizeof path, "faults");
    FILE *file = fopen(config_text("SOFTCUDA_FAULTS", path), "re");
    if (!file)
        return fault;
    while (fgets(line, sizeof line, file))
        apply_line(line, &fault);
    fclose(file);
    return fault;
}

static struct fault count_and_look_up(struct fault_call call, unsigned *counter)
{
    pthread_mutex_lock(&count_mutex);
    call.count = ++*counter;
    pthread_mutex_unlock(&count_mutex);
    return look_up(call);
}

struct fault faults_for(enum fault_operation operation)
{
    struct fault_call call = {.operation = operation, .device = -1};
    return count_and_look_up(call, &counts[operation]);
}

struct fault faults_for_device(unsigned device)
{
    struct fault_call call = {.operation = FAULT_NVML, .device = (int)device};
    return count_and_look_up(call, &device_counts[device]);
}

void fault_before(const struct fault *fault)
{
    if (fault->delay_ms)
        sleep_ms(fault->delay_ms);
    if (fault->kind == FAULT_STALL)
        while (look_up(fault->call).kind == FAULT_STALL)
            sleep_ms(STALL_POLL_MS);
    if (fault->kind == FAULT_DIE_BEFORE)
        kill(getpid(), SIGKILL);
    if (fault->kind == FAULT_SEGV) {
        /* A real one: the restore thread blocks all signals, and one that is sent would wait. */
        volatile char *volatile nowhere = NULL;
        signal(SIGSEGV, SIG_DFL);
        *nowhere = 0;
    }
}

void fault_after(const struct fault *fault)
{
    if (fault->kind == FAULT_DIE_AFTER)
        kill(getpid(), SIGKILL);
}

void faults_reset(void)
{
    pthread_mutex_init(&count_mutex, NULL);
    memset(counts, 0, sizeof counts);
    memset(device_counts, 0, sizeof device_counts);
}
