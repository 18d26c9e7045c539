/* unit.c - all C unit tests in one program: it includes toka.c, so every static function is within reach.
 *   unit [NAME ...]   runs all tests, or those whose name contains one of the words; run it from the repository root. */
#include "../toka.c"
#include "check.h"

#if __has_include("test_json.c")
#include "test_json.c"
#endif
#if __has_include("test_unicode.c")
#include "test_unicode.c"
#endif
#if __has_include("test_tok.c")
#include "test_tok.c"
#endif
#if __has_include("test_tmpl.c")
#include "test_tmpl.c"
#endif
#if __has_include("test_mf.c")
#include "test_mf.c"
#endif
#if __has_include("test_samp.c")
#include "test_samp.c"
#endif
#if __has_include("test_kv.c")
#include "test_kv.c"
#endif
#if __has_include("test_pred.c")
#include "test_pred.c"
#endif
#if __has_include("test_sched.c")
#include "test_sched.c"
#endif
#if __has_include("test_batch.c")
#include "test_batch.c"
#endif
#if __has_include("test_fb.c")
#include "test_fb.c"
#endif
#if __has_include("test_bs.c")
#include "test_bs.c"
#endif
#if __has_include("test_plan.c")
#include "test_plan.c"
#endif
#if __has_include("test_cpu.c")
#include "test_cpu.c"
#endif
#if __has_include("test_ranks.c")
#include "test_ranks.c"
#endif
#if __has_include("test_pipe.c")
#include "test_pipe.c"
#endif
#if __has_include("test_eng.c")
#include "test_eng.c"
#endif
#if __has_include("test_http.c")
#include "test_http.c"
#endif
#if __has_include("test_api.c")
#include "test_api.c"
#endif

static const struct test *const tables[] = {
#if __has_include("test_json.c")
    json_tests,
#endif
#if __has_include("test_unicode.c")
    unicode_tests,
#endif
#if __has_include("test_tok.c")
    tok_tests,
#endif
#if __has_include("test_tmpl.c")
    tmpl_tests,
#endif
#if __has_include("test_mf.c")
    mf_tests,
#endif
#if __has_include("test_samp.c")
    samp_tests,
#endif
#if __has_include("test_kv.c")
    kv_tests,
#endif
#if __has_include("test_pred.c")
    pred_tests,
#endif
#if __has_include("test_sched.c")
    sched_tests,
#endif
#if __has_include("test_batch.c")
    batch_tests,
#endif
#if __has_include("test_fb.c")
    fb_tests,
#endif
#if __has_include("test_bs.c")
    bs_tests,
#endif
#if __has_include("test_plan.c")
    plan_tests,
#endif
#if __has_include("test_cpu.c")
    cpu_tests,
#endif
#if __has_include("test_ranks.c")
    ranks_tests,
#endif
#if __has_include("test_pipe.c")
    pipe_tests,
#endif
#if __has_include("test_eng.c")
    eng_tests,
#endif
#if __has_include("test_http.c")
    http_tests,
#endif
#if __has_include("test_api.c")
    api_tests,
#endif
    NULL};

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
