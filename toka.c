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
 * Numbers keep whether they were written as integers. Of equal keys the last wins, as in Python.
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
        if (c < 0x20) return json_fail(r, "control character in a string");
        if (c != '\\') {
            int n = utf8_len(r->p, r->end);
            if (!n) return json_fail(r, "invalid UTF-8");
            memcpy(w, r->p, (size_t)n);
            w += n, r->p += n;
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
        while (r->p < r->end && (unsigned char)*r->p >= 0x20 && (unsigned char)*r->p < 0x80 && *r->p != '"' && *r->p != '\\')
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

/* Decimal text (already checked) to double, whatever the host program's locale. */
static double json_strtod(str s) {
    char tmp[64], *z = s.n < sizeof tmp ? tmp : mem_alloc(s.n + 1);
    memcpy(z, s.p, s.n);
    z[s.n] = 0;
    char *dot = strchr(z, '.');
    if (dot) *dot = *localeconv()->decimal_point;
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
        if (u > ((uint64_t)INT64_MAX - d) / 10) exact = false;
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
    if (exact) v->i = neg ? -(int64_t)u : (int64_t)u;
    else v->f = json_strtod((str){s, (size_t)(r->p - s)});
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
    json_reader r = {.p = text.p, .start = text.p, .end = text.p + text.n, .a = a, .limits = limits, .e = e};
    if (text.n > limits.max_bytes || text.n > UINT32_MAX) {
        fail(e, TOKA_E_INPUT, "JSON: %zu bytes, at most %zu are taken", text.n, limits.max_bytes);
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

/* A comma if the last byte ends a value. No value ends in one of "{[:," or a line feed, so no state is needed. */
static void json_comma(buf *b) {
    if (b->n && !strchr("{[:,\n", b->p[b->n - 1])) buf_char(b, ',');
}
static void json_put_open(buf *b, char c) { json_comma(b), buf_char(b, c); }
static void json_put_close(buf *b, char c) { buf_char(b, c); }

/* A string with its quotes; bytes that are not UTF-8 become U+FFFD. */
static void json_put_str(buf *b, str s) {
    json_comma(b);
    buf_char(b, '"');
    for (size_t i = 0; i < s.n;) {
        unsigned char c = (unsigned char)s.p[i];
        int n = utf8_len(s.p + i, s.p + s.n);
        if (c == '"' || c == '\\') buf_printf(b, "\\%c", c);
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

/* The shortest decimal that reads back as the same double (is_float: the same float); null for what JSON cannot say. */
static void json_put_num(buf *b, double f, bool is_float) {
    char z[40];
    if (!isfinite(f)) {
        json_put_null(b);
        return;
    }
    for (int digits = is_float ? 6 : 15;; digits++) {
        snprintf(z, sizeof z, "%.*g", digits, f);
        double back = strtod(z, NULL);
        if (digits == 17 || (is_float ? (float)back == (float)f : back == f)) break;
    }
    for (char *c = z; *c; c++)
        if (*c == *localeconv()->decimal_point) *c = '.';
    json_comma(b);
    buf_c(b, z);
}

/* ===========================================================================
 * MARK: 5. Unicode [pure]
 * Classes of code points, normal form C, and what becomes of bytes that are not UTF-8.
 *
 * In: UTF-8 text. Out: the same text repaired (uni_repair) or normalized (uni_nfc), and one byte of properties per code point
 * (uni.props), which the tokenizer's patterns are made of. All of it comes from three strings that test/make_unicode.py writes;
 * uni_init unpacks them into a struct that its owner keeps, so there is no global state.
 *
 * Which Unicode: the one whose tokens the models were trained on. Hugging Face `tokenizers` runs its patterns on Unicode 16.0
 * and its form C on Unicode 9.0. Classes here are of 16.0. For form C the caller chooses: UNI_9 leaves alone what came after
 * 9.0, UNI_16 is today's. Both agree on text of characters that are older than 2017.
 *
 * Always holds: a 32-bit set of classes (1u << class) says what a pattern's \p{..} says; U+110000 and above never occur, because
 * every function but uni_repair takes text that is valid UTF-8. Not here: upper and lower case, forms D, KC and KD.
 * =========================================================================== */

enum uni_class { /* General_Category, and two of its controls apart */
    UNI_LU, UNI_LL, UNI_LT, UNI_LM, UNI_LO, UNI_MN, UNI_MC, UNI_ME, UNI_ND, UNI_NL, UNI_NO, UNI_PC, UNI_PD, UNI_PS, UNI_PE,
    UNI_PI, UNI_PF, UNI_PO, UNI_SM, UNI_SC, UNI_SK, UNI_SO, UNI_ZS, UNI_ZL, UNI_ZP, UNI_CC, UNI_CF, UNI_CS, UNI_CO, UNI_CN,
    UNI_SPACE_CONTROL, /* Cc: \t \v \f U+0085 */
    UNI_LINE_END       /* Cc: \r \n */
};

enum { UNI_9, UNI_16 };

#define UNI_BIT(class) (1u << UNI_##class)
static const uint32_t uni_upper = UNI_BIT(LU) | UNI_BIT(LT);
static const uint32_t uni_mark = UNI_BIT(MN) | UNI_BIT(MC) | UNI_BIT(ME);
static const uint32_t uni_letter = UNI_BIT(LU) | UNI_BIT(LL) | UNI_BIT(LT) | UNI_BIT(LM) | UNI_BIT(LO);
static const uint32_t uni_number = UNI_BIT(ND) | UNI_BIT(NL) | UNI_BIT(NO);
static const uint32_t uni_punct =
    UNI_BIT(PC) | UNI_BIT(PD) | UNI_BIT(PS) | UNI_BIT(PE) | UNI_BIT(PI) | UNI_BIT(PF) | UNI_BIT(PO);
static const uint32_t uni_symbol = UNI_BIT(SM) | UNI_BIT(SC) | UNI_BIT(SK) | UNI_BIT(SO);
static const uint32_t uni_space = UNI_BIT(ZS) | UNI_BIT(ZL) | UNI_BIT(ZP) | UNI_BIT(SPACE_CONTROL) | UNI_BIT(LINE_END);

#define UNI_MAX 0x110000
#define UNI_UNSTABLE 32 /* props: form C may change this character or join it to the one before (NFC_Quick_Check not Yes) */

typedef struct uni_pair { /* canonical decomposition c -> a b */
    uint32_t c, a, b;     /* b 0: c -> a alone */
    bool composes;        /* a b -> c too */
    bool young;           /* after Unicode 9.0 */
} uni_pair;

typedef struct uni_marks { /* code points first .. last have this combining class */
    uint32_t first, last;
    uint8_t class;
    bool young;
} uni_marks;

typedef struct uni {
    uint8_t *props;        /* [UNI_MAX] uni_class | UNI_UNSTABLE */
    uni_marks *marks;      /* [n_marks] rising */
    uni_pair *pairs;       /* [n_pairs] rising in c */
    uni_pair *compositions; /* [n_compositions] rising in (a, b) */
    int n_marks, n_pairs, n_compositions;
} uni;

/* begin of test/make_unicode.py's text */
/* (run length - 1) * 32 + class */
static const char uni_class_text[] =
    "Hf{|Ay|PvsBjpBjjknoniAlHuAlBkAlWojnkqhqWpjokoEl{XfsnCjrnqralowrqroAeq^AlqgamBcnTuoEsUtoFr]^]^]^]^]^]^]^]^]^]^]^]^]^]^"
    "]^]^]^]^]^]^]^]^]^]^]^]^]^]~]^]^]^]^]^]^]^]~]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^}^]^]A|}^]^}^A{~By^}^A{A|}^"
    "}^]^]^}^]~]^}^A{^]^}~a]A|B}]_^]_^]_^]^]^]^]^]^]^]^]~]^]^]^]^]^]^]^]^]~]_^]^A{^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]"
    "^]^]^]^]^]^]^]^]^]Et}^}~]^By^]^]^]^]BH^A_WpP`CkJlLyCzFe`q`OsCTr]^]^`q]^Ax`A|n]CtAo]nA{z]z}^O_zGoAD^]~A{A|]^]^]^]^]^]^"
    "]^]^]^]^]^]Cx]^o]^}~AS_APf]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^rC|Ab]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^"
    "]^}^]^]^]^]^]^]~]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^zAFyA"
    "x`EdAItniAxAppzAMpibnA`nA`nbGlXqCtB}AlJfEmBkAlpAlApIpnwBjAAg`HqR~HuChA_bCHinaExwrDzA^A`rB~A_HuB]ApaLvzwab[kXrAxBZ}Ipa"
    "M`HuABeGtA^rBj`AxbAnS{B~`Gt`B^`C|AxMtzVuB^AxnzIoDrUwqDyzAuDrGtAIw`UxwAAhcAV]bcbaB_FvC]bAaaExHqA`AlHun`MgbAazFuAxA_AxS"
    "{zEwzaBvB}AxbaB_B~AxAaAxAabaGlcCtA_zB]A`AxHuA_AnE]rpanbAxA`czDyCtA_AxS{zEwzA_zA_zA_AxbzB_A`CtA`AxB^BvbFnB}zaFnHuA`B]b"
    "nIhA`czGszB]zS{zEwzA_zC{AxbaB_C|zA`czAabAxaN^A_A`AxHunpFnaDzzbAazFuAxA_AxS{zEwzA_zC{AxbacbcB~AxAaAxAabFnA`cCtA_zB]A`A"
    "xHuraE]IhbazDyBvB]zB}BvA_zazA_BvA_BvB]BvJmCtAabAaBvB_zB_bAxaEpcM`HuBcEhprDrbB_bFuzB]zTyzNeAxbaB^C]zB^zB~FnA`zB]AxaAxA"
    "_A`AxHuFnnE}rabAanFuzB]zTyzHqzC{AxbacbC}zbAazAaA`FnAaEpA_zA_A`AxHuzA_cKdA`AaGszB]zAIwA`aB_B~zB_zB_barCtB]cE}B]A`AxHuG"
    "yrDyzbAazPaBvUwzGszaAxEwBvbCtB_B^zbzFwEpHuAxAanKdAPibA_ExCtpDy`FvnHuAlAFvA_zazC{zUwzazHqbA_GtaAxC{z`zExzHuAxB}AB^aBnM"
    "trnBnA`EhHuHwrbrbrbjkjkAaFuzAE_CtLjcC|nA`C{IpzAE`zGdbEhzApDfClAlAFvAKsAaB~cDzcA`AaA`aHuEdDyAaA`B}B^aB_A_EyB]B~KkbAaA`"
    "D{bacHuB_bApAFyz]Dr]AxAKpn`A|K@yzB}AxEwzazB}AxAIwzB}AxABezB}AxEwzazB}AxMgzAXyzB}AxBFeAxB^H^RcBvNeI`EpBX]AxDvAxiTVurnO"
    "csWsjkBvBMwBjBbFuFnPaB^cHjQ_A`cAlHjPaA`KdKkzB]zA`KdATaA`cExFwbAaIpBj`BjpabAxHuEpHwEpEdiChB^wbHuEpADa`AU_FnC{A`ACcbaDr"
    "BI_IhA@izB^C]A`B_CtAabD{B^CtrBvAlHu[kAxC{JfALqCtWsEpHugBvACtTyA`AabAxAlAU_cbcExzbcbAaFvD{HrAxbHuEpHuEpFb`EdAxLjdNfAR^"
    "B~cAOkbcC|cbC}bAaFuzAlHuFbI`GtHbBjA`c[kcB~AaA`cB^A_HuALqbcA`B_bcB^AaGlChAE_FwFvAaA`BvDfHuBvB]Hu[kDxAlGp]^DrAKoAxA{G`G"
    "lB^nKlcExB}bDybA_cA`aDrALnBBlKh`AC`AE~BCl]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^"
    "]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]Gp]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^"
    "]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]GpFqDvAxDuAxFrFqFrFqDvAxDuAxFrz]z]z]z]FrFqLfAxFrFsFrFsFrFsCxz~"
    "By_q^BmA|z~By_BmBzAx~ByzBmFrCwBmAxA|z~By_AozJ_DoE_AllmjAjmjlG`tuDosH^lmChAfBjojkI|onhH~sDozIeg`AxE]Bkjk`HwBkjkzKjBvAB"
    "tN^KlC^bB`JnN^Ap]Cl]Ap^A{~A{^r]ApoCwEh]r]r]rByr^By^B}^Ap~}Dg]BzroAp^rNkADf]^C`gApCtDgDjAmCloApoApoFfoA@zAmAporoA@zH[y"
    "GdjkjkRnAmFfjkBS|o[|WaAIhEeBKlTrJ^StA[yBQ`T_FC|oHboAVnGaCTboHI`jkjkjkjkjkjkjk[qAM`DgjkA@wjkjkjkjkjkNsHPrDJ{jkjkjkjkjk"
    "jkjkjkjkjkjkBB{jkjkAAujkHRkAPzSiApEeAHjAxAAxzCNnAPeAPf]^A{~]^]^]^By^]~]DvA^A{^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]"
    "^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]~Eh]^]^B^]^DrChgAlAFzz^Dr^AxAW{Fn`nM`bTyHjEwzEwzEwzEwzEwzEw"
    "zEwzEwzAAhAllmlmBjlmnlmH^iAlinlmAllmjkjkjkjkDf`H~AgChinjKxApBjjkjkjkjkiAC|XbzB[lKdGE`XjNvsBjr`afjkjkjkjkjkApjkjkjkjki"
    "jAirGxB~AaiCzApBb`anApzBXaAxA`AoA^aiB[{nA~aDrAKszCCszApCaI`AAgAGlHjrNeA@zzHw[|F{rMmAAxHwAHjMmJTzGYOkBC|YFHa`AJJ}BvAWl"
    "HjAHyDxAlH[k`BjNeHuA_Rv]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^abB`nHrn`]^]^]^]^]^]^]^]^]^]^]^]^]^]^A^A`BI_HvA`"
    "EdGlUgGrAo]^]^]^]^]^]^]A|]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^`Fr]^]^}^]^]^]^]^`Ao]^]^a]^]A|"
    "]^]^]^]^]^]^]^]^]^]^Cw^Cw^]^]^]^]^]^]^]^By^]^}^Ax]^z^z^]^]^]^]StA~]^aA^^EwbB]bB}bTyAaA`cClbBvE]ApprEpATaChGlAaAReNgA`"
    "GlAlHuEpPbDyBjanA_bHuYoFvAlTyIpAaJfnZmBvB^cAOkbAaB~AaA`B_Kxz`HuCtAlC{b`GsHuC{zAIwDzAaA`AaA`HjB]bFubcAxHuAxChNe`DyBnac"
    "bcARebaB^A_A`C{A`abaVnA_`AlIocA`AaAlaA^cbIhDyAxDyAxDyHjEwzEwzAKpqB|Gp`AoCtBRjADaAabAabAancbAxHuEpMKN]KdTyCtAQgCtBLWjG"
    "SCkLGsAxCN}AGtEtKdCxDrabHqoKkzC{zazA_zA_zCPyOsN~LDykjNvBCkAxAV]FnrAB^JmpBnNfFbjknEpNfnAgAfjkjkjkjkjkjkjkjkAljkChBdBjz"
    "ChijkjkjkBjoiBkznpAlCtC{zDNeAxwzBjpBjjknoniAlHuAlBkAlWojnkqhqWpjokojknjkAlHq`AMoA^A@iBvDyAxDyAxDyAxB]BvAnoqrAnzrCiApI"
    "hBsApAxJmzWszQ_zA_zMgAxLiAC|DB}DrBjCtAMuBvHbAUdCaOtAeBnzK|BvrAPbAN^bDJfZmBvAQgN^bXwCtAAgCaHjR]fFufDrAF}C|Dr[kznAE_CtF"
    "unD^AKlAHuAHvBPqAxHuEpAD}CtAD~CtAHyGlATaJfnIkzMczEsz}zIlzMdzEtz~BvATaKdJK{HjS{IhFuVnDxzAJtzGrBHzDyAxazALqzA_BvaAxTyzn"
    "F{TyApE}A@iGlGyAQ`Q_zA_DrD_S{E]BvnWsDrnBDbAW{CtAeA_NkAxANsaB^zA`DrB~B}zB]zZmAxB^CtbGyFnH^FnZmAenZmBcAB^FurYoA`CtD_FbH"
    "jAV]BvFbS{AxF{Q_DrF{PaFnChKdE}BSdBK{AWtAS_LbAS`FnE]AE_B~GlHuEpHuB}`aSwBvC|i`SxGlAmF[tA@ozAJuzA`iAxA_N~B]AWtB~ZmHwaGlS"
    "{IpCaDfTrPaB~ChAGtR}E}RvTyHjcbcAU_MhFbCtRcHubA_A`aHjB^cAMoB_B~AaA`AlwChbIhwAxVuFnHuEpB^AE_C|cFvzHuChaAaaGlADabAlaHjA`"
    "cAPiB_GtAaB}ChB~ncbHuanaBjzRcJfPazVuB_B^AabcA`EdbA_bBBfEwzazB}zMgzHqnEpAOkbB_FvDrHuEpA`AazFuAxA_AxS{zEwzA_zC{zA`aAabC"
    "]AxAaAxB_AxaEpcDrC{AaAxExBvC|JfHqzaAxazAF}zaB_DzzcAxczC]zAabcbabaAlzAlGlA`[dAU_B_FvAaB^cbB}DfHuAlznbB]A@bAPiB_DzcbC]A"
    "`cA`A_naGlHuEPbAOkB_B~AxC]A`cA`UdB}A`AC|APiB_FvAabcA`BjaJfHuEpKxQxAKsbcbAaDzcbanEpHuEpRaZfXqAxbcbAaB~cC|CtHuAeBjrEwFF"
    "^ALqB_GtcA`nCJ^AAcAAdHuGyKdFuAxaAxFuzA_zUwD{zAaAxA`cbacacbBjHjHuBIxFuAxAG{B_B~AxA`C]banacYhaHrAHyDzcaB~G`bGlaDzAaB^AN"
    "mKlcA`BjaDfLbBK{FnH~FCdABenM`HuEpGszAF]cExzDzcbaDfIhHuQeBvAl[kAxS|zcExcA`cA`BLrEwzA_zAF}DzBvbzA`zExabGlHuEpDyzA_zAAgC"
    "}zA`zAabcbaFnHuJKtQ_A`AaAlFnA`acKkzACcAaC|BvAabcbKxHubBW|aN^SaGdCjOtLbnABZ}CK|CSxzDfJfFOsCDPzCFmAlLbAH@aN{bDyMhIhDVGc"
    "DrSO{HEZn[kJnB_B^HuBBG|SBuFnA@izHuCtAlBQozHuEp[kAxC|nIhAPiExDfClB|nrIhHuzE}zR}DrQ_NNnA~AHyA^BjHuFRfAAcAAdU]ChCJ~BMwCt"
    "baAW]FnB~KjBDbA^n`bJfAaM`GJFeGlAMPiAJnHqJTIhB|zEvzA^zIU_N^a[dB]AxaM`B}GlMG{BUPbCO{DrKkBvGsFnHqAxrA`nCqDTDrHApHuEpNR^B"
    "OlANnAxTzHjCXzB@jHGdIhAHjAxB@bAaB^BnD{GiFvApEx[|B~BA`StBExB^rDBvRcKdRcKdBYpHjV{DN~WoWpWoEtzP^WoWp]z}Ax]Ax}AxByzFqBzz^"
    "zEtzIlWoWp}zByAxFqzEszWp}zByzCwz]BvEszWpWoWpWoWpWoWpWoWpWoWpWoYlAxVqoVroDvVqoVroDvVqoVroDvVqoVroDvVqoVroDv]^AxARiQEpA"
    "V~ClARfGdbLzbApDfN^C|zMhAIB~HnaQ|EpDvGDjExzOdAxExzA`zC|DrBAnAB~bCUhAMoBvExEvAxHuCtarJU`[kbO|ALqB~HuDrpOPrXq`B~HuGEh[k"
    "A`aHuCtnPCtEwzB}zA_zMgzFPqAxGyExAJnAC_AC`Ex`CtHuCtAlZJvAZ{rBcpCaBOlAMurMmFNnB}zXqzA_zaAxazHqzB}zazaEpaCtazazazB]zA_za"
    "AxazazazazazA_zaAxB}zEwzB}zB}zazHqzOcDrB]zC{zOcATzAmIB^AM`CtCIxKdMxAxMxzMxzAFnIhKqEKdAXrZ~LbAM`CtHbFnApM`EhEDzHK|DiXL"
    "zCtOtBvK|BvC[tCtCE`EpJ~CtrN^J~CtAXjGlI`EpAIhGl[|AxJ~CtApBBfKKtKdLzAxK|BvI`DrAXjFnMxAxJ^EpHbFnDZ^zCBfHuAFQhAWGZeAB^D[P"
    "yEpGLaAxFYReM`H[DqN^TXqBZXzREgAVQhEY[sDrE@XqABNLTrwA@bCFcDHjHA`BVBF^BVRV}AxBVRV}Ax";
/* gap, run length - 1, combining class * 2 + young */
static const char uni_mark_text[] =
    "VqqMo]]Ms]`L}]]Ms]]Lu]aL}]^K{]`L}]^K{]gL}]a_]`L}]dMo]]Na]]Mo]_L}]_Mo]^L}^_Mo]`L}]]Mo]]Ms]^L}]]Mo]]Mu]^Mw]]Mu]^Mw]]Mu]"
    "iMoH`aMoGx]L}]`Mo]]L}]_Mo]]M_]]L}]bMo]bL}]^Mo]]L}]^Mo]]M_]]Mk]]Mo]]q]]s]]u]]w]]y]]{]]}]]A]]]A_]^Aa]]Ac]]Ae]]Ag^]Ai^]A"
    "k]]Am^]Mo]]L}^]A_BadMo]]Aw]]Ay]]A{Ak]Aq]]As]]Au]]Aw]]Ay]]A{]]A}]]B]]^Mo]^L}]aMo]]L}]^Mo]]L}m]B_B~cMo_`Mo]]L}]]Mo_^Mo^"
    "]L}]^Mo]]L}A^]Ba{]Mo]]L}]^Mo]]L}]^Mo]_L}]]Mo]^L}]]Mo]]L}]_Mo]]L}]]Mo]]L}]]Mo]]L}]]Mo]]L}]^MoDucMo]]L}]]Mof]L~u`Mo^eMo"
    "^_Mo^aMoAf_L}Av^Mp]_L~]`MpAeaMp]aL~]jMo^]L}]^Mo]]L}]^Mo]]L}]_Mo]_L}]]Aq]]As]]Au]_Mo]]L}]^Mo]^L}]aMoAw]km]o`]Mo]]L}]^M"
    "oC^]km]oAk]MpAx]km]oCe]km]oCe]km]oCv]oCe]lm]od]D}]]EiB~]km]oCd^pm]oCs]oCd^F_]]oj`FgCc^F}]]pj`GcBe^L}x]L}^]L}^]LuAr]Gq"
    "]]Gs^]Gwb`Gs_]Gs^^Mo]]o^^MoAy]L}Cg]k^^oBk]L}Ub_Mo[{]o]]p{]oDr]og]MoE~]MkDd]M_]]Mo]]L}Fl]Mo]]L}B`]oqdMo_]L}AkaMo]bL}]^"
    "Mo]]L}^^L~]^Mp]^L~]aMp]]L~]`MpB~]kl]oAa]Mo]]L}]cMoAq^oAu]kh^oA~]kDm_Mo^]_]aL}]^Mo]`L}]]Mo^c_a]L}c]Mo`^MoEy^Mo]]L}]cMo"
    "]]L}]^Mo]]Mw]]Lq]]L}]]K{]A_Mo]]Mt]^Ml]]L~]]Lz]]Mo]]Mu]]L}]]Mo]]L}Uc^Mo]^_]`Mo]__]^Moa]Mo`^_]]Mo]]L}]]Mo]^_]`L}]]MoCFg"
    "_MoDb]oBy|MoPg]Ly]]Mk]]Ms]]M_]^McC`^mACSc]MoafMo}^MoBi^MoHa]oA`]pDl]oxnMoAt_L}A`]oBx]ki]oG^]Mo^^Mo]]L}_^Mob^Mo^]MoAo]"
    "oGe]oUHe]AoVrcMo]cL}]^MoA@r]L}Fs]L}DjaMoAUm]L}^]MoAc]Mo]]_]]L}a]oDz]Mo]]L}Pz`MpA|aMpIh^MpBi_L~B_^L~]_Mp]]L~]]Mp]`L~Al"
    "]Mp]]L~]]Mp]]L~Es]oAd]pk]oAt]o]]kB^_MoAk^oAy]kBe]of]kCa]o]]kEe]k]]oBi]l]]km]oucMo`aMoBr_pCh]o`]kt]MpB|]o]]kGj]o]]kCu]"
    "oCm]o]]kCj]oG|]p]]lGq^pa]lDq]pBl]po]pBj]pLj]oGq]l^^pBj]pLn^pQTi]pBQka_AvcMoAGp^jTQg]_EPk^Lu]__`]Mg]aLuedL}_aMo]^L}{`M"
    "oDi_MoCSjcMo^mMo_cMo^^Mo^aMoB}]MpDucMpK^]MpAx`MpN}^Mt]]L~]]MpGm]Mp]]L~UscL}CdbMo]]k";
/* gap * 6 + kind * 2 + young, first, second (not for kind 2, one alone) */
static const char uni_pair_text[] =
    "AE{CyAQcc]_c]_c]_c]gc]aiaAucaBfc]_c]_c]icelc]_c]_c]iigfc_bc]_c]_c]_c]goilc]_c]_c]icejom^c]_c]_c]_c]gc]aiaAucaBfc]_c]_"
    "c]icelc]_c]_c]iigfc_bc]_c]_c]_c]goilc]_c]_c]iceji]kcCfdcA{]cAzacA{]cAzB]cA{]cAvBfcA{]cAz_cA{]cAzgcA{]cAzgcA{]cAx]cA{]"
    "oAxlcA{]cAzacA{]cAz_cA{]cAzA}cA{]cAzArcA{]cAvpcA{]cAzecA{]cAz_cA{]cAzA{cA{]cAxBbcA{]oAx_cA{]cAz_cA{]cAzacA{]cAzB]cA{]"
    "cAzA|u_fcA{]cAxBccA{]iAxBdcA{]cAzBecA{]cAzApcA{]{AvrcA{]cAzBecA{]cAzApcA{]uAxlcA{]cAzacA{]cAzgcA{]oAtpcA{]cAzBecA{]cA"
    "zApcA{]cAxrcA{]cAz_cA{]cAzBccA{]cAzApcA{]cAxAqcA{]cAzApcA{]oAxncA{]cAz_cA{]cAzacA{]cAzecA{]cAz_cA{]cAzAucA{]cAvBdcA{]"
    "cAv]cA{]cAzic_jcA{]cAzicA{]cAzgcA{]F]Bn{cA{]BmAn]cA{]EaC^zcA{]cAj]cA{]cAn]cA{]cAn]cA{]cF_lcA{]cAzbcA{]cAzscA{]cAztcA{"
    "]iCfecA{]cR}]c_]cTv]cA{]oIhmcA{]cAr]cA{]cArAscA{]cVgB`c_]cC^mcL{]cADl]uB^rcA{]oAl^cA{]cEa_cA{]cAx]cA{]cx]cA{]cJvycA{]"
    "cAzacA{]cAr`cA{]cAzacA{]cAr`cA{]cAzacA{]cAn`cA{]cAzacA{]cAt`cA{]cAzacA{]cAt`cA{]cAzacA{]cA~AecA{]cAx]cA{]oBpAncA{]AeB"
    "ffcA{]cArA{cA{]cFsB^cA{]cA|]cA{]cIvccA{]cZgbc_]c[r]cA{]ASqAJ_g_mA_erbHqDrA{AInAeFk]cAOy]gAN|cAOc]ca]ca]ii]ii]ce]cA}]D"
    "qBzkcu]cujce]ca]ca]cA_]DqA^kcu]chjci]ce]{o]c]kGwC}lc]mi`juvk{Acjc`^csiA}r]EsA{]D_bhc]mi`juB_k{Arjc`^csiDeB{oc_]M_Epnc"
    "A{]BmBd]cA{]cAzacA{]oAp`cA{]oIqac_]cKl]cA{]cAx]cA{]oAxdcA{]cAzecA{]cAn]cA{]oJ]]c_]cK^]cA{]cBldcA{]cAzecA{]cAzccA{]cAr"
    "bcA{]oAr]cA{]AXkA@]AUqc]_cA}]cA|_cB_^[cHc]iAb]C]A]]CUoAGcAOwAkm]oc]FkAv]e_]e_]eg]eg]e_]eo]ee]S_H}Gsc]AmB{BdApe_]kw]N{"
    "GuGoqi]FeA~]e_]eg]q{]AMgPuPqo]Ajc]AmB{BdApe_]IuFqIaIoC_Alc_]c^AmU{GoGmUcGaGmAek]c]_i]AbceAaVkGgFcc_]c^AmY_HsFwi]gccfc"
    "bAeBG_Ue[wAyq]}g]}g]}g]BiAp`AyB{C|k]aeCyuk_]AsCz]CeA}CeAyq]}g]}g]}g]BiAp`SeHwGaQOgEWwEZ_ia]ia]ia]ia]ue]GeBk]ia]oa]c_]"
    "ic]DKuNNrLZhcA{]cAxAvcA{]cAzAscA{]cAzycA{]cE}BxcA{]cIpicA{]cAzAscA{]cAzycA{]cAzpcA{]cAzicA{]cJeBrc_]c^_c_]cL`BqcA{]cA"
    "zccA{]cZoBlc_]cA@j_cA{]cAxbcA{]cAxccA{]cAzAscA{]cAzApcA{]cAzAycA{]cAzkcA{]cAxacA{]cF]BvcA{]cIr]cA{]cAzB]cA{]cAzycA{]c"
    "AxxcA{]cP@qAxc_]cPBnBscA{]cAzdcA{]cAxBpcA{]cAzicA{]cAzAscA{]cAxArcA{]cAzAscA{]cAzycA{]cAzdcA{]cF_BpcA{]cAzkcA{]cEalc_"
    "]c^_c_]cNz]cA{]cAzicA{]cAv]cA{]cAzAscA{]cPBiAxc_]cPDfBscA{]cAxBlcA{]cAzAscA{]cMqArc_]cg]c_]cOPw]c_]cPDr]cA{]cAzAscA{]"
    "cAzycA{]cAzdcA{]cAxncA{]cAzucA{]cAzbcA{]cNgBpc_]c_kc_]cPffcA{]cAzA{cA{]cAxB^cA{]cAz_cA{]cAzkcA{]cAz^cA{]cAzAscA{]cAxA"
    "rcA{]cAz_cA{]cAx^cA{]cAxfcA{]cAzA}cA{]cAzycA{]cA^]cuBjccaca]iOkb{RtAscA{]cAzAncA{]cEulcA{]cAz^cA{]cAzocA{]cAzhcA{]cO["
    "{^c_]cOZ^^c_]c^^c_]c^oc_]c^hc_]cOY}cc_]cPIbAucA{]cAzAncA{]cAzhcA{]cE}`cA{]cAz^cA{]cAzocA{]cAzhcA{]cP@y^c_]cPJhkcA{]cA"
    "zAocA{]cAn]cA{]cAzAncA{]cE}lcA{]cAz^cA{]cAzocA{]cAzhcA{]cPAk^c_]cOSh^c_]c^^c_]c^oc_]c^hc_]c^A{c_]cSn]cA{]cAzAncA{]cRm"
    "lc_]c^^c_]c^oc_]c^hc_]c^A{c_]cTbB^cA{]cAzB_cA{]cAzAncA{]cAzhcA{]AeATm}c]_cNSeAbc_]c^_c_]c^Cyc_]cNUbBvc]_cNUqAbc_]c^_c"
    "_]c^Cyc_]cNSnBvc]_cNS}Abc_]c^_c_]oNUzA_c]_cNVgAbc_]c^_c_]oNThA_c]_cNTwAbc_]c^_c_]c^Cyc_]cNVtBvc]_cNWaAbc_]c^_c_]c^Cyc"
    "_]cNUbBvc]_cNUqAbc_]c^_c_]c^Cyc_]cNWnBvc]_cNW}Abc_]c^_c_]c^Cyc_]cNUvBvc]_cNVcAbc_]c^_c_]oNX`A_c]_cNXoAbc_]c^_c_]oNVhA"
    "_c]_cNVwAbc_]c^_c_]c^Cyc_]iNXtBtiNYcAbi]_i]CycNW^Bvc]_cNWmAbc_]c^_c_]c^Cyc_]cNYjBvc]_cNYyAbc_]c^_c_]c^Cyc_]cNYjCzgfco"
    "]glcq]gncs]gpc}]gwcj]gmcd]ggoNQoD_c_]c_]c_]c_]c_]c_]c_]c_]c_]c_]c_]c_]c_]c_]c_]cA]]c_]c_]c_]c_]c_]c_]c_]c_]c_]c_]c_]c"
    "_]c_]c_]c_]cB{]c_]c_]c_]c_]c_]c_]c_]c_]c_]c_]c_]c_]c_]c_]c_]cNYvCtc]`cNYyCycNYx]cf]igbcOA}ccOCxCtc]`c]dgrcsD_mBioARbb"
    "cPOwccNYt]cn]iobcOBoccODnD^gvc{]gxcyD_cOD]D^c]_c]CycOA~Cnc]`cA]dgCjoBkC{cA]]cBzCnc]`c]dgziOHm]c]_c]CycOD~Cnc]`cidgApc"
    "A]Aac]_ceBuci]cBdCnc]`c]dgAhcAaAccAPvAbgAOagAShoPTmD_cNY`]cg]ifbcODgccOFvD^gA`cAu]gAncAoD_gAPnsPWkg_AWyOF|yAVtgGcSqQQ"
    "yvca]Cia]EmCo]ce]c`]IiB{]{g]oc]DeAk]ia]DwAi]ok]oa]ic]D_RHr]iRJa]A}Ab]cRH~]ca]cRJe]c_]ow]c_]oc]c_]Aec]c_]ok]c_]oc]c_]F"
    "cAq]ci]c_]ca]HsBv]c_]cAc]c_]AeA{]c_]c_]c_]JuGDsg_LKuBUz]HUsBYwXKiia]ia]ia]ia]ia]ia]ia]ia]ia]ia]ia]oc]ia]ia]Aek]c]_ic^"
    "c]_ic^c]_ic^c]_ic^c]_D_C`^AwEa]Bmy]ia]ia]ia]ia]ia]ia]ia]ia]ia]ia]ia]oc]ia]ia]Aek]c]_ic^c]_ic^c]_ic^c]_ic^c]_D_C`^oDg]"
    "c_]c_]c_]us]KNSwAUBwgTB`gUK{gABdgPCdgQOdgCAygALTcg]gAIVngABJygADKzgB@ogDRugJ[}gDYcgCQggVggRugDBggTTngARsgB@igAQmgHVog"
    "GBkgDPkgALO|gBRogLRwgCVwgJVegLXogAFWzgJ@cgKUogAZ_gTUhgPSugCJogVFjgDM]gCKegB[{gPA_gAGC^gAE]gQigIQogCGegCY]gBP{gDY_gCFs"
    "gE_gDB_gD[mgBGygAJggTCrgNggBFcgCHwgHEigFD{gJP^gZXjgCHogOVagBF]gGPlgCLmgJTugEMugAEKlgAYggGJcgB@{gRcgGPugOogLZqgAHH^gXP"
    "ogYB~g|gUS_gAZugCIigIZygEX~gUXvgCXkgQTugADS`gGJ]gBFwgJM]gA@wgRMdgTJqgVD|gHOsgIMbgPO]gCZhgLTigVF~gBMigPMigGD]gCL_gPQzg"
    "SIogRYjgECrgQDkgPVzgIOqgTV~gAMagEsgLFagJ[cgB[ggDNggCUegAEVlgSqgBVcgBZkgCSagEM}gDZagOIigBOigBF{gCegAL[lgJWugBNsgSH{gZH"
    "xgARygFqgAKcgERsgADigAT}gBWagBFugAIigGYqgEMzgF@wgASmgAGAxgHegACsgOBggLY_gA@ugWPvgQsgAY_gDKmgHYkgDTfgSRrgDIugBReg[mgAG"
    "{gJN}gJwgF@ogJagIR]gBOsgDygLegAK@ngVRogLYwgBSogA@ZvgIXjgAG_gEZygDwgE@ygBJkgDEkgBK_gGYwgFEcgHB{gABRrgYQogAHJrgKGkgG_gB"
    "W{gTkgBYugSwgARegBM}gNScgAJDfgI@ggA@CkgAIVrgFZugIAegQXugYQ`gY}gCRwgFDegRW]gAHUlgA@qgDMogEEwgRogTigBGygCWigA@]gEDkgE@q"
    "gA_gDVggBTqgAHJngNUygNHvgO[egAM{gIIwgHZ{gCA{gAFigAAPtgCIkgJV{gCW`gE]gUwgEGzgADjgNJwgADPlgA@F]gZIrgB~gFV_gBF{gM[ugQYtg"
    "IM]gCLpgUVggCTjgGN{gFX`gV[fgGHjgBKwsAKcmGPisKA~gQYkgAZqgAHygB]gkgBmgP@kgNHlgAQamCKimBQwsBW_gKqyDGsgwgBqgBLmgFYfgCD_gA"
    "JEtgRkgF]gVigAqgFkgAFqgFcgEwg[wgFagB@egqgBFmgLmgBegE{gAVsgHsgJggAAkgBRmgIqgOogAFqgKagAAqgBJwgJcgsg^gmgigkgByg_gJmgCyg"
    "RwgAEcgAegCggQ}gHsgA@ugHeg]gA@agBOagG{gUigCggXagCagALigGsgCPkgPugCogAA[zgIGMmgHQJ|s[ZdgAYqgDngA@tgZsgCmgSegC]gAKugDdg"
    "D]gDggAIcgEegHog}gO{gKsgA[cgkgHmgD]gQqgF}gD`gG{gBtgHqgC{gWogEcgCcgOggPygIqgegCmgBFggCygW]gXag|gEagNygSwgCIugBY~gGcgGe"
    "gSegHwgCagMggagJ_gA]gAmgE_gpgWggA@ogO}gK]gMcgI]gSkgKugAUugIegAYggZygD_g}gQmgCigBrgCcgbg~gDmgDwgVmgAD}gRmgQigM]gBDqgF_"
    "gFwgGygBagugBygANwgBLigGOEgghgFFcgISD|gBKmgA}gJEBagERogRHcgIEYrgDkL_BZRrWA|kAmcB]nqe]_eDS[_^e]_eDT@nre]_e]ee_]e_]e_]e"
    "_]e_]e_]ka]e_]e_]e_]e_]ka]ka]e_]ka]e_]ka]e_]e_]e_]e_]eAdbedieq]eo]PYnDYR]AL|Dxm]QG{EUyEEAiia]Bsq]WaHeFkc_]CKgACiACmc]"
    "AmIvCmFujaxArkkpgkIdB}jj]pd]A]AN{NoNcc]pi]wAPmO]Nec_]EQrAXmAXwDD@tAJR{AJScd]sd]pds]dr_dc^d_]d^_SUlFPyFP{dd]di]EUGqAYT"
    "yAYUwe_]ekoe]_e]_e]_e]_OkEgve_]e_oe_]e^_e_]PZUgGLKdgfgogHIXwgHIGzgDqgwgDcgG_gAygDqgAjgODngHZKogHJ[pgkg}gAagHJHggHYU`g"
    "OK{gBegHJIwgHJIbgwgANxgAOggogKAXigKATpgygORxgOVagsgBqgggOVlgO[cgagAqgAggsg_gA]gB}gmgogAmgqgag]g]gHKY}gGXJ`gOKjgAegHLJ"
    "qgHLIzgigAegH}gE~g}gA{gCkgD}gAogC}g}gA}g]gAegA_gmg{gT]gO~gP_gKrgB_gBJrgCS}gP|gBegAmgGrgIyg^gGegHNYkgHNUfggg{gAcgmgCwg"
    "HOMggC{gHOI^gBwgugDrgHigSB`gygSJygCcg]gHPDigHOXngAeg{gugHPMmgHPLvgkgAUugAT^gSSpgSWegygDygB~gHQRogHQGxgHQG}gHQEjgbgA]g"
    "E}g_gTGtgTIggBogAegBqgTLrgIKAugIK@bgTOggcgcgAcgKDI{gKDFxgHSEqg]gH@JhgRU`g]gTQpgITB{gYIwgIXSfgogTTdgTW]gC]gqgB]gH]gUCl"
    "gAvgUFigHTHmgHTElgGqgegag`gBugAcgBagxgsgBwgAcgegAogsgC{gD}gB_gGggHUBygHUC|gCxgFigAqgEugHUGqgHUC|gElgArgVHrgVS}gAegAyg"
    "BdgVQ`gWAygAugHVRegHVKdgPggJfgWFhgWJqgWKpgB`gLEogcgKNogEzgN@ogADS~gRZugegigCqgrgHWQsgISHxgXA]gFzgL_gC]gHWIsgHWI`gFngN"
    "kgXLrgXOigEugDcgKcgHWJwgHWGvgYDbgYHggHXF]gHXB~gYH`gYI{gBsgAqg_gHXYogOXhgPBwgHXWfgHYUwgHYO`gygE~gJggBigCigCbgBig{gwgHY"
    "IegHYM~gNwgCugZMhgZRygdgHYO{gHY[~gU}gHYNigBygHYK~gFwgApgbg[Dvg[GogC]ghgCcgGUNygGUEzgHZDagHYZ~gHZRggHZJ^gwgAqgH[OggH[L"
    "lgAegI@@}gMagI@@pgA]gA@LbgA@MugA@L~g]gA@VogAegAegAcgD_gA@XjgAAAugIAIwgIAHdgIAMsgIAJtgHFG}gHEZngIBSigAigHegJDCfgugAAO_"
    "gIBYyg^gBggAogIB[`g_g]gBogAAQdgAAU_gAATfgDugJEXcgICY`gCsgCwgABA|gJFVggIDLdgIDS_gBogIDRdgEkgABNhgABSigqgggIESygQqg]gIF"
    "@^gABQbgJIDogIFBrgcgAB[zgJIN{gIE[jgACHhgACIsgfgAugIGNegIGHjgACKbgACQ_gCmgC}gACUlgJL@egAygJK[zgJLHmgIGZ~gIHD}gIHChgE}g"
    "sgIHU]gDggIHS|gIH[wgIHZxgHIYqgINNdgADTogDwgADV`gADYqgTTfgJBI_gygA@A^gogHIEpgcgGHygALLjgAEK{ghgA_gYUngYVugagqgBkgIJQwg"
    "IJQxgCggDagDigH`gI_gBmgFqgOfgG]gag}gIJR]gRcgHxgJPSjgAFHigagB_gINAsgIMY^gIKKogJQWtgegJRCggQ]gJRStgAFYegugsgagCwgA|gG{g"
    "BpgH{gDvgC}gAqgAGI`gAGNmgA{gAGNhgAGS}gcgIMSggIMLlgkgAGWxgAGYmgAQHrgKCYigJygJVP|gogAHMugDogIegK}gINZ_gINT~gAggEggEkgIO"
    "S_gBHBngGGKpgzgC_gGGVegGGHxgE{gIRHqgAqgIQQtgEmgA{gIRAegIR@rgPwgIig_gEjgVkgAsgIS@_gIRF^gALWzgALZmgIRY{gKCSpgAMImgABShg"
    "ABY]gITEwgLogKEYjgmgAMQwgIUHigKFVpgKGBygIUN^g]gAwgIVAegIURhgAMUxgAMZ]gGkgAqgCogANAjgKJAogIWKzgQwgKagAOClgAygAOG{gIYEi"
    "gKLLpgKLOygOqgGugIYKzgAOUtgAOYigggkgqgkgBcgI[@_";
/* end of test/make_unicode.py's text */

/* ---- Unpacking ---- */

static uint32_t uni_number_of(const char **p) { /* one number of the table text */
    uint32_t v = 0;
    while (**p < 93) v = v * 28 + (uint32_t)(*(*p)++ - 64);
    return v * 34 + (uint32_t)(*(*p)++ - 93);
}
static uint32_t uni_signed_of(const char **p, uint32_t base) { /* base plus a zigzag coded difference */
    uint32_t v = uni_number_of(p);
    return v & 1 ? base - (v + 1) / 2 : base + v / 2;
}

static int uni_by_parts(const void *a, const void *b) {
    const uni_pair *x = a, *y = b;
    if (x->a != y->a) return x->a < y->a ? -1 : 1;
    return x->b < y->b ? -1 : x->b > y->b;
}

static void uni_init_classes(uni *u) {
    uint32_t at = 0;
    for (const char *p = uni_class_text; *p;) {
        uint32_t v = uni_number_of(&p), n = v / 32 + 1;
        memset(u->props + at, (int)(v % 32), n);
        at += n;
    }
    assert(at == UNI_MAX);
}

static void uni_init_marks(uni *u) {
    uint32_t end = 0;
    u->marks = mem_alloc(sizeof uni_mark_text * sizeof *u->marks); /* more than enough; cut below */
    for (const char *p = uni_mark_text; *p;) {
        uint32_t first = end + uni_number_of(&p), last = first + uni_number_of(&p), v = uni_number_of(&p);
        u->marks[u->n_marks++] = (uni_marks){first, last, (uint8_t)(v / 2), v & 1};
        for (uint32_t c = first; c <= last; c++) u->props[c] |= UNI_UNSTABLE;
        end = last + 1;
    }
    u->marks = mem_realloc(u->marks, (size_t)u->n_marks * sizeof *u->marks);
}

static void uni_init_pairs(uni *u) {
    uint32_t c = 0, a = 0, b = 0;
    u->pairs = mem_alloc(sizeof uni_pair_text / 2 * sizeof *u->pairs);
    for (const char *p = uni_pair_text; *p;) {
        uint32_t v = uni_number_of(&p), kind = v / 2 % 3;
        c += v / 6;
        a = uni_signed_of(&p, a);
        if (kind != 2) b = uni_signed_of(&p, b);
        u->pairs[u->n_pairs++] = (uni_pair){c, a, kind == 2 ? 0 : b, kind == 0, v & 1};
        u->props[kind == 0 ? b : c] |= UNI_UNSTABLE;
    }
    u->pairs = mem_realloc(u->pairs, (size_t)u->n_pairs * sizeof *u->pairs);
    u->compositions = mem_alloc((size_t)u->n_pairs * sizeof *u->compositions);
    for (int i = 0; i < u->n_pairs; i++)
        if (u->pairs[i].composes) u->compositions[u->n_compositions++] = u->pairs[i];
    qsort(u->compositions, (size_t)u->n_compositions, sizeof *u->compositions, uni_by_parts);
    for (uint32_t j = 0x1161; j <= 0x1175; j++) u->props[j] |= UNI_UNSTABLE; /* Hangul vowels and finals join backwards */
    for (uint32_t j = 0x11A8; j <= 0x11C2; j++) u->props[j] |= UNI_UNSTABLE;
}

static void uni_init(uni *u) {
    *u = (uni){.props = mem_alloc(UNI_MAX)};
    uni_init_classes(u);
    uni_init_marks(u);
    uni_init_pairs(u);
}
static void uni_free(uni *u) {
    free(u->props), free(u->marks), free(u->pairs), free(u->compositions);
    *u = (uni){0};
}

/* ---- UTF-8 ---- */

/* The code point at p and its bytes. Text must be valid. */
static inline uint32_t uni_next(const char *p, int *n) {
    unsigned char a = (unsigned char)p[0];
    if (a < 0x80) return *n = 1, a;
    uint32_t b = (unsigned char)p[1] & 63;
    if (a < 0xE0) return *n = 2, (a & 31u) << 6 | b;
    b = b << 6 | ((unsigned char)p[2] & 63);
    if (a < 0xF0) return *n = 3, (a & 15u) << 12 | b;
    return *n = 4, (a & 7u) << 18 | b << 6 | ((unsigned char)p[3] & 63);
}

/* Bytes at p that are no character and become one U+FFFD: the longest beginning of a character that is cut short there, else 1
 * (Unicode 3.9, substitution of maximal subparts, as Python and Rust do). *cut: the text ended, more bytes could complete it. */
static int uni_bad_len(const char *p, const char *end, bool *cut) {
    unsigned char a = (unsigned char)p[0];
    unsigned lo = a == 0xE0 ? 0xA0 : a == 0xF0 ? 0x90 : 0x80, hi = a == 0xED ? 0x9F : a == 0xF4 ? 0x8F : 0xBF;
    int whole = a >= 0xC2 && a <= 0xDF ? 2 : (a & 0xF0) == 0xE0 ? 3 : a >= 0xF0 && a <= 0xF4 ? 4 : 1, n = 1;
    for (; n < whole && end - p > n && (unsigned char)p[n] >= lo && (unsigned char)p[n] <= hi; n++) lo = 0x80, hi = 0xBF;
    *cut = n < whole && end - p == n;
    return n;
}

/* The text itself where it is valid UTF-8, else a copy in *b with U+FFFD for what is not. */
static str uni_repair(str s, buf *b) {
    const char *p = s.p, *end = s.p + s.n, *done = s.p;
    bool cut;
    buf_clear(b);
    while (p < end) {
        uint64_t w = 0;
        while (end - p >= 8 && (memcpy(&w, p, 8), !(w & 0x8080808080808080u))) p += 8;
        if (p == end) break;
        int n = utf8_len(p, end);
        if (n) {
            p += n;
            continue;
        }
        buf_put(b, done, (size_t)(p - done));
        buf_c(b, "\xEF\xBF\xBD");
        done = p += uni_bad_len(p, end, &cut);
    }
    if (done == s.p) return s;
    buf_put(b, done, (size_t)(end - done));
    return buf_view(b);
}

/* ---- Normal form C ---- */

typedef struct uni_run { /* code points under work, each with its combining class above bit 24 */
    uint32_t *p;
    size_t n, cap;
} uni_run;

enum { UNI_S = 0xAC00, UNI_L = 0x1100, UNI_V = 0x1161, UNI_T = 0x11A7, UNI_V_N = 21, UNI_T_N = 28, UNI_S_N = 11172 };

static int uni_combining(const uni *u, uint32_t c, int version) {
    int lo = 0, hi = u->n_marks;
    if (!(u->props[c] & UNI_UNSTABLE)) return 0;
    while (lo < hi) {
        int mid = (lo + hi) / 2;
        if (u->marks[mid].last < c) lo = mid + 1;
        else hi = mid;
    }
    if (lo == u->n_marks || c < u->marks[lo].first || (u->marks[lo].young && version == UNI_9)) return 0;
    return u->marks[lo].class;
}

static const uni_pair *uni_find_pair(const uni *u, uint32_t c, int version) {
    int lo = 0, hi = u->n_pairs;
    while (lo < hi) {
        int mid = (lo + hi) / 2;
        if (u->pairs[mid].c < c) lo = mid + 1;
        else hi = mid;
    }
    if (lo == u->n_pairs || u->pairs[lo].c != c || (u->pairs[lo].young && version == UNI_9)) return NULL;
    return &u->pairs[lo];
}

/* The character that a and b make, 0: none. */
static uint32_t uni_compose(const uni *u, uint32_t a, uint32_t b, int version) {
    if (a - UNI_L < 19 && b - UNI_V < UNI_V_N) return UNI_S + ((a - UNI_L) * UNI_V_N + (b - UNI_V)) * UNI_T_N;
    if (a - UNI_S < UNI_S_N && (a - UNI_S) % UNI_T_N == 0 && b - UNI_T - 1 < UNI_T_N - 1) return a + (b - UNI_T);
    int lo = 0, hi = u->n_compositions;
    while (lo < hi) {
        int mid = (lo + hi) / 2;
        const uni_pair *m = &u->compositions[mid];
        if (m->a < a || (m->a == a && m->b < b)) lo = mid + 1;
        else hi = mid;
    }
    const uni_pair *f = &u->compositions[lo];
    return lo < u->n_compositions && f->a == a && f->b == b && !(f->young && version == UNI_9) ? f->c : 0;
}

static void uni_push(const uni *u, uni_run *r, uint32_t c, int version) {
    if (r->n == r->cap) r->p = mem_realloc(r->p, (r->cap = MAX(r->cap * 2, (size_t)64)) * sizeof *r->p);
    r->p[r->n++] = c | (uint32_t)uni_combining(u, c, version) << 24;
}

/* Appends the full canonical decomposition of c. Only first parts decompose further, so a stack of last parts is enough. */
static void uni_decompose(const uni *u, uni_run *r, uint32_t c, int version) {
    uint32_t last[8];
    int n = 0;
    if (c - UNI_S < UNI_S_N) {
        uint32_t i = c - UNI_S, t = i % UNI_T_N;
        uni_push(u, r, UNI_L + i / (UNI_V_N * UNI_T_N), version);
        uni_push(u, r, UNI_V + i / UNI_T_N % UNI_V_N, version);
        if (t) uni_push(u, r, UNI_T + t, version);
        return;
    }
    for (const uni_pair *d; n < COUNT(last) && (d = uni_find_pair(u, c, version)); c = d->a)
        if (d->b) last[n++] = d->b;
    uni_push(u, r, c, version);
    while (n) uni_push(u, r, last[--n], version);
}

/* Sorts each stretch of marks by class, stable, in linear time: a text may be one megabyte of marks. */
static void uni_reorder(uni_run *r) {
    uint32_t *sorted = NULL;
    for (size_t i = 0, j; i < r->n; i = j + 1) { /* [i,j) is a stretch of marks; it ends at a starter or the end */
        bool ordered = true;
        for (j = i; j < r->n && r->p[j] >> 24; j++) ordered &= j == i || r->p[j - 1] >> 24 <= r->p[j] >> 24;
        if (ordered) continue;
        size_t at[257] = {0};
        for (size_t k = i; k < j; k++) at[(r->p[k] >> 24) + 1]++;
        for (int k = 0; k < 256; k++) at[k + 1] += at[k];
        if (!sorted) sorted = mem_alloc(r->n * sizeof *sorted);
        for (size_t k = i; k < j; k++) sorted[at[r->p[k] >> 24]++] = r->p[k];
        memcpy(r->p + i, sorted, (j - i) * sizeof *sorted);
    }
    free(sorted);
}

/* Joins in place (Unicode 3.11, D117): a character joins the last starter unless one between them has the same or a higher
 * class. Then writes all of it to out. */
static void uni_recompose(const uni *u, uni_run *r, buf *out, int version) {
    size_t starter = SIZE_MAX, w = 0;
    uint32_t before = 0; /* class of the character written last behind the starter, 256: the starter itself is last */
    for (size_t i = 0; i < r->n; i++) {
        uint32_t c = r->p[i] & 0xFFFFFF, k = r->p[i] >> 24, joined = 0;
        if (starter != SIZE_MAX && (before == 256 || before < k))
            joined = uni_compose(u, r->p[starter] & 0xFFFFFF, c, version);
        if (joined) {
            r->p[starter] = joined;
            continue;
        }
        if (!k) starter = w, before = 256;
        else before = k;
        r->p[w++] = r->p[i];
    }
    for (size_t i = 0; i < w; i++) {
        char z[4];
        buf_put(out, z, (size_t)utf8_put(z, r->p[i] & 0xFFFFFF));
    }
    r->n = 0;
}

/* Text in form C: the text itself where a quick check finds nothing to do, else a copy in *b. Each stretch from the stable
 * character before an unstable one up to the next stable one is worked on by itself. */
static str uni_nfc(const uni *u, str s, int version, buf *b) {
    const char *p = s.p, *end = s.p + s.n, *done = s.p, *stable = s.p;
    uni_run r = {0};
    int n;
    buf_clear(b);
    while (p < end) {
        uint64_t w;
        while (end - p >= 8 && (memcpy(&w, p, 8), !(w & 0x8080808080808080u))) p += 8, stable = p - 1;
        if (p == end) break;
        uint32_t c = uni_next(p, &n);
        if (!(u->props[c] & UNI_UNSTABLE)) {
            stable = p, p += n;
            continue;
        }
        buf_put(b, done, (size_t)(stable - done));
        for (p = stable; p < end; p += n) {
            c = uni_next(p, &n);
            if (p > stable && !(u->props[c] & UNI_UNSTABLE)) break;
            uni_decompose(u, &r, c, version);
        }
        uni_reorder(&r);
        uni_recompose(u, &r, b, version);
        done = stable = p;
    }
    free(r.p);
    if (done == s.p) return s;
    buf_put(b, done, (size_t)(end - done));
    return buf_view(b);
}

/* ===========================================================================
 * MARK: 6. Tokenizer [pure]
 * tokenizer.json to ids and back, equal to Hugging Face `tokenizers`.
 * =========================================================================== */

/* ===========================================================================
 * MARK: 7. Chat template: values and parser [pure]
 * The Jinja that chat templates use: values, lexer, parser.
 * =========================================================================== */

/* ===========================================================================
 * MARK: 8. Chat template: evaluation [pure]
 * Runs a parsed template under limits of steps, depth and output.
 * =========================================================================== */

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
