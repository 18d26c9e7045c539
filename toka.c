/* toka.c - a high-throughput LLM inference engine in one C file.  SPDX-License-Identifier: Apache-2.0
 *
 * ESSAY-PLACEHOLDER
 *
 * CONTENTS (build.sh checks it against the banners; to read one chapter: sed -n '/MARK: 4\./,/MARK: 5\./p' toka.c)
 *
 *   1. Types [pure]
 *   2. Base: memory, slices, buffers, errors [pure]
 *   3. OS shell [os]
 *   4. JSON [pure]
 *   5. Unicode [pure]
 *   6. Tokenizer [pure]
 *   7. Chat template: values and parser [pure]
 *   8. Chat template: evaluation [pure]
 *   9. Model files [os]
 *  10. KV pages and prefix tree [pure]
 *  11. Length predictor [pure]
 *  12. Scheduler [pure]
 *  13. Batch building and shared prefixes [pure]
 *  14. Sampling and stops [pure]
 *  15. CPU backend [cpu]
 *  16. Model: the layer loop [os]
 *  17. Engine [os]
 *  18. Public API [os]
 *  19. HTTP [pure]
 *  20. OpenAI API [pure]
 *  21. Server [os]
 *  22. Batch runner, bench and plan [os]
 *  23. Command line [os]
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* mmap flags, sched_getaffinity, memmem */
#endif
#define TOKA_INTERNAL
#include "toka.h"

#include <assert.h>
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <float.h>
#include <limits.h>
#include <locale.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* ===========================================================================
 * MARK: 1. Types [pure]
 * The cast of more than one chapter. What only one chapter needs stands there.
 * =========================================================================== */

typedef struct str { /* a borrowed slice of bytes; not NUL-terminated */
    const char *p;
    size_t n;
} str;

typedef struct buf { /* growable bytes, owned; p is NUL-terminated once anything was put */
    char *p;
    size_t n, cap;
} buf;

typedef struct ids { /* growable token ids, owned */
    int32_t *p;
    size_t n, cap;
} ids;

typedef struct arena { /* many small allocations freed in one call; blocks are chained, newest first */
    struct arena_block *blocks;
    size_t used; /* bytes used of the newest block */
} arena;

/* A JSON value: one node of 16 bytes in a flat array, in document order. A container's children follow it directly;
 * an object's are key, value, key, value ... Strings without escapes borrow from the text, which must outlive the nodes. */
typedef struct json {
    uint8_t type;     /* enum json_type */
    uint8_t exact;    /* JSON_NUMBER: written as an integer that fits int64; .i holds it */
    uint32_t n;       /* string: bytes; array: elements; object: members */
    union {
        const char *s; /* string */
        double f;      /* number, exact 0 */
        int64_t i;     /* number, exact 1 */
        size_t skip;   /* container: nodes of the whole subtree with itself */
    };
} json;

enum json_type { JSON_NULL, JSON_FALSE, JSON_TRUE, JSON_NUMBER, JSON_STRING, JSON_ARRAY, JSON_OBJECT };

/* ===========================================================================
 * MARK: 2. Base: memory, slices, buffers, errors [pure]
 * Small allocations abort when the system has no memory left (on Linux it never says so for small ones). Sizes that a file, a
 * request or a flag chooses go through checked calls where they are made, and become errors.
 * =========================================================================== */

#define COUNT(a) ((int)(sizeof(a) / sizeof((a)[0])))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))
#define UNUSED __attribute__((unused)) /* library builds do not call everything */

static void *mem_check(void *p) {
    if (!p) {
        fputs("toka: out of memory\n", stderr);
        abort();
    }
    return p;
}
static void *mem_alloc(size_t n) { return mem_check(malloc(n ? n : 1)); }
static void *mem_zalloc(size_t n) { return mem_check(calloc(n ? n : 1, 1)); }
static void *mem_realloc(void *p, size_t n) { return mem_check(realloc(p, n ? n : 1)); }

/* Fills *e and returns its code, so that `return fail(e, ...)` is the only error line a function needs. */
__attribute__((format(printf, 3, 4))) static int fail(toka_err *e, int code, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    e->code = code;
    vsnprintf(e->msg, sizeof e->msg, fmt, ap);
    va_end(ap);
    return code;
}

/* ---- Slices ---- */

#define STR(literal) ((str){"" literal, sizeof(literal) - 1})
#define STRF(s) (int)MIN((s).n, (size_t)200), (s).p /* for "%.*s"; long ones are cut */

static str str_c(const char *z) { return (str){z, strlen(z)}; }
static str str_sub(str s, size_t from, size_t to) { return (str){s.p + from, to - from}; }
static bool str_eq(str a, str b) { return a.n == b.n && (!a.n || memcmp(a.p, b.p, a.n) == 0); }
static bool str_is(str a, const char *z) { return str_eq(a, str_c(z)); }
static bool str_starts(str s, str head) { return s.n >= head.n && str_eq((str){s.p, head.n}, head); }
static bool str_ends(str s, str tail) { return s.n >= tail.n && str_eq((str){s.p + s.n - tail.n, tail.n}, tail); }

/* Index of the first `needle` in s at or after `from`, or -1. An empty needle is found at once. */
static ptrdiff_t str_find(str s, str needle, size_t from) {
    if (from > s.n || needle.n > s.n - from) return -1;
    if (!needle.n) return (ptrdiff_t)from;
    const char *at = memmem(s.p + from, s.n - from, needle.p, needle.n);
    return at ? at - s.p : -1;
}

/* 64-bit hash of bytes, for tables in memory only (not stable across versions, not against attackers). */
static uint64_t hash_bytes(const void *p, size_t n) {
    const unsigned char *s = p;
    uint64_t h = 0x9E3779B97F4A7C15u ^ n;
    for (; n >= 8; s += 8, n -= 8) {
        uint64_t w;
        memcpy(&w, s, 8);
        h = (h ^ w) * 0xFF51AFD7ED558CCDu;
        h ^= h >> 32;
    }
    for (; n; s++, n--) h = (h ^ *s) * 0x100000001B3u;
    h ^= h >> 29;
    h *= 0xC4CEB9FE1A85EC53u;
    return h ^ h >> 32;
}

/* ---- Buffers ---- */

static void buf_reserve(buf *b, size_t more) {
    if (b->cap - b->n > more) return; /* one byte is kept for the NUL */
    size_t cap = b->cap + b->cap / 2;
    if (cap < b->n + more + 1) cap = b->n + more + 1;
    if (cap < 64) cap = 64;
    b->p = mem_realloc(b->p, cap);
    b->cap = cap;
}
static void buf_put(buf *b, const void *p, size_t n) {
    buf_reserve(b, n);
    if (n) memcpy(b->p + b->n, p, n);
    b->n += n;
    b->p[b->n] = 0;
}
static void buf_str(buf *b, str s) { buf_put(b, s.p, s.n); }
static void buf_c(buf *b, const char *z) { buf_put(b, z, strlen(z)); }
static void buf_char(buf *b, char c) { buf_put(b, &c, 1); }
static str buf_view(const buf *b) { return (str){b->p ? b->p : "", b->n}; }
static void buf_clear(buf *b) { b->n = 0; }
static void buf_free(buf *b) {
    free(b->p);
    *b = (buf){0};
}
__attribute__((format(printf, 2, 3))) static void buf_printf(buf *b, const char *fmt, ...) {
    va_list ap, again;
    va_start(ap, fmt);
    va_copy(again, ap);
    int n = vsnprintf(NULL, 0, fmt, ap);
    va_end(ap);
    buf_reserve(b, (size_t)n + 1);
    vsnprintf(b->p + b->n, (size_t)n + 1, fmt, again);
    va_end(again);
    b->n += (size_t)n;
}

static void ids_reserve(ids *v, size_t more) {
    if (v->cap - v->n >= more) return;
    v->cap = MAX(v->cap + v->cap / 2, v->n + more);
    v->p = mem_realloc(v->p, v->cap * sizeof *v->p);
}
static void ids_push(ids *v, int32_t id) {
    if (v->n == v->cap) ids_reserve(v, 64);
    v->p[v->n++] = id;
}
static void ids_free(ids *v) {
    free(v->p);
    *v = (ids){0};
}

/* ---- Arena ---- */

struct arena_block {
    struct arena_block *older;
    size_t cap;
    _Alignas(16) char bytes[];
};

static void *arena_alloc(arena *a, size_t n) {
    size_t at = (a->used + 15) & ~(size_t)15;
    if (!a->blocks || n > a->blocks->cap || at > a->blocks->cap - n) {
        size_t cap = a->blocks ? MIN(a->blocks->cap * 2, (size_t)1 << 20) : 4096;
        if (cap < n) cap = n;
        struct arena_block *b = mem_alloc(sizeof *b + cap);
        *b = (struct arena_block){.older = a->blocks, .cap = cap};
        a->blocks = b;
        at = 0;
    }
    a->used = at + n;
    return a->blocks->bytes + at;
}
static void *arena_zalloc(arena *a, size_t n) { return memset(arena_alloc(a, n), 0, n); }
static char *arena_cstr(arena *a, str s) { /* copy with a NUL behind it */
    char *p = arena_alloc(a, s.n + 1);
    if (s.n) memcpy(p, s.p, s.n);
    p[s.n] = 0;
    return p;
}
static str arena_str(arena *a, str s) { return (str){arena_cstr(a, s), s.n}; }
static void arena_free(arena *a) {
    for (struct arena_block *b = a->blocks, *older; b; b = older) {
        older = b->older;
        free(b);
    }
    *a = (arena){0};
}

/* ===========================================================================
 * MARK: 3. OS shell [os]
 * Every system call that is not a socket: files, clock, cores. Thin, so that the chapters above stay pure.
 * =========================================================================== */

static double os_now(void) { /* seconds on a clock that never steps back */
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int os_n_cores(void) { /* cores this process may use */
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return MAX(1, CPU_COUNT(&set));
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n > 0 ? (int)n : 1;
}

/* Maps a whole regular file read-only. An empty file gives {"",0}. Undo with os_unmap. */
static int os_map(const char *path, str *out, toka_err *e) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat st;
    if (fd < 0) return fail(e, TOKA_E_IO, "%s: %s", path, strerror(errno));
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
        close(fd);
        return fail(e, TOKA_E_INPUT, "%s: not a regular file", path);
    }
    *out = STR("");
    void *p = st.st_size ? mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0) : NULL;
    int err = errno;
    close(fd);
    if (p == MAP_FAILED) return fail(e, TOKA_E_IO, "%s: cannot map %lld bytes: %s", path, (long long)st.st_size, strerror(err));
    if (p) *out = (str){p, (size_t)st.st_size};
    return 0;
}
static void os_unmap(str map) {
    if (map.n) munmap((void *)map.p, map.n);
}

static bool os_is_dir(const char *path) {
    struct stat st;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}
static bool os_is_file(const char *path) {
    struct stat st;
    return stat(path, &st) == 0 && S_ISREG(st.st_mode);
}

/* Appends all of a file descriptor (a pipe, a terminal, a file) to b; at most `limit` bytes. */
static int os_read_all(int fd, const char *name, size_t limit, buf *b, toka_err *e) {
    for (;;) {
        buf_reserve(b, 65536);
        ssize_t n = read(fd, b->p + b->n, 65536);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return fail(e, TOKA_E_IO, "%s: %s", name, strerror(errno));
        b->p[b->n += (size_t)n] = 0;
        if (n == 0) return 0;
        if (b->n > limit) return fail(e, TOKA_E_INPUT, "%s: more than %zu bytes", name, limit);
    }
}

/* ===========================================================================
 * MARK: 4. JSON [pure]
 * A strict RFC 8259 reader into flat nodes, and a writer. Self-contained: with chapter 2 it can be lifted out.
 *
 * Reader: json_parse(arena, text, limits, e) returns the root or NULL; e->msg says what and at which byte. Depth and size
 * are limits of the caller. Text must be UTF-8; an escaped lone surrogate (\ud83d alone) is legal JSON and becomes U+FFFD.
 * Numbers keep whether they were written as integers; one beyond the range of a double is an error, so that all are finite.
 * Of equal keys the last wins, as in Python.
 * Walking: json_get, json_at, JSON_EACH, JSON_MEMBERS; a missing value is NULL, and every accessor takes NULL.
 * Writer: json_put_* append one value to a buf and place the comma themselves.
 * =========================================================================== */

typedef struct json_limits {
    int depth;        /* containers in containers at most */
    size_t max_bytes; /* longest text */
} json_limits;

static const json_limits json_trusted = {512, (size_t)1 << 31}; /* for a model's own files */

typedef struct json_reader {
    const char *p, *start, *end; /* next byte, first byte, one past the last */
    arena *a;                    /* unescaped strings, and the nodes in the end */
    json *nodes;                 /* growing */
    size_t n, cap;
    size_t open; /* 1 + index of the innermost open container, 0: none. Its .skip holds the next outer `open` meanwhile */
    int depth;
    json_limits limits;
    toka_err *e;
} json_reader;

static bool json_fail(json_reader *r, const char *what) {
    fail(r->e, TOKA_E_INPUT, "JSON: %s at byte %zu", what, (size_t)(r->p - r->start));
    return false;
}

static json *json_node(json_reader *r, int type) {
    if (r->n == r->cap) {
        r->cap = MAX(r->cap * 2, (size_t)64);
        r->nodes = mem_realloc(r->nodes, r->cap * sizeof *r->nodes);
    }
    json *v = &r->nodes[r->n++];
    *v = (json){.type = (uint8_t)type};
    return v;
}

static void json_space(json_reader *r) {
    while (r->p < r->end && (*r->p == ' ' || *r->p == '\n' || *r->p == '\r' || *r->p == '\t')) r->p++;
}

/* Bytes of the UTF-8 sequence at p (1 to 4), 0 if it is not well formed (Unicode table 3-7). */
static int utf8_len(const char *p, const char *end) {
    unsigned char a = (unsigned char)p[0], b = end - p > 1 ? (unsigned char)p[1] : 0;
    if (a < 0x80) return 1;
    int n = a >= 0xC2 && a <= 0xDF ? 2 : (a & 0xF0) == 0xE0 ? 3 : a >= 0xF0 && a <= 0xF4 ? 4 : 0;
    if (!n || end - p < n || (b & 0xC0) != 0x80) return 0;
    if ((a == 0xE0 && b < 0xA0) || (a == 0xED && b > 0x9F) || (a == 0xF0 && b < 0x90) || (a == 0xF4 && b > 0x8F)) return 0;
    for (int i = 2; i < n; i++)
        if (((unsigned char)p[i] & 0xC0) != 0x80) return 0;
    return n;
}

/* Writes code point c as UTF-8 to p (room for 4); returns its bytes. */
static int utf8_put(char *p, uint32_t c) {
    if (c < 0x80) return p[0] = (char)c, 1;
    if (c < 0x800) return p[0] = (char)(0xC0 | c >> 6), p[1] = (char)(0x80 | (c & 63)), 2;
    if (c < 0x10000)
        return p[0] = (char)(0xE0 | c >> 12), p[1] = (char)(0x80 | (c >> 6 & 63)), p[2] = (char)(0x80 | (c & 63)), 3;
    p[0] = (char)(0xF0 | c >> 18), p[1] = (char)(0x80 | (c >> 12 & 63));
    return p[2] = (char)(0x80 | (c >> 6 & 63)), p[3] = (char)(0x80 | (c & 63)), 4;
}

static int json_hex4(json_reader *r) { /* four hex digits at p, -1 if not */
    int v = 0;
    if (r->end - r->p < 4) return -1;
    for (int i = 0; i < 4; i++) {
        int c = r->p[i], d = c >= '0' && c <= '9' ? c - '0' : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10 : -1;
        if (d < 0) return -1;
        v = v * 16 + d;
    }
    r->p += 4;
    return v;
}

/* After "\u": one code point, a surrogate pair joined, a lone surrogate replaced. False if the digits are wrong. */
static bool json_unicode_escape(json_reader *r, uint32_t *c) {
    int hi = json_hex4(r);
    if (hi < 0) return json_fail(r, "\\u needs four hex digits");
    *c = (uint32_t)hi;
    if (hi < 0xD800 || hi > 0xDFFF) return true;
    *c = 0xFFFD;
    if (hi > 0xDBFF || r->end - r->p < 6 || r->p[0] != '\\' || r->p[1] != 'u') return true;
    const char *back = r->p;
    r->p += 2;
    int lo = json_hex4(r);
    if (lo < 0) return json_fail(r, "\\u needs four hex digits");
    if (lo >= 0xDC00 && lo <= 0xDFFF) *c = 0x10000 + ((uint32_t)(hi - 0xD800) << 10) + (uint32_t)(lo - 0xDC00);
    else r->p = back;
    return true;
}

/* The rest of a string from its first escape on: `head` is what came before. p stands on the backslash. */
static bool json_escaped(json_reader *r, str head, json *v) {
    const char *close = r->p; /* the unescaped text is never longer than the escaped one: measure, then write */
    while (close < r->end && *close != '"') close += *close == '\\' ? 2 : 1;
    if (close >= r->end) return r->p = r->end, json_fail(r, "string without an end");
    char *out = arena_alloc(r->a, head.n + (size_t)(close - r->p) + 1), *w = out + head.n;
    memcpy(out, head.p, head.n);
    for (;;) {
        unsigned char c = (unsigned char)*r->p;
        if (c == '"') break;
        if (c >= 0x20 && c < 0x80 && c != '\\') {
            *w++ = *r->p++;
            continue;
        }
        if (c < 0x20) return json_fail(r, "control character in a string");
        if (c != '\\') {
            int n = utf8_len(r->p, r->end);
            if (!n) return json_fail(r, "invalid UTF-8");
            while (n--) *w++ = *r->p++;
            continue;
        }
        static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
        const char *k = r->p[1] ? strchr(from, r->p[1]) : NULL;
        uint32_t u;
        if (k) {
            *w++ = to[k - from];
            r->p += 2;
        } else if (r->p[1] == 'u') {
            r->p += 2;
            if (!json_unicode_escape(r, &u)) return false;
            w += utf8_put(w, u);
        } else {
            return json_fail(r, "unknown escape");
        }
    }
    *v = (json){.type = JSON_STRING, .n = (uint32_t)(w - out), .s = out};
    r->p++;
    return true;
}

static bool json_string(json_reader *r) { /* p stands behind the opening quote */
    json *v = json_node(r, JSON_STRING);
    const char *s = r->p;
    for (;;) {
        while (r->p < r->end && (unsigned char)*r->p >= 0x20 && (unsigned char)*r->p < 0x80 && *r->p != '"' &&
               *r->p != '\\')
            r->p++;
        if (r->p == r->end) return json_fail(r, "string without an end");
        if (*r->p == '"') break;
        if (*r->p == '\\') return json_escaped(r, (str){s, (size_t)(r->p - s)}, v);
        int n = (unsigned char)*r->p < 0x20 ? -1 : utf8_len(r->p, r->end);
        if (n <= 0) return json_fail(r, n < 0 ? "control character in a string" : "invalid UTF-8");
        r->p += n;
    }
    v->s = s;
    v->n = (uint32_t)(r->p++ - s);
    return true;
}

/* Decimal text (already checked) to double, whatever the host program's locale; its point may be several bytes. */
static double json_strtod(str s) {
    const char *point = localeconv()->decimal_point;
    size_t n_point = strlen(point), whole = 0;
    char tmp[64], *z = s.n + n_point < sizeof tmp ? tmp : mem_alloc(s.n + n_point + 1);
    while (whole < s.n && s.p[whole] != '.') whole++;
    memcpy(z, s.p, whole);
    if (whole < s.n) {
        memcpy(z + whole, point, n_point);
        memcpy(z + whole + n_point, s.p + whole + 1, s.n - whole - 1);
        z[s.n + n_point - 1] = 0;
    } else {
        z[whole] = 0;
    }
    double f = strtod(z, NULL);
    if (z != tmp) free(z);
    return f;
}

static bool json_number(json_reader *r) {
    const char *s = r->p;
    bool exact = true, neg = *r->p == '-';
    uint64_t u = 0;
    r->p += neg;
    if (r->p == r->end || !isdigit((unsigned char)*r->p)) return json_fail(r, "digit expected");
    if (*r->p == '0' && r->p + 1 < r->end && isdigit((unsigned char)r->p[1])) return json_fail(r, "leading zero");
    for (; r->p < r->end && isdigit((unsigned char)*r->p); r->p++) {
        unsigned d = (unsigned)(*r->p - '0');
        if (u > ((uint64_t)INT64_MAX + neg - d) / 10) exact = false;
        else u = u * 10 + d;
    }
    if (r->p < r->end && *r->p == '.') {
        exact = false;
        if (++r->p == r->end || !isdigit((unsigned char)*r->p)) return json_fail(r, "digit expected after the point");
        while (r->p < r->end && isdigit((unsigned char)*r->p)) r->p++;
    }
    if (r->p < r->end && (*r->p | 32) == 'e') {
        exact = false;
        if (++r->p < r->end && (*r->p == '+' || *r->p == '-')) r->p++;
        if (r->p == r->end || !isdigit((unsigned char)*r->p)) return json_fail(r, "digit expected in the exponent");
        while (r->p < r->end && isdigit((unsigned char)*r->p)) r->p++;
    }
    json *v = json_node(r, JSON_NUMBER);
    v->exact = exact;
    if (exact) v->i = (int64_t)(neg ? 0 - u : u);
    else v->f = json_strtod((str){s, (size_t)(r->p - s)});
    if (!exact && !isfinite(v->f)) return r->p = s, json_fail(r, "number out of range");
    return true;
}

static bool json_literal(json_reader *r, str word, int type) {
    if (!str_starts((str){r->p, (size_t)(r->end - r->p)}, word)) return json_fail(r, "value expected");
    r->p += word.n;
    json_node(r, type);
    return true;
}

static bool json_open(json_reader *r, int type) {
    if (++r->depth > r->limits.depth) return json_fail(r, "nested too deep");
    json *v = json_node(r, type);
    v->skip = r->open;
    r->open = r->n;
    r->p++;
    return true;
}

static void json_close(json_reader *r) {
    json *v = &r->nodes[r->open - 1];
    size_t self = r->open - 1;
    r->open = v->skip;
    v->skip = r->n - self;
    r->depth--;
    r->p++;
}

/* One value, or the opening of a container. */
static bool json_value(json_reader *r) {
    switch (r->p < r->end ? *r->p : 0) {
    case '{': return json_open(r, JSON_OBJECT);
    case '[': return json_open(r, JSON_ARRAY);
    case '"': return r->p++, json_string(r);
    case 't': return json_literal(r, STR("true"), JSON_TRUE);
    case 'f': return json_literal(r, STR("false"), JSON_FALSE);
    case 'n': return json_literal(r, STR("null"), JSON_NULL);
    case '-': case '0': case '1': case '2': case '3': case '4': case '5': case '6': case '7': case '8': case '9':
        return json_number(r);
    default: return json_fail(r, r->p < r->end ? "value expected" : "text ends too early");
    }
}

static bool json_key(json_reader *r) {
    json_space(r);
    if (r->p == r->end || *r->p != '"') return json_fail(r, "member name expected");
    r->p++;
    if (!json_string(r)) return false;
    json_space(r);
    if (r->p == r->end || *r->p != ':') return json_fail(r, "':' expected");
    r->p++;
    json_space(r);
    return true;
}

/* Inside the innermost container, behind an element or its opening: closes it, or steps to the next element.
 * *more says whether a value follows. */
static bool json_step(json_reader *r, bool first, bool *more) {
    json *c = &r->nodes[r->open - 1];
    bool object = c->type == JSON_OBJECT;
    char close = object ? '}' : ']';
    json_space(r);
    if (r->p == r->end) return json_fail(r, "text ends too early");
    if ((*more = *r->p != close) == false) return json_close(r), true;
    if (!first) {
        if (*r->p != ',') return json_fail(r, object ? "',' or '}' expected" : "',' or ']' expected");
        r->p++;
        json_space(r);
    }
    c->n++;
    return !object || json_key(r);
}

static bool json_document(json_reader *r) {
    json_space(r);
    if (!json_value(r)) return false;
    while (r->open) {
        bool first = r->nodes[r->n - 1].type >= JSON_ARRAY && r->open == r->n, more;
        if (!json_step(r, first, &more)) return false;
        if (more && !json_value(r)) return false;
    }
    json_space(r);
    return r->p == r->end || json_fail(r, "text goes on behind the value");
}

/* Parses one document. Nodes and unescaped strings live in `a`, other strings in `text`. NULL: *e says why. */
static const json *json_parse(arena *a, str text, json_limits limits, toka_err *e) {
    const size_t max_bytes = MIN(limits.max_bytes, (size_t)UINT32_MAX); /* counts are 32 bits */
    if (!text.n) text = STR("");
    json_reader r = {.p = text.p, .start = text.p, .end = text.p + text.n, .a = a, .limits = limits, .e = e};
    if (text.n > max_bytes) {
        fail(e, TOKA_E_INPUT, "JSON: %zu bytes, at most %zu are taken", text.n, max_bytes);
        return NULL;
    }
    json *root = NULL;
    if (json_document(&r)) root = memcpy(arena_alloc(a, r.n * sizeof *root), r.nodes, r.n * sizeof *root);
    free(r.nodes);
    return root;
}

/* ---- Walking ---- */

static bool json_is(const json *v, int type) { return v && v->type == type; }
static const json *json_next(const json *v) { return v + (v->type >= JSON_ARRAY ? v->skip : 1); }

