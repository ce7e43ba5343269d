/* Time: one clock for everything, the same in all processes. */
#include <time.h>

#include "softcuda.h"

uint64_t monotonic_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Signals don't cut it short. */
void sleep_until_ns(uint64_t time_ns)
{
    struct timespec until = {(time_t)(time_ns / 1000000000u), (long)(time_ns % 1000000000u)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL))
        continue;
}

void sleep_ms(unsigned milliseconds)
{
    sleep_until_ns(monotonic_ns() + milliseconds * 1000000ull);
}
