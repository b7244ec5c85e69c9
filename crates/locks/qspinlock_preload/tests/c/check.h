/* Shared by the programs here. They exit with 0, or print a line that says what differed from the expectation. */
#ifndef CHECK_H
#define CHECK_H

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define EQUAL(expression, expected)                                                                       \
    do {                                                                                                  \
        long long found_ = (long long)(expression);                                                       \
        long long wanted_ = (long long)(expected);                                                        \
        if (found_ != wanted_) {                                                                          \
            fprintf(stderr, "%s:%d: %s is %lld, not %lld\n", __FILE__, __LINE__, #expression, found_, wanted_); \
            _exit(1);                                                                                     \
        }                                                                                                 \
    } while (0)

#define TRUE(expression) EQUAL(!!(expression), 1)

/* The library must be loaded, and the program must call it. A signal ends a program that hangs. */
static inline void begin(void)
{
    static const char *const replaced[] = {
        "pthread_spin_lock", "pthread_spin_unlock", "pthread_mutex_lock", "pthread_mutex_unlock",
        "pthread_cond_wait", "pthread_cond_signal", "mtx_lock", "cnd_wait", "pthread_rwlock_rdlock",
    };
    Dl_info library, call;
    void *version = dlsym(RTLD_DEFAULT, "qspinlock_preload_version");
    alarm(100);
    TRUE(version != NULL);
    TRUE(dladdr(version, &library));
    for (size_t i = 0; i < sizeof replaced / sizeof *replaced; i++) {
        TRUE(dladdr(dlsym(RTLD_DEFAULT, replaced[i]), &call));
        TRUE(call.dli_fbase == library.dli_fbase);
    }
}

static inline struct timespec in_ms(clockid_t clock, long ms)
{
    struct timespec at;
    clock_gettime(clock, &at);
    at.tv_sec += ms / 1000;
    at.tv_nsec += ms % 1000 * 1000000;
    if (at.tv_nsec >= 1000000000) {
        at.tv_sec++;
        at.tv_nsec -= 1000000000;
    }
    if (at.tv_nsec < 0) {
        at.tv_sec--;
        at.tv_nsec += 1000000000;
    }
    return at;
}

static inline int is_past(clockid_t clock, struct timespec at)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return now.tv_sec > at.tv_sec || (now.tv_sec == at.tv_sec && now.tv_nsec >= at.tv_nsec);
}

static inline void sleep_ms(long ms)
{
    struct timespec span = {ms / 1000, ms % 1000 * 1000000};
    while (nanosleep(&span, &span) != 0) {
    }
}

static inline pthread_t start(void *(*body)(void *), void *argument)
{
    pthread_t thread;
    EQUAL(pthread_create(&thread, NULL, body, argument), 0);
    return thread;
}

static inline void *end(pthread_t thread)
{
    void *result;
    EQUAL(pthread_join(thread, &result), 0);
    return result;
}

/* The result of a call on another thread. */
struct elsewhere {
    int (*call)(void *);
    void *argument;
    int result;
};

static inline void *elsewhere_body(void *argument)
{
    struct elsewhere *call = argument;
    call->result = call->call(call->argument);
    return NULL;
}

static inline int elsewhere_(int (*call)(void *), void *argument)
{
    struct elsewhere there = {call, argument, -1};
    end(start(elsewhere_body, &there));
    return there.result;
}

#define ELSEWHERE(call, argument) elsewhere_((int (*)(void *))(uintptr_t)(call), (void *)(uintptr_t)(argument))

/* A signal ends a child that hangs, too; then its output's reader ends as well. */
static inline pid_t forked(void)
{
    pid_t child = fork();
    TRUE(child >= 0);
    if (child == 0)
        alarm(100);
    return child;
}

static inline int exit_of(pid_t child)
{
    int status;
    EQUAL(waitpid(child, &status, 0), child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + status;
}

/* A process, or a thread of any process (by its kernel thread id). */
static inline int is_asleep(pid_t thread)
{
    char path[64], state = '?';
    snprintf(path, sizeof path, "/proc/%d/stat", (int)thread);
    FILE *stat = fopen(path, "r");
    TRUE(stat != NULL);
    EQUAL(fscanf(stat, "%*d %*s %c", &state), 1);
    fclose(stat);
    return state == 'S';
}

static inline void *shared_memory(size_t length)
{
    void *memory = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    TRUE(memory != MAP_FAILED);
    return memory;
}

static inline pthread_mutex_t made(int kind)
{
    pthread_mutex_t mutex;
    pthread_mutexattr_t attr;
    memset(&mutex, 0xa5, sizeof mutex);
    EQUAL(pthread_mutexattr_init(&attr), 0);
    EQUAL(pthread_mutexattr_settype(&attr, kind), 0);
    EQUAL(pthread_mutex_init(&mutex, &attr), 0);
    EQUAL(pthread_mutexattr_destroy(&attr), 0);
    return mutex;
}

#endif
