// C++'s classes on top of pthreads, under the library; and destructors of a thread that is cancelled in a wait.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <shared_mutex>
#include <thread>
#include <vector>

#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

using namespace std::chrono_literals;

#define TRUE(expression)                                                              \
    do {                                                                              \
        if (!(expression)) {                                                          \
            std::fprintf(stderr, "%s:%d: not %s\n", __FILE__, __LINE__, #expression); \
            _exit(1);                                                                 \
        }                                                                             \
    } while (0)

static void conditions_take_turns()
{
    std::mutex mutex;
    std::condition_variable condition;
    int turn = 0;
    long count = 0;
    auto body = [&](int mine) {
        for (int i = 0; i < 5000; i++) {
            std::unique_lock<std::mutex> lock(mutex);
            condition.wait(lock, [&] { return turn == mine; });
            turn = (turn + 1) % 3;
            count++;
            condition.notify_all();
        }
    };
    std::vector<std::thread> threads;
    for (int mine = 0; mine < 3; mine++)
        threads.emplace_back(body, mine);
    for (auto &thread : threads)
        thread.join();
    TRUE(count == 15000);
}

static void times_run_out()
{
    std::mutex mutex;
    std::timed_mutex timed;
    std::condition_variable condition;
    std::condition_variable_any any;
    std::shared_timed_mutex shared;
    std::unique_lock<std::mutex> lock(mutex);
    auto until = std::chrono::steady_clock::now() + 20ms;
    TRUE(condition.wait_until(lock, until) == std::cv_status::timeout);
    TRUE(std::chrono::steady_clock::now() >= until);
    TRUE(condition.wait_until(lock, std::chrono::system_clock::now() + 20ms) == std::cv_status::timeout);
    timed.lock();
    shared.lock_shared();
    std::thread([&] {
        TRUE(!timed.try_lock_for(20ms));
        TRUE(!timed.try_lock_until(std::chrono::system_clock::now() + 20ms));
        TRUE(!shared.try_lock_for(20ms));
        TRUE(shared.try_lock_shared_for(20ms));
        shared.unlock_shared();
    }).join();
    shared.unlock_shared();
    TRUE(any.wait_for(timed, 20ms) == std::cv_status::timeout);
    timed.unlock();
}

static void recursive_mutexes_and_exceptions()
{
    std::recursive_mutex mutex;
    for (int i = 0; i < 100; i++) {
        try {
            std::lock_guard<std::recursive_mutex> outer(mutex);
            std::lock_guard<std::recursive_mutex> inner(mutex);
            throw i;
        } catch (int) {
        }
    }
    std::thread([&] { TRUE(mutex.try_lock()); mutex.unlock(); }).join();
}

static std::mutex mutex;
static std::condition_variable condition;
static std::atomic<bool> waits;
static int destroyed;

struct Counted {
    ~Counted()
    {
        TRUE(!mutex.try_lock()); // the outer frames have not been unwound yet
        destroyed++;
    }
};

static void *wait_for_ever(void *)
{
    std::unique_lock<std::mutex> lock(mutex);
    Counted counted;
    waits = true;
    for (;;)
        pthread_cond_wait(condition.native_handle(), mutex.native_handle());
}

static void cancellation_runs_destructors_with_the_mutex_held()
{
    pthread_t thread;
    void *result;
    TRUE(pthread_create(&thread, nullptr, wait_for_ever, nullptr) == 0);
    while (!waits)
        std::this_thread::sleep_for(1ms);
    { std::lock_guard<std::mutex> it_sleeps(mutex); }
    TRUE(pthread_cancel(thread) == 0);
    TRUE(pthread_join(thread, &result) == 0);
    TRUE(result == PTHREAD_CANCELED);
    TRUE(destroyed == 1);
    TRUE(mutex.try_lock());
    mutex.unlock();
}

int main()
{
    alarm(100);
    TRUE(dlsym(RTLD_DEFAULT, "qspinlock_preload_version") != nullptr);
    conditions_take_turns();
    times_run_out();
    recursive_mutexes_and_exceptions();
    cancellation_runs_destructors_with_the_mutex_held();
    return 0;
}
