/* Locks that two threads want before main, in destructors of a thread's data, and after main. */
#include "check.h"

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t recursive = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static pthread_cond_t cond = PTHREAD_COND_INITIALIZER;
static pthread_rwlock_t rwlock = PTHREAD_RWLOCK_INITIALIZER;
static pthread_key_t key;
static int turn, times, destructors;

enum { ROUNDS = 200 };

static void *take_turns(void *mine)
{
    for (int i = 0; i < ROUNDS; i++) {
        EQUAL(pthread_mutex_lock(&mutex), 0);
        while (turn != (int)(intptr_t)mine)
            EQUAL(pthread_cond_wait(&cond, &mutex), 0);
        turn = !turn;
        EQUAL(pthread_cond_signal(&cond), 0);
        EQUAL(pthread_mutex_unlock(&mutex), 0);
        EQUAL(pthread_mutex_lock(&recursive), 0);
        EQUAL(pthread_rwlock_wrlock(&rwlock), 0);
        EQUAL(pthread_rwlock_unlock(&rwlock), 0);
        EQUAL(pthread_mutex_unlock(&recursive), 0);
    }
    return NULL;
}

static void use_all(void)
{
    pthread_t other = start(take_turns, (void *)1);
    take_turns((void *)0);
    end(other);
    times++;
}

__attribute__((constructor(101))) static void before_main(void)
{
    use_all();
}

static void after_main(void)
{
    use_all();
    EQUAL(times, 3);
    EQUAL(destructors, 2);
}

__attribute__((destructor(101))) static void at_the_very_end(void)
{
    use_all();
    EQUAL(times, 4);
}

/* The last code that a thread runs. */
static void destructor(void *round)
{
    EQUAL(pthread_mutex_lock(&mutex), 0);
    destructors++;
    EQUAL(pthread_mutex_unlock(&mutex), 0);
    if (round == (void *)1)
        EQUAL(pthread_setspecific(key, (void *)2), 0); /* once more, after all others */
}

static void *hold_some_data(void *unused)
{
    EQUAL(pthread_setspecific(key, (void *)1), 0);
    return unused;
}

int main(void)
{
    begin();
    EQUAL(atexit(after_main), 0);
    EQUAL(pthread_key_create(&key, destructor), 0);
    end(start(hold_some_data, NULL));
    use_all();
    return 0;
}
