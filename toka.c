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
    for (char *c = e->msg; *c; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7F) *c = '?'; /* a name out of a hostile file must not steer a terminal */
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

/* Maps a whole regular file read-only. An empty file gives {"",0}. Undo with os_unmap. A path that leads nowhere is
 * TOKA_E_INPUT: it came from a user or a file. TOKA_E_IO is left to what the system itself could not do. */
static int os_map(const char *path, str *out, toka_err *e) {
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a FIFO in a file's place must not hang */
    struct stat st;
    if (fd < 0) {
        bool system = errno == EIO || errno == EMFILE || errno == ENFILE || errno == ENOMEM;
        return fail(e, system ? TOKA_E_IO : TOKA_E_INPUT, "%s: %s", path, strerror(errno));
    }
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
 * Code points, categories and normal form C, from the tables of one Unicode version.
 * =========================================================================== */

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
 * In: what the user calls a model (a folder in Hugging Face layout, a hub id, a name of models.txt, or nothing: the files
 * embedded in the program). Out: an mf_model, immutable from then on: the shape, the RoPE table, every weight as a pointer
 * into the mapped file, the tokenizer's files, the template's source, the end ids and the sampling defaults.
 *
 * In the order of the text:
 *   RoPE           mf_rope_table: every kind of RoPE as one table of frequencies and one factor
 *   config         mf_config_parse, mf_generation_parse, mf_tokenizer_config_parse: JSON text to structs
 *   safetensors    st_parse: a file to a list of tensors; st_index_parse: an index to a list of files; st_set: by name
 *   binding        mf_bind: names to the named fields of toka_layer, once, by two tables, every shape checked
 *   models.txt     mf_models_parse: the table of known models
 *   finding        mf_find: folder, name, hub cache
 *   opening        mf_open, mf_close
 * All but the last two (and st_set's heap) are pure functions of their text, which is how the fuzzers drive them.
 *
 * What always holds after mf_open: every number of the shape lies within mf_dims' limits, D is even and H a multiple of K;
 * every tensor the layer loop will touch has exactly the shape that the letters say, lies inside its file and is 2-byte
 * aligned; no data page of a weight was read. A file is hostile until checked: what is wrong with it becomes one sentence.
 *
 * Where the files leave a choice it follows transformers 5: fields that are ignored there are ignored, what is defaulted
 * there is defaulted. It refuses what toka would compute differently: other architectures and RoPE kinds, quantized
 * weights, experts, biases in the MLP. It does not download, convert or write anything.
 * =========================================================================== */

typedef enum mf_rope_kind { MF_ROPE_DEFAULT, MF_ROPE_LINEAR, MF_ROPE_LLAMA3, MF_ROPE_YARN } mf_rope_kind;
static const char *const mf_rope_names[] = {"default", "linear", "llama3", "yarn"};

typedef struct mf_rope { /* the rope_parameters (or rope_scaling and rope_theta) of a config; 0: not given */
    mf_rope_kind kind;
    double theta;
    double factor;                            /* all but default */
    double original_len;                      /* llama3, yarn: original_max_position_embeddings */
    double low_freq_factor, high_freq_factor; /* llama3 */
    double attention_factor;                  /* yarn; 0: follows from factor, mscale, mscale_all_dim */
    double mscale, mscale_all_dim;            /* yarn */
    double beta_fast, beta_slow;              /* yarn: rotations over original_len where the ramp begins and ends */
    bool fractional;                          /* yarn: "truncate": false, the ramp's ends are not rounded to whole pairs */
} mf_rope;

enum { MF_QKV_BIAS = 1, MF_O_BIAS = 2, MF_QK_NORM = 4, MF_LM_HEAD = 8 }; /* MF_LM_HEAD: not tied to the embedding */

typedef struct mf_config { /* what config.json, or a line of models.txt, says */
    const struct mf_arch *arch;
    toka_shape shape;  /* B is left 0 */
    mf_rope rope;
    unsigned features; /* MF_QKV_BIAS ... */
    int *window;       /* [L] as toka_layer.window */
    int32_t bos_id;    /* -1: none */
    int32_t *eos_ids;
    int n_eos_ids;
} mf_config;

typedef struct mf_defaults { /* what generation_config.json says about sampling; what it leaves out is off: 1, 1, 0, 1, 0 */
    bool has_do_sample, has_temperature, has_top_p, has_top_k, has_min_p, has_repetition_penalty;
    bool do_sample; /* false: greedy, and the other fields are not meant to matter */
    float temperature, top_p, min_p, repetition_penalty;
    int top_k;
} mf_defaults;

static const mf_defaults mf_no_defaults = {.temperature = 1, .top_p = 1, .repetition_penalty = 1};

/* The files of a model inside the program; the table ends with {0}. */
typedef struct mf_embedded {
    const char *name, *begin, *end;
} mf_embedded;

typedef struct mf_model { /* immutable after mf_open */
    arena a;              /* everything below that is not mapped */
    char *name;           /* the folder's last part, the hub id or the name of models.txt */
    char *folder;         /* NULL: embedded */
    char *hub_id;         /* NULL: given as a folder, or embedded */
    char architecture[64];
    mf_config config;
    toka_shape shape;     /* = config.shape */
    toka_weights weights; /* tensors point into the maps */
    int64_t n_parameters;
    size_t weight_bytes;
    str tokenizer_json, tokenizer_config; /* mapped; empty if there is no such file */
    str chat_template;    /* Jinja source; empty: none */
    char *bos_token, *eos_token, *pad_token, *unk_token; /* texts for the template, NULL: none */
    int32_t bos_id;       /* -1: none */
    int32_t *eos_ids;
    int n_eos_ids;
    mf_defaults defaults;
    const mf_embedded *embedded; /* not NULL: where files come from, instead of folder */
    str *maps;            /* heap; what mf_close unmaps */
    int n_maps;
} mf_model;

/* ---- RoPE: every kind is a table of D/2 frequencies and one factor ----
 * The float32 steps and their order are those of transformers (modeling_rope_utils), where number / tensor is the tensor's
 * reciprocal times the number. So tables agree to the rounding of powf, and angles at far positions with them. */

/* llama3 (Llama 3.1 and later): waves longer than original_len / low are slowed by factor, those shorter than
 * original_len / high are kept, and between them the two are blended. */
static float mf_rope_llama3(const mf_rope *r, float freq) {
    float factor = (float)r->factor, low = (float)r->low_freq_factor;
    float span = (float)(r->high_freq_factor - r->low_freq_factor);
    float wavelen = 1.0f / freq * (float)(2 * 3.14159265358979323846); /* positions to a full turn */
    if (wavelen > (float)(r->original_len / r->low_freq_factor)) return freq / factor;
    if (wavelen < (float)(r->original_len / r->high_freq_factor)) return freq;
    float keep = (1.0f / wavelen * (float)r->original_len - low) / span;
    return (1.0f - keep) * freq / factor + keep * freq;
}

/* yarn (arXiv 2309.00071): which pair of dimensions turns `rotations` times in original_len; a fraction. */
static double mf_yarn_dimension(const mf_rope *r, int D, double rotations) {
    const double pi = 3.14159265358979323846;
    return D * log(r->original_len / (rotations * 2 * pi)) / (2 * log(r->theta));
}

/* Fast pairs keep their frequency, slow ones are divided by factor, a linear ramp from pair `low` to `high` between. */
static void mf_rope_yarn(const mf_rope *r, int D, float *freq) {
    double low = mf_yarn_dimension(r, D, r->beta_fast), high = mf_yarn_dimension(r, D, r->beta_slow);
    if (!r->fractional) low = floor(low), high = ceil(high);
    low = MAX(low, 0.0), high = MIN(high, (double)(D - 1));
    if (low == high) high += 0.001;
    for (int i = 0; i < D / 2; i++) {
        float pos = powf((float)r->theta, (float)(2 * i) / (float)D);
        float ramp = ((float)i - (float)low) / (float)(high - low);
        float keep = 1.0f - MIN(MAX(ramp, 0.0f), 1.0f);
        freq[i] = 1.0f / ((float)r->factor * pos) * (1.0f - keep) + 1.0f / pos * keep;
    }
}

/* The factor on cos and sin, in place of a temperature: 0.1 ln(factor) + 1, or the quotient of two such with weights. */
static double mf_yarn_scale(const mf_rope *r) {
    double ln = r->factor > 1 ? log(r->factor) : 0;
    if (r->attention_factor > 0) return r->attention_factor;
    if (r->mscale != 0 && r->mscale_all_dim != 0) return (0.1 * r->mscale * ln + 1) / (0.1 * r->mscale_all_dim * ln + 1);
    return 0.1 * ln + 1;
}

/* freq[D/2] radians per position, *scale on cos and sin. */
static void mf_rope_table(const mf_rope *r, int D, float *freq, float *scale) {
    *scale = r->kind == MF_ROPE_YARN ? (float)mf_yarn_scale(r) : 1;
    for (int i = 0; i < D / 2; i++) {
        freq[i] = 1.0f / powf((float)r->theta, (float)(2 * i) / (float)D);
        if (r->kind == MF_ROPE_LINEAR) freq[i] /= (float)r->factor;
        if (r->kind == MF_ROPE_LLAMA3) freq[i] = mf_rope_llama3(r, freq[i]);
    }
    if (r->kind == MF_ROPE_YARN) mf_rope_yarn(r, D, freq);
}

/* ---- Reading the fields of a JSON object: the first thing wrong sticks, later reads return their default ---- */

typedef struct mf_reader {
    const json *o;     /* the object; NULL: every field is missing */
    const char *where; /* file, for messages */
    const char *path;  /* "" or "rope_parameters." ... in front of a field's name */
    toka_err *e;       /* code 0 until something is wrong, then that of the first error */
} mf_reader;

/* A value as a message shows it. */
static const char *mf_show(const json *v, char z[80]) {
    if (!v) snprintf(z, 80, "missing");
    else if (v->type == JSON_STRING) snprintf(z, 80, "\"%.*s\"", (int)MIN(v->n, 60u), v->s);
    else if (v->type == JSON_NUMBER && v->exact) snprintf(z, 80, "%lld", (long long)v->i);
    else if (v->type == JSON_NUMBER) snprintf(z, 80, "%g", v->f);
    else
        snprintf(z, 80, "%s", (const char *const[]){"null", "false", "true", "", "", "an array", "an object"}[v->type]);
    return z;
}

/* "config.json: hidden_size is "big", expected a whole number" */
static void mf_bad(mf_reader *r, const char *name, const json *v, const char *expected) {
    char z[80];
    if (r->e->code) return;
    fail(r->e, TOKA_E_INPUT, "%s: %s%s is %s, expected %s", r->where, r->path, name, mf_show(v, z), expected);
}

static const json *mf_field(const mf_reader *r, const char *name) { /* NULL if absent or null */
    const json *v = json_get(r->o, name);
    return json_is(v, JSON_NULL) ? NULL : v;
}
static int64_t mf_int(mf_reader *r, const char *name, int64_t otherwise) {
    const json *v = mf_field(r, name);
    if (!v) return otherwise;
    if (v->type == JSON_NUMBER && v->exact) return v->i;
    return mf_bad(r, name, v, "a whole number"), otherwise;
}
static double mf_num(mf_reader *r, const char *name, double otherwise, double min, double max) {
    const json *v = mf_field(r, name);
    char z[80];
    if (!v) return otherwise;
    double f = json_num(v, NAN);
    if (f >= min && f <= max) return f;
    snprintf(z, sizeof z, "a number from %g to %g", min, max);
    return mf_bad(r, name, v, z), otherwise;
}
static bool mf_bool(mf_reader *r, const char *name, bool otherwise) {
    const json *v = mf_field(r, name);
    if (!v) return otherwise;
    if (v->type != JSON_TRUE && v->type != JSON_FALSE) mf_bad(r, name, v, "true or false");
    return v->type == JSON_TRUE;
}

/* A text as a JSON object; NULL: *e says what is wrong, `where` in front. */
static const json *mf_json(str text, const char *where, arena *a, json_limits limits, toka_err *e) {
    const json *o = json_parse(a, text, limits, e);
    if (!o) {
        toka_err inner = *e;
        fail(e, inner.code, "%s: %.440s", where, inner.msg);
    } else if (o->type != JSON_OBJECT) {
        fail(e, TOKA_E_INPUT, "%s: not a JSON object", where);
        o = NULL;
    }
    return o;
}

/* ---- config.json: the shape ---- */

static const json_limits mf_json_limits = {32, (size_t)1 << 24}; /* for configs, which are a few KB */

/* The numbers of a shape, in the order in which config.json and models.txt give them to mf_set_dims. The limits keep every
 * product of two dimensions within int64, and H*D within int. */
enum { MF_L, MF_E, MF_H, MF_K, MF_D, MF_F, MF_V, MF_LEN, MF_N_DIMS };
static const struct {
    const char *letter, *field;
    int64_t max;
} mf_dims[MF_N_DIMS] = {
    {"L", "num_hidden_layers", 4096},      {"E", "hidden_size", 1 << 20},   {"H", "num_attention_heads", 1 << 14},
    {"K", "num_key_value_heads", 1 << 14}, {"D", "head_dim", 1 << 14},      {"F", "intermediate_size", 1 << 24},
    {"V", "vocab_size", 1 << 26},          {"max_len", "max_position_embeddings", 1 << 30},
};

/* The architectures, and what transformers takes for a field that is not there. Common to all: L 32, H 32, rms_norm_eps
 * 1e-6, rope_theta 10000, hidden_act silu, attention_bias and tie_word_embeddings false. */
typedef struct mf_arch {
    const char *name, *model_type;
    unsigned features;          /* always there */
    unsigned attention_bias;    /* what the field attention_bias brings; 0: the field is ignored */
    int E, F, V, max_len;
    int K;                      /* 0: as H. A K that is null is H everywhere */
    int D;                      /* 0: E / H */
    int window;                 /* sliding_window */
    bool window_asks;           /* the window counts only with use_sliding_window, and by layer */
    int bos, eos;               /* -1: none */
} mf_arch;

static const mf_arch mf_archs[] = {
    {.name = "LlamaForCausalLM", .model_type = "llama", .attention_bias = MF_QKV_BIAS | MF_O_BIAS, .E = 4096, .F = 11008,
     .V = 32000, .max_len = 2048, .bos = 1, .eos = 2},
    {.name = "MistralForCausalLM", .model_type = "mistral", .E = 4096, .F = 14336, .V = 32000, .max_len = 131072, .K = 8,
     .window = 4096, .bos = 1, .eos = 2},
    {.name = "Qwen2ForCausalLM", .model_type = "qwen2", .features = MF_QKV_BIAS, .E = 4096, .F = 22016, .V = 151936,
     .max_len = 32768, .K = 32, .window = 4096, .window_asks = true, .bos = -1, .eos = -1},
    {.name = "Qwen3ForCausalLM", .model_type = "qwen3", .features = MF_QK_NORM, .attention_bias = MF_QKV_BIAS | MF_O_BIAS,
     .E = 4096, .F = 22016, .V = 151936, .max_len = 32768, .K = 32, .D = 128, .window = 4096, .window_asks = true,
     .bos = -1, .eos = -1},
};

static const mf_arch *mf_arch_by_name(str name) {
    for (int i = 0; i < COUNT(mf_archs); i++)
        if (str_is(name, mf_archs[i].name)) return &mf_archs[i];
    return NULL;
}

static void mf_read_arch(mf_reader *r, mf_config *c) {
    const json *list = mf_field(r, "architectures"), *first = json_at(list, 0);
    const char *const known = "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM or Qwen3ForCausalLM";
    if (first) {
        c->arch = mf_arch_by_name(json_str(first));
        if (!c->arch) mf_bad(r, "architectures[0]", first, known);
        return;
    }
    const json *type = mf_field(r, "model_type"); /* what names the architecture when nobody saved a model with it */
    for (int i = 0; type && i < COUNT(mf_archs); i++)
        if (str_is(json_str(type), mf_archs[i].model_type)) c->arch = &mf_archs[i];
    if (!c->arch) mf_bad(r, list ? "architectures" : "model_type", list ? list : type, known);
}

/* Checks the numbers of a shape and stores them. */
static int mf_set_dims(mf_config *c, const int64_t dim[MF_N_DIMS], const char *where, toka_err *e) {
    for (int i = 0; i < MF_N_DIMS; i++)
        if (dim[i] < 1 || dim[i] > mf_dims[i].max)
            return fail(e, TOKA_E_INPUT, "%s: %s (%s) is %lld, expected 1 to %lld", where, mf_dims[i].field,
                        mf_dims[i].letter, (long long)dim[i], (long long)mf_dims[i].max);
    if (dim[MF_D] % 2)
        return fail(e, TOKA_E_INPUT, "%s: head_dim (D) is %lld, expected an even number", where, (long long)dim[MF_D]);
    if (dim[MF_H] % dim[MF_K])
        return fail(e, TOKA_E_INPUT,
                    "%s: num_attention_heads (H) is %lld, expected a multiple of num_key_value_heads (K), %lld", where,
                    (long long)dim[MF_H], (long long)dim[MF_K]);
    toka_shape *s = &c->shape;
    s->L = (int)dim[MF_L], s->E = (int)dim[MF_E], s->H = (int)dim[MF_H], s->K = (int)dim[MF_K];
    s->D = (int)dim[MF_D], s->F = (int)dim[MF_F], s->V = (int)dim[MF_V], s->max_len = (int)dim[MF_LEN];
    return 0;
}

static void mf_read_dims(mf_reader *r, mf_config *c) {
    const mf_arch *a = c->arch;
    int64_t dim[MF_N_DIMS];
    dim[MF_L] = mf_int(r, "num_hidden_layers", 32);
    dim[MF_E] = mf_int(r, "hidden_size", a->E);
    dim[MF_H] = mf_int(r, "num_attention_heads", 32);
    bool as_H = !a->K || json_is(json_get(r->o, "num_key_value_heads"), JSON_NULL);
    dim[MF_K] = mf_int(r, "num_key_value_heads", as_H ? dim[MF_H] : a->K);
    bool divides = dim[MF_H] > 0 && dim[MF_E] % dim[MF_H] == 0;
    dim[MF_D] = mf_int(r, "head_dim", a->D ? a->D : divides ? dim[MF_E] / dim[MF_H] : -1);
    dim[MF_F] = mf_int(r, "intermediate_size", a->F);
    dim[MF_V] = mf_int(r, "vocab_size", a->V);
    dim[MF_LEN] = mf_int(r, "max_position_embeddings", a->max_len);
    c->shape.eps = (float)mf_num(r, "rms_norm_eps", 1e-6, 0, 1);
    if (r->e->code) return;
    if (dim[MF_D] == -1 && !mf_field(r, "head_dim") && dim[MF_H] > 0)
        fail(r->e, TOKA_E_INPUT, "%s: hidden_size is %lld, expected a multiple of num_attention_heads, %lld, or a head_dim",
             r->where, (long long)dim[MF_E], (long long)dim[MF_H]);
    else
        mf_set_dims(c, dim, r->where, r->e);
}

/* Fields that would change the result in a way toka does not compute: only off is taken. */
static void mf_refuse(mf_reader *r) {
    static const struct {
        const char *field, *expected;
    } off[] = {
        {"mlp_bias", "false: a bias in the MLP is not supported"},
        {"quantization_config", "none: quantized weights are not supported"},
        {"compression_config", "none: quantized weights are not supported"},
        {"attn_logit_softcapping", "none: soft-capped logits are not supported"},
        {"final_logit_softcapping", "none: soft-capped logits are not supported"},
        {"num_local_experts", "none: mixtures of experts are not supported"},
        {"num_experts", "none: mixtures of experts are not supported"},
        {"n_routed_experts", "none: mixtures of experts are not supported"},
    };
    for (int i = 0; i < COUNT(off); i++) {
        const json *v = mf_field(r, off[i].field);
        if (v && v->type != JSON_FALSE && json_num(v, 1) != 0) mf_bad(r, off[i].field, v, off[i].expected);
    }
    const json *act = mf_field(r, "hidden_act");
    if (act && !str_is(json_str(act), "silu") && !str_is(json_str(act), "swish")) mf_bad(r, "hidden_act", act, "\"silu\"");
}

/* ---- config.json: RoPE and windows ---- */

static const char *const mf_layer_types[] = {"full_attention", "sliding_attention"};

static mf_rope_kind mf_read_rope_kind(mf_reader *r) {
    const json *v = mf_field(r, "rope_type");
    const char *name = v ? "rope_type" : "type"; /* its name in old files */
    if (!v) v = mf_field(r, "type");
    for (int i = 0; v && i < COUNT(mf_rope_names); i++)
        if (str_is(json_str(v), mf_rope_names[i])) return (mf_rope_kind)i;
    if (v) mf_bad(r, name, v, "default, linear, llama3 or yarn");
    return MF_ROPE_DEFAULT;
}

/* original_max_position_embeddings: that of config.json itself, else that of the RoPE object, else the model's length. */
static double mf_read_original_len(mf_reader *top, mf_reader *r, int max_len) {
    const char *const field = "original_max_position_embeddings";
    return mf_num(mf_field(top, field) ? top : r, field, max_len, 1, 1 << 30);
}

static void mf_read_rope_scaling(mf_reader *top, mf_reader *r, const mf_config *c, mf_rope *rope) {
    if (rope->kind != MF_ROPE_YARN && !mf_field(r, "factor")) mf_bad(r, "factor", NULL, "a number");
    if (rope->kind == MF_ROPE_LINEAR) {
        rope->factor = mf_num(r, "factor", 1, 1e-3, 1e6);
        return;
    }
    rope->original_len = mf_read_original_len(top, r, c->shape.max_len);
    rope->factor = mf_num(r, "factor", c->shape.max_len / rope->original_len, 1e-3, 1e6);
    if (rope->kind == MF_ROPE_LLAMA3) {
        rope->low_freq_factor = mf_num(r, "low_freq_factor", 0, 1e-3, 1e6);
        rope->high_freq_factor = mf_num(r, "high_freq_factor", 0, 1e-3, 1e6);
        if (rope->low_freq_factor == 0) mf_bad(r, "low_freq_factor", NULL, "a number");
        if (rope->high_freq_factor <= rope->low_freq_factor)
            mf_bad(r, "high_freq_factor", mf_field(r, "high_freq_factor"), "more than low_freq_factor");
        return;
    }
    rope->attention_factor = mf_num(r, "attention_factor", 0, 1e-6, 1e6);
    rope->mscale = mf_num(r, "mscale", 0, 0, 1e3);
    rope->mscale_all_dim = mf_num(r, "mscale_all_dim", 0, 0, 1e3);
    rope->beta_fast = mf_num(r, "beta_fast", 32, 0, 1e6);
    rope->beta_slow = mf_num(r, "beta_slow", 1, 0, 1e6);
    if (rope->beta_fast == 0) rope->beta_fast = 32; /* 0 means not given, as in transformers */
    if (rope->beta_slow == 0) rope->beta_slow = 1;
    rope->fractional = !mf_bool(r, "truncate", true);
}

/* RoPE stands in rope_scaling with rope_theta beside it (transformers 4) or all in rope_parameters (5); the first wins. */
static void mf_read_rope(mf_reader *top, mf_config *c) {
    const char *name = "rope_scaling", *path = "rope_scaling.";
    const json *o = mf_field(top, name);
    if (!o || (o->type == JSON_OBJECT && o->n == 0)) o = mf_field(top, name = "rope_parameters"), path = "rope_parameters.";
    if (o && o->type != JSON_OBJECT) mf_bad(top, name, o, "an object");
    if (top->e->code) return;
    mf_reader in = *top, *r = &in;
    r->o = o, r->path = path;
    for (int i = 0; o && i < COUNT(mf_layer_types); i++)
        if (mf_field(r, mf_layer_types[i]))
            mf_bad(r, mf_layer_types[i], mf_field(r, mf_layer_types[i]), "none: one RoPE for all layers");
    mf_rope *rope = &c->rope;
    rope->kind = mf_read_rope_kind(r);
    rope->theta = mf_num(mf_field(r, "rope_theta") ? r : top, "rope_theta", 10000, 1.0001, 1e18);
    mf_reader *partial = mf_field(r, "partial_rotary_factor") ? r : top;
    if (mf_num(partial, "partial_rotary_factor", 1, 0, 1) != 1)
        mf_bad(partial, "partial_rotary_factor", mf_field(partial, "partial_rotary_factor"), "1: the whole head rotates");
    if (rope->kind != MF_ROPE_DEFAULT) mf_read_rope_scaling(top, r, c, rope);
    if (rope->kind == MF_ROPE_YARN) /* what it stretches to; max_position_embeddings often still says the original length */
        c->shape.max_len = (int)MAX(c->shape.max_len, MIN(rope->original_len * rope->factor, (double)mf_dims[MF_LEN].max));
}

/* The window of each layer. Mistral: one for all. Qwen, if it asks for windows: layer_types says which layers, else those
 * from max_window_layers on. */
static void mf_read_windows(mf_reader *r, mf_config *c, arena *a) {
    int L = c->shape.L;
    c->window = arena_zalloc(a, (size_t)L * sizeof *c->window);
    bool none = !c->arch->window || json_is(json_get(r->o, "sliding_window"), JSON_NULL);
    if (c->arch->window_asks && !mf_bool(r, "use_sliding_window", false)) none = true;
    int64_t window = none ? 0 : mf_int(r, "sliding_window", c->arch->window);
    if (!none && (window < 1 || window > mf_dims[MF_LEN].max))
        mf_bad(r, "sliding_window", mf_field(r, "sliding_window"), "1 or more tokens, or null");
    int64_t from = c->arch->window_asks ? mf_int(r, "max_window_layers", 28) : 0;
    for (int i = 0; i < L; i++) c->window[i] = i >= from ? (int)window : 0;

    const json *types = c->arch->window_asks ? mf_field(r, "layer_types") : NULL;
    if (types && (types->type != JSON_ARRAY || types->n != (uint32_t)L))
        mf_bad(r, "layer_types", types, "a list with one for each layer");
    for (int i = 0; types && !r->e->code && i < L; i++) {
        const json *type = json_at(types, (size_t)i);
        bool slides = str_is(json_str(type), mf_layer_types[1]);
        if (!slides && !str_is(json_str(type), mf_layer_types[0]))
            mf_bad(r, "layer_types", type, "\"full_attention\" or \"sliding_attention\"");
        if (slides && !window) mf_bad(r, "layer_types", type, "\"full_attention\", as there is no window");
        c->window[i] = slides ? (int)window : 0;
    }
}

/* ---- config.json: end ids, and the whole ---- */

/* A token id or a list of them. Ids that the vocabulary does not have can never be drawn and are left out. */
static void mf_read_ids(mf_reader *r, const char *name, int V, arena *a, int32_t **list, int *n) {
    const json *v = mf_field(r, name);
    if (!v) return;
    size_t most = v->type == JSON_ARRAY ? v->n : 1;
    *list = arena_alloc(a, most * sizeof **list);
    *n = 0;
    for (size_t i = 0; i < most; i++) {
        const json *it = v->type == JSON_ARRAY ? v + 1 + i : v; /* numbers are one node each; the first other ends it */
        if (it->type != JSON_NUMBER || !it->exact) {
            mf_bad(r, name, it, "a token id or a list of them");
            return;
        }
        if (it->i >= 0 && it->i < V) (*list)[(*n)++] = (int32_t)it->i;
    }
}

static int32_t mf_read_id(mf_reader *r, const char *name, int otherwise, int V) {
    int64_t id = mf_int(r, name, otherwise);
    return id >= 0 && id < V ? (int32_t)id : -1;
}

static void mf_finish_rope(mf_config *c, arena *a) {
    float *freq = arena_alloc(a, (size_t)(c->shape.D / 2) * sizeof *freq);
    mf_rope_table(&c->rope, c->shape.D, freq, &c->shape.rope_scale);
    c->shape.rope_freq = freq;
}

/* config.json to *c; what c points to lives in `a`. */
static int mf_config_parse(str text, const char *where, arena *a, mf_config *c, toka_err *e) {
    *c = (mf_config){0};
    *e = (toka_err){0};
    const json *o = mf_json(text, where, a, mf_json_limits, e);
    if (!o) return e->code;
    mf_reader reader = {.o = o, .where = where, .path = "", .e = e}, *r = &reader;
    mf_read_arch(r, c);
    mf_refuse(r);
    if (e->code) return e->code;
    mf_read_dims(r, c);
    if (e->code) return e->code;
    mf_read_rope(r, c);
    mf_read_windows(r, c, a);
    c->features = c->arch->features;
    if (c->arch->attention_bias && mf_bool(r, "attention_bias", false)) c->features |= c->arch->attention_bias;
    if (!mf_bool(r, "tie_word_embeddings", false)) c->features |= MF_LM_HEAD;
    c->bos_id = mf_read_id(r, "bos_token_id", json_get(o, "bos_token_id") ? -1 : c->arch->bos, c->shape.V);
    if (c->arch->eos >= 0 && !json_get(o, "eos_token_id")) {
        c->eos_ids = arena_alloc(a, sizeof *c->eos_ids);
        c->eos_ids[0] = c->arch->eos;
        c->n_eos_ids = c->arch->eos < c->shape.V;
    }
    mf_read_ids(r, "eos_token_id", c->shape.V, a, &c->eos_ids, &c->n_eos_ids);
    if (!e->code) mf_finish_rope(c, a);
    return e->code;
}

/* generation_config.json: its begin and end ids replace those in *c where it has any; sampling defaults go to *d. */
static int mf_generation_parse(str text, const char *where, arena *a, mf_config *c, mf_defaults *d, toka_err *e) {
    *d = mf_no_defaults;
    *e = (toka_err){0};
    const json *o = mf_json(text, where, a, mf_json_limits, e);
    if (!o) return e->code;
    mf_reader reader = {.o = o, .where = where, .path = "", .e = e}, *r = &reader;
    c->bos_id = mf_read_id(r, "bos_token_id", c->bos_id, c->shape.V);
    mf_read_ids(r, "eos_token_id", c->shape.V, a, &c->eos_ids, &c->n_eos_ids);
    d->has_do_sample = mf_field(r, "do_sample"), d->do_sample = mf_bool(r, "do_sample", false);
    d->has_temperature = mf_field(r, "temperature"), d->temperature = (float)mf_num(r, "temperature", 1, 0, 1e3);
    d->has_top_p = mf_field(r, "top_p"), d->top_p = (float)mf_num(r, "top_p", 1, 0, 1);
    d->has_min_p = mf_field(r, "min_p"), d->min_p = (float)mf_num(r, "min_p", 0, 0, 1);
    d->has_repetition_penalty = mf_field(r, "repetition_penalty");
    d->repetition_penalty = (float)mf_num(r, "repetition_penalty", 1, 1e-3, 1e3);
    int64_t top_k = mf_int(r, "top_k", 0);
    d->has_top_k = mf_field(r, "top_k"), d->top_k = (int)MIN(MAX(top_k, 0), (int64_t)INT_MAX);
    return e->code;
}

/* ---- tokenizer_config.json: what the chat template sees ---- */

static char *mf_special(mf_reader *r, const char *name, arena *a) { /* "<s>" or {"content": "<s>", ...} */
    const json *v = mf_field(r, name);
    if (json_is(v, JSON_OBJECT)) v = json_get(v, "content");
    if (v && v->type != JSON_STRING) mf_bad(r, name, v, "a string or an object with content");
    return json_is(v, JSON_STRING) ? arena_cstr(a, json_str(v)) : NULL;
}

/* The template: a string, or a list of {"name", "template"} of which "default" is the one. */
static str mf_template(mf_reader *r, arena *a) {
    const json *v = mf_field(r, "chat_template");
    if (json_is(v, JSON_ARRAY)) {
        const json *list = v;
        v = NULL;
        JSON_EACH(it, list) if (str_is(json_str(json_get(it, "name")), "default")) v = json_get(it, "template");
    }
    if (v && v->type != JSON_STRING) mf_bad(r, "chat_template", v, "a string or a list of named ones");
    return json_is(v, JSON_STRING) ? arena_str(a, json_str(v)) : STR("");
}

static int mf_tokenizer_config_parse(str text, const char *where, arena *a, mf_model *m, toka_err *e) {
    *e = (toka_err){0};
    arena tmp = {0}; /* the nodes: these files hold hundreds of added tokens */
    const json *o = mf_json(text, where, &tmp, json_trusted, e);
    if (o) {
        mf_reader reader = {.o = o, .where = where, .path = "", .e = e}, *r = &reader;
        m->bos_token = mf_special(r, "bos_token", a), m->eos_token = mf_special(r, "eos_token", a);
        m->pad_token = mf_special(r, "pad_token", a), m->unk_token = mf_special(r, "unk_token", a);
        m->chat_template = mf_template(r, a);
    }
    arena_free(&tmp);
    return e->code;
}

/* ---- safetensors ----
 * A file is: 8 bytes, little-endian, the length of the header; the header, a JSON object padded with spaces; the data.
 * The header maps each tensor's name to {"dtype", "shape", "data_offsets": [begin, end]}, offsets counted from the data's
 * first byte, and may hold "__metadata__" with strings. As the reference reader demands: in the order of their offsets the
 * tensors follow each other without a hole or an overlap, from 0 to the end of the file. */

#define ST_MAX_HEADER 100000000 /* bytes, as in the reference */
#define ST_MAX_FILES 1024       /* shards of one model */

typedef struct st_dtype {
    const char *name;
    int bits;
    int toka; /* toka_dtype, or -1: a type that may lie in the file but not be used */
} st_dtype;

static const st_dtype st_dtypes[] = {
    {"BF16", 16, TOKA_BF16}, {"F16", 16, TOKA_F16}, {"F32", 32, TOKA_F32}, {"F64", 64, -1},     {"I64", 64, -1},
    {"U64", 64, -1},         {"I32", 32, -1},       {"U32", 32, -1},       {"I16", 16, -1},     {"U16", 16, -1},
    {"I8", 8, -1},           {"U8", 8, -1},         {"BOOL", 8, -1},       {"F8_E5M2", 8, -1},  {"F8_E4M3", 8, -1},
    {"F8_E8M0", 8, -1},      {"F8_E4M3FNUZ", 8, -1}, {"F8_E5M2FNUZ", 8, -1}, {"F6_E2M3", 6, -1}, {"F6_E3M2", 6, -1},
    {"F4", 4, -1},           {"C64", 64, -1},
};

typedef struct st_tensor {
    str name;
    const char *file; /* for messages */
    const st_dtype *dtype;
    int n_dims;
    int64_t dims[2];      /* the first two; what toka uses has no more */
    uint64_t begin, end;  /* in the file's data */
    const char *data;
} st_tensor;

/* bits = product of the shape times the dtype's; false when that overflows or the shape is not a list of counts. */
static bool st_shape(const json *shape, st_tensor *t, uint64_t *bits) {
    *bits = (uint64_t)t->dtype->bits;
    if (!json_is(shape, JSON_ARRAY)) return false;
    bool empty = false, over = false;
    JSON_EACH(it, shape) {
        if (it->type != JSON_NUMBER || !it->exact || it->i < 0) return false;
        if (t->n_dims < COUNT(t->dims)) t->dims[t->n_dims] = it->i;
        t->n_dims++;
        empty = empty || it->i == 0;
        over = over || (it->i && *bits > INT64_MAX / (uint64_t)it->i);
        if (!over && it->i) *bits *= (uint64_t)it->i;
    }
    if (empty) *bits = 0;
    return !over;
}

/* One member of the header: name and description to *t. */
static int st_read(const json *key, const char *file, st_tensor *t, toka_err *e) {
    const json *o = key + 1, *at = json_get(o, "data_offsets"), *begin = json_at(at, 0), *end = json_at(at, 1);
    const str name = {key->s, key->n}, type = json_str(json_get(o, "dtype"));
    *t = (st_tensor){.name = name, .file = file};
    for (int i = 0; i < COUNT(st_dtypes); i++)
        if (str_is(type, st_dtypes[i].name)) t->dtype = &st_dtypes[i];
    if (!t->dtype) return fail(e, TOKA_E_INPUT, "%s: %.*s: dtype \"%.*s\" is not known", file, STRF(name), STRF(type));
    uint64_t bits;
    if (!st_shape(json_get(o, "shape"), t, &bits))
        return fail(e, TOKA_E_INPUT, "%s: %.*s: shape is not a list of counts with a product below 2^60", file, STRF(name));
    if (!at || at->type != JSON_ARRAY || at->n != 2 || json_int(begin, -1) < 0 || json_int(end, -1) < json_int(begin, -1))
        return fail(e, TOKA_E_INPUT, "%s: %.*s: data_offsets are not [begin, end]", file, STRF(name));
    t->begin = (uint64_t)begin->i, t->end = (uint64_t)end->i;
    if (bits % 8 || bits / 8 != t->end - t->begin)
        return fail(e, TOKA_E_INPUT, "%s: %.*s: data_offsets span %llu bytes, shape and dtype need %llu", file, STRF(name),
                    (unsigned long long)(t->end - t->begin), (unsigned long long)((bits + 7) / 8));
    return 0;
}

static int st_by_offset(const void *a, const void *b) {
    const st_tensor *x = a, *y = b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    return x->end < y->end ? -1 : x->end > y->end;
}

/* Sorts by offset; refuses holes, overlaps and what is outside `data`. */
static int st_place(st_tensor *t, int n, str data, const char *file, toka_err *e) {
    qsort(t, (size_t)n, sizeof *t, st_by_offset);
    uint64_t at = 0;
    for (int i = 0; i < n; i++) {
        if (t[i].end > data.n)
            return fail(e, TOKA_E_INPUT, "%s: %.*s: data_offsets [%llu,%llu] lie outside the file's %zu bytes of data",
                        file, STRF(t[i].name), (unsigned long long)t[i].begin, (unsigned long long)t[i].end, data.n);
        if (t[i].begin != at)
            return fail(e, TOKA_E_INPUT, "%s: %.*s: data_offsets begin at %llu, expected %llu, %s", file, STRF(t[i].name),
                        (unsigned long long)t[i].begin, (unsigned long long)at,
                        t[i].begin < at ? "they overlap another tensor" : "there is a hole before them");
        at = t[i].end;
        t[i].data = data.p + t[i].begin;
    }
    if (at != data.n)
        return fail(e, TOKA_E_INPUT, "%s: the tensors end at byte %llu of the data, which has %zu", file,
                    (unsigned long long)at, data.n);
    return 0;
}

/* A file's bytes to its tensors, in the order of their offsets. The list lives in `a`, names there or in the file. */
static int st_parse(str text, const char *file, arena *a, st_tensor **out, int *n, toka_err *e) {
    uint64_t header = 0;
    *n = 0;
    if (text.n < 8) return fail(e, TOKA_E_INPUT, "%s: %zu bytes, expected at least 8", file, text.n);
    for (int i = 7; i >= 0; i--) header = header << 8 | (unsigned char)text.p[i];
    if (header > ST_MAX_HEADER)
        return fail(e, TOKA_E_INPUT, "%s: header of %llu bytes, expected at most %d", file, (unsigned long long)header,
                    ST_MAX_HEADER);
    if (header > text.n - 8)
        return fail(e, TOKA_E_INPUT, "%s: header of %llu bytes, but the file ends after %zu", file,
                    (unsigned long long)header, text.n - 8);
    if (!header || text.p[8] != '{') return fail(e, TOKA_E_INPUT, "%s: the header does not begin with {", file);
    const json_limits limits = {3, ST_MAX_HEADER};
    const json *o = mf_json(str_sub(text, 8, 8 + (size_t)header), file, a, limits, e);
    if (!o) return e->code;
    st_tensor *t = *out = arena_alloc(a, o->n * sizeof *t);
    JSON_MEMBERS(key, o) {
        if (str_is((str){key->s, key->n}, "__metadata__")) {
            bool strings = key[1].type == JSON_OBJECT;
            if (strings) JSON_MEMBERS(k, key + 1) strings = strings && k[1].type == JSON_STRING;
            if (!strings) return fail(e, TOKA_E_INPUT, "%s: __metadata__ is not an object of strings", file);
        } else if (st_read(key, file, &t[(*n)++], e)) {
            return e->code;
        }
    }
    return st_place(t, *n, str_sub(text, 8 + (size_t)header, text.n), file, e);
}

/* model.safetensors.index.json to the list of its files, each once. Only plain names pass: no path leaves the folder. */
static int st_index_parse(str text, const char *where, arena *a, str **files, int *n, toka_err *e) {
    const json *o = mf_json(text, where, a, json_trusted, e), *map = json_get(o, "weight_map");
    *n = 0;
    if (!o) return e->code;
    if (!json_is(map, JSON_OBJECT)) return fail(e, TOKA_E_INPUT, "%s: there is no weight_map", where);
    *files = arena_alloc(a, ST_MAX_FILES * sizeof **files);
    JSON_MEMBERS(key, map) {
        const str name = json_str(key + 1);
        int i = *n - 1;
        while (i >= 0 && !str_eq((*files)[i], name)) i--;
        if (i >= 0) continue;
        if (!name.n || name.n > 255 || name.p[0] == '.' || memchr(name.p, '/', name.n) || memchr(name.p, 0, name.n) ||
            !str_ends(name, STR(".safetensors")))
            return fail(e, TOKA_E_INPUT, "%s: weight_map names \"%.*s\", expected a plain name that ends in .safetensors",
                        where, STRF(name));
        if (*n == ST_MAX_FILES) return fail(e, TOKA_E_INPUT, "%s: more than %d files", where, ST_MAX_FILES);
        (*files)[(*n)++] = name;
    }
    return 0;
}

/* ---- All tensors of a model by name: open addressing, at most half full ---- */

typedef struct st_set { /* heap; the tensors themselves are borrowed */
    const st_tensor **slot;
    size_t n, cap; /* cap: a power of two or 0 */
} st_set;

static void st_set_free(st_set *s) {
    free(s->slot);
    *s = (st_set){0};
}

/* Where `name` is, or where it would go. cap > n, so the walk ends. */
static const st_tensor **st_set_slot(const st_set *s, str name) {
    size_t i = hash_bytes(name.p, name.n) & (s->cap - 1);
    while (s->slot[i] && !str_eq(s->slot[i]->name, name)) i = (i + 1) & (s->cap - 1);
    return &s->slot[i];
}

static const st_tensor *st_set_get(const st_set *s, const char *name) {
    return s->cap ? *st_set_slot(s, str_c(name)) : NULL;
}

static int st_set_add(st_set *s, const st_tensor *t, toka_err *e) {
    if (s->n * 2 >= s->cap) {
        st_set old = *s;
        *s = (st_set){.n = old.n, .cap = MAX(old.cap * 2, (size_t)64)};
        s->slot = mem_zalloc(s->cap * sizeof *s->slot);
        for (size_t i = 0; i < old.cap; i++)
            if (old.slot[i]) *st_set_slot(s, old.slot[i]->name) = old.slot[i];
        st_set_free(&old);
    }
    const st_tensor **at = st_set_slot(s, t->name);
    if (*at && (*at)->file == t->file)
        return fail(e, TOKA_E_INPUT, "%s: %.*s is there twice", t->file, STRF(t->name));
    if (*at)
        return fail(e, TOKA_E_INPUT, "%.*s is in two files, %s and %s", STRF(t->name), (*at)->file, t->file);
    *at = t;
    s->n++;
    return 0;
}

/* ---- Binding: the names of a checkpoint, and the field and shape of each ---- */

typedef struct mf_slot {
    const char *suffix;      /* the name behind "model.layers.7." or "model." */
    size_t field;            /* offset of a toka_tensor in toka_layer, or in toka_weights */
    const char *rows, *cols; /* letters whose product it is; rows "": a vector, one dimension in the file */
    unsigned needs;          /* 0, or the feature that brings it */
} mf_slot;

static const mf_slot mf_layer_slots[] = {
    {"input_layernorm.weight", offsetof(toka_layer, attn_norm), "", "E", 0},
    {"self_attn.q_proj.weight", offsetof(toka_layer, q), "HD", "E", 0},
    {"self_attn.k_proj.weight", offsetof(toka_layer, k), "KD", "E", 0},
    {"self_attn.v_proj.weight", offsetof(toka_layer, v), "KD", "E", 0},
    {"self_attn.q_proj.bias", offsetof(toka_layer, q_bias), "", "HD", MF_QKV_BIAS},
    {"self_attn.k_proj.bias", offsetof(toka_layer, k_bias), "", "KD", MF_QKV_BIAS},
    {"self_attn.v_proj.bias", offsetof(toka_layer, v_bias), "", "KD", MF_QKV_BIAS},
    {"self_attn.q_norm.weight", offsetof(toka_layer, q_norm), "", "D", MF_QK_NORM},
    {"self_attn.k_norm.weight", offsetof(toka_layer, k_norm), "", "D", MF_QK_NORM},
    {"self_attn.o_proj.weight", offsetof(toka_layer, o), "E", "HD", 0},
    {"self_attn.o_proj.bias", offsetof(toka_layer, o_bias), "", "E", MF_O_BIAS},
    {"post_attention_layernorm.weight", offsetof(toka_layer, mlp_norm), "", "E", 0},
    {"mlp.gate_proj.weight", offsetof(toka_layer, gate), "F", "E", 0},
    {"mlp.up_proj.weight", offsetof(toka_layer, up), "F", "E", 0},
    {"mlp.down_proj.weight", offsetof(toka_layer, down), "E", "F", 0},
};
static const mf_slot mf_model_slots[] = {
    {"embed_tokens.weight", offsetof(toka_weights, embed), "V", "E", 0},
    {"norm.weight", offsetof(toka_weights, norm), "", "E", 0},
};
static const mf_slot mf_lm_head_slot = {"lm_head.weight", offsetof(toka_weights, lm_head), "V", "E", MF_LM_HEAD};

static int mf_product(const char *letters, const toka_shape *s) { /* "KD" -> K*D; "" -> 1 */
    int n = 1;
    for (; *letters; letters++) {
        switch (*letters) {
        case 'H': n *= s->H; break;
        case 'K': n *= s->K; break;
        case 'D': n *= s->D; break;
        case 'E': n *= s->E; break;
        case 'F': n *= s->F; break;
        default: n *= s->V;
        }
    }
    return n;
}

static int64_t mf_slot_size(const mf_slot *slot, const mf_config *c) { /* elements; 0 if the model does not have it */
    if (slot->needs & ~c->features) return 0;
    return (int64_t)mf_product(slot->rows, &c->shape) * mf_product(slot->cols, &c->shape);
}

/* Parameters of a model of this shape, a tied output matrix not counted again. */
static int64_t mf_n_parameters(const mf_config *c) {
    int64_t layer = 0, rest = mf_slot_size(&mf_lm_head_slot, c);
    for (int i = 0; i < COUNT(mf_layer_slots); i++) layer += mf_slot_size(&mf_layer_slots[i], c);
    for (int i = 0; i < COUNT(mf_model_slots); i++) rest += mf_slot_size(&mf_model_slots[i], c);
    return layer * c->shape.L + rest;
}

typedef struct mf_binder { /* what stays equal over all tensors of one mf_bind */
    const mf_config *c;
    const st_set *set;
    const char *where;
    toka_weights *w;
    int64_t n_parameters;
    size_t weight_bytes;
} mf_binder;

static void mf_dims_text(const int64_t *dims, int n, char z[64]) { /* "[4096,1024]" */
    if (n == 0) snprintf(z, 64, "[]");
    else if (n == 1) snprintf(z, 64, "[%lld]", (long long)dims[0]);
    else snprintf(z, 64, "[%lld,%lld%s]", (long long)dims[0], (long long)dims[1], n > 2 ? ",..." : "");
}

/* One name to one field; fields of `base`. */
static int mf_bind_one(mf_binder *b, const mf_slot *slot, const char *name, void *base, toka_err *e) {
    if (slot->needs & ~b->c->features) return 0;
    const st_tensor *t = st_set_get(b->set, name);
    if (!t) return fail(e, TOKA_E_INPUT, "%s: missing in %s", name, b->where);
    const int rows = mf_product(slot->rows, &b->c->shape), cols = mf_product(slot->cols, &b->c->shape);
    const int64_t want[2] = {*slot->rows ? rows : cols, cols};
    const int n_dims = *slot->rows ? 2 : 1;
    if (t->n_dims != n_dims || t->dims[0] != want[0] || (n_dims == 2 && t->dims[1] != want[1])) {
        char found[64], expected[64];
        mf_dims_text(t->dims, t->n_dims, found), mf_dims_text(want, n_dims, expected);
        return fail(e, TOKA_E_INPUT, "%s: %s, expected %s", name, found, expected);
    }
    if (t->dtype->toka < 0) return fail(e, TOKA_E_INPUT, "%s: dtype %s, expected BF16, F16 or F32", name, t->dtype->name);
    if ((uintptr_t)t->data % 2) return fail(e, TOKA_E_INPUT, "%s: begins at an odd byte of %s", name, t->file);
    *(toka_tensor *)((char *)base + slot->field) = (toka_tensor){t->data, (toka_dtype)t->dtype->toka, rows, cols};
    b->n_parameters += (int64_t)rows * cols;
    b->weight_bytes += t->end - t->begin;
    return 0;
}

/* Every tensor of the model by its name. A file that was saved from the bare transformer lacks the "model." in front. What
 * the tables do not name (rotary_emb.inv_freq of old files) is left alone. w->layers lives in `a`. */
static int mf_bind(mf_binder *b, arena *a, toka_err *e) {
    char name[128];
    int code;
    const char *prefix = st_set_get(b->set, "embed_tokens.weight") ? "" : "model.";
    *b->w = (toka_weights){.layers = arena_zalloc(a, (size_t)b->c->shape.L * sizeof *b->w->layers)};
    for (int i = 0; i < COUNT(mf_model_slots); i++) {
        snprintf(name, sizeof name, "%s%s", prefix, mf_model_slots[i].suffix);
        if ((code = mf_bind_one(b, &mf_model_slots[i], name, b->w, e)) != 0) return code;
    }
    for (int layer = 0; layer < b->c->shape.L; layer++) {
        for (int i = 0; i < COUNT(mf_layer_slots); i++) {
            snprintf(name, sizeof name, "%slayers.%d.%s", prefix, layer, mf_layer_slots[i].suffix);
            if ((code = mf_bind_one(b, &mf_layer_slots[i], name, &b->w->layers[layer], e)) != 0) return code;
        }
        b->w->layers[layer].window = b->c->window[layer];
    }
    /* A tied model has no lm_head.weight. If the file holds one all the same, transformers uses it when it differs from the
     * embedding; using it always is the same and reads nothing now. */
    mf_slot head = mf_lm_head_slot;
    if (st_set_get(b->set, head.suffix)) head.needs = 0;
    if ((code = mf_bind_one(b, &head, head.suffix, b->w, e)) != 0) return code;
    if (!b->w->lm_head.rows) b->w->lm_head = b->w->embed;
    return 0;
}

/* ---- models.txt: the known models, a line each, columns separated by spaces, "-" for none; # begins a comment ---- */

typedef struct mf_known {
    char *name, *hub_id;
    char *family;   /* of the chat template: llama3, chatml ...; "-" for a base model */
    char *verified; /* how the line was checked */
    mf_config config;
} mf_known;

enum { MF_COL_NAME, MF_COL_HUB, MF_COL_ARCH, MF_COL_DIMS /* mf_dims without max_len */, MF_COL_TIED = MF_COL_DIMS + MF_LEN,
       MF_COL_THETA, MF_COL_ROPE, MF_COL_EPS, MF_COL_LEN, MF_COL_EXTRAS, MF_COL_FAMILY, MF_COL_VERIFIED, MF_N_COLS };

/* Up to `most` numbers with commas between them; their count, or -1. */
static int mf_numbers(str s, double *out, int most) {
    int n = 0;
    for (size_t from = 0; from <= s.n; n++) {
        ptrdiff_t comma = str_find(s, STR(","), from);
        size_t to = comma < 0 ? s.n : (size_t)comma;
        char z[32], *end;
        if (n == most || to == from || to - from >= sizeof z || !isdigit((unsigned char)s.p[from])) return -1;
        memcpy(z, s.p + from, to - from);
        z[to - from] = 0;
        for (char *d = z; *d; d++)
            if (!isdigit((unsigned char)*d) && !strchr(".e-", *d)) return -1;
            else if (*d == '.') *d = *localeconv()->decimal_point;
        out[n] = strtod(z, &end);
        if (*end) return -1;
        from = to + 1;
    }
    return n;
}

/* "default", "linear:F", "llama3:F,LOW,HIGH,ORIGINAL", "yarn:F,ORIGINAL" */
static bool mf_known_rope(str s, mf_rope *r) {
    static const int n_numbers[] = {0, 1, 4, 2};
    double x[4] = {0};
    for (int kind = 0; kind < COUNT(mf_rope_names); kind++) {
        const str name = str_c(mf_rope_names[kind]);
        if (!str_starts(s, name)) continue;
        r->kind = (mf_rope_kind)kind;
        if (kind == MF_ROPE_DEFAULT) return s.n == name.n;
        if (s.n == name.n || s.p[name.n] != ':') return false;
        if (mf_numbers(str_sub(s, name.n + 1, s.n), x, 4) != n_numbers[kind]) return false;
        r->factor = x[0], r->beta_fast = 32, r->beta_slow = 1;
        r->original_len = kind == MF_ROPE_LLAMA3 ? x[3] : x[1];
        r->low_freq_factor = x[1], r->high_freq_factor = x[2];
        if (r->factor < 1e-3 || r->factor > 1e6) return false; /* the limits of mf_read_rope_scaling */
        if (kind == MF_ROPE_LLAMA3 && (x[1] < 1e-3 || x[2] > 1e6 || x[2] <= x[1])) return false;
        return kind == MF_ROPE_LINEAR || (r->original_len >= 1 && r->original_len <= 1 << 30);
    }
    return false;
}

/* "-", or of qkv_bias, o_bias, qk_norm and window=N those that apply, with commas between them. */
static bool mf_known_extras(str s, mf_config *c, double *window) {
    static const char *const names[] = {"qkv_bias", "o_bias", "qk_norm"};
    *window = 0;
    for (size_t from = 0; from <= s.n && !str_is(s, "-");) {
        ptrdiff_t comma = str_find(s, STR(","), from);
        str word = str_sub(s, from, comma < 0 ? s.n : (size_t)comma);
        from += word.n + 1;
        int i = 0;
        while (i < COUNT(names) && !str_is(word, names[i])) i++;
        if (i < COUNT(names)) c->features |= 1u << i;
        else if (!str_starts(word, STR("window=")) || mf_numbers(str_sub(word, 7, word.n), window, 1) != 1) return false;
    }
    return *window >= 0 && *window <= INT_MAX / 2;
}

/* The columns of one line to *k. `where`: "models.txt line 7". */
static int mf_known_read(const str col[MF_N_COLS], const char *where, arena *a, mf_known *k, toka_err *e) {
    mf_config *c = &k->config;
    double dim[MF_N_DIMS], theta, eps, window;
    int64_t dims[MF_N_DIMS];
    for (int i = 0; i < MF_N_DIMS; i++) {
        str s = col[i == MF_LEN ? MF_COL_LEN : MF_COL_DIMS + i];
        if (mf_numbers(s, &dim[i], 1) != 1 || dim[i] > 1e12 || dim[i] != floor(dim[i]))
            return fail(e, TOKA_E_INPUT, "%s: %s is \"%.*s\", expected a whole number", where, mf_dims[i].letter, STRF(s));
        dims[i] = (int64_t)dim[i];
    }
    c->arch = mf_arch_by_name(col[MF_COL_ARCH]);
    if (!c->arch) return fail(e, TOKA_E_INPUT, "%s: architecture %.*s is not supported", where, STRF(col[MF_COL_ARCH]));
    if (mf_set_dims(c, dims, where, e)) return e->code;
    if (!mf_known_rope(col[MF_COL_ROPE], &c->rope))
        return fail(e, TOKA_E_INPUT, "%s: rope is \"%.*s\", expected default, linear:F, llama3:F,LOW,HIGH,ORIGINAL or "
                    "yarn:F,ORIGINAL", where, STRF(col[MF_COL_ROPE]));
    if (mf_numbers(col[MF_COL_THETA], &theta, 1) != 1 || theta <= 1 || theta > 1e18)
        return fail(e, TOKA_E_INPUT, "%s: theta is \"%.*s\", expected a number over 1", where, STRF(col[MF_COL_THETA]));
    if (mf_numbers(col[MF_COL_EPS], &eps, 1) != 1 || eps > 1)
        return fail(e, TOKA_E_INPUT, "%s: eps is \"%.*s\", expected a number up to 1", where, STRF(col[MF_COL_EPS]));
    if (!mf_known_extras(col[MF_COL_EXTRAS], c, &window))
        return fail(e, TOKA_E_INPUT, "%s: extras are \"%.*s\", expected - or some of qkv_bias, o_bias, qk_norm, window=N",
                    where, STRF(col[MF_COL_EXTRAS]));
    if (!str_is(col[MF_COL_TIED], "tied") && !str_is(col[MF_COL_TIED], "untied"))
        return fail(e, TOKA_E_INPUT, "%s: \"%.*s\", expected tied or untied", where, STRF(col[MF_COL_TIED]));
    if (str_is(col[MF_COL_TIED], "untied")) c->features |= MF_LM_HEAD;
    c->rope.theta = theta;
    c->shape.eps = (float)eps;
    c->bos_id = -1;
    c->window = arena_alloc(a, (size_t)c->shape.L * sizeof *c->window);
    for (int i = 0; i < c->shape.L; i++) c->window[i] = (int)window;
    mf_finish_rope(c, a);
    k->name = arena_cstr(a, col[MF_COL_NAME]), k->hub_id = arena_cstr(a, col[MF_COL_HUB]);
    k->family = arena_cstr(a, col[MF_COL_FAMILY]), k->verified = arena_cstr(a, col[MF_COL_VERIFIED]);
    return 0;
}

/* Splits a line at spaces; the number of words, of which at most MF_N_COLS are stored. */
static int mf_split(str line, str col[MF_N_COLS]) {
    int n = 0;
    for (size_t i = 0; i < line.n;) {
        size_t from = i;
        while (i < line.n && !strchr(" \t\r", line.p[i] ? line.p[i] : 'x')) i++;
        if (i > from && n++ < MF_N_COLS) col[n - 1] = str_sub(line, from, i);
        if (i < line.n && i == from) i++;
    }
    return n;
}

/* The text of models.txt to a list of known models; everything lives in `a`. */
static int mf_models_parse(str text, arena *a, mf_known **list, int *n, toka_err *e) {
    size_t cap = 1;
    for (size_t i = 0; i < text.n; i++) cap += text.p[i] == '\n';
    mf_known *known = *list = arena_zalloc(a, cap * sizeof *known);
    *n = 0;
    *e = (toka_err){0};
    for (size_t from = 0, line = 1; from < text.n; line++) {
        ptrdiff_t newline = str_find(text, STR("\n"), from);
        str s = str_sub(text, from, newline < 0 ? text.n : (size_t)newline), col[MF_N_COLS];
        from += s.n + 1;
        ptrdiff_t comment = str_find(s, STR("#"), 0);
        if (comment >= 0) s.n = (size_t)comment;
        int n_cols = mf_split(s, col);
        char where[48];
        snprintf(where, sizeof where, "models.txt line %zu", line);
        if (!n_cols) continue;
        if (n_cols != MF_N_COLS) return fail(e, TOKA_E_INPUT, "%s: %d columns, expected %d", where, n_cols, MF_N_COLS);
        if (mf_known_read(col, where, a, &known[*n], e)) return e->code;
        for (int i = 0; i < *n; i++)
            if (strcasecmp(known[i].name, known[*n].name) == 0)
                return fail(e, TOKA_E_INPUT, "%s: %s is there twice", where, known[i].name);
        ++*n;
    }
    return 0;
}

/* ---- Finding: what the user called the model to a folder ---- */

/* Reads models.txt: the given file, else the one beside the program, else the one in the current folder, else no model. */
static int mf_models_open(const char *models_file, arena *a, mf_known **list, int *n, toka_err *e) {
    char path[PATH_MAX + 16];
    str text;
    *list = NULL;
    *n = 0;
    if (models_file) {
        snprintf(path, sizeof path, "%s", models_file);
    } else {
        ssize_t len = readlink("/proc/self/exe", path, PATH_MAX);
        while (len > 0 && path[len - 1] != '/') len--;
        strcpy(path + MAX(len, (ssize_t)0), "models.txt");
        if (len <= 0 || access(path, F_OK) != 0) strcpy(path, "models.txt");
        if (access(path, F_OK) != 0) return 0;
    }
    int code = os_map(path, &text, e);
    if (code) return code;
    code = mf_models_parse(text, a, list, n, e);
    os_unmap(text);
    return code;
}

/* The hub cache's folder, as huggingface_hub finds it. */
static void mf_hub_cache(buf *out) {
    static const char *const from[][2] = {{"HF_HUB_CACHE", ""}, {"HUGGINGFACE_HUB_CACHE", ""}, {"HF_HOME", "/hub"},
                                          {"XDG_CACHE_HOME", "/huggingface/hub"}, {"HOME", "/.cache/huggingface/hub"}};
    for (int i = 0; i < COUNT(from); i++) {
        const char *value = getenv(from[i][0]);
        if (!value || !*value) continue;
        buf_c(out, value), buf_c(out, from[i][1]);
        return;
    }
    buf_c(out, ".cache/huggingface/hub");
}

/* "org/name" or "name", of letters, digits and -_. with no part that begins with a dot. */
static bool mf_is_hub_id(str s) {
    int slashes = 0;
    for (size_t i = 0; i < s.n; i++) {
        bool first = i == 0 || s.p[i - 1] == '/';
        if (s.p[i] == '/') slashes++;
        else if (!isalnum((unsigned char)s.p[i]) && !strchr("-_.", s.p[i] ? s.p[i] : '/')) return false;
        if (first && (s.p[i] == '.' || s.p[i] == '/')) return false;
    }
    return s.n && s.n < 200 && slashes <= 1 && s.p[s.n - 1] != '/';
}

/* A hub id, or ID@REVISION, to the folder of its snapshot in the cache: models--org--name/snapshots/COMMIT, where
 * models--org--name/refs/REVISION holds the commit's name. *called: what the user typed, when that was not the id. */
static int mf_find_hub(const char *id, const char *called, char **folder, arena *a, toka_err *e) {
    const char *at = strchr(id, '@');
    const str repo = {id, at ? (size_t)(at - id) : strlen(id)}, rev = at ? str_c(at + 1) : STR("main");
    if (!mf_is_hub_id(repo) || !mf_is_hub_id(rev) || memchr(rev.p, '/', rev.n))
        return fail(e, TOKA_E_USE, "%s: no such folder, and not a hub id", id);
    buf path = {0}, cache = {0};
    mf_hub_cache(&cache);
    buf_printf(&path, "%s/models--", cache.p);
    for (size_t i = 0; i < repo.n; i++)
        if (repo.p[i] == '/') buf_c(&path, "--");
        else buf_char(&path, repo.p[i]);
    size_t root = path.n;
    buf_printf(&path, "/refs/%.*s", (int)rev.n, rev.p);
    str commit = rev, text = STR("");
    if (os_is_file(path.p) && os_map(path.p, &text, e) == 0) {
        commit = text;
        while (commit.n && isspace((unsigned char)commit.p[commit.n - 1])) commit.n--;
        if (!mf_is_hub_id(commit) || memchr(commit.p, '/', commit.n)) commit = rev;
    }
    path.n = root;
    buf_printf(&path, "/snapshots/%.*s", (int)commit.n, commit.p);
    os_unmap(text);
    *folder = os_is_dir(path.p) ? arena_cstr(a, buf_view(&path)) : NULL;
    if (!*folder)
        fail(e, TOKA_E_INPUT, "%s%s%s is not in the hub cache %s; get it with: hf download %.*s%s%s", called ? called : "",
             called ? ": " : "", id, cache.p, (int)repo.n, repo.p, at ? " --revision " : "", at ? at + 1 : "");
    buf_free(&path), buf_free(&cache);
    return *folder ? 0 : e->code;
}

/* Sets m->folder, m->name, m->hub_id. What exists as a path goes first; else what has a slash is a hub id, and what has
 * none a name of models.txt. */
static int mf_find(mf_model *m, const char *model, const char *models_file, toka_err *e) {
    struct stat st;
    bool there = stat(model, &st) == 0;
    int err = errno;
    str s = str_c(model);
    if (there && S_ISDIR(st.st_mode)) {
        char *real = realpath(model, NULL); /* "." and "models/x/" have a last part too */
        const char *last = real ? strrchr(real, '/') : NULL;
        m->name = arena_cstr(&m->a, last && last[1] ? str_c(last + 1) : s);
        m->folder = arena_cstr(&m->a, s);
        free(real);
        return 0;
    }
    if (there)
        return fail(e, TOKA_E_INPUT, "%s: not a folder; a model is a folder with config.json and model.safetensors", model);
    if (err != ENOENT && err != ENOTDIR) return fail(e, TOKA_E_INPUT, "%s: %s", model, strerror(err));
    if (strchr(model, '/')) { /* no name of models.txt has a slash */
        m->name = m->hub_id = arena_cstr(&m->a, s);
        return mf_find_hub(model, NULL, &m->folder, &m->a, e);
    }
    mf_known *known;
    int n;
    if (mf_models_open(models_file, &m->a, &known, &n, e)) return e->code;
    for (int i = 0; i < n; i++)
        if (strcasecmp(known[i].name, model) == 0) {
            m->name = known[i].name, m->hub_id = known[i].hub_id;
            return mf_find_hub(m->hub_id, m->name, &m->folder, &m->a, e);
        }
    return fail(e, TOKA_E_USE, "%s: no such folder, and no such name in models.txt (see: toka models)", model);
}

/* ---- Opening ---- */

static const mf_embedded *mf_embedded_find(const mf_embedded *f, const char *name) { /* NULL: not there */
    while (f->name && strcmp(f->name, name) != 0) f++;
    return f->name ? f : NULL;
}

/* A file of the model, mapped until mf_close. `where` gets its path, for messages. Not there and not required: {"",0}; an
 * empty one is an error. */
static int mf_file(mf_model *m, const char *name, bool required, char where[256], str *out, toka_err *e) {
    *out = STR("");
    if (m->embedded) {
        snprintf(where, 256, "embedded %s", name);
        const mf_embedded *f = mf_embedded_find(m->embedded, name);
        if (f) *out = (str){f->begin, (size_t)(f->end - f->begin)};
        if (f && !out->n) return fail(e, TOKA_E_INPUT, "%s: the file is empty", where);
        return f || !required ? 0 : fail(e, TOKA_E_INPUT, "%s: no such file", where);
    }
    buf path = {0};
    struct stat st;
    buf_printf(&path, "%s/%s", m->folder, name);
    snprintf(where, 256, "%s", path.n < 200 ? path.p : name);
    int code = 0;
    bool wanted = required || lstat(path.p, &st) == 0 || errno != ENOENT;
    if (wanted) code = os_map(path.p, out, e);
    if (wanted && !code && !out->n) code = fail(e, TOKA_E_INPUT, "%s: the file is empty", where);
    if (!code && out->n) {
        m->maps = mem_realloc(m->maps, (size_t)(m->n_maps + 1) * sizeof *m->maps);
        m->maps[m->n_maps++] = *out;
    }
    buf_free(&path);
    return code;
}

static int mf_open_configs(mf_model *m, toka_err *e) {
    char where[256];
    str text;
    if (mf_file(m, "config.json", true, where, &text, e)) return e->code;
    if (mf_config_parse(text, where, &m->a, &m->config, e)) return e->code;
    if (mf_file(m, "generation_config.json", false, where, &text, e)) return e->code;
    if (text.n && mf_generation_parse(text, where, &m->a, &m->config, &m->defaults, e)) return e->code;
    if (mf_file(m, "tokenizer.json", false, where, &m->tokenizer_json, e)) return e->code;
    if (mf_file(m, "tokenizer_config.json", false, where, &m->tokenizer_config, e)) return e->code;
    if (m->tokenizer_config.n && mf_tokenizer_config_parse(m->tokenizer_config, where, &m->a, m, e)) return e->code;
    if (mf_file(m, "chat_template.jinja", false, where, &text, e)) return e->code;
    if (text.n) m->chat_template = text;
    const mf_config *c = &m->config;
    snprintf(m->architecture, sizeof m->architecture, "%s", c->arch->name);
    m->shape = c->shape;
    m->bos_id = c->bos_id, m->eos_ids = c->eos_ids, m->n_eos_ids = c->n_eos_ids;
    return 0;
}

/* Maps one weight file and adds its tensors to the set; headers live in tmp. */
static int mf_open_shard(mf_model *m, const char *name, st_set *set, arena *tmp, toka_err *e) {
    char where[256];
    str text;
    st_tensor *t;
    int n;
    if (mf_file(m, name, true, where, &text, e)) return e->code;
    if (st_parse(text, arena_cstr(tmp, str_c(where)), tmp, &t, &n, e)) return e->code;
    for (int i = 0; i < n; i++)
        if (st_set_add(set, &t[i], e)) return e->code;
    return 0;
}

static bool mf_has(const mf_model *m, const char *name) { /* a file, or something in its place that will be an error */
    struct stat st;
    if (m->embedded) return mf_embedded_find(m->embedded, name) != NULL;
    buf path = {0};
    buf_printf(&path, "%s/%s", m->folder, name);
    bool has = lstat(path.p, &st) == 0;
    buf_free(&path);
    return has;
}

/* All tensors of model.safetensors, or of the files that the index names. */
static int mf_open_shards(mf_model *m, st_set *set, arena *tmp, toka_err *e) {
    static const char one[] = "model.safetensors", index[] = "model.safetensors.index.json";
    char where[256];
    str text, *files;
    int n;
    if (mf_has(m, one)) return mf_open_shard(m, one, set, tmp, e);
    if (!mf_has(m, index))
        return fail(e, TOKA_E_INPUT, "%s: there is no %s and no %s%s%s%s", m->folder ? m->folder : "embedded", one, index,
                    mf_has(m, "pytorch_model.bin") ? "; pytorch_model.bin is not read" : "",
                    m->hub_id ? "; get them with: hf download " : "", m->hub_id ? m->hub_id : "");
    if (mf_file(m, index, true, where, &text, e)) return e->code;
    if (st_index_parse(text, where, tmp, &files, &n, e)) return e->code;
    for (int i = 0; i < n; i++)
        if (mf_open_shard(m, arena_cstr(tmp, files[i]), set, tmp, e)) return e->code;
    return 0;
}

static int mf_open_weights(mf_model *m, toka_err *e) {
    arena tmp = {0};
    st_set set = {0};
    mf_binder b = {.c = &m->config, .set = &set, .where = m->folder ? m->folder : "the embedded model", .w = &m->weights};
    int code = mf_open_shards(m, &set, &tmp, e);
    if (!code) code = mf_bind(&b, &m->a, e);
    m->n_parameters = b.n_parameters, m->weight_bytes = b.weight_bytes;
    st_set_free(&set);
    arena_free(&tmp);
    return code;
}

static void mf_close(mf_model *m) {
    if (!m) return;
    for (int i = 0; i < m->n_maps; i++) os_unmap(m->maps[i]);
    free(m->maps);
    arena_free(&m->a);
    free(m);
}

/* Opens what `model` names; NULL: the embedded model. models_file: models.txt, NULL: beside the program or here. *out is
 * the caller's until mf_close. */
static int mf_open(mf_model **out, const char *model, const char *models_file, const mf_embedded *embedded, toka_err *e) {
    mf_model *m = *out = mem_zalloc(sizeof *m);
    int code = 0;
    m->tokenizer_json = m->tokenizer_config = m->chat_template = STR("");
    m->config.bos_id = m->bos_id = -1;
    m->defaults = mf_no_defaults;
    if (model) code = mf_find(m, model, models_file, e);
    else if (embedded && embedded->name) m->embedded = embedded, m->name = arena_cstr(&m->a, STR("embedded"));
    else code = fail(e, TOKA_E_USE, "no model given, and none is embedded in this program");
    if (!code) code = mf_open_configs(m, e);
    if (!code) code = mf_open_weights(m, e);
    if (!code) return 0;
    mf_close(m);
    *out = NULL;
    return code;
}

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
