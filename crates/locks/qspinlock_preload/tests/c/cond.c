/* pthread_cond_*: signals, broadcasts, timeouts on both clocks, return codes. See also: cancellation (cancel.c). */
#include "check.h"

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t cond = PTHREAD_COND_INITIALIZER;
static int waiting, tickets, woken;

static void *take_ticket(void *unused)
{
    pthread_mutex_lock(&mutex);
    waiting++;
    while (tickets == 0)
        EQUAL(pthread_cond_wait(&cond, &mutex), 0);
    tickets--;
    waiting--;
    woken++;
    pthread_mutex_unlock(&mutex);
    return unused;
}

static void until_waiting(int threads)
{
    pthread_mutex_lock(&mutex);
    while (waiting < threads) {
        pthread_mutex_unlock(&mutex);
        sleep_ms(1);
        pthread_mutex_lock(&mutex);
    }
    pthread_mutex_unlock(&mutex);
}

static void give(int count, int (*wake)(pthread_cond_t *))
{
    pthread_mutex_lock(&mutex);
    tickets += count;
    EQUAL(wake(&cond), 0);
    pthread_mutex_unlock(&mutex);
}

static void signal_wakes_one_and_broadcast_all(void)
{
    pthread_t threads[5];
    for (int i = 0; i < 5; i++)
        threads[i] = start(take_ticket, NULL);
    until_waiting(5);
    EQUAL(pthread_cond_destroy(&cond), EBUSY);
    give(1, pthread_cond_signal);
    give(1, pthread_cond_signal);
    while (__atomic_load_n(&woken, __ATOMIC_ACQUIRE) < 2)
        sleep_ms(1);
    give(3, pthread_cond_broadcast);
    for (int i = 0; i < 5; i++)
        end(threads[i]);
    EQUAL(tickets, 0);
}

static void time_runs_out(pthread_cond_t *timed, clockid_t its)
{
    struct timespec at = in_ms(its, 20);
    pthread_mutex_lock(&mutex);
    EQUAL(pthread_cond_timedwait(timed, &mutex, &at), ETIMEDOUT);
    TRUE(is_past(its, at));
    at = in_ms(CLOCK_MONOTONIC, 20);
    EQUAL(pthread_cond_clockwait(timed, &mutex, CLOCK_MONOTONIC, &at), ETIMEDOUT);
    TRUE(is_past(CLOCK_MONOTONIC, at));
    at = in_ms(CLOCK_REALTIME, 20);
    EQUAL(pthread_cond_clockwait(timed, &mutex, CLOCK_REALTIME, &at), ETIMEDOUT);
    TRUE(is_past(CLOCK_REALTIME, at));
    EQUAL(pthread_mutex_trylock(&mutex), EBUSY); /* the mutex is locked again */
    EQUAL(pthread_cond_clockwait(timed, &mutex, CLOCK_PROCESS_CPUTIME_ID, &at), EINVAL);
    at.tv_nsec = -1;
    EQUAL(pthread_cond_timedwait(timed, &mutex, &at), EINVAL);
    EQUAL(pthread_mutex_unlock(&mutex), 0);
}

static void times(void)
{
    pthread_cond_t monotonic;
    pthread_condattr_t attr;
    memset(&monotonic, 0xa5, sizeof monotonic);
    pthread_condattr_init(&attr);
    EQUAL(pthread_condattr_setclock(&attr, CLOCK_MONOTONIC), 0);
    EQUAL(pthread_cond_init(&monotonic, &attr), 0);
    time_runs_out(&monotonic, CLOCK_MONOTONIC);
    time_runs_out(&cond, CLOCK_REALTIME);
    EQUAL(pthread_cond_destroy(&monotonic), 0);
    memset(&monotonic, 0xa5, sizeof monotonic);
    EQUAL(pthread_cond_init(&monotonic, NULL), 0);
    time_runs_out(&monotonic, CLOCK_REALTIME);
}

static void mutex_of_another_thread_is_refused(void)
{
    pthread_mutex_t checked = made(PTHREAD_MUTEX_ERRORCHECK);
    EQUAL(pthread_cond_wait(&cond, &checked), EPERM);
    EQUAL(pthread_cond_destroy(&cond), 0);
}

static void recursive_mutex_is_let_go_and_had_again(void)
{
    pthread_mutex_t recursive = made(PTHREAD_MUTEX_RECURSIVE);
    struct timespec at = in_ms(CLOCK_REALTIME, 20);
    EQUAL(pthread_mutex_lock(&recursive), 0);
    EQUAL(pthread_cond_timedwait(&cond, &recursive, &at), ETIMEDOUT);
    EQUAL(ELSEWHERE(pthread_mutex_trylock, &recursive), EBUSY);
    EQUAL(pthread_mutex_unlock(&recursive), 0);
    EQUAL(ELSEWHERE(pthread_mutex_trylock, &recursive), 0);
}

/* Items go through a queue of one; half of the waits are short, so that they time out while signals arrive. */
enum { ITEMS = 20000, PEERS = 3 };
static pthread_cond_t has_item = PTHREAD_COND_INITIALIZER, has_room = PTHREAD_COND_INITIALIZER;
static int items;
static long taken;

static void wait_a_little(pthread_cond_t *for_what, int short_)
{
    struct timespec at = in_ms(CLOCK_MONOTONIC, 0);
    at.tv_nsec = at.tv_nsec < 999950000 ? at.tv_nsec + 50000 : at.tv_nsec;
    if (short_)
        pthread_cond_clockwait(for_what, &mutex, CLOCK_MONOTONIC, &at);
    else
        EQUAL(pthread_cond_wait(for_what, &mutex), 0);
}

static void *produce(void *unused)
{
    for (int i = 0; i < ITEMS; i++) {
        pthread_mutex_lock(&mutex);
        while (items == 1)
            wait_a_little(&has_room, i % 2);
        items = 1;
        if (i % 3 == 0)
            pthread_cond_signal(&has_item);
        pthread_mutex_unlock(&mutex);
        if (i % 3 != 0)
            pthread_cond_signal(&has_item);
    }
    return unused;
}

static void *consume(void *unused)
{
    for (int i = 0; i < ITEMS; i++) {
        pthread_mutex_lock(&mutex);
        while (items == 0)
            wait_a_little(&has_item, i % 2);
        items = 0;
        taken++;
        pthread_mutex_unlock(&mutex);
        pthread_cond_signal(&has_room);
    }
    return unused;
}

static void no_signal_is_lost(void)
{
    pthread_t threads[2 * PEERS];
    for (int i = 0; i < PEERS; i++) {
        threads[2 * i] = start(produce, NULL);
        threads[2 * i + 1] = start(consume, NULL);
    }
    for (int i = 0; i < 2 * PEERS; i++)
        end(threads[i]);
    EQUAL(taken, (long)ITEMS * PEERS);
    EQUAL(pthread_cond_destroy(&has_item), 0);
    EQUAL(pthread_cond_destroy(&has_room), 0);
}

int main(void)
{
    begin();
    EQUAL(pthread_cond_signal(&cond), 0);
    EQUAL(pthread_cond_broadcast(&cond), 0);
    signal_wakes_one_and_broadcast_all();
    times();
    recursive_mutex_is_let_go_and_had_again();
    mutex_of_another_thread_is_refused();
    no_signal_is_lost();
    return 0;
}
