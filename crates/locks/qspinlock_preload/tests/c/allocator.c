/* An allocator with a mutex around its memory. A lock that allocated would re-enter it; the mutex detects that. */
#include "check.h"

static pthread_mutex_t mutex = PTHREAD_ERRORCHECK_MUTEX_INITIALIZER_NP;
static pthread_cond_t cond = PTHREAD_COND_INITIALIZER;
static pthread_rwlock_t rwlock = PTHREAD_RWLOCK_INITIALIZER;
static char memory[64 << 20] __attribute__((aligned(16)));
static size_t used;
static int allocations;

static void *take(size_t length)
{
    int error = pthread_mutex_lock(&mutex);
    if (error != 0)
        _exit(40 + error);
    length = (length + 31) / 16 * 16;
    if (used + length > sizeof memory)
        _exit(2);
    char *taken = memory + used;
    used += length;
    allocations++;
    memcpy(taken, &length, sizeof length);
    if (allocations % 16 == 0) {
        struct timespec at = in_ms(CLOCK_MONOTONIC, 0);
        pthread_cond_clockwait(&cond, &mutex, CLOCK_MONOTONIC, &at);
        pthread_rwlock_rdlock(&rwlock);
        pthread_rwlock_unlock(&rwlock);
        pthread_cond_signal(&cond);
    }
    if (pthread_mutex_unlock(&mutex) != 0)
        _exit(3);
    return taken + 16;
}

void *malloc(size_t length) { return take(length); }

void *calloc(size_t count, size_t length) { return take(count * length); }

void free(void *pointer) { (void)pointer; }

void *realloc(void *pointer, size_t length)
{
    void *taken = take(length);
    if (pointer != NULL) {
        size_t before;
        memcpy(&before, (char *)pointer - 16, sizeof before);
        memcpy(taken, pointer, before - 16 < length ? before - 16 : length);
    }
    return taken;
}

static void *allocate(void *unused)
{
    for (int i = 0; i < 20000; i++) {
        int *volatile number = malloc(sizeof *number);
        *number = i;
    }
    return unused;
}

int main(void)
{
    pthread_t threads[4];
    begin();
    for (int i = 0; i < 4; i++)
        threads[i] = start(allocate, NULL);
    for (int i = 0; i < 4; i++)
        end(threads[i]);
    TRUE(allocations >= 80000);
    return 0;
}