/* for each element `it` of array or each key `it` of object (its value is it + 1) */
#define JSON_EACH(it, array) \
    for (const json *it = (array) + 1, *it##_end = json_next(array); it < it##_end; it = json_next(it))
#define JSON_MEMBERS(key, object) \
    for (const json *key = (object) + 1, *key##_end = json_next(object); key < key##_end; key = json_next(key + 1))

static str json_str(const json *v) { return json_is(v, JSON_STRING) ? (str){v->s, v->n} : (str){"", 0}; }
static bool json_true(const json *v) { return json_is(v, JSON_TRUE); }
static double json_num(const json *v, double otherwise) {
    return !json_is(v, JSON_NUMBER) ? otherwise : v->exact ? (double)v->i : v->f;
}
static int64_t json_int(const json *v, int64_t otherwise) { return json_is(v, JSON_NUMBER) && v->exact ? v->i : otherwise; }

static const json *json_get(const json *object, const char *name) {
    const json *found = NULL;
    if (!json_is(object, JSON_OBJECT)) return NULL;
    JSON_MEMBERS(key, object) if (str_is((str){key->s, key->n}, name)) found = key + 1;
    return found;
}
static const json *json_at(const json *array, size_t i) {
    if (!json_is(array, JSON_ARRAY) || i >= array->n) return NULL;
    JSON_EACH(it, array) if (i-- == 0) return it;
    return NULL;
}

/* ---- Writing ---- */

/* A comma if the last byte ends a value. No value ends in one of "{[:,", a line feed or a space (which may stand before
 * the first value: "data: "), so no state is needed. */
static void json_comma(buf *b) {
    if (b->n && !strchr("{[:,\n ", b->p[b->n - 1])) buf_char(b, ',');
}
static void json_put_open(buf *b, char c) { json_comma(b), buf_char(b, c); }
static void json_put_close(buf *b, char c) { buf_char(b, c); }

/* A string with its quotes; bytes that are not UTF-8 become U+FFFD. */
static void json_put_str(buf *b, str s) {
    json_comma(b);
    buf_char(b, '"');
    for (size_t i = 0, plain; i < s.n;) {
        for (plain = i; i < s.n && s.p[i] >= 0x20 && s.p[i] < 0x7F && s.p[i] != '"' && s.p[i] != '\\';) i++;
        buf_put(b, s.p + plain, i - plain);
        if (i == s.n) break;
        unsigned char c = (unsigned char)s.p[i];
        int n = utf8_len(s.p + i, s.p + s.n);
        if (c == '"' || c == '\\') buf_char(b, '\\'), buf_char(b, s.p[i]);
        else if (c == '\n') buf_c(b, "\\n");
        else if (c == '\t') buf_c(b, "\\t");
        else if (c < 0x20 || c == 0x7F) buf_printf(b, "\\u%04x", c);
        else if (!n) buf_c(b, "\xEF\xBF\xBD");
        else buf_put(b, s.p + i, (size_t)n);
        i += (size_t)MAX(n, 1);
    }
    buf_char(b, '"');
}
static void json_put_key(buf *b, const char *name) { json_put_str(b, str_c(name)), buf_char(b, ':'); }
static void json_put_int(buf *b, int64_t i) { json_comma(b), buf_printf(b, "%lld", (long long)i); }
static void json_put_bool(buf *b, bool v) { json_comma(b), buf_c(b, v ? "true" : "false"); }
static void json_put_null(buf *b) { json_comma(b), buf_c(b, "null"); }

/* The shortest decimal that reads back as the same double (is_float: the same float); null for what JSON cannot say.
 * 15 (6) digits survive a double (float) of the normal range, so shorter ones need no trial there: %g drops final zeros. */
static void json_put_num(buf *b, double f, bool is_float) {
    char z[48];
    if (!isfinite(f)) {
        json_put_null(b);
        return;
    }
    int digits = fabs(f) < (is_float ? (double)FLT_MIN : DBL_MIN) ? 1 : is_float ? 6 : 15;
    for (;; digits++) {
        snprintf(z, sizeof z, "%.*g", digits, f);
        double back = strtod(z, NULL);
        if (digits == 17 || (is_float ? (float)back == (float)f : back == f)) break;
    }
    const char *point = localeconv()->decimal_point, *at = strstr(z, point);
    json_comma(b);
    buf_put(b, z, at ? (size_t)(at - z) : strlen(z));
    if (at) buf_char(b, '.'), buf_c(b, at + strlen(point));
    if (f == 0 && signbit(f)) buf_c(b, ".0"); /* "-0" would be read back as an integer */
}

/* ===========================================================================
 * MARK: 5. Unicode [pure]
 * Code points, categories and normal form C, from the tables of one Unicode version.
 * =========================================================================== */

/* ===========================================================================
 * MARK: 6. Tokenizer [pure]
 * tokenizer.json to ids and back, equal to Hugging Face `tokenizers`.
 * =========================================================================== */

/* ===========================================================================
 * MARK: 7. Chat template: values and parser [pure]
 * The Jinja that chat templates are written in, as Hugging Face sets it up: trim_blocks and lstrip_blocks on, autoescape
 * off, break and continue, the `generation` tag. First the values a render works on (with the budget every step of it is
 * charged to, their texts, equality, order, dicts), then the way from source to tree.
 *
 * Source -> tmpl_lex (tokens; all whitespace control happens there) -> tmpl_parser (one tmpl_node per construct) -> tmpl.
 * A tmpl never changes after parsing: any number of threads may render it. Names of variables become small numbers.
 *
 * Always: nesting in the source is at most TMPL_NESTING, so that recursion over the tree's brackets and blocks is bounded;
 * every error says "template line N: " and names the construct. Text is UTF-8 and is counted in code points.
 * Not here: include, import, extends, block, do, recursive loops, *args, integers beyond 64 bits. They are errors; only a
 * number of the context that is beyond 64 bits becomes a double. repr of a text escapes control characters, odd spaces and
 * private characters, not all that Python's tables call unprintable.
 * =========================================================================== */

enum { TMPL_NESTING = 100, TMPL_MAX_SOURCE = 1 << 20 };

typedef enum tval_type {
    TV_ABSENT, /* an argument that was not given; no expression has this value */
    TV_UNDEFINED, TV_NONE, TV_BOOL, TV_INT, TV_FLOAT, TV_STR, TV_LIST, TV_TUPLE, TV_DICT,
    TV_VIEW,  /* what dict.items(), keys(), values() and range() give: a list that is not a list for tojson or `+` */
    TV_ITER,  /* what map, select, items ... give: can be walked once, has no length */
    TV_NAMESPACE, TV_LOOP, TV_MACRO, TV_METHOD, TV_FUNCTION
} tval_type;

/* One value, 16 bytes. All but namespaces, loops and iterators never change, so values are shared freely. */
typedef struct tval {
    uint8_t type;
    /* TV_STR: 1 if marked safe (Markup); TV_UNDEFINED: type of the owner it was looked up in, 0: a variable */
    uint8_t flag;
    uint32_t n;   /* TV_STR, TV_UNDEFINED: bytes of s */
    union {
        bool b;
        int64_t i;
        double f;
        const char *s; /* text; of an undefined value its name */
        struct tmpl_items *list;
        struct tmpl_dict *dict; /* also of a namespace */
        struct tmpl_iter *iter;
        struct tmpl_loop *loop;
        struct tmpl_macro *macro;
        struct tmpl_method *method;
        const struct tmpl_fn *fn;
    };
} tval;

typedef struct tmpl_items {
    size_t n;
    tval v[];
} tmpl_items;

typedef struct tmpl_dict { /* in order of insertion; also a namespace's attributes */
    size_t n, cap;
    tval *kv;        /* [2 * cap] key, value, key, value ... */
    uint32_t *slots; /* hash table of 1 + index, once there are more than a few; n_slots is a power of two */
    size_t n_slots;
} tmpl_dict;

typedef struct tmpl_iter {
    tmpl_items *items;
    size_t at; /* next to be given */
} tmpl_iter;

enum { VIEW_RANGE, VIEW_ITEMS, VIEW_KEYS, VIEW_VALUES }; /* flag of a TV_VIEW */
enum { TMPL_UNSAFE = 255 }; /* flag of an undefined value that stands for a method the sandbox refuses */

static tval tv_none(void) { return (tval){.type = TV_NONE}; }
static tval tv_bool(bool b) { return (tval){.type = TV_BOOL, .b = b}; }
static tval tv_int(int64_t i) { return (tval){.type = TV_INT, .i = i}; }
static tval tv_float(double f) { return (tval){.type = TV_FLOAT, .f = f}; }
static tval tv_str(str s) { return (tval){.type = TV_STR, .n = (uint32_t)s.n, .s = s.p}; }
static tval tv_list(tval_type type, tmpl_items *list) { return (tval){.type = (uint8_t)type, .list = list}; }
static tval tv_undefined(str name, int owner) {
    return (tval){.type = TV_UNDEFINED, .flag = (uint8_t)owner, .n = (uint32_t)name.n, .s = name.p};
}
static str tv_text(tval v) { return (str){v.s, v.n}; } /* of a TV_STR */

/* ---- A render and its budget ---- */

typedef struct tmpl_limits { /* what one render may use */
    int64_t steps;           /* nodes evaluated, plus one for every few bytes or elements handled */
    int depth;               /* expressions, statements, macros, values inside one another */
    size_t output_bytes;     /* longest text, of the output as of anything on the way; at most 1 GiB */
} tmpl_limits;
UNUSED static const tmpl_limits tmpl_default_limits = {50 * 1000 * 1000, 400, (size_t)32 << 20};

#define TMPL_MEMORY(limits) (((size_t)64 << 20) + 8 * (limits).output_bytes) /* all values of one render, bytes */

/* A moment for strftime_now, each field with the meaning it has in struct tm: year since 1900, month 0 to 11, day 1 to 31,
 * weekday 0 to 6 from Sunday, yearday 0 to 365. */
typedef struct tmpl_time {
    int year, month, day, hour, minute, second, weekday, yearday;
} tmpl_time;

typedef struct tmpl_run {
    const struct tmpl *t;
    tmpl_time now;
    int64_t steps; /* left */
    int depth;     /* left */
    size_t memory; /* left, bytes */
    size_t max_bytes;
    int64_t max_steps;
    int max_depth;
    arena a;
    buf *out;           /* where statements write */
    tval captured;      /* of the innermost set or filter block that is applying its filters */
    struct tmpl_scope *scope; /* innermost, NULL: the template's own level */
    tval *globals;      /* [t->n_names] variables of that level; TV_ABSENT: none */
    char *last_text;    /* the latest long concatenation: `a + b + c + ...` grows it in place */
    size_t last_n, last_cap;
    int loop_id, caller_id; /* numbers of the variables that loops and macros set, -1: the template has none */
    int line;
    toka_err *e;
} tmpl_run;

__attribute__((format(printf, 2, 3))) static bool tmpl_fail(tmpl_run *r, const char *fmt, ...) {
    char what[400];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(what, sizeof what, fmt, ap);
    va_end(ap);
    fail(r->e, TOKA_E_INPUT, "template line %d: %s", r->line, what);
    return false;
}

static bool tmpl_work(tmpl_run *r, size_t n) { /* n bytes or elements are about to be touched */
    int64_t cost = (int64_t)(n / 8) + 1;
    if (cost <= r->steps) return r->steps -= cost, true;
    r->steps = 0;
    return tmpl_fail(r, "more than %lld steps", (long long)r->max_steps);
}
static bool tmpl_enter(tmpl_run *r) {
    if (r->depth > 0) return r->depth--, true;
    return tmpl_fail(r, "nested more than %d deep", r->max_depth);
}
static bool tmpl_too_long(tmpl_run *r) { return tmpl_fail(r, "a text of more than %zu bytes", r->max_bytes); }

/* n elements of `size` bytes, not cleared; NULL when the render has used up its memory. */
static void *tmpl_alloc(tmpl_run *r, size_t n, size_t size) {
    if (n >= r->memory / size) return tmpl_fail(r, "values need too much memory"), NULL;
    if (!tmpl_work(r, n * size / 16)) return NULL;
    r->memory -= n * size + 16;
    return arena_alloc(&r->a, n * size);
}
static tmpl_items *tmpl_new_items(tmpl_run *r, size_t n) {
    tmpl_items *l = n < SIZE_MAX / 32 ? tmpl_alloc(r, sizeof(tmpl_items) + n * sizeof(tval), 1) : NULL;
    if (l) l->n = n;
    return l;
}
static bool tmpl_put(tmpl_run *r, buf *b, str s) {
    if (s.n > r->max_bytes || b->n > r->max_bytes - s.n) return tmpl_too_long(r);
    if (!tmpl_work(r, s.n)) return false;
    return buf_str(b, s), true;
}
static bool tmpl_put_c(tmpl_run *r, buf *b, const char *z) { return tmpl_put(r, b, str_c(z)); }

/* Ends the life of b: its text becomes a value, if all went well. */
static bool tmpl_take(tmpl_run *r, buf *b, bool ok, tval *out) {
    char *p = ok ? tmpl_alloc(r, b->n + 1, 1) : NULL;
    if (p) memcpy(p, buf_view(b).p, b->n), *out = tv_str((str){p, b->n});
    buf_free(b);
    return p != NULL;
}

static const char *tmpl_type_name(int type) { /* as Python calls it */
    static const char *const names[] = {"absent", "Undefined", "NoneType", "bool", "int", "float", "str", "list", "tuple",
        "dict", "view", "generator", "Namespace", "LoopContext", "Macro", "method", "function"};
    return names[type];
}

/* Using an undefined value for more than printing and asking. */
static bool tmpl_undefined(tmpl_run *r, tval v) {
    str name = tv_text(v);
    if (v.flag == TMPL_UNSAFE) return tmpl_fail(r, "'%.*s' is refused: values cannot be changed", STRF(name));
    if (v.flag == 0) return tmpl_fail(r, "'%.*s' is undefined", STRF(name));
    return tmpl_fail(r, "'%s' has no attribute or element '%.*s'", tmpl_type_name(v.flag), STRF(name));
}
static bool tmpl_bad_type(tmpl_run *r, const char *what, tval v) {
    if (v.type == TV_UNDEFINED) return tmpl_undefined(r, v);
    return tmpl_fail(r, "%s does not take a value of type '%s'", what, tmpl_type_name(v.type));
}

/* ---- Text of values ---- */

static int tmpl_len_cp(str s) { /* code points */
    int n = 0;
    for (size_t i = 0; i < s.n; i++) n += (s.p[i] & 0xC0) != 0x80;
    return n;
}
/* Bytes of the first n code points of s, at most all. */
static size_t tmpl_cp_bytes(str s, int64_t n) {
    size_t i = 0;
    while (i < s.n && n-- > 0)
        for (i++; i < s.n && (s.p[i] & 0xC0) == 0x80;) i++;
    return i;
}
static uint32_t tmpl_cp(str s, size_t *i) { /* the code point at *i, which moves on; s is UTF-8 */
    unsigned char c = (unsigned char)s.p[*i];
    int n = MAX(utf8_len(s.p + *i, s.p + s.n), 1);
    uint32_t u = n == 1 ? c : c & (0xFFu >> (n + 1));
    for (int k = 1; k < n; k++) u = u << 6 | ((unsigned char)s.p[*i + (size_t)k] & 63);
    *i += (size_t)n;
    return u;
}

/* A double as Python's repr: the fewest digits that give it back, a point always, an exponent from 1e16 and below 1e-4. */
static void tmpl_float_text(buf *b, double f) {
    char z[48], digits[24];
    int n = 0, exponent = 0, precision = 0;
    if (!isfinite(f)) {
        buf_c(b, isnan(f) ? "nan" : f < 0 ? "-inf" : "inf");
        return;
    }
    do snprintf(z, sizeof z, "%.*e", precision, f);
    while (strtod(z, NULL) != f && ++precision < 17);
    if (signbit(f)) buf_char(b, '-');
    const char *c = z;
    for (; *c && *c != 'e'; c++)
        if (isdigit((unsigned char)*c)) digits[n++] = *c;
    exponent = atoi(c + 1);
    while (n > 1 && digits[n - 1] == '0') n--;
    if (exponent < -4 || exponent >= 16) {
        buf_put(b, digits, 1);
        if (n > 1) buf_char(b, '.'), buf_put(b, digits + 1, (size_t)n - 1);
        buf_printf(b, "e%c%02d", exponent < 0 ? '-' : '+', abs(exponent));
        return;
    }
    if (exponent < 0) buf_c(b, "0.");
    for (int i = exponent < 0 ? exponent + 1 : 0; i < MAX(n, exponent + 1); i++) {
        buf_char(b, i < 0 || i >= n ? '0' : digits[i]);
        if (i == exponent) buf_char(b, '.');
    }
    if (exponent >= n - 1) buf_char(b, '0');
}

/* Which characters from U+0100 to U+FFFF repr writes as escapes: odd spaces, directions, private ones. */
static bool tmpl_unprintable(uint32_t c) {
    return (c >= 0x2000 && c <= 0x200F) || (c >= 0x2028 && c <= 0x202F) || (c >= 0x205F && c <= 0x206F) || c == 0x3000 ||
           (c >= 0xE000 && c <= 0xF8FF) || c == 0xFEFF || c == 0xFFFE || c == 0xFFFF;
}

/* A text in quotes as Python's repr. */
static bool tmpl_put_quoted(tmpl_run *r, buf *b, str s) {
    char quote = memchr(s.p, '\'', s.n) && !memchr(s.p, '"', s.n) ? '"' : '\'';
    if (s.n > r->max_bytes / 4 || b->n > r->max_bytes) return tmpl_too_long(r);
    if (!tmpl_work(r, s.n)) return false;
    buf_char(b, quote);
    for (size_t i = 0, from; i < s.n;) {
        from = i;
        uint32_t c = tmpl_cp(s, &i);
        if (c == (uint32_t)quote || c == '\\') buf_char(b, '\\'), buf_char(b, (char)c);
        else if (c == '\n' || c == '\r' || c == '\t')
            buf_char(b, '\\'), buf_char(b, c == '\n' ? 'n' : c == '\r' ? 'r' : 't');
        else if (c < 0x20 || (c >= 0x7F && c <= 0xA0) || c == 0xAD) buf_printf(b, "\\x%02x", c);
        else if (tmpl_unprintable(c)) buf_printf(b, "\\u%04x", c);
        else buf_put(b, s.p + from, i - from);
    }
    buf_char(b, quote);
    return true;
}

static bool tmpl_put_value(tmpl_run *r, buf *b, tval v, bool quoted);

static bool tmpl_put_items(tmpl_run *r, buf *b, const tmpl_items *l) {
    for (size_t i = 0; i < l->n; i++)
        if ((i && !tmpl_put_c(r, b, ", ")) || !tmpl_put_value(r, b, l->v[i], true)) return false;
    return true;
}

/* What Python's str(v) is, or with `quoted` repr(v), behind b. */
static bool tmpl_put_value(tmpl_run *r, buf *b, tval v, bool quoted) {
    char z[32];
    bool ok = true;
    switch (v.type) {
    case TV_UNDEFINED: return tmpl_put_c(r, b, quoted ? "Undefined" : "");
    case TV_NONE: return tmpl_put_c(r, b, "None");
    case TV_BOOL: return tmpl_put_c(r, b, v.b ? "True" : "False");
    case TV_INT: return snprintf(z, sizeof z, "%lld", (long long)v.i), tmpl_put_c(r, b, z);
    case TV_FLOAT: return tmpl_float_text(b, v.f), tmpl_put_c(r, b, "");
    case TV_STR:
        if (quoted && v.flag)
            return tmpl_put_c(r, b, "Markup(") && tmpl_put_quoted(r, b, tv_text(v)) && tmpl_put_c(r, b, ")");
        return quoted ? tmpl_put_quoted(r, b, tv_text(v)) : tmpl_put(r, b, tv_text(v));
    default: break;
    }
    bool view = v.type == TV_VIEW && v.flag != VIEW_RANGE;
    if (v.type != TV_LIST && v.type != TV_TUPLE && v.type != TV_DICT && !view) return tmpl_bad_type(r, "printing", v);
    if (!tmpl_enter(r)) return false;
    if (view) buf_c(b, v.flag == VIEW_ITEMS ? "dict_items([" : v.flag == VIEW_KEYS ? "dict_keys([" : "dict_values([");
    else buf_char(b, v.type == TV_LIST ? '[' : v.type == TV_TUPLE ? '(' : '{');
    if (v.type != TV_DICT) {
        ok = tmpl_put_items(r, b, v.list);
        if (v.type == TV_TUPLE && v.list->n == 1) buf_char(b, ',');
    }
    for (size_t i = 0; v.type == TV_DICT && ok && i < v.dict->n; i++)
        ok = (!i || tmpl_put_c(r, b, ", ")) && tmpl_put_value(r, b, v.dict->kv[2 * i], true) && tmpl_put_c(r, b, ": ") &&
             tmpl_put_value(r, b, v.dict->kv[2 * i + 1], true);
    buf_c(b, view ? "])" : v.type == TV_LIST ? "]" : v.type == TV_TUPLE ? ")" : "}");
    r->depth++;
    return ok;
}

static bool tmpl_to_text(tmpl_run *r, tval v, tval *out) { /* soft_str: a text stays as it is */
    buf b = {0};
    if (v.type == TV_STR) return *out = v, true;
    return tmpl_take(r, &b, tmpl_put_value(r, &b, v, false), out);
}

/* ---- Equality and order ---- */

static bool tmpl_equal(tmpl_run *r, tval a, tval b, bool *equal);

static bool tmpl_is_number(tval v) { return v.type == TV_BOOL || v.type == TV_INT || v.type == TV_FLOAT; }
static bool tmpl_is_integer(tval v) { return v.type == TV_BOOL || v.type == TV_INT; }
static int64_t tmpl_integer(tval v) { return v.type == TV_BOOL ? v.b : v.i; }
static double tmpl_double(tval v) { return v.type == TV_FLOAT ? v.f : (double)tmpl_integer(v); }

static bool tmpl_true(tval v) {
    switch (v.type) {
    case TV_BOOL: return v.b;
    case TV_INT: return v.i != 0;
    case TV_FLOAT: return v.f != 0;
    case TV_STR: return v.n > 0;
    case TV_LIST: case TV_TUPLE: case TV_VIEW: return v.list->n > 0;
    case TV_DICT: return v.dict->n > 0;
    case TV_LOOP: return true;
    default: return v.type > TV_NONE;
    }
}

/* -1, 0, 1; an integer and a double compare exactly. */
static int tmpl_number_order(tval a, tval b) {
    if (tmpl_is_integer(a) && tmpl_is_integer(b))
        return (tmpl_integer(a) > tmpl_integer(b)) - (tmpl_integer(a) < tmpl_integer(b));
    long double x = a.type == TV_FLOAT ? (long double)a.f : (long double)tmpl_integer(a);
    long double y = b.type == TV_FLOAT ? (long double)b.f : (long double)tmpl_integer(b);
    return (x > y) - (x < y);
}

static tval *tmpl_dict_find(tmpl_run *r, const tmpl_dict *d, tval key, bool *ok);

static bool tmpl_equal_parts(tmpl_run *r, tval a, tval b, bool *equal) {
    bool ok = true;
    if (a.type != TV_DICT) {
        *equal = a.list->n == b.list->n;
        for (size_t i = 0; ok && *equal && i < a.list->n; i++) ok = tmpl_equal(r, a.list->v[i], b.list->v[i], equal);
        return ok;
    }
    *equal = a.dict->n == b.dict->n;
    for (size_t i = 0; ok && *equal && i < a.dict->n; i++) {
        const tval *other = tmpl_dict_find(r, b.dict, a.dict->kv[2 * i], &ok);
        *equal = other != NULL;
        if (other) ok = tmpl_equal(r, a.dict->kv[2 * i + 1], *other, equal);
    }
    return ok;
}

static bool tmpl_equal(tmpl_run *r, tval a, tval b, bool *equal) {
    *equal = false;
    if (!tmpl_work(r, 1)) return false;
    if (tmpl_is_number(a) && tmpl_is_number(b)) {
        *equal = !(a.type == TV_FLOAT && isnan(a.f)) && !(b.type == TV_FLOAT && isnan(b.f)) && tmpl_number_order(a, b) == 0;
        return true;
    }
    if (a.type != b.type) return true;
    if (a.type == TV_STR) {
        *equal = str_eq(tv_text(a), tv_text(b));
        return a.n == b.n ? tmpl_work(r, a.n) : true;
    }
    if (a.type == TV_LIST || a.type == TV_TUPLE || a.type == TV_VIEW || a.type == TV_DICT) {
        if (!tmpl_enter(r)) return false;
        bool ok = tmpl_equal_parts(r, a, b, equal);
        r->depth++;
        return ok;
    }
    *equal = a.type == TV_UNDEFINED || a.type == TV_NONE || a.list == b.list; /* the rest: the same object */
    return true;
}

/* *order: -1, 0 or 1; values that Python does not order are an error. */
static bool tmpl_order(tmpl_run *r, tval a, tval b, int *order) {
    *order = 0;
    if (a.type == TV_UNDEFINED || b.type == TV_UNDEFINED) return tmpl_undefined(r, a.type == TV_UNDEFINED ? a : b);
    if (tmpl_is_number(a) && tmpl_is_number(b)) return *order = tmpl_number_order(a, b), tmpl_work(r, 1);
    if (a.type == TV_STR && b.type == TV_STR) {
        size_t n = MIN(a.n, b.n);
        int c = n ? memcmp(a.s, b.s, n) : 0; /* the order of bytes is the order of code points */
        *order = c ? (c > 0) - (c < 0) : (a.n > b.n) - (a.n < b.n);
        return tmpl_work(r, n);
    }
    if (a.type != b.type || (a.type != TV_LIST && a.type != TV_TUPLE))
        return tmpl_fail(r, "values of type '%s' and '%s' have no order", tmpl_type_name(a.type), tmpl_type_name(b.type));
    if (!tmpl_enter(r)) return false;
    bool equal = true, ok = true;
    size_t i = 0, n = MIN(a.list->n, b.list->n);
    for (; ok && i < n; i++) {
        ok = tmpl_equal(r, a.list->v[i], b.list->v[i], &equal);
        if (!equal) break;
    }
    if (ok && i < n) ok = tmpl_order(r, a.list->v[i], b.list->v[i], order);
    else *order = (a.list->n > b.list->n) - (a.list->n < b.list->n);
    r->depth++;
    return ok;
}

/* ---- Dicts ---- */

static uint64_t tmpl_hash(tval v) { /* equal values have equal hashes; a tuple's is its length */
    if (v.type == TV_STR) return hash_bytes(v.s, v.n);
    if (tmpl_is_number(v)) {
        double f = tmpl_double(v) + 0.0; /* -0.0 + 0.0 is 0.0 */
        return hash_bytes(&f, sizeof f);
    }
    return v.type == TV_TUPLE ? v.list->n : v.type;
}

static bool tmpl_hashable(tmpl_run *r, tval v) {
    if (v.type != TV_LIST && v.type != TV_DICT && v.type != TV_NAMESPACE) return true;
    return tmpl_fail(r, "unhashable type: '%s'", tmpl_type_name(v.type));
}

/* The place of a key's value, NULL if there is none. *ok becomes false on an error. */
static tval *tmpl_dict_find(tmpl_run *r, const tmpl_dict *d, tval key, bool *ok) {
    bool same = false;
    if (!d->slots) {
        for (size_t i = 0; *ok && i < d->n; i++)
            if ((*ok = tmpl_equal(r, d->kv[2 * i], key, &same)) && same) return &d->kv[2 * i + 1];
        return NULL;
    }
    if (key.type == TV_STR && !(*ok = tmpl_work(r, key.n))) return NULL;
    for (size_t h = tmpl_hash(key); *ok && d->slots[h & (d->n_slots - 1)]; h++) {
        size_t i = d->slots[h & (d->n_slots - 1)] - 1;
        if ((*ok = tmpl_equal(r, d->kv[2 * i], key, &same)) && same) return &d->kv[2 * i + 1];
    }
    return NULL;
}

static bool tmpl_dict_rehash(tmpl_run *r, tmpl_dict *d) {
    size_t n = MAX(d->n_slots * 2, (size_t)32);
    uint32_t *slots = tmpl_alloc(r, n, sizeof *slots);
    if (!slots) return false;
    memset(slots, 0, n * sizeof *slots);
    for (size_t i = 0; i < d->n; i++) {
        size_t h = tmpl_hash(d->kv[2 * i]), tries = d->kv[2 * i].type == TV_STR ? d->kv[2 * i].n : 0;
        for (; slots[h & (n - 1)]; h++) tries += 8;
        slots[h & (n - 1)] = (uint32_t)i + 1;
        if (!tmpl_work(r, tries)) return false;
    }
    d->slots = slots, d->n_slots = n;
    return true;
}

static bool tmpl_dict_set(tmpl_run *r, tmpl_dict *d, tval key, tval v) {
    bool ok = tmpl_hashable(r, key);
    tval *old = ok ? tmpl_dict_find(r, d, key, &ok) : NULL;
    if (!ok) return false;
    if (old) return *old = v, true;
    if (d->n == d->cap) {
        size_t cap = MAX(d->cap * 2, (size_t)4);
        tval *kv = tmpl_alloc(r, cap, 2 * sizeof *kv);
        if (!kv) return false;
        if (d->n) memcpy(kv, d->kv, d->n * 2 * sizeof *kv);
        d->kv = kv, d->cap = cap;
    }
    d->kv[2 * d->n] = key, d->kv[2 * d->n + 1] = v;
    d->n++;
    if (d->n > 8 && d->n * 2 > d->n_slots) return tmpl_dict_rehash(r, d);
    if (!d->slots) return true;
    size_t h = tmpl_hash(key);
    while (d->slots[h & (d->n_slots - 1)]) h++;
    d->slots[h & (d->n_slots - 1)] = (uint32_t)d->n;
    return true;
}

static tmpl_dict *tmpl_new_dict(tmpl_run *r) {
    tmpl_dict *d = tmpl_alloc(r, 1, sizeof *d);
    if (d) *d = (tmpl_dict){0};
    return d;
}

/* A value of the context. */
static bool tmpl_from_json(tmpl_run *r, const json *v, tval *out) {
    size_t i = 0;
    bool ok = true;
    switch (v->type) {
    case JSON_NULL: *out = tv_none(); return tmpl_work(r, 1);
    case JSON_FALSE: case JSON_TRUE: *out = tv_bool(v->type == JSON_TRUE); return tmpl_work(r, 1);
    case JSON_NUMBER: *out = v->exact ? tv_int(v->i) : tv_float(v->f); return tmpl_work(r, 1);
    case JSON_STRING: *out = tv_str(json_str(v)); return tmpl_work(r, 1);
    default: break;
    }
    if (!tmpl_enter(r)) return false;
    if (v->type == JSON_ARRAY) {
        tmpl_items *l = tmpl_new_items(r, v->n);
        *out = tv_list(TV_LIST, l);
        JSON_EACH(it, v) if (l && ok) ok = tmpl_from_json(r, it, &l->v[i++]);
        ok = ok && l;
    } else {
        tmpl_dict *d = tmpl_new_dict(r);
        *out = (tval){.type = TV_DICT, .dict = d};
        JSON_MEMBERS(key, v) {
            tval member;
            ok = ok && d && tmpl_from_json(r, key + 1, &member) && tmpl_dict_set(r, d, tv_str(json_str(key)), member);
            if (!ok) break;
        }
        ok = ok && d;
    }
    r->depth++;
    return ok;
}

/* ---- Tree ---- */

typedef enum tmpl_kind {
    /* statements; bodies are chains through .next                                                           */
    TN_TEXT,     /* s                                                                                        */
    TN_PRINT,    /* a: expression                                                                            */
    TN_IF,       /* a: condition (NULL: the else arm), b: body, c: next arm                                  */
    TN_FOR,      /* a: target, b: what is walked, c: body, d: condition or NULL, e: else body                */
    TN_SET,      /* a: target, b: expression                                                                 */
    TN_SETBLOCK, /* a: target, b: filters over TN_CAPTURED, c: body                                          */
    TN_FILTERS,  /* b: filters over TN_CAPTURED, c: body                                                     */
    TN_MACRO,    /* id: name, b: parameters (TN_PARAM), c: body                                              */
    TN_CALLER,   /* a: TN_CALL, b: parameters of caller(), c: body                                           */
    TN_WITH,     /* b: chain of TN_SET done in the new scope, c: body; also `generation`, with no TN_SET     */
    TN_BREAK,
    TN_CONTINUE,
    /* expressions                                                                                           */
    TN_CONST,    /* v                                                                                        */
    TN_NAME,     /* id, s                                                                                    */
    TN_LIST,     /* b: chain of elements                                                                     */
    TN_TUPLE,    /* b: chain of elements                                                                     */
    TN_DICT,     /* b: chain key, value, key, value ...                                                      */
    TN_ATTR,     /* a.s                                                                                      */
    TN_ITEM,     /* a[b]                                                                                     */
    TN_SLICE,    /* a[b:c:d], each of b, c, d may be NULL                                                    */
    TN_CALL,     /* a(b: chain of arguments)                                                                 */
    TN_FILTER,   /* a|s(b)                                                                                   */
    TN_TEST,     /* a is s(b); op 1: is not                                                                  */
    TN_NOT,      /* not a                                                                                    */
    TN_SIGN,     /* op '-' or '+', a                                                                         */
    TN_BINARY,   /* a op b, op one of the arithmetic signs; 'a' and 'o' are `and` and `or`                   */
    TN_CONCAT,   /* b: chain of operands of ~                                                                */
    TN_COMPARE,  /* a, then b: chain of TN_OPERAND                                                           */
    TN_COND,     /* b if a else c, c may be NULL                                                             */
    TN_CAPTURED, /* the text a set or filter block has collected                                             */
    /* parts                                                                                                 */
    TN_OPERAND,  /* op, a; op 'i' and 'n' are `in` and `not in`                                              */
    TN_KEYWORD,  /* s=a in arguments                                                                         */
    TN_PARAM,    /* id, s, a: default or NULL                                                                */
    TN_NSREF     /* namespace variable id, attribute s, as a target                                          */
} tmpl_kind;

typedef struct tmpl_node tmpl_node;
struct tmpl_node {
    uint8_t kind; /* tmpl_kind */
    bool soft;    /* stands where it may never run: an unknown filter is an error only when it does */
    uint16_t op;
    int line;
    int id; /* a variable's number */
    str s;
    tval v;
    tmpl_node *a, *b, *c, *d, *e, *next;
    const struct tmpl_fn *fn; /* TN_FILTER, TN_TEST: what runs it, bound after parsing */
    tmpl_node *next_call;     /* chain of all TN_FILTER and TN_TEST, for that binding */
};

typedef struct tmpl {
    arena a; /* nodes, names, texts */
    tmpl_node *body;
    tmpl_node *calls; /* every filter and test */
    str *names;       /* [n_names] variables by number */
    int n_names;
} tmpl;

/* ---- Tokens ---- */

typedef enum tmpl_token_type {
    TT_DATA, TT_BLOCK, TT_PRINT, TT_CLOSE, TT_NAME, TT_STRING, TT_INT, TT_FLOAT, TT_OP, TT_END
} tmpl_token_type;

#define OP2(a, b) ((a) | (b) << 8) /* a sign of two characters */

typedef struct tmpl_token {
    uint8_t type;
    uint16_t op; /* TT_OP */
    int line;
    str s; /* text of data, names, numbers; a string's value */
} tmpl_token;

typedef struct tmpl_lexer {
    str src;
    size_t at;
    int line;
    tmpl_token *tokens;
    size_t n, cap;
    arena *a;                   /* string values */
    char closers[TMPL_NESTING]; /* the brackets that must close before the tag may end */
    int n_open;
    toka_err *e;
} tmpl_lexer;

__attribute__((format(printf, 3, 4))) static bool tmpl_syntax(toka_err *e, int line, const char *fmt, ...) {
    char what[400];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(what, sizeof what, fmt, ap);
    va_end(ap);
    fail(e, TOKA_E_INPUT, "template line %d: %s", line, what);
    return false;
}

/* Bytes of the white space character at p, 0 if it is none. The set is Python's str.isspace. */
static size_t tmpl_space(const char *p, const char *end) {
    unsigned char c = p < end ? (unsigned char)*p : 0;
    if ((c >= 9 && c <= 13) || (c >= 0x1C && c <= 0x20)) return 1;
    if (c == 0xC2 && end - p > 1) return (unsigned char)p[1] == 0x85 || (unsigned char)p[1] == 0xA0 ? 2 : 0;
    if ((c & 0xF0) != 0xE0 || end - p < 3) return 0;
    int u = (c & 15) << 12 | (p[1] & 63) << 6 | (p[2] & 63);
    bool space = u == 0x1680 || (u >= 0x2000 && u <= 0x200A) || u == 0x2028 || u == 0x2029 || u == 0x202F || u == 0x205F;
    return space || u == 0x3000 ? 3 : 0;
}
/* s without the white space at its ends. */
static str tmpl_trim(str s, bool left, bool right) {
    size_t n;
    while (left && (n = tmpl_space(s.p, s.p + s.n)) != 0) s = str_sub(s, n, s.n);
    for (;;) { /* a space character has 1 to 3 bytes: try each length */
        n = !right ? 0 : s.n && tmpl_space(s.p + s.n - 1, s.p + s.n) == 1 ? 1
            : s.n > 1 && tmpl_space(s.p + s.n - 2, s.p + s.n) == 2 ? 2
            : s.n > 2 && tmpl_space(s.p + s.n - 3, s.p + s.n) == 3 ? 3 : 0;
        if (!n) return s;
        s.n -= n;
    }
}

static void tmpl_push(tmpl_lexer *x, int type, int op, str s) {
    if (x->n == x->cap) {
        x->cap = MAX(x->cap * 2, (size_t)256);
        x->tokens = mem_realloc(x->tokens, x->cap * sizeof *x->tokens);
    }
    x->tokens[x->n++] = (tmpl_token){.type = (uint8_t)type, .op = (uint16_t)op, .line = x->line, .s = s};
}

static bool tmpl_sees(const tmpl_lexer *x, size_t at, str what) {
    return at <= x->src.n && str_starts(str_sub(x->src, at, x->src.n), what);
}
static size_t tmpl_skip_space(const tmpl_lexer *x, size_t at) {
    for (size_t n; (n = tmpl_space(x->src.p + at, x->src.p + x->src.n)) != 0;) at += n;
    return at;
}
static void tmpl_advance(tmpl_lexer *x, size_t to) { /* counts the lines on the way */
    for (; x->at < to; x->at++) x->line += x->src.p[x->at] == '\n';
}

/* If a tag may end at `at`, the first byte behind it, else 0. closer is '%', '}' or '#'. A "-" takes the white space behind
 * with it; blocks and comments take one line feed (trim_blocks) unless they end in "+". */
static size_t tmpl_tag_end(const tmpl_lexer *x, size_t at, char closer) {
    const char z[] = {closer, '}', 0};
    char sign = at < x->src.n ? x->src.p[at] : 0;
    if (sign == '-' && tmpl_sees(x, at + 1, str_c(z))) return tmpl_skip_space(x, at + 3);
    if (sign == '+' && closer != '}' && tmpl_sees(x, at + 1, str_c(z))) return at + 3;
    if (!tmpl_sees(x, at, str_c(z))) return 0;
    at += 2;
    return at + (closer != '}' && at < x->src.n && x->src.p[at] == '\n');
}

/* The text from x->at up to a tag that opens at `open` with this sign: "-" takes all white space before it; without a sign
 * a block or comment that stands alone at the start of its line takes that line's indentation (lstrip_blocks). */
static void tmpl_data(tmpl_lexer *x, size_t open, char kind, char sign) {
    str s = str_sub(x->src, x->at, open);
    if (sign == '-') {
        s = tmpl_trim(s, false, true);
    } else if (sign != '+' && kind != '{') {
        size_t line = s.n;
        while (line && s.p[line - 1] != '\n') line--;
        bool starts = line > 0 || x->at == 0 || x->src.p[x->at - 1] == '\n';
        if (starts && tmpl_trim(str_sub(s, line, s.n), true, false).n == 0) s.n = line;
    }
    if (s.n) tmpl_push(x, TT_DATA, 0, s);
    tmpl_advance(x, open);
}

static char tmpl_sign(const tmpl_lexer *x, size_t at) {
    return at < x->src.n && (x->src.p[at] == '-' || x->src.p[at] == '+') ? x->src.p[at] : 0;
}

/* If a {% word %} tag stands at `open`, the first byte behind it, else 0. *sign is that of its opening. */
static size_t tmpl_bare_tag(const tmpl_lexer *x, size_t open, str word, bool trims, char *sign) {
    if (!tmpl_sees(x, open, STR("{%"))) return 0;
    *sign = tmpl_sign(x, open + 2);
    size_t at = tmpl_skip_space(x, open + 2 + (*sign != 0));
    if (!tmpl_sees(x, at, word)) return 0;
    at = tmpl_skip_space(x, at + word.n);
    size_t end = tmpl_tag_end(x, at, '%');
    return trims || !end || x->src.p[at] == '-' ? end : x->src.p[at] == '+' ? 0 : at + 2;
}

static bool tmpl_raw(tmpl_lexer *x, size_t behind) { /* {% raw %} was seen: all is text up to {% endraw %} */
    int line = x->line;
    char sign;
    tmpl_advance(x, behind);
    for (size_t open = x->at; open < x->src.n; open++) {
        size_t end = tmpl_bare_tag(x, open, STR("endraw"), true, &sign);
        if (!end) continue;
        tmpl_data(x, open, '%', sign);
        tmpl_advance(x, end);
        return true;
    }
    return tmpl_syntax(x->e, line, "raw without endraw");
}

static bool tmpl_comment(tmpl_lexer *x) {
    int line = x->line;
    for (size_t at = x->at; at < x->src.n; at++) {
        size_t end = tmpl_tag_end(x, at, '#');
        if (end) return tmpl_advance(x, end), true;
    }
    return tmpl_syntax(x->e, line, "comment without an end");
}

/* One escape of a string literal at s[*i] (on the backslash), as in Python; an unknown one stays as it is written. */
static bool tmpl_escape(tmpl_lexer *x, str s, size_t *i, buf *out) {
    static const char from[] = "\\'\"abfnrtv", to[] = "\\'\"\a\b\f\n\r\t\v";
    char c = *i + 1 < s.n ? s.p[*i + 1] : 0, utf8[4];
    const char *k = c ? strchr(from, c) : NULL;
    int n = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0, base = n ? 16 : 8;
    uint32_t u = 0;
    *i += 2;
    if (c == '\n') return true;
    if (k) return buf_char(out, to[k - from]), true;
    if (c >= '0' && c <= '7') n = 3, --*i;
    else if (!n)
        return c == 'N' ? tmpl_syntax(x->e, x->line, "\\N escapes are not supported")
               : (buf_put(out, s.p + *i - 2, 2), true);
    int got = 0;
    for (; got < n && *i < s.n; got++, ++*i) {
        int d = s.p[*i] >= '0' && s.p[*i] <= '9' ? s.p[*i] - '0'
            : isxdigit((unsigned char)s.p[*i]) ? (s.p[*i] | 32) - 'a' + 10 : 99;
        if (d >= base) break;
        u = u * (uint32_t)base + (uint32_t)d;
    }
    if ((base == 16 && got < n) || u > 0x10FFFF) return tmpl_syntax(x->e, x->line, "wrong \\%c escape in a string", c);
    if (u >= 0xD800 && u <= 0xDFFF) u = 0xFFFD;
    return buf_put(out, utf8, (size_t)utf8_put(utf8, u)), true;
}

static bool tmpl_string(tmpl_lexer *x) {
    size_t from = x->at + 1, to = from;
    char quote = x->src.p[x->at];
    bool plain = true;
    for (; to < x->src.n && x->src.p[to] != quote; to++)
        if (x->src.p[to] == '\\') to++, plain = false;
    if (to >= x->src.n) return tmpl_syntax(x->e, x->line, "string without an end");
    str s = str_sub(x->src, from, to);
    if (!plain) {
        buf b = {0};
        bool ok = true;
        for (size_t i = 0; ok && i < s.n;) {
            if (s.p[i] == '\\') ok = tmpl_escape(x, s, &i, &b);
            else buf_char(&b, s.p[i++]);
        }
        s = arena_str(x->a, buf_view(&b));
        buf_free(&b);
        if (!ok) return false;
    }
    tmpl_push(x, TT_STRING, 0, s);
    tmpl_advance(x, to + 1);
    return true;
}

static size_t tmpl_digits(const tmpl_lexer *x, size_t at) { /* behind digits, single underscores between them */
    while (at < x->src.n && (isdigit((unsigned char)x->src.p[at]) ||
                             (x->src.p[at] == '_' && at + 1 < x->src.n && isdigit((unsigned char)x->src.p[at + 1]))))
        at++;
    return at;
}

static void tmpl_number(tmpl_lexer *x) {
    const char *p = x->src.p;
    size_t n = x->src.n, at = x->at, end;
    int type = TT_INT;
    if (p[at] == '0' && at + 1 < n && strchr("xXoObB", p[at + 1])) {
        for (at += 2; at < n && (isalnum((unsigned char)p[at]) || p[at] == '_');) at++;
    } else {
        bool behind_dot = at && p[at - 1] == '.'; /* in a.0.1 there is no fraction */
        at = tmpl_digits(x, at);
        if (!behind_dot && at + 1 < n && p[at] == '.' && isdigit((unsigned char)p[at + 1]))
            at = tmpl_digits(x, at + 1), type = TT_FLOAT;
        if (!behind_dot && at + 1 < n && (p[at] | 32) == 'e') {
            end = at + 1 + (p[at + 1] == '+' || p[at + 1] == '-');
            if (end < n && isdigit((unsigned char)p[end])) at = tmpl_digits(x, end), type = TT_FLOAT;
        }
    }
    tmpl_push(x, type, 0, str_sub(x->src, x->at, at));
    x->at = at;
}

static bool tmpl_sign_token(tmpl_lexer *x) {
    static const char *const twos[] = {"//", "**", "==", "!=", ">=", "<="};
    char c = x->src.p[x->at];
    for (int i = 0; i < COUNT(twos); i++)
        if (tmpl_sees(x, x->at, str_c(twos[i]))) {
            tmpl_push(x, TT_OP, OP2(twos[i][0], twos[i][1]), str_sub(x->src, x->at, x->at + 2));
            return x->at += 2, true;
        }
    if (!c || !strchr("+-/*%~[](){}><=.:|,", c)) {
        int n = utf8_len(x->src.p + x->at, x->src.p + x->src.n);
        return tmpl_syntax(x->e, x->line, "unexpected character '%.*s'", MAX(n, 1), x->src.p + x->at);
    }
    if (strchr("([{", c)) {
        if (x->n_open == TMPL_NESTING) return tmpl_syntax(x->e, x->line, "brackets nested more than %d deep", TMPL_NESTING);
        x->closers[x->n_open++] = (char)(c == '(' ? ')' : c + 2);
    }
    if (strchr(")]}", c) && (!x->n_open || x->closers[--x->n_open] != c))
        return tmpl_syntax(x->e, x->line, "unexpected '%c'", c);
    tmpl_push(x, TT_OP, c, str_sub(x->src, x->at, x->at + 1));
    return x->at++, true;
}

/* The tokens inside {% %} or {{ }}, up to and with the end. */
static bool tmpl_tag(tmpl_lexer *x, char closer) {
    int line = x->line;
    for (;;) {
        size_t end = x->n_open ? 0 : tmpl_tag_end(x, x->at, closer);
        if (end) {
            tmpl_push(x, TT_CLOSE, 0, closer == '%' ? STR("%}") : STR("}}"));
            return tmpl_advance(x, end), true;
        }
        size_t from = tmpl_skip_space(x, x->at);
        if (from > x->at) {
            tmpl_advance(x, from);
            continue;
        }
        if (x->at >= x->src.n) return tmpl_syntax(x->e, line, "tag without its end '%c}'", closer);
        unsigned char c = (unsigned char)x->src.p[x->at];
        if (isdigit(c)) {
            tmpl_number(x);
        } else if (isalpha(c) || c == '_' || c >= 0x80) {
            while (from < x->src.n &&
                   (isalnum((unsigned char)x->src.p[from]) || x->src.p[from] == '_' || x->src.p[from] & 0x80))
                from++;
            tmpl_push(x, TT_NAME, 0, str_sub(x->src, x->at, from));
            x->at = from;
        } else if (c == '"' || c == '\'' ? !tmpl_string(x) : !tmpl_sign_token(x)) {
            return false;
        }
    }
}

/* All tokens of the source; the last is TT_END. */
static bool tmpl_lex(tmpl_lexer *x) {
    str s = x->src;
    for (size_t open = 0; x->at < s.n; open = x->at) {
        while (open + 1 < s.n &&
               !(s.p[open] == '{' && (s.p[open + 1] == '%' || s.p[open + 1] == '{' || s.p[open + 1] == '#')))
            open++;
        if (open + 1 >= s.n) {
            tmpl_push(x, TT_DATA, 0, str_sub(s, x->at, s.n));
            tmpl_advance(x, s.n);
            break;
        }
        char kind = s.p[open + 1], sign = tmpl_sign(x, open + 2);
        size_t raw = tmpl_bare_tag(x, open, STR("raw"), false, &sign);
        tmpl_data(x, open, kind, sign);
        if (raw) {
            if (!tmpl_raw(x, raw)) return false;
            continue;
        }
        x->at = open + 2 + (sign != 0);
        if (kind == '#') {
            if (!tmpl_comment(x)) return false;
            continue;
        }
        tmpl_push(x, kind == '%' ? TT_BLOCK : TT_PRINT, 0, str_sub(s, open, open + 2));
        if (!tmpl_tag(x, kind == '%' ? '%' : '}')) return false;
    }
    tmpl_push(x, TT_END, 0, STR("end of template"));
    return true;
}

/* ---- Parser ---- */

typedef struct tmpl_parser {
    tmpl *t;
    const tmpl_token *tok; /* the next token; the one behind it may be looked at, as TT_END is the last */
    int depth, n_loops;    /* nesting now; loops around that break and continue can mean */
    int n_conditions;      /* if's around */
    int cap_names;
    int *name_slots; /* hash table of 1 + number of a name, n_name_slots a power of two */
    size_t n_name_slots;
    toka_err *e;
} tmpl_parser;

static tmpl_node *tmpl_expr(tmpl_parser *p);
static bool tmpl_body(tmpl_parser *p, const char *const *ends, tmpl_node **body);

/* Every failing parse function returns NULL (or false); this one fills *e and is NULL itself. */
static tmpl_node *tmpl_expected(tmpl_parser *p, const char *what) {
    tmpl_syntax(p->e, p->tok->line, "%s expected, found '%.*s'", what, STRF(p->tok->s));
    return NULL;
}

static tmpl_node *tmpl_new(tmpl_parser *p, int kind, int line) {
    tmpl_node *n = arena_zalloc(&p->t->a, sizeof *n);
    n->kind = (uint8_t)kind;
    n->line = line;
    n->soft = p->n_conditions > 0;
    return n;
}

static bool tmpl_deeper(tmpl_parser *p) {
    if (++p->depth <= TMPL_NESTING) return true;
    return tmpl_syntax(p->e, p->tok->line, "nested more than %d deep", TMPL_NESTING);
}

static bool tmpl_at_op(const tmpl_parser *p, int op) { return p->tok->type == TT_OP && p->tok->op == op; }
static bool tmpl_at_word(const tmpl_parser *p, const char *z) { return p->tok->type == TT_NAME && str_is(p->tok->s, z); }
static bool tmpl_take_op(tmpl_parser *p, int op) { return tmpl_at_op(p, op) && p->tok++; }
static bool tmpl_take_word(tmpl_parser *p, const char *z) { return tmpl_at_word(p, z) && p->tok++; }
static bool tmpl_need_op(tmpl_parser *p, char op) {
    const char z[] = {'\'', op, '\'', 0};
    return tmpl_take_op(p, op) || tmpl_expected(p, z);
}
static bool tmpl_need_close(tmpl_parser *p) {
    return (p->tok->type == TT_CLOSE && p->tok++) || tmpl_expected(p, "end of the tag");
}

/* A variable's number. */
static int tmpl_name_id(tmpl_parser *p, str s) {
    tmpl *t = p->t;
    if ((size_t)t->n_names * 2 >= p->n_name_slots) { /* grow and fill in again */
        p->n_name_slots = MAX(p->n_name_slots * 2, (size_t)64);
        free(p->name_slots);
        p->name_slots = mem_zalloc(p->n_name_slots * sizeof *p->name_slots);
        for (int i = 0; i < t->n_names; i++) {
            size_t h = hash_bytes(t->names[i].p, t->names[i].n);
            while (p->name_slots[h & (p->n_name_slots - 1)]) h++;
            p->name_slots[h & (p->n_name_slots - 1)] = i + 1;
        }
    }
    size_t h = hash_bytes(s.p, s.n);
    for (int k; (k = p->name_slots[h & (p->n_name_slots - 1)]) != 0; h++)
        if (str_eq(t->names[k - 1], s)) return k - 1;
    if (t->n_names == p->cap_names) {
        p->cap_names = MAX(p->cap_names * 2, 32);
        t->names = mem_realloc(t->names, (size_t)p->cap_names * sizeof *t->names);
    }
    t->names[t->n_names++] = s;
    return p->name_slots[h & (p->n_name_slots - 1)] = t->n_names, t->n_names - 1;
}

static tmpl_node *tmpl_name(tmpl_parser *p, int kind) { /* the name token as a node of this kind */
    if (p->tok->type != TT_NAME) return tmpl_expected(p, "name");
    tmpl_node *n = tmpl_new(p, kind, p->tok->line);
    n->s = p->tok++->s;
    n->id = tmpl_name_id(p, n->s);
    return n;
}

/* Several items with commas: a tuple; one without a comma: itself. In parentheses it may be empty. */
static tmpl_node *tmpl_tuple(tmpl_parser *p, tmpl_node *(*item)(tmpl_parser *), bool parentheses) {
    tmpl_node *tuple = tmpl_new(p, TN_TUPLE, p->tok->line), **tail = &tuple->b;
    bool comma = false;
    for (;;) {
        if (p->tok->type == TT_CLOSE || tmpl_at_op(p, ')') || tmpl_at_op(p, '=') || tmpl_at_word(p, "in")) break;
        if (!(*tail = item(p))) return NULL;
        tail = &(*tail)->next;
        if (!tmpl_take_op(p, ',')) break;
        comma = true;
    }
    if (!tuple->b && !parentheses) return tmpl_expected(p, "expression");
    return comma || !tuple->b ? tuple : tuple->b;
}

/* A chain of arguments behind '(' up to ')': positional ones first, then name=value. */
static bool tmpl_arguments(tmpl_parser *p, tmpl_node **args) {
    bool keyword = false;
    for (tmpl_node **tail = args; !tmpl_take_op(p, ')'); tail = &(*tail)->next) {
        if (tail != args && !tmpl_take_op(p, ',')) return tmpl_expected(p, "',' or ')'");
        if (tail != args && tmpl_take_op(p, ')')) return true;
        if (tmpl_at_op(p, '*') || tmpl_at_op(p, OP2('*', '*')))
            return tmpl_syntax(p->e, p->tok->line, "%.*s arguments are not supported", STRF(p->tok->s));
        if (p->tok->type == TT_NAME && p->tok[1].type == TT_OP && p->tok[1].op == '=') {
            tmpl_node *n = *tail = tmpl_new(p, TN_KEYWORD, p->tok->line);
            n->s = p->tok->s;
            p->tok += 2;
            keyword = true;
            if (!(n->a = tmpl_expr(p))) return false;
        } else if (keyword) {
            return tmpl_syntax(p->e, p->tok->line, "positional argument behind a keyword argument");
        } else if (!(*tail = tmpl_expr(p))) {
            return false;
        }
    }
    return true;
}

static tmpl_node *tmpl_int_const(tmpl_parser *p) {
    tmpl_node *n = tmpl_new(p, TN_CONST, p->tok->line);
    str s = p->tok++->s;
    int base = s.n > 1 && isalpha((unsigned char)s.p[1]) ? ((s.p[1] | 32) == 'x' ? 16 : (s.p[1] | 32) == 'o' ? 8 : 2) : 10;
    int64_t v = 0;
    bool ok = base == 10 || s.n > 2, zero = base == 10 && s.n > 1 && s.p[0] == '0';
    for (size_t i = base == 10 ? 0 : 2; i < s.n; i++) {
        int c = s.p[i], d = isdigit(c) ? c - '0' : c == '_' ? 0 : (c | 32) - 'a' + 10;
        if (c == '_') continue;
        if (d >= base || v > (INT64_MAX - d) / base || (zero && d)) ok = false;
        else v = v * base + d;
    }
    n->v = tv_int(v);
    if (!ok) tmpl_syntax(p->e, n->line, "integer '%.*s' is not supported", STRF(s));
    return ok ? n : NULL;
}

static tmpl_node *tmpl_float_const(tmpl_parser *p) {
    tmpl_node *n = tmpl_new(p, TN_CONST, p->tok->line);
    buf b = {0};
    for (size_t i = 0; i < p->tok->s.n; i++)
        if (p->tok->s.p[i] != '_') buf_char(&b, p->tok->s.p[i]);
    n->v = tv_float(json_strtod(buf_view(&b)));
    buf_free(&b);
    p->tok++;
    return n;
}

static tmpl_node *tmpl_string_const(tmpl_parser *p) { /* neighbouring strings are one, as in Python */
    tmpl_node *n = tmpl_new(p, TN_CONST, p->tok->line);
    n->v = tv_str(p->tok++->s);
    if (p->tok->type != TT_STRING) return n;
    buf b = {0};
    buf_str(&b, tv_text(n->v));
    while (p->tok->type == TT_STRING) buf_str(&b, p->tok++->s);
    n->v = tv_str(arena_str(&p->t->a, buf_view(&b)));
    buf_free(&b);
    return n;
}

static tmpl_node *tmpl_list_literal(tmpl_parser *p) {
    tmpl_node *n = tmpl_new(p, TN_LIST, p->tok++->line), **tail = &n->b;
    while (!tmpl_take_op(p, ']')) {
        if (n->b && !tmpl_take_op(p, ',')) return tmpl_expected(p, "',' or ']'");
        if (n->b && tmpl_take_op(p, ']')) break;
        if (!(*tail = tmpl_expr(p))) return NULL;
        tail = &(*tail)->next;
    }
    return n;
}

static tmpl_node *tmpl_dict_literal(tmpl_parser *p) {
    tmpl_node *n = tmpl_new(p, TN_DICT, p->tok++->line), **tail = &n->b;
    while (!tmpl_take_op(p, '}')) {
        if (n->b && !tmpl_take_op(p, ',')) return tmpl_expected(p, "',' or '}'");
        if (n->b && tmpl_take_op(p, '}')) break;
        if (!(*tail = tmpl_expr(p)) || !tmpl_need_op(p, ':')) return NULL;
        tail = &(*tail)->next;
        if (!(*tail = tmpl_expr(p))) return NULL;
        tail = &(*tail)->next;
    }
    return n;
}

/* Which constant a name is: its value, or TV_ABSENT. */
static tval tmpl_word_const(str s) {
    if (str_is(s, "true") || str_is(s, "True")) return tv_bool(true);
    if (str_is(s, "false") || str_is(s, "False")) return tv_bool(false);
    if (str_is(s, "none") || str_is(s, "None")) return tv_none();
    return (tval){0};
}

static tmpl_node *tmpl_primary(tmpl_parser *p) {
    tmpl_node *n = NULL;
    switch (p->tok->type) {
    case TT_NAME: {
        tval v = tmpl_word_const(p->tok->s);
        if (!v.type) return tmpl_name(p, TN_NAME);
        n = tmpl_new(p, TN_CONST, p->tok++->line);
        n->v = v;
        return n;
    }
    case TT_STRING: return tmpl_string_const(p);
    case TT_INT: return tmpl_int_const(p);
    case TT_FLOAT: return tmpl_float_const(p);
    default: break;
    }
    if (!tmpl_at_op(p, '(') && !tmpl_at_op(p, '[') && !tmpl_at_op(p, '{')) return tmpl_expected(p, "expression");
    if (!tmpl_deeper(p)) return NULL;
    if (tmpl_at_op(p, '[')) n = tmpl_list_literal(p);
    else if (tmpl_at_op(p, '{')) n = tmpl_dict_literal(p);
    else p->tok++, n = tmpl_tuple(p, tmpl_expr, true), n = n && tmpl_need_op(p, ')') ? n : NULL;
    p->depth--;
    return n;
}

/* What stands in [ ] behind `of`: an index or a slice. */
static tmpl_node *tmpl_subscript(tmpl_parser *p, tmpl_node *of) {
    tmpl_node *n = tmpl_new(p, TN_ITEM, p->tok++->line), **part[3] = {&n->b, &n->c, &n->d};
    n->a = of;
    for (int i = 0; i < 3; i++) {
        if (!tmpl_at_op(p, ':') && !tmpl_at_op(p, ']') && !(*part[i] = tmpl_expr(p))) return NULL;
        if (i == 2 || !tmpl_take_op(p, ':')) break;
        n->kind = TN_SLICE;
    }
    if (n->kind == TN_ITEM && !n->b) return tmpl_expected(p, "subscript");
    return tmpl_need_op(p, ']') ? n : NULL;
}

static tmpl_node *tmpl_call_of(tmpl_parser *p, tmpl_node *callee) {
    tmpl_node *n = tmpl_new(p, TN_CALL, p->tok++->line);
    n->a = callee;
    return tmpl_arguments(p, &n->b) ? n : NULL;
}

static tmpl_node *tmpl_postfix(tmpl_parser *p, tmpl_node *n) {
    while (n) {
        if (tmpl_at_op(p, '[')) {
            if (!tmpl_deeper(p)) return NULL;
            n = tmpl_subscript(p, n);
            p->depth--;
        } else if (tmpl_at_op(p, '(')) {
            if (!tmpl_deeper(p)) return NULL;
            n = tmpl_call_of(p, n);
            p->depth--;
        } else if (tmpl_at_op(p, '.')) {
            tmpl_node *of = n;
            int line = p->tok++->line;
            if (p->tok->type != TT_NAME && p->tok->type != TT_INT) return tmpl_expected(p, "attribute name");
            n = tmpl_new(p, p->tok->type == TT_INT ? TN_ITEM : TN_ATTR, line);
            n->a = of;
            if (n->kind == TN_ATTR) n->s = p->tok++->s;
            else if (!(n->b = tmpl_int_const(p))) return NULL;
        } else {
            break;
        }
    }
    return n;
}

/* The name (dots allowed) and arguments of a filter or test over `of`. */
static tmpl_node *tmpl_applied(tmpl_parser *p, int kind, tmpl_node *of) {
    if (p->tok->type != TT_NAME) return tmpl_expected(p, kind == TN_FILTER ? "filter name" : "test name");
    tmpl_node *n = tmpl_new(p, kind, p->tok->line);
    n->a = of;
    n->s = p->tok++->s;
    if (tmpl_at_op(p, '.')) return tmpl_expected(p, "known filter or test");
    n->next_call = p->t->calls;
    p->t->calls = n;
    if (!tmpl_at_op(p, '(')) return n;
    if (!tmpl_deeper(p)) return NULL;
    p->tok++;
    bool ok = tmpl_arguments(p, &n->b);
    p->depth--;
    return ok ? n : NULL;
}

/* a is [not] name [argument]: one argument may stand without parentheses. */
static tmpl_node *tmpl_test(tmpl_parser *p, tmpl_node *of) {
    bool negated = tmpl_take_word(p, "not");
    tmpl_node *n = tmpl_applied(p, TN_TEST, of);
    if (!n) return NULL;
    n->op = negated;
    if (p->tok[-1].type == TT_OP && p->tok[-1].op == ')') return n; /* had parentheses */
    bool word = p->tok->type == TT_NAME && !tmpl_at_word(p, "else") && !tmpl_at_word(p, "or") && !tmpl_at_word(p, "and");
    bool literal = p->tok->type == TT_STRING || p->tok->type == TT_INT || p->tok->type == TT_FLOAT || tmpl_at_op(p, '[') ||
                   tmpl_at_op(p, '{');
    if (tmpl_at_word(p, "is")) return tmpl_expected(p, "one test only");
    if ((word || literal) && !(n->b = tmpl_postfix(p, tmpl_primary(p)))) return NULL;
    return n;
}

static tmpl_node *tmpl_unary(tmpl_parser *p, bool with_filters) {
    tmpl_node *n;
    if (tmpl_at_op(p, '-') || tmpl_at_op(p, '+')) {
        n = tmpl_new(p, TN_SIGN, p->tok->line);
        n->op = p->tok++->op;
        if (!tmpl_deeper(p)) return NULL;
        n->a = tmpl_unary(p, false);
        p->depth--;
        if (!n->a) return NULL;
    } else {
        n = tmpl_primary(p);
    }
    n = tmpl_postfix(p, n);
    while (n && with_filters) {
        if (tmpl_take_op(p, '|')) n = tmpl_applied(p, TN_FILTER, n);
        else if (tmpl_take_word(p, "is")) n = tmpl_test(p, n);
        else if (tmpl_at_op(p, '(')) n = tmpl_postfix(p, n);
        else break;
    }
    return n;
}

/* Levels of binding, loosest first. Jinja's own order: ~ binds tighter than + and looser than *. */
enum { TL_OR, TL_AND, TL_NOT, TL_COMPARE, TL_ADD, TL_CONCAT, TL_MUL, TL_POW, TL_UNARY };

/* The two-operand operator of this level at the next token (taken), or 0. */
static int tmpl_operator(tmpl_parser *p, int level) {
    static const uint16_t signs[][5] = {[TL_ADD] = {'+', '-'}, [TL_CONCAT] = {'~'},
        [TL_MUL] = {'*', '/', OP2('/', '/'), '%'}, [TL_POW] = {OP2('*', '*')}};
    if (level == TL_OR) return tmpl_take_word(p, "or") ? 'o' : 0;
    if (level == TL_AND) return tmpl_take_word(p, "and") ? 'a' : 0;
    if (level == TL_COMPARE) {
        static const uint16_t compare[] = {'<', '>', OP2('<', '='), OP2('>', '='), OP2('=', '='), OP2('!', '=')};
        for (int i = 0; i < COUNT(compare); i++)
            if (tmpl_take_op(p, compare[i])) return compare[i];
        if (tmpl_take_word(p, "in")) return 'i';
        if (!tmpl_at_word(p, "not") || p->tok[1].type != TT_NAME || !str_is(p->tok[1].s, "in")) return 0;
        return p->tok += 2, 'n';
    }
    for (const uint16_t *s = signs[level]; *s; s++)
        if (tmpl_take_op(p, *s)) return *s;
    return 0;
}

static tmpl_node *tmpl_level(tmpl_parser *p, int level) {
    int line = p->tok->line, op;
    if (level == TL_UNARY) return tmpl_unary(p, true);
    if (level == TL_NOT) {
        if (!tmpl_take_word(p, "not")) return tmpl_level(p, level + 1);
        tmpl_node *n = tmpl_new(p, TN_NOT, line);
        if (!tmpl_deeper(p)) return NULL;
        n->a = tmpl_level(p, level);
        p->depth--;
        return n->a ? n : NULL;
    }
    tmpl_node *left = tmpl_level(p, level + 1), *n = NULL, **tail = NULL;
    while (left && (op = tmpl_operator(p, level)) != 0) {
        tmpl_node *right = tmpl_level(p, level + 1);
        if (!right) return NULL;
        if (level == TL_CONCAT || level == TL_COMPARE) { /* all operands in one node */
            tmpl_node *part = right;
            if (!n) {
                n = tmpl_new(p, level == TL_CONCAT ? TN_CONCAT : TN_COMPARE, line);
                if (level == TL_CONCAT) n->b = left, tail = &left->next;
                else n->a = left, tail = &n->b;
            }
            if (level == TL_COMPARE) part = tmpl_new(p, TN_OPERAND, line), part->op = (uint16_t)op, part->a = right;
            *tail = part;
            tail = &part->next;
            continue;
        }
        n = tmpl_new(p, TN_BINARY, line);
        n->op = (uint16_t)op, n->a = left, n->b = right;
        left = n;
    }
    return !left ? NULL : n ? n : left;
}

static tmpl_node *tmpl_no_ternary(tmpl_parser *p) { return tmpl_level(p, TL_OR); }

static tmpl_node *tmpl_expr(tmpl_parser *p) {
    if (!tmpl_deeper(p)) return NULL;
    tmpl_node *n = tmpl_level(p, TL_OR);
    while (n && tmpl_at_word(p, "if")) {
        tmpl_node *c = tmpl_new(p, TN_COND, p->tok++->line);
        c->b = n;
        c->a = tmpl_level(p, TL_OR);
        n = c->a ? c : NULL;
        if (n && tmpl_take_word(p, "else") && !(c->c = tmpl_expr(p))) n = NULL;
    }
    p->depth--;
    return n;
}

/* ---- Statements ---- */

static tmpl_node *tmpl_one_target(tmpl_parser *p) {
    tmpl_node *n;
    if (tmpl_at_op(p, '(')) {
        if (!tmpl_deeper(p)) return NULL;
        p->tok++;
        n = tmpl_tuple(p, tmpl_one_target, true);
        p->depth--;
        return n && tmpl_need_op(p, ')') ? n : NULL;
    }
    if (p->tok->type == TT_NAME && tmpl_word_const(p->tok->s).type) return tmpl_expected(p, "name to assign to");
    n = tmpl_name(p, TN_NAME);
    if (n && tmpl_take_op(p, '.')) {
        if (p->tok->type != TT_NAME) return tmpl_expected(p, "attribute name");
        n->kind = TN_NSREF;
        n->s = p->tok++->s;
    }
    return n;
}
static tmpl_node *tmpl_target(tmpl_parser *p) { return tmpl_tuple(p, tmpl_one_target, false); }

static bool tmpl_no_attributes(tmpl_parser *p, const tmpl_node *target) { /* only set may write to a namespace */
    if (target->kind == TN_NSREF) return tmpl_syntax(p->e, target->line, "cannot assign to an attribute here");
    for (const tmpl_node *it = target->kind == TN_TUPLE ? target->b : NULL; it; it = it->next)
        if (!tmpl_no_attributes(p, it)) return false;
    return true;
}

static const char *const tmpl_end_if[] = {"elif", "else", "endif", NULL}, *const tmpl_end_for[] = {"else", "endfor", NULL},
                  *const tmpl_only_endif[] = {"endif", NULL}, *const tmpl_only_endfor[] = {"endfor", NULL},
                  *const tmpl_end_set[] = {"endset", NULL}, *const tmpl_end_filter[] = {"endfilter", NULL},
                  *const tmpl_end_macro[] = {"endmacro", NULL}, *const tmpl_end_call[] = {"endcall", NULL},
                  *const tmpl_end_with[] = {"endwith", NULL}, *const tmpl_end_generation[] = {"endgeneration", NULL};

/* The end of a tag and the body up to the tag that ends it, whose name is taken too. */
static bool tmpl_block(tmpl_parser *p, const char *const *ends, tmpl_node **body) {
    tmpl_take_op(p, ':');
    return tmpl_need_close(p) && tmpl_body(p, ends, body);
}

static tmpl_node *tmpl_if(tmpl_parser *p, int line) {
    tmpl_node *first = NULL, **tail = &first;
    for (p->n_conditions++;; tail = &(*tail)->c) {
        *tail = tmpl_new(p, TN_IF, line);
        if (!((*tail)->a = tmpl_tuple(p, tmpl_no_ternary, false))) return NULL;
        if (!tmpl_block(p, tmpl_end_if, &(*tail)->b)) return NULL;
        line = p->tok[-1].line;
        if (str_is(p->tok[-1].s, "elif")) continue;
        if (str_is(p->tok[-1].s, "else")) {
            tmpl_node *other = (*tail)->c = tmpl_new(p, TN_IF, line);
            if (!tmpl_block(p, tmpl_only_endif, &other->b)) return NULL;
        }
        p->n_conditions--;
        return first;
    }
}

static tmpl_node *tmpl_for(tmpl_parser *p, int line) {
    tmpl_node *n = tmpl_new(p, TN_FOR, line);
    if (!(n->a = tmpl_target(p)) || !tmpl_no_attributes(p, n->a)) return NULL;
    if (!tmpl_take_word(p, "in")) return tmpl_expected(p, "'in'");
    if (!(n->b = tmpl_tuple(p, tmpl_no_ternary, false))) return NULL;
    if (tmpl_take_word(p, "if") && !(n->d = tmpl_expr(p))) return NULL;
    if (tmpl_at_word(p, "recursive")) return tmpl_syntax(p->e, line, "recursive loops are not supported"), NULL;
    p->n_loops++;
    bool ok = tmpl_block(p, tmpl_end_for, &n->c);
    p->n_loops--;
    if (ok && str_is(p->tok[-1].s, "else")) ok = tmpl_block(p, tmpl_only_endfor, &n->e);
    return ok ? n : NULL;
}

/* Filters over what a block collects: "| name(args) | ..." or, in a filter tag, "name ...". */
static tmpl_node *tmpl_block_filters(tmpl_parser *p, bool first) {
    tmpl_node *n = tmpl_new(p, TN_CAPTURED, p->tok->line);
    while (n && (first || tmpl_take_op(p, '|'))) n = tmpl_applied(p, TN_FILTER, n), first = false;
    return n;
}

/* A body in which break and continue cannot mean a loop outside of it. */
static bool tmpl_closed_block(tmpl_parser *p, const char *const *ends, tmpl_node **body) {
    int loops = p->n_loops;
    p->n_loops = 0;
    bool ok = tmpl_block(p, ends, body);
    p->n_loops = loops;
    return ok;
}

static tmpl_node *tmpl_set(tmpl_parser *p, int line) {
    tmpl_node *n = tmpl_new(p, TN_SET, line);
    if (!(n->a = tmpl_target(p))) return NULL;
    if (tmpl_take_op(p, '=')) return (n->b = tmpl_tuple(p, tmpl_expr, false)) ? n : NULL;
    n->kind = TN_SETBLOCK;
    return (n->b = tmpl_block_filters(p, false)) && tmpl_closed_block(p, tmpl_end_set, &n->c) ? n : NULL;
}

static bool tmpl_params(tmpl_parser *p, tmpl_node **params) {
    bool defaults = false;
    if (!tmpl_need_op(p, '(')) return false;
    for (tmpl_node **tail = params; !tmpl_take_op(p, ')'); tail = &(*tail)->next) {
        if (tail != params && !tmpl_take_op(p, ',')) return tmpl_expected(p, "',' or ')'");
        if (!(*tail = tmpl_name(p, TN_PARAM))) return false;
        if (str_is((*tail)->s, "caller") && !tmpl_at_op(p, '=')) return tmpl_expected(p, "a default for caller");
        if (tmpl_take_op(p, '=') ? !((*tail)->a = tmpl_expr(p)) : defaults && !tmpl_expected(p, "a default value"))
            return false;
        defaults |= (*tail)->a != NULL;
    }
    return true;
}

static tmpl_node *tmpl_macro_def(tmpl_parser *p, int line) {
    tmpl_node *n = tmpl_name(p, TN_MACRO);
    if (n) n->line = line;
    return n && tmpl_params(p, &n->b) && tmpl_closed_block(p, tmpl_end_macro, &n->c) ? n : NULL;
}

static tmpl_node *tmpl_call_block(tmpl_parser *p, int line) {
    tmpl_node *n = tmpl_new(p, TN_CALLER, line);
    if (tmpl_at_op(p, '(') && !tmpl_params(p, &n->b)) return NULL;
    if (!(n->a = tmpl_expr(p))) return NULL;
    if (n->a->kind != TN_CALL) return tmpl_syntax(p->e, line, "call needs a call"), NULL;
    return tmpl_closed_block(p, tmpl_end_call, &n->c) ? n : NULL;
}

static tmpl_node *tmpl_with(tmpl_parser *p, int line) {
    tmpl_node *n = tmpl_new(p, TN_WITH, line);
    for (tmpl_node **tail = &n->b; p->tok->type != TT_CLOSE; tail = &(*tail)->next) {
        if (n->b && !tmpl_take_op(p, ',')) return tmpl_expected(p, "','");
        tmpl_node *set = *tail = tmpl_new(p, TN_SET, line);
        if (!(set->a = tmpl_one_target(p)) || !tmpl_no_attributes(p, set->a)) return NULL;
        if (!tmpl_need_op(p, '=') || !(set->b = tmpl_expr(p))) return NULL;
    }
    return tmpl_block(p, tmpl_end_with, &n->c) ? n : NULL;
}

static tmpl_node *tmpl_statement(tmpl_parser *p) { /* behind "{%" */
    int line = p->tok->line;
    str word = p->tok->s;
    if (p->tok->type != TT_NAME) return tmpl_expected(p, "statement");
    p->tok++;
    if (str_is(word, "if")) return tmpl_if(p, line);
    if (str_is(word, "for")) return tmpl_for(p, line);
    if (str_is(word, "set")) return tmpl_set(p, line);
    if (str_is(word, "macro")) return tmpl_macro_def(p, line);
    if (str_is(word, "call")) return tmpl_call_block(p, line);
    if (str_is(word, "with")) return tmpl_with(p, line);
    tmpl_node *n = tmpl_new(p, TN_WITH, line);
    if (str_is(word, "generation")) return tmpl_closed_block(p, tmpl_end_generation, &n->c) ? n : NULL;
    if (str_is(word, "filter")) {
        n->kind = TN_FILTERS;
        return (n->b = tmpl_block_filters(p, true)) && tmpl_closed_block(p, tmpl_end_filter, &n->c) ? n : NULL;
    }
    if (str_is(word, "break") || str_is(word, "continue")) {
        n->kind = str_is(word, "break") ? TN_BREAK : TN_CONTINUE;
        return p->n_loops ? n : (tmpl_syntax(p->e, line, "%.*s outside of a loop", STRF(word)), NULL);
    }
    return tmpl_syntax(p->e, line, "tag '%.*s' is not supported", STRF(word)), NULL;
}

/* Statements up to a tag whose name is in `ends` (taken, with no ends: up to the end of the template). */
static bool tmpl_body(tmpl_parser *p, const char *const *ends, tmpl_node **body) {
    int opened = p->tok->line;
    if (!tmpl_deeper(p)) return false;
    for (tmpl_node **tail = body;; tail = &(*tail)->next) {
        int type = p->tok->type;
        if (type == TT_END && ends) return tmpl_syntax(p->e, opened, "the template ends before '%s'", ends[0]);
        if (type == TT_END) return p->depth--, true;
        if (type == TT_DATA) {
            *tail = tmpl_new(p, TN_TEXT, p->tok->line);
            (*tail)->s = p->tok++->s;
            continue;
        }
        p->tok++;
        if (type == TT_PRINT) {
            *tail = tmpl_new(p, TN_PRINT, p->tok->line);
            if (!((*tail)->a = tmpl_tuple(p, tmpl_expr, false)) || !tmpl_need_close(p)) return false;
            continue;
        }
        for (int i = 0; ends && ends[i]; i++)
            if (tmpl_take_word(p, ends[i])) return p->depth--, true;
        if (!(*tail = tmpl_statement(p)) || !tmpl_need_close(p)) return false;
    }
}

static void tmpl_del(tmpl *t) {
    if (!t) return;
    arena_free(&t->a);
    free(t->names);
    free(t);
}

/* The source as the tree sees it: line ends are "\n", one at the very end is dropped, bytes that are not UTF-8 become
 * U+FFFD. */
static str tmpl_source(arena *a, str s) {
    buf b = {0};
    for (size_t i = 0; i < s.n;) {
        int n = utf8_len(s.p + i, s.p + s.n);
        if (s.p[i] == '\r') {
            buf_char(&b, '\n');
            i += i + 1 < s.n && s.p[i + 1] == '\n' ? 2 : 1;
            continue;
        }
        if (n) buf_put(&b, s.p + i, (size_t)n);
        else buf_c(&b, "\xEF\xBF\xBD");
        i += (size_t)MAX(n, 1);
    }
    if (b.n && b.p[b.n - 1] == '\n') b.n--;
    str clean = arena_str(a, buf_view(&b));
    buf_free(&b);
    return clean;
}

/* Source to tree, filters and tests not bound yet. */
static int tmpl_parse_tree(tmpl **out, str source, toka_err *e) {
    *out = NULL;
    if (source.n > TMPL_MAX_SOURCE)
        return fail(e, TOKA_E_INPUT, "template line 1: %zu bytes of source, at most %d", source.n, TMPL_MAX_SOURCE);
    tmpl *t = mem_zalloc(sizeof *t);
    tmpl_lexer x = {.line = 1, .a = &t->a, .e = e};
    x.src = tmpl_source(&t->a, source);
    tmpl_parser p = {.t = t, .e = e};
    bool ok = tmpl_lex(&x);
    p.tok = x.tokens;
    ok = ok && tmpl_body(&p, NULL, &t->body);
    ok = ok && (p.tok->type == TT_END || tmpl_expected(&p, "end of template"));
    free(x.tokens);
    free(p.name_slots);
    if (ok) return *out = t, 0;
    tmpl_del(t);
    return e->code;
}

/* ===========================================================================
 * MARK: 8. Chat template: evaluation [pure]
 * tmpl_render walks the tree of chapter 7 with a context (a JSON object) and appends the text to a buf; results are those
 * of Python's Jinja2 3.1 as Hugging Face's apply_chat_template sets it up, byte for byte, and where Jinja raises, this
 * fails.
 *
 * Order of the chapter: walking and attributes; scopes; filters (JSON, text, numbers, lists); tests; methods; functions;
 * calls; operators; expressions; statements; loops; tmpl_parse and tmpl_render. A new filter, test, method or function is
 * one function and one line in its table.
 *
 * Always: templates are not trusted. Every node evaluated and every few bytes or elements touched are steps against
 * limits.steps; recursion of any kind is counted against limits.depth; no single text grows beyond limits.output_bytes; all
 * values together stay under TMPL_MEMORY. Functions return false after *e was filled in; the first error ends the render.
 * Values live in an arena that goes when the render ends. The context's strings are borrowed, not copied.
 *
 * Not as in Python: map, select and the like work at once, not when walked; letter case is known for Latin, Greek,
 * Cyrillic, Armenian and full-width letters.
 * =========================================================================== */

typedef struct tmpl_var {
    int id;
    tval v;
} tmpl_var;

typedef struct tmpl_scope { /* variables of a loop body, a macro, a with or call block */
    struct tmpl_scope *outer;
    tmpl_var *vars;
    int n, cap;
} tmpl_scope;

typedef struct tmpl_macro {
    const tmpl_node *node; /* TN_MACRO or TN_CALLER */
    tmpl_scope *scope;     /* where it was defined */
} tmpl_macro;

typedef struct tmpl_loop {
    tmpl_items *items;
    size_t at;             /* next candidate in items */
    const tmpl_node *node; /* TN_FOR */
    tmpl_scope *scope;     /* outside of the loop */
    int64_t index0;
    bool filtered;      /* node->d was already applied to items from `at` on */
    tval before, now, after; /* TV_ABSENT: none, or (after) not looked at yet */
    tval changed;       /* what loop.changed() saw last */
} tmpl_loop;

typedef struct tmpl_method {
    tval self;
    const struct tmpl_fn *fn;
} tmpl_method;

enum { TMPL_ARGS = 5 }; /* named parameters of a filter, test, method or function at most */

typedef struct tmpl_args { /* of one call; self is the filtered value or the method's object */
    tval self;
    tval *pos;   /* [n_pos] as written */
    tval *named; /* [n_named] given as name=value, with their names */
    str *names;
    int n_pos, n_named;
    tval a[TMPL_ARGS]; /* bound to the parameters; TV_ABSENT: not given */
    const struct tmpl_fn *fn;
} tmpl_args;

typedef struct tmpl_fn {
    const char *name;
    const char *params; /* names, separated by spaces; "*": takes pos and named as they are */
    int need;           /* that many of them must be given */
    bool (*run)(tmpl_run *r, tmpl_args *c, tval *out);
} tmpl_fn;

static bool tmpl_eval(tmpl_run *r, const tmpl_node *n, tval *out);
static bool tmpl_call_macro(tmpl_run *r, tmpl_args *c, const tmpl_macro *m, tval caller, tval *out);
static bool tmpl_apply(tmpl_run *r, const tmpl_fn *fn, tmpl_args *c, tval *out);

/* ---- Walking and attributes ---- */

/* What `for` walks in v, as a list; an iterator is used up by it. */
static bool tmpl_walk(tmpl_run *r, tval v, tmpl_items **out) {
    size_t n = 0;
    switch (v.type) {
    case TV_LIST: case TV_TUPLE: case TV_VIEW: *out = v.list; return true;
    case TV_UNDEFINED:
        if (v.flag == TMPL_UNSAFE) return tmpl_undefined(r, v);
        return (*out = tmpl_new_items(r, 0)) != NULL;
    case TV_ITER:
        n = v.iter->items->n - v.iter->at;
        if (!(*out = tmpl_new_items(r, n))) return false;
        memcpy((*out)->v, v.iter->items->v + v.iter->at, n * sizeof(tval));
        v.iter->at = v.iter->items->n;
        return true;
    case TV_DICT:
        if (!(*out = tmpl_new_items(r, v.dict->n))) return false;
        for (size_t i = 0; i < v.dict->n; i++) (*out)->v[i] = v.dict->kv[2 * i];
        return true;
    case TV_STR:
        if (!(*out = tmpl_new_items(r, (size_t)tmpl_len_cp(tv_text(v))))) return false;
        for (size_t i = 0, k, at = 0; i < (*out)->n; i++, at += k) {
            k = tmpl_cp_bytes((str){v.s + at, v.n - at}, 1);
            (*out)->v[i] = tv_str((str){v.s + at, k}); /* never marked safe, as in Python */
        }
        return true;
    default: return tmpl_fail(r, "'%s' object is not iterable", tmpl_type_name(v.type));
    }
}

static bool tmpl_new_iter(tmpl_run *r, tmpl_items *items, tval *out) {
    tmpl_iter *it = items ? tmpl_alloc(r, 1, sizeof *it) : NULL;
    if (!it) return false;
    *it = (tmpl_iter){.items = items};
    *out = (tval){.type = TV_ITER, .iter = it};
    return true;
}

/* len(v), -1 if it has none. */
static int64_t tmpl_length(tval v) {
    switch (v.type) {
    case TV_UNDEFINED: return 0;
    case TV_STR: return tmpl_len_cp(tv_text(v));
    case TV_LIST: case TV_TUPLE: case TV_VIEW: return (int64_t)v.list->n;
    case TV_DICT: return (int64_t)v.dict->n;
    default: return -1;
    }
}

static bool tmpl_loop_attr(tmpl_run *r, tmpl_loop *l, str name, tval *out);
static const tmpl_fn *tmpl_method_of(int type, str name);
static bool tmpl_refused_method(int type, str name);

/* The attribute itself, dict members apart: a method, an attribute of a loop, namespace or macro. *out TV_ABSENT: none. */
static bool tmpl_own_attr(tmpl_run *r, tval v, str name, tval *out) {
    *out = (tval){0};
    const tmpl_fn *fn = tmpl_method_of(v.type, name);
    if (fn) {
        tmpl_method *m = tmpl_alloc(r, 1, sizeof *m);
        if (!m) return false;
        *m = (tmpl_method){.self = v, .fn = fn};
        *out = (tval){.type = TV_METHOD, .method = m};
        return true;
    }
    if (tmpl_refused_method(v.type, name) || str_starts(name, STR("__")))
        return *out = tv_undefined(name, TMPL_UNSAFE), true;
    if (v.type == TV_LOOP) return tmpl_loop_attr(r, v.loop, name, out);
    if (v.type == TV_NAMESPACE) {
        bool ok = true;
        const tval *found = tmpl_dict_find(r, v.dict, tv_str(name), &ok);
        if (found) *out = *found;
        return ok;
    }
    if (v.type == TV_MACRO && str_is(name, "name")) *out = tv_str(v.macro->node->s);
    return true;
}

/* v[key] as Python has it; *out TV_ABSENT: there is no such element. */
static bool tmpl_own_item(tmpl_run *r, tval v, tval key, tval *out) {
    *out = (tval){0};
    bool ok = true;
    if (v.type == TV_DICT) {
        if (key.type == TV_LIST || key.type == TV_DICT) return true; /* not hashable: never a key */
        const tval *found = tmpl_dict_find(r, v.dict, key, &ok);
        if (found) *out = *found;
        return ok;
    }
    if (!tmpl_is_integer(key)) return true;
    int64_t i = tmpl_integer(key);
    if (v.type == TV_LIST || v.type == TV_TUPLE || (v.type == TV_VIEW && v.flag == VIEW_RANGE)) {
        if (i < 0) i += (int64_t)v.list->n;
        if (i >= 0 && i < (int64_t)v.list->n) *out = v.list->v[i];
    } else if (v.type == TV_STR) {
        str s = tv_text(v);
        int64_t n = tmpl_len_cp(s);
        if (!tmpl_work(r, s.n)) return false;
        if (i < 0) i += n;
        if (i < 0 || i >= n) return true;
        size_t from = tmpl_cp_bytes(s, i);
        *out = tv_str((str){s.p + from, tmpl_cp_bytes(str_sub(s, from, s.n), 1)});
        out->flag = v.flag;
    }
    return true;
}

/* v.name: the attribute, else the element, else undefined. */
static bool tmpl_attr(tmpl_run *r, tval v, str name, tval *out) {
    if (v.type == TV_UNDEFINED) return tmpl_undefined(r, v);
    if (!tmpl_own_attr(r, v, name, out)) return false;
    if (!out->type && !tmpl_own_item(r, v, tv_str(name), out)) return false;
    if (!out->type) *out = tv_undefined(name, v.type);
    return true;
}

/* v[key]: the element, else for a name the attribute, else undefined. */
static bool tmpl_item(tmpl_run *r, tval v, tval key, tval *out) {
    tval name;
    if (v.type == TV_UNDEFINED) return tmpl_undefined(r, v);
    if (!tmpl_own_item(r, v, key, out)) return false;
    if (!out->type && key.type == TV_STR && !tmpl_own_attr(r, v, tv_text(key), out)) return false;
    if (out->type) return true;
    if (key.type == TV_STR || key.type <= TV_INT) {
        if (!tmpl_to_text(r, key, &name)) return false;
        *out = tv_undefined(tv_text(name), v.type);
    } else {
        *out = tv_undefined(STR("?"), v.type);
    }
    return true;
}

/* "a.b.0" of v, as attribute= of map, sort and others names it. A part that is missing becomes `otherwise`, if there is
 * one. */
static bool tmpl_attr_path(tmpl_run *r, tval v, tval path, tval otherwise, tval *out) {
    *out = v;
    if (path.type == TV_INT) return tmpl_item(r, v, path, out);
    if (path.type != TV_STR) return path.type <= TV_NONE ? true : tmpl_bad_type(r, "attribute=", path);
    str s = tv_text(path);
    for (size_t from = 0; from <= s.n;) {
        ptrdiff_t dot = str_find(s, STR("."), from);
        str part = str_sub(s, from, dot < 0 ? s.n : (size_t)dot);
        int64_t i = 0;
        bool number = part.n > 0 && part.n < 10;
        for (size_t k = 0; number && k < part.n; k++)
            number = isdigit((unsigned char)part.p[k]), i = i * 10 + part.p[k] - '0';
        if (!tmpl_item(r, *out, number ? tv_int(i) : tv_str(part), out)) return false;
        if (out->type == TV_UNDEFINED && otherwise.type > TV_NONE) *out = otherwise;
        from += part.n + 1;
    }
    return true;
}

/* ---- Scopes ---- */

static bool tmpl_get_var(tmpl_run *r, int id, tval *out) { /* *out TV_ABSENT: no such variable */
    for (const tmpl_scope *s = r->scope; s; s = s->outer) {
        for (int i = 0; i < s->n; i++)
            if (s->vars[i].id == id) return *out = s->vars[i].v, true;
        if (!tmpl_work(r, (size_t)s->n)) return false;
    }
    return *out = r->globals[id], true;
}

static bool tmpl_set_var(tmpl_run *r, int id, tval v) {
    tmpl_scope *s = r->scope;
    if (!s) return r->globals[id] = v, true;
    for (int i = 0; i < s->n; i++)
        if (s->vars[i].id == id) return s->vars[i].v = v, tmpl_work(r, (size_t)i);
    if (s->n == s->cap) {
        int cap = MAX(s->cap * 2, 4);
        tmpl_var *vars = tmpl_alloc(r, (size_t)cap, sizeof *vars);
        if (!vars) return false;
        if (s->n) memcpy(vars, s->vars, (size_t)s->n * sizeof *vars);
        s->vars = vars, s->cap = cap;
    }
    s->vars[s->n++] = (tmpl_var){id, v};
    return true;
}

static tmpl_scope *tmpl_push_scope(tmpl_run *r, tmpl_scope *outer) {
    tmpl_scope *s = tmpl_alloc(r, 1, sizeof *s);
    if (s) *s = (tmpl_scope){.outer = outer}, r->scope = s;
    return s;
}

/* ---- JSON ---- */

typedef struct tmpl_json_style {
    bool ascii, sort_keys, lines; /* lines: every element on its own line */
    str indent, comma, colon;     /* indent: of one level */
} tmpl_json_style;

static bool tmpl_json(tmpl_run *r, buf *b, tval v, const tmpl_json_style *style, int level);
static bool tmpl_sort(tmpl_run *r, tmpl_items *keys, tmpl_items *values, bool reverse, bool equal_first);

static bool tmpl_json_str(tmpl_run *r, buf *b, str s, bool ascii) {
    if (s.n > r->max_bytes / 6 || b->n > r->max_bytes) return tmpl_too_long(r);
    if (!tmpl_work(r, s.n)) return false;
    buf_char(b, '"');
    for (size_t i = 0, from; i < s.n;) {
        static const char named[] = "\"\\\n\r\t\f\b", as[] = "\"\\nrtfb";
        from = i;
        uint32_t c = tmpl_cp(s, &i);
        const char *k = c && c < 0x80 ? strchr(named, (int)c) : NULL;
        if (k) buf_char(b, '\\'), buf_char(b, as[k - named]);
        else if (c < 0x20 || (ascii && c >= 0x7F && c < 0x10000)) buf_printf(b, "\\u%04x", c);
        else if (ascii && c >= 0x10000)
            buf_printf(b, "\\u%04x\\u%04x", 0xD800 + ((c - 0x10000) >> 10), 0xDC00 + (c & 0x3FF));
        else buf_put(b, s.p + from, i - from);
    }
    buf_char(b, '"');
    return true;
}

static bool tmpl_json_float(buf *b, double f) {
    if (isfinite(f)) return tmpl_float_text(b, f), true;
    return buf_c(b, isnan(f) ? "NaN" : f < 0 ? "-Infinity" : "Infinity"), true;
}

static bool tmpl_json_key(tmpl_run *r, buf *b, tval key, const tmpl_json_style *style) {
    if (key.type == TV_STR) return tmpl_json_str(r, b, tv_text(key), style->ascii);
    if (key.type != TV_NONE && !tmpl_is_number(key)) return tmpl_bad_type(r, "a JSON member name", key);
    buf_char(b, '"');
    bool ok = tmpl_json(r, b, key, style, 0);
    buf_char(b, '"');
    return ok;
}

static bool tmpl_json_line(tmpl_run *r, buf *b, const tmpl_json_style *style, int level) {
    if (!style->lines) return true;
    if (!tmpl_put_c(r, b, "\n")) return false;
    for (int i = 0; i < level; i++)
        if (!tmpl_put(r, b, style->indent)) return false;
    return true;
}

static bool tmpl_json_members(tmpl_run *r, buf *b, const tmpl_dict *d, const tmpl_json_style *style, int level) {
    tmpl_items *keys = tmpl_new_items(r, d->n), *values = keys ? tmpl_new_items(r, d->n) : NULL;
    if (!values) return false;
    for (size_t i = 0; i < d->n; i++) keys->v[i] = d->kv[2 * i], values->v[i] = d->kv[2 * i + 1];
    if (style->sort_keys && !tmpl_sort(r, keys, values, false, true)) return false;
    for (size_t i = 0; i < d->n; i++)
        if ((i && !tmpl_put(r, b, style->comma)) || !tmpl_json_line(r, b, style, level) ||
            !tmpl_json_key(r, b, keys->v[i], style) || !tmpl_put(r, b, style->colon) ||
            !tmpl_json(r, b, values->v[i], style, level))
            return false;
    return true;
}

/* json.dumps(v) as Hugging Face's tojson calls it. */
static bool tmpl_json(tmpl_run *r, buf *b, tval v, const tmpl_json_style *style, int level) {
    if (!tmpl_work(r, 1)) return false;
    switch (v.type) {
    case TV_NONE: return tmpl_put_c(r, b, "null");
    case TV_BOOL: return tmpl_put_c(r, b, v.b ? "true" : "false");
    case TV_INT: return tmpl_put_value(r, b, v, false);
    case TV_FLOAT: return tmpl_json_float(b, v.f);
    case TV_STR: return tmpl_json_str(r, b, tv_text(v), style->ascii);
    case TV_LIST: case TV_TUPLE: case TV_DICT: break;
    default: return tmpl_fail(r, "tojson: a value of type '%s' has no JSON", tmpl_type_name(v.type));
    }
    bool dict = v.type == TV_DICT, ok = true;
    size_t n = dict ? v.dict->n : v.list->n;
    if (!tmpl_enter(r)) return false;
    buf_char(b, dict ? '{' : '[');
    if (dict) ok = tmpl_json_members(r, b, v.dict, style, level + 1);
    for (size_t i = 0; !dict && ok && i < n; i++)
        ok = (!i || tmpl_put(r, b, style->comma)) && tmpl_json_line(r, b, style, level + 1) &&
             tmpl_json(r, b, v.list->v[i], style, level + 1);
    if (ok && n) ok = tmpl_json_line(r, b, style, level);
    buf_char(b, dict ? '}' : ']');
    r->depth++;
    return ok;
}

static bool tmpl_f_tojson(tmpl_run *r, tmpl_args *c, tval *out) { /* ensure_ascii indent separators sort_keys */
    tmpl_json_style style = {.ascii = tmpl_true(c->a[0]), .sort_keys = tmpl_true(c->a[3]), .comma = STR(", "),
        .colon = STR(": ")};
    static const char spaces[] = "                                ";
    if (c->a[1].type > TV_NONE) {
        style.lines = true;
        style.comma = STR(",");
        if (c->a[1].type == TV_STR) style.indent = tv_text(c->a[1]);
        else if (!tmpl_is_integer(c->a[1])) return tmpl_bad_type(r, "indent=", c->a[1]);
        else if (tmpl_integer(c->a[1]) > (int64_t)sizeof spaces - 1)
            return tmpl_fail(r, "tojson: indent above %zu", sizeof spaces - 1);
        else style.indent = (str){spaces, (size_t)MAX(tmpl_integer(c->a[1]), 0)};
    }
    if (c->a[2].type > TV_NONE) {
        tval s = c->a[2];
        if ((s.type != TV_LIST && s.type != TV_TUPLE) || s.list->n != 2 || s.list->v[0].type != TV_STR ||
            s.list->v[1].type != TV_STR)
            return tmpl_fail(r, "tojson: separators is a pair of texts");
        style.comma = tv_text(s.list->v[0]), style.colon = tv_text(s.list->v[1]);
    }
    buf b = {0};
    return tmpl_take(r, &b, tmpl_json(r, &b, c->self, &style, 0), out);
}

/* ---- Text filters ---- */

/* The other case of a letter of the scripts that have two, itself for all else. */
static uint32_t tmpl_lower_cp(uint32_t c) {
    if (c < 0x80) return c >= 'A' && c <= 'Z' ? c + 32 : c;
    if (c >= 0xC0 && c <= 0xDE) return c == 0xD7 ? c : c + 32;
    if ((c >= 0x100 && c <= 0x137 && c != 0x130) || (c >= 0x14A && c <= 0x177) || (c >= 0x1E00 && c <= 0x1E95) ||
        (c >= 0x1EA0 && c <= 0x1EFF) || (c >= 0x460 && c <= 0x481) || (c >= 0x48A && c <= 0x4BF) ||
        (c >= 0x4D0 && c <= 0x52F))
        return c | 1;
    if ((c >= 0x139 && c <= 0x148) || (c >= 0x179 && c <= 0x17E)) return c + (c & 1);
    if (c == 0x178) return 0xFF;
    if (c >= 0x391 && c <= 0x3AB && c != 0x3A2) return c + 32;
    if (c == 0x386) return 0x3AC;
    if (c >= 0x388 && c <= 0x38A) return c + 37;
    if (c == 0x38C) return 0x3CC;
    if (c == 0x38E || c == 0x38F) return c + 63;
    if (c >= 0x410 && c <= 0x42F) return c + 32;
    if (c >= 0x400 && c <= 0x40F) return c + 80;
    if (c >= 0x531 && c <= 0x556) return c + 48;
    return c >= 0xFF21 && c <= 0xFF3A ? c + 32 : c;
}
static uint32_t tmpl_upper_cp(uint32_t c) {
    if (c < 0x80) return c >= 'a' && c <= 'z' ? c - 32 : c;
    if (c == 0xB5) return 0x39C;
    if (c == 0xFF) return 0x178;
    if (c == 0x131) return 'I';
    if (c == 0x17F) return 'S';
    if (c == 0x3C2) return 0x3A3;
    static const uint8_t steps[] = {1, 32, 37, 38, 48, 63, 64, 80};
    for (int i = 0; i < COUNT(steps); i++)
        if (tmpl_lower_cp(c - steps[i]) == c && c != 0x138) return c - steps[i];
    return c == 0x3AC ? 0x386 : c;
}
static bool tmpl_is_cased(uint32_t c) { return tmpl_lower_cp(c) != c || tmpl_upper_cp(c) != c || c == 0xDF; }

typedef enum tmpl_case { CASE_LOWER, CASE_UPPER, CASE_CAPITAL, CASE_TITLE_WORDS, CASE_TITLE } tmpl_case;

/* CASE_CAPITAL: the first letter large. CASE_TITLE_WORDS: as the filter, words end at "-([{<" and spaces. CASE_TITLE: as
 * the method, words end at anything that is not a letter. */
static bool tmpl_recase(tmpl_run *r, tval v, tmpl_case how, tval *out) {
    buf b = {0};
    str s = tv_text(v);
    bool large = how != CASE_LOWER, ok = s.n <= r->max_bytes / 2 ? tmpl_work(r, s.n) : tmpl_too_long(r);
    for (size_t i = 0, from; ok && i < s.n;) {
        char utf8[4];
        from = i;
        uint32_t c = tmpl_cp(s, &i);
        bool up = how == CASE_UPPER || (how != CASE_LOWER && large);
        if (up && c == 0xDF) buf_c(&b, how == CASE_UPPER ? "SS" : "Ss");
        else buf_put(&b, utf8, (size_t)utf8_put(utf8, up ? tmpl_upper_cp(c) : tmpl_lower_cp(c)));
        large = how == CASE_TITLE ? !tmpl_is_cased(c)
                                  : how == CASE_TITLE_WORDS && ((c < 0x80 && c && strchr("-({[<", (int)c)) ||
                                                                tmpl_space(s.p + from, s.p + s.n));
    }
    if (!tmpl_take(r, &b, ok, out)) return false;
    out->flag = v.flag;
    return true;
}
static bool tmpl_recase_any(tmpl_run *r, tmpl_args *c, tmpl_case how, tval *out) {
    tval s;
    return tmpl_to_text(r, c->self, &s) && tmpl_recase(r, s, how, out);
}
static bool tmpl_f_lower(tmpl_run *r, tmpl_args *c, tval *out) { return tmpl_recase_any(r, c, CASE_LOWER, out); }
static bool tmpl_f_upper(tmpl_run *r, tmpl_args *c, tval *out) { return tmpl_recase_any(r, c, CASE_UPPER, out); }
static bool tmpl_f_capitalize(tmpl_run *r, tmpl_args *c, tval *out) { return tmpl_recase_any(r, c, CASE_CAPITAL, out); }
static bool tmpl_f_title(tmpl_run *r, tmpl_args *c, tval *out) { return tmpl_recase_any(r, c, CASE_TITLE_WORDS, out); }
static bool tmpl_f_string(tmpl_run *r, tmpl_args *c, tval *out) { return tmpl_to_text(r, c->self, out); }
static bool tmpl_m_title(tmpl_run *r, tmpl_args *c, tval *out) { return tmpl_recase(r, c->self, CASE_TITLE, out); }

static bool tmpl_f_safe(tmpl_run *r, tmpl_args *c, tval *out) {
    return tmpl_to_text(r, c->self, out) && (out->flag = 1, true);
}

/* &, <, >, ' and " as HTML entities; a safe text stays as it is. The result is safe. */
static bool tmpl_escape_html(tmpl_run *r, tval v, tval *out) {
    tval s;
    buf b = {0};
    if (!tmpl_to_text(r, v, &s)) return false;
    if (s.flag) return *out = s, true;
    bool ok = s.n <= r->max_bytes / 5 ? tmpl_work(r, s.n) : tmpl_too_long(r);
    for (size_t i = 0; ok && i < s.n; i++) {
        char c = s.s[i];
        const char *z = c == '&' ? "&amp;" : c == '<' ? "&lt;" : c == '>' ? "&gt;" : c == '\'' ? "&#39;"
            : c == '"' ? "&#34;" : NULL;
        if (z) buf_c(&b, z);
        else buf_char(&b, c);
    }
    return tmpl_take(r, &b, ok, out) && (out->flag = 1, true);
}
static bool tmpl_f_escape(tmpl_run *r, tmpl_args *c, tval *out) { return tmpl_escape_html(r, c->self, out); }
static bool tmpl_f_forceescape(tmpl_run *r, tmpl_args *c, tval *out) {
    tval s;
    return tmpl_to_text(r, c->self, &s) && (s.flag = 0, tmpl_escape_html(r, s, out));
}

/* Strips characters: those of `chars`, or white space if it is none. */
static bool tmpl_strip(tmpl_run *r, tval v, tval chars, bool left, bool right, tval *out) {
    str s = tv_text(v);
    if (!tmpl_work(r, s.n)) return false;
    if (chars.type <= TV_NONE) {
        s = tmpl_trim(s, left, right);
    } else if (chars.type != TV_STR) {
        return tmpl_bad_type(r, "strip", chars);
    } else {
        str set = tv_text(chars);
        while (left && s.n) {
            str c = {s.p, tmpl_cp_bytes(s, 1)};
            if (str_find(set, c, 0) < 0) break;
            s = str_sub(s, c.n, s.n);
        }
        while (right && s.n) {
            size_t n = 1;
            while (n < s.n && (s.p[s.n - n] & 0xC0) == 0x80) n++;
            if (str_find(set, (str){s.p + s.n - n, n}, 0) < 0) break;
            s.n -= n;
        }
        if (!tmpl_work(r, (v.n - s.n) * (set.n / 8 + 1))) return false;
    }
    *out = tv_str(s);
    out->flag = v.flag;
    return true;
}
static bool tmpl_f_trim(tmpl_run *r, tmpl_args *c, tval *out) {
    tval s;
    return tmpl_to_text(r, c->self, &s) && tmpl_strip(r, s, c->a[0], true, true, out);
}
static bool tmpl_m_strip(tmpl_run *r, tmpl_args *c, tval *out) { return tmpl_strip(r, c->self, c->a[0], true, true, out); }
static bool tmpl_m_lstrip(tmpl_run *r, tmpl_args *c, tval *out) {
    return tmpl_strip(r, c->self, c->a[0], true, false, out);
}
static bool tmpl_m_rstrip(tmpl_run *r, tmpl_args *c, tval *out) {
    return tmpl_strip(r, c->self, c->a[0], false, true, out);
}

/* At most `count` occurrences replaced, all if it is negative. An empty needle stands between all characters. */
static bool tmpl_replace(tmpl_run *r, str s, str old, str with, int64_t count, tval *out) {
    buf b = {0};
    bool ok = tmpl_work(r, s.n);
    size_t at = 0;
    while (ok && count-- != 0) {
        ptrdiff_t found = str_find(s, old, at);
        if (found < 0) break;
        ok = tmpl_put(r, &b, str_sub(s, at, (size_t)found)) && tmpl_put(r, &b, with);
        at = (size_t)found + old.n;
        if (old.n) continue;
        if (at >= s.n) break;
        size_t n = tmpl_cp_bytes(str_sub(s, at, s.n), 1);
        ok = ok && tmpl_put(r, &b, str_sub(s, at, at + n));
        at += n;
    }
    ok = ok && tmpl_put(r, &b, str_sub(s, MIN(at, s.n), s.n));
    return tmpl_take(r, &b, ok, out);
}
static bool tmpl_f_replace(tmpl_run *r, tmpl_args *c, tval *out) { /* old new count */
    tval s, old, with;
    int64_t count = tmpl_is_integer(c->a[2]) ? tmpl_integer(c->a[2]) : -1;
    return tmpl_to_text(r, c->self, &s) && tmpl_to_text(r, c->a[0], &old) && tmpl_to_text(r, c->a[1], &with) &&
           tmpl_replace(r, tv_text(s), tv_text(old), tv_text(with), count, out);
}
static bool tmpl_m_replace(tmpl_run *r, tmpl_args *c, tval *out) {
    if (c->a[0].type != TV_STR || c->a[1].type != TV_STR) return tmpl_bad_type(r, "replace", c->a[c->a[0].type == TV_STR]);
    int64_t count = tmpl_is_integer(c->a[2]) ? tmpl_integer(c->a[2]) : -1;
    tval with = c->a[1];
    if (c->self.flag && !tmpl_escape_html(r, with, &with)) return false;
    if (!tmpl_replace(r, tv_text(c->self), tv_text(c->a[0]), tv_text(with), count, out)) return false;
    out->flag = c->self.flag;
    return true;
}

/* Bytes of the line end at p (Python's splitlines), 0 if none. */
static size_t tmpl_line_end(const char *p, const char *end) {
    unsigned char c = (unsigned char)*p;
    if (c == '\r') return end - p > 1 && p[1] == '\n' ? 2 : 1;
    if ((c >= 10 && c <= 12) || (c >= 0x1C && c <= 0x1E)) return 1;
    if (c == 0xC2) return end - p > 1 && (unsigned char)p[1] == 0x85 ? 2 : 0;
    return end - p > 2 && (!memcmp(p, "\xE2\x80\xA8", 3) || !memcmp(p, "\xE2\x80\xA9", 3)) ? 3 : 0;
}

/* The next line of s from *at on, without its end (with it if `keep`). False behind the last. */
static bool tmpl_next_line(str s, size_t *at, bool keep, str *line) {
    size_t from = *at, to = from, n = 0;
    if (from >= s.n) return false;
    while (to < s.n && (n = tmpl_line_end(s.p + to, s.p + s.n)) == 0) to++;
    *at = to + n;
    *line = str_sub(s, from, keep ? to + n : to);
    return true;
}

static bool tmpl_f_indent(tmpl_run *r, tmpl_args *c, tval *out) { /* width first blank */
    tval v = c->self;
    buf in = {0}, b = {0}, s = {0};
    str line;
    if (v.type != TV_STR) return tmpl_bad_type(r, "indent", v);
    int64_t width = c->a[0].type == TV_ABSENT ? 4 : tmpl_is_integer(c->a[0]) ? MAX(tmpl_integer(c->a[0]), 0) : 0;
    if (c->a[0].type > TV_STR || c->a[0].type == TV_FLOAT) return tmpl_bad_type(r, "indent", c->a[0]);
    if (width > (int64_t)r->max_bytes) return tmpl_too_long(r);
    bool ok = tmpl_work(r, (size_t)width), blank = tmpl_true(c->a[2]), first = true;
    for (int64_t i = 0; ok && i < width; i++) buf_char(&in, ' ');
    if (c->a[0].type == TV_STR) buf_str(&in, tv_text(c->a[0]));
    ok = ok && tmpl_put(r, &s, tv_text(v)) && tmpl_put_c(r, &s, "\n");
    for (size_t at = 0; ok && tmpl_next_line(buf_view(&s), &at, false, &line); first = false) {
        if (!first) ok = tmpl_put_c(r, &b, "\n");
        if (first ? tmpl_true(c->a[1]) : line.n || blank) ok = ok && tmpl_put(r, &b, buf_view(&in));
        ok = ok && tmpl_put(r, &b, line);
    }
    buf_free(&in), buf_free(&s);
    if (!tmpl_take(r, &b, ok, out)) return false;
    out->flag = v.flag;
    return true;
}

static bool tmpl_percent(tmpl_run *r, str s, tmpl_items *args, const tmpl_args *named, tval *out);

static bool tmpl_f_format(tmpl_run *r, tmpl_args *c, tval *out) { /* "..."|format(...): as % */
    tval s;
    tmpl_items *args = tmpl_new_items(r, (size_t)c->n_pos);
    if (!args || !tmpl_to_text(r, c->self, &s)) return false;
    for (int i = 0; i < c->n_pos; i++) args->v[i] = c->pos[i];
    return tmpl_percent(r, tv_text(s), args, c, out);
}

static bool tmpl_f_center(tmpl_run *r, tmpl_args *c, tval *out) { /* width */
    tval v;
    buf b = {0};
    if (!tmpl_to_text(r, c->self, &v)) return false;
    if (c->a[0].type && !tmpl_is_integer(c->a[0])) return tmpl_bad_type(r, "center", c->a[0]);
    int64_t width = c->a[0].type ? tmpl_integer(c->a[0]) : 80, n = tmpl_len_cp(tv_text(v)), room = MAX(width - n, 0);
    int64_t left = room / 2 + (room & width & 1); /* as Python: the odd one goes left when the width is odd */
    bool ok = tmpl_work(r, v.n);
    for (int64_t i = 0; ok && i < left; i++) ok = tmpl_put_c(r, &b, " ");
    ok = ok && tmpl_put(r, &b, tv_text(v));
    for (int64_t i = left; ok && i < room; i++) ok = tmpl_put_c(r, &b, " ");
    return tmpl_take(r, &b, ok, out);
}

/* ---- Number filters ---- */

static bool tmpl_to_double(str s, double *f) { /* Python's float(text) for what is not a word */
    buf b = {0};
    s = tmpl_trim(s, true, true);
    bool digits = false;
    for (size_t i = 0; i < s.n; i++) {
        bool digit = isdigit((unsigned char)s.p[i]);
        digits |= digit;
        if (s.p[i] == '_' && i && isdigit((unsigned char)s.p[i - 1]) && i + 1 < s.n && isdigit((unsigned char)s.p[i + 1]))
            continue;
        if (!digit && !strchr("+-.eE", s.p[i])) return buf_free(&b), false;
        buf_char(&b, s.p[i]);
    }
    char *end = b.p;
    if (digits && b.n < 400) { /* the point of the host program's locale, for strtod */
        char *dot = strchr(b.p, '.');
        if (dot) *dot = *localeconv()->decimal_point;
        *f = strtod(b.p, &end);
    }
    bool ok = digits && b.n && end == b.p + b.n;
    buf_free(&b);
    return ok;
}

/* Python's int(text, base): *fits false if it is one beyond 64 bits. */
static bool tmpl_to_integer(str s, int base, int64_t *v, bool *fits) {
    s = tmpl_trim(s, true, true);
    bool negative = s.n && s.p[0] == '-', digit = false;
    if (s.n && (s.p[0] == '-' || s.p[0] == '+')) s = str_sub(s, 1, s.n);
    char mark = base == 16 ? 'x' : base == 8 ? 'o' : base == 2 ? 'b' : 0;
    if (mark && s.n > 2 && s.p[0] == '0' && (s.p[1] | 32) == mark) s = str_sub(s, 2, s.n);
    uint64_t u = 0;
    *fits = true;
    for (size_t i = 0; i < s.n; i++) {
        int c = (unsigned char)s.p[i], d = isdigit(c) ? c - '0' : isalpha(c) ? (c | 32) - 'a' + 10 : 99;
        if (c == '_' && digit && i + 1 < s.n) {
            digit = false;
            continue;
        }
        if (d >= base) return false;
        if (u > ((uint64_t)INT64_MAX + negative - (uint64_t)d) / (uint64_t)base) *fits = false;
        else u = u * (uint64_t)base + (uint64_t)d;
        digit = true;
    }
    *v = (int64_t)(negative ? 0 - u : u);
    return digit;
}

static bool tmpl_truncate_double(tmpl_run *r, double f, tval *out) {
    if (f >= -0x1p63 && f < 0x1p63) return *out = tv_int((int64_t)f), true;
    return tmpl_fail(r, "int: a number beyond 64 bits");
}

static bool tmpl_f_int(tmpl_run *r, tmpl_args *c, tval *out) { /* default base */
    int64_t base = c->a[1].type == TV_INT ? c->a[1].i : 10, v;
    bool fits = true;
    double f;
    if (c->self.type == TV_UNDEFINED) return tmpl_undefined(r, c->self);
    if (base < 2 || base > 36) return tmpl_fail(r, "int: base %lld", (long long)base);
    if (tmpl_is_integer(c->self)) return *out = tv_int(tmpl_integer(c->self)), true;
    *out = c->a[0].type ? c->a[0] : tv_int(0);
    if (c->self.type == TV_FLOAT) return isfinite(c->self.f) ? tmpl_truncate_double(r, c->self.f, out) : true;
    if (c->self.type != TV_STR) return true;
    if (!tmpl_work(r, c->self.n)) return false;
    if (tmpl_to_integer(tv_text(c->self), (int)base, &v, &fits))
        return fits ? (*out = tv_int(v), true) : tmpl_fail(r, "int: a number beyond 64 bits");
    return tmpl_to_double(tv_text(c->self), &f) && isfinite(f) ? tmpl_truncate_double(r, f, out) : true;
}

static bool tmpl_f_float(tmpl_run *r, tmpl_args *c, tval *out) { /* default */
    double f;
    if (c->self.type == TV_UNDEFINED) return tmpl_undefined(r, c->self);
    *out = c->a[0].type ? c->a[0] : tv_float(0);
    if (tmpl_is_number(c->self)) *out = tv_float(tmpl_double(c->self));
    if (c->self.type != TV_STR) return true;
    if (!tmpl_work(r, c->self.n)) return false;
    str s = tmpl_trim(tv_text(c->self), true, true), word = s;
    if (word.n && (word.p[0] == '-' || word.p[0] == '+')) word = str_sub(word, 1, word.n);
    if (word.n == 3 && !strncasecmp(word.p, "nan", 3)) *out = tv_float((double)NAN);
    else if ((word.n == 3 && !strncasecmp(word.p, "inf", 3)) || (word.n == 8 && !strncasecmp(word.p, "infinity", 8)))
        *out = tv_float(*s.p == '-' ? -(double)INFINITY : (double)INFINITY);
    else if (tmpl_to_double(s, &f)) *out = tv_float(f);
    return true;
}

static bool tmpl_f_abs(tmpl_run *r, tmpl_args *c, tval *out) {
    tval v = c->self;
    if (!tmpl_is_number(v)) return tmpl_bad_type(r, "abs", v);
    if (v.type == TV_FLOAT) return *out = tv_float(fabs(v.f)), true;
    if (tmpl_integer(v) == INT64_MIN) return tmpl_fail(r, "abs: a number beyond 64 bits");
    return *out = tv_int(llabs(tmpl_integer(v))), true;
}

static bool tmpl_f_round(tmpl_run *r, tmpl_args *c, tval *out) { /* precision method */
    char z[400];
    int64_t digits = c->a[0].type ? tmpl_integer(c->a[0]) : 0;
    str method = c->a[1].type == TV_STR ? tv_text(c->a[1]) : STR("common");
    if (!tmpl_is_number(c->self)) return tmpl_bad_type(r, "round", c->self);
    if ((c->a[0].type && !tmpl_is_integer(c->a[0])) || digits < -15 || digits > 30)
        return tmpl_fail(r, "round: precision not supported");
    double f = tmpl_double(c->self), scale = pow(10, (double)digits);
    if (str_is(method, "ceil") || str_is(method, "floor")) {
        double scaled = f * scale;
        return *out = tv_float((*method.p == 'c' ? ceil(scaled) : floor(scaled)) / scale), true;
    }
    if (!str_is(method, "common")) return tmpl_fail(r, "round: method '%.*s' is not known", STRF(method));
    *out = c->self.type == TV_BOOL ? tv_int(c->self.b) : c->self;
    if (digits < 0) return tmpl_fail(r, "round: negative precision is not supported");
    if (c->self.type != TV_FLOAT || !isfinite(f)) return true;
    snprintf(z, sizeof z, "%.*f", (int)digits, f); /* correctly rounded, halves to even */
    return *out = tv_float(strtod(z, NULL)), true;
}

/* ---- List filters ---- */

static bool tmpl_f_length(tmpl_run *r, tmpl_args *c, tval *out) {
    int64_t n = tmpl_length(c->self);
    if (n < 0) return tmpl_bad_type(r, "length", c->self);
    if (c->self.type == TV_UNDEFINED && c->self.flag == TMPL_UNSAFE) return tmpl_undefined(r, c->self);
    return *out = tv_int(n), tmpl_work(r, c->self.type == TV_STR ? c->self.n : 0);
}

static bool tmpl_f_list(tmpl_run *r, tmpl_args *c, tval *out) {
    tmpl_items *l;
    return tmpl_walk(r, c->self, &l) && (*out = tv_list(TV_LIST, l), true);
}

static bool tmpl_f_first(tmpl_run *r, tmpl_args *c, tval *out) {
    tmpl_items *l;
    if (c->self.type == TV_ITER && c->self.iter->at < c->self.iter->items->n)
        return *out = c->self.iter->items->v[c->self.iter->at++], true;
    if (!tmpl_walk(r, c->self, &l)) return false;
    return *out = l->n ? l->v[0] : tv_undefined(STR("first"), TV_LIST), true;
}
static bool tmpl_f_last(tmpl_run *r, tmpl_args *c, tval *out) {
    tmpl_items *l;
    if (c->self.type == TV_ITER) return tmpl_bad_type(r, "last", c->self);
    if (!tmpl_walk(r, c->self, &l)) return false;
    return *out = l->n ? l->v[l->n - 1] : tv_undefined(STR("last"), TV_LIST), true;
}

static bool tmpl_f_default(tmpl_run *r, tmpl_args *c, tval *out) { /* default_value boolean */
    bool use = c->self.type == TV_UNDEFINED || (tmpl_true(c->a[1]) && !tmpl_true(c->self));
    *out = !use ? c->self : c->a[0].type ? c->a[0] : tv_str(STR(""));
    return tmpl_work(r, 1);
}

static bool tmpl_join(tmpl_run *r, tmpl_items *l, str between, tval attribute, tval *out) {
    buf b = {0};
    bool ok = true;
    for (size_t i = 0; ok && i < l->n; i++) {
        tval v;
        ok = (!i || tmpl_put(r, &b, between)) && tmpl_attr_path(r, l->v[i], attribute, (tval){0}, &v) &&
            tmpl_put_value(r, &b, v, false);
    }
    return tmpl_take(r, &b, ok, out);
}
static bool tmpl_f_join(tmpl_run *r, tmpl_args *c, tval *out) { /* d attribute */
    tmpl_items *l;
    tval d = tv_str(STR(""));
    return (!c->a[0].type || tmpl_to_text(r, c->a[0], &d)) && tmpl_walk(r, c->self, &l) &&
           tmpl_join(r, l, tv_text(d), c->a[1], out);
}

/* n elements of items, last first. */
static bool tmpl_reversed(tmpl_run *r, const tmpl_items *items, tmpl_items **out) {
    if (!(*out = tmpl_new_items(r, items->n))) return false;
    for (size_t i = 0; i < items->n; i++) (*out)->v[i] = items->v[items->n - 1 - i];
    return true;
}
static bool tmpl_f_reverse(tmpl_run *r, tmpl_args *c, tval *out) {
    tmpl_items *l, *back;
    if (!tmpl_walk(r, c->self, &l) || !tmpl_reversed(r, l, &back)) return false;
    return c->self.type == TV_STR ? tmpl_join(r, back, STR(""), (tval){0}, out) : tmpl_new_iter(r, back, out);
}

/* Sorts `values` by `keys`, both in place; equal keys keep their order, with `reverse` too. A merge sort from the bottom
 * up. equal_first: keys are asked whether they are equal first: without an order they may still be equal. */
static bool tmpl_sort(tmpl_run *r, tmpl_items *keys, tmpl_items *values, bool reverse, bool equal_first) {
    size_t n = keys->n;
    tmpl_items *k2 = tmpl_new_items(r, n), *v2 = k2 ? tmpl_new_items(r, n) : NULL;
    if (!v2) return false;
    for (size_t width = 1; width < n; width *= 2) {
        for (size_t from = 0; from < n; from += 2 * width) {
            size_t a = from, mid = MIN(from + width, n), b = mid, end = MIN(from + 2 * width, n);
            for (size_t to = from; to < end; to++) {
                int order = 0;
                bool both = a < mid && b < end, equal = false;
                if (both && equal_first && !tmpl_equal(r, keys->v[b], keys->v[a], &equal)) return false;
                if (both && !equal && !tmpl_order(r, keys->v[b], keys->v[a], &order)) return false;
                bool right = a >= mid || (b < end && (reverse ? order > 0 : order < 0));
                size_t i = right ? b++ : a++;
                k2->v[to] = keys->v[i], v2->v[to] = values->v[i];
            }
        }
        memcpy(keys->v, k2->v, n * sizeof(tval));
        memcpy(values->v, v2->v, n * sizeof(tval));
    }
    return true;
}

/* The key that sort, min, unique ... compare: an attribute, texts without regard to case unless asked. */
static bool tmpl_sort_key(tmpl_run *r, tval v, tval attribute, bool case_sensitive, tval *key) {
    if (!tmpl_attr_path(r, v, attribute, (tval){0}, key)) return false;
    return case_sensitive || key->type != TV_STR ? true : tmpl_recase(r, *key, CASE_LOWER, key);
}

static bool tmpl_sort_keys(tmpl_run *r, tmpl_items *l, tval attribute, bool case_sensitive, tmpl_items **keys) {
    if (!(*keys = tmpl_new_items(r, l->n))) return false;
    if (attribute.type == TV_STR && memchr(attribute.s, ',', attribute.n))
        return tmpl_fail(r, "several attributes are not supported");
    for (size_t i = 0; i < l->n; i++)
        if (!tmpl_sort_key(r, l->v[i], attribute, case_sensitive, &(*keys)->v[i])) return false;
    return true;
}

static bool tmpl_f_sort(tmpl_run *r, tmpl_args *c, tval *out) { /* reverse case_sensitive attribute */
    tmpl_items *l, *copy, *keys;
    if (!tmpl_walk(r, c->self, &l) || !(copy = tmpl_new_items(r, l->n))) return false;
    memcpy(copy->v, l->v, l->n * sizeof(tval));
    if (!tmpl_sort_keys(r, copy, c->a[2], tmpl_true(c->a[1]), &keys) || !tmpl_sort(r, keys, copy, tmpl_true(c->a[0]), true))
        return false;
    return *out = tv_list(TV_LIST, copy), true;
}

static bool tmpl_extreme(tmpl_run *r, tmpl_args *c, int sign, tval *out) { /* case_sensitive attribute */
    tmpl_items *l, *keys;
    if (!tmpl_walk(r, c->self, &l) || !tmpl_sort_keys(r, l, c->a[1], tmpl_true(c->a[0]), &keys)) return false;
    size_t best = 0;
    for (size_t i = 1; i < l->n; i++) {
        int order;
        if (!tmpl_order(r, keys->v[i], keys->v[best], &order)) return false;
        if (order == sign) best = i;
    }
    return *out = l->n ? l->v[best] : tv_undefined(STR("min or max"), TV_LIST), true;
}
static bool tmpl_f_min(tmpl_run *r, tmpl_args *c, tval *out) { return tmpl_extreme(r, c, -1, out); }
static bool tmpl_f_max(tmpl_run *r, tmpl_args *c, tval *out) { return tmpl_extreme(r, c, 1, out); }

static bool tmpl_f_unique(tmpl_run *r, tmpl_args *c, tval *out) { /* case_sensitive attribute */
    tmpl_items *l, *keys, *kept;
    tmpl_dict *seen = tmpl_new_dict(r);
    if (!seen || !tmpl_walk(r, c->self, &l) || !tmpl_sort_keys(r, l, c->a[1], tmpl_true(c->a[0]), &keys)) return false;
    if (!(kept = tmpl_new_items(r, l->n))) return false;
    kept->n = 0;
    for (size_t i = 0; i < l->n; i++) {
        size_t before = seen->n;
        if (!tmpl_dict_set(r, seen, keys->v[i], tv_none())) return false;
        if (seen->n > before) kept->v[kept->n++] = l->v[i];
    }
    return tmpl_new_iter(r, kept, out);
}

static bool tmpl_pair(tmpl_run *r, tval a, tval b, tval *out) {
    tmpl_items *l = tmpl_new_items(r, 2);
    if (l) l->v[0] = a, l->v[1] = b, *out = tv_list(TV_TUPLE, l);
    return l != NULL;
}

static bool tmpl_dict_pairs(tmpl_run *r, const tmpl_dict *d, tmpl_items **out) {
    if (!(*out = tmpl_new_items(r, d->n))) return false;
    for (size_t i = 0; i < d->n; i++)
        if (!tmpl_pair(r, d->kv[2 * i], d->kv[2 * i + 1], &(*out)->v[i])) return false;
    return true;
}

static bool tmpl_f_items(tmpl_run *r, tmpl_args *c, tval *out) {
    tmpl_items *l;
    if (c->self.type == TV_UNDEFINED) return tmpl_new_iter(r, tmpl_new_items(r, 0), out);
    if (c->self.type != TV_DICT) return tmpl_bad_type(r, "items", c->self);
    return tmpl_dict_pairs(r, c->self.dict, &l) && tmpl_new_iter(r, l, out);
}

static bool tmpl_f_dictsort(tmpl_run *r, tmpl_args *c, tval *out) { /* case_sensitive by reverse */
    tmpl_items *l, *keys;
    if (c->self.type != TV_DICT) return tmpl_bad_type(r, "dictsort", c->self);
    bool by_value = c->a[1].type == TV_STR && str_is(tv_text(c->a[1]), "value");
    if (!tmpl_dict_pairs(r, c->self.dict, &l) || !tmpl_sort_keys(r, l, tv_int(by_value), tmpl_true(c->a[0]), &keys))
        return false;
    return tmpl_sort(r, keys, l, tmpl_true(c->a[2]), false) && (*out = tv_list(TV_LIST, l), true);
}

static bool tmpl_binary(tmpl_run *r, int op, tval a, tval b, tval *out);

static bool tmpl_f_sum(tmpl_run *r, tmpl_args *c, tval *out) { /* attribute start */
    tmpl_items *l;
    *out = c->a[1].type ? c->a[1] : tv_int(0);
    if (!tmpl_walk(r, c->self, &l)) return false;
    for (size_t i = 0; i < l->n; i++) {
        tval v;
        if (!tmpl_attr_path(r, l->v[i], c->a[0], (tval){0}, &v) || !tmpl_binary(r, '+', *out, v, out)) return false;
    }
    return true;
}

static bool tmpl_f_batch(tmpl_run *r, tmpl_args *c, tval *out) { /* linecount fill_with */
    tmpl_items *l, *all;
    int64_t size = c->a[0].type == TV_INT ? c->a[0].i : 0;
    if (size <= 0) return tmpl_fail(r, "batch: the size is a positive integer");
    if (!tmpl_walk(r, c->self, &l)) return false;
    size_t step = (size_t)MIN(size, (int64_t)1 << 40), n = (l->n + step - 1) / step;
    if (!(all = tmpl_new_items(r, n))) return false;
    for (size_t i = 0; i < n; i++) {
        size_t left = MIN(l->n - i * step, step), fill = c->a[1].type > TV_NONE ? step : left;
        tmpl_items *part = tmpl_new_items(r, fill);
        if (!part) return false;
        for (size_t k = 0; k < fill; k++) part->v[k] = k < left ? l->v[i * step + k] : c->a[1];
        all->v[i] = tv_list(TV_LIST, part);
    }
    return tmpl_new_iter(r, all, out);
}

static bool tmpl_f_groupby(tmpl_run *r, tmpl_args *c, tval *out) { /* attribute default case_sensitive */
    tmpl_items *l, *keys, *copy, *groups;
    if (!tmpl_walk(r, c->self, &l) || !(copy = tmpl_new_items(r, l->n)) || !(groups = tmpl_new_items(r, l->n)))
        return false;
    memcpy(copy->v, l->v, l->n * sizeof(tval));
    if (!tmpl_sort_keys(r, copy, c->a[0], tmpl_true(c->a[2]), &keys) || !tmpl_sort(r, keys, copy, false, false))
        return false;
    groups->n = 0;
    for (size_t from = 0, to; from < copy->n; from = to) {
        bool same = true;
        tval key;
        for (to = from + 1; to < copy->n; to++)
            if (!tmpl_equal(r, keys->v[from], keys->v[to], &same)) return false;
            else if (!same) break;
        tmpl_items *members = tmpl_new_items(r, to - from);
        if (!members || !tmpl_attr_path(r, copy->v[from], c->a[0], (tval){0}, &key)) return false;
        memcpy(members->v, copy->v + from, (to - from) * sizeof(tval));
        if (!tmpl_pair(r, key, tv_list(TV_LIST, members), &groups->v[groups->n++])) return false;
    }
    return *out = tv_list(TV_LIST, groups), true;
}

/* Arguments from `from` on as those of another call. */
static tmpl_args tmpl_rest(const tmpl_args *c, int from, tval self) {
    tmpl_args rest = *c;
    rest.self = self;
    rest.pos += MIN(from, c->n_pos);
    rest.n_pos -= MIN(from, c->n_pos);
    return rest;
}

static const tmpl_fn *tmpl_find_filter(str name);
static const tmpl_fn *tmpl_find_test(str name);

/* The filter or test that an argument names; NULL after an error. */
static const tmpl_fn *tmpl_named_fn(tmpl_run *r, bool test, tval name) {
    const char *what = test ? "test" : "filter";
    if (name.type != TV_STR) return tmpl_bad_type(r, what, name), NULL;
    const tmpl_fn *fn = test ? tmpl_find_test(tv_text(name)) : tmpl_find_filter(tv_text(name));
    if (!fn) tmpl_fail(r, "%s '%.*s' is not supported", what, STRF(tv_text(name)));
    return fn;
}

static tval tmpl_named_arg(const tmpl_args *c, const char *name) {
    for (int i = 0; i < c->n_named; i++)
        if (str_is(c->names[i], name)) return c->named[i];
    return (tval){0};
}

static bool tmpl_f_map(tmpl_run *r, tmpl_args *c, tval *out) { /* attribute= [default=], or a filter's name and arguments */
    tmpl_items *l, *made;
    tval path = tmpl_named_arg(c, "attribute"), otherwise = tmpl_named_arg(c, "default");
    const tmpl_fn *fn = NULL;
    if (!c->n_pos && !path.type) return tmpl_fail(r, "map needs a filter or attribute=");
    if (c->n_pos && !(fn = tmpl_named_fn(r, false, c->pos[0]))) return false;
    if (c->self.type == TV_NONE) return tmpl_new_iter(r, tmpl_new_items(r, 0), out); /* what is false is not walked */
    if (!tmpl_walk(r, c->self, &l) || !(made = tmpl_new_items(r, l->n))) return false;
    for (size_t i = 0; i < l->n; i++) {
        tmpl_args rest = tmpl_rest(c, 1, l->v[i]);
        if (fn ? !tmpl_apply(r, fn, &rest, &made->v[i]) : !tmpl_attr_path(r, l->v[i], path, otherwise, &made->v[i]))
            return false;
    }
    return tmpl_new_iter(r, made, out);
}

/* Keeps what passes a test (with `attribute`, whose attribute does), or with `reject` what does not. */
static bool tmpl_choose(tmpl_run *r, tmpl_args *c, bool attribute, bool reject, tval *out) {
    tmpl_items *l, *kept;
    const tmpl_fn *fn = NULL;
    if (attribute && !c->n_pos) return tmpl_fail(r, "an attribute name is missing");
    if (c->n_pos > attribute && !(fn = tmpl_named_fn(r, true, c->pos[attribute]))) return false;
    if (c->self.type == TV_NONE) return tmpl_new_iter(r, tmpl_new_items(r, 0), out); /* what is false is not walked */
    if (tmpl_length(c->self) == 0 && c->self.type != TV_UNDEFINED)
        return tmpl_new_iter(r, tmpl_new_items(r, 0), out);
    if (!tmpl_walk(r, c->self, &l) || !(kept = tmpl_new_items(r, l->n))) return false;
    kept->n = 0;
    for (size_t i = 0; i < l->n; i++) {
        tval v = l->v[i], passed;
        if (attribute && !tmpl_attr_path(r, v, c->pos[0], (tval){0}, &v)) return false;
        tmpl_args rest = tmpl_rest(c, 1 + attribute, v);
        passed = v;
        if (fn && !tmpl_apply(r, fn, &rest, &passed)) return false;
        if (tmpl_true(passed) != reject) kept->v[kept->n++] = l->v[i];
    }
    return tmpl_new_iter(r, kept, out);
}
static bool tmpl_f_select(tmpl_run *r, tmpl_args *c, tval *out) { return tmpl_choose(r, c, false, false, out); }
static bool tmpl_f_reject(tmpl_run *r, tmpl_args *c, tval *out) { return tmpl_choose(r, c, false, true, out); }
static bool tmpl_f_selectattr(tmpl_run *r, tmpl_args *c, tval *out) { return tmpl_choose(r, c, true, false, out); }
static bool tmpl_f_rejectattr(tmpl_run *r, tmpl_args *c, tval *out) { return tmpl_choose(r, c, true, true, out); }

static const tmpl_fn tmpl_filter_table[] = {
    {"abs", "", 0, tmpl_f_abs},
    {"batch", "linecount fill_with", 1, tmpl_f_batch},
    {"capitalize", "", 0, tmpl_f_capitalize},
    {"center", "width", 0, tmpl_f_center},
    {"count", "", 0, tmpl_f_length},
    {"d", "default_value boolean", 0, tmpl_f_default},
    {"default", "default_value boolean", 0, tmpl_f_default},
    {"dictsort", "case_sensitive by reverse", 0, tmpl_f_dictsort},
    {"e", "", 0, tmpl_f_escape},
    {"escape", "", 0, tmpl_f_escape},
    {"first", "", 0, tmpl_f_first},
    {"float", "default", 0, tmpl_f_float},
    {"forceescape", "", 0, tmpl_f_forceescape},
    {"format", "*", 0, tmpl_f_format},
    {"groupby", "attribute default case_sensitive", 1, tmpl_f_groupby},
    {"indent", "width first blank", 0, tmpl_f_indent},
    {"int", "default base", 0, tmpl_f_int},
    {"items", "", 0, tmpl_f_items},
    {"join", "d attribute", 0, tmpl_f_join},
    {"last", "", 0, tmpl_f_last},
    {"length", "", 0, tmpl_f_length},
    {"list", "", 0, tmpl_f_list},
    {"lower", "", 0, tmpl_f_lower},
    {"map", "*", 0, tmpl_f_map},
    {"max", "case_sensitive attribute", 0, tmpl_f_max},
    {"min", "case_sensitive attribute", 0, tmpl_f_min},
    {"reject", "*", 0, tmpl_f_reject},
    {"rejectattr", "*", 0, tmpl_f_rejectattr},
    {"replace", "old new count", 2, tmpl_f_replace},
    {"reverse", "", 0, tmpl_f_reverse},
    {"round", "precision method", 0, tmpl_f_round},
    {"safe", "", 0, tmpl_f_safe},
    {"select", "*", 0, tmpl_f_select},
    {"selectattr", "*", 0, tmpl_f_selectattr},
    {"sort", "reverse case_sensitive attribute", 0, tmpl_f_sort},
    {"string", "", 0, tmpl_f_string},
    {"sum", "attribute start", 0, tmpl_f_sum},
    {"title", "", 0, tmpl_f_title},
    {"tojson", "ensure_ascii indent separators sort_keys", 0, tmpl_f_tojson},
    {"trim", "chars", 0, tmpl_f_trim},
    {"unique", "case_sensitive attribute", 0, tmpl_f_unique},
    {"upper", "", 0, tmpl_f_upper},
    {0}};

/* ---- Tests ---- */

static bool tmpl_is(tval *out, bool yes) { return *out = tv_bool(yes), true; }
static bool tmpl_t_defined(tmpl_run *r, tmpl_args *c, tval *out) {
    return (void)r, tmpl_is(out, c->self.type != TV_UNDEFINED);
}
static bool tmpl_t_undefined(tmpl_run *r, tmpl_args *c, tval *out) {
    return (void)r, tmpl_is(out, c->self.type == TV_UNDEFINED);
}
static bool tmpl_t_none(tmpl_run *r, tmpl_args *c, tval *out) { return (void)r, tmpl_is(out, c->self.type == TV_NONE); }
static bool tmpl_t_boolean(tmpl_run *r, tmpl_args *c, tval *out) { return (void)r, tmpl_is(out, c->self.type == TV_BOOL); }
static bool tmpl_t_true(tmpl_run *r, tmpl_args *c, tval *out) {
    return (void)r, tmpl_is(out, c->self.type == TV_BOOL && c->self.b);
}
static bool tmpl_t_false(tmpl_run *r, tmpl_args *c, tval *out) {
    return (void)r, tmpl_is(out, c->self.type == TV_BOOL && !c->self.b);
}
static bool tmpl_t_integer(tmpl_run *r, tmpl_args *c, tval *out) { return (void)r, tmpl_is(out, c->self.type == TV_INT); }
static bool tmpl_t_float(tmpl_run *r, tmpl_args *c, tval *out) { return (void)r, tmpl_is(out, c->self.type == TV_FLOAT); }
static bool tmpl_t_number(tmpl_run *r, tmpl_args *c, tval *out) { return (void)r, tmpl_is(out, tmpl_is_number(c->self)); }
static bool tmpl_t_string(tmpl_run *r, tmpl_args *c, tval *out) { return (void)r, tmpl_is(out, c->self.type == TV_STR); }
static bool tmpl_t_mapping(tmpl_run *r, tmpl_args *c, tval *out) { return (void)r, tmpl_is(out, c->self.type == TV_DICT); }
static bool tmpl_t_iterable(tmpl_run *r, tmpl_args *c, tval *out) {
    int t = c->self.type;
    return (void)r, tmpl_is(out, t == TV_UNDEFINED || (t >= TV_STR && t <= TV_ITER) || t == TV_LOOP);
}
static bool tmpl_t_sequence(tmpl_run *r, tmpl_args *c, tval *out) { /* has a length and [ ] */
    int t = c->self.type;
    return (void)r, tmpl_is(out, t == TV_UNDEFINED || (t >= TV_STR && t <= TV_DICT) ||
                            (t == TV_VIEW && c->self.flag == VIEW_RANGE));
}
static bool tmpl_t_callable(tmpl_run *r, tmpl_args *c, tval *out) {
    int t = c->self.type;
    return (void)r, tmpl_is(out, t == TV_UNDEFINED || t == TV_LOOP || t == TV_MACRO || t == TV_METHOD || t == TV_FUNCTION);
}
static bool tmpl_t_escaped(tmpl_run *r, tmpl_args *c, tval *out) {
    return (void)r, tmpl_is(out, c->self.type == TV_STR && c->self.flag);
}
static bool tmpl_t_sameas(tmpl_run *r, tmpl_args *c, tval *out) {
    bool equal = false;
    if (c->self.type != c->a[0].type) return tmpl_is(out, false);
    if (c->self.type >= TV_LIST) return tmpl_is(out, c->self.list == c->a[0].list);
    return tmpl_equal(r, c->self, c->a[0], &equal) && tmpl_is(out, equal);
}
static bool tmpl_t_lower(tmpl_run *r, tmpl_args *c, tval *out) {
    tval s, other;
    if (!tmpl_to_text(r, c->self, &s) || !tmpl_recase(r, s, CASE_LOWER, &other)) return false;
    bool same = str_eq(tv_text(s), tv_text(other));
    return tmpl_recase(r, s, CASE_UPPER, &other) && tmpl_is(out, same && !str_eq(tv_text(s), tv_text(other)));
}
static bool tmpl_t_upper(tmpl_run *r, tmpl_args *c, tval *out) {
    tval s, other;
    if (!tmpl_to_text(r, c->self, &s) || !tmpl_recase(r, s, CASE_UPPER, &other)) return false;
    bool same = str_eq(tv_text(s), tv_text(other));
    return tmpl_recase(r, s, CASE_LOWER, &other) && tmpl_is(out, same && !str_eq(tv_text(s), tv_text(other)));
}
static bool tmpl_divides(tmpl_run *r, tval v, tval by, int64_t rest, tval *out) {
    tval m;
    bool equal = false;
    return tmpl_binary(r, '%', v, by, &m) && tmpl_equal(r, m, tv_int(rest), &equal) && tmpl_is(out, equal);
}
static bool tmpl_t_odd(tmpl_run *r, tmpl_args *c, tval *out) { return tmpl_divides(r, c->self, tv_int(2), 1, out); }
static bool tmpl_t_even(tmpl_run *r, tmpl_args *c, tval *out) { return tmpl_divides(r, c->self, tv_int(2), 0, out); }
static bool tmpl_t_divisibleby(tmpl_run *r, tmpl_args *c, tval *out) { return tmpl_divides(r, c->self, c->a[0], 0, out); }
static bool tmpl_t_filter(tmpl_run *r, tmpl_args *c, tval *out);
static bool tmpl_t_test(tmpl_run *r, tmpl_args *c, tval *out);
static bool tmpl_compare(tmpl_run *r, int op, tval a, tval b, bool *yes);

static bool tmpl_by(tmpl_run *r, tmpl_args *c, int op, tval *out) {
    bool yes = false;
    return tmpl_compare(r, op, c->self, c->a[0], &yes) && tmpl_is(out, yes);
}
static bool tmpl_t_eq(tmpl_run *r, tmpl_args *c, tval *out) { return tmpl_by(r, c, OP2('=', '='), out); }
static bool tmpl_t_ne(tmpl_run *r, tmpl_args *c, tval *out) { return tmpl_by(r, c, OP2('!', '='), out); }
static bool tmpl_t_lt(tmpl_run *r, tmpl_args *c, tval *out) { return tmpl_by(r, c, '<', out); }
static bool tmpl_t_le(tmpl_run *r, tmpl_args *c, tval *out) { return tmpl_by(r, c, OP2('<', '='), out); }
static bool tmpl_t_gt(tmpl_run *r, tmpl_args *c, tval *out) { return tmpl_by(r, c, '>', out); }
static bool tmpl_t_ge(tmpl_run *r, tmpl_args *c, tval *out) { return tmpl_by(r, c, OP2('>', '='), out); }
static bool tmpl_t_in(tmpl_run *r, tmpl_args *c, tval *out) { return tmpl_by(r, c, 'i', out); }

static const tmpl_fn tmpl_test_table[] = {
    {"!=", "other", 1, tmpl_t_ne},         {"<", "other", 1, tmpl_t_lt},       {"<=", "other", 1, tmpl_t_le},
    {"==", "other", 1, tmpl_t_eq},         {">", "other", 1, tmpl_t_gt},       {">=", "other", 1, tmpl_t_ge},
    {"boolean", "", 0, tmpl_t_boolean},    {"callable", "", 0, tmpl_t_callable}, {"defined", "", 0, tmpl_t_defined},
    {"divisibleby", "num", 1, tmpl_t_divisibleby}, {"eq", "other", 1, tmpl_t_eq}, {"equalto", "other", 1, tmpl_t_eq},
    {"escaped", "", 0, tmpl_t_escaped},    {"even", "", 0, tmpl_t_even},       {"false", "", 0, tmpl_t_false},
    {"filter", "", 0, tmpl_t_filter},      {"float", "", 0, tmpl_t_float},     {"ge", "other", 1, tmpl_t_ge},
    {"greaterthan", "other", 1, tmpl_t_gt}, {"gt", "other", 1, tmpl_t_gt},     {"in", "seq", 1, tmpl_t_in},
    {"integer", "", 0, tmpl_t_integer},    {"iterable", "", 0, tmpl_t_iterable}, {"le", "other", 1, tmpl_t_le},
    {"lessthan", "other", 1, tmpl_t_lt},   {"lower", "", 0, tmpl_t_lower},     {"lt", "other", 1, tmpl_t_lt},
    {"mapping", "", 0, tmpl_t_mapping},    {"ne", "other", 1, tmpl_t_ne},      {"none", "", 0, tmpl_t_none},
    {"number", "", 0, tmpl_t_number},      {"odd", "", 0, tmpl_t_odd},         {"sameas", "other", 1, tmpl_t_sameas},
    {"sequence", "", 0, tmpl_t_sequence},  {"string", "", 0, tmpl_t_string},   {"test", "", 0, tmpl_t_test},
    {"true", "", 0, tmpl_t_true},          {"undefined", "", 0, tmpl_t_undefined}, {"upper", "", 0, tmpl_t_upper},
    {0}};

static const tmpl_fn *tmpl_find_fn(const tmpl_fn *table, str name) {
    for (; table->name; table++)
        if (str_is(name, table->name)) return table;
    return NULL;
}
static const tmpl_fn *tmpl_find_filter(str name) { return tmpl_find_fn(tmpl_filter_table, name); }
static const tmpl_fn *tmpl_find_test(str name) { return tmpl_find_fn(tmpl_test_table, name); }

static bool tmpl_t_filter(tmpl_run *r, tmpl_args *c, tval *out) {
    return (void)r, tmpl_is(out, c->self.type == TV_STR && tmpl_find_filter(tv_text(c->self)));
}
static bool tmpl_t_test(tmpl_run *r, tmpl_args *c, tval *out) {
    return (void)r, tmpl_is(out, c->self.type == TV_STR && tmpl_find_test(tv_text(c->self)));
}

/* ---- Methods ---- */

static bool tmpl_text_args(tmpl_run *r, tmpl_args *c, int n) {
    for (int i = 0; i < n; i++)
        if (c->a[i].type != TV_STR) return tmpl_bad_type(r, c->fn->name, c->a[i]);
    return tmpl_work(r, c->self.n);
}

static bool tmpl_m_lower(tmpl_run *r, tmpl_args *c, tval *out) { return tmpl_recase(r, c->self, CASE_LOWER, out); }
static bool tmpl_m_upper(tmpl_run *r, tmpl_args *c, tval *out) { return tmpl_recase(r, c->self, CASE_UPPER, out); }
static bool tmpl_m_capitalize(tmpl_run *r, tmpl_args *c, tval *out) { return tmpl_recase(r, c->self, CASE_CAPITAL, out); }

static bool tmpl_m_split(tmpl_run *r, tmpl_args *c, tval *out) { /* sep maxsplit */
    str s = tv_text(c->self), sep = c->a[0].type == TV_STR ? tv_text(c->a[0]) : STR(" ");
    bool blank = c->a[0].type <= TV_NONE;
    int64_t max = tmpl_is_integer(c->a[1]) && tmpl_integer(c->a[1]) >= 0 ? tmpl_integer(c->a[1]) : INT64_MAX;
    if (!blank && !tmpl_text_args(r, c, 1)) return false;
    if (!sep.n) return tmpl_fail(r, "split: empty separator");
    if (!tmpl_work(r, s.n)) return false;
    tmpl_items *l = NULL;
    for (int pass = 0; pass < 2; pass++) { /* counts the parts, then stores them */
        size_t n = 0;
        str rest = blank ? tmpl_trim(s, true, false) : s;
        for (bool more = !blank || rest.n; more; n++) {
            size_t to = 0, skip = sep.n;
            if ((int64_t)n >= max) to = rest.n;
            else if (blank) while (to < rest.n && !(skip = tmpl_space(rest.p + to, rest.p + rest.n))) to++;
            else to = str_find(rest, sep, 0) < 0 ? rest.n : (size_t)str_find(rest, sep, 0);
            more = to < rest.n;
            if (l) l->v[n] = tv_str(str_sub(rest, 0, to)), l->v[n].flag = c->self.flag;
            if (more) rest = str_sub(rest, to + skip, rest.n);
            if (blank) rest = tmpl_trim(rest, true, false), more = more && rest.n;
        }
        if (!l && !(l = tmpl_new_items(r, n))) return false;
    }
    return *out = tv_list(TV_LIST, l), true;
}

/* Charges for searching backwards, whose worst case is a comparison at every byte. */
static bool tmpl_work_back(tmpl_run *r, str s, str needle) { return tmpl_work(r, s.n * (needle.n / 64 + 1)); }

/* The last `needle` in s, or -1. */
static ptrdiff_t tmpl_rfind(str s, str needle) {
    for (size_t i = s.n + 1; i-- > 0;)
        if (s.n - i >= needle.n && (!needle.n || !memcmp(s.p + i, needle.p, needle.n))) return (ptrdiff_t)i;
    return -1;
}

static bool tmpl_m_rsplit(tmpl_run *r, tmpl_args *c, tval *out) { /* sep maxsplit */
    str s = tv_text(c->self);
    if (c->a[1].type <= TV_NONE || (tmpl_is_integer(c->a[1]) && tmpl_integer(c->a[1]) < 0)) return tmpl_m_split(r, c, out);
    if (!tmpl_is_integer(c->a[1])) return tmpl_bad_type(r, "rsplit", c->a[1]);
    if (c->a[0].type <= TV_NONE) return tmpl_fail(r, "rsplit with maxsplit needs a separator");
    if (!tmpl_text_args(r, c, 1)) return false;
    str sep = tv_text(c->a[0]);
    if (!sep.n) return tmpl_fail(r, "rsplit: empty separator");
    if (!tmpl_work_back(r, s, sep)) return false;
    size_t n = 0, max = (size_t)MIN(tmpl_integer(c->a[1]), (int64_t)s.n);
    for (str rest = s; n < max; n++) { /* how many there are */
        ptrdiff_t at = tmpl_rfind(rest, sep);
        if (at < 0) break;
        rest.n = (size_t)at;
    }
    tmpl_items *l = tmpl_new_items(r, n + 1);
    if (!l) return false;
    for (; n > 0; n--) {
        size_t at = (size_t)tmpl_rfind(s, sep);
        l->v[n] = tv_str(str_sub(s, at + sep.n, s.n));
        s.n = at;
    }
    l->v[0] = tv_str(s);
    return *out = tv_list(TV_LIST, l), true;
}

static bool tmpl_m_splitlines(tmpl_run *r, tmpl_args *c, tval *out) { /* keepends */
    str s = tv_text(c->self), line;
    size_t n = 0, at = 0;
    if (!tmpl_work(r, s.n)) return false;
    while (tmpl_next_line(s, &at, false, &line)) n++;
    tmpl_items *l = tmpl_new_items(r, n);
    if (!l) return false;
    for (n = at = 0; tmpl_next_line(s, &at, tmpl_true(c->a[0]), &line); n++) l->v[n] = tv_str(line);
    return *out = tv_list(TV_LIST, l), true;
}

static bool tmpl_m_partition(tmpl_run *r, tmpl_args *c, tval *out) {
    tmpl_items *l = tmpl_new_items(r, 3);
    if (!l || !tmpl_text_args(r, c, 1)) return false;
    str s = tv_text(c->self), sep = tv_text(c->a[0]);
    if (!sep.n) return tmpl_fail(r, "%s: empty separator", c->fn->name);
    bool last = c->fn->name[0] == 'r';
    if (last && !tmpl_work_back(r, s, sep)) return false;
    ptrdiff_t at = last ? tmpl_rfind(s, sep) : str_find(s, sep, 0);
    for (int i = 0; i < 3; i++) l->v[i] = tv_str(STR(""));
    if (at < 0) l->v[last ? 2 : 0] = c->self;
    if (at < 0) return *out = tv_list(TV_TUPLE, l), true;
    l->v[0] = tv_str(str_sub(s, 0, (size_t)at));
    l->v[1] = c->a[0];
    l->v[2] = tv_str(str_sub(s, (size_t)at + sep.n, s.n));
    return *out = tv_list(TV_TUPLE, l), true;
}

/* startswith and endswith: a text or a tuple of them. */
static bool tmpl_m_at_end(tmpl_run *r, tmpl_args *c, tval *out) {
    bool end = c->fn->name[0] == 'e', yes = false;
    if (!tmpl_work(r, c->self.n)) return false;
    if (c->a[0].type == TV_STR) return tmpl_is(out, (end ? str_ends : str_starts)(tv_text(c->self), tv_text(c->a[0])));
    if (c->a[0].type != TV_TUPLE) return tmpl_bad_type(r, c->fn->name, c->a[0]);
    for (size_t i = 0; i < c->a[0].list->n && !yes; i++) {
        tval v = c->a[0].list->v[i];
        if (v.type != TV_STR) return tmpl_bad_type(r, c->fn->name, v);
        yes = (end ? str_ends : str_starts)(tv_text(c->self), tv_text(v));
        if (!tmpl_work(r, v.n)) return false;
    }
    return tmpl_is(out, yes);
}

static bool tmpl_m_find(tmpl_run *r, tmpl_args *c, tval *out) { /* find, rfind, index, count */
    if (!tmpl_text_args(r, c, 1)) return false;
    str s = tv_text(c->self), sub = tv_text(c->a[0]);
    if (c->fn->name[0] == 'r' && !tmpl_work_back(r, s, sub)) return false;
    ptrdiff_t at = c->fn->name[0] == 'r' ? tmpl_rfind(s, sub) : str_find(s, sub, 0);
    if (c->fn->name[0] == 'i' && at < 0) return tmpl_fail(r, "index: substring not found");
    if (c->fn->name[0] != 'c') return *out = tv_int(at < 0 ? -1 : tmpl_len_cp(str_sub(s, 0, (size_t)at))), true;
    int64_t n = sub.n ? 0 : tmpl_len_cp(s) + 1;
    for (; sub.n && at >= 0; at = str_find(s, sub, (size_t)at + sub.n)) n++;
    return *out = tv_int(n), true;
}

static bool tmpl_m_join(tmpl_run *r, tmpl_args *c, tval *out) {
    tmpl_items *l;
    if (!tmpl_walk(r, c->a[0], &l)) return false;
    for (size_t i = 0; i < l->n; i++)
        if (l->v[i].type != TV_STR) return tmpl_bad_type(r, "join", l->v[i]);
    return tmpl_join(r, l, tv_text(c->self), (tval){0}, out);
}

/* isdigit, isalpha, isspace, isupper ... of ASCII; a text with other letters is an error where the answer hangs on them. */
static bool tmpl_m_kind(tmpl_run *r, tmpl_args *c, tval *out) {
    str s = tv_text(c->self), kind = str_c(c->fn->name + 2);
    bool all = s.n > 0;
    if (!tmpl_work(r, s.n)) return false;
    if (str_is(kind, "upper")) return tmpl_t_upper(r, c, out);
    if (str_is(kind, "lower")) return tmpl_t_lower(r, c, out);
    for (size_t i = 0, k; i < s.n && all; i += k) {
        unsigned char b = (unsigned char)s.p[i];
        size_t space = tmpl_space(s.p + i, s.p + s.n);
        k = tmpl_cp_bytes(str_sub(s, i, s.n), 1);
        if (b >= 0x80 && !str_is(kind, "space"))
            return tmpl_fail(r, "%s of a text that is not ASCII is not supported", c->fn->name);
        all = str_is(kind, "space") ? space > 0 : str_is(kind, "alpha") ? isalpha(b) != 0
              : str_is(kind, "alnum") ? isalnum(b) != 0 : isdigit(b) != 0;
    }
    return tmpl_is(out, all);
}

static bool tmpl_m_removeprefix(tmpl_run *r, tmpl_args *c, tval *out) { /* and removesuffix */
    bool end = c->fn->name[6] == 's';
    if (!tmpl_text_args(r, c, 1)) return false;
    *out = c->self;
    if ((end ? str_ends : str_starts)(tv_text(c->self), tv_text(c->a[0]))) {
        out->n -= c->a[0].n;
        if (!end) out->s += c->a[0].n;
    }
    return true;
}

/* "{} {name}".format(...): fields without a conversion or a format of their own. */
static bool tmpl_m_format(tmpl_run *r, tmpl_args *c, tval *out) {
    str s = tv_text(c->self);
    buf b = {0};
    bool ok = tmpl_work(r, s.n);
    int turn = 0;
    for (size_t i = 0; ok && i < s.n; i++) {
        char ch = s.p[i];
        if (ch != '{' && ch != '}') {
            buf_char(&b, ch);
            continue;
        }
        if (i + 1 < s.n && s.p[i + 1] == ch) {
            buf_char(&b, s.p[++i]);
            continue;
        }
        ptrdiff_t close = ch == '{' ? str_find(s, STR("}"), i) : -1;
        str field = close < 0 ? STR("!") : str_sub(s, i + 1, (size_t)close);
        int64_t k = turn;
        bool fits;
        tval v = {0};
        if (!field.n) turn++;
        if (!field.n || tmpl_to_integer(field, 10, &k, &fits)) v = k >= 0 && k < c->n_pos ? c->pos[k] : v;
        for (int n = 0; field.n && n < c->n_named; n++)
            if (str_eq(c->names[n], field)) v = c->named[n];
        ok = tmpl_work(r, (size_t)c->n_named) && (v.type || tmpl_fail(r, "format: no value for '{%.*s}'", STRF(field))) &&
             tmpl_put_value(r, &b, v, false);
        i = (size_t)MAX(close, 0);
    }
    return tmpl_take(r, &b, ok, out);
}

static bool tmpl_m_items(tmpl_run *r, tmpl_args *c, tval *out) { /* items, keys, values */
    tmpl_items *l;
    const tmpl_dict *d = c->self.dict;
    char which = c->fn->name[0];
    if (which == 'i' ? !tmpl_dict_pairs(r, d, &l) : !(l = tmpl_new_items(r, d->n))) return false;
    for (size_t i = 0; which != 'i' && i < d->n; i++) l->v[i] = d->kv[2 * i + (which == 'v')];
    *out = tv_list(TV_VIEW, l);
    return out->flag = which == 'i' ? VIEW_ITEMS : which == 'k' ? VIEW_KEYS : VIEW_VALUES, true;
}

static bool tmpl_m_get(tmpl_run *r, tmpl_args *c, tval *out) { /* key default */
    bool ok = tmpl_hashable(r, c->a[0]);
    const tval *found = ok ? tmpl_dict_find(r, c->self.dict, c->a[0], &ok) : NULL;
    *out = found ? *found : c->a[1].type ? c->a[1] : tv_none();
    return ok;
}
static bool tmpl_m_copy(tmpl_run *r, tmpl_args *c, tval *out) { return *out = c->self, tmpl_work(r, 1); }

static bool tmpl_m_list_find(tmpl_run *r, tmpl_args *c, tval *out) { /* index, count */
    int64_t n = 0;
    for (size_t i = 0; i < c->self.list->n; i++) {
        bool equal = false;
        if (!tmpl_equal(r, c->self.list->v[i], c->a[0], &equal)) return false;
        if (equal && c->fn->name[0] == 'i') return *out = tv_int((int64_t)i), true;
        n += equal;
    }
    return c->fn->name[0] == 'i' ? tmpl_fail(r, "index: value is not in the list") : (*out = tv_int(n), true);
}

static bool tmpl_m_loop_cycle(tmpl_run *r, tmpl_args *c, tval *out) {
    if (!c->n_pos) return tmpl_fail(r, "no items for cycling given");
    return *out = c->pos[c->self.loop->index0 % c->n_pos], true;
}
static bool tmpl_m_loop_changed(tmpl_run *r, tmpl_args *c, tval *out) {
    tmpl_items *seen = tmpl_new_items(r, (size_t)c->n_pos);
    bool equal = false;
    if (!seen) return false;
    for (int i = 0; i < c->n_pos; i++) seen->v[i] = c->pos[i];
    tval now = tv_list(TV_TUPLE, seen);
    if (c->self.loop->changed.type && !tmpl_equal(r, now, c->self.loop->changed, &equal)) return false;
    c->self.loop->changed = now;
    return tmpl_is(out, !equal);
}

static const tmpl_fn tmpl_str_methods[] = {
    {"capitalize", "", 0, tmpl_m_capitalize},
    {"count", "sub", 1, tmpl_m_find},
    {"endswith", "suffix", 1, tmpl_m_at_end},
    {"find", "sub", 1, tmpl_m_find},
    {"format", "*", 0, tmpl_m_format},
    {"index", "sub", 1, tmpl_m_find},
    {"isalnum", "", 0, tmpl_m_kind},
    {"isalpha", "", 0, tmpl_m_kind},
    {"isdecimal", "", 0, tmpl_m_kind},
    {"isdigit", "", 0, tmpl_m_kind},
    {"islower", "", 0, tmpl_m_kind},
    {"isnumeric", "", 0, tmpl_m_kind},
    {"isspace", "", 0, tmpl_m_kind},
    {"isupper", "", 0, tmpl_m_kind},
    {"join", "iterable", 1, tmpl_m_join},
    {"lower", "", 0, tmpl_m_lower},
    {"lstrip", "chars", 0, tmpl_m_lstrip},
    {"partition", "sep", 1, tmpl_m_partition},
    {"removeprefix", "prefix", 1, tmpl_m_removeprefix},
    {"removesuffix", "suffix", 1, tmpl_m_removeprefix},
    {"replace", "old new count", 2, tmpl_m_replace},
    {"rfind", "sub", 1, tmpl_m_find},
    {"rpartition", "sep", 1, tmpl_m_partition},
    {"rsplit", "sep maxsplit", 0, tmpl_m_rsplit},
    {"rstrip", "chars", 0, tmpl_m_rstrip},
    {"split", "sep maxsplit", 0, tmpl_m_split},
    {"splitlines", "keepends", 0, tmpl_m_splitlines},
    {"startswith", "prefix", 1, tmpl_m_at_end},
    {"strip", "chars", 0, tmpl_m_strip},
    {"title", "", 0, tmpl_m_title},
    {"upper", "", 0, tmpl_m_upper},
    {0}};
static const tmpl_fn tmpl_dict_methods[] = {
    {"copy", "", 0, tmpl_m_copy},
    {"get", "key default", 1, tmpl_m_get},
    {"items", "", 0, tmpl_m_items},
    {"keys", "", 0, tmpl_m_items},
    {"values", "", 0, tmpl_m_items},
    {0}};
static const tmpl_fn tmpl_list_methods[] = {{"copy", "", 0, tmpl_m_copy}, {"count", "value", 1, tmpl_m_list_find},
                                            {"index", "value", 1, tmpl_m_list_find}, {0}};
static const tmpl_fn tmpl_loop_methods[] = {{"changed", "*", 0, tmpl_m_loop_changed}, {"cycle", "*", 0, tmpl_m_loop_cycle},
    {0}};

static const tmpl_fn *tmpl_method_of(int type, str name) {
    switch (type) {
    case TV_STR: return tmpl_find_fn(tmpl_str_methods, name);
    case TV_DICT: return tmpl_find_fn(tmpl_dict_methods, name);
    case TV_LIST: return tmpl_find_fn(tmpl_list_methods, name);
    case TV_TUPLE: return tmpl_find_fn(tmpl_list_methods + 1, name);
    case TV_LOOP: return tmpl_find_fn(tmpl_loop_methods, name);
    default: return NULL;
    }
}

/* Methods that would change a value: the immutable sandbox has them fail when they are used. */
static bool tmpl_refused_method(int type, str name) {
    static const char *const of_list[] = {"append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort"};
    static const char *const of_dict[] = {"clear", "pop", "popitem", "setdefault", "update"};
    for (int i = 0; type == TV_LIST && i < COUNT(of_list); i++)
        if (str_is(name, of_list[i])) return true;
    for (int i = 0; type == TV_DICT && i < COUNT(of_dict); i++)
        if (str_is(name, of_dict[i])) return true;
    return false;
}

/* ---- Functions ---- */

/* range([start,] stop[, step]); at most 100,000 numbers, as in the sandbox. */
static bool tmpl_g_range(tmpl_run *r, tmpl_args *c, tval *out) {
    for (int i = 0; i < 3; i++)
        if (c->a[i].type && !tmpl_is_integer(c->a[i])) return tmpl_bad_type(r, "range", c->a[i]);
    bool one = !c->a[1].type;
    int64_t from = one ? 0 : tmpl_integer(c->a[0]), to = tmpl_integer(c->a[one ? 0 : 1]);
    int64_t step = c->a[2].type ? tmpl_integer(c->a[2]) : 1;
    if (!step) return tmpl_fail(r, "range: step 0");
    uint64_t span = step > 0 ? (uint64_t)to - (uint64_t)from : (uint64_t)from - (uint64_t)to;
    uint64_t by = step > 0 ? (uint64_t)step : 0 - (uint64_t)step;
    uint64_t n = (step > 0 ? from < to : from > to) ? (span - 1) / by + 1 : 0;
    if (n > 100000) return tmpl_fail(r, "range: more than 100000 numbers");
    tmpl_items *l = tmpl_new_items(r, n);
    for (uint64_t i = 0; l && i < n; i++) l->v[i] = tv_int((int64_t)((uint64_t)from + i * (uint64_t)step));
    return *out = tv_list(TV_VIEW, l), l != NULL;
}

/* dict(...) and namespace(...): a mapping or pairs to start from, then name=value. */
static bool tmpl_g_dict(tmpl_run *r, tmpl_args *c, tval *out) {
    tmpl_dict *d = tmpl_new_dict(r);
    tmpl_items *l = NULL;
    bool ok = d && (c->n_pos < 2 || tmpl_fail(r, "%s: one value at most", c->fn->name));
    if (ok && c->n_pos && c->pos[0].type == TV_DICT) ok = tmpl_dict_pairs(r, c->pos[0].dict, &l);
    else if (ok && c->n_pos) ok = tmpl_walk(r, c->pos[0], &l);
    for (size_t i = 0; ok && l && i < l->n; i++) {
        tmpl_items *pair;
        ok = tmpl_walk(r, l->v[i], &pair) && (pair->n == 2 || tmpl_fail(r, "%s: pairs expected", c->fn->name)) &&
             tmpl_dict_set(r, d, pair->v[0], pair->v[1]);
    }
    for (int i = 0; ok && i < c->n_named; i++) ok = tmpl_dict_set(r, d, tv_str(c->names[i]), c->named[i]);
    *out = (tval){.type = c->fn->name[0] == 'd' ? TV_DICT : TV_NAMESPACE, .dict = d};
    return ok;
}

static bool tmpl_g_raise(tmpl_run *r, tmpl_args *c, tval *out) {
    buf b = {0};
    if (tmpl_take(r, &b, tmpl_put_value(r, &b, c->a[0], false), out)) tmpl_fail(r, "%.*s", STRF(tv_text(*out)));
    return false;
}

/* One conversion of strftime in the C locale; false if it is not known. `pad` false: no leading zero or space ("%-d"). */
static bool tmpl_time_part(buf *b, const tmpl_time *t, char c, bool pad) {
    static const char *const days[] = {"Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"};
    static const char *const months[] = {"January", "February", "March", "April", "May", "June", "July", "August",
        "September", "October", "November", "December"};
    const char *day = days[((t->weekday % 7) + 7) % 7], *month = months[((t->month % 12) + 12) % 12], *z;
    int year = t->year + 1900, hour12 = t->hour % 12 ? t->hour % 12 : 12;
    switch (c) {
    case 'a': buf_put(b, day, 3); return true;
    case 'A': buf_c(b, day); return true;
    case 'b': case 'h': buf_put(b, month, 3); return true;
    case 'B': buf_c(b, month); return true;
    case 'p': buf_c(b, t->hour < 12 ? "AM" : "PM"); return true;
    case 'n': buf_char(b, '\n'); return true;
    case 't': buf_char(b, '\t'); return true;
    case '%': buf_char(b, '%'); return true;
    case 'f': buf_c(b, "000000"); return true;
    case 'z': case 'Z': return true; /* no time zone is known: empty, as for Python's naive times */
    case 'Y': buf_printf(b, "%d", year); return true;
    case 'j': buf_printf(b, pad ? "%03d" : "%d", t->yearday + 1); return true;
    case 'u': buf_printf(b, "%d", t->weekday ? t->weekday : 7); return true;
    case 'w': buf_printf(b, "%d", t->weekday); return true;
    case 'e': buf_printf(b, pad ? "%2d" : "%d", t->day); return true;
    case 'd': buf_printf(b, pad ? "%02d" : "%d", t->day); return true;
    case 'm': buf_printf(b, pad ? "%02d" : "%d", t->month + 1); return true;
    case 'y': buf_printf(b, pad ? "%02d" : "%d", ((year % 100) + 100) % 100); return true;
    case 'C': buf_printf(b, pad ? "%02d" : "%d", year / 100); return true;
    case 'H': buf_printf(b, pad ? "%02d" : "%d", t->hour); return true;
    case 'k': buf_printf(b, pad ? "%2d" : "%d", t->hour); return true;
    case 'I': buf_printf(b, pad ? "%02d" : "%d", hour12); return true;
    case 'l': buf_printf(b, pad ? "%2d" : "%d", hour12); return true;
    case 'M': buf_printf(b, pad ? "%02d" : "%d", t->minute); return true;
    case 'S': buf_printf(b, pad ? "%02d" : "%d", t->second); return true;
    case 'U': buf_printf(b, pad ? "%02d" : "%d", (t->yearday + 7 - t->weekday) / 7); return true;
    case 'W': buf_printf(b, pad ? "%02d" : "%d", (t->yearday + 7 - (t->weekday + 6) % 7) / 7); return true;
    case 'D': case 'x': z = "m/d/y"; break;
    case 'F': z = "Y-m-d"; break;
    case 'T': case 'X': z = "H:M:S"; break;
    case 'R': z = "H:M"; break;
    case 'r': z = "I:M:S p"; break;
    case 'c': z = "a b e H:M:S Y"; break;
    default: return false;
    }
    for (; *z; z++)
        if (isalpha((unsigned char)*z)) tmpl_time_part(b, t, *z, true);
        else buf_char(b, *z);
    return true;
}

static bool tmpl_g_strftime(tmpl_run *r, tmpl_args *c, tval *out) { /* format */
    if (c->a[0].type != TV_STR) return tmpl_bad_type(r, "strftime_now", c->a[0]);
    str s = tv_text(c->a[0]);
    buf b = {0};
    bool ok = s.n <= r->max_bytes / 32 ? tmpl_work(r, s.n) : tmpl_too_long(r);
    for (size_t i = 0; ok && i < s.n; i++) {
        bool pad = !(i + 1 < s.n && s.p[i] == '%' && s.p[i + 1] == '-');
        if (s.p[i] != '%') buf_char(&b, s.p[i]);
        else if ((i += pad ? 1 : 2) >= s.n || !tmpl_time_part(&b, &r->now, s.p[i], pad))
            ok = tmpl_fail(r, "strftime_now: format '%.*s' is not supported", STRF(s));
    }
    return tmpl_take(r, &b, ok, out);
}

static bool tmpl_g_missing(tmpl_run *r, tmpl_args *c, tval *out) {
    return (void)out, tmpl_fail(r, "%s() is not supported", c->fn->name);
}

static const tmpl_fn tmpl_functions[] = {
    {"cycler", "*", 0, tmpl_g_missing},
    {"dict", "*", 0, tmpl_g_dict},
    {"joiner", "*", 0, tmpl_g_missing},
    {"lipsum", "*", 0, tmpl_g_missing},
    {"namespace", "*", 0, tmpl_g_dict},
    {"raise_exception", "message", 1, tmpl_g_raise},
    {"range", "start stop step", 1, tmpl_g_range},
    {"strftime_now", "format", 1, tmpl_g_strftime},
    {0}};

/* ---- Calls ---- */

/* Evaluates a chain of arguments. */
static bool tmpl_eval_args(tmpl_run *r, const tmpl_node *chain, tmpl_args *c) {
    int n_pos = 0, n_named = 0;
    for (const tmpl_node *n = chain; n; n = n->next) n->kind == TN_KEYWORD ? n_named++ : n_pos++;
    *c = (tmpl_args){0};
    if (n_pos && !(c->pos = tmpl_alloc(r, (size_t)n_pos, sizeof *c->pos))) return false;
    if (n_named && !(c->named = tmpl_alloc(r, (size_t)n_named, sizeof *c->named))) return false;
    if (n_named && !(c->names = tmpl_alloc(r, (size_t)n_named, sizeof *c->names))) return false;
    for (const tmpl_node *n = chain; n; n = n->next)
        if (n->kind != TN_KEYWORD) {
            if (!tmpl_eval(r, n, &c->pos[c->n_pos++])) return false;
        } else {
            for (int i = 0; i < c->n_named; i++)
                if (str_eq(c->names[i], n->s)) return tmpl_fail(r, "argument '%.*s' is given twice", STRF(n->s));
            c->names[c->n_named] = n->s;
            if (!tmpl_eval(r, n->a, &c->named[c->n_named++])) return false;
        }
    return true;
}

/* Binds the arguments to the parameters of fn and runs it on c->self. */
static bool tmpl_apply(tmpl_run *r, const tmpl_fn *fn, tmpl_args *c, tval *out) {
    c->fn = fn;
    int n = 0, used = 0;
    for (const char *p = fn->params; *p && *p != '*'; n++) {
        str name = {p, strcspn(p, " ")};
        c->a[n] = n < c->n_pos ? c->pos[n] : (tval){0};
        for (int i = 0; i < c->n_named; i++)
            if (str_eq(c->names[i], name)) {
                if (n < c->n_pos) return tmpl_fail(r, "%s: argument '%.*s' is given twice", fn->name, STRF(name));
                c->a[n] = c->named[i], used++;
            }
        p += name.n + (p[name.n] == ' ');
    }
    if (*fn->params != '*') {
        if (c->n_pos > n) return tmpl_fail(r, "%s: %d arguments, at most %d", fn->name, c->n_pos, n);
        if (used < c->n_named) return tmpl_fail(r, "%s: an argument name is not known", fn->name);
        for (int i = 0; i < fn->need; i++)
            if (!c->a[i].type) return tmpl_fail(r, "%s: argument %d is missing", fn->name, i + 1);
    }
    if (!tmpl_enter(r)) return false;
    bool ok = tmpl_work(r, 1) && fn->run(r, c, out);
    r->depth++;
    return ok;
}

static bool tmpl_call(tmpl_run *r, const tmpl_node *n, tval caller, tval *out) {
    tmpl_args c;
    tval callee;
    if (!tmpl_eval(r, n->a, &callee) || !tmpl_eval_args(r, n->b, &c)) return false;
    switch (callee.type) {
    case TV_MACRO: return tmpl_call_macro(r, &c, callee.macro, caller, out);
    case TV_METHOD: c.self = callee.method->self; return tmpl_apply(r, callee.method->fn, &c, out);
    case TV_FUNCTION: return tmpl_apply(r, callee.fn, &c, out);
    case TV_UNDEFINED: return tmpl_undefined(r, callee);
    case TV_LOOP: return tmpl_fail(r, "recursive loops are not supported");
    default: return tmpl_fail(r, "'%s' object is not callable", tmpl_type_name(callee.type));
    }
}

/* ---- Operators ---- */

/* a + b for texts. The latest long result has room behind it: when it is the left side again, it grows where it is, so that
 * building a text piece by piece is linear. Its earlier, shorter self stays as it was. */
static bool tmpl_concat(tmpl_run *r, str a, str b, tval *out) {
    if (a.n + b.n > r->max_bytes) return tmpl_too_long(r);
    if (!tmpl_work(r, b.n)) return false;
    if (a.n && a.p == r->last_text && a.n == r->last_n && r->last_cap - a.n >= b.n) {
        memcpy(r->last_text + a.n, b.p, b.n);
    } else {
        size_t cap = a.n + b.n < 1024 ? a.n + b.n : 2 * (a.n + b.n);
        char *p = tmpl_alloc(r, cap + 1, 1);
        if (!p) return false;
        if (a.n) memcpy(p, a.p, a.n);
        if (b.n) memcpy(p + a.n, b.p, b.n);
        a.p = p;
        if (cap > a.n + b.n) r->last_text = p, r->last_cap = cap;
    }
    if (a.p == r->last_text) r->last_n = a.n + b.n;
    *out = tv_str((str){a.p, a.n + b.n});
    return true;
}

static bool tmpl_add(tmpl_run *r, tval a, tval b, tval *out) {
    if (a.type == TV_STR && b.type == TV_STR) {
        bool safe = a.flag || b.flag; /* a safe text escapes what it is joined with */
        if (safe && (!tmpl_escape_html(r, a, &a) || !tmpl_escape_html(r, b, &b))) return false;
        if (!tmpl_concat(r, tv_text(a), tv_text(b), out)) return false;
        out->flag = safe;
        return true;
    }
    tmpl_items *l = tmpl_new_items(r, a.list->n + b.list->n);
    if (!l) return false;
    memcpy(l->v, a.list->v, a.list->n * sizeof(tval));
    memcpy(l->v + a.list->n, b.list->v, b.list->n * sizeof(tval));
    return *out = tv_list(a.type, l), true;
}

/* A text or list n times. */
static bool tmpl_repeat(tmpl_run *r, tval v, int64_t n, tval *out) {
    size_t size = v.type == TV_STR ? v.n : v.list->n, times = n > 0 && size ? (size_t)n : 0;
    if (times && size > r->max_bytes / times) return tmpl_too_long(r);
    if (v.type == TV_STR) {
        char *p = tmpl_alloc(r, size * times + 1, 1);
        for (size_t i = 0; p && i < times; i++) memcpy(p + i * size, v.s, size);
        *out = tv_str((str){p, size * times});
        return out->flag = v.flag, p != NULL;
    }
    tmpl_items *l = tmpl_new_items(r, size * times);
    for (size_t i = 0; l && i < times; i++) memcpy(l->v + i * size, v.list->v, size * sizeof(tval));
    return *out = tv_list(v.type, l), l != NULL;
}

/* The conversions of %: s, r, d, i, f, x, %, with flags, width and precision. */
static bool tmpl_percent_one(tmpl_run *r, buf *b, str spec, char conv, tval v) {
    char form[40], z[600];
    int width = 0, digits = -1;
    size_t i = 0, head = 0;
    while (i < spec.n && strchr("-+ 0#", spec.p[i])) i++;
    for (head = i; i < spec.n && isdigit((unsigned char)spec.p[i]); i++)
        width = MIN(width * 10 + spec.p[i] - '0', 1000);
    if (i < spec.n && spec.p[i] == '.')
        for (i++, digits = 0; i < spec.n && isdigit((unsigned char)spec.p[i]); i++)
            digits = MIN(digits * 10 + spec.p[i] - '0', 1000);
    if (i < spec.n || head > 5 || width > 200 || digits > 60)
        return tmpl_fail(r, "%%: '%%%.*s%c' is not supported", STRF(spec), conv);
    if (conv == 's' || conv == 'r') {
        buf t = {0};
        bool ok = tmpl_put_value(r, &t, v, conv == 'r');
        if (ok && digits >= 0) t.n = tmpl_cp_bytes(buf_view(&t), digits);
        int room = ok ? width - tmpl_len_cp(buf_view(&t)) : 0;
        bool left = memchr(spec.p, '-', head) != NULL;
        while (ok && !left && room-- > 0) buf_char(b, ' ');
        ok = ok && tmpl_put(r, b, buf_view(&t));
        while (ok && left && room-- > 0) buf_char(b, ' ');
        buf_free(&t);
        return ok;
    }
    if (!tmpl_is_number(v)) return tmpl_bad_type(r, "%", v);
    tval whole = v;
    if (v.type == TV_FLOAT && strchr("di", conv) && !(isfinite(v.f) && tmpl_truncate_double(r, v.f, &whole)))
        return tmpl_bad_type(r, "%", v);
    if (v.type == TV_FLOAT && strchr("xX", conv)) return tmpl_bad_type(r, "%", v);
    snprintf(form, sizeof form, "%%%.*s%s%c", (int)spec.n, spec.p, strchr("dixX", conv) ? "ll" : "", conv);
    if (strchr("di", conv)) snprintf(z, sizeof z, form, (long long)tmpl_integer(whole));
    else if (strchr("xX", conv) && tmpl_integer(v) >= 0) snprintf(z, sizeof z, form, (unsigned long long)tmpl_integer(v));
    else if (strchr("fFeEgG", conv)) snprintf(z, sizeof z, form, tmpl_double(v));
    else return tmpl_fail(r, "%%: '%%%c' of this value is not supported", conv);
    return tmpl_put_c(r, b, z);
}

/* s % args. */
static bool tmpl_percent(tmpl_run *r, str s, tmpl_items *args, const tmpl_args *named, tval *out) {
    buf b = {0};
    size_t used = 0;
    bool ok = tmpl_work(r, s.n);
    for (size_t i = 0; ok && i < s.n; i++) {
        if (s.p[i] != '%') {
            buf_char(&b, s.p[i]);
            continue;
        }
        size_t from = ++i;
        tval v = {0};
        if (i < s.n && s.p[i] == '(') {
            ptrdiff_t close = str_find(s, STR(")"), i);
            for (int k = 0; named && close > 0 && k < named->n_named; k++)
                if (str_eq(named->names[k], str_sub(s, i + 1, (size_t)close))) v = named->named[k];
            if (!v.type) ok = tmpl_fail(r, "%%: a named value is missing");
            else from = i = (size_t)close + 1;
        }
        while (ok && i < s.n && strchr("-+ 0123456789.#", s.p[i])) i++;
        char conv = i < s.n ? s.p[i] : 0;
        if (!ok) break;
        if (conv == '%') {
            buf_char(&b, '%');
            continue;
        }
        if (!conv || !strchr("srdifFeEgGxX", conv)) ok = tmpl_fail(r, "%%: '%%%c' is not supported", conv ? conv : ' ');
        else if (!v.type && used == args->n) ok = tmpl_fail(r, "%%: not enough values");
        else ok = tmpl_percent_one(r, &b, str_sub(s, from, i), conv, v.type ? v : args->v[used++]);
    }
    /* "a" % [1] is "a" in Python */
    bool may_stay = args->n == 1 && args->v[0].type >= TV_LIST && args->v[0].type <= TV_DICT;
    may_stay |= args->n == 1 && args->v[0].type == TV_UNDEFINED;
    if (ok && used < args->n && !(named && named->n_named) && !may_stay) ok = tmpl_fail(r, "%%: too many values");
    return tmpl_take(r, &b, ok, out);
}

static bool tmpl_percent_op(tmpl_run *r, tval a, tval b, tval *out) {
    tmpl_items *args = b.type == TV_TUPLE ? b.list : tmpl_new_items(r, 1);
    if (!args) return false;
    if (b.type != TV_TUPLE) args->v[0] = b;
    return tmpl_percent(r, tv_text(a), args, NULL, out);
}

static bool tmpl_int_op(tmpl_run *r, int op, int64_t a, int64_t b, tval *out) {
    int64_t v = 0;
    bool over = false;
    switch (op) {
    case '+': over = __builtin_add_overflow(a, b, &v); break;
    case '-': over = __builtin_sub_overflow(a, b, &v); break;
    case '*': over = __builtin_mul_overflow(a, b, &v); break;
    case OP2('/', '/'): case '%': /* rounded down, the remainder has b's sign */
        if (!b) return tmpl_fail(r, "division by zero");
        if (b == -1) over = op != '%' && __builtin_sub_overflow((int64_t)0, a, &v);
        else v = op == '%' ? a % b : a / b;
        if (b != -1 && a % b && ((a % b < 0) != (b < 0))) v += op == '%' ? b : -1;
        break;
    case OP2('*', '*'):
        v = 1;
        if (b < 0) return *out = tv_float(pow((double)a, (double)b)), a != 0 || tmpl_fail(r, "division by zero");
        if ((a == 0 || a == 1 || a == -1) && b > 2) b = 2 - (b & 1);
        for (; b > 0 && !over; b--) over = __builtin_mul_overflow(v, a, &v);
        break;
    default: /* '/' */
        if (!b) return tmpl_fail(r, "division by zero");
        return *out = tv_float((double)a / (double)b), true;
    }
    return over ? tmpl_fail(r, "an integer beyond 64 bits") : (*out = tv_int(v), true);
}

static bool tmpl_float_op(tmpl_run *r, int op, double a, double b, tval *out) {
    double m;
    if ((op == '/' || op == '%' || op == OP2('/', '/')) && b == 0) return tmpl_fail(r, "division by zero");
    switch (op) {
    case '+': a += b; break;
    case '-': a -= b; break;
    case '*': a *= b; break;
    case '/': a /= b; break;
    case OP2('*', '*'):
        if (a < 0 && b != floor(b)) return tmpl_fail(r, "a root of a negative number");
        a = pow(a, b);
        break;
    default:
        m = fmod(a, b);
        if (m != 0 && (m < 0) != (b < 0)) m += b;
        a = op == '%' ? (m == 0 ? copysign(0, b) : m) : floor((a - m) / b + 0.5);
    }
    return *out = tv_float(a), true;
}

static bool tmpl_binary(tmpl_run *r, int op, tval a, tval b, tval *out) {
    if (a.type == TV_UNDEFINED || b.type == TV_UNDEFINED) {
        if (op != '%' || a.type != TV_STR) return tmpl_undefined(r, a.type == TV_UNDEFINED ? a : b);
    }
    if (tmpl_is_integer(a) && tmpl_is_integer(b)) return tmpl_int_op(r, op, tmpl_integer(a), tmpl_integer(b), out);
    if (tmpl_is_number(a) && tmpl_is_number(b)) return tmpl_float_op(r, op, tmpl_double(a), tmpl_double(b), out);
    bool list = a.type == TV_LIST || a.type == TV_TUPLE;
    if (op == '+' && a.type == b.type && (a.type == TV_STR || list)) return tmpl_add(r, a, b, out);
    if (op == '*' && (a.type == TV_STR || list) && tmpl_is_integer(b)) return tmpl_repeat(r, a, tmpl_integer(b), out);
    if (op == '*' && tmpl_is_integer(a) && (b.type == TV_STR || b.type == TV_LIST || b.type == TV_TUPLE))
        return tmpl_repeat(r, b, tmpl_integer(a), out);
    if (op == '%' && a.type == TV_STR) return tmpl_percent_op(r, a, b, out);
    char z[3] = {(char)op, (char)(op >> 8), 0};
    return tmpl_fail(r, "'%s' does not go with '%s' and '%s'", z, tmpl_type_name(a.type), tmpl_type_name(b.type));
}

static bool tmpl_contains(tmpl_run *r, tval needle, tval in, bool *yes) {
    bool ok = true;
    *yes = false;
    if (in.type == TV_STR) {
        if (needle.type != TV_STR) return tmpl_bad_type(r, "'in' a text", needle);
        *yes = str_find(tv_text(in), tv_text(needle), 0) >= 0;
        return tmpl_work(r, in.n);
    }
    if (in.type == TV_DICT) {
        *yes = tmpl_hashable(r, needle) && tmpl_dict_find(r, in.dict, needle, &ok);
        return ok && (needle.type < TV_LIST || needle.type == TV_TUPLE || tmpl_hashable(r, needle));
    }
    tmpl_items *l;
    if (!tmpl_walk(r, in, &l)) return false;
    for (size_t i = 0; i < l->n && !*yes; i++)
        if (!tmpl_equal(r, l->v[i], needle, yes)) return false;
    return true;
}

static bool tmpl_compare(tmpl_run *r, int op, tval a, tval b, bool *yes) {
    int order = 0;
    switch (op) {
    case OP2('=', '='): return tmpl_equal(r, a, b, yes);
    case OP2('!', '='): return tmpl_equal(r, a, b, yes) && (*yes = !*yes, true);
    case 'i': return tmpl_contains(r, a, b, yes);
    case 'n': return tmpl_contains(r, a, b, yes) && (*yes = !*yes, true);
    default: break;
    }
    if (!tmpl_order(r, a, b, &order)) return false;
    bool nan = (a.type == TV_FLOAT && isnan(a.f)) || (b.type == TV_FLOAT && isnan(b.f));
    *yes = !nan && (op == '<' ? order < 0 : op == '>' ? order > 0 : op == OP2('<', '=') ? order <= 0 : order >= 0);
    return true;
}

/* ---- Expressions ---- */

static bool tmpl_eval_name(tmpl_run *r, const tmpl_node *n, tval *out) {
    if (!tmpl_get_var(r, n->id, out)) return false;
    if (!out->type) *out = tv_undefined(n->s, 0);
    return true;
}

static bool tmpl_eval_list(tmpl_run *r, const tmpl_node *chain, tmpl_items **out) {
    size_t n = 0;
    for (const tmpl_node *it = chain; it; it = it->next) n++;
    if (!(*out = tmpl_new_items(r, n))) return false;
    n = 0;
    for (const tmpl_node *it = chain; it; it = it->next)
        if (!tmpl_eval(r, it, &(*out)->v[n++])) return false;
    return true;
}

static bool tmpl_eval_dict(tmpl_run *r, const tmpl_node *n, tval *out) {
    tmpl_dict *d = tmpl_new_dict(r);
    if (!d) return false;
    for (const tmpl_node *key = n->b; key; key = key->next->next) {
        tval k, v;
        if (!tmpl_eval(r, key, &k) || !tmpl_eval(r, key->next, &v) || !tmpl_dict_set(r, d, k, v)) return false;
    }
    *out = (tval){.type = TV_DICT, .dict = d};
    return true;
}

/* A slice's bound as an index into 0..n (-1..n-1 for a negative step), as Python's slice.indices. */
static bool tmpl_bound(tmpl_run *r, const tmpl_node *e, int64_t n, int64_t step, int64_t otherwise, int64_t *out) {
    tval v = tv_none();
    if (e && !tmpl_eval(r, e, &v)) return false;
    *out = otherwise;
    if (v.type == TV_NONE) return true;
    if (!tmpl_is_integer(v)) return tmpl_bad_type(r, "a slice", v);
    int64_t i = tmpl_integer(v), low = step < 0 ? -1 : 0, high = step < 0 ? n - 1 : n;
    if (i < 0) i = i < -n ? low : i + n;
    *out = MIN(MAX(i, low), high);
    return true;
}

static bool tmpl_eval_slice(tmpl_run *r, const tmpl_node *n, tval *out) {
    tval v, step_v = tv_none();
    int64_t from, to;
    if (!tmpl_eval(r, n->a, &v) || (n->d && !tmpl_eval(r, n->d, &step_v))) return false;
    bool list = v.type == TV_LIST || v.type == TV_TUPLE || (v.type == TV_VIEW && v.flag == VIEW_RANGE);
    if (v.type != TV_STR && !list) return tmpl_bad_type(r, "a slice", v);
    if (step_v.type != TV_NONE && (!tmpl_is_integer(step_v) || !tmpl_integer(step_v)))
        return tmpl_fail(r, "slice: wrong step");
    int64_t step = step_v.type == TV_NONE ? 1 : tmpl_integer(step_v), len = tmpl_length(v);
    step = MAX(MIN(step, (int64_t)1 << 40), -((int64_t)1 << 40));
    if (!tmpl_work(r, v.type == TV_STR ? v.n : 0)) return false;
    if (!tmpl_bound(r, n->b, len, step, step < 0 ? len - 1 : 0, &from) ||
        !tmpl_bound(r, n->c, len, step, step < 0 ? -1 : len, &to))
        return false;
    if (v.type == TV_STR && step == 1) {
        str s = tv_text(v);
        size_t a = tmpl_cp_bytes(s, from), b = a + tmpl_cp_bytes(str_sub(s, a, s.n), MAX(to - from, 0));
        *out = tv_str(str_sub(s, a, b));
        return out->flag = v.flag, true;
    }
    tmpl_items *all, *l;
    int64_t count = step > 0 ? (to > from ? (to - from - 1) / step + 1 : 0) : (from > to ? (from - to - 1) / -step + 1 : 0);
    if (!tmpl_walk(r, v, &all) || !(l = tmpl_new_items(r, (size_t)count))) return false;
    for (int64_t i = 0; i < count; i++) l->v[i] = all->v[from + i * step];
    if (v.type == TV_STR) return tmpl_join(r, l, STR(""), (tval){0}, out);
    return *out = tv_list(v.type, l), true;
}

static bool tmpl_eval_sign(tmpl_run *r, const tmpl_node *n, tval *out) {
    tval v;
    if (!tmpl_eval(r, n->a, &v)) return false;
    if (!tmpl_is_number(v)) return tmpl_bad_type(r, "a sign", v);
    if (v.type == TV_FLOAT) return *out = tv_float(n->op == '-' ? -v.f : v.f), true;
    return tmpl_int_op(r, n->op, 0, tmpl_integer(v), out);
}

static bool tmpl_eval_compare(tmpl_run *r, const tmpl_node *n, tval *out) { /* a < b < c: b is evaluated once */
    tval left, right;
    bool yes = true;
    if (!tmpl_eval(r, n->a, &left)) return false;
    for (const tmpl_node *part = n->b; part && yes; part = part->next, left = right)
        if (!tmpl_eval(r, part->a, &right) || !tmpl_compare(r, part->op, left, right, &yes)) return false;
    return *out = tv_bool(yes), true;
}

static bool tmpl_eval_concat(tmpl_run *r, const tmpl_node *n, tval *out) {
    tval first, v, text;
    if (!tmpl_eval(r, n->b, &first) || !tmpl_to_text(r, first, out)) return false;
    for (const tmpl_node *it = n->b->next; it; it = it->next)
        if (!tmpl_eval(r, it, &v) || !tmpl_to_text(r, v, &text) || !tmpl_concat(r, tv_text(*out), tv_text(text), out))
            return false;
    out->flag = 0;
    return true;
}

static bool tmpl_eval_applied(tmpl_run *r, const tmpl_node *n, tval *out) { /* filter or test */
    tmpl_args c;
    tval self;
    if (!tmpl_eval(r, n->a, &self) || !tmpl_eval_args(r, n->b, &c)) return false;
    if (!n->fn) return tmpl_fail(r, "%s '%.*s' is not supported", n->kind == TN_FILTER ? "filter" : "test", STRF(n->s));
    c.self = self;
    if (!tmpl_apply(r, n->fn, &c, out)) return false;
    if (n->kind == TN_TEST && n->op) *out = tv_bool(!tmpl_true(*out));
    return true;
}

static bool tmpl_eval_any(tmpl_run *r, const tmpl_node *n, tval *out) {
    tval a, b;
    tmpl_items *l;
    switch (n->kind) {
    case TN_CONST: return *out = n->v, true;
    case TN_NAME: return tmpl_eval_name(r, n, out);
    case TN_LIST: return tmpl_eval_list(r, n->b, &l) && (*out = tv_list(TV_LIST, l), true);
    case TN_TUPLE: return tmpl_eval_list(r, n->b, &l) && (*out = tv_list(TV_TUPLE, l), true);
    case TN_DICT: return tmpl_eval_dict(r, n, out);
    case TN_ATTR: return tmpl_eval(r, n->a, &a) && tmpl_attr(r, a, n->s, out);
    case TN_ITEM: return tmpl_eval(r, n->a, &a) && tmpl_eval(r, n->b, &b) && tmpl_item(r, a, b, out);
    case TN_SLICE: return tmpl_eval_slice(r, n, out);
    case TN_CALL: return tmpl_call(r, n, (tval){0}, out);
    case TN_FILTER: case TN_TEST: return tmpl_eval_applied(r, n, out);
    case TN_NOT: return tmpl_eval(r, n->a, &a) && (*out = tv_bool(!tmpl_true(a)), true);
    case TN_SIGN: return tmpl_eval_sign(r, n, out);
    case TN_BINARY:
        if (!tmpl_eval(r, n->a, &a)) return false;
        if ((n->op == 'o' && tmpl_true(a)) || (n->op == 'a' && !tmpl_true(a))) return *out = a, true;
        if (!tmpl_eval(r, n->b, &b)) return false;
        return n->op == 'o' || n->op == 'a' ? (*out = b, true) : tmpl_binary(r, n->op, a, b, out);
    case TN_CONCAT: return tmpl_eval_concat(r, n, out);
    case TN_COMPARE: return tmpl_eval_compare(r, n, out);
    case TN_COND:
        if (!tmpl_eval(r, n->a, &a)) return false;
        if (tmpl_true(a)) return tmpl_eval(r, n->b, out);
        return n->c ? tmpl_eval(r, n->c, out) : (*out = tv_undefined(STR("if without else"), 0), true);
    case TN_CAPTURED: return *out = r->captured, true;
    default: return tmpl_fail(r, "not an expression");
    }
}

static bool tmpl_eval(tmpl_run *r, const tmpl_node *n, tval *out) {
    int line = r->line;
    if (!tmpl_work(r, 1) || !tmpl_enter(r)) return false;
    r->line = n->line;
    bool ok = tmpl_eval_any(r, n, out);
    r->depth++;
    if (ok) r->line = line; /* an error keeps the line of where it happened */
    return ok;
}

/* ---- Statements ---- */

typedef enum tmpl_flow { FLOW_ON, FLOW_BREAK, FLOW_CONTINUE, FLOW_FAIL } tmpl_flow;
static tmpl_flow tmpl_exec(tmpl_run *r, const tmpl_node *chain);

static bool tmpl_assign(tmpl_run *r, const tmpl_node *target, tval v) {
    r->line = target->line;
    if (target->kind == TN_NAME) return tmpl_set_var(r, target->id, v);
    if (target->kind == TN_NSREF) {
        tval ns;
        if (!tmpl_get_var(r, target->id, &ns)) return false;
        if (ns.type != TV_NAMESPACE)
            return tmpl_fail(r, "cannot assign attribute '%.*s': not a namespace", STRF(target->s));
        return tmpl_dict_set(r, ns.dict, tv_str(target->s), v);
    }
    tmpl_items *l;
    size_t n = 0;
    if (!tmpl_walk(r, v, &l)) return false;
    for (const tmpl_node *it = target->b; it; it = it->next) n++;
    if (n != l->n) return tmpl_fail(r, "%zu values to unpack into %zu names", l->n, n);
    n = 0;
    for (const tmpl_node *it = target->b; it; it = it->next)
        if (!tmpl_assign(r, it, l->v[n++])) return false;
    return true;
}

/* Runs a body and gives what it writes as a value. */
static bool tmpl_capture(tmpl_run *r, const tmpl_node *body, tval *out) {
    buf b = {0}, *outside = r->out;
    r->out = &b;
    bool ok = tmpl_exec(r, body) == FLOW_ON;
    r->out = outside;
    return tmpl_take(r, &b, ok, out);
}

/* The same in a scope of its own inside `scope`. */
static bool tmpl_capture_in(tmpl_run *r, tmpl_scope *scope, const tmpl_node *body, tval *out) {
    tmpl_scope *back = r->scope;
    bool ok = tmpl_push_scope(r, scope) && tmpl_capture(r, body, out);
    r->scope = back;
    return ok;
}

/* A set or filter block: what the body writes goes through the filters. */
static bool tmpl_filtered(tmpl_run *r, const tmpl_node *n, tval *out) {
    tval text, outer = r->captured;
    if (!tmpl_capture_in(r, r->scope, n->c, &text)) return false;
    r->captured = text;
    bool ok = tmpl_eval(r, n->b, out);
    r->captured = outer;
    return ok;
}

/* Sets the parameters of a macro or call block in the scope just made for it. */
static bool tmpl_bind_params(tmpl_run *r, tmpl_args *c, const tmpl_node *params, const char *what) {
    int used_named = 0, used = 0;
    for (const tmpl_node *p = params; p; p = p->next) {
        tval v = used < c->n_pos ? c->pos[used] : (tval){0};
        for (int i = 0; i < c->n_named; i++)
            if (str_eq(c->names[i], p->s)) {
                if (used < c->n_pos) return tmpl_fail(r, "%s: argument '%.*s' is given twice", what, STRF(p->s));
                v = c->named[i], used_named++;
            }
        used++;
        if (!tmpl_set_var(r, p->id, v)) return false;
    }
    for (const tmpl_node *p = params; p; p = p->next) { /* defaults see all parameters, and only those around the macro */
        tval v;
        if (!tmpl_get_var(r, p->id, &v)) return false;
        if (!v.type && p->a && (!tmpl_eval(r, p->a, &v) || !tmpl_set_var(r, p->id, v))) return false;
    }
    if (c->n_pos > used) return tmpl_fail(r, "%s: %d arguments, at most %d", what, c->n_pos, used);
    if (used_named < c->n_named) return tmpl_fail(r, "%s: an argument name is not known", what);
    return true;
}

static bool tmpl_call_macro(tmpl_run *r, tmpl_args *c, const tmpl_macro *m, tval caller, tval *out) {
    tmpl_scope *back = r->scope;
    char what[80];
    bool is_macro = m->node->kind == TN_MACRO;
    str name = is_macro ? m->node->s : STR("caller");
    snprintf(what, sizeof what, "%.*s", (int)MIN(name.n, sizeof what - 1), name.p);
    if (!tmpl_enter(r)) return false;
    bool ok = tmpl_push_scope(r, m->scope) != NULL;
    int id = r->caller_id;
    if (ok && id >= 0 && is_macro) ok = tmpl_set_var(r, id, caller.type ? caller : tv_undefined(STR("caller"), 0));
    ok = ok && tmpl_bind_params(r, c, m->node->b, what);
    if (ok && id >= 0 && is_macro && caller.type) ok = tmpl_set_var(r, id, caller); /* also over a parameter of that name */
    ok = ok && tmpl_capture(r, m->node->c, out);
    r->scope = back;
    r->depth++;
    return ok;
}

static bool tmpl_new_macro(tmpl_run *r, const tmpl_node *n, tval *out) {
    tmpl_macro *m = tmpl_alloc(r, 1, sizeof *m);
    if (!m) return false;
    *m = (tmpl_macro){.node = n, .scope = r->scope};
    *out = (tval){.type = TV_MACRO, .macro = m};
    return true;
}

/* ---- Loops ---- */

/* The next element that passes the loop's condition. *v TV_ABSENT: there is none. The condition sees only the target. */
static bool tmpl_loop_step(tmpl_run *r, tmpl_loop *l, tval *v) {
    for (*v = (tval){0}; l->at < l->items->n;) {
        tval candidate = l->items->v[l->at++], passed = tv_bool(true);
        if (l->node->d && !l->filtered) {
            tmpl_scope *back = r->scope;
            bool ok = tmpl_push_scope(r, l->scope) && tmpl_assign(r, l->node->a, candidate) &&
                tmpl_eval(r, l->node->d, &passed);
            r->scope = back;
            if (!ok) return false;
        }
        if (!tmpl_work(r, 1)) return false;
        if (tmpl_true(passed)) return *v = candidate, true;
    }
    return true;
}

/* One element ahead of the current one, for loop.last and loop.nextitem. */
static bool tmpl_loop_peek(tmpl_run *r, tmpl_loop *l) { return l->after.type ? true : tmpl_loop_step(r, l, &l->after); }

static bool tmpl_loop_length(tmpl_run *r, tmpl_loop *l, int64_t *n) { /* applies the condition to all that is left */
    if (l->node->d && !l->filtered) {
        tmpl_items *left = tmpl_new_items(r, l->items->n - l->at);
        if (!left) return false;
        left->n = 0;
        for (tval v;;) {
            if (!tmpl_loop_step(r, l, &v)) return false;
            if (!v.type) break;
            left->v[left->n++] = v;
        }
        l->items = left, l->at = 0, l->filtered = true;
    }
    *n = l->index0 + 1 + (l->after.type != TV_ABSENT) + (int64_t)(l->items->n - l->at);
    return true;
}

static bool tmpl_loop_attr(tmpl_run *r, tmpl_loop *l, str name, tval *out) {
    int64_t n = 0;
    if (str_is(name, "index")) return *out = tv_int(l->index0 + 1), true;
    if (str_is(name, "index0")) return *out = tv_int(l->index0), true;
    if (str_is(name, "first")) return *out = tv_bool(l->index0 == 0), true;
    if (str_is(name, "depth")) return *out = tv_int(1), true;
    if (str_is(name, "depth0")) return *out = tv_int(0), true;
    if (str_is(name, "previtem")) return *out = l->index0 ? l->before : tv_undefined(STR("previtem"), TV_LOOP), true;
    if (str_is(name, "last") || str_is(name, "nextitem")) {
        if (!tmpl_loop_peek(r, l)) return false;
        if (str_is(name, "last")) return *out = tv_bool(!l->after.type), true;
        return *out = l->after.type ? l->after : tv_undefined(STR("nextitem"), TV_LOOP), true;
    }
    bool rev = str_is(name, "revindex"), rev0 = str_is(name, "revindex0");
    if (!rev && !rev0 && !str_is(name, "length")) return true;
    if (!tmpl_loop_length(r, l, &n)) return false;
    return *out = tv_int(rev ? n - l->index0 : rev0 ? n - l->index0 - 1 : n), true;
}

/* The body once for each element, every time with only the target and `loop` in its scope. As in Jinja it is one scope, so
 * that a macro defined in it sees the latest element; and the else body runs when no iteration came to the end of its body,
 * also after a break in the first one. */
static tmpl_flow tmpl_loop_bodies(tmpl_run *r, tmpl_loop *l, bool *ended) {
    const tmpl_node *n = l->node;
    tmpl_scope *s = NULL;
    for (;;) {
        tval v = l->after;
        l->after = (tval){0};
        if (!v.type && !tmpl_loop_step(r, l, &v)) return FLOW_FAIL;
        if (!v.type) return FLOW_ON;
        l->index0++;
        l->before = l->now;
        l->now = v;
        if (!s && !(s = tmpl_push_scope(r, l->scope))) return FLOW_FAIL;
        r->scope = s;
        s->n = 0;
        if (!tmpl_assign(r, n->a, v)) return FLOW_FAIL;
        if (r->loop_id >= 0 && !tmpl_set_var(r, r->loop_id, (tval){.type = TV_LOOP, .loop = l})) return FLOW_FAIL;
        tmpl_flow flow = tmpl_exec(r, n->c);
        if (flow == FLOW_FAIL || flow == FLOW_BREAK) return flow;
        *ended |= flow == FLOW_ON;
    }
}

static tmpl_flow tmpl_exec_for(tmpl_run *r, const tmpl_node *n) {
    tval v;
    bool ended = false;
    tmpl_scope *back = r->scope;
    tmpl_loop *l = tmpl_alloc(r, 1, sizeof *l);
    if (!l || !tmpl_eval(r, n->b, &v)) return FLOW_FAIL;
    *l = (tmpl_loop){.node = n, .scope = r->scope, .index0 = -1};
    if (!tmpl_walk(r, v, &l->items)) return FLOW_FAIL;
    tmpl_flow flow = tmpl_loop_bodies(r, l, &ended);
    r->scope = back;
    if (flow == FLOW_FAIL) return flow;
    if (!ended && n->e) {
        if (!tmpl_push_scope(r, back)) return FLOW_FAIL;
        flow = tmpl_exec(r, n->e);
        r->scope = back;
        return flow;
    }
    return FLOW_ON;
}

static tmpl_flow tmpl_exec_if(tmpl_run *r, const tmpl_node *n) {
    for (; n; n = n->c) {
        tval v = tv_bool(true);
        if (n->a && !tmpl_eval(r, n->a, &v)) return FLOW_FAIL;
        if (tmpl_true(v)) return tmpl_exec(r, n->b);
    }
    return FLOW_ON;
}

static bool tmpl_exec_caller(tmpl_run *r, const tmpl_node *n) { /* the body becomes caller() of the macro that is called */
    tval caller, v;
    return tmpl_new_macro(r, n, &caller) && tmpl_call(r, n->a, caller, &v) && tmpl_put_value(r, r->out, v, false);
}

static tmpl_flow tmpl_exec_with(tmpl_run *r, const tmpl_node *n) {
    tmpl_scope *back = r->scope, *inner = tmpl_push_scope(r, back);
    bool ok = inner != NULL;
    for (const tmpl_node *set = n->b; ok && set; set = set->next) {
        tval v;
        r->scope = back; /* values see the outside only */
        ok = tmpl_eval(r, set->b, &v);
        r->scope = inner;
        ok = ok && tmpl_assign(r, set->a, v);
    }
    tmpl_flow flow = ok ? tmpl_exec(r, n->c) : FLOW_FAIL;
    r->scope = back;
    return flow;
}

static tmpl_flow tmpl_exec_one(tmpl_run *r, const tmpl_node *n) {
    tval v;
    bool ok = true;
    switch (n->kind) {
    case TN_TEXT: ok = tmpl_put(r, r->out, n->s); break;
    case TN_PRINT: ok = tmpl_eval(r, n->a, &v) && tmpl_put_value(r, r->out, v, false); break;
    case TN_IF: return tmpl_exec_if(r, n);
    case TN_FOR: return tmpl_exec_for(r, n);
    case TN_SET: ok = tmpl_eval(r, n->b, &v) && tmpl_assign(r, n->a, v); break;
    case TN_SETBLOCK: ok = tmpl_filtered(r, n, &v) && tmpl_assign(r, n->a, v); break;
    case TN_FILTERS:
        ok = tmpl_filtered(r, n, &v) && (v.type == TV_STR || tmpl_bad_type(r, "the output", v)) &&
            tmpl_put(r, r->out, tv_text(v));
        break;
    case TN_MACRO: ok = tmpl_new_macro(r, n, &v) && tmpl_set_var(r, n->id, v); break;
    case TN_CALLER: ok = tmpl_exec_caller(r, n); break;
    case TN_WITH: return tmpl_exec_with(r, n);
    case TN_BREAK: return FLOW_BREAK;
    case TN_CONTINUE: return FLOW_CONTINUE;
    default: ok = tmpl_fail(r, "not a statement");
    }
    return ok ? FLOW_ON : FLOW_FAIL;
}

static tmpl_flow tmpl_exec(tmpl_run *r, const tmpl_node *chain) {
    tmpl_flow flow = FLOW_ON;
    if (!tmpl_enter(r)) return FLOW_FAIL;
    for (const tmpl_node *n = chain; n && flow == FLOW_ON; n = n->next) {
        r->line = n->line;
        flow = tmpl_work(r, 1) ? tmpl_exec_one(r, n) : FLOW_FAIL;
    }
    r->depth++;
    return flow;
}

/* ---- The two entrances ---- */

/* Parses a template. *out is the caller's until tmpl_del. A filter or test that is not supported is an error here, unless
 * it stands in an if: then it is one when it runs. */
static int tmpl_parse(tmpl **out, str source, toka_err *e) {
    if (tmpl_parse_tree(out, source, e)) return e->code;
    for (tmpl_node *n = (*out)->calls; n; n = n->next_call) {
        n->fn = n->kind == TN_FILTER ? tmpl_find_filter(n->s) : tmpl_find_test(n->s);
        if (n->fn || n->soft) continue;
        tmpl_syntax(e, n->line, "%s '%.*s' is not supported", n->kind == TN_FILTER ? "filter" : "test", STRF(n->s));
        tmpl_del(*out);
        *out = NULL;
        return e->code;
    }
    return 0;
}

static int tmpl_var_id(const tmpl *t, const char *name) {
    for (int i = 0; i < t->n_names; i++)
        if (str_is(t->names[i], name)) return i;
    return -1;
}

/* Renders t behind what `out` holds. context: a JSON object whose members are the template's variables; its text must live
 * until the call returns. Hugging Face gives every template messages, tools and documents (null if there are none),
 * add_generation_prompt and the special tokens: so should the caller. Thread: any. */
static int tmpl_render(const tmpl *t, const json *context, tmpl_time now, tmpl_limits limits, buf *out, toka_err *e) {
    if (!json_is(context, JSON_OBJECT)) return fail(e, TOKA_E_USE, "template line 1: the context is not a JSON object");
    limits.output_bytes = MIN(limits.output_bytes, (size_t)1 << 30);
    tmpl_run r = {.t = t, .now = now, .steps = limits.steps, .max_steps = limits.steps, .depth = limits.depth,
        .max_depth = limits.depth, .memory = TMPL_MEMORY(limits), .max_bytes = limits.output_bytes, .line = 1, .e = e};
    buf text = {0};
    r.out = &text;
    r.loop_id = tmpl_var_id(t, "loop"), r.caller_id = tmpl_var_id(t, "caller");
    r.globals = mem_zalloc((size_t)t->n_names * sizeof *r.globals);
    bool ok = true;
    for (int i = 0; i < t->n_names; i++) {
        const tmpl_fn *fn = tmpl_find_fn(tmpl_functions, t->names[i]);
        if (fn) r.globals[i] = (tval){.type = TV_FUNCTION, .fn = fn};
    }
    JSON_MEMBERS(key, context) {
        int id = -1;
        for (int i = 0; i < t->n_names && id < 0; i++)
            if (str_eq(t->names[i], json_str(key))) id = i;
        ok = ok && tmpl_work(&r, (size_t)t->n_names) && (id < 0 || tmpl_from_json(&r, key + 1, &r.globals[id]));
        if (!ok) break;
    }
    ok = ok && tmpl_exec(&r, t->body) == FLOW_ON;
    if (ok) buf_str(out, buf_view(&text));
    buf_free(&text);
    free(r.globals);
    arena_free(&r.a);
    return ok ? 0 : e->code;
}

/* ===========================================================================
 * MARK: 9. Model files [os]
 * config.json, generation_config.json, safetensors, the local hub cache, models.txt.
 * =========================================================================== */

/* ===========================================================================
 * MARK: 10. KV pages and prefix tree [pure]
 * Empty until the engine issue: pages are handed out by chapter 17 for now.
 * =========================================================================== */

/* ===========================================================================
 * MARK: 11. Length predictor [pure]
 * To come with the engine.
 * =========================================================================== */

/* ===========================================================================
 * MARK: 12. Scheduler [pure]
 * To come with the engine.
 * =========================================================================== */

/* ===========================================================================
 * MARK: 13. Batch building and shared prefixes [pure]
 * To come with the engine.
 * =========================================================================== */

/* ===========================================================================
 * MARK: 14. Sampling and stops [pure]
 * From a row of logits to a token, and when to end.
 * =========================================================================== */

/* ===========================================================================
 * MARK: 15. CPU backend [cpu]
 * The boundary of toka.h on the CPU.
 * =========================================================================== */

/* ===========================================================================
 * MARK: 16. Model: the layer loop [os]
 * The transformer, once, over the backend's table.
 * =========================================================================== */

/* ===========================================================================
 * MARK: 17. Engine [os]
 * Requests to steps to events.
 * =========================================================================== */

/* ===========================================================================
 * MARK: 18. Public API [os]
 * What toka.h declares.
 * =========================================================================== */

/* ===========================================================================
 * MARK: 19. HTTP [pure]
 * To come with the server.
 * =========================================================================== */

/* ===========================================================================
 * MARK: 20. OpenAI API [pure]
 * To come with the server.
 * =========================================================================== */

/* ===========================================================================
 * MARK: 21. Server [os]
 * To come with the server.
 * =========================================================================== */

/* ===========================================================================
 * MARK: 22. Batch runner, bench and plan [os]
 * To come with the engine.
 * =========================================================================== */

/* ===========================================================================
 * MARK: 23. Command line [os]
 * main().
 * =========================================================================== */
