/* mtx_* and cnd_*: the C library's versions would bypass the replaced calls. */
#include "check.h"

#include <threads.h>

enum { THREADS = 4, ROUNDS = 20000 };
static mtx_t mutex;
static cnd_t cond;
static int turn;
static long counter;

static int take_turns(void *argument)
{
    int mine = (int)(intptr_t)argument;
    for (int i = 0; i < ROUNDS; i++) {
        EQUAL(mtx_lock(&mutex), thrd_success);
        while (turn != mine)
            EQUAL(cnd_wait(&cond, &mutex), thrd_success);
        turn = !mine;
        counter++;
        EQUAL(i % 2 ? cnd_signal(&cond) : cnd_broadcast(&cond), thrd_success);
        EQUAL(mtx_unlock(&mutex), thrd_success);
    }
    return 7;
}

static int try(void *unused)
{
    (void)unused;
    struct timespec at = in_ms(CLOCK_REALTIME, 20);
    EQUAL(mtx_trylock(&mutex), thrd_busy);
    EQUAL(mtx_timedlock(&mutex, &at), thrd_timedout);
    TRUE(is_past(CLOCK_REALTIME, at));
    return 0;
}

static int elsewhere(thrd_start_t body, void *argument)
{
    thrd_t thread;
    int result;
    EQUAL(thrd_create(&thread, body, argument), thrd_success);
    EQUAL(thrd_join(thread, &result), thrd_success);
    return result;
}

static void recursion(void)
{
    EQUAL(mtx_init(&mutex, mtx_recursive | mtx_timed), thrd_success);
    EQUAL(mtx_lock(&mutex), thrd_success);
    EQUAL(mtx_lock(&mutex), thrd_success);
    EQUAL(mtx_trylock(&mutex), thrd_success);
    for (int i = 0; i < 2; i++)
        EQUAL(mtx_unlock(&mutex), thrd_success);
    elsewhere(try, NULL);
    EQUAL(mtx_unlock(&mutex), thrd_success);
    EQUAL(mtx_unlock(&mutex), thrd_error);
    mtx_destroy(&mutex);
    EQUAL(mtx_init(&mutex, 99), thrd_error);
}

int main(void)
{
    thrd_t other;
    begin();
    recursion();
    memset(&mutex, 0xa5, sizeof mutex);
    memset(&cond, 0xa5, sizeof cond);
    EQUAL(mtx_init(&mutex, mtx_timed), thrd_success);
    EQUAL(cnd_init(&cond), thrd_success);
    EQUAL(thrd_create(&other, take_turns, (void *)1), thrd_success);
    take_turns((void *)0);
    EQUAL(thrd_join(other, NULL), thrd_success);
    EQUAL(counter, 2L * ROUNDS);
    struct timespec at = in_ms(CLOCK_REALTIME, 20);
    EQUAL(mtx_lock(&mutex), thrd_success);
    EQUAL(cnd_timedwait(&cond, &mutex, &at), thrd_timedout);
    TRUE(is_past(CLOCK_REALTIME, at));
    elsewhere(try, NULL);
    EQUAL(mtx_unlock(&mutex), thrd_success);
    cnd_destroy(&cond);
    mtx_destroy(&mutex);
    return 0;
}
