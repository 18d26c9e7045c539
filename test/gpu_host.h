/* gpu_host.h - what the GPU tests that include toka.c share: counting of checks, bf16 on the host.
 * Include after ../toka.c. */
#include "check.h"

static int n_passed, n_failed;

/* Counts one check and prints it on a line. */
UNUSED static bool verdict(bool ok, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    ok ? n_passed++ : n_failed++;
    printf("%s ", ok ? "ok    " : "FAILED"), vprintf(fmt, ap), puts("");
    va_end(ap);
    return ok;
}

UNUSED static uint16_t to_bf16(float f) { /* rounds to nearest, ties to even */
    uint32_t u;
    memcpy(&u, &f, 4);
    return (uint16_t)((u + 0x7FFF + (u >> 16 & 1)) >> 16);
}
UNUSED static float from_bf16(uint16_t b) {
    uint32_t u = (uint32_t)b << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}
