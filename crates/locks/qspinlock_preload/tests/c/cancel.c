/* Threads that are cancelled while they wait on a condition variable. */
#include "check.h"

static pthread_mutex_t mutex;
static pthread_cond_t cond;
static int waiting, cleaned, woken, mode;

enum { ENDLESS, TIMED, CLOCKED };

/* The mutex checks its owner: unlocking works only for the thread that has it. */
static void clean_up(void *unused)
{
    (void)unused;
    EQUAL(pthread_mutex_lock(&mutex), EDEADLK);
    cleaned++;
    EQUAL(pthread_mutex_unlock(&mutex), 0);
}

static void wait_once(void)
{
    struct timespec realtime = in_ms(CLOCK_REALTIME, 60000), monotonic = in_ms(CLOCK_MONOTONIC, 60000);
    if (mode == ENDLESS)
        EQUAL(pthread_cond_wait(&cond, &mutex), 0);
    else if (mode == TIMED)
        EQUAL(pthread_cond_timedwait(&cond, &mutex, &realtime), 0);
    else
        EQUAL(pthread_cond_clockwait(&cond, &mutex, CLOCK_MONOTONIC, &monotonic), 0);
}

static void *wait_for_ever(void *unused)
{
    EQUAL(pthread_mutex_lock(&mutex), 0);
    pthread_cleanup_push(clean_up, NULL);
    waiting++;
    for (;;) {
        wait_once();
        woken++;
    }
    pthread_cleanup_pop(0);
    return unused;
}

static void until_waiting(int threads)
{
    for (;;) {
        pthread_mutex_lock(&mutex);
        int now = waiting;
        pthread_mutex_unlock(&mutex);
        if (now >= threads)
            return;
        sleep_ms(1);
    }
}

static void reset(void)
{
    waiting = cleaned = woken = 0;
    mutex = made(PTHREAD_MUTEX_ERRORCHECK);
    EQUAL(pthread_cond_init(&cond, NULL), 0);
}

static void cancelled_wait_has_the_mutex_in_its_handlers(int how)
{
    reset();
    mode = how;
    pthread_t thread = start(wait_for_ever, NULL);
    until_waiting(1);
    EQUAL(pthread_cancel(thread), 0);
    TRUE(end(thread) == PTHREAD_CANCELED);
    EQUAL(cleaned, 1);
    EQUAL(pthread_cond_destroy(&cond), 0); /* it has left the list */
    EQUAL(pthread_mutex_destroy(&mutex), 0);
}

/* Cancelled while another thread holds the mutex: the handler waits for it. */
static void cancelled_wait_waits_for_the_mutex(void)
{
    reset();
    pthread_t thread = start(wait_for_ever, NULL);
    until_waiting(1);
    EQUAL(pthread_mutex_lock(&mutex), 0);
    EQUAL(pthread_cancel(thread), 0);
    sleep_ms(50);
    EQUAL(cleaned, 0);
    EQUAL(pthread_mutex_unlock(&mutex), 0);
    TRUE(end(thread) == PTHREAD_CANCELED);
    EQUAL(cleaned, 1);
}

static void *cancel_self_then_wait(void *unused)
{
    EQUAL(pthread_cancel(pthread_self()), 0);
    return wait_for_ever(unused);
}

static void pending_cancellation_is_acted_upon(void)
{
    reset();
    pthread_t thread = start(cancel_self_then_wait, NULL);
    TRUE(end(thread) == PTHREAD_CANCELED);
    EQUAL(cleaned, 1);
}

static void *wait_once_deaf(void *unused)
{
    EQUAL(pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, NULL), 0);
    EQUAL(pthread_mutex_lock(&mutex), 0);
    waiting++;
    EQUAL(pthread_cond_wait(&cond, &mutex), 0);
    EQUAL(pthread_mutex_unlock(&mutex), 0);
    return unused;
}

static void disabled_cancellation_does_nothing(void)
{
    reset();
    pthread_t thread = start(wait_once_deaf, &mode);
    until_waiting(1);
    EQUAL(pthread_cancel(thread), 0);
    sleep_ms(20);
    EQUAL(pthread_mutex_lock(&mutex), 0);
    EQUAL(pthread_cond_signal(&cond), 0);
    EQUAL(pthread_mutex_unlock(&mutex), 0);
    TRUE(end(thread) == &mode);
}

