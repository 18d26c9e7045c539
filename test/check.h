/* check.h - the few macros every unit test uses. A test is a function in a table; a failed CHECK says where and goes on.
 * Tests that need the public data ask data_path(); when it is not there they call SKIP with the number of cases left out. */
#ifndef CHECK_H
#define CHECK_H

struct test {
    const char *name;
    void (*run)(void);
};

#define UNUSED __attribute__((unused)) /* not every program of tests calls everything */

static int check_failed, check_skipped; /* of the running test */
static const char *check_why = "";

#define CHECK(cond) \
    do { \
        if (!(cond)) check_failed++, printf("%s:%d: failed: %s\n", __FILE__, __LINE__, #cond); \
    } while (0)
#define CHECK_MSG(cond, ...) \
    do { \
        if (!(cond)) check_failed++, printf("%s:%d: failed: %s: ", __FILE__, __LINE__, #cond), printf(__VA_ARGS__), puts(""); \
    } while (0)
#define SKIP(n, why) (check_skipped += (n), check_why = (why))

/* Path of a file of the public test data (TOKA_TEST_DATA, else ../shared/data), or NULL when it is not there. */
UNUSED static const char *data_path(const char *name) {
    static char path[8][1024];
    static int turn;
    const char *root = getenv("TOKA_TEST_DATA");
    turn = (turn + 1) % 8;
    snprintf(path[turn], sizeof path[turn], "%s/%s", root && *root ? root : "../shared/data", name);
    return access(path[turn], R_OK) == 0 ? path[turn] : NULL;
}

/* A file as a heap copy of exactly its size (no byte behind it, so that ASan sees any over-read). free((void *)s.p). */
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

/* A small generator for test inputs (xorshift64*); seed it per test, print the seed when a case fails. */
UNUSED static uint64_t rnd(uint64_t *s) {
    *s ^= *s >> 12, *s ^= *s << 25, *s ^= *s >> 27;
    return *s * 0x2545F4914F6CDD1Du;
}
UNUSED static double rnd_unit(uint64_t *s) { return (double)(rnd(s) >> 11) * 0x1p-53; }
UNUSED static double rnd_normal(uint64_t *s) {
    return sqrt(-2 * log(1 - rnd_unit(s))) * cos(6.283185307179586 * rnd_unit(s));
}

UNUSED static double cpu_now(void) { /* seconds of this thread; a busy machine does not count */
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
#endif
