// A pool of threads that shares a loop between the calling thread and its helpers. Helpers spin while a step runs, so
// that an operation starts within a microsecond, and sleep between steps.
//
// The caller takes chunks like everyone else and waits for chunks alone, never for a helper: one that the system has
// taken off its core holds up nothing but the chunk that it works on. In the child of a fork there are no helpers, and
// the caller does all chunks.
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>

enum { SPINS = 20000, MOST_HELPERS = 1023 }; // some hundred microseconds of waiting within a step

typedef void (*Work)(void *argument, int chunk, int worker);

typedef struct {
    _Atomic uint64_t ticket; // number of the loop << 32 | chunks left to take
    _Atomic int done;        // chunks done of this loop
    _Atomic(Work) work;
    _Atomic(void *) argument;
    _Atomic int awake;    // whether a step runs
    _Atomic int sleeping; // helpers that wait for `wake`
    _Atomic int closing;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    int helpers;
    unsigned forks; // value of `forks_seen` when the helpers were started
    pthread_t threads[];
} Pool;

typedef struct {
    Pool *pool;
    int number;
} Helper;

static _Atomic unsigned forks_seen;

static void count_fork(void) { atomic_fetch_add(&forks_seen, 1); }

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// Do chunks of the loop with this number until none is left.
static void take_chunks(Pool *pool, uint32_t loop, int worker) {
    for (;;) {
        uint64_t ticket = atomic_load_explicit(&pool->ticket, memory_order_acquire);
        uint32_t left = (uint32_t)ticket;
        if ((uint32_t)(ticket >> 32) != loop || !left) return;
        Work work = atomic_load_explicit(&pool->work, memory_order_relaxed);
        void *argument = atomic_load_explicit(&pool->argument, memory_order_relaxed);
        // The two change only once no chunk is left, so that success means that they are this loop's.
        if (!atomic_compare_exchange_weak_explicit(&pool->ticket, &ticket, ticket - 1, memory_order_acq_rel,
                                                   memory_order_relaxed))
            continue;
        work(argument, (int)left - 1, worker);
        atomic_fetch_add_explicit(&pool->done, 1, memory_order_release);
    }
}

static void *help(void *argument) {
    Helper helper = *(Helper *)argument;
    free(argument);
    Pool *pool = helper.pool;
    uint32_t seen = 0;
    int spins = 0;
    while (!atomic_load(&pool->closing)) {
        uint32_t loop = (uint32_t)(atomic_load_explicit(&pool->ticket, memory_order_acquire) >> 32);
        if (loop != seen) {
            seen = loop;
            spins = 0;
            take_chunks(pool, loop, helper.number);
        } else if (atomic_load(&pool->awake) && spins < SPINS) {
            spins++;
            relax();
        } else {
            pthread_mutex_lock(&pool->lock);
            atomic_fetch_add(&pool->sleeping, 1);
            while (!atomic_load(&pool->closing) && (uint32_t)(atomic_load(&pool->ticket) >> 32) == seen)
                pthread_cond_wait(&pool->wake, &pool->lock);
            atomic_fetch_sub(&pool->sleeping, 1);
            pthread_mutex_unlock(&pool->lock);
            spins = 0;
        }
    }
    return NULL;
}

static void pool_close(Pool *pool) {
    if (pool->forks == atomic_load(&forks_seen)) {
        pthread_mutex_lock(&pool->lock);
        atomic_store(&pool->closing, 1);
        pthread_cond_broadcast(&pool->wake);
        pthread_mutex_unlock(&pool->lock);
        for (int i = 0; i < pool->helpers; i++) pthread_join(pool->threads[i], NULL);
        pthread_cond_destroy(&pool->wake);
        pthread_mutex_destroy(&pool->lock);
    }
    free(pool);
}

// Return a pool of `threads` threads, the caller included; fewer if the system grants no more. NULL without memory.
static Pool *pool_open(int threads) {
    static atomic_flag watching = ATOMIC_FLAG_INIT;
    if (!atomic_flag_test_and_set(&watching)) pthread_atfork(NULL, NULL, count_fork);
    int helpers = threads - 1 < 0 ? 0 : threads - 1 > MOST_HELPERS ? MOST_HELPERS : threads - 1;
    Pool *pool = calloc(1, sizeof(Pool) + sizeof(pthread_t) * (size_t)helpers);
    if (!pool) return NULL;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->wake, NULL);
    pool->forks = atomic_load(&forks_seen);
    sigset_t all, before; // signals go to the application's own threads
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (pool->helpers < helpers) {
        Helper *helper = malloc(sizeof *helper);
        if (!helper) break;
        *helper = (Helper){pool, pool->helpers + 1};
        if (pthread_create(&pool->threads[pool->helpers], NULL, help, helper)) {
            free(helper);
            break;
        }
        pool->helpers++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return pool;
}

// Begin or end a step: between the two, helpers spin.
static void pool_step(Pool *pool, int runs) { atomic_store(&pool->awake, runs); }

// Call `work` for the chunks 0 .. chunks - 1, and return when all are done.
static void pool_run(Pool *pool, Work work, void *argument, int chunks) {
    if (chunks < 2 || !pool->helpers || pool->forks != atomic_load_explicit(&forks_seen, memory_order_relaxed)) {
        for (int i = 0; i < chunks; i++) work(argument, i, 0);
        return;
    }
    uint32_t loop = (uint32_t)(atomic_load_explicit(&pool->ticket, memory_order_relaxed) >> 32) + 1;
    atomic_store_explicit(&pool->work, work, memory_order_relaxed);
    atomic_store_explicit(&pool->argument, argument, memory_order_relaxed);
    atomic_store_explicit(&pool->done, 0, memory_order_relaxed);
    atomic_store(&pool->ticket, (uint64_t)loop << 32 | (uint32_t)chunks);
    if (atomic_load(&pool->sleeping)) {
        pthread_mutex_lock(&pool->lock);
        pthread_cond_broadcast(&pool->wake);
        pthread_mutex_unlock(&pool->lock);
    }
    take_chunks(pool, loop, 0);
    for (int spins = 0; atomic_load_explicit(&pool->done, memory_order_acquire) != chunks; spins++)
        spins < SPINS ? relax() : (void)sched_yield();
}