static void *wait_asynchronously(void *unused)
{
    EQUAL(pthread_setcanceltype(PTHREAD_CANCEL_ASYNCHRONOUS, NULL), 0);
    return wait_for_ever(unused);
}

static void asynchronous_cancellation_takes_the_waiter_out_of_the_list(void)
{
    reset();
    pthread_t thread = start(wait_asynchronously, NULL);
    until_waiting(1);
    EQUAL(pthread_cancel(thread), 0);
    TRUE(end(thread) == PTHREAD_CANCELED);
    EQUAL(cleaned, 1);
    EQUAL(pthread_cond_destroy(&cond), 0);
}

/* Asynchronously cancellable only in the wait, at any point of it; it never waits for long. */
static void *wait_on_and_on(void *unused)
{
    EQUAL(pthread_mutex_lock(&mutex), 0);
    pthread_cleanup_push(clean_up, NULL);
    waiting++;
    for (;;) {
        struct timespec soon = in_ms(CLOCK_MONOTONIC, 0);
        EQUAL(pthread_setcanceltype(PTHREAD_CANCEL_ASYNCHRONOUS, NULL), 0);
        EQUAL(pthread_cond_clockwait(&cond, &mutex, CLOCK_MONOTONIC, &soon), ETIMEDOUT);
        EQUAL(pthread_setcanceltype(PTHREAD_CANCEL_DEFERRED, NULL), 0);
    }
    pthread_cleanup_pop(0);
    return unused;
}

static void asynchronous_cancellation_anywhere_in_a_wait_leaves_all_in_order(void)
{
    for (int i = 0; i < 1000; i++) {
        reset();
        pthread_t thread = start(wait_on_and_on, NULL);
        until_waiting(1);
        for (volatile int pause = 0; pause < i * 10; pause++) {
        }
        EQUAL(pthread_cancel(thread), 0);
        TRUE(end(thread) == PTHREAD_CANCELED);
        EQUAL(cleaned, 1);
        EQUAL(pthread_cond_destroy(&cond), 0);
        EQUAL(pthread_mutex_destroy(&mutex), 0);
    }
}

static int got;

static void *wait_once_and_count(void *unused)
{
    EQUAL(pthread_mutex_lock(&mutex), 0);
    waiting++;
    EQUAL(pthread_cond_wait(&cond, &mutex), 0);
    got++;
    EQUAL(pthread_mutex_unlock(&mutex), 0);
    return unused;
}

/* The first waiter is signalled and cancelled at once. Whichever of the two it acts on, the other waiter must not wait forever. */
static void signal_of_a_cancelled_waiter_goes_to_another(void)
{
    int handed_on = 0;
    for (int i = 0; i < 500; i++) {
        reset();
        got = 0;
        mode = ENDLESS;
        pthread_t first = start(wait_for_ever, NULL);
        until_waiting(1);
        pthread_t second = start(wait_once_and_count, NULL);
        until_waiting(2);
        EQUAL(pthread_mutex_lock(&mutex), 0);
        if (i % 2) {
            EQUAL(pthread_cancel(first), 0);
            EQUAL(pthread_cond_signal(&cond), 0);
        } else {
            EQUAL(pthread_cond_signal(&cond), 0);
            EQUAL(pthread_cancel(first), 0);
        }
        EQUAL(pthread_mutex_unlock(&mutex), 0);
        TRUE(end(first) == PTHREAD_CANCELED);
        EQUAL(pthread_mutex_lock(&mutex), 0);
        if (woken) /* it got its signal, and was cancelled in its next wait */
            EQUAL(pthread_cond_signal(&cond), 0);
        handed_on += !woken;
        EQUAL(pthread_mutex_unlock(&mutex), 0);
        end(second);
        EQUAL(pthread_cond_destroy(&cond), 0);
    }
    TRUE(handed_on > 0);
}

int main(void)
{
    begin();
    cancelled_wait_has_the_mutex_in_its_handlers(ENDLESS);
    cancelled_wait_has_the_mutex_in_its_handlers(TIMED);
    cancelled_wait_has_the_mutex_in_its_handlers(CLOCKED);
    mode = ENDLESS;
    cancelled_wait_waits_for_the_mutex();
    pending_cancellation_is_acted_upon();
    disabled_cancellation_does_nothing();
    asynchronous_cancellation_takes_the_waiter_out_of_the_list();
    asynchronous_cancellation_anywhere_in_a_wait_leaves_all_in_order();
    signal_of_a_cancelled_waiter_goes_to_another();
    return 0;
}
