/* unit.c - all C unit tests in one program. It includes toka.c, so tests can call every static
 * function.
 *   unit [NAME ...]   runs all tests, or those whose name contains one of the words. Run it from
 *                     the repository root. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <unistd.h>

static int unit_threads_left = -1; /* threads that the system can still start; -1: no limit */
static int unit_thread(pthread_t *t, const pthread_attr_t *a, void *(*run)(void *), void *arg) {
    /* by then the threads that were started have begun */
    if (!unit_threads_left) return usleep(100000), EAGAIN;
    if (unit_threads_left > 0) unit_threads_left--;
    return pthread_create(t, a, run, arg);
}
#define pthread_create unit_thread

#define TOKA_SERVER
#include "../toka.c"
#include "check.h"
#include "state.h"
#include "linear.h"

#include "test_base.c"
#include "test_json.c"
#include "test_unicode.c"
#include "test_tok.c"
#include "test_tmpl.c"
#include "test_mf.c"
#include "test_samp.c"
#include "test_kv.c"
#include "test_heap.c"
#include "test_sched.c"
#include "test_batch.c"
#include "test_files.c"
#include "test_benchclient.c"
#include "test_plan.c"
#include "test_cpu.c"
#include "test_ranks.c"
#include "test_pipe.c"
#include "test_eng.c"
#include "test_plain.c"
#include "test_con.c"
#include "test_http.c"
#include "test_parse.c"
#include "test_api.c"
#include "test_hub.c"
#include "test_edit.c"

static const struct test *const tables[] = {
    base_tests, json_tests, unicode_tests, tok_tests, tmpl_tests, mf_tests, samp_tests, kv_tests, heap_tests, sched_tests,
    batch_tests, files_tests, benchclient_tests, plan_tests, cpu_tests, ranks_tests, pipe_tests, eng_tests, plain_tests, con_tests, http_tests,
    parse_tests, api_tests, hub_tests, edit_tests, NULL};

static bool wanted(const char *name, int argc, char **argv) {
    for (int i = 1; i < argc; i++)
        if (strstr(name, argv[i])) return true;
    return argc < 2;
}

int main(int argc, char **argv) {
    int passed = 0, failed = 0, skipped = 0;
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (int t = 0; tables[t]; t++)
        for (const struct test *it = tables[t]; it->name; it++) {
            if (!wanted(it->name, argc, argv)) continue;
            check_failed = check_skipped = 0;
            double t0 = os_now();
            it->run();
            bool ok = !check_failed;
            printf("%-6s %-40s %6.2f s", !ok ? "FAIL" : "ok", it->name, os_now() - t0);
            if (check_skipped) printf("  (%d cases skipped: %s)", check_skipped, check_why);
            puts("");
            passed += ok, failed += !ok, skipped += check_skipped;
        }
    printf("unit: %d passed, %d failed, %d skipped\n", passed, failed, skipped);
    return failed != 0;
}
