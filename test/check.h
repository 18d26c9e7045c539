/* check.h - the few macros that every unit test uses. A test is a function in a table. A failed
 * CHECK prints its line and the test goes on. Tests that need the public data call data_path(); if
 * the file is missing, they call SKIP with the number of cases they leave out. */
#ifndef CHECK_H
#define CHECK_H

#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>

struct test {
    const char *name;
    void (*run)(void);
};

#define UNUSED __attribute__((unused)) /* not every test program calls every helper */

static int check_failed, check_skipped; /* counted for the running test */
static const char *check_why = "";

#define CHECK(cond) \
    do { \
        if (!(cond)) check_failed++, printf("%s:%d: failed: %s\n", __FILE__, __LINE__, #cond); \
    } while (0)
#define CHECK_MSG(cond, ...) \
    do { \
        if (!(cond)) check_failed++, printf("%s:%d: failed: %s: ", __FILE__, __LINE__, #cond), printf(__VA_ARGS__), puts(""); \
    } while (0)
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1 /* this build has a sanitizer, which makes it several times slower */
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define SANITIZED 1
#endif
#endif
#ifndef SANITIZED
#define SANITIZED 0
#endif
#ifdef __SANITIZE_THREAD__
#define THREAD_SANITIZED 1 /* slower still, where threads share much */
#else
#define THREAD_SANITIZED 0
#endif
/* Fewer repetitions: in a short run of all tests, or in a build with a sanitizer. */
#define FEWER (SANITIZED || (getenv("TOKA_TESTS") && !strcmp(getenv("TOKA_TESTS"), "fast")))
#define SKIP(n, why) (check_skipped += (n), check_why = (why))

/* Path of a file of the public test data (in TOKA_TEST_DATA, else ../shared/data), or NULL if it
 * does not exist. */
UNUSED static const char *data_path(const char *name) {
    static char path[8][1024];
    static int turn;
    const char *root = getenv("TOKA_TEST_DATA");
    turn = (turn + 1) % 8;
    snprintf(path[turn], sizeof path[turn], "%s/%s", root && *root ? root : "../shared/data", name);
    return access(path[turn], R_OK) == 0 ? path[turn] : NULL;
}

/* Copies a file into a heap block of exactly its size, so that ASan reports a read past the end.
 * Free with free((void *)s.p). */
UNUSED static str read_copy(const char *path) {
    toka_err e;
    str map;
    if (os_map(path, &map, &e)) {
        printf("%s\n", e.msg);
        abort();
    }
    char *p = mem_alloc(map.n);
    if (map.n) memcpy(p, map.p, map.n);
    str s = {p, map.n};
    os_unmap(map);
    return s;
}

/* A small random generator for test inputs (xorshift64*). Each test seeds it and prints the seed
 * when a case fails. */
UNUSED static uint64_t rnd(uint64_t *s) {
    *s ^= *s >> 12, *s ^= *s << 25, *s ^= *s >> 27;
    return *s * 0x2545F4914F6CDD1Du;
}
UNUSED static double rnd_unit(uint64_t *s) { return (double)(rnd(s) >> 11) * 0x1p-53; }
UNUSED static double rnd_normal(uint64_t *s) {
    return sqrt(-2 * log(1 - rnd_unit(s))) * cos(6.283185307179586 * rnd_unit(s));
}

/* For calls that an assert must end. The call runs in a child process:
 *     if (child_begins(&pid)) { call; _exit(0); }
 *     CHECK(child_aborts(pid)); */
UNUSED static bool child_begins(pid_t *pid) {
    fflush(stdout);
    *pid = fork();
    if (*pid) return false;
    setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
    if (!freopen("/dev/null", "w", stderr)) _exit(3);
    return true;
}
UNUSED static bool child_aborts(pid_t pid) {
    int status;
    return waitpid(pid, &status, 0) == pid && WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
}

/* CPU seconds of this thread; a busy machine does not change them */
UNUSED static double cpu_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
#endif
